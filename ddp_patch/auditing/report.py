"""Report what an audit found, as frozen values that print as text, Markdown or JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from ddp_patch.auditing.pictured import Pictured
from ddp_patch.errors import AuditError

__all__ = ["EpochReport", "Kind", "Problem", "Report", "Units", "as_markdown", "problem_kinds", "waiting_text"]

Kind: TypeAlias = Literal[
    "not_sharded",
    "ignores_world_size",
    "double_sharding",
    "ranks_disagree",
    "torn_batch",
    "missing",
    "tail_lost",
    "repeated",
    "foreign",
    "padding",
    "uneven_steps",
    "same_order",
    "wrong_length",
    "error",
]
problem_kinds: Mapping[Kind, str] = {
    "not_sharded": "ranks get all data, or the same share of it",
    "ignores_world_size": "make(0, 1) returns what rank 0 of several gets",
    "double_sharding": "a share is shared again",
    "ranks_disagree": "the ranks draw different orders",
    "torn_batch": "a batch of the batch sampler is torn apart",
    "missing": "samples that no rank gets",
    "tail_lost": "the same few samples are lost in every epoch",
    "repeated": "samples that ranks get too often",
    "foreign": "samples that ranks get and one process never gets",
    "padding": "more samples are repeated than fill the last round",
    "uneven_steps": "ranks make different numbers of steps",
    "same_order": "every epoch has the same order",
    "wrong_length": "len() of the loader is not the number of its steps",
    "error": "a rank's sampler raises",
}
Units: TypeAlias = Literal["samples", "batches"]
# List sizes of global batches one by one up to this many.
_FEW = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """Describe something that does not hold, and what to do about it.

    Attributes:
        kind: The kind of problem, a key of ``problem_kinds``.
        what: What was found, with its numbers.
        where: The epoch and the ranks.
        why: What it does to a training, and where it comes from.
        remedy: What to do about it.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> (problem,) = audit(DataLoader(range(8)), world_size=2, patch=False).problems
        >>> problem.kind, problem.where, problem.what
        ('not_sharded', 'epoch 0, 2 ranks', 'Every one of 2 ranks gets the whole stream, 8 samples.')
    """

    kind: Kind
    what: str
    where: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.where}): {self.what} {self.why} {self.remedy}"


@dataclass(frozen=True, slots=True)
class EpochReport:
    """Tell what the ranks got in one epoch.

    Attributes:
        epoch: The epoch's number, from 0.
        items: Number of samples that each rank got, shape (ranks,).
        steps: Number of batches that each rank got, shape (ranks,).
        units: What the numbers below count: samples, or batches where ranks shard whole batches.
        expected: How many a single process would get.
        distinct: How many different ones a single process would get, as far as they can be told apart.
        missing: How many no rank got. None where only a part was drawn, or where samples cannot be compared: all are
            equal, or an iterable dataset makes new ones in each pass.
        missing_examples: The names of some samples that no rank got.
        repeated: How many ranks got more often than a single process would, padding included and foreign ones not. None
            where it cannot be told.
        repeated_examples: The names of some samples that ranks got too often, each with the ranks that got it.
        padding: How many of the repeated ones fill the last round.
        dropped: How many of the missing ones the loader was asked to leave out.
        global_batches: Sizes of global batches, in samples, each with how many steps in a row have it. So
            ``((64, 3), (40, 1))`` means 64 samples in each of the first 3 steps, then 40 in one.
        imbalance: The slowest rank's cost over the ranks' mean, over all steps; 1 is balance. None without ``cost``.
        worst_imbalance: The slowest rank's cost over the ranks' mean, in the worst step. None without ``cost``.
        foreign: How many ranks got that a single process never gets. None where it cannot be told.
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


