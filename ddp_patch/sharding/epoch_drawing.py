"""Draw an epoch and select this rank's share of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from ddp_patch.errors import ExhaustedSamplerError, StateError, StreamLengthError
from ddp_patch.orders.chunks import Chunk, copy_item, draw, start_iterating
from ddp_patch.orders.digest import Digest
from ddp_patch.orders.random_states import distributed_permutation
from ddp_patch.plan import Consumed, Plan, Sizes
from ddp_patch.sharding.balancing import Balancer, balanced_stream

if TYPE_CHECKING:
    pass

__all__ = ["EpochDrawing", "Permuted", "Stream", "require_sure_length", "split_chunks"]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpochDrawing(Generic[T]):
    """An epoch of a wrapped sampler, as a pass of this rank sees it.

    Attributes:
        sampler: The wrapped sampler.
        is_one_shot: Whether it is an iterator, which cannot be started again.
        number: The epoch's number.
        plan: Which positions are this rank's.
        consumed_before: What other numbers of ranks have taken; the pass is over the rest.
        random_context: Returns what to enter while the sampler draws.
        private_generator: What torch's own samplers draw from.
        length: Tells how many items the whole stream has, as the sampler says.
        has_earlier_pass: Returns, when the first item is asked for, whether earlier passes drew from the same sampler.
        check_length: Called with how many items the whole stream had and how many were assumed.
        keeps_sizes: Whether to record how many samples the items have.
        balancer: How to balance the stream by cost; None if it is sharded as it comes.
        digest: Takes note of what is drawn, for the ranks to compare; None if nobody compares it.
    """

    sampler: Iterable[T]
    is_one_shot: bool
    number: int
    plan: Plan
    consumed_before: Consumed
    random_context: Callable[[], AbstractContextManager[object]]
    private_generator: torch.Generator
    length: Callable[[], int]
    has_earlier_pass: Callable[[], bool]
    check_length: Callable[[int, int], None]
    keeps_sizes: bool
    balancer: Balancer | None
    digest: Digest | None


class Stream(Generic[T]):
    """A sampler's stream in an epoch, drawn in chunks and cut into shares.

    Args:
        epoch: The epoch.
        stream: The sampler, begun.
        sizes: Records how many samples each item of the rest has; None if nobody needs that.
    """

    def __init__(self, epoch: EpochDrawing[T], stream: Iterator[T], sizes: Sizes | None) -> None:
        self._epoch, self._stream, self._sizes = epoch, stream, sizes
        self._chunks: _ReadAhead[T] | None = None

    def shares(self, plans: Sequence[Plan], skip: int, found: Callable[[int], None]) -> Iterator[list[list[T]]]:
        """Yield the shares of some plans in what is left of the epoch, chunk by chunk.

        Args:
            plans: Whose shares.
            skip: How many items of each share were taken before.
            found: Called with how many items were left, when the end was found.
        """
        epoch, plan, stream = self._epoch, self._epoch.plan, self._stream
        before = epoch.consumed_before
        rest = plan.rest_of_stream(epoch.length, before)
        if epoch.balancer is not None:
            stream = balanced_stream(stream, epoch.balancer, epoch.number, before, plan.num_replicas)
        elif before:
            stream = rest.select(stream)
        if self._sizes is not None:
            stream = self._sizes.recording(stream)
        chunks = self._chunked(stream, plans, len(rest))

        def on_end(drawn: int) -> None:
            if epoch.digest is not None:
                epoch.digest.end()
            found(drawn)
            if skip > plan.largest_share(drawn):
                raise StateError(
                    f"The pass cannot resume from the state: {skip} items of each rank's share were done in it, and "
                    f"the sampler ended after {drawn} items of all ranks. Restore the state of a loader with this "
                    "sampler."
                )
            # Items before the rest were drawn too.
            epoch.check_length(drawn + rest.n - len(rest), rest.n)

        yield from split_chunks(plans, chunks, len(rest), on_end)

    def _chunked(self, stream: Iterator[T], plans: Sequence[Plan], length: int) -> Iterator[Chunk[T]]:
        """Draw a stream in chunks, of a length as far as that is needed, and keep what these plans take."""
        epoch, plan = self._epoch, self._epoch.plan

        def kept(start: int, size: int) -> slice:
            # The first round is for padding.
            return slice(None) if len(plans) > 1 or not start else plan.slice_of_chunk(start, size, length)

        chunked = draw(
            stream,
            epoch.random_context,
            round_size=plan.num_replicas,
            ahead=not epoch.is_one_shot,  # where a break leaves an iterator, the next pass continues
            selection=kept,
            digest=epoch.digest,
        )
        self._chunks = _ReadAhead(chunked)
        if plan.needs_length and not epoch.is_one_shot:
            self._chunks.ends_within(plan, 0)  # all: each rank has its run elsewhere, and all may break off
        must_give = epoch.is_one_shot and epoch.has_earlier_pass()
        return _not_empty(self._chunks, epoch.number) if must_give else self._chunks

    def ends_within(self, items: int) -> bool:
        """Draw more, and return whether at most this many items of the share are left."""
        return self._chunks is not None and self._chunks.ends_within(self._epoch.plan, items)


def split_chunks(
    plans: Sequence[Plan],
    chunks: Iterable[Chunk[T]],
    length: int,
    on_end: Callable[[int], None],
    skipped: Chunk[T] | None = None,
) -> Iterator[list[list[T]]]:
    """Yield each plan's items of a stream, chunk by chunk, then their padding.

    Args:
        plans: Which positions are whose, in one world.
        chunks: The stream, in chunks of whole rounds; only the last may be shorter. The first has all its items; others
            may have those alone that are in the one plan.
        length: The stream's length, for ``layout="contiguous"``. Otherwise the end is found, not predicted.
        on_end: Called with the number of items that came: before any padding, and before the items of an incomplete
            round, so that every rank knows the end when some come to it.
        skipped: The rounds that came before, if any; with those items alone that padding may repeat.
    """
    repeatable = plans[0].num_replicas - 1  # padding repeats the stream's first items, and never more than these
    first: list[T] = [] if skipped is None else skipped.items[:repeatable]
    drawn, ended = 0 if skipped is None else skipped.length, False
    for count, items in chunks:
        first += items[: repeatable - len(first)]
        start, drawn = drawn, drawn + count
        if ended := count % plans[0].num_replicas > 0:
            on_end(drawn)
        is_cut = len(items) < count
        yield [items] if is_cut else [items[plan.slice_of_chunk(start, count, length)] for plan in plans]
    if not ended:
        on_end(drawn)
    yield [[first[position % drawn] for position in plan.padding(drawn)] for plan in plans]


def require_sure_length(plan: Plan, who: str, kind: str, drawn: int, assumed: int) -> None:
    """Raise StreamLengthError if runs were cut from a wrong length."""
    if plan.needs_length and assumed != drawn:
        raise StreamLengthError(
            f"{who} yielded {drawn} items and its len() said {assumed}. With layout='contiguous' each rank's run was "
            f"cut from that length, so this epoch's shards are wrong. Correct the {kind}'s __len__, or use "
            "layout='interleaved', which needs none."
        )


class _ReadAhead(Iterator[Chunk[T]]):
    """An iterator over chunks that can read on before it is asked to."""

    def __init__(self, chunks: Iterator[Chunk[T]]) -> None:
        self._chunks = chunks
        self._read: deque[Chunk[T]] = deque()
        self._failure: list[Exception] = []

    def __next__(self) -> Chunk[T]:
        if not self._read and self._failure:
            raise self._failure.pop()
        return self._read.popleft() if self._read else next(self._chunks)

    def ends_within(self, plan: Plan, most: int) -> bool:
        """Read more, and return whether at most this many rounds come; with contiguous runs, no items.

        An incomplete round that is left out is none.
        """

        def rounds() -> int:
            return 0 if plan.needs_length else sum(plan.largest_share(chunk.length) for chunk in self._read)

        while not self._failure and rounds() <= most:
            try:
                self._read.append(next(self._chunks))
            except StopIteration:
                return True
            except Exception as error:  # noqa: BLE001 - the user's own, raised where it came
                self._failure.append(error)
        return False


def _not_empty(chunks: Iterator[Chunk[T]], epoch: int) -> Iterator[Chunk[T]]:
    """Pass chunks on; raise if there is none."""
    chunk: Chunk[T] | None = None
    for chunk in chunks:
        yield chunk
    if chunk is None:
        raise ExhaustedSamplerError(
            f"Nothing is left for epoch {epoch}: the sampler is an iterator, which can be used only once. Give the "
            "loader something that can be iterated again (a list, or a sampler whose __iter__ starts again)."
        )


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
