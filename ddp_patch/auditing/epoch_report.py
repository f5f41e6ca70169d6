"""What was found in an epoch: problems, pictures, sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "EpochReport",
    "Kind",
    "Pictured",
    "Problem",
    "ShareMap",
    "StepMap",
    "Units",
    "Waits",
    "balance_text",
    "batches_text",
    "epoch_text",
    "problem_kinds",
    "sentence",
    "waiting_text",
]


def sentence(text: str) -> str:
    """Return a text that ends where a sentence ends.

    Examples:
        >>> sentence("no such file"), sentence("Is it there?")
        ('no such file.', 'Is it there?')
    """
    text = text.rstrip()
    return text if text.endswith((".", "!", "?", ":", "…")) else f"{text}."


Kind: TypeAlias = Literal[
    "not_sharded",
    "ignores_world_size",
    "double_sharding",
    "ranks_disagree",
    "split_batch",
    "missing",
    "tail_lost",
    "repeated",
    "foreign",
    "padding",
    "uneven_steps",
    "idle_workers",
    "same_order",
    "wrong_length",
    "error",
]
problem_kinds: Mapping[Kind, str] = {
    "not_sharded": "every rank gets all data, or ranks get the same part of it",
    "ignores_world_size": "make(0, 1) returns what rank 0 of several gets",
    "double_sharding": "data is sharded twice",
    "ranks_disagree": "the ranks use different orders",
    "split_batch": "a batch of the batch sampler reaches several ranks in pieces",
    "missing": "samples that no rank gets",
    "tail_lost": "the same few samples are left out in every epoch",
    "repeated": "samples that are seen more than once",
    "foreign": "samples that ranks get and one process never gets",
    "padding": "more samples are repeated than fill the last round",
    "uneven_steps": "ranks make different numbers of steps",
    "idle_workers": "workers of an iterable dataset get nothing to read",
    "same_order": "every epoch has the same order",
    "wrong_length": "len() of the loader is not the number of its steps",
    "error": "a rank's sampler raises",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Describe something that is wrong, and what to do about it.

    Attributes:
        kind: The kind of problem, a key of ``problem_kinds``.
        what: What was found, with its numbers.
        where: The epoch and the ranks.
        why: Why it matters, and where it comes from.
        remedy: What to do about it.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> (problem,) = audit(DataLoader(range(8)), world_size=2, patch=False).problems
        >>> problem.kind, problem.where, problem.what
        ('not_sharded', 'epoch 0, 2 ranks', 'Each of 2 ranks gets all of the data, 8 samples.')
    """

    kind: Kind
    what: str
    where: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.where}): {self.what} {self.why} {self.remedy}"


Counts: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ShareMap:
    """Map the samples that a single process draws to the ranks that get them.

    The order of the single process is cut into columns. Its k-th draw of a sample goes to the rank that gets this
    sample for the k-th time, counted over all ranks in the order of their steps. Where ranks get
    the sample more often than the single process draws it, these positions are got again from the first one on.

    Attributes:
        positions: How many samples the single process draws.
        width: How many positions a column holds; the last one may hold fewer.
        names: The sample at each position; empty where there are many.
        seen: How often ranks get a position, each with how many positions they get so often. Without those that no rank
            got where only a part of the epoch was drawn.
        times: How often ranks get each position; empty where there are many.
        levels: How many positions no rank got, ranks got once, and more often, shape (columns, 3).
        got: How many positions each rank got, shape (ranks, columns).
        again: How many of them another rank gets, too, or the same rank again, shape (ranks, columns).
        foreign: How many samples each rank got that the single process does not draw, shape (ranks,).
        reason: Why positions are got again: to fill the last round (padding), or otherwise.
    """

    positions: int = 0
    width: int = 1
    names: tuple[str, ...] = ()
    seen: tuple[tuple[int, int], ...] = ()
    times: tuple[int, ...] = ()
    levels: Counts = ()
    got: Counts = ()
    again: Counts = ()
    foreign: tuple[int, ...] = ()
    reason: Literal["padding", "repeated"] = "repeated"


@dataclass(frozen=True, slots=True)
class StepMap:
    """Map each rank's steps to the sizes of their batches.

    The steps of the rank with the most steps are cut into columns.

    Attributes:
        steps: How many steps that rank makes.
        width: How many steps a column holds; the last one may hold fewer.
        sizes: How many samples a batch has on average, shape (ranks, columns); 0 where a rank makes no such step.
        lacking: How many steps a rank does not make, shape (ranks, columns).
        largest: How many samples the largest batch has.
    """

    steps: int = 0
    width: int = 1
    sizes: tuple[tuple[float, ...], ...] = ()
    lacking: Counts = ()
    largest: int = 0


@dataclass(frozen=True, slots=True)
class Waits:
    """Hold how long ranks work in a few consecutive steps, of which they wait for the slowest.

    The steps are those that are most like the whole epoch: about as dear, and about as uneven. Costs are in the unit of
    the user's ``cost``.

    Attributes:
        first: The number of the first of these steps.
        ranks: The ranks that are shown: some where there are many.
        costs: What each step costs each of these ranks, shape (ranks, steps); 0 where a rank makes no such step.
        slowest: What each step costs the slowest rank of all, shape (steps,).
        imbalance: The slowest rank's cost over the ranks' mean, over all steps of the epoch.
    """

    first: int
    ranks: tuple[int, ...]
    costs: tuple[tuple[float, ...], ...]
    slowest: tuple[float, ...]
    imbalance: float


