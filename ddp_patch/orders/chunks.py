"""Take a stream apart in chunks, and draw ahead of what is asked for."""

import copy
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from enum import IntEnum
from itertools import compress, islice, repeat
from operator import length_hint
from types import WrapperDescriptorType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from ddp_patch.positions_and_padding import Plan

if TYPE_CHECKING:
    from ddp_patch.orders.digest import Digest

__all__ = [
    "MOST_AHEAD",
    "MOST_PLAIN",
    "Chunk",
    "ReadAhead",
    "State",
    "copied_items",
    "copy_item",
    "draw",
    "returns_itself",
    "split_chunks",
    "start_iterating",
]


T = TypeVar("T")

# About how many samples may be drawn ahead of the one in use, unless a round has more. Large chunks swap random states
# less often, but a sampler that adapts during training must not be drawn far ahead.
MOST_AHEAD = 8192
# For plain indices, or lists of them, draw up to 1/64 of what was drawn before, at most 65536, so that one chunk takes
# little of the stream's time.
MOST_PLAIN, _PART_AHEAD = 65536, 64
_IMMUTABLE = (int, float, str, bytes, np.generic)


def returns_itself(iterator: object) -> bool:
    """Return whether ``iter(iterator)`` surely does nothing: it is written in C, as a generator's or a list's is."""
    return isinstance(getattr(type(iterator), "__iter__", None), WrapperDescriptorType)


def start_iterating(iterable: Iterable[T]) -> Iterator[T]:
    """Begin an iterable, and return what draws from it by ``next()`` alone.

    ``for``, ``islice`` and ``chain`` call ``iter()`` on what they draw from, and a sampler that is its own iterator may
    start again at every such call: each of lhotse's does.
    """
    iterator = iter(iterable)
    return iterator if returns_itself(iterator) else _by_next(iterator)


def _by_next(iterator: Iterator[T]) -> Iterator[T]:
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


# Tells which of some items to keep, by the position of the first and their number.
Selection: TypeAlias = Callable[[int, int], slice]


class Chunk(NamedTuple, Generic[T]):
    """Items that were drawn at once.

    Attributes:
        length: How many were drawn.
        items: All of them, or those alone that are kept.
    """

    length: int
    items: list[T]


def draw(
    iterator: Iterator[T],
    random_context: Callable[[], AbstractContextManager[object]],
    *,
    round_size: int,
    ahead: bool = False,
    rounds: Iterable[int] = repeat(1),
    copies: bool = True,
    selection: Selection = lambda _start, _size: slice(None),
    digest: "Digest | None" = None,
) -> Iterator[Chunk[T]]:
    """Yield the iterator's items in chunks, entering what ``random_context`` returns while drawing each.

    Every chunk's length is a multiple of ``round_size``, except that the last may be shorter; none is empty. Chunks
    depend only on the stream, so every rank draws the same ones at the same step.

    Args:
        iterator: What to draw from, as ``start_iterating`` returns it. If it raises an exception, the whole rounds
            that came before are yielded first, and then the exception is raised unchanged.
        random_context: Returns what to enter for each chunk.
        round_size: Items in a round: one for each rank.
        ahead: Whether chunks may grow. The first is one round, so that the first batch comes at once; each has twice
            as many as the one before, up to ``MOST_AHEAD`` samples, or ``MOST_PLAIN`` in a long stream of indices. An
            index is one sample. A round of batches counts as many as the largest that was looked at: the first of
            each chunk.
        rounds: How many rounds each chunk has, where they may not grow.
        copies: Whether to copy the items that are kept, because their source may change them later.
        selection: Tells which of some items to keep, by the position of the first and their number.
        digest: Is told all items; None if nobody compares them.
    """
    source = _CountingIterator(iterator, round_size, selection, digest, copies=copies)
    sizes = iter(rounds)
    now = 1 if ahead else next(sizes)
    while not source.is_ended:
        start, size = source.drawn, now * round_size
        items = source.kept = list[T]()
        failure: Exception | None = None
        with random_context():
            try:  # keep what comes before an exception
                if source.copies and (not start or (size > round_size and not source.takes_lists)):
                    source.inspect_round()
                    size = min(size, source.rounds_ahead() * round_size)
                source.draw(start + size - source.drawn)
            except Exception as error:  # noqa: BLE001 - the user's own, raised again below
                failure = error
        length = source.drawn - start
        if failure is not None:
            length -= length % round_size  # an incomplete round would mean the end
        if length < size:
            del items[len(range(length)[selection(start, length)]) :]
        if length:
            yield Chunk(length, items)
        if failure is not None:
            raise failure
        now = min(2 * now, source.rounds_ahead()) if ahead else next(sizes)


