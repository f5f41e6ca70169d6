"""A page with pictures of what ranks got: one file, with nothing loaded from elsewhere."""

from collections.abc import Mapping, Sequence
from html import escape

from ddp_patch.auditing.report import Pictured, Problem, Report

__all__ = ["page"]

# In user units of the pictures, which are pixels where they are not scaled.
_CELL_W, _CELL_H, _LEFT, _TOP = 40, 26, 64, 22
_BAR_W, _BAR_H = 5, 26
_PLOT_H = 120
_LONGEST_NAME = 5

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5a6475; --line: #c9d0da; --paper: #ffffff; --panel: #f5f7fa;
  --fill: #cfe3f7; --pad: #ffe2a8; --bad: #b3261e; --bad-fill: #f9d0cc; --good: #14683a; --bar: #3f7fbf; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf2; --soft: #a5afbf; --line: #465063; --paper: #12161d;
  --panel: #1b212b; --fill: #234a70; --pad: #6b4e0a; --bad: #ff9d95; --bad-fill: #6e231d; --good: #7fd6a2;
  --bar: #6aaef0; } }
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
.scroll:focus-visible { outline: 2px solid var(--bar); }
svg { display: block; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); }
svg .axis { fill: var(--soft); }
.cell { fill: var(--fill); stroke: var(--paper); }
.cell.padding { fill: var(--pad); stroke: var(--ink); stroke-dasharray: 3 2; }
.cell.repeated { fill: var(--bad-fill); stroke: var(--bad); stroke-width: 2; }
.bar { fill: var(--bar); } .none { stroke: var(--bad); stroke-width: 1.5; }
.slowest { fill: none; stroke: var(--bad); stroke-width: 2; }
.mean { fill: none; stroke: var(--bar); stroke-width: 2; stroke-dasharray: 5 3; }
.frame { stroke: var(--line); fill: none; }
@media (max-width: 34rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; } }
"""


def page(reports: Mapping[str, Report]) -> str:
    """Return the reports as an HTML page, which holds all that it shows.

    Args:
        reports: By place, as ``loaders.train``.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> html = page({"train": audit(DataLoader(range(10), batch_size=2), world_size=4)})
        >>> html.count("<svg"), "http" in html
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
    mark = "✔ holds" if report.ok else "✘ does not hold"
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.facts())
    problems = "".join(map(_problem, report.problems))
    return (
        f'<section><h2>{escape(place)} <span class="{_tone(report.ok)}">{mark}</span></h2>'
        f"{problems}<dl>{facts}</dl>{_pictures(report.pictured)}</section>"
    )


def _problem(problem: Problem) -> str:
    return (
        f'<div class="problem"><p><strong class="bad">✘ {problem.kind}</strong> '
        f'<span class="soft">{escape(problem.where)}</span></p><p>{escape(problem.what)} {escape(problem.why)}</p>'
        f"<p><strong>Remedy:</strong> {escape(problem.remedy)}</p></div>"
    )


def _pictures(pictured: Pictured) -> str:
    if not any(pictured.items):
        return '<p class="soft">No rank got a sample, so there is nothing to show.</p>'
    legend = "P and a dashed frame: padding, a sample again to fill the last round. ! and a thick frame: repeated."
    maps = [_figure("Who gets what: the first samples of epoch 0", _share_map(pictured.items, pictured.marks), legend)]
    if any(pictured.tail_items):
        tail = _share_map(pictured.tail_items, pictured.tail_marks, "place from the end")
        maps.append(_figure("Who gets what: the last samples of epoch 0", tail, legend))
    most = max((max(sizes, default=0) for sizes in pictured.sizes), default=0)
    steps = _figure(
        f"Batch sizes of the first {max(map(len, pictured.sizes))} steps",
        _size_map(pictured.sizes),
        f"A bar is a batch, as high as it has samples; the highest has {most}. A crossed place: no such step.",
    )
    cost = ""
    if pictured.costs:
        told = "Solid: the slowest rank. Dashed: the mean of all ranks. Where they part, ranks wait."
        cost = _figure("Cost of each step", _cost_plot(pictured.costs), told)
    return "".join(maps) + steps + cost


