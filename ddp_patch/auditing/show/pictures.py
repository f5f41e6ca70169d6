"""Draw what ranks got as pictures with matplotlib, each twice: for light and for dark pages."""

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from ddp_patch.auditing.pictured import CostLine, Pictured, ShareMap, StepMap

__all__ = ["Picture", "pictures_of"]

# Sizes in pixels.
_WIDTH, _NARROWEST, _CELL, _ROWS, _AROUND, _PLOT = 1080, 560, 30, 660, 150, 300
# Write numbers and names into cells up to this many columns and rows.
_TEXT_COLUMNS, _TEXT_ROWS = 40, 24
_LONGEST_NAME = 5
# Mark what is not simply got by a hatch, so that nobody needs to see colours.
_HATCHES = {"padding": "////", "repeated": "xxxx"}
_MISSING, _NO_STEP = "----", "\\\\\\\\"


@dataclass(frozen=True, slots=True)
class _Theme:
    """Choose the colours of a picture.

    Attributes:
        ink: Colours text and marks.
        soft: Colours axes and ticks.
        ground: Colours the background.
        fill: Colours cells that are got.
        other: Colours a second line.
    """

    ink: str
    soft: str
    ground: str
    fill: str
    other: str


_LIGHT = _Theme(ink="#1c2330", soft="#5a6475", ground="#f5f7fa", fill="#7fb3e6", other="#b3261e")
_DARK = _Theme(ink="#e7ebf2", soft="#a5afbf", ground="#1b212b", fill="#2f6ca8", other="#ff9d95")
_Draw: TypeAlias = Callable[[Axes, _Theme], None]


@dataclass(frozen=True, slots=True)
class Picture:
    """Hold a picture for a page.

    Attributes:
        title: What the picture shows.
        caption: How to read it.
        alt: What can be seen in it, for readers who do not see it.
        width: The width in pixels.
        light: The SVG for light pages.
        dark: The SVG for dark pages.
    """

    title: str
    caption: str
    alt: str
    width: int
    light: str
    dark: str

    def html(self) -> str:
        """Return the picture as HTML that loads nothing from elsewhere and follows the reader's choice of colours."""
        return (
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{_data_uri(self.dark)}">'
            f'<img src="{_data_uri(self.light)}" alt="{escape(self.alt)}" width="{self.width}"></picture>'
        )


def pictures_of(pictured: Pictured) -> list[Picture]:
    """Draw who gets what, the sizes of batches, and what steps cost where it is known; nothing for an empty epoch."""
    found = []
    if pictured.shares.positions:
        found.append(_share_picture(pictured.shares, pictured.epoch))
    if pictured.steps.steps:
        found.append(_step_picture(pictured.steps, pictured.epoch))
    if pictured.costs is not None:
        found.append(_cost_picture(pictured.costs, pictured.epoch))
    return found


def _share_picture(shares: ShareMap, epoch: int) -> Picture:
    ranks, columns = len(shares.got), len(shares.missing)
    repeats, missing = sum(map(sum, shares.again)), sum(shares.missing)
    marks = {
        "got": "",
        shares.reason: _HATCHES[shares.reason] if repeats else None,
        "missing": _MISSING if missing else None,
    }
    rows = [f"rank {rank}" for rank in range(ranks)] + (["no rank"] if missing else [])

    def draw(axes: Axes, theme: _Theme) -> None:
        got = np.array([*shares.got, *([shares.missing] if missing else [])], float)
        got[ranks:] = 0  # leave these cells empty for the hatch
        _heat(axes, theme, np.where(got > 0, 0.35 + 0.65 * got / max(1, got.max()), 0), shares.positions)
        for rank, again in enumerate(shares.again):
            _hatch(axes, theme, rank, again, shares.positions, _HATCHES[shares.reason])
        _hatch(axes, theme, ranks, shares.missing, shares.positions, _MISSING)
        if shares.names:
            hatched = np.array([*shares.again, shares.missing])
            for row, at in np.argwhere(np.array([*shares.got, shares.missing])):
                _write(axes, theme, at, row, _short(shares.names[at]), boxed=bool(hatched[row, at]))
        _label(axes, theme, "position in the stream of one process", rows)
        _legend(axes, theme, marks)

    told = _by_rank("gets", [sum(row) for row in shares.got], f"of {shares.positions} positions")
    told += [f"{repeats} are got again ({shares.reason})", f"{missing} are missing"]
    if foreign := sum(shares.foreign):
        told.append(f"{foreign} more samples are none that one process gets")
    return _picture(f"Who gets what in epoch {epoch}", _share_caption(shares), told, draw, len(rows), columns)


