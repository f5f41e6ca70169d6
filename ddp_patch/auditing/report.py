"""Report what an audit found, as a frozen value that prints as text, Markdown, JSON or HTML."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddp_patch.auditing.epoch_report import EpochReport, Units, balance_text, batches_text, epoch_text
from ddp_patch.auditing.pictured import Pictured
from ddp_patch.auditing.problems import Problem
from ddp_patch.auditing.provenance import versions
from ddp_patch.auditing.show.figure import Figure
from ddp_patch.auditing.show.figures import figures_of
from ddp_patch.auditing.show.section import beside, notebook, section
from ddp_patch.errors import AuditError

__all__ = ["Report", "as_markdown"]


@dataclass(frozen=True, slots=True)
class Report:
    """Tell what every rank would get of a loader. A notebook shows it with figures.

    Attributes:
        name: The name of the loader's class, or of the function that makes loaders.
        how: How the loader was sharded and simulated, in words.
        world_size: The number of ranks.
        units: What ranks shard: whole batches where every epoch was counted in batches, otherwise samples.
        epochs: What the ranks got, epoch by epoch.
        epochs_differ: Whether every epoch had another order; None where there was one epoch.
        seeds_agree: Whether ranks that are seeded differently use one order. None where not even ranks that are
            seeded alike do, or where it is not known.
        is_sample: Whether only the first items of each rank were looked at.
        seconds: Seconds that rank 0's sampling took in its first epoch.
        memory: Bytes by which the process grew meanwhile, measured between blocks of batches. None where the system
            does not report it.
        problems: What is wrong.
        allowed: What is wrong but was allowed.
        pictured: What pictures are drawn from.
        balanced: The report of the same loader patched with ``cost=``, too. Its problems are among this
            report's problems. None without ``cost``, and where it cannot be balanced.
        why_not_balanced: Why it cannot; None where it can, and without ``cost``.
        code: The file and line where the function is defined, or where the loader was made. None if that is not known:
            where a loader was made, the command line alone knows.
        patched: The report of the same loader patched, with ``patched=True``; otherwise None.

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
    code: str | None = None
    patched: "Report | None" = None

    @property
    def ok(self) -> bool:
        """Whether the loader passes: there is no problem that was not allowed."""
        return not self.problems

    @property
    def verdict(self) -> bool:
        """Whether the loader passes once it is patched, with ``patched=True``; otherwise whether it passes."""
        return self.ok if self.patched is None else self.patched.ok

    def raise_for_problems(self) -> None:
        """Raise an error that lists the problems, unless the loader passes; with ``patched=True``, once it is patched.

        Raises:
            AuditError: The verdict is False.
        """
        if not self.verdict:
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
        how = self.how + (" (a sample: the first items of each rank)" if self.is_sample else "")
        found = [("ranks", str(self.world_size)), ("counted in", self.units), ("how", how)]
        found += [("code", self.code)] if self.code is not None else []
        found += [(f"epoch {epoch.epoch}", epoch_text(epoch)) for epoch in self.epochs]
        batches = [batches_text(epoch.global_batches) for epoch in self.epochs]
        if len(set(batches)) == 1:
            found.append(("global batch", batches[0]))
        else:
            found += [(f"global batch {epoch.epoch}", text) for epoch, text in zip(self.epochs, batches, strict=True)]
        found += self._balance()
        found += [("epochs differ", _yes(self.epochs_differ)), ("same order whatever the seed", _yes(self.seeds_agree))]
        memory = "" if self.memory is None else f"; memory grew by {self.memory / 2**20:.0f} MiB"
        found += [("allowed", f"{problem.kind}: {problem.what}") for problem in self.allowed]
        return [*found, ("rank 0's sampling", f"{self.seconds:.3f} s{memory}")]

    def _balance(self) -> list[tuple[str, str]]:
        """Say how long ranks wait in each epoch, and whether the loader passes with ``cost=``, too."""
        balanced = [None] * len(self.epochs) if self.balanced is None else self.balanced.epochs
        texts = [balance_text(epoch, other) for epoch, other in zip(self.epochs, balanced, strict=True)]
        found = [(f"balance {epoch.epoch}", text) for epoch, text in zip(self.epochs, texts, strict=True) if text]
        if self.balanced is not None:
            found.append(("with cost=", "PASS" if self.balanced.ok else "FAIL"))
        if self.why_not_balanced is not None:
            found.append(("with cost=", f"not simulated. {self.why_not_balanced}"))
        return found

    def before_and_after(self, name: str) -> dict[str, "Report"]:
        """Return this report by its name, and with ``patched=True`` the two reports of before and after the patch."""
        if self.patched is None:
            return {name: self}
        return {f"{name}, before the patch": replace(self, patched=None), f"{name}, after the patch": self.patched}

    def html(self, name: str) -> str:
        """Return the report as a part of an HTML page; with ``patched=True``, before and after side by side."""
        sections = [
            section(heading, report.ok, report.problems, report.facts(), report._figures())
            for heading, report in self.before_and_after(name).items()
        ]
        return sections[0] if len(sections) == 1 else beside(sections)

    def _figures(self) -> list[Figure]:
        balanced = None if self.balanced is None else self.balanced.pictured
        return figures_of(self.pictured, balanced, self.world_size)

    def _repr_html_(self) -> str:
        """Show the report in a notebook."""
        return notebook(self.html(f"{self.name} on {self.world_size} ranks"))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values: numbers, strings, lists and dicts; without ``pictured``, with versions.

        They are the same in every run but for ``seconds`` and ``memory``.
        """
        found = asdict(replace(self, balanced=None, patched=None))
        del found["pictured"]
        plain: dict[str, Any] = json.loads(json.dumps(found))
        others = {name: other and other.to_dict() for name, other in self._others().items()}
        return {"ok": self.ok, "verdict": self.verdict, **plain, **others, "versions": versions()}

    def _others(self) -> dict[str, "Report | None"]:
        return {"balanced": self.balanced, "patched": self.patched}

    def to_markdown(self) -> str:
        """Return the report as Markdown: a heading, a table, and the problems below the table."""
        if self.patched is not None:
            return "\n\n".join(each.to_markdown() for each in self._both())
        rows = [f"| {name} | {as_markdown(value)} |" for name, value in self.facts()]
        problems = [
            f"- **{as_markdown(problem.kind)}** ({as_markdown(problem.where)}): {as_markdown(problem.what)} "
            f"{as_markdown(problem.why)} *{as_markdown(problem.remedy)}*"
            for problem in self.problems
        ]
        heading = f"### {'✔' if self.ok else '✘'} {as_markdown(self.name)}: {'PASS' if self.ok else 'FAIL'}"
        return "\n".join([heading, "", "| | |", "| --- | --- |", *rows, *([""] if problems else []), *problems])

    def _both(self) -> list["Report"]:
        return [replace(each, name=name) for name, each in self.before_and_after(self.name).items()]

    def __str__(self) -> str:
        if self.patched is not None:
            return "\n".join(map(str, self._both()))
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
