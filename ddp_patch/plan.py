"""Which positions of a stream belong to which rank: arithmetic on ranges, without torch."""

from dataclasses import dataclass

from ddp_patch.errors import InvalidOptionError
from ddp_patch.options import Layout, Uneven, check_layout, check_uneven

__all__ = ["Plan"]


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
        if self.num_replicas < 1 or not 0 <= self.rank < self.num_replicas:
            raise InvalidOptionError(
                f"rank={self.rank} of num_replicas={self.num_replicas} does not exist: "
                "ranks count from 0 to num_replicas - 1. Pass a rank in that range."
            )
        check_uneven(self.uneven)
        check_layout(self.layout)

    def total(self, n: int) -> int:
        """How many positions all ranks take together of a stream of n items."""
        if self.uneven == "keep" or n == 0:
            return n
        rounds = n // self.num_replicas if self.uneven == "drop" else -(-n // self.num_replicas)
        return rounds * self.num_replicas

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
