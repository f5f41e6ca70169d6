"""From what ranks drew to whether their shares are disjoint and complete."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_patch.auditing.draw.coding import Numbers
from ddp_patch.auditing.draw.drawing import Drawn
from ddp_patch.auditing.draw.traits import Traits
from ddp_patch.auditing.judge.counting import Coverage, as_units, batches_of, coverage
from ddp_patch.auditing.report import Units

__all__ = [
    "Allowance",
    "Epoch",
    "Judged",
    "Torn",
    "allowance",
    "in_its_units",
    "is_torn",
    "judge_epoch",
    "largest_batch",
    "signature",
    "torn",
]


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch as every rank drew it, and as one process would.

    Attributes:
        number: Which one.
        ranks: What each rank drew.
        alone: What one process would draw, last incomplete batch included.
        units: What is shared.
        is_iterable: Whether items are samples that were read, not indices.
    """

    number: int
    ranks: Sequence[Drawn]
    alone: Drawn
    units: Units
    is_iterable: bool

    @property
    def is_sample(self) -> bool:
        """Whether some of it was not drawn."""
        return not all(drawn.ended for drawn in (*self.ranks, self.alone))

    @property
    def expected(self) -> int:
        """How many samples or batches one process would get."""
        return len(self.alone.items) if self.units == "samples" else len(self.alone.sizes)

    @property
    def is_constant(self) -> bool:
        """Whether all of several samples are equal to one another, which indices of different samples never are."""
        items = self.alone.items
        return len(items) > 1 and (self.is_iterable or items[0] < 0) and bool((items == items[0]).all())

    @property
    def is_made_anew(self) -> bool:
        """Whether hardly any sample that ranks read is one that one process read: each time they are others."""
        if not self.is_iterable or self.is_sample or not len(self.alone.items):
            return False
        # Rank 0 begins with the random states of the one process, and may make the same.
        got = np.concatenate([self.alone.items[:0], *(drawn.items for drawn in self.ranks[1:])])
        return bool(10 * np.count_nonzero(np.isin(got, self.alone.items)) < len(got))

    def samples(self) -> Coverage:
        """Return what is missing and repeated of the samples."""
        return self._counted(self.alone.items, [drawn.items for drawn in self.ranks])

    def batches(self) -> Coverage:
        """Return what is missing and repeated of the batches."""
        expected, *shares = as_units([self.alone, *self.ranks])
        return self._counted(expected, shares)

    def _counted(self, expected: Numbers, shares: Sequence[Numbers]) -> Coverage:
        found = _of_sample(expected, shares) if self.is_sample else coverage(expected, shares)
        if self.is_constant or self.is_made_anew:
            return found.unknown()
        return found.of_another_draw() if len(shares) == 1 else found


def _of_sample(expected: Numbers, shares: Sequence[Numbers]) -> Coverage:
    # Only what came twice can be judged, where one process would get nothing twice.
    distinct = len(np.unique(expected))
    found = replace(coverage(np.unique(np.concatenate(shares)), shares), distinct=distinct)
    return found if distinct == len(expected) else found.unknown()


@dataclass(frozen=True, slots=True)
class Allowance:
    """What may be missing or repeated.

    Attributes:
        padding: How many units may be repeated to fill the last round.
        dropped: How many samples may be left out because the loader was asked to.
        uneven: By how many steps ranks may differ.
    """

    padding: int
    dropped: int
    uneven: int


def allowance(epoch: Epoch, traits: Traits, uneven: str | None, pads: bool) -> Allowance:
    """Return what may be missing or repeated in an epoch.

    Args:
        epoch: As it was drawn.
        traits: Of rank 0's loader.
        uneven: The option of ``patch_dataloader_to_ddp``, if it was given.
        pads: Whether samples may be repeated to fill the last round.
    """
    world = len(epoch.ranks)
    dropped = world - 1 if uneven == "drop" or traits.drops_round else 0
    if epoch.units == "samples" and traits.drops_batch:
        dropped += world * traits.batchers * (largest_batch(epoch, traits) - 1)
    padding = -epoch.expected % world if pads and uneven in (None, "pad") else 0
    return Allowance(padding, dropped, uneven=int(uneven == "keep"))


