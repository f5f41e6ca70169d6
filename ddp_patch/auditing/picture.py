"""Draw the picture of an audit: which rank gets which sample, and how ranks wait for each other.

``pictured`` sums up an epoch of any length in a few hundred numbers, which a report keeps. matplotlib, which the extra
``audit`` installs, is imported only to draw.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_patch.auditing.ranks import Numbers
from ddp_patch.auditing.world import Costs, EpochGiven, counts_of, dense

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def imbalance(costs: Costs) -> float | None:
    """Return the slowest rank's cost divided by the ranks' mean cost, over all steps; None if all costs are 0.

    Args:
        costs: The cost of each step, shape (ranks, steps).
    """
    mean = costs.mean(axis=0).sum()
    return float(costs.max(axis=0).sum() / mean) if mean else None


def waiting_text(imbalance: float) -> str:
    """Return the percentage of time that ranks wait on average, if a step takes as long as its slowest rank.

    Examples:
        >>> waiting_text(1.5), waiting_text(1.004)
        ('33 %', '0.4 %')
    """
    share = 100 * (1 - 1 / imbalance)
    return f"{share:.1f} %" if 0.05 <= share < 9.95 else f"{share:.0f} %"


# ---- what is drawn ----


@dataclass(frozen=True, slots=True)
class Pictured:
    """The numbers of the picture, of the first epoch that has a problem, or else of the first epoch.

    Samples are in the order of one process, cut into columns.

    Attributes:
        epoch: The epoch's number.
        positions: How many samples one process draws; 0 if samples cannot be compared.
        width: How many samples a column has; the last column may have fewer.
        seen: How many samples are seen never, once, and more often. If only a part of the epoch was drawn, the first is
            0.
        often: The fraction of each column's samples that is seen never, once, and more often, shape (3, columns).
        bands: The first and last rank of each band. If there are many ranks, a band has several.
        got: How often a band's ranks get a sample of a column, on average, shape (bands, columns).
        waits: By title, the costs of the first steps of some ranks, by rank, and as ``"slowest"`` of the slowest of all
            ranks, shape (steps,); 0 if a rank has no such step. Empty without ``cost``, or if all costs are 0.
    """

    epoch: int = 0
    positions: int = 0
    width: int = 1
    seen: tuple[int, ...] = (0, 0, 0)
    often: tuple[tuple[float, ...], ...] = ()
    bands: tuple[tuple[int, int], ...] = ()
    got: tuple[tuple[float, ...], ...] = ()
    waits: Mapping[str, Mapping[int | str, tuple[float, ...]]] = field(default_factory=dict)


# About how many columns there are; and the most bands of ranks whose colours can be told apart.
_COLUMNS, _BANDS = 120, 32
# Columns have whole rounds of all ranks if at least this many columns are left: otherwise ranks would look like
# stripes.
_ENOUGH = 20
# How many steps of how many ranks are shown waiting: with more, bars are too thin to read at a glance.
_STEPS, _RANKS = 8, 10


def pictured(epoch: EpochGiven, is_comparable: bool, costs: Costs | None, unbalanced: Costs | None) -> Pictured:
    """Return the numbers of the picture of an epoch.

    Args:
        epoch: The samples of all ranks in the epoch.
        is_comparable: Whether samples can be compared.
        costs: The costs of steps, shape (ranks, steps); None if they are not known.
        unbalanced: The costs of steps without ``cost=``, if ``cost=`` balances the loader.
    """
    positions, world = len(epoch.alone.items), len(epoch.ranks)
    some = np.linspace(0, world - 1, min(_RANKS, world)).astype(int).tolist()
    who = {"Ranks": costs} if unbalanced is None else {"Without cost=, ranks": unbalanced, "With cost=, ranks": costs}
    waits = {}
    for ranks, each in who.items():
        if each is not None and (whole := imbalance(each)) is not None:
            rows = {**{rank: each[rank] for rank in some}, "slowest": each.max(axis=0)}
            shown = {rank: tuple(row[:_STEPS].tolist()) for rank, row in rows.items()}
            waits[f"{ranks} wait {waiting_text(whole)} of the time"] = shown
    if not positions or not is_comparable:
        return Pictured(epoch.number, waits=waits)
    turn = world if positions >= max(_ENOUGH * world, _COLUMNS + 1) else 1
    width = -(-positions // (_COLUMNS * turn)) * turn
    groups = np.array_split(np.arange(world), min(world, _BANDS))
    parts = [np.concatenate([epoch.ranks[rank].items for rank in group]) for group in groups]
    names, (expected, *bands) = dense([epoch.alone.items, *parts])
    drawn = counts_of(expected, len(names))[expected]  # how often one process draws each sample
    starts = np.arange(0, positions, width)

    def by_column(values: Costs) -> tuple[float, ...]:
        means = np.add.reduceat(values, starts) / np.diff(starts, append=positions)
        return tuple(means.round(4).tolist())

    def times_got(band: Numbers) -> Costs:
        return np.asarray(counts_of(band, len(names))[expected] / drawn)

    total, got = np.zeros(positions), []
    for times in map(times_got, bands):  # one band at a time: each array is as long as the epoch
        total += times
        got.append(by_column(times))
    again = np.clip(total - 1, 0, 1)
    # In a part of an epoch, a missing sample may come later.
    never = np.zeros(positions) if epoch.is_sample else np.clip(1 - total, 0, 1)
    kinds = (never, np.minimum(total, 1) - again, again)
    seen, often = (tuple(round(kind.sum()) for kind in kinds), tuple(map(by_column, kinds)))
    ends = tuple((int(group[0]), int(group[-1])) for group in groups)
    return Pictured(epoch.number, positions, width, seen, often, ends, tuple(got), waits)


# ---- how it is drawn ----


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
# Grey for samples that are seen once. Only the eighth and the ninth rank have colours that are similar to these.
_OFTEN = {"never": "#d3453c", "once": "#a9b2c0", "again": "#f2b01e"}
_WAITING: dict[str, Any] = {"facecolor": "none", "edgecolor": _GREY, "hatch": "////"}
# The numbers of matplotlib's ten colours, for up to ten ranks. Colours of more ranks are from a scale.
_DISTINCT = (0, 4, 2, 9, 5, 6, 8, 1, 3, 7)


def svg(shown: Pictured, scheme: str, parts: Sequence[str] = ("shares", "waits")) -> str:
    """Return the picture as SVG.

    Args:
        shown: The numbers of the picture.
        scheme: The background, ``"light"`` or ``"dark"``.
        parts: The parts to draw: which rank gets which sample (``"shares"``), and how ranks wait (``"waits"``).
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    waits = shown.waits if "waits" in parts else {}
    shares = bool(shown.positions) and "shares" in parts
    heights = [0.14, 1.9] * shares + [0.16 + 0.19 * len(costs) for costs in waits.values()]
    style: dict[Any, Any] = {**_STYLE, **dict.fromkeys(_INKED, _INK[scheme])}
    with rc_context(style):
        figure = Figure(figsize=(9, sum(heights) + 0.75 * len(heights)), layout="constrained")
        panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0].tolist()
        if shares:
            _draw_often(panels[0], shown)
            _draw_shares(panels[1], shown)
        longest = max((sum(costs["slowest"]) for costs in waits.values()), default=0.0)
        for panel, (title, costs) in zip(panels[len(heights) - len(waits) :], waits.items(), strict=True):
            _draw_waits(panel, title, costs, longest)
        written = StringIO()
        figure.savefig(written, format="svg", facecolor=_PAPER[scheme], metadata={"Date": None, "Creator": None})
    return written.getvalue()


