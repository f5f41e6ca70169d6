"""Count what all ranks got against what a single process gets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_patch.auditing.draw.coding import Numbers
from ddp_patch.auditing.draw.drawn import Drawn, Epoch

__all__ = [
    "Coverage",
    "batches_of",
    "counts_of",
    "coverage",
    "coverage_of_batches",
    "coverage_of_samples",
    "dense",
    "is_constant",
    "repeats_rank_0",
]

# Count this many items at once: bincount converts its argument to 64 bits.
_PIECE = 2**22


@dataclass(frozen=True, slots=True)
class Coverage:
    """Tell which things all ranks together got too seldom or too often, compared with a single process.

    Attributes:
        missing: Numbers of what was got too seldom, each once.
        lacking: By how many times, in total.
        repeated: Numbers of what was seen too often, each once.
        extra: By how many times, in total.
        foreign: Numbers of what a single process never gets, each once.
        unexpected: How many times it was got, in total.
        distinct: How many different things a single process gets.
        is_known: Whether what was drawn is enough to tell.
    """

    missing: Numbers
    lacking: int
    repeated: Numbers
    extra: int
    foreign: Numbers
    unexpected: int
    distinct: int
    is_known: bool = True

    def unknown(self) -> "Coverage":
        """Return the coverage as one that cannot be told: nothing missing, nothing repeated, nothing foreign."""
        none = self.missing[:0]
        return Coverage(none, 0, none, 0, none, 0, self.distinct, is_known=False)

    def counts_alone(self) -> "Coverage":
        """Return by how many things there are too few or too many, where the ranks drew other things."""
        too_many = self.extra + self.unexpected
        both, none = min(self.lacking, too_many), self.missing[:0]
        if both == 0:
            return self
        return Coverage(none, self.lacking - both, none, too_many - both, none, 0, self.distinct)


def coverage_of_samples(epoch: Epoch) -> Coverage:
    """Count the samples of an epoch."""
    return _coverage_of(epoch, epoch.alone.items, [drawn.items for drawn in epoch.ranks])


def coverage_of_batches(epoch: Epoch) -> Coverage:
    """Count the batches of an epoch; two batches are one thing where they hold the same samples in the same order."""
    expected, *shards = _batches_as_numbers([epoch.alone, *epoch.ranks])
    return _coverage_of(epoch, expected, shards)


def _coverage_of(epoch: Epoch, expected: Numbers, shards: Sequence[Numbers]) -> Coverage:
    found = _coverage_of_part(expected, shards) if epoch.is_sample else coverage(expected, shards)
    if is_constant(epoch) or _is_made_anew(epoch):
        return found.unknown()
    # A world of one rank shards nothing. Its sampler may draw other samples each time, but not fewer.
    return found.counts_alone() if len(shards) == 1 else found


def _coverage_of_part(expected: Numbers, shards: Sequence[Numbers]) -> Coverage:
    """Count what was drawn of a longer epoch: only repeats, and only where a single process repeats nothing."""
    distinct = len(np.unique(expected))
    found = replace(coverage(np.unique(np.concatenate(shards)), shards), distinct=distinct)
    return found if distinct == len(expected) else found.unknown()


def is_constant(epoch: Epoch) -> bool:
    """Tell whether all samples are equal, which indices of different samples never are."""
    items = epoch.alone.items
    if len(items) < 2 or not (epoch.is_iterable or items[0] < 0):
        return False
    return all(bool((drawn.items == items[0]).all()) for drawn in (epoch.alone, *epoch.ranks))


def _is_made_anew(epoch: Epoch) -> bool:
    """Tell whether an iterable dataset makes new samples in each pass: ranks got hardly any that a single process got.

    Rank 0 does not count: it starts with the random states of the single process, and may make the same samples.
    """
    if not epoch.is_iterable or epoch.is_sample or not len(epoch.alone.items) or repeats_rank_0(epoch):
        return False
    got = np.concatenate([epoch.alone.items[:0], *(drawn.items for drawn in epoch.ranks[1:])])
    return bool(10 * np.count_nonzero(np.isin(got, epoch.alone.items)) < len(got))


def repeats_rank_0(epoch: Epoch) -> bool:
    """Tell whether a single process gets what rank 0 gets, and other ranks get samples that it never gets."""
    first, *others = epoch.ranks
    if epoch.is_sample or not others or not len(first.items):
        return False
    found = coverage(epoch.alone.items, [first.items])
    is_first = not found.extra and not found.unexpected and found.lacking < int(first.sizes.max())  # a last batch
    return is_first and not all(np.isin(drawn.items, epoch.alone.items).all() for drawn in others)


def coverage(expected: Numbers, shards: Sequence[Numbers]) -> Coverage:
    """Count what the shards hold against what is expected.

    Examples:
        >>> found = coverage(np.array([0, 1, 2]), [np.array([0, 2]), np.array([2, 0])])
        >>> found.missing.tolist(), found.repeated.tolist(), found.extra
        ([1], [0, 2], 2)
    """
    names, (counted, *others) = dense([expected, *shards])
    difference = counts_of(counted, len(names))
    is_expected = difference > 0
    for shard in others:
        difference -= counts_of(shard, len(names))
    missing, repeated = np.flatnonzero(difference > 0), np.flatnonzero((difference < 0) & is_expected)
    foreign = np.flatnonzero((difference < 0) & ~is_expected)
    lacking, extra, unexpected = (abs(int(difference[one].sum())) for one in (missing, repeated, foreign))
    distinct = int(np.count_nonzero(is_expected))
    return Coverage(names[missing], lacking, names[repeated], extra, names[foreign], unexpected, distinct)


def dense(arrays: Sequence[Numbers]) -> tuple[Numbers, list[Numbers]]:
    """Renumber what arrays hold, from 0 and with few gaps, so that a table indexed by number is small.

    Returns:
        The old number of each new one, shape (numbers,); and the arrays in new numbers, in their shapes.

    Examples:
        >>> names, (first, second) = dense([np.array([10**15, 7]), np.array([7])])
        >>> names.tolist(), first.tolist(), second.tolist()
        ([7, 1000000000000000], [1, 0], [0])
    """
    bounds = [int(bound) for array in arrays if len(array) for bound in (array.min(), array.max())]
    low, high = min(bounds, default=0), max(bounds, default=-1)
    if high - low < 4 * sum(map(len, arrays)) + 1024:  # dense enough already, as indices of a dataset are
        names = np.arange(low, high + 1, dtype=np.result_type(*arrays))
        return names, [array - low if low else array for array in arrays]
    names, places = np.unique(np.concatenate(arrays), return_inverse=True)
    return names, np.split(places, np.cumsum([len(array) for array in arrays])[:-1])


def counts_of(items: Numbers, span: int) -> Numbers:
    """Return how often each number below ``span`` occurs, shape (span,)."""
    counts = np.zeros(span, np.int32)
    for start in range(0, len(items), _PIECE):
        counts += np.bincount(items[start : start + _PIECE], minlength=span).astype(np.int32)
    return counts


def _batches_as_numbers(drawn: Sequence[Drawn]) -> list[Numbers]:
    """Number the batches of all that was drawn, so that equal batches have one number."""
    known: dict[bytes, int] = {}
    return [
        np.array(
            [known.setdefault(batch.astype(np.int64).tobytes(), len(known)) for batch in batches_of(one)], np.int64
        )
        for one in drawn
    ]


def batches_of(drawn: Drawn) -> list[Numbers]:
    """Return the items of each step."""
    return np.split(drawn.items, np.cumsum(drawn.sizes)[:-1]) if len(drawn.sizes) else []
