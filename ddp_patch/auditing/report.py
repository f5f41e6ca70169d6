"""The report of an audit, several of them, their page, and where they come from."""

import inspect
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch.utils.data import DataLoader

from ddp_patch.auditing.drawn import Units
from ddp_patch.auditing.judge_problems import Problem
from ddp_patch.auditing.pictured import Pictured
from ddp_patch.auditing.show import as_markdown, as_text, escaped_markdown, notebook, page_of, section
from ddp_patch.auditing.words import EpochReport, balance_text, epoch_text, summary_text
from ddp_patch.errors import AuditError
from ddp_patch.loaders.hooks import from_here, made

__all__ = ["Report", "Reports", "page", "place_in_code"]


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a report depends on."""
    found = {"python": platform.python_version()}
    for package in ("ddp-patch", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout that is imported without being installed
            found[package] = "not installed"
    return found


def place_in_code(audited: DataLoader[Any] | Any) -> str | None:
    """Return the file and line where a function is defined, or where a loader was made; None if it is not known.

    Examples:
        >>> from tokenize import open as function
        >>> place_in_code(function).split("/")[-1].split(":")[0]
        'tokenize.py'
    """
    if isinstance(audited, DataLoader):
        where = made(audited)
        return None if where is None else from_here(where.place)
    function = inspect.unwrap(audited)
    while isinstance(function, partial):
        function = inspect.unwrap(function.func)
    if not hasattr(function, "__code__"):  # an object that can be called
        function = getattr(type(function), "__call__", None)  # noqa: B004 - it is the method's code that tells
    code = getattr(function, "__code__", None)
    return None if code is None else from_here(f"{code.co_filename}:{code.co_firstlineno}")


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

    @property
    def summary(self) -> str:
        """What the ranks of a loader that passes got, in one line."""
        allowed = "".join(f"; allowed: {problem.kind}" for problem in self.allowed)
        return summary_text(self.world_size, self.epochs, self.is_sample) + allowed

    def facts(self) -> list[tuple[str, str]]:
        """Return what was found as pairs of a name and a text, to show to people."""
        how = self.how + (" (a sample: the first items of each rank)" if self.is_sample else "")
        found = [("ranks", str(self.world_size)), ("counted in", self.units), ("how", how)]
        found += [("code", self.code)] if self.code is not None else []
        found += [(f"epoch {epoch.epoch}", epoch_text(epoch)) for epoch in self.epochs]
        found += self._balance()
        found += [("note", self.note)] if self.note is not None else []
        found.append(("epochs differ", {True: "yes", False: "no", None: "not known"}[self.epochs_differ]))
        return [*found, *(("allowed", f"{problem.kind}: {problem.what}") for problem in self.allowed)]

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
