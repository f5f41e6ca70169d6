"""Count and measure what all ranks drew: what is covered, how even, about what."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from ddp_patch.auditing.drawn import Coding, EpochDraws, Numbers, RankDraws, Traits, layers_of
from ddp_patch.auditing.epoch_report import Kind, Problem
from ddp_patch.costs import Costs
from ddp_patch.errors import InvalidOptionError

__all__ = [
    "EXAMPLES",
    "About",
    "Allowance",
    "Coverage",
    "Judged",
    "SampleCosts",
    "Split",
    "allowance",
    "batches_of",
    "counts_of",
    "coverage",
    "coverage_of_batches",
    "coverage_of_samples",
    "dense",
    "global_batches",
    "imbalance",
    "is_constant",
    "judge",
    "judge_against",
    "largest_batch",
    "repeats_rank_0",
    "shards_of",
    "split_of",
    "step_costs",
    "where_in",
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


def coverage_of_samples(epoch: EpochDraws) -> Coverage:
    """Count the samples of an epoch."""
    return _coverage_of(epoch, epoch.alone.items, [drawn.items for drawn in epoch.ranks])


def coverage_of_batches(epoch: EpochDraws) -> Coverage:
    """Count the batches of an epoch; two batches are one thing where they hold the same samples in the same order."""
    expected, *shards = _batches_as_numbers([epoch.alone, *epoch.ranks])
    return _coverage_of(epoch, expected, shards)


def _coverage_of(epoch: EpochDraws, expected: Numbers, shards: Sequence[Numbers]) -> Coverage:
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


def _batches_as_numbers(drawn: Sequence[RankDraws]) -> list[Numbers]:
    """Number the batches of all that was drawn, so that equal batches have one number."""
    known: dict[bytes, int] = {}
    return [
        np.array(
            [known.setdefault(batch.astype(np.int64).tobytes(), len(known)) for batch in batches_of(one)], np.int64
        )
        for one in drawn
    ]


def batches_of(drawn: RankDraws) -> list[Numbers]:
    """Return the items of each step."""
    return np.split(drawn.items, np.cumsum(drawn.sizes)[:-1]) if len(drawn.sizes) else []


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


def split_of(epoch: EpochDraws) -> Split:
    """Look for batches of the single process in pieces on several ranks."""
    wholes = {frozenset(batch.tolist()) for batch in batches_of(epoch.alone)}
    wholes_with: dict[int, list[frozenset[int]]] = {}
    for whole in wholes:
        for item in whole:
            wholes_with.setdefault(item, []).append(whole)
    wholes_of_foreign: list[list[frozenset[int]]] = []  # for each foreign batch, the batches that it is a part of
    ranks_with_part: dict[frozenset[int], set[int]] = {}
    for rank, drawn in enumerate(epoch.ranks):
        for batch in {frozenset(batch.tolist()) for batch in batches_of(drawn)} - wholes:
            around = [whole for whole in wholes_with.get(next(iter(batch), -1), []) if batch < whole]
            wholes_of_foreign.append(around)
            for whole in around:
                ranks_with_part.setdefault(whole, set()).add(rank)
    in_pieces = {whole for whole, ranks in ranks_with_part.items() if len(ranks) > 1}
    parts = sum(not in_pieces.isdisjoint(around) for around in wholes_of_foreign)
    return Split(len(in_pieces), parts, len(wholes_of_foreign))


@dataclass(frozen=True, slots=True)
class Allowance:
    """Say what may be missing or repeated in an epoch.

    Attributes:
        padding: How many samples or batches may be repeated to fill the last round, or that of each worker's part.
        dropped: How many samples or batches the loader was asked to leave out, at most.
        uneven: By how many steps ranks may differ.
    """

    padding: int
    dropped: int
    uneven: int


def allowance(epoch: EpochDraws, traits: Traits, uneven: str | None, pads: bool) -> Allowance:
    """Return what may be missing or repeated in an epoch.

    Args:
        epoch: What was drawn.
        traits: Describes rank 0's loader.
        uneven: The option of ``patch_dataloader_to_ddp``, if it was given.
        pads: Whether samples may be repeated to fill the last round.
    """
    world, parts = len(epoch.ranks), len(epoch.parts)
    dropped = (world - 1) * parts if uneven == "drop" or traits.drops_round else 0
    if epoch.units == "samples" and traits.drops_batch:
        dropped += world * traits.batchers * (largest_batch(epoch, traits) - 1)
    if traits.divides_batches and uneven == "keep":  # but no rank is without a sample of a batch
        return Allowance(sum(max(0, world - size) for size in epoch.parts if size), dropped, uneven=0)
    padding = epoch.filling if pads and uneven in (None, "pad") else 0
    return Allowance(padding, dropped, uneven=parts if uneven == "keep" else 0)


def largest_batch(epoch: EpochDraws, traits: Traits) -> int:
    """Return how many samples the largest batch has, among those drawn and what the loader says."""
    return max(int(drawn.sizes.max(initial=traits.batch_size)) for drawn in (*epoch.ranks, epoch.alone))


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


def judge(
    epoch: EpochDraws, allowance_of: Callable[[EpochDraws], Allowance], *, may_rebatch: bool = True
) -> tuple[EpochDraws, Judged]:
    """Judge an epoch.

    Ranks with a batch sampler of their own may shard samples, and each make its own batches of them. So where whole
    batches do not match and are not split either, samples are counted instead, and decide if they match.

    Args:
        epoch: What was drawn.
        allowance_of: Says what may be missing or repeated in an epoch.
        may_rebatch: Whether that may be; not where ``patch_dataloader_to_ddp`` shares whole batches.

    Returns:
        The epoch, in the units in which it was judged; and how it was judged.
    """
    samples = coverage_of_samples(epoch)
    found = samples if epoch.units == "samples" else coverage_of_batches(epoch)
    judged = _judged(found, samples, allowance_of(epoch))
    if epoch.units == "samples" or judged.is_covered:
        return epoch, judged
    pieces = split_of(epoch)
    if may_rebatch and not pieces.explains:
        in_samples = replace(epoch, units="samples")
        judged_in_samples = _judged(samples, samples, allowance_of(in_samples))
        if judged_in_samples.is_covered:
            return in_samples, judged_in_samples
    return epoch, replace(judged, split=pieces)


def judge_against(
    whole: Numbers, epoch: EpochDraws, allowance_of: Callable[[EpochDraws], Allowance]
) -> tuple[EpochDraws, Judged]:
    """Judge an epoch against the whole of a dataset instead of what a single process gets.

    Args:
        whole: The numbers of all samples of the dataset, shape (samples,).
        epoch: What was drawn.
        allowance_of: Says what may be missing or repeated in an epoch.

    Returns:
        The epoch as if a single process got the whole dataset, in samples; and how it was judged.
    """
    alone = replace(epoch.alone, items=whole, sizes=np.ones(len(whole), np.int64))
    return judge(replace(epoch, alone=alone, units="samples"), allowance_of)


def _judged(found: Coverage, samples: Coverage, allowed: Allowance) -> Judged:
    padding = found.extra if found.extra <= allowed.padding else 0
    dropped = found.lacking if found.lacking <= allowed.dropped else 0
    return Judged(found, samples, padding, dropped)


def global_batches(epoch: EpochDraws) -> tuple[tuple[int, int], ...]:
    """Return the sizes of global batches in the order of the steps.

    Returns:
        For each run of equal global batches, how many samples all ranks together have in a step, and how many steps the
        run has.
    """
    total = np.zeros(epoch.steps, np.int64)
    for drawn in epoch.ranks:
        total[: len(drawn.sizes)] += drawn.sizes
    begins = np.flatnonzero(np.diff(total, prepend=-1))
    return tuple(zip(total[begins].tolist(), np.diff(begins, append=len(total)).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class SampleCosts:
    """Tell what samples cost by their indices in the dataset below torch's ``Subset`` layers.

    Attributes:
        costs: What they cost by their indices in the loader's dataset.
        indices: Their indices in the loader's dataset, in the order of ``below``, shape (samples,).
        below: The same samples' indices below its ``Subset`` layers, ascending. None where it has none of these.
    """

    costs: Costs
    indices: Numbers | None = None
    below: Numbers | None = None

    @classmethod
    def in_dataset(cls, costs: Costs, dataset: Any) -> "SampleCosts":
        """Return the costs of a dataset's samples.

        Args:
            costs: What each index of the dataset costs.
            dataset: The dataset of a loader.

        Examples:
            >>> costs = SampleCosts.in_dataset(Costs([5.0, 7, 9], "sum"), Subset("abcdef", [4, 0, 2]))
            >>> costs.of(np.array([0, 4])).tolist()
            [7.0, 5.0]
        """
        if not isinstance(dataset, Subset):
            return cls(costs)
        below = layers_of(dataset)[-1]
        indices = np.argsort(below, kind="stable")
        return cls(costs, indices, below[indices])

    def of(self, indices: Numbers) -> NDArray[np.float64]:
        """Return what samples cost, given their indices below ``Subset`` layers, shape (samples,)."""
        if self.indices is not None and self.below is not None:
            indices = self.indices[np.searchsorted(self.below, indices)]
        return self.costs.of(indices)


def step_costs(epoch: EpochDraws, costs: SampleCosts | None) -> NDArray[np.float64] | None:
    """Look up what each rank's steps cost.

    Returns:
        The cost of each step, shape (ranks, steps), 0 where a rank makes no such step. None without ``costs``, for an
        epoch without a step, and for samples of an iterable dataset, which have no indices.
    """
    if costs is None or epoch.steps == 0 or epoch.is_iterable:
        return None
    return np.array([np.pad(_costs_of(drawn, costs), (0, epoch.steps - len(drawn.sizes))) for drawn in epoch.ranks])


def _costs_of(drawn: RankDraws, costs: SampleCosts) -> NDArray[np.float64]:
    names, places = np.unique(drawn.items, return_inverse=True)
    if len(names) and int(names[0]) < 0:
        raise InvalidOptionError(
            "audit was given cost= and a loader whose keys are no indices, so what one costs cannot be looked up. "
            "Leave cost out, or sample indices."
        )
    return costs.costs.of_batches(costs.of(names)[places], drawn.sizes)


def imbalance(costs: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Return the slowest rank's cost over the ranks' mean: over all steps, and in the worst step; None if all cost 0.

    Args:
        costs: The cost of each step, shape (ranks, steps).
    """
    slowest, mean = costs.max(axis=0), costs.mean(axis=0)
    if not mean.any():
        return None, None
    return float(slowest.sum() / mean.sum()), float((slowest[mean > 0] / mean[mean > 0]).max())


