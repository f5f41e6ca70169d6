"""What the ranks got in an epoch, in numbers and in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_patch.auditing.drawn import Units

__all__ = ["EpochReport", "balance_text", "epoch_text", "summary_text", "waiting_text"]


@dataclass(frozen=True, slots=True)
class EpochReport:
    """Tell what the ranks got in one epoch.

    Attributes:
        epoch: The epoch's number, from 0.
        items: Number of samples that each rank got, shape (ranks,).
        steps: Number of batches that each rank got, shape (ranks,).
        units: What the numbers below count: samples, or batches where ranks shard whole batches.
        expected: How many a single process would get.
        distinct: How many different ones a single process would get, as far as they can be distinguished.
        missing: How many no rank got. None where only a part was looked at, or where samples cannot be compared: all
            are equal, or an iterable dataset makes new ones in each pass.
        repeated: How many times ranks got one more often than a single process would, padding included and foreign ones
            not. None where it is not known.
        padding: How many of these repeats fill the last round.
        dropped: How many of the missing ones the loader was asked to leave out.
        imbalance: The slowest rank's cost over the ranks' mean, over all steps; 1 is balance. None without ``cost``.
        worst_imbalance: The slowest rank's cost over the ranks' mean, in the worst step. None without ``cost``.
        foreign: How many ranks got that a single process never gets. None where it is not known.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> epoch, _ = audit(DataLoader(range(10), batch_size=2), world_size=4).epochs
        >>> epoch.expected, epoch.items, epoch.repeated, epoch.padding
        (10, (3, 3, 3, 3), 2, 2)
    """

    epoch: int
    items: tuple[int, ...]
    steps: tuple[int, ...]
    units: Units
    expected: int
    distinct: int
    missing: int | None
    repeated: int | None
    padding: int
    dropped: int
    foreign: int | None = 0
    imbalance: float | None = None
    worst_imbalance: float | None = None


def epoch_text(epoch: EpochReport) -> str:
    """Return in words what ranks got, and what is missing and repeated."""
    told = f"{_range(epoch.items)} samples in {_range(epoch.steps)} steps per rank; of {epoch.expected} {epoch.units}"
    told += f" ({epoch.distinct} different ones)" * (epoch.distinct < epoch.expected)
    if epoch.repeated is None:
        return f"{told}, missing and repeated: not known"
    told += ", missing: not known" if epoch.missing is None else f", {epoch.missing} missing"
    told += f" ({epoch.dropped} as the loader asks)" * (epoch.dropped > 0)
    told += f", {epoch.repeated} repeat{'s' * (epoch.repeated != 1)}"
    told += f" ({epoch.padding} to fill the last round)" * (epoch.padding > 0)
    return told + f", {epoch.foreign} that one process never gets" * ((epoch.foreign or 0) > 0)


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def balance_text(epoch: EpochReport, balanced: EpochReport | None) -> str | None:
    """Return in words how long ranks wait, without ``cost=`` and with it; None where costs are not known.

    Args:
        epoch: The epoch without.
        balanced: The same epoch with it; None where there is none.
    """
    if not epoch.imbalance:
        return None
    with_it = f" without cost=, {waiting_text(balanced.imbalance)} with it" if balanced and balanced.imbalance else ""
    return f"ranks wait {waiting_text(epoch.imbalance)} of the time{with_it}"


def waiting_text(imbalance: float) -> str:
    """Return the percentage of the time that the mean rank waits, where a step takes as long as its slowest rank.

    Examples:
        >>> waiting_text(1.5), waiting_text(1.004)
        ('33 %', '0.4 %')
    """
    share = 100 * (1 - 1 / imbalance)
    return f"{share:.1f} %" if 0.05 <= share < 9.95 else f"{share:.0f} %"


def summary_text(world_size: int, epochs: Sequence[EpochReport], is_sample: bool) -> str:
    """Return in a few words what right ranks got, in all epochs together.

    Args:
        world_size: The number of ranks.
        epochs: The epochs.
        is_sample: Whether only the first items of each rank were looked at.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> report = audit(DataLoader(range(103)), world_size=4)
        >>> summary_text(4, report.epochs, report.is_sample)
        '4 ranks x 26 steps, each of 103 samples once, 1 padding'
    """
    steps = _range([number for epoch in epochs for number in epoch.steps])
    units = f"{_range([epoch.expected for epoch in epochs])} {epochs[0].units}"
    counts = {
        "padding": [epoch.padding for epoch in epochs],
        "left out": [epoch.dropped for epoch in epochs],
        "missing": [(epoch.missing or epoch.dropped) - epoch.dropped for epoch in epochs],
        "repeated": [(epoch.repeated or epoch.padding) - epoch.padding for epoch in epochs],
        "foreign": [epoch.foreign or 0 for epoch in epochs],
    }
    if is_sample:
        got = f"the first {_range([sum(epoch.items) for epoch in epochs])} samples"
    elif any(epoch.repeated is None for epoch in epochs):
        got = f"{units} that cannot be compared"
    elif any(any(counts[wrong]) for wrong in ("missing", "repeated", "foreign")):
        got = f"of {units}"
    else:
        is_once = all(epoch.expected == epoch.distinct for epoch in epochs)
        got = f"each of {units} {'once' if is_once else 'as often as in one process'}"
    more = [f"{_range(found)} {what}" for what, found in counts.items() if any(found)]
    waits = [f"waiting {waiting_text(epoch.imbalance)}" for epoch in epochs if epoch.imbalance]
    return ", ".join([f"{world_size} ranks x {steps} steps", got, *more, *waits[:1]])