def split_chunks(
    plan: Plan, chunks: Iterable[Chunk[T]], on_end: Callable[[int], None], skipped: Chunk[T] | None = None
) -> Iterator[list[T]]:
    """Yield a rank's items of a stream, chunk by chunk, then their padding. The end is found, not predicted.

    Args:
        plan: Which positions are the rank's.
        chunks: The stream, in chunks of whole rounds; only the last may be shorter. The first has all its items; others
            may have the rank's alone.
        on_end: Called with the number of items that came: before any padding, and before the items of an incomplete
            round, so that every rank knows the end when some come to it.
        skipped: The rounds that came before, if any; with those items alone that padding may repeat.
    """
    repeatable = plan.num_replicas - 1  # padding repeats the stream's first items, and never more than these
    first: list[T] = [] if skipped is None else skipped.items[:repeatable]
    drawn, ended = 0 if skipped is None else skipped.length, False
    for count, items in chunks:
        first += items[: repeatable - len(first)]
        drawn += count
        if ended := count % plan.num_replicas > 0:
            on_end(drawn)
        yield items if len(items) < count else items[plan.slice_of_chunk(count)]
    if not ended:
        on_end(drawn)
    yield [first[position % drawn] for position in plan.padding(drawn)]


class ReadAhead(Iterator[Chunk[T]]):
    """An iterator over chunks that can read on before it is asked to.

    Args:
        chunks: The chunks.
    """

    def __init__(self, chunks: Iterator[Chunk[T]]) -> None:
        self._chunks = chunks
        self._read: deque[Chunk[T]] = deque()
        self._failure: list[Exception] = []

    def __next__(self) -> Chunk[T]:
        if not self._read and self._failure:
            raise self._failure.pop()
        return self._read.popleft() if self._read else next(self._chunks)

    def ends_within(self, plan: Plan, most: int) -> bool:
        """Read more, and return whether at most this many rounds come. An incomplete round that is left out is none."""
        while not self._failure and sum(plan.largest_share(chunk.length) for chunk in self._read) <= most:
            try:
                self._read.append(next(self._chunks))
            except StopIteration:
                return True
            except Exception as error:  # noqa: BLE001 - the user's own, raised where it came
                self._failure.append(error)
        return False


