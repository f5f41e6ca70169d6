"""Draw a stream in chunks, ahead of the items that are asked for."""

import copy
import sys
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import compress, islice, repeat
from operator import length_hint
from types import WrapperDescriptorType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from ddp_patch.positions_and_padding import Plan

if TYPE_CHECKING:
    from ddp_patch.orders.digest import Digest


T = TypeVar("T")

# About how many samples may be drawn ahead of the sample in use, unless a round has more. Large chunks swap random
# states less often, but a sampler that adapts during training must not be drawn far ahead.
MOST_AHEAD = 8192
# For plain indices, or lists of them, a chunk may have 1/64 of all samples so far, at most 65536, so that drawing a
# chunk takes little of the stream's time.
MOST_PLAIN, _PART_AHEAD = 65536, 64
_IMMUTABLE = (int, float, str, bytes, np.generic)


def returns_itself(iterator: object) -> bool:
    """Return whether ``iter(iterator)`` surely does nothing, because its method is in C, as a generator's is."""
    return isinstance(getattr(type(iterator), "__iter__", None), WrapperDescriptorType)


def start_iterating(iterable: Iterable[T]) -> Iterator[T]:
    """Call ``iter()`` once, and return an iterator that only calls ``next()`` from then on.

    ``for``, ``islice`` and ``chain`` call ``iter()``, and a sampler that is its own iterator may start again at every
    call, as lhotse's samplers do.
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
        length: How many items were drawn.
        items: The kept items: all drawn items, or this rank's alone.
    """

    length: int
    items: list[T]