def _draw_often(panel: "Axes", shown: Pictured) -> None:
    """Draw a strip of how many of each column's samples are seen never, once, and more often."""
    _stack(panel, shown, shown.often, [*_OFTEN.values()])
    panel.set(xlim=(0, shown.positions), ylim=(0, 1))
    panel.set_axis_off()
    counts = zip(_OFTEN.items(), shown.seen, strict=True)
    looks = {f"{count} {name}": {"facecolor": colour} for (name, colour), count in counts}
    _finish(panel, f"How often ranks see each sample (epoch {shown.epoch})", looks)


def _draw_shares(panel: "Axes", shown: Pictured) -> None:
    """Draw which ranks get the samples of each column, and how often, as stacked bars."""
    bands = len(shown.bands)
    colours = _colours(bands)
    some = range(bands) if bands <= len(_DISTINCT) else [0, bands // 2, bands - 1]
    highest = _stack(panel, shown, shown.got, colours)
    looks = {_band_name(*shown.bands[band]): {"facecolor": colours[band]} for band in some}
    _finish(panel, "Which rank gets it", looks)
    panel.axhline(1, color=_GREY, linewidth=0.8, linestyle=":")
    each = "a column is a sample" if shown.width == 1 else f"a column is {shown.width} samples"
    panel.set(
        xlim=(0, shown.positions),
        ylim=(0, max(1.1, 1.05 * highest)),
        ylabel="times seen",
        xlabel=f"samples, in the order in which one process would draw them; {each}",
    )
    panel.locator_params("y", nbins=4, integer=True)


def _stack(panel: "Axes", shown: Pictured, parts: Sequence[Sequence[float]], colours: Sequence[Any]) -> float:
    """Draw a stack of bars over each column, and return the height of the highest stack."""
    lefts = np.arange(0, shown.positions, shown.width)
    widths, below = np.diff(lefts, append=shown.positions), np.zeros(len(lefts))
    for part, colour in zip(np.array(parts), colours, strict=True):
        filled = part > 0
        panel.bar(lefts[filled], part[filled], widths[filled], below[filled], align="edge", linewidth=0, color=colour)
        below += part
    return float(below.max())


def _draw_waits(panel: "Axes", title: str, costs: Mapping[int | str, Sequence[float]], longest: float) -> None:
    """Draw each rank's work and waiting in a few steps along a time axis."""
    ranks, slowest = [rank for rank in costs if isinstance(rank, int)], np.array(costs["slowest"])
    ends, colours = np.cumsum(slowest), _colours(ranks[-1] + 1)
    for row, rank in enumerate(ranks):
        begins = ends - slowest
        done = begins + costs[rank]
        panel.barh(row, costs[rank], 0.8, begins, color=colours[rank], linewidth=0)
        panel.barh(row, ends - done, 0.45, done, linewidth=0, **_WAITING)
    for end in ends:
        panel.axvline(end, linewidth=0.8, color=_GREY)
    panel.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    panel.set(
        xlim=(0, longest), ylim=(len(ranks) - 0.5, -0.5), xlabel=f"time of {len(ends)} steps, in the unit of cost"
    )
    _finish(panel, title, {"waits for the slowest rank": _WAITING})


def _finish(panel: "Axes", title: str, looks: dict[str, dict[str, Any]]) -> None:
    """Write a panel's title, and beside it a legend."""
    from matplotlib.patches import Patch

    panel.set_title(title, loc="left")
    handles = [Patch(**look) for look in looks.values()]
    where: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0}
    panel.legend(handles, [*looks], ncols=len(looks), frameon=False, handlelength=1.2, **where)


