"""The report of an audit, several of them, and their page."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ddp_patch.auditing.given import Units
from ddp_patch.auditing.pictured import Pictured
from ddp_patch.auditing.problems import Problem
from ddp_patch.auditing.show import as_markdown, as_text, escaped_markdown, notebook, page_of, section, waiting_text
from ddp_patch.errors import AuditError

__all__ = ["EpochReport", "Report", "Reports", "page"]


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
        >>> str(epoch)
        '3 samples in 2 steps per rank; of 10 samples, 0 missing, 2 repeats (2 to fill the last round)'
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

    def __str__(self) -> str:
        told = f"{_range(self.items)} samples in {_range(self.steps)} steps per rank; of {self.expected} {self.units}"
        told += f" ({self.distinct} different ones)" * (self.distinct < self.expected)
        if self.repeated is None:
            return f"{told}, missing and repeated: not known"
        told += ", missing: not known" if self.missing is None else f", {self.missing} missing"
        told += f" ({self.dropped} as the loader asks)" * (self.dropped > 0)
        told += f", {self.repeated} repeat{'s' * (self.repeated != 1)}"
        told += f" ({self.padding} to fill the last round)" * (self.padding > 0)
        return told + f", {self.foreign} that one process never gets" * ((self.foreign or 0) > 0)


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a report depends on."""
    found = {"python": platform.python_version()}
    for package in ("ddp-patch", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout that is imported without being installed
            found[package] = "not installed"
    return found


@dataclass(frozen=True, slots=True)
class Report:
    """Tell what every rank would get of a loader. A notebook shows it with a picture.

    Attributes:
        name: The name of the loader's class, or of the function that makes loaders.
        how: How the loader was sharded and simulated, in words.
        world_size: The number of ranks.
        units: What ranks shard: whole batches where every epoch was counted in batches, otherwise samples.
        epochs: What the ranks got, epoch by epoch.
        epochs_differ: Whether every epoch had another order; None where there was one epoch.
        is_sample: Whether only the first items of each rank were looked at.
        problems: What is wrong.
        allowed: What is wrong but was allowed.
        pictured: What the picture is drawn from.
        balanced: The report of the same loader patched with ``cost=``, too. Its problems are among this
            report's problems. None without ``cost``, and where it cannot be balanced.
        why_not_balanced: Why it cannot; None where it can, and without ``cost``.
        code: The file and line where the function is defined, or where the loader was made. None if that is not known:
            where a loader was made, the command line alone knows.
        note: What would be faster, though nothing is wrong; None if nothing is known to be.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> report = audit(DataLoader(range(10), batch_size=2, shuffle=True), world_size=2)
        >>> report.ok, report.world_size, report.units, report.epochs_differ
        (True, 2, 'samples', True)
        >>> print(str(report).splitlines()[0])
        DataLoader on 2 ranks: PASS
    """

    name: str
    how: str
    world_size: int
    units: Units
    epochs: tuple[EpochReport, ...]
    epochs_differ: bool | None
    is_sample: bool
    problems: tuple[Problem, ...]
    allowed: tuple[Problem, ...] = ()
    pictured: Pictured = field(default_factory=Pictured, repr=False)
    balanced: "Report | None" = None
    why_not_balanced: str | None = None
    code: str | None = None
    note: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the loader passes: there is no problem that was not allowed."""
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raise an error that lists the problems, unless the loader passes.

        Raises:
            AuditError: ``ok`` is False.
        """
        if not self.ok:
            raise AuditError(str(self))

    def beside(self, balanced: "Report") -> "Report":
        """Return the report with that of the same loader patched with ``cost=``, whose problems become its own."""
        known = {problem.kind for problem in (*self.problems, *self.allowed)}

        def both(own: Sequence[Problem], others: Sequence[Problem]) -> tuple[Problem, ...]:
            new = (problem for problem in others if problem.kind not in known)
            return (*own, *(replace(problem, where=f"with cost=, {problem.where}") for problem in new))

        problems, allowed = both(self.problems, balanced.problems), both(self.allowed, balanced.allowed)
        return replace(self, balanced=balanced, problems=problems, allowed=allowed)

    @property
    def summary(self) -> str:
        """What the ranks of a loader that passes got, in one line.

        Examples:
            >>> from torch.utils.data import DataLoader
            >>> from ddp_patch import audit
            >>> audit(DataLoader(range(103)), world_size=4).summary
            '4 ranks x 26 steps, each of 103 samples once, 1 padding'
        """
        epochs = self.epochs
        units = f"{_range([epoch.expected for epoch in epochs])} {epochs[0].units}"
        counts = {
            "padding": [epoch.padding for epoch in epochs],
            "left out": [epoch.dropped for epoch in epochs],
            "missing": [(epoch.missing or epoch.dropped) - epoch.dropped for epoch in epochs],
            "repeated": [(epoch.repeated or epoch.padding) - epoch.padding for epoch in epochs],
            "foreign": [epoch.foreign or 0 for epoch in epochs],
        }
        if self.is_sample:
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
        steps = _range([number for epoch in epochs for number in epoch.steps])
        allowed = "".join(f"; allowed: {problem.kind}" for problem in self.allowed)
        return ", ".join([f"{self.world_size} ranks x {steps} steps", got, *more, *waits[:1]]) + allowed

    def facts(self) -> list[tuple[str, str]]:
        """Return what was found as pairs of a name and a text, to show to people."""
        how = self.how + (" (a sample: the first items of each rank)" if self.is_sample else "")
        found = [("ranks", str(self.world_size)), ("counted in", self.units), ("how", how)]
        found += [("code", self.code)] if self.code is not None else []
        found += [(f"epoch {epoch.epoch}", str(epoch)) for epoch in self.epochs]
        for number, epoch in enumerate(self.epochs):
            if epoch.imbalance:
                balanced = None if self.balanced is None else self.balanced.epochs[number].imbalance
                with_it = f" without cost=, {waiting_text(balanced)} with it" if balanced else ""
                found.append((f"balance {number}", f"ranks wait {waiting_text(epoch.imbalance)} of the time{with_it}"))
        if self.balanced is not None:
            found.append(("with cost=", "PASS" if self.balanced.ok else "FAIL"))
        if self.why_not_balanced is not None:
            found.append(("with cost=", f"not simulated. {self.why_not_balanced}"))
        found += [("note", self.note)] if self.note is not None else []
        found.append(("epochs differ", {True: "yes", False: "no", None: "not known"}[self.epochs_differ]))
        return [*found, *(("allowed", f"{problem.kind}: {problem.what}") for problem in self.allowed)]

    def html(self, name: str) -> str:
        """Return the report as a part of an HTML page; without the picture where matplotlib is not installed."""
        try:
            from ddp_patch.auditing.picture import picture_html
        except ImportError:
            drawn = "<p>For a picture, install matplotlib, which the extra audit has.</p>"
        else:
            drawn = picture_html(self.pictured, None if self.balanced is None else self.balanced.pictured)
        return section(name, self.facts(), self.problems, drawn)

    def _repr_html_(self) -> str:
        """Show the report in a notebook."""
        return notebook([self.html(f"{self.name} on {self.world_size} ranks")])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values: numbers, strings, lists and dicts; without ``pictured``, with versions.

        They are the same in every run.
        """
        found = asdict(replace(self, balanced=None, pictured=Pictured()))
        del found["pictured"]
        plain: dict[str, Any] = json.loads(json.dumps(found))
        return {"ok": self.ok, **plain, "balanced": self.balanced and self.balanced.to_dict(), "versions": _versions()}

    def to_markdown(self) -> str:
        """Return the report as Markdown: a heading, a table, and the problems below the table."""
        return as_markdown(self.name, self.facts(), self.problems)

    def __str__(self) -> str:
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        title = f"{self.name} on {self.world_size} ranks: {'PASS' if self.ok else count}"
        return as_text(title, self.facts(), self.problems)


class Reports(dict[str, Report]):
    """The reports of several loaders, by their places, such as ``train`` or ``val[0]``. A notebook shows pictures.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> reports = audit({"train": DataLoader(range(10)), "val": [DataLoader(range(4))]}, world_size=2)
        >>> list(reports), reports.ok, reports["val[0]"].epochs[0].expected
        (['train', 'val[0]'], True, 4)
    """

    @property
    def ok(self) -> bool:
        """Whether all loaders pass."""
        return all(report.ok for report in self.values())

    def raise_for_problems(self) -> None:
        """Raise an error that lists the problems, unless all pass.

        Raises:
            AuditError: ``ok`` is False.
        """
        if not self.ok:
            raise AuditError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the reports as JSON values, by place."""
        return {place: report.to_dict() for place, report in self.items()}

    def to_markdown(self) -> str:
        """Return the reports as Markdown, each below a heading with its place."""
        parts = (f"## {escaped_markdown(place)}\n\n{report.to_markdown()}" for place, report in self.items())
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        """Show the reports in a notebook."""
        return notebook([report.html(place) for place, report in self.items()])

    def __str__(self) -> str:
        return "\n".join(f"{place}: {report}" for place, report in self.items())


def page(reports: Mapping[str, Report], command: str) -> str:
    """Return reports as an HTML page that holds everything it shows.

    Args:
        reports: The reports by the places of their loaders, such as ``loaders.train``.
        command: The command line, or what stands for it.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> report = audit(DataLoader(range(10), batch_size=2), world_size=4)
        >>> html = page({"train": report}, "a test")
        >>> html.count("<section"), "http" in html
        (1, False)
    """
    failed = sum(not report.ok for report in reports.values())
    verdict = f"✘ {failed} of {len(reports)} FAIL" if failed else f"✔ {len(reports)} of {len(reports)} PASS"
    sections = [report.html(place) for place, report in reports.items()]
    used = ", ".join(f"{name} {number}" for name, number in _versions().items())
    made = [("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"), ("command", command), ("versions", used)]
    return page_of(verdict, not failed, sections, made)
