"""Draw what is left of an epoch, in chunks, and cut it into shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

from ddp_patch.orders.chunks import Chunk, copy_item, draw, start_iterating
from ddp_patch.orders.digest import Digest
from ddp_patch.orders.random_states import distributed_permutation
from ddp_patch.plan import Plan

__all__ = ["EpochDrawing", "Permuted", "ReadAhead", "split_chunks"]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpochDrawing(Generic[T]):
    """What a pass draws of an epoch.

    Attributes:
        order: What is iterated: the sampler, or what yields its items in the order of the epoch.
        rest: Returns what is left of these items, in the order in which the ranks share it.
        random_context: Returns what to enter while the sampler draws.
        draws_ahead: Whether more may be drawn than is asked for. An iterator, which can be used only once, goes on in
            the next pass where a break leaves it.
        digest: Takes note of what is drawn, for the ranks to compare; None if nobody compares it.
    """

    order: Iterable[T]
    rest: Callable[[Iterator[T]], Iterator[T]]
    random_context: Callable[[], AbstractContextManager[object]]
    draws_ahead: bool
    digest: Digest | None

    def chunks(self, stream: Iterator[T], plans: Sequence[Plan]) -> ReadAhead[T]:
        """Draw a stream in chunks, and keep what these plans take."""

        def kept(start: int, size: int) -> slice:
            # The first round is for padding.
            return slice(None) if len(plans) > 1 or not start else plans[0].slice_of_chunk(size)

        chunked = draw(
            stream,
            self.random_context,
            round_size=plans[0].num_replicas,
            ahead=self.draws_ahead,
            selection=kept,
            digest=self.digest,
        )
        return ReadAhead(chunked)


def split_chunks(
    plans: Sequence[Plan],
    chunks: Iterable[Chunk[T]],
    on_end: Callable[[int], None],
    skipped: Chunk[T] | None = None,
) -> Iterator[list[list[T]]]:
    """Yield each plan's items of a stream, chunk by chunk, then their padding. The end is found, not predicted.

    Args:
        plans: Which positions are whose, in one world.
        chunks: The stream, in chunks of whole rounds; only the last may be shorter. The first has all its items; others
            may have those alone that are in the one plan.
        on_end: Called with the number of items that came: before any padding, and before the items of an incomplete
            round, so that every rank knows the end when some come to it.
        skipped: The rounds that came before, if any; with those items alone that padding may repeat.
    """
    repeatable = plans[0].num_replicas - 1  # padding repeats the stream's first items, and never more than these
    first: list[T] = [] if skipped is None else skipped.items[:repeatable]
    drawn, ended = 0 if skipped is None else skipped.length, False
    for count, items in chunks:
        first += items[: repeatable - len(first)]
        drawn += count
        if ended := count % plans[0].num_replicas > 0:
            on_end(drawn)
        is_cut = len(items) < count
        yield [items] if is_cut else [items[plan.slice_of_chunk(count)] for plan in plans]
    if not ended:
        on_end(drawn)
    yield [[first[position % drawn] for position in plan.padding(drawn)] for plan in plans]


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


@dataclass(frozen=True, slots=True)
class Permuted(Iterable[T]):
    """A sampler's epoch in ``DistributedSampler(shuffle=True)``'s order, which needs all of it.

    Attributes:
        sampler: The sampler.
        seed: What the order follows from.
        epoch: Which epoch.
    """

    sampler: Iterable[T]
    seed: int
    epoch: int

    def __iter__(self) -> Iterator[T]:
        return self._items(start_iterating(self.sampler))

    def _items(self, stream: Iterator[T]) -> Iterator[T]:
        items = [copy_item(item) for item in stream]
        for position in distributed_permutation(len(items), self.seed, self.epoch).tolist():
            yield items[position]