def _colours(count: int) -> list[Any]:
    """Return a colour for each rank: distinct colours for few ranks, else colours of a scale."""
    from matplotlib import colormaps

    if count <= len(_DISTINCT):
        return [colormaps["tab10"](number) for number in _DISTINCT[:count]]
    return [colormaps["viridis"](rank / (count - 1)) for rank in range(count)]


def _band_name(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def alternative(shown: Pictured) -> str:
    """Return the picture's content in words."""
    found = [f"{title}." for title in shown.waits]
    if shown.positions:
        never, once, again = shown.seen
        text = (
            f"Of {shown.positions} samples that one process draws, the ranks see {once} once, {again} more often and "
            f"{never} never, in epoch {shown.epoch}. Below: which rank gets which sample."
        )
        found.insert(0, text)
    return " ".join(found)


def picture_html(shown: Pictured) -> str:
    """Return the picture as HTML, in the reader's colour scheme; or a text if it cannot be drawn."""
    if not (text := alternative(shown)):
        return "<p>There is nothing to draw.</p>"
    try:
        light, dark = (
            f"data:image/svg+xml;base64,{b64encode(svg(shown, scheme).encode()).decode()}"
            for scheme in ("light", "dark")
        )
    except ImportError:
        return "<p>For a picture, install matplotlib, which the extra audit has.</p>"
    return (
        f'<picture class="ddp-picture"><source srcset="{dark}" media="(prefers-color-scheme: dark)">'
        f'<img src="{light}" alt="{escape(text)}"></picture>'
    )