@dataclass(frozen=True, slots=True)
class Report:
    """Tell what every rank would get of a loader.

    Attributes:
        name: The name of the loader's class, or of the function that makes loaders.
        how: How the loader was sharded and drawn, in words.
        world_size: The number of ranks.
        units: What ranks shard: whole batches where every epoch was counted in batches, otherwise samples.
        epochs: What the ranks got, epoch by epoch.
        epochs_differ: Whether every epoch had another order; None where there was one epoch.
        seeds_agree: Whether ranks that are seeded differently draw one order. None where not even ranks that are
            seeded alike do, or where it cannot be told.
        is_sample: Whether only the first items of each rank were drawn.
        seconds: Seconds that rank 0 took to draw its first epoch.
        memory: Bytes by which the process grew meanwhile, measured between blocks of batches. None where the system
            does not report it.
        problems: What does not hold.
        allowed: What does not hold but was allowed.
        pictured: What pictures are drawn from.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> report = audit(DataLoader(range(10), batch_size=2, shuffle=True), world_size=2)
        >>> report.ok, report.world_size, report.units, report.epochs_differ, report.seeds_agree
        (True, 2, 'samples', True, True)
        >>> print(str(report).splitlines()[0])
        DataLoader on 2 ranks: all holds
    """

    name: str
    how: str
    world_size: int
    units: Units
    epochs: tuple[EpochReport, ...]
    epochs_differ: bool | None
    seeds_agree: bool | None
    is_sample: bool
    seconds: float
    memory: int | None
    problems: tuple[Problem, ...]
    allowed: tuple[Problem, ...] = ()
    pictured: Pictured = field(default_factory=Pictured, repr=False)
    balanced: "Report | None" = None
    not_balanced: str | None = None

    @property
    def ok(self) -> bool:
        """Tell whether all holds: there is no problem that was not allowed."""
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raise an error that lists the problems, if there are any.

        Raises:
            AuditError: Something does not hold.
        """
        if self.problems:
            raise AuditError(str(self))

    def facts(self) -> list[tuple[str, str]]:
        """Return what was found as pairs of a name and a text, to show to people."""
        told = [
            ("shared", f"{self.units}, over {self.world_size} ranks"),
            ("drawn", self.how + (" (a sample: the first items of each rank)" if self.is_sample else "")),
        ]
        told += [(f"epoch {epoch.epoch}", _epoch_text(epoch)) for epoch in self.epochs]
        batches = [_batches_text(epoch.global_batches) for epoch in self.epochs]
        if len(set(batches)) == 1:
            told.append(("global batch", batches[0]))
        else:
            told += [(f"global batch {epoch.epoch}", text) for epoch, text in zip(self.epochs, batches, strict=True)]
        told += [("epochs differ", _yes(self.epochs_differ)), ("seeds agree", _yes(self.seeds_agree))]
        memory = "" if self.memory is None else f", {self.memory / 2**20:.0f} MiB more"
        told += [("allowed", f"{problem.kind}: {problem.what}") for problem in self.allowed]
        return [*told, ("one rank's epoch", f"{self.seconds:.3f} s{memory}")]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values: numbers, strings, lists and dicts; without ``pictured``."""
        told = asdict(self)
        del told["pictured"]
        plain: dict[str, Any] = json.loads(json.dumps(told))
        return {"ok": self.ok, **plain}

    def to_markdown(self) -> str:
        """Return the report as Markdown: a heading, a table, and the problems below the table."""
        rows = [f"| {name} | {as_markdown(value)} |" for name, value in self.facts()]
        problems = [
            f"- **{as_markdown(problem.kind)}** ({as_markdown(problem.where)}): {as_markdown(problem.what)} "
            f"{as_markdown(problem.why)} *{as_markdown(problem.remedy)}*"
            for problem in self.problems
        ]
        heading = f"### {'✔' if self.ok else '✘'} {as_markdown(self.name)}: {'holds' if self.ok else 'does not hold'}"
        return "\n".join([heading, "", "| | |", "| --- | --- |", *rows, *([""] if problems else []), *problems])

    def __str__(self) -> str:
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        lines = [f"{self.name} on {self.world_size} ranks: {'all holds' if self.ok else count}"]
        lines += [f"  {name}: {value}" for name, value in self.facts()]
        for problem in self.problems:
            lines += [f"  ✘ {problem.kind} ({problem.where})", f"    {problem.what} {problem.why}"]
            lines += [f"    Remedy: {problem.remedy}"]
        return "\n".join(lines)


def _epoch_text(epoch: EpochReport) -> str:
    parts = [
        f"{_range(epoch.items)} samples and {_range(epoch.steps)} steps per rank of {epoch.expected} {epoch.units}"
        + (f" ({epoch.distinct} different ones)" if epoch.distinct < epoch.expected else ""),
        *_coverage_text(epoch),
    ]
    if epoch.imbalance is not None and epoch.worst_imbalance is not None:
        parts.append(f"slowest rank {epoch.imbalance:.2f} of the mean, {epoch.worst_imbalance:.2f} in the worst step")
    return ", ".join(parts)


def _coverage_text(epoch: EpochReport) -> list[str]:
    if epoch.repeated is None:
        return ["missing and repeated ones not known"]
    missing = "missing ones not told of a sample" if epoch.missing is None else f"{epoch.missing} missing"
    return [
        missing + (f" ({epoch.dropped} as asked for)" if epoch.dropped else ""),
        f"{epoch.repeated} repeated" + (f" ({epoch.padding} to fill the last round)" if epoch.padding else ""),
        *([f"{epoch.foreign} that one process never gets"] if epoch.foreign else []),
    ]


def _batches_text(batches: Sequence[tuple[int, int]]) -> str:
    if len(batches) > _FEW:
        steps = sum(steps for _, steps in batches)
        mean = sum(size * steps for size, steps in batches) / steps
        return f"{_range([size for size, _ in batches])} samples, {mean:.4g} on average, in {steps} steps"
    return ", then ".join(f"{size} in {steps} step{'s' if steps > 1 else ''}" for size, steps in batches) or "none"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "not known"}[value]


def waiting_text(imbalance: float | None) -> str:
    """Return in words which share of the time the mean rank waits, where a step takes what the slowest rank costs.

    Examples:
        >>> waiting_text(1.5), waiting_text(1.004), waiting_text(None)
        ('33 %', '0.4 %', 'an unknown part')
    """
    if imbalance is None:
        return "an unknown part"
    share = 100 * (1 - 1 / imbalance)
    return f"{share:.1f} %" if 0.05 <= share < 9.95 else f"{share:.0f} %"


def as_markdown(text: str) -> str:
    """Return Markdown that shows a text as it is, in one line."""
    # Leave underscores within a word: Markdown takes them as they are.
    special = r"[\\`*\[\]<>|]|(?<![^\W_])_+|_+(?![^\W_])"
    return re.sub(special, lambda found: "".join(f"\\{each}" for each in found[0]), " ".join(text.split()))
