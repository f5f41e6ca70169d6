"""The report of an audit, reports of several loaders, and how reports are shown: as text, Markdown and HTML."""

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_patch.auditing.picture import Pictured, picture_html, waiting_text
from ddp_patch.auditing.problems import Problem
from ddp_patch.errors import AuditError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesGot:
    """How many samples the ranks together got too seldom or too often in an epoch.

    Attributes:
        missing: How many samples no rank got. None if only a part was drawn, or if samples cannot be compared: all are
            equal, or an iterable dataset makes new samples in each pass.
        repeated: How many times in all ranks got a sample more often than a single process would, with padding, without
            foreign samples. None if not known.
        foreign: How many samples ranks got that a single process never gets. None if not known.
        padding: How many of the repeats fill the last round.
        dropped: How many of the missing samples the loader leaves out on purpose.
    """

    missing: int | None
    repeated: int | None
    foreign: int | None
    padding: int
    dropped: int

    @property
    def is_right(self) -> bool:
        """Whether no sample is known to be missing or repeated, beyond the allowed ones, and none is foreign."""
        is_filled = self.repeated in (None, self.padding)
        return is_filled and self.missing in (None, self.dropped) and not self.foreign


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport(SamplesGot):
    """The ranks' samples in one epoch, in numbers: besides these, the numbers of ``SamplesGot``.

    Attributes:
        epoch: The epoch's number, from 0.
        items: How many samples each rank got, shape (ranks,).
        steps: How many batches each rank got, shape (ranks,).
        expected: How many samples a single process would get.
        distinct: How many different samples a single process would get, as far as samples can be distinguished.
        imbalance: The slowest rank's cost divided by the ranks' mean, over all steps; 1 is balanced. None without
            ``cost``.
        unbalanced: The imbalance without ``cost=``, if ``cost=`` balances the loader.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> epoch, _ = audit(DataLoader(range(10), batch_size=2), world_size=4).epochs
        >>> epoch.expected, epoch.items, epoch.repeated, epoch.padding
        (10, (3, 3, 3, 3), 2, 2)
        >>> str(epoch)
        '3 samples per rank in 2 steps, each of 10 samples once, 2 padding'
    """

    epoch: int
    items: tuple[int, ...]
    steps: tuple[int, ...]
    expected: int
    distinct: int
    imbalance: float | None = None
    unbalanced: float | None = None

    def __str__(self) -> str:
        return f"{_range(self.items)} samples per rank in {_in_words([self])}"


