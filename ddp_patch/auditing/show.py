"""Show a report: as text, as Markdown, as HTML, on a terminal, and as annotations of a CI job. It decides nothing."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TypeAlias

from ddp_patch.auditing.problems import Problem

__all__ = [
    "Facts",
    "annotation",
    "as_markdown",
    "as_text",
    "escaped_markdown",
    "notebook",
    "page_of",
    "section",
    "waiting_text",
]


Facts: TypeAlias = Sequence[tuple[str, str]]  # pairs of a name and a text


def waiting_text(imbalance: float) -> str:
    """Return the percentage of the time that the mean rank waits, where a step takes as long as its slowest rank.

    Examples:
        >>> waiting_text(1.5), waiting_text(1.004)
        ('33 %', '0.4 %')
    """
    share = 100 * (1 - 1 / imbalance)
    return f"{share:.1f} %" if 0.05 <= share < 9.95 else f"{share:.0f} %"


def as_text(title: str, facts: Facts, problems: Sequence[Problem]) -> str:
    """Return a title with facts and problems below it, as lines."""
    lines = [title, *(f"  {name}: {value}" for name, value in facts)]
    for problem in problems:
        lines += [f"  ✘ {problem.kind} ({problem.where})", f"    {problem.what} {problem.why}"]
        lines += [f"    Remedy: {problem.remedy}"]
    return "\n".join(lines)


def as_markdown(name: str, facts: Facts, problems: Sequence[Problem]) -> str:
    """Return Markdown: a heading with the verdict, a table, and the problems below the table."""
    rows = [f"| {fact} | {escaped_markdown(value)} |" for fact, value in facts]
    listed = [
        f"- **{escaped_markdown(problem.kind)}** ({escaped_markdown(problem.where)}): "
        f"{escaped_markdown(problem.what)} {escaped_markdown(problem.why)} *{escaped_markdown(problem.remedy)}*"
        for problem in problems
    ]
    heading = f"### {'✘' if problems else '✔'} {escaped_markdown(name)}: {'FAIL' if problems else 'PASS'}"
    return "\n".join([heading, "", "| | |", "| --- | --- |", *rows, *([""] if problems else []), *listed])


def escaped_markdown(text: str) -> str:
    """Return Markdown that shows a text as it is, in one line."""
    # Leave underscores within a word: Markdown takes them as they are.
    special = r"[\\`*\[\]<>|]|(?<![^\W_])_+|_+(?![^\W_])"
    return re.sub(special, lambda found: "".join(f"\\{each}" for each in found[0]), " ".join(text.split()))


def annotation(place: str, code: str | None, problem: Problem) -> str:
    """Return what GitHub shows beside a line of code, where a job prints it.

    Examples:
        >>> problem = Problem("padding", "50 % are", "epoch 0", "It counts twice.", "Use uneven='keep'.")
        >>> annotation("val, all", "a,b.py:3", problem)
        "::error file=a%2Cb.py,line=3,title=val%2C all%3A padding::50 %25 are It counts twice. Use uneven='keep'."
    """
    file, colon, line = (code or "").rpartition(":")
    where = f"file={_escaped(file)},line={line}," if colon else ""
    text = _escaped(f"{problem.what} {problem.why} {problem.remedy}", "%\r\n")
    return f"::error {where}title={_escaped(f'{place}: {problem.kind}')}::{text}"


def _escaped(value: str, signs: str = "%\r\n:,") -> str:
    """Return a text of an annotation: in its properties more signs have a meaning than in its text."""
    return "".join(f"%{ord(sign):02X}" if sign in signs else sign for sign in value)


def _css(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8")


def _marked(is_good: bool, text: str) -> str:
    return f'<span class="ddp-{"good" if is_good else "bad"}">{text}</span>'


def _facts_html(facts: Facts) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return f'<dl class="ddp-facts">{rows}</dl>'


def section(heading: str, facts: Facts, problems: Sequence[Problem], picture: str) -> str:
    """Return a part of an HTML page: the verdict, the picture, problems and facts."""
    listed = "".join(
        f'<div class="ddp-problem"><p><strong class="ddp-bad">✘ {problem.kind}</strong> '
        f"({escape(problem.where)})</p><p>{escape(problem.what)} {escape(problem.why)}</p>"
        f"<p><strong>Remedy:</strong> {escape(problem.remedy)}</p></div>"
        for problem in problems
    )
    mark = _marked(not problems, "✘ FAIL" if problems else "✔ PASS")
    shown = picture or "<p>There is nothing to draw.</p>"
    return f'<section class="ddp-report"><h2>{escape(heading)} {mark}</h2>{shown}{listed}{_facts_html(facts)}</section>'


def notebook(sections: Sequence[str]) -> str:
    """Return sections with all that they need, to show in a notebook."""
    return f"<div><style>{_css('report.css')}</style>{''.join(sections)}</div>"


def page_of(verdict: str, is_good: bool, sections: Sequence[str], provenance: Facts) -> str:
    """Return an HTML page of sections that holds everything it shows."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>DDP audit: {verdict}</title><style>{_css('page.css')}{_css('report.css')}</style></head><body><header>"
        f"<h1>DDP audit: {_marked(is_good, verdict)}</h1></header>"
        f"<main>{''.join(sections)}</main><footer>{_facts_html(provenance)}</footer></body></html>\n"
    )