def _share_caption(shares: ShareMap) -> str:
    columns, foreign = len(shares.missing), sum(shares.foreign)
    per_column = "In each cell the sample." if shares.names else _per_column(shares.positions, columns, "position")
    caption = f"Across: what one process would draw, in its order. Down: which rank gets it. {per_column}"
    if columns < shares.positions:
        caption += " The fuller a cell, the more of them its rank gets."
    if foreign:
        caption += f" {foreign} samples that ranks got are not shown, because one process would not get them."
    return caption


def _step_picture(steps: StepMap, epoch: int) -> Picture:
    ranks, columns = len(steps.sizes), len(steps.sizes[0])
    is_short = any(map(any, steps.lacking))
    marks = {f"a batch; the largest has {steps.largest}": "", "no such step": _NO_STEP if is_short else None}

    def draw(axes: Axes, theme: _Theme) -> None:
        _heat(axes, theme, np.array(steps.sizes) / max(1, steps.largest), steps.steps)
        for rank, lacking in enumerate(steps.lacking):
            _hatch(axes, theme, rank, lacking, steps.steps, _NO_STEP)
        if columns == steps.steps <= _TEXT_COLUMNS and ranks <= _TEXT_ROWS:
            for rank, at in np.argwhere(np.array(steps.lacking) == 0):
                _write(axes, theme, at, rank, f"{steps.sizes[rank][at]:g}", boxed=False)
        _label(axes, theme, "step", [f"rank {rank}" for rank in range(ranks)])
        _legend(axes, theme, marks)

    told = _by_rank("makes", [steps.steps - sum(lacking) for lacking in steps.lacking], "steps")
    told.append(f"the largest batch has {steps.largest} samples")
    caption = (
        f"How many samples each rank's batches have; the fuller, the more. {_per_column(steps.steps, columns, 'step')}"
    )
    return _picture(f"Batch sizes in epoch {epoch}", caption, told, draw, ranks, columns)


def _by_rank(verb: str, counts: Sequence[int], what: str) -> list[str]:
    """Say a number of each rank, or the range of numbers where ranks are many."""
    if len(counts) > _TEXT_ROWS:
        return [f"Each of {len(counts)} ranks {verb} {min(counts)} to {max(counts)} {what}"]
    return [f"Rank {rank} {verb} {count} {what}" for rank, count in enumerate(counts)]


def _per_column(length: int, columns: int, what: str) -> str:
    return f"A column is one {what}." if length == columns else f"A column is about {length / columns:.3g} {what}s."


def _cost_picture(costs: CostLine, epoch: int) -> Picture:
    def draw(axes: Axes, theme: _Theme) -> None:
        across = (np.arange(len(costs.mean)) + 0.5) * costs.steps / len(costs.mean) - 0.5
        few = len(costs.mean) <= _TEXT_COLUMNS
        axes.plot(across, costs.slowest, color=theme.other, marker="o" if few else "", label="slowest rank")
        axes.plot(across, costs.mean, color=theme.ink, linestyle="--", marker="s" if few else "", label="mean")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("cost", color=theme.ink)
        axes.set_xlabel("step", color=theme.ink)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _put_legend(axes, theme, axes.get_legend_handles_labels()[0])

    slowest, mean = np.mean(costs.slowest), np.mean(costs.mean)
    told = [f"Over {costs.steps} steps the slowest rank costs {slowest:.4g} on average", f"the mean rank {mean:.4g}"]
    caption = "Where the lines part, ranks wait for the slowest."
    if len(costs.mean) < costs.steps:
        caption += f" A point is the mean of about {costs.steps / len(costs.mean):.3g} steps."
    return _picture(f"Cost of each step in epoch {epoch}", caption, told, draw, None, len(costs.mean))


