"""Which positions of a stream belong to which rank: arithmetic on ranges, without torch."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Self, TypeAlias, TypeVar

from ddp_patch.options import Layout, Options, Uneven, check_choice
from ddp_patch.validation import check_rank

__all__ = ["ONE_PER_STEP", "Batching", "Consumed", "Plan", "Rest", "blocks"]

T = TypeVar("T")

# What ranks have taken of a stream: (ranks, items that each took), one entry for each number of ranks in turn.
Consumed: TypeAlias = Sequence[tuple[int, int]]

_FIRST_BLOCK, _LARGEST_BLOCK = 64, 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's share of any stream, as positions.

    The ranks share a stream of n items in rounds of one item each. ``uneven`` decides what happens to the last round
    if n is not a multiple of ``num_replicas``. ``layout`` decides which positions a rank takes. A position p >= n is
    padding: it repeats the item at ``p % n``.

    Args:
        rank: This rank, in ``range(num_replicas)``.
        num_replicas: How many ranks share the stream.
        uneven: ``"pad"`` repeats the stream's first items to fill the last round, ``"drop"`` leaves that round out,
            ``"keep"`` gives some ranks one item less.
        layout: ``"interleaved"`` gives rank r the positions r, r + num_replicas, ...; ``"contiguous"`` gives it the
            r-th run of positions.

    Raises:
        InvalidOptionError: A value is none of those above.

    Examples:
        >>> [list(Plan(rank, 3).share(7)) for rank in range(3)]
        [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
        >>> [list(Plan(rank, 3, uneven="keep", layout="contiguous").share(7)) for rank in range(3)]
        [[0, 1, 2], [3, 4], [5, 6]]

    Source:
        ``torch.utils.data.DistributedSampler(shuffle=False)`` for "pad" and "drop".
    """

    rank: int
    num_replicas: int
    uneven: Uneven = "pad"
    layout: Layout = "interleaved"

    def __post_init__(self) -> None:
        check_rank(self.rank, self.num_replicas)
        check_choice("uneven", self.uneven)
        check_choice("layout", self.layout)

    @classmethod
    def of_stream(cls, options: Options, rank: int, num_replicas: int) -> Self:
        """Return a rank's share of the stream: all of it where each batch is divided."""
        return cls(0, 1) if options.divides_batches else cls(rank, num_replicas, options.uneven, options.layout)

    @classmethod
    def of_batch(cls, options: Options, rank: int, num_replicas: int) -> Self | None:
        """Return a rank's share of each batch, for ``divide``; None if batches are not divided."""
        return cls(rank, num_replicas, options.uneven, options.layout) if options.divides_batches else None

    def total(self, n: int) -> int:
        """Return how many positions all ranks together take from a stream of n items."""
        if self.uneven == "keep" or n == 0:
            return n
        rounds = n // self.num_replicas if self.uneven == "drop" else -(-n // self.num_replicas)
        return rounds * self.num_replicas

    def largest_share(self, n: int) -> int:
        """Return the size of the largest share of a stream of n items."""
        return -(-self.total(n) // self.num_replicas)

    def smallest_share(self, n: int) -> int:
        """Return the size of the smallest share of a stream of n items."""
        return self.total(n) // self.num_replicas

    def share(self, n: int) -> range:
        """Return the positions that this rank takes from a stream of n items, in order."""
        total = self.total(n)
        if self.layout == "interleaved":
            return range(self.rank, total, self.num_replicas)
        # Every rank takes `each` positions, and the first `over` ranks take one more.
        each, over = divmod(total, self.num_replicas)
        start = self.rank * each + min(self.rank, over)
        return range(start, start + each + (self.rank < over))

    def padding(self, n: int) -> range:
        """Return the part of ``share(n)`` that repeats items, as positions >= n."""
        share = self.share(n)
        real = len(range(share.start, min(share.stop, n), share.step))
        return share[real:]

    @property
    def needs_length(self) -> bool:
        """Whether this rank's positions are known only once the stream's length is."""
        return self.layout == "contiguous"

    def rest_of_stream(self, length: Callable[[], int], consumed: Consumed) -> "Rest":
        """Return what is left of a stream whose length is asked for only where it is needed."""
        return self.rest(length() if self.needs_length else sys.maxsize, consumed)

    def own_and_repeated(self, n: int) -> tuple[range, range]:
        """Return the positions of this rank's own items, and of the items that its padding repeats.

        Both are positions below n, where ``share(n)`` gives padding as positions >= n.
        """
        share, padding = self.share(n), self.padding(n)
        if not padding:
            return share, padding
        # One offset fits all padding: it is shorter than the stream, or this rank has a single item of it.
        offset = padding.start // n * n
        return share[: len(share) - len(padding)], range(padding.start - offset, padding.stop - offset, padding.step)

    def divide(self, n: int) -> tuple[range, range]:
        """Return ``own_and_repeated`` of a batch of n samples, of which every rank gets at least one.

        A rank without a sample would make no step, and the others would wait for it.

        Examples:
            >>> [tuple(map(list, Plan(rank, 3, uneven="keep").divide(2))) for rank in range(3)]
            [([0], []), ([1], []), ([], [0])]
        """
        own, repeated = self.own_and_repeated(n)
        return own, repeated if own or repeated else range(min(n, 1))

    def slice_of_chunk(self, start: int, size: int, n: int) -> slice:
        """Return where this rank's items lie in a chunk of the stream.

        Args:
            start: The chunk's first position, a multiple of ``num_replicas``.
            size: How many items the chunk has.
            n: How many items the stream has. It may be any number if the layout is interleaved, because then every
                round is shared in the same way.
        """
        if self.layout == "interleaved":
            share = self.share(size)
            return slice(share.start, share.stop, share.step)
        share = self.share(n)
        return slice(max(0, share.start - start), max(0, share.stop - start))

    def remaining(self, n: int, before: Consumed, skip: int) -> int:
        """Return how many items of this rank's share are left.

        Args:
            n: How many items the stream has.
            before: What other numbers of ranks have taken.
            skip: How many items each of this many ranks took after that.
        """
        return max(0, len(self.share(len(self.rest(n, before)))) - skip)

    def rest(self, n: int, consumed: Consumed) -> "Rest":
        """Return what is left of a stream after some ranks have taken items from it.

        Args:
            n: How many items the stream has. If the layout is interleaved, any larger number does too.
            consumed: What was taken; the number of ranks may have changed in between.
        """
        if self.layout == "interleaved":
            taken = sum(ranks * each for ranks, each in consumed)
            return Rest((range(min(n, taken), n),), n)
        rest = Rest((range(n),), n)
        for ranks, each in consumed:
            rest = self._rest_of_runs(rest, ranks, each)
        return rest

    def _rest_of_runs(self, before: "Rest", ranks: int, each: int) -> "Rest":
        """Return what is left of a contiguous stream after each of some ranks took ``each`` items.

        That is the end of each rank's run, and what ``uneven`` left out.
        """
        length = len(before)
        plans = [Plan(rank, ranks, self.uneven, self.layout) for rank in range(ranks)]
        ends = [plan.own_and_repeated(length)[0][each:] for plan in plans]
        left_out = range(min(length, plans[0].total(length)), length)
        return Rest(tuple(run for part in (*ends, left_out) for run in before.stream_positions(part)), before.n)


@dataclass(frozen=True, slots=True)
class Batching:
    """How a loader makes batches (steps) from items.

    Attributes:
        size: How many items a batch takes: its samples, or 1 if an item is a whole batch.
        drop_last: Whether an incomplete last batch is left out.
    """

    size: int
    drop_last: bool

    def count(self, items: int) -> int:
        """Return how many batches a number of items make."""
        return items // self.size if self.drop_last else -(-items // self.size)

    def leaves_rank_without_step(self, plan: Plan, *lengths: int) -> bool:
        """Return whether a rank makes no step in an epoch in which one process makes some.

        With ``uneven="keep"`` and no ``drop_last``, such a rank loses nothing: others have all items.

        Args:
            plan: A rank's share.
            lengths: How many items the epoch has, or each of the parts in which workers read it.
        """
        if plan.uneven == "keep" and not self.drop_last:
            return False
        return any(map(self.count, lengths)) and not any(self.count(plan.smallest_share(n)) for n in lengths)


# Each item is a step: it is a whole batch, or nobody is known to make batches of it.
ONE_PER_STEP = Batching(1, drop_last=False)


@dataclass(frozen=True, slots=True)
class Rest:
    """The rest of a stream. It is a stream again, and has a plan of its own.

    Args:
        runs: The positions that are left, in order.
        n: How many items the whole stream has at most.

    Examples:
        >>> rest = Plan(0, 2, layout="contiguous").rest(10, consumed=[(2, 3)])
        >>> rest.runs
        (range(3, 5), range(8, 10))
        >>> list(rest.select(iter("abcdefghij")))
        ['d', 'e', 'i', 'j']
    """

    runs: tuple[range, ...]
    n: int

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def stream_positions(self, positions: range) -> list[range]:
        """Turn positions in the rest into positions in the whole stream."""
        found, start = [], 0
        for run in self.runs:
            # Which of the positions lie in this run, that is from `start` to `start + len(run)` of the rest.
            first, last = (
                max(0, -(-(bound - positions.start) // positions.step)) for bound in (start, start + len(run))
            )
            if here := positions[first:last]:
                shift = run.start - start
                found.append(range(here.start + shift, here.stop + shift, here.step))
            start += len(run)
        return found

    def select(self, stream: Iterator[T]) -> Iterator[T]:
        """Draw the whole stream and yield the rest of it, with all that comes after the n-th item."""
        return chain.from_iterable(self._runs_of(stream))

    def _runs_of(self, stream: Iterator[T]) -> Iterator[Iterator[T]]:
        at = 0
        for run in self.runs:
            yield islice(stream, run.start - at, run.stop - at)
            at = run.stop
        yield islice(stream, self.n - at, None)


def blocks(positions: range, largest: int = _LARGEST_BLOCK) -> Iterator[range]:
    """Cut positions into blocks, each twice as long as the one before.

    The first block is short, so that the first batch comes at once.

    Args:
        positions: What to cut.
        largest: How many positions a block has at most.

    Examples:
        >>> [len(block) for block in blocks(range(1000), largest=256)]
        [64, 128, 256, 256, 256, 40]
    """
    start, size = 0, _FIRST_BLOCK
    while start < len(positions):
        yield positions[start : start + size]
        start, size = start + size, min(2 * size, largest)