def _in_words(epochs: Sequence[EpochReport]) -> str:
    """Return the ranks' samples in some epochs, in one line of words."""
    expected = f"{_range([epoch.expected for epoch in epochs])} samples"
    counts = {
        "padding": [epoch.padding for epoch in epochs],
        "left out": [epoch.dropped for epoch in epochs],
        "missing": [(epoch.missing or epoch.dropped) - epoch.dropped for epoch in epochs],
        "repeated": [(epoch.repeated or epoch.padding) - epoch.padding for epoch in epochs],
        "that one process never gets": [epoch.foreign or 0 for epoch in epochs],
    }
    if any(epoch.repeated is None for epoch in epochs):
        got = f"{expected} that cannot be compared"
    elif any(epoch.missing is None for epoch in epochs):
        got = f"the first {_range([sum(epoch.items) for epoch in epochs])} samples"
    elif not all(epoch.is_right for epoch in epochs):
        got = f"of {expected}"
    else:
        is_once = all(epoch.expected == epoch.distinct for epoch in epochs)
        got = f"each of {expected} {'once' if is_once else 'as often as in one process'}"
    more = [f"{_range(found)} {what}" for what, found in counts.items() if any(found)]
    if first := epochs[0].imbalance:
        without = epochs[0].unbalanced
        more.append(f"waiting {waiting_text(first)}" + (f" ({waiting_text(without)} without cost=)" if without else ""))
    steps = _range([number for epoch in epochs for number in epoch.steps])
    return ", ".join([f"{steps} step{'' if steps == '1' else 's'}", got, *more])


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a report depends on."""
    own: str = import_module("ddp_patch").__version__
    found = {"ddp-patch": own, "torch": torch.__version__, "numpy": np.__version__}
    return {"python": platform.python_version(), **found}


@dataclass(frozen=True, slots=True)
class Report:
    """The report on what every rank would get of a loader. A notebook shows the report with a picture.

    Attributes:
        name: The name of the loader's class, or of the factory.
        how: How the loader was sharded and simulated, in words.
        epochs: The ranks' samples, epoch by epoch.
        epochs_differ: Whether every epoch had another order; None if there was only one epoch.
        is_sample: Whether only the first items of each rank were drawn.
        problems: The problems that were found, without the allowed ones.
        allowed: The problems that were allowed.
        pictured: The numbers of the picture.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> report = audit(DataLoader(range(103), batch_size=4, shuffle=True), world_size=4)
        >>> report.ok, report.world_size, report.epochs_differ
        (True, 4, True)
        >>> report.summary
        '4 ranks x 7 steps, each of 103 samples once, 1 padding'
        >>> print(str(report).splitlines()[0])
        DataLoader on 4 ranks: PASS
    """

    name: str
    how: str
    epochs: tuple[EpochReport, ...]
    epochs_differ: bool | None
    is_sample: bool
    problems: tuple[Problem, ...]
    allowed: tuple[Problem, ...] = ()
    pictured: Pictured = field(default_factory=Pictured, repr=False)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.epochs[0].items)

    @property
    def ok(self) -> bool:
        """Whether the loader passes: all problems are allowed."""
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
        """The ranks' samples, in one line of words."""
        allowed = "".join(f"; allowed: {problem.kind}" for problem in self.allowed)
        return f"{self.world_size} ranks x {_in_words(self.epochs)}{allowed}"

    def facts(self) -> list[tuple[str, str]]:
        """Return the findings as pairs of a name and a readable text."""
        found = [("ranks", str(self.world_size)), ("how", self.how)]
        found += [(f"epoch {epoch.epoch}", str(epoch)) for epoch in self.epochs]
        found.append(("epochs differ", {True: "yes", False: "no", None: "not known"}[self.epochs_differ]))
        return [*found, *(("allowed", f"{problem.kind}: {problem.what}") for problem in self.allowed)]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, the same in every run; without ``pictured``, with versions."""
        found = asdict(replace(self, pictured=Pictured()))
        del found["pictured"]
        return {"ok": self.ok, "world_size": self.world_size, **found, "versions": _versions()}

    def to_markdown(self) -> str:
        """Return the report as Markdown: a heading with the verdict, a table, and the problems below the table."""
        rows = [f"| {name} | {_markdown(value)} |" for name, value in self.facts()]
        listed = [
            f"- **{_markdown(problem.kind)}** ({_markdown(problem.where)}): {_markdown(problem.what)} "
            f"{_markdown(problem.why)} *{_markdown(problem.remedy)}*"
            for problem in self.problems
        ]
        heading = f"### {'✔' if self.ok else '✘'} {_markdown(self.name)}: {'PASS' if self.ok else 'FAIL'}"
        return "\n".join([heading, "", "| | |", "| --- | --- |", *rows, *([""] if listed else []), *listed])

    def html(self, heading: str) -> str:
        """Return the report as a part of an HTML page: the verdict, the picture, problems and facts."""
        listed = "".join(
            f'<div class="ddp-problem"><p><strong class="ddp-bad">✘ {problem.kind}</strong> '
            f"({escape(problem.where)})</p><p>{escape(problem.what)} {escape(problem.why)}</p>"
            f"<p><strong>Remedy:</strong> {escape(problem.remedy)}</p></div>"
            for problem in self.problems
        )
        mark = _marked(self.ok, "✔ PASS" if self.ok else "✘ FAIL")
        below = f"{picture_html(self.pictured)}{listed}{_facts_html(self.facts())}"
        return f'<section class="ddp-report"><h2>{escape(heading)} {mark}</h2>{below}</section>'

    def _repr_html_(self) -> str:
        """Show the report in a notebook."""
        return _notebook({f"{self.name} on {self.world_size} ranks": self})

    def __str__(self) -> str:
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        return f"{self.name} on {self.world_size} ranks: {'PASS' if self.ok else count}\n{self.details}"

    @property
    def details(self) -> str:
        """The problems, and below them all facts, in lines."""
        lines = []
        for problem in self.problems:
            lines += [f"✘ {problem.kind} ({problem.where})", f"{problem.what} {problem.why}"]
            lines += [f"Remedy: {problem.remedy}", ""]
        return "\n".join([*lines, *(f"{name}: {value}" for name, value in self.facts())])


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
        """Raise an error that lists the problems, unless all loaders pass.

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
        return "\n\n".join(f"## {_markdown(place)}\n\n{report.to_markdown()}" for place, report in self.items())

    def _repr_html_(self) -> str:
        """Show the reports in a notebook."""
        return _notebook(self)

    def __str__(self) -> str:
        return "\n".join(f"{place}: {report}" for place, report in self.items())


