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
from ddp_patch.auditing.words import waiting_text

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
# How often a sample is seen: each has a colour and a hatching of its own, so that nobody needs to see colours.
_SEEN = {"never": ("#d1495b", "////"), "once": ("#8a94a6", ""), "again": ("#e0a100", "xxxx")}
_WAITS = ("#8a94a6", "////")
# Write into cells up to this many of them, and names of up to this many letters.
_FEW, _LONGEST = 24, 6
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
    heights = [0.4, 1.9] if shown.positions and "shares" in parts else []
    heights += [0.35 + 0.19 * len(each.ranks) for each in waits.values()]
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "hatch.color")
    style: dict[Any, Any] = {**_STYLE, **dict.fromkeys(inked, _INK[scheme])}
    with rc_context(style):
        figure = Figure(figsize=(9, sum(heights) + 0.75 * len(heights)), layout="constrained")
        panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0].tolist()
        if shown.positions and "shares" in parts:
            _draw_seen(panels[0], shown)
            _draw_shares(panels[1], shown)
        longest = max((sum(each.slowest) for each in waits.values()), default=0.0)
        for panel, (who, each) in zip(panels[len(heights) - len(waits) :], waits.items(), strict=True):
            _draw_waits(panel, who, each, longest)
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
    lefts, widths = _columns(shown)
    below = np.zeros(len(lefts))
    for level, (colour, hatch) in enumerate(_SEEN.values()):
        part = np.array(shown.levels)[:, level]
        filled = part > 0
        panel.bar(lefts[filled], part[filled], widths[filled], below[filled], align="edge", color=colour, hatch=hatch)
        below += part
    handles = [Patch(facecolor=colour, hatch=hatch) for colour, hatch in _SEEN.values()]
    texts = [f"{how}: {count}" for how, count in zip(_SEEN, shown.seen, strict=True)]
    used = [place for place, count in enumerate(shown.seen) if count]
    _legend(panel, [handles[place] for place in used], [texts[place] for place in used])
    panel.set_title(f"How often the ranks see each sample (epoch {shown.epoch})", loc="left")
    panel.set(xlim=(0, shown.positions), ylim=(0, 1), xticks=[], yticks=[])


def _draw_shares(panel: Axes, shown: Pictured) -> None:
    """Draw which rank gets the samples of each column, and how often: one rank's part upon the other's."""
    lefts, widths = _columns(shown)
    below, colours = np.zeros(len(lefts)), _colours(len(shown.bands))
    for band, (got, colour) in enumerate(zip(np.array(shown.got), colours, strict=True)):
        filled = got > 0
        panel.bar(lefts[filled], got[filled], widths[filled], below[filled], align="edge", color=colour, linewidth=0)
        if len(lefts) <= _FEW and len(shown.bands) <= _DISTINCT:
            for left, bottom, part in zip(lefts[filled], below[filled], got[filled], strict=True):
                panel.text(
                    left + 0.5, bottom + part / 2, f"{shown.bands[band][0]}", ha="center", va="center", color="w"
                )
        below += got
    panel.axhline(1, color="#808a99", linewidth=0.8, linestyle=":")
    panel.set(xlim=(0, shown.positions), ylim=(0, max(1.1, 1.05 * float(below.max()))), ylabel="times seen")
    panel.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    if 0 < len(shown.names) <= _FEW:
        panel.set_xticks(lefts + 0.5, list(map(_short, shown.names)))
    each = "a column is a sample" if shown.width == 1 else f"a column is {shown.width} samples"
    panel.set_xlabel(f"samples, in the order in which one process would draw them; {each}")
    panel.set_title("Which rank gets them", loc="left")
    bands = len(shown.bands)
    some = range(bands) if bands <= _DISTINCT else [0, bands // 2, bands - 1]
    texts = [_band_name(*shown.bands[band]) for band in some]
    _legend(panel, [Patch(facecolor=colours[band]) for band in some], texts)


def _draw_waits(panel: Axes, title: str, waits: Waits, longest: float) -> None:
    """Draw each rank's work in a few steps along the time, and the waiting below it."""
    ends = np.cumsum(waits.slowest)
    begins = ends - waits.slowest
    colours = _colours(waits.ranks[-1] + 1)
    for row, (rank, costs) in enumerate(zip(waits.ranks, waits.costs, strict=True)):
        done = begins + costs
        panel.barh(row, costs, 0.8, begins, color=colours[rank], linewidth=0)
        panel.barh(row, ends - done, 0.45, done, color="none", edgecolor=_WAITS[0], hatch=_WAITS[1], linewidth=0)
    for end in ends:
        panel.axvline(end, linewidth=0.8, color="#808a99")
    panel.set_yticks(range(len(waits.ranks)), [f"rank {rank}" for rank in waits.ranks])
    panel.set(
        xlim=(0, longest), ylim=(len(waits.ranks) - 0.5, -0.5), xlabel=f"time of {len(ends)} steps, in the unit of cost"
    )
    panel.set_title(title, loc="left")
    hatched = Patch(facecolor="none", edgecolor=_WAITS[0], hatch=_WAITS[1])
    _legend(panel, [hatched], ["waits for the slowest rank"])


def _columns(shown: Pictured) -> tuple[Any, Any]:
    """Return where columns begin and how wide they are, in samples."""
    lefts = np.arange(len(shown.levels)) * shown.width
    return lefts, np.minimum(shown.width, shown.positions - lefts)


def _legend(panel: Axes, handles: Sequence[Patch], texts: Sequence[str]) -> None:
    panel.legend(
        handles,
        texts,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(texts),
        frameon=False,
        borderaxespad=0,
        handlelength=1.2,
    )


def _colours(count: int) -> list[Any]:
    """Return a colour for each of some ranks: of their own where they are few, else from one scale."""
    if count <= _DISTINCT:
        return [colormaps["tab10"](rank) for rank in range(count)]
    return [colormaps["viridis"](rank / (count - 1)) for rank in range(count)]


def _short(name: str) -> str:
    """Return a sample's name, cut if it is long, as matplotlib shows it without taking it for a formula."""
    return (name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…").replace("$", r"\$")


def _band_name(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def alternative(shown: Pictured, balanced: Pictured | None) -> str:
    """Return in words what the picture shows."""
    found = []
    if shown.positions:
        never, once, again = shown.seen
        found.append(
            f"Of {shown.positions} samples that one process draws, the ranks see {once} once, {again} more often and "
            f"{never} never, in epoch {shown.epoch}. Below: which rank gets which sample."
        )
    return " ".join([*found, *(f"{title}." for title in _waits(shown, balanced))])


def picture_html(shown: Pictured, balanced: Pictured | None) -> str:
    """Return the picture for a page, in the reader's scheme; nothing where there is nothing to show."""
    text = alternative(shown, balanced)
    if not text:
        return ""
    light, dark = (
        f"data:image/svg+xml;base64,{b64encode(svg(shown, balanced, scheme).encode()).decode()}"
        for scheme in ("light", "dark")
    )
    return (
        f'<picture class="ddp-picture"><source srcset="{dark}" media="(prefers-color-scheme: dark)">'
        f'<img src="{light}" alt="{escape(text)}"></picture>'
    )
