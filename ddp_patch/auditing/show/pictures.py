"""Draw what ranks got as pictures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ddp_patch.auditing.pictured import ShareMap, StepMap
from ddp_patch.auditing.report import Report
from ddp_patch.auditing.show.frame import Draw, Picture, Theme, compose, put_legend
from ddp_patch.auditing.show.waiting import waiting_picture

__all__ = ["pictures_of"]

# Sizes in pixels.
_WIDTH, _NARROWEST, _CELL, _ROWS, _AROUND = 1080, 560, 30, 660, 150
# Write numbers and names into cells up to this many columns and rows.
_TEXT_COLUMNS, _TEXT_ROWS = 40, 24
_LONGEST_NAME = 5
# Mark what is not simply got by a hatch, so that nobody needs to see colours.
_HATCHES = {"padding": "////", "repeated": "xxxx"}
_MISSING, _NO_STEP = "----", "\\\\\\\\"


def pictures_of(report: Report) -> list[Picture]:
    """Draw who gets what, the sizes of batches, and how ranks wait if costs are known; nothing for an empty epoch."""
    found, pictured = [], report.pictured
    if pictured.shares.positions:
        found.append(_share_picture(pictured.shares, pictured.epoch))
    if pictured.steps.steps:
        found.append(_step_picture(pictured.steps, pictured.epoch))
    if (waiting := waiting_picture(report)) is not None:
        found.append(waiting)
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

    def draw(panels: Sequence[Axes], theme: Theme) -> None:
        (axes,) = panels
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
        put_legend(axes, theme, marks)

    told = _by_rank("gets", [sum(row) for row in shares.got], f"of {shares.positions} positions")
    told += [f"{repeats} are got again ({shares.reason})", f"{missing} are missing"]
    if foreign := sum(shares.foreign):
        told.append(f"{foreign} more samples are none that one process gets")
    return _map(f"Who gets what in epoch {epoch}", _share_caption(shares), told, draw, len(rows), columns)


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

    def draw(panels: Sequence[Axes], theme: Theme) -> None:
        (axes,) = panels
        _heat(axes, theme, np.array(steps.sizes) / max(1, steps.largest), steps.steps)
        for rank, lacking in enumerate(steps.lacking):
            _hatch(axes, theme, rank, lacking, steps.steps, _NO_STEP)
        if columns == steps.steps <= _TEXT_COLUMNS and ranks <= _TEXT_ROWS:
            for rank, at in np.argwhere(np.array(steps.lacking) == 0):
                _write(axes, theme, at, rank, f"{steps.sizes[rank][at]:g}", boxed=False)
        _label(axes, theme, "step", [f"rank {rank}" for rank in range(ranks)])
        put_legend(axes, theme, marks)

    told = _by_rank("makes", [steps.steps - sum(lacking) for lacking in steps.lacking], "steps")
    told.append(f"the largest batch has {steps.largest} samples")
    caption = (
        f"How many samples each rank's batches have; the fuller, the more. {_per_column(steps.steps, columns, 'step')}"
    )
    return _map(f"Batch sizes in epoch {epoch}", caption, told, draw, ranks, columns)


def _by_rank(verb: str, counts: Sequence[int], what: str) -> list[str]:
    """Say a number of each rank, or the range of numbers where ranks are many."""
    if len(counts) > _TEXT_ROWS:
        return [f"Each of {len(counts)} ranks {verb} {min(counts)} to {max(counts)} {what}"]
    return [f"Rank {rank} {verb} {count} {what}" for rank, count in enumerate(counts)]


def _per_column(length: int, columns: int, what: str) -> str:
    return f"A column is one {what}." if length == columns else f"A column is about {length / columns:.3g} {what}s."


def _map(title: str, caption: str, told: Sequence[str], draw: Draw, rows: int, columns: int) -> Picture:
    """Compose a map, which is as high as its rows need."""
    cells = _AROUND + columns * _CELL
    width = max(_NARROWEST, cells) if columns <= _TEXT_COLUMNS else _WIDTH
    return compose(title, caption, told, draw, width, _AROUND + min(_ROWS, rows * _CELL))


def _heat(axes: Axes, theme: Theme, values: Any, length: int) -> None:
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


def _hatch(axes: Axes, theme: Theme, row: int, counts: Sequence[int], length: int, hatch: str) -> None:
    """Hatch the columns of a row that count something; neighbours get one hatch."""
    marked = np.diff(np.array(counts) > 0, prepend=False, append=False)
    wide = length / max(1, len(counts))
    for begin, end in np.flatnonzero(marked).reshape(-1, 2):
        place, size = (begin * wide - 0.5, row - 0.46), ((end - begin) * wide, 0.92)
        axes.add_patch(Rectangle(place, *size, fill=False, edgecolor=theme.ink, linewidth=0.8, hatch=hatch))


def _write(axes: Axes, theme: Theme, at: float, row: float, text: str, boxed: bool) -> None:
    box = {"facecolor": theme.ground, "edgecolor": "none", "pad": 2} if boxed else None
    axes.text(at, row, text, color=theme.ink, ha="center", va="center", fontsize=11, bbox=box, parse_math=False)


def _label(axes: Axes, theme: Theme, across: str, rows: Sequence[str]) -> None:
    axes.set_xlabel(across, color=theme.ink)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    every = -(-len(rows) * 16 // _ROWS)  # leave labels out where they would overlap
    axes.set_yticks(range(0, len(rows), every), rows[::every])
    axes.set_ylim(len(rows) - 0.5, -0.5)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
