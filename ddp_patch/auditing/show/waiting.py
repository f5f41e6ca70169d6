"""Show when ranks work and when they wait for the slowest, without ``cost=`` and with it."""

import numpy as np

from ddp_patch.auditing.epoch_report import waiting_text
from ddp_patch.auditing.pictured import Pictured, Waits
from ddp_patch.auditing.show.figure import Bar, Figure, Row

__all__ = ["waiting_figures"]


def waiting_figures(pictured: Pictured, balanced: Pictured | None, world_size: int) -> list[Figure]:
    """Return a few steps of every rank along the time, and the same of the balanced loader, where there is one.

    Both have one scale, so that the shorter one is seen to be shorter.
    """
    both = {"Ranks": pictured}
    if balanced is not None:
        both = {"Without cost=, ranks": pictured, "With cost=, ranks": balanced}
    shown = {who: each.waits for who, each in both.items() if each.waits is not None}
    longest = max((sum(waits.slowest) for waits in shown.values()), default=0.0)
    return [_figure(who, both[who].epoch, waits, longest, world_size) for who, waits in shown.items()]


def _figure(who: str, epoch: int, waits: Waits, longest: float, world_size: int) -> Figure:
    share, some = waiting_text(waits.imbalance), ""
    if len(waits.ranks) < world_size:
        some = f" Shown are {len(waits.ranks)} of {world_size} ranks."
    heading = f"{who} wait {share} of the time (epoch {epoch})"
    each = zip(waits.ranks, waits.costs, strict=True)
    rows = tuple(Row(f"rank {rank}", _bars(costs, waits, longest)) for rank, costs in each)
    return Figure(
        heading,
        "Left to right: time, in the unit of cost. Each bar is a rank's work in one step. At an upright line the "
        f"slowest rank is done and the next step begins. The {len(waits.slowest)} steps shown are consecutive, and "
        f"most like the whole epoch.{some}",
        f"{heading}.",
        (("once", "works"), ("wait", "waits for the slowest rank")),
        rows,
        ((0.0, "0"), (sum(waits.slowest) / longest, f"{sum(waits.slowest):.4g}")),
    )


def _bars(costs: tuple[float, ...], waits: Waits, longest: float) -> tuple[Bar, ...]:
    """Return a rank's work, its waiting and the ends of its steps, one after the other."""
    ends = np.cumsum(waits.slowest) / longest
    slowest = np.array(waits.slowest) / longest
    bars: list[Bar] = []
    for end, full, cost in zip(ends.tolist(), slowest.tolist(), costs, strict=True):
        begin, work = end - full, cost / longest
        bars += [Bar(begin, work, "once", 0.1, 0.8)] if work else []
        bars += [Bar(begin + work, full - work, "wait", 0.1, 0.8)] if full > work else []
        bars.append(Bar(end, 0.0, "line"))
    return tuple(bars)