def _figure(title: str, svg: str, caption: str) -> str:
    return (
        f'<figure><h3>{title}</h3><div class="scroll" tabindex="0" role="group" aria-label="{title}">{svg}</div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{style}">{escape(text)}</text>'


def _rank_names(count: int, height: float) -> list[str]:
    return [_text(_LEFT - 8, _TOP + (rank + 0.5) * height + 4, f"rank {rank}", "axis", "end") for rank in range(count)]


def _share_map(
    items: Sequence[Sequence[str]], marks: Sequence[Sequence[str]], across: str = "place in a rank's share"
) -> str:
    """Ranks downwards, places in their shares across; in each cell the sample."""
    columns = max(map(len, items))
    parts = _rank_names(len(items), _CELL_H)
    for column in range(columns):
        shown = column if across.startswith("place in") else columns - column
        parts.append(_text(_LEFT + (column + 0.5) * _CELL_W, _TOP - 7, str(shown), "axis"))
    for rank, (names, rank_marks) in enumerate(zip(items, marks, strict=True)):
        for column, (name, mark) in enumerate(zip(names, rank_marks, strict=True)):
            parts.append(_cell(_LEFT + column * _CELL_W, _TOP + rank * _CELL_H, name, mark))
    width, height = _LEFT + columns * _CELL_W + 4, _TOP + len(items) * _CELL_H + 4
    return _svg(width, height, f"Each rank's samples, by {across}", parts)


def _cell(x: float, y: float, name: str, mark: str) -> str:
    sign = {"padding": "P", "repeated": "!"}.get(mark, "")
    room = _LONGEST_NAME - (1 if sign else 0)
    short = name if len(name) <= room else name[: room - 1] + "…"
    box = f'<rect x="{x + 1:g}" y="{y + 1:g}" width="{_CELL_W - 3}" height="{_CELL_H - 3}" rx="3" class="cell {mark}"/>'
    said = f"{name} ({mark})" if mark else name
    return f"<g><title>{escape(said)}</title>{box}{_text(x + _CELL_W / 2, y + _CELL_H / 2 + 4, short + sign)}</g>"


def _size_map(sizes: Sequence[Sequence[int]]) -> str:
    """Ranks downwards, steps across; in each place a bar as high as the batch is large."""
    steps = max(map(len, sizes))
    most = max((max(rank, default=0) for rank in sizes), default=0) or 1
    bar = max(_BAR_W, min(_CELL_W, 640 // max(1, steps)))
    parts = _rank_names(len(sizes), _BAR_H + 4)
    parts += [_text(_LEFT + (s + 0.5) * bar, _TOP - 7, str(s), "axis") for s in range(0, steps, max(1, 80 // bar))]
    for rank, batches in enumerate(sizes):
        bottom = _TOP + (rank + 1) * (_BAR_H + 4)
        for step in range(steps):
            x = _LEFT + step * bar
            if step < len(batches):
                high = _BAR_H * batches[step] / most
                parts.append(
                    f'<rect x="{x:g}" y="{bottom - high:g}" width="{bar - 1}" height="{high:g}" class="bar">'
                    f"<title>rank {rank}, step {step}: {batches[step]} samples</title></rect>"
                )
            else:
                parts.append(
                    f'<path d="M{x:g} {bottom - 14:g}l{bar - 1} 10m0 -10l{1 - bar} 10" class="none">'
                    f"<title>rank {rank} makes no step {step}</title></path>"
                )
    return _svg(_LEFT + steps * bar + 4, _TOP + len(sizes) * (_BAR_H + 4) + 4, "Each rank's batch sizes", parts)


def _cost_plot(costs: Sequence[Sequence[float]]) -> str:
    """Steps across, cost upwards: the slowest rank's, and the mean."""
    by_step = list(zip(*costs, strict=True))
    most = max(map(max, by_step)) or 1.0
    wide = max(4.0, min(40.0, 640 / len(by_step)))

    def line(values: Sequence[float], style: str) -> str:
        heights = [(_LEFT + (at + 0.5) * wide, _TOP + _PLOT_H * (1 - value / most)) for at, value in enumerate(values)]
        return f'<polyline points="{" ".join(f"{x:g},{y:g}" for x, y in heights)}" class="{style}"/>'

    width = len(by_step) * wide
    parts = [
        f'<rect x="{_LEFT}" y="{_TOP}" width="{width:g}" height="{_PLOT_H}" class="frame"/>',
        _text(_LEFT - 8, _TOP + 8, f"{most:g}", "axis", "end"),
        _text(_LEFT - 8, _TOP + _PLOT_H, "0", "axis", "end"),
        line([max(step) for step in by_step], "slowest"),
        line([sum(step) / len(step) for step in by_step], "mean"),
    ]
    return _svg(_LEFT + width + 4, _TOP + _PLOT_H + 8, "Cost of each step", parts)