class Drawn(Iterator[Chunk[T]]):
    """A stream's chunks: the first with all of its items, because padding repeats them, the later ones with a rank's.

    Every chunk's length is a multiple of the number of ranks, except that the last chunk may be shorter; no chunk is
    empty. Chunks depend only on the stream, so every rank draws the same chunks at the same step. If the stream raises
    an exception, the whole rounds before it come first, and then the exception is raised unchanged.

    Args:
        iterator: What to draw from, as ``start_iterating`` returns it.
        random_context: Returns the context in which a chunk is drawn.
        plan: The rank's share.
        taken: How many of the first items are left out: they are drawn and dropped, or, if ``first`` is passed, the
            iterator begins after them.
        first: The stream's first items, which padding may repeat, if the iterator begins after the items that are left
            out.
        step: How many rounds, of one item for each rank, make a step. Each chunk has whole steps.
        rounds: How many rounds each chunk has. None lets chunks grow: the first has one step, so that the first batch
            comes at once, and each has twice as many rounds as the chunk before, up to ``MOST_AHEAD`` samples, or
            ``MOST_PLAIN`` in a long stream of indices. An index is one sample. A round of batches counts as many
            samples as the largest first round of a chunk so far.
        adapts: Called before each chunk but the first, with the number of steps of the chunk before. Returns whether
            the sampler was changed within the pass. From then on, each chunk has a single step.
        copies: Whether to copy the kept items, because their source may change them later.
        digest: Takes all drawn items; None if ranks do not compare them.

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
        self._random_context, self._plan, self._digest = random_context, plan, digest
        self._left = repeat(True, sys.maxsize)
        self._items: Iterator[Any] = compress(iterator, self._left)  # a fast count: each item takes one of _left
        self._copies, self._step, self._sizes = copies, step, _rounds_of_chunks(step, rounds, adapts)
        next(self._sizes)
        self._taken, self._to_skip = taken, taken if first is None else 0
        # Whether the first rounds of chunks have indices or lists of indices, and how many samples the largest of them
        # has.
        self._is_plain = False
        self._samples = plan.num_replicas
        self._is_first = True  # whether no chunk was drawn yet
        self.first: list[T] = [] if first is None else first[: plan.num_replicas - 1]
        self._is_ended = False
        self._failure: Exception | None = None
        self._ahead: deque[Chunk[T]] = deque()

    @property
    def _drawn(self) -> int:
        """How many items were drawn so far."""
        return sys.maxsize - length_hint(self._left)

    def __next__(self) -> Chunk[T]:
        return self._ahead.popleft() if self._ahead else self._chunk()

    def ends_within(self, most: int) -> bool:
        """Draw ahead, and return whether at most ``most`` rounds are left. A round that is left out does not count."""
        while not self._failure and sum(self._plan.largest_share(chunk.length) for chunk in self._ahead) <= most:
            try:
                self._ahead.append(self._chunk())
            except StopIteration:
                return True
            except Exception as error:  # noqa: BLE001 - the user's own error, raised after the items before it
                self._failure = error
        return False

    def skip(self) -> None:
        """Draw and drop the first ``taken`` items, unless they were dropped before."""
        most = self._plan.num_replicas - 1
        while self._to_skip and not self._is_ended:
            size = min(self._to_skip, MOST_AHEAD)
            with self._random_context():
                items = self._draw_all([], size, copy_item if self._copies else None)
            self.first += items[: max(0, most - len(self.first))]
            self._to_skip -= len(items)

    def pass_through(self, noting: Callable[[Iterator[T]], Iterator[T]]) -> None:
        """Draw all further items through an iterator that records them."""
        self._items = noting(self._items)

    def _chunk(self) -> Chunk[T]:
        """Draw a chunk; raise StopIteration if there is none, or the error that the stream raised."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self.skip()
        if self._is_ended:
            raise StopIteration
        ranks, start, kept = self._plan.num_replicas, self._drawn, list[T]()
        size = self._sizes.send(self._rounds_ahead()) * ranks
        with self._random_context():
            try:  # keep the items before an exception
                if self._copies and (self._is_first or size > ranks):
                    self._inspect_round(kept)
                    size = min(size, max(self._step, self._rounds_ahead()) * ranks)
                self._draw(kept, start + size - self._drawn)
            except Exception as error:  # noqa: BLE001 - the user's own error, raised after the items before it
                self._failure = error
        length = self._drawn - start
        if self._failure is not None:
            self._is_ended = True
            length -= length % ranks  # an incomplete round would say that the stream has ended
        if length < size:
            del kept[len(range(length)[self._of_rank(length)]) :]
        self._is_first = False
        return Chunk(length, kept) if length else self._chunk()

    @property
    def begins_at(self) -> int:
        """How many items came before the first chunk: ``taken``, or fewer if the stream ended before."""
        return self._taken - self._to_skip

    def _of_rank(self, size: int) -> slice:
        """Return the slice of the drawn items that is kept."""
        return slice(None) if self._is_first else self._plan.slice_of_chunk(size)

    def _rounds_ahead(self) -> int:
        """Return how many rounds may be drawn at once."""
        before = self._drawn // self._plan.num_replicas // _PART_AHEAD if self._is_plain else 0
        return max(1, MOST_AHEAD // self._samples, min(before, MOST_PLAIN // self._samples))

    def _inspect_round(self, kept: list[T]) -> None:
        """Draw a whole round, and learn from it what the stream's items are: on every rank the same."""
        are_lazy: list[bool] = []

        def copied(item: Any) -> Any:
            are_lazy.append(isinstance(item, Iterator))
            return copy_item(item)

        items: list[Any] = self._draw_all(kept, self._plan.num_replicas, copied)
        if any(are_lazy):  # read each batch into a list from now on: several lazy batches may draw from one source
            self._items = map(copy_item, self._items)
        self._copies = not (items and isinstance(items[0], _IMMUTABLE))  # a stream of indices needs no copies
        first = (item[0] if type(item) is list and item else item for item in items)
        self._is_plain = all(isinstance(index, int | np.integer) for index in first)
        self._samples = max(self._samples, sum(length_hint(item, 1) or 1 for item in items))

    def _draw(self, kept: list[T], size: int) -> None:
        """Draw ``size`` items, keep this rank's, and add all to the digest."""
        if self._digest is not None:
            self._draw_all(kept, size, copy_item if self._copies else None)
        elif not self._is_ended:  # copy and keep only this rank's: other ranks' may be large
            before = self._drawn
            first, last, step = self._of_rank(size).indices(size)
            items = islice(self._items, first, last, step)
            kept.extend(map(copy_item, items) if self._copies else items)
            if last < size:
                deque(islice(self._items, size - last), maxlen=0)
            self._is_ended = self._drawn - before < size

    def _draw_all(self, kept: list[T], size: int, copied: Callable[[Any], Any] | None) -> list[T]:
        """Draw ``size`` items, keep this rank's, add all to the digest, and return all.

        Args:
            kept: The list of this rank's items.
            size: How many items to draw.
            copied: Copies each item as it comes, because its source may change it later; None to copy none.
        """
        items = list[T]()
        if self._is_ended or size <= 0:
            return items
        drawn = islice(self._items, size)
        try:
            items.extend(drawn if copied is None else map(copied, drawn))
        finally:  # also keep the items before an exception
            kept += items[self._of_rank(size)]
            if self._digest is not None:
                self._digest.add(items)
        self._is_ended = len(items) < size
        return items


def _rounds_of_chunks(
    step: int, rounds: Iterator[int] | None, adapts: Callable[[int], bool] | None
) -> Generator[int, int, None]:
    """Yield how many rounds each chunk of ``Drawn`` has; each ``send`` passes the most rounds of the next chunk."""
    yield 0
    planned = step if rounds is None else next(rounds)
    while True:
        most = yield planned
        if adapts is not None and adapts(planned // step):
            rounds = repeat(step)
        planned = max(1, min(2 * planned, most) // step) * step if rounds is None else next(rounds)


def split_chunks(plan: Plan, drawn: Drawn[T], on_end: Callable[[int], None]) -> Iterator[list[T]]:
    """Yield a rank's items of a stream, chunk by chunk, then the rank's padding. The stream's length need not be known.

    Args:
        plan: The rank's share.
        drawn: The stream, in chunks.
        on_end: Called with the stream's length, before padding and before the items of an incomplete round, so that all
            ranks know the end at the same step.
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
    """Yield copies of a stream's items; the items themselves if the first one is an index."""
    first = list(islice(stream, 1))
    yield from map(copy_item, first)
    yield from stream if first and isinstance(first[0], _IMMUTABLE) else map(copy_item, stream)


def copy_item(item: Any) -> Any:
    """Return a copy of a batch or key, because its sampler may reuse the object for the next one.

    Copy containers with their contents, clone tensors, read iterators into lists; return anything else as it is.
    """
    if type(item) is list and item and isinstance(item[0], _IMMUTABLE) and isinstance(item[-1], _IMMUTABLE):
        return item[:]  # most batches are lists of plain indices: skip the slower copy of each element
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
