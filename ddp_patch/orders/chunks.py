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
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from ddp_patch.positions_and_padding import Plan

if TYPE_CHECKING:
    from ddp_patch.orders.digest import Digest

__all__ = [
    "MOST_AHEAD",
    "MOST_PLAIN",
    "Chunk",
    "Drawn",
    "State",
    "copied_items",
    "copy_item",
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


class Chunk(NamedTuple, Generic[T]):
    """Items that were drawn at once.

    Attributes:
        length: How many were drawn.
        items: All of them, or those alone that are kept.
    """

    length: int
    items: list[T]


class Drawn(Iterator[Chunk[T]]):
    """Draws a stream in chunks, and keeps all of the first one, which padding repeats, and of others a rank's items.

    Every chunk's length is a multiple of the number of ranks, except that the last may be shorter; none is empty.
    Chunks depend only on the stream, so every rank draws the same ones at the same step. If the stream raises an
    exception, the whole rounds that came before are given first, and then the exception is raised unchanged.

    Args:
        iterator: What to draw from, as ``start_iterating`` returns it.
        random_context: Returns what to enter while a chunk is drawn.
        plan: Which positions are the rank's.
        rounds: How many rounds, of one item for each rank, each chunk has. None lets them grow. The first is one round,
            so that the first batch comes at once; each has twice as many as the one before, up to ``MOST_AHEAD``
            samples, or ``MOST_PLAIN`` in a long stream of indices. An index is one sample. A round of batches counts as
            many as the largest that was looked at: the first of each chunk.
        copies: Whether to copy the items that are kept, because their source may change them later.
        digest: Is told all items; None if nobody compares them.
    """

    def __init__(
        self,
        iterator: Iterator[T],
        random_context: Callable[[], AbstractContextManager[object]],
        plan: Plan,
        *,
        rounds: Iterator[int] | None = None,
        copies: bool = True,
        digest: "Digest | None" = None,
    ) -> None:
        self._random_context, self._plan, self._rounds, self._digest = random_context, plan, rounds, digest
        self._left = repeat(True, sys.maxsize)
        self._items: Iterator[Any] = compress(iterator, self._left)  # no faster way to count
        self._copies = copies
        # What the rounds that were looked at have shown: whether they have indices or lists of these, whether a digest
        # is told such lists, and how many samples the largest has.
        self._is_plain = self._takes_lists = False
        self._samples = plan.num_replicas
        self._next_rounds = 1 if rounds is None else next(rounds)
        self._kept: list[Any] = []  # of the present chunk
        self._is_ended = False
        self._failure: Exception | None = None
        self._ahead: deque[Chunk[T]] = deque()

    @property
    def _drawn(self) -> int:
        """How many items were drawn."""
        return sys.maxsize - length_hint(self._left)

    def __next__(self) -> Chunk[T]:
        return self._ahead.popleft() if self._ahead else self._chunk()

    def ends_within(self, most: int) -> bool:
        """Draw more, and return whether at most this many rounds come. An incomplete round that is left out is none."""
        while not self._failure and sum(self._plan.largest_share(chunk.length) for chunk in self._ahead) <= most:
            try:
                self._ahead.append(self._chunk())
            except StopIteration:
                return True
            except Exception as error:  # noqa: BLE001 - the user's own, raised where it came
                self._failure = error
        return False

    def _chunk(self) -> Chunk[T]:
        """Draw a chunk; raise StopIteration if there is none, or what the stream raised."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self._is_ended:
            raise StopIteration
        ranks, start = self._plan.num_replicas, self._drawn
        size = self._next_rounds * ranks
        self._kept = list[T]()
        with self._random_context():
            try:  # keep what comes before an exception
                if self._copies and (not start or (size > ranks and not self._takes_lists)):
                    self._inspect_round()
                    size = min(size, self._rounds_ahead() * ranks)
                self._draw(start + size - self._drawn)
            except Exception as error:  # noqa: BLE001 - the user's own, raised where it came
                self._failure = error
        length = self._drawn - start
        if self._failure is not None:
            self._is_ended = True
            length -= length % ranks  # an incomplete round would mean the end
        if length < size:
            del self._kept[len(range(length)[self._of_rank(start, length)]) :]
        self._next_rounds = (
            min(2 * self._next_rounds, self._rounds_ahead()) if self._rounds is None else next(self._rounds)
        )
        return Chunk(length, self._kept) if length else self._chunk()

    def _of_rank(self, start: int, size: int) -> slice:
        """Return which of some items to keep, by the position of the first and their number."""
        return self._plan.slice_of_chunk(size) if start else slice(None)

    def _rounds_ahead(self) -> int:
        """Return how many rounds may be drawn at once."""
        before = self._drawn // self._plan.num_replicas // _PART_AHEAD if self._is_plain else 0
        return max(1, MOST_AHEAD // self._samples, min(before, MOST_PLAIN // self._samples))

    def _inspect_round(self) -> None:
        """Draw a round. What all of it shows, every rank learns alike."""
        are_lazy: list[bool] = []

        def copied(item: Any) -> Any:
            are_lazy.append(isinstance(item, Iterator))
            return copy_item(item)

        items = self._draw_all(self._plan.num_replicas, copied)
        if any(are_lazy):  # read them all from now on: several may draw from the same source
            self._items = map(copy_item, self._items)
        self._copies = not (items and isinstance(items[0], _IMMUTABLE))  # a stream of indices needs no copies
        first = (item[0] if type(item) is list and item else item for item in items)
        self._is_plain = all(isinstance(index, int | np.integer) for index in first)
        are_lists = self._is_plain and {list}.issuperset(map(type, items))
        self._takes_lists = are_lists and self._copies and self._digest is not None
        self._samples = max(self._samples, sum(length_hint(item, 1) or 1 for item in items))

    def _draw(self, size: int) -> None:
        """Draw this many items, keep a part of them, and let the digest take note of all."""
        if self._digest is None:
            self._take(size)
        elif self._takes_lists:
            items = self._draw_all(size, tuple, list)  # copied in C, for the digest too
            self._samples = max(self._samples, self._plan.num_replicas * max(map(len, items), default=0))
        else:
            self._draw_all(size, copy_item if self._copies else None)

    def _draw_all(
        self, size: int, copied: Callable[[Any], Any] | None, made: Callable[[Any], Any] | None = None
    ) -> list[Any]:
        """Draw this many items, keep a part of them, let the digest take note of all, and return all.

        Args:
            size: How many.
            copied: Copies each as it comes, because its source may change it later; None to take it as it is.
            made: Makes what is kept of these.
        """
        start, items = self._drawn, list[Any]()
        if self._is_ended or size <= 0:
            return items
        drawn = islice(self._items, size)
        try:
            items.extend(drawn if copied is None else map(copied, drawn))
        finally:  # what came before an exception is kept, too
            mine = items[self._of_rank(start, size)]
            self._kept += mine if made is None else map(made, mine)
            if self._digest is not None:
                self._digest.add(items)
        self._is_ended = len(items) < size
        return items

    def _take(self, size: int) -> None:
        """Draw this many items and keep a part of them; those that are not kept are not copied."""
        if self._is_ended:
            return
        before = self._drawn
        first, last, step = self._of_rank(before, size).indices(size)
        items = islice(self._items, first, last, step)
        self._kept.extend(map(copy_item, items) if self._copies else items)
        if last < size:
            deque(islice(self._items, size - last), maxlen=0)
        self._is_ended = self._drawn - before < size


def split_chunks(
    plan: Plan, chunks: Iterable[Chunk[T]], on_end: Callable[[int], None], skipped: int = 0
) -> Iterator[list[T]]:
    """Yield a rank's items of a stream, chunk by chunk, then their padding. The end is found, not predicted.

    Args:
        plan: Which positions are the rank's.
        chunks: The stream, in chunks of whole rounds; only the last may be shorter. The first has all its items; others
            may have the rank's alone.
        on_end: Called with the number of items that came: before any padding, and before the items of an incomplete
            round, so that every rank knows the end when some come to it.
        skipped: How many items came before, in whole rounds.
    """
    repeatable = plan.num_replicas - 1  # padding repeats the first items that come, and never more than these
    first, drawn, ended = list[T](), skipped, False
    for count, items in chunks:
        first += items[: repeatable - len(first)]
        drawn += count
        if ended := count % plan.num_replicas > 0:
            on_end(drawn)
        yield items if len(items) < count else items[plan.slice_of_chunk(count)]
    if not ended:
        on_end(drawn)
    yield [first[position % drawn % len(first)] for position in plan.padding(drawn)]


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
