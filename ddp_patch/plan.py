"""Which positions of a stream belong to which rank: arithmetic on ranges, without torch."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeAlias, TypeVar

from ddp_patch.options import Layout, Uneven, check_layout, check_rank, check_uneven

__all__ = ["Done", "Plan", "Rest", "blocks"]

T = TypeVar("T")

# What was taken of a stream: by how many ranks, how many items each; in turn, where their number changed.
Done: TypeAlias = Sequence[tuple[int, int]]


_FIRST_BLOCK, _LARGEST_BLOCK = 64, 4096


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's share of any stream, as positions.

    A stream of n items goes to ``num_replicas`` ranks in rounds of one item each. ``uneven`` decides about
    the last round when n is not a multiple of ``num_replicas``; ``layout`` decides which positions a rank
    takes. A position p >= n stands for the item at ``p % n`` again (padding).

    Args:
        rank: This rank, in ``range(num_replicas)``.
        num_replicas: How many ranks share the stream.
        uneven: ``"pad"`` repeats the stream's first items to fill the last round, ``"drop"`` leaves that
            round out, ``"keep"`` lets some ranks have one item less.
        layout: ``"interleaved"`` gives rank r the positions r, r + num_replicas, ...; ``"contiguous"`` gives
            it the r-th run of positions.

    Raises:
        InvalidOptionError: A value is none of those above.

    Examples:
        >>> [list(Plan(rank, 3).share(7)) for rank in range(3)]
        [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
        >>> [list(Plan(rank, 3, uneven="keep", layout="contiguous").share(7)) for rank in range(3)]
        [[0, 1, 2], [3, 4], [5, 6]]

    Source:
        "pad" and "drop" are those of ``torch.utils.data.DistributedSampler(shuffle=False)``.
    """

    rank: int
    num_replicas: int
    uneven: Uneven = "pad"
    layout: Layout = "interleaved"

    def __post_init__(self) -> None:
        check_rank(self.rank, self.num_replicas)
        check_uneven(self.uneven)
        check_layout(self.layout)

    def total(self, n: int) -> int:
        """How many positions all ranks take together of a stream of n items."""
        return self._total(n, self.num_replicas)

    def _total(self, n: int, num_replicas: int) -> int:
        if self.uneven == "keep" or n == 0:
            return n
        rounds = n // num_replicas if self.uneven == "drop" else -(-n // num_replicas)
        return rounds * num_replicas

    def rounds(self, n: int) -> int:
        """How many items the ranks with most of them take of a stream of n items."""
        return -(-self.total(n) // self.num_replicas)

    def share(self, n: int) -> range:
        """The positions that this rank takes of a stream of n items, in order."""
        total = self.total(n)
        if self.layout == "interleaved":
            return range(self.rank, total, self.num_replicas)
        # Ranks before this one take `each` positions, the first `over` of them one more.
        each, over = divmod(total, self.num_replicas)
        start = self.rank * each + min(self.rank, over)
        return range(start, start + each + (self.rank < over))

    def padding(self, n: int) -> range:
        """The part of ``share(n)`` that repeats items, as positions >= n."""
        share = self.share(n)
        real = len(range(share.start, min(share.stop, n), share.step))
        return share[real:]

    def rest(self, n: int, done: Done) -> "Rest":
        """What is left of a stream of n items when other ranks have taken theirs.

        Interleaved, n may be any number that is large enough: the rest is what follows.
        """
        if self.layout == "interleaved":
            return Rest((range(min(n, sum(ranks * taken for ranks, taken in done)), n),), n)
        rest = Rest((range(n),), n)
        for ranks, taken in done:
            plans = [Plan(rank, ranks, self.uneven, self.layout) for rank in range(ranks)]
            length = len(rest)
            left = [plan.sources(length)[0][taken:] for plan in plans]
            dropped = range(min(length, self._total(length, ranks)), length)
            rest = Rest(tuple(run for part in (*left, dropped) for run in rest.cut(part)), n)
        return rest

    @property
    def needs_length(self) -> bool:
        """Whether this rank's positions are known only once the stream's length is."""
        return self.layout == "contiguous"

    def rest_of_stream(self, length: Callable[[], int], done: Done) -> "Rest":
        """What is left of a stream whose length is asked for only where it is needed."""
        return self.rest(length() if self.needs_length else sys.maxsize, done)

    def sources(self, n: int) -> tuple[range, range]:
        """Where the items of ``share(n)`` stand: its real positions, then those that its padding repeats."""
        share, padding = self.share(n), self.padding(n)
        if not padding:
            return share, padding
        # Padding is shorter than the stream, or a single item: all of it repeats the same turn.
        turn = padding.start // n * n
        return share[: len(share) - len(padding)], range(padding.start - turn, padding.stop - turn, padding.step)

    def part(self, start: int, size: int, n: int) -> slice:
        """Where this rank's items lie in a chunk of ``size`` items from position ``start`` of the stream.

        ``start`` is a multiple of ``num_replicas``. The stream's length ``n`` counts for ``"contiguous"`` only:
        interleaved, a round is shared in the same way wherever it stands.
        """
        if self.layout == "interleaved":
            share = self.share(size)
            return slice(share.start, share.stop, share.step)
        share = self.share(n)
        return slice(max(0, share.start - start), max(0, share.stop - start))


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of a stream: a stream again, which is shared by a plan of its own.

    Args:
        runs: Which positions are left, in order.
        n: How many items the whole stream has, at most.

    Examples:
        >>> rest = Plan(0, 2, layout="contiguous").rest(10, done=[(2, 3)])
        >>> rest.runs
        (range(3, 5), range(8, 10))
        >>> list(rest.select(iter("abcdefghij")))
        ['d', 'e', 'i', 'j']
    """

    runs: tuple[range, ...]
    n: int

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def cut(self, positions: range) -> list[range]:
        """Where the items at these positions of the rest stand in the whole stream."""
        found, start = [], 0
        for run in self.runs:
            first, last = (
                max(0, -(-(bound - positions.start) // positions.step)) for bound in (start, start + len(run))
            )
            here = positions[first:last]
            if here:
                found.append(range(here.start - start + run.start, here.stop - start + run.start, here.step))
            start += len(run)
        return found

    def select(self, stream: Iterator[T]) -> Iterator[T]:
        """Draw the whole stream and yield the rest of it; what comes after the n-th item counts to it."""
        return chain.from_iterable(self._runs_of(stream))

    def _runs_of(self, stream: Iterator[T]) -> Iterator[Iterator[T]]:
        at = 0
        for run in self.runs:
            yield islice(stream, run.start - at, run.stop - at)
            at = run.stop
        yield islice(stream, self.n - at, None)


def blocks(positions: range, largest: int = _LARGEST_BLOCK) -> Iterator[range]:
    """Cut positions into blocks: a short one first, so that the first batch comes at once, then twice as many each."""
    start, size = 0, _FIRST_BLOCK
    while start < len(positions):
        yield positions[start : start + size]
        start, size = start + size, min(2 * size, largest)
