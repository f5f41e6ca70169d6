"""Judge whether the ranks' shards of an epoch are disjoint and complete."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ddp_patch.auditing.draw.coding import Numbers
from ddp_patch.auditing.draw.drawn import Epoch
from ddp_patch.auditing.draw.traits import Traits
from ddp_patch.auditing.judge.counting import Coverage, coverage_of_batches, coverage_of_samples
from ddp_patch.auditing.judge.splitting import Split, split_of

__all__ = ["Allowance", "Judged", "allowance", "judge", "judge_against", "largest_batch"]


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


def allowance(epoch: Epoch, traits: Traits, uneven: str | None, pads: bool) -> Allowance:
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


def largest_batch(epoch: Epoch, traits: Traits) -> int:
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
    epoch: Epoch, allowance_of: Callable[[Epoch], Allowance], *, may_rebatch: bool = True
) -> tuple[Epoch, Judged]:
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


def judge_against(whole: Numbers, epoch: Epoch, allowance_of: Callable[[Epoch], Allowance]) -> tuple[Epoch, Judged]:
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