# Give this many examples.
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class About:
    """Word what was found in an epoch.

    Args:
        epoch: What was drawn.
        judged: How the epoch was judged.
        coding: Gives items their names.
        is_simulated: Whether a factory made the loaders of ranks that are simulated, without a process group.
    """

    epoch: EpochDraws
    judged: Judged
    coding: Coding
    is_simulated: bool = False

    def problem(self, kind: Kind, what: str, why: str, remedy: str) -> Problem:
        """Return a problem of this epoch."""
        return Problem(kind, what, where_in(self.epoch), why, remedy)

    def counts(self) -> str:
        """Say how many are missing, repeated and foreign, with examples."""
        of, found = f"of {self.epoch.expected} {self.epoch.units}", self.judged.found
        parts = []
        if found.lacking:
            parts.append(f"{found.lacking} {of} are missing{self._such(self.missing())}.")
        if found.extra:
            parts.append(self._extra())
        if found.unexpected:
            such = self._such(_placed(self.foreign()))
            parts.append(f"Ranks get {found.unexpected} {self.epoch.units} that one process never gets{such}.")
        return " ".join(parts)

    def _extra(self) -> str:
        """Say how many different ones are seen too often, and where it is not once each, how often in all."""
        found, units = self.judged.found, self.epoch.units
        different, such = len(found.repeated), self._such(_placed(self.repeated()))
        if not different:  # how many there are is all that is known of a world of one rank
            return f"Ranks get {found.extra} {units} too many."
        # Those of a part of an epoch, of which only the beginning was read, are not counted against its length.
        of = f" of {self.epoch.expected}" * (not self.epoch.is_sample)
        in_all = f", {found.extra} times too often in all" * (found.extra > different)
        return f"{different}{of} {units} are seen more often than in one process{in_all}{such}."

    def missing(self) -> tuple[str, ...]:
        """Return the names of some samples that ranks got too seldom."""
        return tuple(self.coding.name(int(code)) for code in self.judged.samples.missing[:EXAMPLES])

    def repeated(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the names of some samples that ranks saw too often, each with the ranks that got it."""
        return self._with_owners(self.judged.samples.repeated)

    def foreign(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the names of some samples that a single process never gets, each with the ranks that got it."""
        return self._with_owners(self.judged.samples.foreign)

    def samples_of(self, rank: int) -> str:
        """Say how many samples a rank got; nothing where only a part was drawn."""
        return "" if self.epoch.is_sample else f", {len(self.epoch.ranks[rank].items)} samples"

    def most_samples(self) -> str:
        """Say how many samples the rank with the most got; nothing where only a part was drawn."""
        return "" if self.epoch.is_sample else f", {max(len(drawn.items) for drawn in self.epoch.ranks)} samples"

    def _such(self, shown: Sequence[str]) -> str:
        such = "such as" if self.epoch.units == "samples" else "with samples such as"
        return f" ({such} {'; '.join(shown)})" if shown else ""

    def _with_owners(self, codes: Numbers) -> tuple[tuple[str, tuple[int, ...]], ...]:
        shown = [int(code) for code in codes[:EXAMPLES]]
        return tuple((self.coding.name(code), self._owners(code)) for code in shown)

    def _owners(self, code: int) -> tuple[int, ...]:
        return tuple(rank for rank, drawn in enumerate(self.epoch.ranks) if np.any(drawn.items == code))


def _placed(examples: Sequence[tuple[str, tuple[int, ...]]]) -> list[str]:
    """Return samples' names with the ranks that got them."""
    return [f"{name} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for name, ranks in examples]


def where_in(epoch: EpochDraws) -> str:
    """Say which epoch, on how many ranks."""
    return f"epoch {epoch.number}, {len(epoch.ranks)} ranks"


def shards_of(epoch: EpochDraws) -> list[int]:
    """Return how many samples or batches each rank got, by rank."""
    return [len(drawn.items if epoch.units == "samples" else drawn.sizes) for drawn in epoch.ranks]
