"""Write reports as one HTML page with pictures, which loads nothing from elsewhere."""

from collections.abc import Mapping
from html import escape

from ddp_patch.auditing.report import Problem, Report
from ddp_patch.auditing.show.frame import Picture
from ddp_patch.auditing.show.pictures import pictures_of

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5a6475; --line: #c9d0da; --paper: #ffffff; --panel: #f5f7fa;
  --bad: #b3261e; --good: #14683a; --focus: #3f7fbf; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf2; --soft: #a5afbf; --line: #465063; --paper: #12161d;
  --panel: #1b212b; --bad: #ff9d95; --good: #7fd6a2; --focus: #6aaef0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 72rem; font: 1rem/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; border-top: 2px solid var(--line); padding-top: 1.25rem;
  overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p { margin: .25rem 0; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.good { color: var(--good); } .bad { color: var(--bad); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: .75rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.problem { border-left: 4px solid var(--bad); background: var(--panel); padding: .6rem .9rem; margin: .75rem 0; }
figure { margin: .5rem 0; }
.scroll { overflow-x: auto; background: var(--panel); border-radius: 6px; padding: .5rem; }
.scroll:focus-visible { outline: 2px solid var(--focus); }
img { display: block; height: auto; }
@media (max-width: 34rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; } }
"""


def page(reports: Mapping[str, Report]) -> str:
    """Return reports as an HTML page that holds everything it shows.

    Args:
        reports: The reports by the places of their loaders, such as ``loaders.train``.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> html = page({"train": audit(DataLoader(range(10), batch_size=2), world_size=4)})
        >>> html.count("<picture>"), "http" in html
        (2, False)
    """
    broken = sum(not report.ok for report in reports.values())
    verdict = f"✘ {broken} of {len(reports)} do not hold" if broken else f"✔ all {len(reports)} hold"
    sections = "".join(_section(place, report) for place, report in reports.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Audit of loaders: {verdict}</title><style>{_STYLE}</style></head><body>"
        f'<h1>Audit of loaders</h1><p class="{_tone(not broken)}"><strong>{verdict}</strong></p>{sections}'
        "</body></html>\n"
    )


def _tone(ok: bool) -> str:
    return "good" if ok else "bad"


def _section(place: str, report: Report) -> str:
    mark = "✔ PASS" if report.ok else "✘ FAIL"
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.facts())
    problems = "".join(map(_problem, report.problems))
    figures = "".join(map(_figure, pictures_of(report)))
    return (
        f'<section><h2>{escape(place)} <span class="{_tone(report.ok)}">{mark}</span></h2>{problems}<dl>{facts}</dl>'
        + (figures or '<p class="soft">No sample was drawn, so there is nothing to show.</p>')
        + "</section>"
    )


def _problem(problem: Problem) -> str:
    return (
        f'<div class="problem"><p><strong class="bad">✘ {problem.kind}</strong> '
        f'<span class="soft">{escape(problem.where)}</span></p><p>{escape(problem.what)} {escape(problem.why)}</p>'
        f"<p><strong>Remedy:</strong> {escape(problem.remedy)}</p></div>"
    )


def _figure(picture: Picture) -> str:
    title = escape(picture.title)
    return (
        f'<figure><h3>{title}</h3><div class="scroll" tabindex="0" role="group" aria-label="{title}">'
        f"{picture.html()}</div><figcaption>{escape(picture.caption)}</figcaption></figure>"
    )
