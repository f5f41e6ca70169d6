"""Report what an audit found, as frozen values that print as text, Markdown or JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from ddp_patch.auditing.epoch_report import EpochReport, Units, balance_text, batches_text, epoch_text
from ddp_patch.auditing.pictured import Pictured
from ddp_patch.errors import AuditError

__all__ = ["Kind", "Problem", "Report", "as_markdown", "problem_kinds"]

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


@dataclass(frozen=True, slots=True)
class Problem:
    """Describe something that is wrong, and what to do about it.

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
        problems: What is wrong.
        allowed: What is wrong but was allowed.
        pictured: What pictures are drawn from.
        balanced: The report of the same loader patched with ``cost=``, too. Its problems are among this
            report's problems. None without ``cost``, and where it cannot be balanced.
        why_not_balanced: Why it cannot; None where it can, and without ``cost``.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> report = audit(DataLoader(range(10), batch_size=2, shuffle=True), world_size=2)
        >>> report.ok, report.world_size, report.units, report.epochs_differ, report.seeds_agree
        (True, 2, 'samples', True, True)
        >>> print(str(report).splitlines()[0])
        DataLoader on 2 ranks: PASS
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
    why_not_balanced: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the loader passes: there is no problem that was not allowed."""
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raise an error that lists the problems, if there are any.

        Raises:
            AuditError: There are problems.
        """
        if self.problems:
            raise AuditError(str(self))

    def beside(self, balanced: "Report") -> "Report":
        """Return this report with that of the same loader patched with ``cost=``, whose problems become its own."""
        known = {problem.kind for problem in (*self.problems, *self.allowed)}

        def new(problems: Sequence[Problem]) -> tuple[Problem, ...]:
            fresh = (problem for problem in problems if problem.kind not in known)
            return tuple(replace(problem, where=f"with cost=, {problem.where}") for problem in fresh)

        problems, allowed = self.problems + new(balanced.problems), self.allowed + new(balanced.allowed)
        return replace(self, balanced=balanced, problems=problems, allowed=allowed)

    def facts(self) -> list[tuple[str, str]]:
        """Return what was found as pairs of a name and a text, to show to people."""
        told = [
            ("shared", f"{self.units}, over {self.world_size} ranks"),
            ("drawn", self.how + (" (a sample: the first items of each rank)" if self.is_sample else "")),
        ]
        told += [(f"epoch {epoch.epoch}", epoch_text(epoch)) for epoch in self.epochs]
        batches = [batches_text(epoch.global_batches) for epoch in self.epochs]
        if len(set(batches)) == 1:
            told.append(("global batch", batches[0]))
        else:
            told += [(f"global batch {epoch.epoch}", text) for epoch, text in zip(self.epochs, batches, strict=True)]
        told += self._balance()
        told += [("epochs differ", _yes(self.epochs_differ)), ("seeds agree", _yes(self.seeds_agree))]
        memory = "" if self.memory is None else f", {self.memory / 2**20:.0f} MiB more"
        told += [("allowed", f"{problem.kind}: {problem.what}") for problem in self.allowed]
        return [*told, ("one rank's epoch", f"{self.seconds:.3f} s{memory}")]

    def _balance(self) -> list[tuple[str, str]]:
        """Say how ranks wait for each other in each epoch, and whether the loader passes with ``cost=``, too."""
        balanced = [None] * len(self.epochs) if self.balanced is None else self.balanced.epochs
        texts = [balance_text(epoch, other) for epoch, other in zip(self.epochs, balanced, strict=True)]
        told = [(f"balance {epoch.epoch}", text) for epoch, text in zip(self.epochs, texts, strict=True) if text]
        if self.balanced is not None:
            told.append(("with cost=", "PASS" if self.balanced.ok else "FAIL"))
        if self.why_not_balanced is not None:
            told.append(("with cost=", f"not drawn. {self.why_not_balanced}"))
        return told

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values: numbers, strings, lists and dicts; without ``pictured``."""
        told = asdict(replace(self, balanced=None))
        del told["pictured"]
        plain: dict[str, Any] = json.loads(json.dumps(told))
        return {"ok": self.ok, **plain, "balanced": self.balanced and self.balanced.to_dict()}

    def to_markdown(self) -> str:
        """Return the report as Markdown: a heading, a table, and the problems below the table."""
        rows = [f"| {name} | {as_markdown(value)} |" for name, value in self.facts()]
        problems = [
            f"- **{as_markdown(problem.kind)}** ({as_markdown(problem.where)}): {as_markdown(problem.what)} "
            f"{as_markdown(problem.why)} *{as_markdown(problem.remedy)}*"
            for problem in self.problems
        ]
        heading = f"### {'✔' if self.ok else '✘'} {as_markdown(self.name)}: {'PASS' if self.ok else 'FAIL'}"
        return "\n".join([heading, "", "| | |", "| --- | --- |", *rows, *([""] if problems else []), *problems])

    def __str__(self) -> str:
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        lines = [f"{self.name} on {self.world_size} ranks: {'PASS' if self.ok else count}"]
        lines += [f"  {name}: {value}" for name, value in self.facts()]
        for problem in self.problems:
            lines += [f"  ✘ {problem.kind} ({problem.where})", f"    {problem.what} {problem.why}"]
            lines += [f"    Remedy: {problem.remedy}"]
        return "\n".join(lines)


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "not known"}[value]


def as_markdown(text: str) -> str:
    """Return Markdown that shows a text as it is, in one line."""
    # Leave underscores within a word: Markdown takes them as they are.
    special = r"[\\`*\[\]<>|]|(?<![^\W_])_+|_+(?![^\W_])"
    return re.sub(special, lambda found: "".join(f"\\{each}" for each in found[0]), " ".join(text.split()))
