"""Draw figures as SVG and as text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from itertools import groupby
from typing import Literal, TypeAlias

__all__ = [
    "PATTERNS",
    "STYLE",
    "Bar",
    "BarRow",
    "Figure",
    "Fill",
    "columns_of",
    "figure_html",
    "figures_svg",
    "ticks_of",
    "with_own_patterns",
]


# How a bar is filled. Each has a colour and a pattern of its own, so that nobody needs to see colours.
Fill: TypeAlias = Literal["once", "again", "never", "wait", "line", "none"]


@dataclass(frozen=True, slots=True)
class Bar:
    """Describe a bar in fractions of its row.

    Attributes:
        left: Where it begins, from the left end at 0.
        width: How wide it is, of 1.
        fill: How it is filled.
        bottom: Where it begins, from the bottom at 0.
        height: How high it is, of 1.
        text: What is written in its middle.
    """

    left: float
    width: float
    fill: Fill
    bottom: float = 0.0
    height: float = 1.0
    text: str = ""


@dataclass(frozen=True, slots=True)
class BarRow:
    """Hold the bars of one row, and its name."""

    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """Hold all that is shown of one thing.

    Attributes:
        title: What it shows.
        caption: How to read it.
        alt: What can be seen in it, for readers who do not see it.
        legend: What each fill means.
        rows: The rows, from the top.
        ticks: What is written below the rows, each at a fraction of the width.
        height: The height of a row in pixels.
        is_dense: Whether texts fit into bars only where the figure is wide.
    """

    title: str
    caption: str
    alt: str
    legend: tuple[tuple[Fill, str], ...]
    rows: tuple[BarRow, ...]
    ticks: tuple[tuple[float, str], ...] = ()
    height: int = 22
    is_dense: bool = False


def columns_of(
    heights: Iterable[tuple[float, float]], fill: Fill, width: int, length: int, texts: Sequence[str] = ()
) -> Iterator[Bar]:
    """Yield the bars of a row's columns; equal neighbours without a text are one bar, so that no seam is seen.

    Args:
        heights: Where each column's bar begins, and how high it is.
        fill: How it is filled.
        width: How many positions a column holds.
        length: How many positions there are; the last column may be narrower.
        texts: What is written in each.

    Examples:
        >>> [(bar.left, bar.width, bar.height) for bar in columns_of([(0, 1), (0, 1), (0, 0.5)], "once", 4, 10)]
        [(0.0, 0.8, 1), (0.8, 0.2, 0.5)]
    """
    columns = [(*place, texts[at] if texts else "") for at, place in enumerate(heights)]
    begin = 0
    for (bottom, height, text), run in groupby(columns):
        end = begin + sum(1 for _ in run)
        left, right = begin * width / length, min(1.0, end * width / length)
        if height > 0 and text:
            wide = (right - left) / (end - begin)
            yield from (Bar(left + at * wide, wide, fill, bottom, height, text) for at in range(end - begin))
        elif height > 0:
            yield Bar(left, round(right - left, 9), fill, bottom, height)
        begin = end


def ticks_of(length: int, width: int) -> tuple[tuple[float, str], ...]:
    """Return ticks for an axis of whole positions, at which the first, some between and the last begin.

    Args:
        length: How many positions there are.
        width: How many positions a column holds.

    Examples:
        >>> ticks_of(100, 1)
        ((0.005, '0'), (0.255, '25'), (0.505, '50'), (0.755, '75'), (0.995, '99'))
    """
    half = 0.5 / length if width == 1 else 0.0
    places = sorted({0, length // 4, length // 2, 3 * length // 4, length - 1})
    return tuple((round(min(1.0, place / length + half), 9), f"{place}") for place in places)


# Each colour has a contrast of 3 at least to white and to dark pages alike; black numbers on it can be read.
_COLOURS: Mapping[Fill, str] = {"once": "#3b8bd0", "again": "#b87a00", "never": "#d55e00", "wait": "#808a99"}
_PATTERNS: Mapping[Fill, str] = {
    "again": '<path d="M-2 2 2 -2 M0 8 8 0 M6 10 10 6" stroke="#000" stroke-opacity=".55" stroke-width="1.6"/>',
    "never": '<path d="M0 4 H8" stroke="#fff" stroke-opacity=".75" stroke-width="1.6"/>',
}


# The fill that is its colour alone.
_PLAIN: Fill = "once"
# Behind the bars of a row: what there is none of.
_GROUND = f'fill="{_COLOURS["wait"]}" fill-opacity=".16"'


def _pattern(fill: Fill) -> str:
    ground = '<rect width="8" height="8" fill="' + _COLOURS[fill] + '"/>'
    if fill == "wait":  # stripes on the page's own ground, so that work stands out
        ground = f'<path d="M-2 2 2 -2 M0 8 8 0 M6 10 10 6" stroke="{_COLOURS[fill]}" stroke-width="1.6"/>'
    marks = _PATTERNS.get(fill, "")
    return f'<pattern id="ddp-{fill}" width="8" height="8" patternUnits="userSpaceOnUse">{ground}{marks}</pattern>'


# Stands once in each document: what its figures are filled with. It is no picture, and takes no room.
PATTERNS = (
    '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
    + "".join(_pattern(fill) for fill in _COLOURS if fill != _PLAIN)
    + "</defs></svg>"
)

# Takes the text's colour and size from the page, so that it fits light and dark ones, and notebooks.
STYLE = """
.ddp-figure { margin: 1rem 0; container-type: inline-size; font-size: .875rem; line-height: 1.4; }
.ddp-figure p { margin: .25rem 0; }
.ddp-figure svg { display: block; overflow: visible; }
.ddp-title { font-weight: 600; font-size: 1rem; }
.ddp-caption, .ddp-name, .ddp-ticks { opacity: .8; }
.ddp-legend { display: flex; flex-wrap: wrap; gap: .125rem 1.25rem; list-style: none; margin: .25rem 0; padding: 0; }
.ddp-legend li { display: flex; gap: .5rem; align-items: center; margin: 0; }
.ddp-legend svg { flex: none; }
.ddp-rows { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 2px .5rem; align-items: center; }
.ddp-rows > svg { background: rgba(128, 138, 153, .16); }
.ddp-low { row-gap: 0; }
.ddp-name { font-size: 12px; white-space: nowrap; width: 4.75em; }
.ddp-ticks { position: relative; height: 1.3em; font-size: 12px; }
.ddp-ticks span { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.ddp-ticks span:first-child { transform: none; } .ddp-ticks span:last-child { transform: translateX(-100%); }
@container (max-width: 40rem) { .ddp-dense text, .ddp-ticks span:nth-child(even):not(:last-child) {
  display: none; } }
"""

# A text in or above a bar, with a light edge, so that it can be read on any ground.
_IN_BAR = (
    '<text x="{}" y="50%" font-size="11" text-anchor="middle" dominant-baseline="central" fill="#000" stroke="#fff" '
    'stroke-opacity=".75" stroke-width="3" stroke-linejoin="round" paint-order="stroke">{}</text>'
)
# About how wide a letter is, in pixels.
_LETTER = 6.6
# Rows of fewer pixels than this do not all have their names beside them.
_NAMED_ROW = 14
# And rows of fewer than this have nothing between them.
_LOW = 6


def figure_html(figure: Figure) -> str:
    """Return a figure as HTML; its page must have ``STYLE`` and ``PATTERNS``."""
    legend = "".join(f"<li>{_swatch(fill)}<span>{escape(text)}</span></li>" for fill, text in figure.legend)
    kind = "ddp-rows" + (" ddp-low" if figure.height < _LOW else "")
    named = f'<span class="ddp-name" style="height:{figure.height}px;line-height:{figure.height}px">'
    rows = "".join(
        f'{named}{escape(name)}</span><svg width="100%" height="{figure.height}">{_bars(row)}</svg>'
        for name, row in zip(_names(figure), figure.rows, strict=True)
    )
    ticks = "".join(f'<span style="left:{_percent(at)}">{escape(text)}</span>' for at, text in figure.ticks)
    return (
        f'<div class="ddp-figure{" ddp-dense" if figure.is_dense else ""}">'
        f'<p class="ddp-title">{escape(figure.title)}</p><ul class="ddp-legend">{legend}</ul>'
        f'<div class="{kind}" role="img" aria-label="{escape(figure.alt)}">{rows}'
        f'<span></span><div class="ddp-ticks">{ticks}</div></div>'
        f'<p class="ddp-caption">{escape(figure.caption)}</p></div>'
    )


def with_own_patterns(html: str) -> str:
    """Return figures and their ``PATTERNS`` with names that no other output of a notebook has.

    Of several patterns with one name a browser takes the first one, and shows nothing where that one is hidden.
    """
    name = f"ddp-{sha256(html.encode()).hexdigest()[:8]}-"
    return html.replace('<pattern id="ddp-', f'<pattern id="{name}').replace('fill="url(#ddp-', f'fill="url(#{name}')


def _names(figure: Figure) -> list[str]:
    """Return the rows' names, with gaps where rows are too low for all of them."""
    gap = 2 if figure.height >= _LOW else 0
    every = -(-_NAMED_ROW // (figure.height + gap))
    return [row.name if at % every == 0 else "" for at, row in enumerate(figure.rows)]


def _swatch(fill: Fill) -> str:
    return f'<svg width="22" height="14" aria-hidden="true"><rect width="22" height="14" {_paint(fill)}/></svg>'


def _paint(fill: Fill) -> str:
    if fill == "none":
        return f'class="ddp-{fill}" {_GROUND}'
    # The colour after the pattern is shown where a page has lost the pattern.
    paint = _COLOURS[fill] if fill == _PLAIN else f"url(#ddp-{fill}) {_COLOURS[fill]}"
    return f'class="ddp-{fill}" fill="{paint}"'


def _bars(row: BarRow) -> str:
    return "".join(map(_bar, row.bars))


def _bar(bar: Bar) -> str:
    left, top = _percent(bar.left), _percent(1 - bar.bottom - bar.height)
    if bar.fill == "line":
        return f'<line x1="{left}" x2="{left}" y1="0" y2="100%" stroke="currentColor" stroke-width="1.5"/>'
    size = f'width="{_percent(bar.width)}" height="{_percent(bar.height)}"'
    if not bar.text:  # crisp: between neighbours no seam is seen
        return f'<rect x="{left}" y="{top}" {size} {_paint(bar.fill)} shape-rendering="crispEdges"/>'
    middle = _percent(bar.left + bar.width / 2)
    return f'<rect x="{left}" y="{top}" {size} {_paint(bar.fill)}/>{_IN_BAR.format(middle, escape(bar.text))}'


def _percent(fraction: float) -> str:
    # So many digits that a bar ends where the next one begins: at fewer, light lines show between them.
    return f"{100 * fraction:.8g}%"


def figures_svg(figures: list[Figure], ink: str, width: int = 560) -> str:
    """Return figures, one above the other, as an SVG file.

    Args:
        figures: The figures.
        ink: The colour of texts and lines.
        width: The width in pixels.
    """
    names, parts, top = 64, [], 0
    for figure in figures:
        parts.append(_text(0, top + 16, figure.title, "font-weight:600;font-size:15px"))
        left = 0.0
        for fill, text in figure.legend:
            needs = 50 + _LETTER * len(text)
            if left + needs > width:
                left, top = 0.0, top + 20
            parts.append(f'<g transform="translate({left:.5g} {top + 26})">{_swatch(fill)}</g>')
            parts.append(_text(left + 30, top + 38, text))
            left += needs
        top += 50
        for name, row in zip(_names(figure), figure.rows, strict=True):
            parts.append(_text(0, top + figure.height / 2 + 4, name))
            shape = f'x="{names}" y="{top}" width="{width - names}" height="{figure.height}"'
            parts.append(f"<rect {shape} {_GROUND}/><svg {shape}>{_bars(row)}</svg>")
            top += figure.height + 2
        for at, text in figure.ticks:
            where = "start" if at < 0.02 else "end" if at > 0.95 else "middle"
            parts.append(_text(names + at * (width - names), top + 14, text, f"text-anchor:{where}"))
        top += 36
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}" '
        f'color="{ink}" font-family="sans-serif" font-size="13">{PATTERNS}{"".join(parts)}</svg>\n'
    )


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.5g}" y="{y:.5g}" fill="currentColor" style="{style}">{escape(text)}</text>'
