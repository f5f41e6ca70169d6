"""Draw the picture of an audit: which rank gets which sample, and how ranks wait for each other."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from io import StringIO
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ddp_patch.auditing.pictured import Pictured, Waits
from ddp_patch.auditing.show import waiting_text

__all__ = ["alternative", "picture_html", "svg"]


_INK = {"light": "#1c2330", "dark": "#e7ebf2"}
_PAPER = {"light": "#ffffff", "dark": "#12161d"}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ddp_patch",
    "font.family": "sans-serif",
    "font.size": 9,
    "hatch.linewidth": 0.6,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "hatch.color")
_GREY = "#8a94a6"
# How often a sample is seen: each has a colour and a hatching of its own, so that nobody needs to see colours.
_SEEN: dict[str, dict[str, Any]] = {
    "never": {"facecolor": "#d1495b", "hatch": "////"},
    "once": {"facecolor": _GREY},
    "again": {"facecolor": "#e0a100", "hatch": "xxxx"},
}
_WAITING: dict[str, Any] = {"facecolor": "none", "edgecolor": _GREY, "hatch": "////"}
# Give up to this many ranks colours of their own; those of more are taken from one scale.
_DISTINCT = 10


def svg(shown: Pictured, balanced: Pictured | None, scheme: str, parts: Sequence[str] = ("shares", "waits")) -> str:
    """Return the picture as SVG.

    Args:
        shown: What it is drawn from.
        balanced: The same of the loader patched with ``cost=``; None where there is none.
        scheme: For which ground: ``"light"`` or ``"dark"``.
        parts: Which parts to draw: who gets which sample, and how ranks wait.
    """
    waits = _waits(shown, balanced) if "waits" in parts else {}
    shares = bool(shown.positions) and "shares" in parts
    heights = [0.4, 1.9] * shares + [0.35 + 0.19 * len(each.ranks) for each in waits.values()]
    style: dict[Any, Any] = {**_STYLE, **dict.fromkeys(_INKED, _INK[scheme])}
    with rc_context(style):
        figure = Figure(figsize=(9, sum(heights) + 0.75 * len(heights)), layout="constrained")
        panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0].tolist()
        if shares:
            _draw_seen(panels[0], shown)
            _draw_shares(panels[1], shown)
        longest = max((sum(each.slowest) for each in waits.values()), default=0.0)
        for panel, (title, each) in zip(panels[2 * shares :], waits.items(), strict=True):
            _draw_waits(panel, title, each, longest)
        written = StringIO()
        figure.savefig(written, format="svg", facecolor=_PAPER[scheme], metadata={"Date": None, "Creator": None})
    return written.getvalue()


def _waits(shown: Pictured, balanced: Pictured | None) -> dict[str, Waits]:
    """Return how ranks wait, by what is to be said of it: without ``cost=``, and with it where there is that."""
    both = {"ranks": shown} if balanced is None else {"without cost=, ranks": shown, "with cost=, ranks": balanced}
    return {
        f"{who} wait {waiting_text(each.waits.imbalance)} of the time".capitalize(): each.waits
        for who, each in both.items()
        if each.waits is not None
    }


def _draw_seen(panel: Axes, shown: Pictured) -> None:
    """Draw how often all ranks together see the samples of each column."""
    used = {f"{how}: {count}": _SEEN[how] for how, count in zip(_SEEN, shown.seen, strict=True) if count}
    _stack(panel, shown, np.array(shown.levels).T, [*_SEEN.values()])
    _finish(panel, f"How often the ranks see each sample (epoch {shown.epoch})", used)
    panel.set(ylim=(0, 1), xticks=[], yticks=[])


def _draw_shares(panel: Axes, shown: Pictured) -> None:
    """Draw which rank gets the samples of each column, and how often: one rank's part upon the other's."""
    bands = len(shown.bands)
    colours = [{"facecolor": colour} for colour in _colours(bands)]
    some = range(bands) if bands <= _DISTINCT else [0, bands // 2, bands - 1]
    highest = _stack(panel, shown, np.array(shown.got), colours)
    _finish(panel, "Which rank gets them", {_band_name(*shown.bands[band]): colours[band] for band in some})
    panel.axhline(1, color=_GREY, linewidth=0.8, linestyle=":")
    each = "a column is a sample" if shown.width == 1 else f"a column is {shown.width} samples"
    panel.set(
        ylim=(0, max(1.1, 1.05 * highest)),
        ylabel="times seen",
        xlabel=f"samples, in the order in which one process would draw them; {each}",
    )
    panel.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _stack(panel: Axes, shown: Pictured, parts: Any, looks: Sequence[dict[str, Any]]) -> float:
    """Draw bars upon each other, in each column one for each part, and return how high the highest is."""
    lefts = np.arange(0, shown.positions, shown.width)
    widths, below = np.diff(lefts, append=shown.positions), np.zeros(len(lefts))
    for part, look in zip(parts, looks, strict=True):
        filled = part > 0
        panel.bar(lefts[filled], part[filled], widths[filled], below[filled], align="edge", linewidth=0, **look)
        below += part
    panel.set_xlim(0, shown.positions)
    return float(below.max())


def _draw_waits(panel: Axes, title: str, waits: Waits, longest: float) -> None:
    """Draw each rank's work in a few steps along the time, and the waiting below it."""
    ends = np.cumsum(waits.slowest)
    begins = ends - waits.slowest
    colours = _colours(waits.ranks[-1] + 1)
    for row, (rank, costs) in enumerate(zip(waits.ranks, waits.costs, strict=True)):
        done = begins + costs
        panel.barh(row, costs, 0.8, begins, color=colours[rank], linewidth=0)
        panel.barh(row, ends - done, 0.45, done, linewidth=0, **_WAITING)
    for end in ends:
        panel.axvline(end, linewidth=0.8, color=_GREY)
    panel.set_yticks(range(len(waits.ranks)), [f"rank {rank}" for rank in waits.ranks])
    panel.set(
        xlim=(0, longest), ylim=(len(waits.ranks) - 0.5, -0.5), xlabel=f"time of {len(ends)} steps, in the unit of cost"
    )
    _finish(panel, title, {"waits for the slowest rank": _WAITING})


