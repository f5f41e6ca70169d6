"""From what ranks drew to whether their shares are disjoint and complete."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_patch.auditing.coding import Numbers
from ddp_patch.auditing.counting import Coverage, as_units, batches_of, coverage
from ddp_patch.auditing.drawing import Drawn
from ddp_patch.auditing.report import Units
from ddp_patch.auditing.traits import Traits

__all__ = ["Allowance", "Epoch", "Judged", "allowance", "judge_epoch", "signature"]


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch as every rank drew it, and as one process would.

    Attributes:
        number: Which one.
        ranks: What each rank drew.
        alone: What one process would draw, last incomplete batch included.
        units: What is shared.
    """

    number: int
    ranks: Sequence[Drawn]
    alone: Drawn
    units: Units

    @property
    def is_sample(self) -> bool:
        """Whether some of it was not drawn."""
        return not all(drawn.ended for drawn in (*self.ranks, self.alone))

    @property
    def expected(self) -> int:
        """How many samples or batches one process would get."""
        return len(self.alone.items) if self.units == "samples" else len(self.alone.sizes)

    def samples(self) -> Coverage:
        """Return what is missing and repeated of the samples."""
        return _counted(self.alone.items, [drawn.items for drawn in self.ranks], self.is_sample)

    def batches(self) -> Coverage:
        """Return what is missing and repeated of the batches."""
        expected, *shares = as_units([self.alone, *self.ranks])
        return _counted(expected, shares, self.is_sample)


def _counted(expected: Numbers, shares: Sequence[Numbers], is_sample: bool) -> Coverage:
    if not is_sample:
        return coverage(expected, shares)
    # Of a sample only what came twice can be judged, where one process would get nothing twice.
    none, distinct = expected[:0], len(np.unique(expected))
    if distinct < len(expected):
        return Coverage(none, 0, none, 0, distinct, is_known=False)
    return replace(coverage(np.unique(np.concatenate(shares)), shares), distinct=distinct)


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
        largest = max(int(drawn.sizes.max(initial=traits.batch_size)) for drawn in (*epoch.ranks, epoch.alone))
        dropped += world * max(1, traits.num_workers) * (largest - 1)
    padding = -epoch.expected % world if pads and uneven in (None, "pad") else 0
    return Allowance(padding, dropped, uneven=int(uneven == "keep"))


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


def is_torn(epoch: Epoch) -> bool:
    """Tell whether most batches that one process does not make are parts of those that it makes."""
    whole = {frozenset(batch.tolist()) for batch in batches_of(epoch.alone)}
    foreign = {frozenset(batch.tolist()) for drawn in epoch.ranks for batch in batches_of(drawn)} - whole
    holders: dict[int, list[frozenset[int]]] = {}
    for batch in whole:
        for item in batch:
            holders.setdefault(item, []).append(batch)
    parts = sum(any(part < batch for item in part for batch in holders.get(item, [])) for part in foreign)
    return 2 * parts > len(foreign)


def signature(ranks: Sequence[Drawn]) -> bytes:
    """Return what tells one epoch's order from another's."""
    running = hashlib.blake2b(digest_size=16)
    for drawn in ranks:
        running.update(b"%d:" % len(drawn.items))
        for start in range(0, len(drawn.items), 2**20):
            running.update(drawn.items[start : start + 2**20].astype(np.int64).tobytes())
    return running.digest()