def largest_batch(epoch: Epoch, traits: Traits) -> int:
    """Return how many samples the largest batch has, as far as was drawn or the loader says."""
    return max(int(drawn.sizes.max(initial=traits.batch_size)) for drawn in (*epoch.ranks, epoch.alone))


@dataclass(frozen=True, slots=True)
class Judged:
    """What one epoch came to.

    Attributes:
        found: What is missing and repeated of the units.
        samples: The same of the samples.
        padding: How many of the repeated units fill the last round.
        dropped: How many of the missing ones were asked to be left out.
        is_covered: Whether nothing else is missing or repeated.
    """

    found: Coverage
    samples: Coverage
    padding: int
    dropped: int
    is_covered: bool


def judge_epoch(epoch: Epoch, allowed: Allowance) -> Judged:
    """Say whether the ranks' shares are disjoint and complete."""
    samples = epoch.samples()
    found = samples if epoch.units == "samples" else epoch.batches()
    padding = found.extra if found.extra <= allowed.padding else 0
    dropped = found.lacking if found.lacking <= allowed.dropped else 0
    return Judged(found, samples, padding, dropped, padding == found.extra and dropped == found.lacking)


def in_its_units(epoch: Epoch, allowance_of: Callable[[Epoch], Allowance]) -> Epoch:
    """Return the epoch counted in samples where ranks share samples and each makes batches of its own of them."""
    if epoch.units == "samples" or judge_epoch(epoch, allowance_of(epoch)).is_covered or is_torn(epoch):
        return epoch
    counted = replace(epoch, units="samples")
    return counted if judge_epoch(counted, allowance_of(counted)).is_covered else epoch


@dataclass(frozen=True, slots=True)
class Torn:
    """Batches of one process of which two or more ranks have parts.

    Attributes:
        wholes: How many there are.
        parts: How many of the ranks' batches are parts of them.
        foreign: How many of the ranks' batches are none that one process makes.
    """

    wholes: int
    parts: int
    foreign: int


def torn(epoch: Epoch) -> Torn:
    """Look for batches of one process in pieces."""
    wholes = {frozenset(batch.tolist()) for batch in batches_of(epoch.alone)}
    holders: dict[int, list[frozenset[int]]] = {}
    for whole in wholes:
        for item in whole:
            holders.setdefault(item, []).append(whole)
    foreign: list[list[frozenset[int]]] = []  # of each, what it is a part of
    ranks_of: dict[frozenset[int], set[int]] = {}
    for rank, drawn in enumerate(epoch.ranks):
        for batch in {frozenset(batch.tolist()) for batch in batches_of(drawn)} - wholes:
            foreign.append([whole for whole in holders.get(next(iter(batch), -1), []) if batch < whole])
            for whole in foreign[-1]:
                ranks_of.setdefault(whole, set()).add(rank)
    in_pieces = {whole for whole, ranks in ranks_of.items() if len(ranks) > 1}
    return Torn(len(in_pieces), sum(not in_pieces.isdisjoint(of) for of in foreign), len(foreign))


def is_torn(epoch: Epoch) -> bool:
    """Tell whether most batches that one process does not make are parts of those that it makes, on several ranks."""
    found = torn(epoch)
    return 2 * found.parts > found.foreign


def signature(ranks: Sequence[Drawn]) -> bytes:
    """Return what tells one epoch's order from another's."""
    running = hashlib.blake2b(digest_size=16)
    for drawn in ranks:
        running.update(b"%d:" % len(drawn.items))
        for start in range(0, len(drawn.items), 2**20):
            running.update(drawn.items[start : start + 2**20].astype(np.int64).tobytes())
    return running.digest()