def _picture(title: str, caption: str, told: Sequence[str], draw: _Draw, rows: int | None, columns: int) -> Picture:
    """Draw a picture in both themes. A map is as high as its rows need; a plot, which has none, has one height."""
    cells = _AROUND + columns * _CELL
    width = max(_NARROWEST, cells) if columns <= _TEXT_COLUMNS else _WIDTH
    height = _PLOT if rows is None else _AROUND + min(_ROWS, rows * _CELL)
    light, dark = (_svg(draw, theme, width, height) for theme in (_LIGHT, _DARK))
    return Picture(title, caption, "; ".join(told) + ".", width, light, dark)


def _svg(draw: _Draw, theme: _Theme, width: int, height: int) -> str:
    # Keep text as text, and make the same file of the same epoch.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "", "font.family": "sans-serif", "hatch.color": theme.ink}
    with mpl.rc_context(settings | {"font.size": 12, "hatch.linewidth": 0.8}):  # type: ignore[arg-type]  # names are literals there
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained", facecolor=theme.ground)
        axes = figure.add_subplot(facecolor=theme.ground)
        axes.tick_params(colors=theme.soft)
        for spine in axes.spines.values():
            spine.set_color(theme.soft)
        draw(axes, theme)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()


def _heat(axes: Axes, theme: _Theme, values: Any, length: int) -> None:
    """Draw rows of cells, empty at 0 and full at 1. A row spans ``length`` positions or steps."""
    colours = LinearSegmentedColormap.from_list("", [theme.ground, theme.fill])
    rows = len(values)
    axes.imshow(
        values,
        colours,
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="none",
        extent=(-0.5, length - 0.5, rows - 0.5, -0.5),
    )
    for edge in range(1, rows):
        axes.axhline(edge - 0.5, color=theme.ground, linewidth=1.5)
    if values.shape[1] == length <= _TEXT_COLUMNS:
        for edge in range(1, length):
            axes.axvline(edge - 0.5, color=theme.ground, linewidth=1.5)


def _hatch(axes: Axes, theme: _Theme, row: int, counts: Sequence[int], length: int, hatch: str) -> None:
    """Hatch the columns of a row that count something; neighbours get one hatch."""
    marked = np.diff(np.array(counts) > 0, prepend=False, append=False)
    wide = length / max(1, len(counts))
    for begin, end in np.flatnonzero(marked).reshape(-1, 2):
        place, size = (begin * wide - 0.5, row - 0.46), ((end - begin) * wide, 0.92)
        axes.add_patch(Rectangle(place, *size, fill=False, edgecolor=theme.ink, linewidth=0.8, hatch=hatch))


def _write(axes: Axes, theme: _Theme, at: float, row: float, text: str, boxed: bool) -> None:
    box = {"facecolor": theme.ground, "edgecolor": "none", "pad": 2} if boxed else None
    axes.text(at, row, text, color=theme.ink, ha="center", va="center", fontsize=11, bbox=box, parse_math=False)


def _label(axes: Axes, theme: _Theme, across: str, rows: Sequence[str]) -> None:
    axes.set_xlabel(across, color=theme.ink)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    every = -(-len(rows) * 16 // _ROWS)  # leave labels out where they would overlap
    axes.set_yticks(range(0, len(rows), every), rows[::every])
    axes.set_ylim(len(rows) - 0.5, -0.5)


def _legend(axes: Axes, theme: _Theme, marks: dict[str, str | None]) -> None:
    """Say what cells and hatches mean; leave out a mark that is None, because the picture has none."""
    _put_legend(
        axes,
        theme,
        [
            Patch(facecolor="none" if hatch else theme.fill, edgecolor=theme.ink, hatch=hatch, label=name)
            for name, hatch in marks.items()
            if hatch is not None
        ],
    )


def _put_legend(axes: Axes, theme: _Theme, handles: Sequence[Any]) -> None:
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(handles),
        frameon=False,
        labelcolor=theme.ink,
        handlelength=2.5,
        handleheight=1.4,
    )


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
