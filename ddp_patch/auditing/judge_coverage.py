"""Judge which samples or batches all ranks together got too seldom or too often."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_patch.auditing.drawn import EpochDraws, Numbers, RankDraws, Units, joined
from ddp_patch.auditing.subject import Traits

__all__ = [
    "Judge",
    "Judged",
    "counts_of",
    "coverage",
    "dense",
    "is_constant",
    "largest_batch",
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


def _coverage_of(epoch: EpochDraws, units: Units) -> Coverage:
    """Count the samples or batches of an epoch; equal batches hold the same samples in the same order."""
    drawn = [epoch.alone, *epoch.ranks]
    numbers = [each.items for each in drawn] if units == "samples" else _batches_as_numbers(drawn)
    expected, *shards = numbers
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


def is_constant(epoch: EpochDraws) -> bool:
    """Tell whether all samples are equal, which indices of different samples never are."""
    items = epoch.alone.items
    if len(items) < 2 or not (epoch.is_iterable or items[0] < 0):
        return False
    return all(bool((drawn.items == items[0]).all()) for drawn in (epoch.alone, *epoch.ranks))


def _is_made_anew(epoch: EpochDraws) -> bool:
    """Tell whether an iterable dataset makes new samples in each pass: ranks got hardly any that a single process got.

    Rank 0 does not count: it starts with the random states of the single process, and may make the same samples.
    """
    if not epoch.is_iterable or epoch.is_sample or not len(epoch.alone.items) or repeats_rank_0(epoch):
        return False
    got = np.concatenate([epoch.alone.items[:0], *(drawn.items for drawn in epoch.ranks[1:])])
    return bool(10 * np.count_nonzero(np.isin(got, epoch.alone.items)) < len(got))


def repeats_rank_0(epoch: EpochDraws) -> bool:
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
    names, (counted, got) = dense([expected, joined(shards)])
    difference = counts_of(counted, len(names))
    is_expected = difference > 0
    difference -= counts_of(got, len(names))
    missing, repeated = np.flatnonzero(difference > 0), np.flatnonzero((difference < 0) & is_expected)
    foreign = np.flatnonzero((difference < 0) & ~is_expected)
    lacking, extra, unexpected = (abs(int(difference[where].sum())) for where in (missing, repeated, foreign))
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


def _batches_as_numbers(drawn: Sequence[RankDraws]) -> list[Numbers]:
    """Number the batches of all that was drawn, so that equal batches have one number."""
    known: dict[bytes, int] = {}

    def number(batch: Numbers) -> int:
        return known.setdefault(batch.astype(np.int64).tobytes(), len(known))

    return [np.array([number(batch) for batch in each.batches], np.int64) for each in drawn]


@dataclass(frozen=True, slots=True)
class Split:
    """Count batches of a single process of which two or more ranks hold parts.

    Attributes:
        wholes: How many of these batches there are.
        parts: How many of the ranks' batches are parts of them.
        foreign: How many of the ranks' batches the single process does not make.
    """

    wholes: int
    parts: int
    foreign: int

    @property
    def explains(self) -> bool:
        """Tell whether split batches explain most of the batches that the single process does not make."""
        return 2 * self.parts > self.foreign


def _split_of(epoch: EpochDraws) -> Split:
    """Look for batches of the single process in pieces on several ranks."""
    wholes = {frozenset(batch.tolist()) for batch in epoch.alone.batches}
    wholes_with: dict[int, list[frozenset[int]]] = {}
    for whole in wholes:
        for item in whole:
            wholes_with.setdefault(item, []).append(whole)
    wholes_of_foreign: list[list[frozenset[int]]] = []  # for each foreign batch, the batches that it is a part of
    ranks_with_part: dict[frozenset[int], set[int]] = {}
    for rank, drawn in enumerate(epoch.ranks):
        for batch in {frozenset(batch.tolist()) for batch in drawn.batches} - wholes:
            around = [whole for whole in wholes_with.get(next(iter(batch), -1), []) if batch < whole]
            wholes_of_foreign.append(around)
            for whole in around:
                ranks_with_part.setdefault(whole, set()).add(rank)
    in_pieces = {whole for whole, ranks in ranks_with_part.items() if len(ranks) > 1}
    parts = sum(not in_pieces.isdisjoint(around) for around in wholes_of_foreign)
    return Split(len(in_pieces), parts, len(wholes_of_foreign))


@dataclass(frozen=True, slots=True)
class Judged:
    """Tell how an epoch was judged.

    Attributes:
        found: What is missing and repeated, counted in the epoch's units.
        samples: What is missing and repeated, counted in samples.
        padding: How many repeated units fill the last round.
        dropped: How many missing units the loader was asked to leave out.
        split: Batches in pieces, where ranks should shard whole batches and do not; otherwise None.
    """

    found: Coverage
    samples: Coverage
    padding: int
    dropped: int
    split: Split | None = None

    @property
    def is_covered(self) -> bool:
        """Tell whether nothing is missing or repeated but what may be, and nothing foreign."""
        found = self.found
        return self.padding == found.extra and self.dropped == found.lacking and not found.unexpected


@dataclass(frozen=True, slots=True)
class Judge:
    """Judge epochs by what a loader and its user allow.

    Attributes:
        traits: Describes rank 0's loader.
        uneven: The option of ``patch_dataloader_to_ddp``, if it was given.
        pads: Whether samples may be repeated to fill the last round.
        may_rebatch: Whether ranks may make batches of their own; not where ``patch_dataloader_to_ddp`` shares whole
            batches.
    """

    traits: Traits
    uneven: str | None
    pads: bool
    may_rebatch: bool

    def judge(self, epoch: EpochDraws) -> tuple[EpochDraws, Judged]:
        """Judge an epoch.

        Ranks with a batch sampler of their own may shard samples, and each make its own batches of them. So where whole
        batches do not match and are not split either, samples are counted instead, and decide if they match.

        Returns:
            The epoch, in the units in which it was judged; and how it was judged.
        """
        samples = _coverage_of(epoch, "samples")
        if epoch.units == "samples":
            return epoch, self._judged(epoch, samples, samples)
        judged = self._judged(epoch, _coverage_of(epoch, "batches"), samples)
        if judged.is_covered:
            return epoch, judged
        pieces = _split_of(epoch)
        if self.may_rebatch and not pieces.explains:
            in_samples = replace(epoch, units="samples")
            judged_in_samples = self._judged(in_samples, samples, samples)
            if judged_in_samples.is_covered:
                return in_samples, judged_in_samples
        return epoch, replace(judged, split=pieces)

    def _judged(self, epoch: EpochDraws, found: Coverage, samples: Coverage) -> Judged:
        padding = found.extra if found.extra <= self._most_padding(epoch) else 0
        dropped = found.lacking if found.lacking <= self._most_dropped(epoch) else 0
        return Judged(found, samples, padding, dropped)

    def _most_padding(self, epoch: EpochDraws) -> int:
        """Return how many samples or batches may be repeated to fill the last round, or that of each worker's part."""
        if self.traits.divides_batches and self.uneven == "keep":  # but no rank is without a sample of a batch
            return sum(max(0, len(epoch.ranks) - size) for size in epoch.parts if size)
        return epoch.filling if self.pads and self.uneven in (None, "pad") else 0

    def _most_dropped(self, epoch: EpochDraws) -> int:
        """Return how many samples or batches the loader was asked to leave out, at most."""
        world, traits = len(epoch.ranks), self.traits
        dropped = (world - 1) * max(1, len(epoch.parts)) if self.uneven == "drop" or traits.drops_round else 0
        if epoch.units == "samples" and traits.drops_batch:
            dropped += world * traits.batchers * (largest_batch(epoch, traits) - 1)
        return dropped

    def uneven_steps(self, epoch: EpochDraws) -> int:
        """Return by how many steps ranks may differ."""
        return max(1, len(epoch.parts)) if self.uneven == "keep" and not self.traits.divides_batches else 0


def largest_batch(epoch: EpochDraws, traits: Traits) -> int:
    """Return how many samples the largest batch has, among those drawn and what the loader says."""
    return max(int(drawn.sizes.max(initial=traits.batch_size)) for drawn in (*epoch.ranks, epoch.alone))
