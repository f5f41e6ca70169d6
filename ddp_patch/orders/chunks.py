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
        taken: How many of the first items are left out: they are drawn, unless ``first`` says that the iterator comes
            after them.
        first: The stream's first items, which padding may repeat, if the iterator comes after those that are left out.
        step: How many rounds, of one item for each rank, make a step. Each chunk has some whole steps.
        rounds: How many rounds each chunk has. None lets them grow. The first is one step, so that the first batch
            comes at once; each has twice as many as the one before, up to ``MOST_AHEAD`` samples, or ``MOST_PLAIN`` in
            a long stream of indices. An index is one sample. A round of batches counts as many as the largest that was
            looked at: the first of each chunk.
        adapts: Returns whether the next chunk may have one step alone, because somebody changes what draws within the
            pass. It is asked before each chunk but the first, and told how many steps the one before had.
        copies: Whether to copy the items that are kept, because their source may change them later.
        digest: Is told all items; None if nobody compares them.

    Attributes:
        first: The stream's first items, which padding repeats; at most one less than there are ranks.
    """

    def __init__(
        self,
        iterator: Iterator[T],
        random_context: Callable[[], AbstractContextManager[object]],
        plan: Plan,
        *,
        taken: int = 0,
        first: list[T] | None = None,
        step: int = 1,
        rounds: Iterator[int] | None = None,
        adapts: Callable[[int], bool] | None = None,
        copies: bool = True,
        digest: "Digest | None" = None,
    ) -> None:
        self._random_context, self._plan, self._rounds, self._digest = random_context, plan, rounds, digest
        self._left = repeat(True, sys.maxsize)
        self._items: Iterator[Any] = compress(iterator, self._left)  # no faster way to count
        self._copies, self._step, self._adapts = copies, step, adapts
        self._taken, self._to_skip = taken, taken if first is None else 0
        # What the rounds that were looked at have shown: whether they have indices or lists of these, and how many
        # samples the largest has.
        self._is_plain = False
        self._samples = plan.num_replicas
        self._next_rounds = step if rounds is None else next(rounds)
        self._kept: list[Any] = []  # of the present chunk
        self._is_first = True  # whether no chunk was drawn
        self._steps_before = 0  # that the latest chunk had
        self.first: list[T] = [] if first is None else first[: plan.num_replicas - 1]
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

    def skip(self) -> None:
        """Draw the items that are left out, if they were not drawn yet."""
        most = self._plan.num_replicas - 1
        while self._to_skip and not self._is_ended:
            size = min(self._to_skip, MOST_AHEAD)
            with self._random_context():
                items = self._draw_all(size, copy_item if self._copies else None)
            self._kept = []
            self.first += items[: max(0, most - len(self.first))]
            self._to_skip -= len(items)

    def pass_through(self, noting: Callable[[Iterator[T]], Iterator[T]]) -> None:
        """Let the items that are drawn from now on pass through an iterator that notes them."""
        self._items = noting(self._items)

    def _chunk(self) -> Chunk[T]:
        """Draw a chunk; raise StopIteration if there is none, or what the stream raised."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self.skip()
        if self._is_ended:
            raise StopIteration
        ranks, start = self._plan.num_replicas, self._drawn
        if not self._is_first and self._adapts is not None and self._adapts(self._steps_before):
            self._rounds, self._next_rounds = repeat(self._step), self._step
        size = self._next_rounds * ranks
        self._steps_before = self._next_rounds // self._step
        self._kept = list[T]()
        with self._random_context():
            try:  # keep what comes before an exception
                if self._copies and (self._is_first or size > ranks):
                    self._inspect_round()
                    size = min(size, max(self._step, self._rounds_ahead()) * ranks)
                self._draw(start + size - self._drawn)
            except Exception as error:  # noqa: BLE001 - the user's own, raised where it came
                self._failure = error
        length = self._drawn - start
        if self._failure is not None:
            self._is_ended = True
            length -= length % ranks  # an incomplete round would mean the end
        if length < size:
            del self._kept[len(range(length)[self._of_rank(length)]) :]
        self._is_first = False
        more = 2 * self._next_rounds if self._rounds is None else next(self._rounds)
        self._next_rounds = self._in_steps(min(more, self._rounds_ahead())) if self._rounds is None else more
        return Chunk(length, self._kept) if length else self._chunk()

    def _in_steps(self, rounds: int) -> int:
        """Return the whole steps within some rounds; at least one."""
        return max(1, rounds // self._step) * self._step

    @property
    def begins_at(self) -> int:
        """How many items came before the first chunk: those that are left out, as far as the stream had them."""
        return self._taken - self._to_skip

    def _of_rank(self, size: int) -> slice:
        """Return which of some items to keep."""
        return slice(None) if self._is_first else self._plan.slice_of_chunk(size)

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
        self._samples = max(self._samples, sum(length_hint(item, 1) or 1 for item in items))

    def _draw(self, size: int) -> None:
        """Draw this many items, keep a part of them, and let the digest take note of all."""
        if self._digest is None:
            self._take(size)
        else:
            self._draw_all(size, copy_item if self._copies else None)

    def _draw_all(self, size: int, copied: Callable[[Any], Any] | None) -> list[Any]:
        """Draw this many items, keep a part of them, let the digest take note of all, and return all.

        Args:
            size: How many.
            copied: Copies each as it comes, because its source may change it later; None to take it as it is.
        """
        items = list[Any]()
        if self._is_ended or size <= 0:
            return items
        drawn = islice(self._items, size)
        try:
            items.extend(drawn if copied is None else map(copied, drawn))
        finally:  # what came before an exception is kept, too
            self._kept += items[self._of_rank(size)]
            if self._digest is not None:
                self._digest.add(items)
        self._is_ended = len(items) < size
        return items

    def _take(self, size: int) -> None:
        """Draw this many items and keep a part of them; those that are not kept are not copied."""
        if self._is_ended:
            return
        before = self._drawn
        first, last, step = self._of_rank(size).indices(size)
        items = islice(self._items, first, last, step)
        self._kept.extend(map(copy_item, items) if self._copies else items)
        if last < size:
            deque(islice(self._items, size - last), maxlen=0)
        self._is_ended = self._drawn - before < size


def split_chunks(plan: Plan, drawn: Drawn[T], on_end: Callable[[int], None]) -> Iterator[list[T]]:
    """Yield a rank's items of a stream, chunk by chunk, then their padding. The end is found, not predicted.

    Args:
        plan: Which positions are the rank's.
        drawn: The stream, in chunks.
        on_end: Called with the number of items that the stream has: before any padding, and before the items of an
            incomplete round, so that every rank knows the end when some come to it.
    """
    repeatable, came, ended = plan.num_replicas - 1, 0, False
    for count, items in drawn:
        first = drawn.first
        first += items[: max(0, repeatable - len(first))]
        came += count
        if ended := count % plan.num_replicas > 0:
            on_end(drawn.begins_at + came)
        yield items if len(items) < count else items[plan.slice_of_chunk(count)]
    length = drawn.begins_at + came
    if not ended:
        on_end(length)
    yield [drawn.first[position % length] for position in plan.padding(length, drawn.begins_at)]


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
