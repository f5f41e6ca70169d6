"""Draw when ranks work and when they wait for the slowest, without ``cost=`` and with it."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from ddp_patch.auditing.pictured import Waits
from ddp_patch.auditing.report import Report, waiting_text
from ddp_patch.auditing.show.frame import Picture, Theme, compose, put_legend

__all__ = ["waiting_picture"]

# Sizes in pixels.
_WIDTH, _ROW, _AROUND_PANEL, _BELOW = 1080, 24, 64, 40
_HATCH = "////"


def waiting_picture(report: Report) -> Picture | None:
    """Draw a few steps of every rank along the time; below it the same of the balanced loader, where there is one.

    Returns:
        The picture; None where costs are not known.
    """
    reports = {"": report} if report.balanced is None else {"without cost=": report, "with cost=": report.balanced}
    panels = {how: (each, waits) for how, each in reports.items() if (waits := each.pictured.waits) is not None}
    if not panels:
        return None

    def draw(found: Sequence[Axes], theme: Theme) -> None:
        for axes, (how, (each, waits)) in zip(found, panels.items(), strict=True):
            axes.set_title(_heading(how, each), loc="left", color=theme.ink, fontweight="bold")
            _draw(axes, theme, waits)
        put_legend(found[0], theme, {"works": "", "waits for the slowest rank": _HATCH}, side="right")
        found[-1].set_xlabel("time, in the unit of cost", color=theme.ink)

    shown = [waits for _, waits in panels.values()]
    rows = sum(len(waits.ranks) for waits in shown)
    return compose(
        "How long ranks wait",
        _caption(report, shown),
        [_heading(how, each) for how, (each, _) in panels.items()],
        draw,
        _WIDTH,
        rows * _ROW + len(shown) * _AROUND_PANEL + _BELOW,
        len(shown),
    )


def _heading(how: str, report: Report) -> str:
    epoch = report.epochs[report.pictured.epoch]
    return f"Epoch {epoch.epoch} {how}".rstrip() + f": ranks wait {waiting_text(epoch.imbalance)} of the time"


def _caption(report: Report, shown: Sequence[Waits]) -> str:
    waits = shown[0]
    few, ranks = len(waits.slowest), len(waits.ranks)
    which = f"{ranks} of {report.world_size} ranks" if ranks < report.world_size else "each rank"
    return (
        f"{few} steps in a row, most like the epoch's mean step: how long {which} works in each, if time is as the "
        "cost. A step ends with its slowest rank, at the upright line, and the others wait for it."
    )


def _draw(axes: Axes, theme: Theme, waits: Waits) -> None:
    """Draw each rank's work and waiting as bars, one step after the other."""
    ends = np.cumsum(waits.slowest)
    begins = ends - waits.slowest
    for row, costs in enumerate(waits.costs):
        here = (row - 0.4, 0.8)
        work = np.array(costs)
        axes.broken_barh([*zip(begins, work, strict=True)], here, facecolor=theme.fill)
        axes.broken_barh(
            [*zip(begins + work, ends - begins - work, strict=True)],
            here,
            facecolor="none",
            edgecolor=theme.soft,
            hatch=_HATCH,
            linewidth=0,
        )
    for end in ends:
        axes.axvline(end, color=theme.ink, linewidth=1.5)
    axes.set_yticks(range(len(waits.ranks)), [f"rank {rank}" for rank in waits.ranks])
    axes.set_ylim(len(waits.ranks) - 0.5, -0.5)
    axes.set_xlim(left=0)
