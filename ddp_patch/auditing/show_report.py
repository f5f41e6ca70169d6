"""The report of an audit, several of them, their page, and where they come from."""

import inspect
import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch.utils.data import DataLoader

from ddp_patch.auditing.drawn import Units
from ddp_patch.auditing.judge_problems import Problem
from ddp_patch.auditing.show_figures import EpochReport, balance_text, batches_text, epoch_text, figures_of
from ddp_patch.auditing.show_maps import Pictured
from ddp_patch.auditing.show_svg import PATTERNS, figure_html, with_own_patterns
from ddp_patch.auditing.show_svg import STYLE as FIGURES
from ddp_patch.errors import AuditError
from ddp_patch.loaders.hooks import from_here, made

__all__ = ["Provenance", "Report", "Reports", "page", "place_in_code"]


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
    while isinstance(audited, partial):
        audited = audited.func
    function = inspect.unwrap(audited)
    if not hasattr(function, "__code__"):  # an object that can be called
        function = getattr(type(function), "__call__", None)  # noqa: B004 - it is the method's code that tells
    code = getattr(function, "__code__", None)
    return None if code is None else from_here(f"{code.co_filename}:{code.co_firstlineno}")


@dataclass(frozen=True, slots=True)
class Provenance:
    """Tell when, how and with what reports were made.

    Attributes:
        command: The command line, or what stands for it.
        date: The date and time, as text.
        versions: Versions by package.
    """

    command: str
    date: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    versions: Mapping[str, str] = field(default_factory=_versions)

    def lines(self) -> list[tuple[str, str]]:
        """Return what is told as pairs of a name and a text."""
        used = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return [("date", self.date), ("command", self.command), ("versions", used)]


# Names no colour of texts and backgrounds: a page or a notebook, light or dark, has its own.
_STYLE = (
    """
.ddp-report { min-width: 0; }
.ddp-report h2 { font-size: 1.25rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
.ddp-beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem 2.5rem; }
.ddp-good, .ddp-bad { white-space: nowrap; }
.ddp-good { color: #1a8a4c; color: color-mix(in srgb, #1a9c54 65%, currentColor); }
.ddp-bad { color: #d3453c; color: color-mix(in srgb, #e0392f 65%, currentColor); }
.ddp-facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .25rem 1rem; margin: .75rem 0; }
.ddp-facts dt { opacity: .8; font-weight: 400; } .ddp-facts dd { margin: 0; overflow-wrap: anywhere; }
.ddp-problem { border-left: 4px solid #d3453c; background: rgba(128, 138, 153, .12); padding: .5rem .9rem;
  margin: .75rem 0; }
.ddp-problem p { margin: .25rem 0; overflow-wrap: anywhere; }
@media (max-width: 34rem) { .ddp-facts { grid-template-columns: minmax(0, 1fr); gap: 0; }
  .ddp-facts dd { margin-bottom: .5rem; } }
"""
    + FIGURES
)


def _notebook(sections: str) -> str:
    """Return sections with all that they need, to show in a notebook."""
    return f"<div><style>{_STYLE}</style>{with_own_patterns(PATTERNS + sections)}</div>"


def _facts_html(facts: Sequence[tuple[str, str]]) -> str:
    """Return pairs of a name and a text as a list."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f'<dl class="ddp-facts">{rows}</dl>'


def _problem_html(problem: Problem) -> str:
    return (
        f'<div class="ddp-problem"><p><strong class="ddp-bad">✘ {problem.kind}</strong> '
        f"({escape(problem.where)})</p><p>{escape(problem.what)} {escape(problem.why)}</p>"
        f"<p><strong>Remedy:</strong> {escape(problem.remedy)}</p></div>"
    )


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
        note: What would be faster, though nothing is wrong; None if nothing is known to be.

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
    note: str | None = None

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
        found += [("note", self.note)] if self.note is not None else []
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
        sections = [report._section(heading) for heading, report in self.before_and_after(name).items()]
        return sections[0] if len(sections) == 1 else f'<div class="ddp-beside">{"".join(sections)}</div>'

    def _section(self, heading: str) -> str:
        """Return the verdict, the two most important figures, problems, facts, and more figures."""
        mark = '<span class="ddp-good">✔ PASS</span>' if self.ok else '<span class="ddp-bad">✘ FAIL</span>'
        balanced = None if self.balanced is None else self.balanced.pictured
        figures = [figure_html(figure) for figure in figures_of(self.pictured, balanced, self.world_size)]
        shown = figures or ["<p>No sample was seen, so there is nothing to show.</p>"]
        return (
            f'<section class="ddp-report"><h2>{escape(heading)} {mark}</h2>{"".join(shown[:2])}'
            f"{''.join(map(_problem_html, self.problems))}{_facts_html(self.facts())}{''.join(shown[2:])}</section>"
        )

    def _repr_html_(self) -> str:
        """Show the report in a notebook."""
        return _notebook(self.html(f"{self.name} on {self.world_size} ranks"))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values: numbers, strings, lists and dicts; without ``pictured``, with versions.

        They are the same in every run but for ``seconds`` and ``memory``.
        """
        found = asdict(replace(self, balanced=None, patched=None))
        del found["pictured"]
        plain: dict[str, Any] = json.loads(json.dumps(found))
        others = {
            "balanced": self.balanced and self.balanced.to_dict(),
            "patched": self.patched and self.patched.to_dict(),
        }
        return {"ok": self.ok, "verdict": self.verdict, **plain, **others, "versions": _versions()}

    def to_markdown(self) -> str:
        """Return the report as Markdown: a heading, a table, and the problems below the table."""
        if self.patched is not None:
            return "\n\n".join(each.to_markdown() for each in self._both())
        rows = [f"| {name} | {_as_markdown(value)} |" for name, value in self.facts()]
        problems = [
            f"- **{_as_markdown(problem.kind)}** ({_as_markdown(problem.where)}): {_as_markdown(problem.what)} "
            f"{_as_markdown(problem.why)} *{_as_markdown(problem.remedy)}*"
            for problem in self.problems
        ]
        heading = f"### {'✔' if self.ok else '✘'} {_as_markdown(self.name)}: {'PASS' if self.ok else 'FAIL'}"
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


