"""Describe a figure: rows of bars on one axis across, in fractions, so that any size can be drawn of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias

__all__ = ["Bar", "Figure", "Fill", "Row", "columns_of", "ticks_of"]

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
class Row:
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
    rows: tuple[Row, ...]
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