# ---- Markdown, HTML, and what GitHub shows ----


def _markdown(text: str) -> str:
    """Return a text as one line of Markdown, with special characters escaped."""
    # Underscores within a word are not special.
    special = r"[\\`*\[\]<>|]|(?<![^\W_])_+|_+(?![^\W_])"
    return re.sub(special, lambda found: "".join(f"\\{each}" for each in found[0]), " ".join(text.split()))


def annotation(place: str, problem: Problem, made_at: str = "") -> str:
    """Return a workflow command for GitHub, which shows the problem, beside the loader's line if this is known.

    Examples:
        >>> problem = Problem("padding", "50 % are", "epoch 0", "It counts twice.", "Use uneven='keep'.")
        >>> annotation("val, all", problem, "a,b.py:7")
        "::error file=a%2Cb.py,line=7,title=val%2C all%3A padding::50 %25 are It counts twice. Use uneven='keep'."
    """
    file, _, line = made_at.rpartition(":")
    where = f"file={_escaped(file)},line={line}," if file else ""
    text = _escaped(f"{problem.what} {problem.why} {problem.remedy}", "%\r\n")
    return f"::error {where}title={_escaped(f'{place}: {problem.kind}')}::{text}"


def _escaped(value: str, signs: str = "%\r\n:,") -> str:
    """Return a text with special signs escaped; the title of an annotation has more special signs than its text."""
    return "".join(f"%{ord(sign):02X}" if sign in signs else sign for sign in value)


def _css(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _marked(is_good: bool, text: str) -> str:
    return f'<span class="ddp-{"good" if is_good else "bad"}">{text}</span>'


def _facts_html(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f'<dl class="ddp-facts">{rows}</dl>'


def _notebook(reports: Mapping[str, Report]) -> str:
    """Return reports and their styles as HTML, to show in a notebook."""
    sections = "".join(report.html(heading) for heading, report in reports.items())
    return f"<div><style>{_css('report.css')}</style>{sections}</div>"


def page(reports: Mapping[str, Report]) -> str:
    """Return reports as an HTML page that loads no other file.

    Args:
        reports: The reports by the places of their loaders, such as ``loaders.train``.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> report = audit(DataLoader(range(10), batch_size=2), world_size=4)
        >>> html = page({"train": report})
        >>> html.count("<section"), "http" in html
        (1, False)
    """
    failed = sum(not report.ok for report in reports.values())
    verdict = f"✘ {failed} of {len(reports)} FAIL" if failed else f"✔ {len(reports)} of {len(reports)} PASS"
    sections = "".join(report.html(place) for place, report in reports.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>DDP audit: {verdict}</title><style>{_css('page.css')}{_css('report.css')}</style></head><body><header>"
        f"<h1>DDP audit: {_marked(not failed, verdict)}</h1></header>"
        f"<main>{sections}</main><footer>{_facts_html([*_versions().items()])}</footer></body></html>\n"
    )