def _as_markdown(text: str) -> str:
    """Return Markdown that shows a text as it is, in one line."""
    # Leave underscores within a word: Markdown takes them as they are.
    special = r"[\\`*\[\]<>|]|(?<![^\W_])_+|_+(?![^\W_])"
    return re.sub(special, lambda found: "".join(f"\\{each}" for each in found[0]), " ".join(text.split()))


@dataclass(frozen=True, slots=True)
class Reports(Mapping[str, Report]):
    """Map the places of several loaders to their reports. A notebook shows it with figures.

    Attributes:
        by_place: The reports by place, such as ``train`` or ``val[0]``.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> reports = audit({"train": DataLoader(range(10)), "val": [DataLoader(range(4))]}, world_size=2)
        >>> list(reports), reports.ok, reports["val[0]"].epochs[0].expected
        (['train', 'val[0]'], True, 4)
    """

    by_place: Mapping[str, Report]

    @property
    def ok(self) -> bool:
        """Whether all loaders pass."""
        return all(report.ok for report in self.by_place.values())

    @property
    def verdict(self) -> bool:
        """Whether all loaders pass once they are patched, with ``patched=True``; otherwise whether they pass."""
        return all(report.verdict for report in self.by_place.values())

    def raise_for_problems(self) -> None:
        """Raise an error that lists the problems, unless all pass; with ``patched=True``, once they are patched.

        Raises:
            AuditError: The verdict is False.
        """
        if not self.verdict:
            raise AuditError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the reports as JSON values, by place."""
        return {place: report.to_dict() for place, report in self.by_place.items()}

    def to_markdown(self) -> str:
        """Return the reports as Markdown, each below a heading with its place."""
        return "\n\n".join(
            f"## {_as_markdown(place)}\n\n{report.to_markdown()}" for place, report in self.by_place.items()
        )

    def _repr_html_(self) -> str:
        """Show the reports in a notebook."""
        return _notebook("".join(report.html(place) for place, report in self.by_place.items()))

    def __getitem__(self, place: str) -> Report:
        return self.by_place[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_place)

    def __len__(self) -> int:
        return len(self.by_place)

    def __str__(self) -> str:
        return "\n".join(f"{place}: {report}" for place, report in self.by_place.items())


_PAGE = """
:root { color-scheme: light dark; --ink: #1c2330; --line: #c9d0da; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf2; --line: #465063; --paper: #12161d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 72rem; font: 1rem/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
body:has(.ddp-beside) { max-width: 96rem; }
h1 .ddp-good, h1 .ddp-bad { white-space: normal; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; }
main > *, footer { margin-top: 2rem; border-top: 2px solid var(--line); padding-top: 1.25rem; }
"""


def page(reports: Mapping[str, Report], provenance: Provenance) -> str:
    """Return reports as an HTML page that holds everything it shows.

    Args:
        reports: The reports by the places of their loaders, such as ``loaders.train``.
        provenance: When, how and with what they were made.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> report = audit(DataLoader(range(10), batch_size=2), world_size=4)
        >>> html = page({"train": report}, Provenance("a test"))
        >>> html.count('class="ddp-figure'), "http" in html
        (3, False)
    """
    failed = sum(not report.verdict for report in reports.values())
    verdict = f"✘ {failed} of {len(reports)} FAIL" if failed else f"✔ {len(reports)} of {len(reports)} PASS"
    if any(report.patched is not None for report in reports.values()):
        verdict += " once patched"
    sections = "".join(report.html(place) for place, report in reports.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>DDP audit: {verdict}</title><style>{_PAGE}{_STYLE}</style></head><body>{PATTERNS}<header>"
        f'<h1>DDP audit: <span class="{"ddp-bad" if failed else "ddp-good"}">{verdict}</span></h1></header>'
        f"<main>{sections}</main><footer>{_facts_html(provenance.lines())}</footer></body></html>\n"
    )
