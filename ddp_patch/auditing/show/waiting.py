"""Draw when ranks work and when they wait for the slowest, without ``cost=`` and with it."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from ddp_patch.auditing.epoch_report import waiting_text
from ddp_patch.auditing.pictured import Waits
from ddp_patch.auditing.report import Report
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
    beside = report.balanced
    reports = {"Ranks": report} if beside is None else {"Without cost=, ranks": report, "With cost=, ranks": beside}
    panels = [
        (f"{who} wait {waiting_text(waits.imbalance)} of the time (epoch {each.pictured.epoch})", waits)
        for who, each in reports.items()
        if (waits := each.pictured.waits) is not None
    ]
    if not panels:
        return None

    def draw(found: Sequence[Axes], theme: Theme) -> None:
        for axes, (heading, waits) in zip(found, panels, strict=True):
            axes.set_title(heading, loc="left", color=theme.ink, fontweight="bold")
            _draw(axes, theme, waits)
        put_legend(found[0], theme, {"works": "", "waits for the slowest rank": _HATCH}, side="right")
        found[-1].set_xlabel("time, in the unit of cost", color=theme.ink)

    headings, (first, *_) = zip(*panels, strict=True)
    height = sum(len(waits.ranks) * _ROW + _AROUND_PANEL for _, waits in panels) + _BELOW
    caption = _caption(first, report.world_size)
    return compose("How long ranks wait", caption, headings, draw, _WIDTH, height, len(panels))


def _caption(waits: Waits, ranks: int) -> str:
    shown = len(waits.ranks)
    some = f" Shown are {shown} of {ranks} ranks." if shown < ranks else ""
    return (
        "A bar is one rank's work in one step, taking as long as it costs. At the upright line the slowest of all "
        f"ranks is done, and the next step begins. The {len(waits.slowest)} steps, one after the other, are those most "
        f"like the whole epoch.{some}"
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