class _CountingIterator:
    """Draws from an iterator, counts, and keeps a part.

    Attributes:
        copies: Whether the items that are kept are copied.
        is_ended: Whether the iterator has no more items.
        kept: What is kept of the present chunk.
        takes_lists: Whether a digest is told all items, and these are lists of indices.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        round_size: int,
        selection: Selection,
        digest: "Digest | None",
        *,
        copies: bool,
    ) -> None:
        self.copies: bool = copies
        self.is_ended: bool = False
        self.kept: list[Any] = []
        self._selection, self._digest = selection, digest
        self._round_size = self._samples = round_size  # samples: in the largest round that was looked at
        self._is_plain = False
        self.takes_lists: bool = False
        self._left = repeat(True, sys.maxsize)
        self._items: Iterator[Any] = compress(iterator, self._left)  # no faster way to count

    @property
    def drawn(self) -> int:
        """How many items were drawn."""
        return sys.maxsize - length_hint(self._left)

    def rounds_ahead(self) -> int:
        """Return how many rounds may be drawn at once."""
        before = self.drawn // self._round_size // _PART_AHEAD if self._is_plain else 0
        return max(1, MOST_AHEAD // self._samples, min(before, MOST_PLAIN // self._samples))

    def inspect_round(self) -> None:
        """Draw a round. What all of it shows, every rank learns alike."""
        are_lazy: list[bool] = []

        def copied(item: Any) -> Any:
            are_lazy.append(isinstance(item, Iterator))
            return copy_item(item)

        items = self._draw_all(self._round_size, copied)
        if any(are_lazy):  # read them all from now on: several may draw from the same source
            self._items = map(copy_item, self._items)
        self.copies = not (items and isinstance(items[0], _IMMUTABLE))  # a stream of indices needs no copies
        first = (item[0] if type(item) is list and item else item for item in items)
        self._is_plain = all(isinstance(index, int | np.integer) for index in first)
        are_lists = self._is_plain and {list}.issuperset(map(type, items))
        self.takes_lists = are_lists and self.copies and self._digest is not None
        self._samples = max(self._samples, sum(length_hint(item, 1) or 1 for item in items))

    def draw(self, size: int) -> None:
        """Draw this many items, keep a part of them, and let the digest take note of all."""
        if self._digest is None:
            self._take(size)
        elif self.takes_lists:
            items = self._draw_all(size, tuple, list)  # copied in C, for the digest too
            self._samples = max(self._samples, self._round_size * max(map(len, items), default=0))
        else:
            self._draw_all(size, copy_item if self.copies else None)

    def _draw_all(
        self, size: int, copied: Callable[[Any], Any] | None, made: Callable[[Any], Any] | None = None
    ) -> list[Any]:
        """Draw this many items, keep a part of them, let the digest take note of all, and return all.

        Args:
            size: How many.
            copied: Copies each as it comes, because its source may change it later; None to take it as it is.
            made: Makes what is kept of these.
        """
        start, items = self.drawn, list[Any]()
        if self.is_ended or size <= 0:
            return items
        drawn = islice(self._items, size)
        try:
            items.extend(drawn if copied is None else map(copied, drawn))
        finally:  # what came before an exception is kept, too
            mine = items[self._selection(start, size)]
            self.kept += mine if made is None else map(made, mine)
            if self._digest is not None:
                self._digest.add(items)
        self.is_ended = len(items) < size
        return items

    def _take(self, size: int) -> None:
        """Draw this many items and keep a part of them; those that are not kept are not copied."""
        if self.is_ended:
            return
        before = self.drawn
        first, last, step = self._selection(before, size).indices(size)
        items = islice(self._items, first, last, step)
        self.kept.extend(map(copy_item, items) if self.copies else items)
        if last < size:
            deque(islice(self._items, size - last), maxlen=0)
        self.is_ended = self.drawn - before < size


def copied_items(stream: Iterator[T]) -> Iterator[T]:
    """Yield copies of a stream's items; the items themselves where the first one shows that they are indices."""
    first = list(islice(stream, 1))
    yield from map(copy_item, first)
    yield from stream if first and isinstance(first[0], _IMMUTABLE) else map(copy_item, stream)


def copy_item(item: Any) -> Any:
    """Return a copy of a batch or key, because its sampler may reuse the object for the next one.

    Copy containers with their contents, clone tensors, read iterators into lists; return anything else as it is.
    """
    if type(item) is list and item and isinstance(item[0], _IMMUTABLE) and isinstance(item[-1], _IMMUTABLE):
        return item[:]  # most batches hold plain indices: don't look at each
    match item:
        case torch.Tensor():
            return item.clone()
        case Iterator():
            return [copy_item(part) for part in item]
        case list() if type(item) is list:
            return [copy_item(part) for part in item]
        case tuple() if type(item) is tuple:
            return tuple(map(copy_item, item))
        case dict() if type(item) is dict:
            return {key: copy_item(value) for key, value in item.items()}
        case list() | dict() | set() | bytearray() | deque() | array() | np.ndarray():
            return copy.copy(item)
    return item


class State(IntEnum):
    """The states of a pass. Ranks tell each other its number."""

    NEW = 4  # nothing was asked for
    RUNNING = 0
    LEFT = 1  # broken off: nobody asks for more
    ENDED = 2  # the end was seen
    FAILED = 3  # the loop was given an error instead of a batch