def _finish(panel: Axes, title: str, looks: dict[str, dict[str, Any]]) -> None:
    """Write a panel's title, and beside it what its colours mean."""
    panel.set_title(title, loc="left")
    where: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0}
    handles = [Patch(**look) for look in looks.values()]
    panel.legend(handles, [*looks], ncols=len(looks), frameon=False, handlelength=1.2, **where)


def _colours(count: int) -> list[Any]:
    """Return a colour for each of some ranks: of their own where they are few, else from one scale."""
    few = count <= _DISTINCT
    return [colormaps["tab10"](rank) if few else colormaps["viridis"](rank / (count - 1)) for rank in range(count)]


def _band_name(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def alternative(shown: Pictured, balanced: Pictured | None) -> str:
    """Return in words what the picture shows."""
    found = [f"{title}." for title in _waits(shown, balanced)]
    if shown.positions:
        never, once, again = shown.seen
        text = (
            f"Of {shown.positions} samples that one process draws, the ranks see {once} once, {again} more often and "
            f"{never} never, in epoch {shown.epoch}. Below: which rank gets which sample."
        )
        found.insert(0, text)
    return " ".join(found)


def picture_html(shown: Pictured, balanced: Pictured | None) -> str:
    """Return the picture for a page, in the reader's scheme; nothing where there is nothing to show."""
    if not (text := alternative(shown, balanced)):
        return ""
    light, dark = (
        f"data:image/svg+xml;base64,{b64encode(svg(shown, balanced, scheme).encode()).decode()}"
        for scheme in ("light", "dark")
    )
    return (
        f'<picture class="ddp-picture"><source srcset="{dark}" media="(prefers-color-scheme: dark)">'
        f'<img src="{light}" alt="{escape(text)}"></picture>'
    )