@dataclass(frozen=True, slots=True)
class Pictured:
    """Hold what pictures are drawn from: the first epoch that has a problem, or else the first epoch.

    Attributes:
        epoch: The epoch's number.
        shares: Which rank gets what; empty where samples cannot be compared.
        steps: How large batches are.
        waits: How ranks wait for each other; None without ``cost``, or where nothing costs anything.
    """

    epoch: int = 0
    shares: ShareMap = ShareMap()
    steps: StepMap = StepMap()
    waits: Waits | None = None


Units: TypeAlias = Literal["samples", "batches"]
# List sizes of global batches one by one up to this many.
_FEW = 4


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
        missing_examples: The names of some samples that no rank got.
        repeated: How many times ranks got one more often than a single process would, padding included and foreign ones
            not. None where it is not known.
        repeated_examples: The names of some samples that are seen more than once, each with the ranks that got it.
        padding: How many of these repeats fill the last round.
        dropped: How many of the missing ones the loader was asked to leave out.
        global_batches: Sizes of global batches, in samples, each with how many steps in a row have it. So
            ``((64, 3), (40, 1))`` means 64 samples in each of the first 3 steps, then 40 in one.
        imbalance: The slowest rank's cost over the ranks' mean, over all steps; 1 is balance. None without ``cost``.
        worst_imbalance: The slowest rank's cost over the ranks' mean, in the worst step. None without ``cost``.
        foreign: How many ranks got that a single process never gets. None where it is not known.
        foreign_examples: The names of some samples that a single process never gets, each with the ranks that got it.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> epoch, _ = audit(DataLoader(range(10), batch_size=2), world_size=4).epochs
        >>> epoch.expected, epoch.items, epoch.repeated, epoch.padding, epoch.global_batches
        (10, (3, 3, 3, 3), 2, 2, ((8, 1), (4, 1)))
    """

    epoch: int
    items: tuple[int, ...]
    steps: tuple[int, ...]
    units: Units
    expected: int
    distinct: int
    missing: int | None
    missing_examples: tuple[str, ...]
    repeated: int | None
    repeated_examples: tuple[tuple[str, tuple[int, ...]], ...]
    padding: int
    dropped: int
    global_batches: tuple[tuple[int, int], ...]
    imbalance: float | None = None
    worst_imbalance: float | None = None
    foreign: int | None = 0
    foreign_examples: tuple[tuple[str, tuple[int, ...]], ...] = ()


def epoch_text(epoch: EpochReport) -> str:
    """Return in words what ranks got, and what is missing and repeated."""
    parts = [
        f"{_range(epoch.items)} samples in {_range(epoch.steps)} steps per rank; of {epoch.expected} {epoch.units}"
        + (f" ({epoch.distinct} different ones)" if epoch.distinct < epoch.expected else ""),
        *_coverage_text(epoch),
    ]
    return ", ".join(parts)


def _coverage_text(epoch: EpochReport) -> list[str]:
    if epoch.repeated is None:
        return ["missing and repeated: not known"]
    missing = "missing: not known" if epoch.missing is None else f"{epoch.missing} missing"
    return [
        missing + (f" ({epoch.dropped} as the loader asks)" if epoch.dropped else ""),
        f"{epoch.repeated} repeat{'s' * (epoch.repeated != 1)}"
        + (f" ({epoch.padding} to fill the last round)" if epoch.padding else ""),
        *([f"{epoch.foreign} that one process never gets"] if epoch.foreign else []),
    ]


def batches_text(batches: Sequence[tuple[int, int]]) -> str:
    """Return in words how large global batches are, given each run of equal ones: a size and a number of steps."""
    if len(batches) > _FEW:
        steps = sum(steps for _, steps in batches)
        mean = sum(size * steps for size, steps in batches) / steps
        return f"{_range([size for size, _ in batches])} samples, {mean:.4g} on average, in {steps} steps"
    runs = [(str(size), f"in each of {steps} steps" if steps > 1 else "in 1 step") for size, steps in batches]
    return ", then ".join(f"{size}{'' if at else ' samples'} {when}" for at, (size, when) in enumerate(runs)) or "none"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def balance_text(epoch: EpochReport, balanced: EpochReport | None) -> str | None:
    """Return in words how long ranks wait, without ``cost=`` and with it; None where costs are not known.

    Args:
        epoch: The epoch without.
        balanced: The same epoch with it; None where there is none.
    """
    both = [epoch] if balanced is None else [epoch, balanced]
    found = [(one.imbalance, one.worst_imbalance) for one in both if one.imbalance and one.worst_imbalance]
    if len(found) < len(both):
        return None
    waiting = [waiting_text(all_steps) for all_steps, _ in found]
    shown, worst = ([f"{each:.4g}" for each in column] for column in zip(*found, strict=True))
    without = "" if balanced is None else " without cost="
    with_it = "".join(f", {share} with it" for share in waiting[1:])
    return (
        f"ranks wait {waiting[0]} of the time{without}{with_it}; the slowest rank takes {' and '.join(shown)} times "
        f"the mean, in the worst step {' and '.join(worst)}"
    )


def waiting_text(imbalance: float) -> str:
    """Return the percentage of the time that the mean rank waits, where a step takes as long as its slowest rank.

    Examples:
        >>> waiting_text(1.5), waiting_text(1.004)
        ('33 %', '0.4 %')
    """
    share = 100 * (1 - 1 / imbalance)
    return f"{share:.1f} %" if 0.05 <= share < 9.95 else f"{share:.0f} %"
