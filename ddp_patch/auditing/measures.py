"""Numbers about what ranks got: global batches, cost, and the parts that pictures are drawn of."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddp_patch.auditing.coding import Coding
from ddp_patch.auditing.judge import Epoch, Judged
from ddp_patch.auditing.report import Pictured
from ddp_patch.auditing.simulate import Drawn
from ddp_patch.errors import InvalidOptionError

__all__ = ["Cost", "global_batches", "imbalance", "pictured", "step_costs"]

Cost: TypeAlias = Callable[[int], float] | Sequence[float] | NDArray[Any]

_PICTURED_ITEMS, _PICTURED_STEPS = 24, 160


def global_batches(ranks: Sequence[Drawn]) -> dict[int, int]:
    """Return how many steps have a global batch of so many samples, the most frequent first."""
    total = np.zeros(max(len(drawn.sizes) for drawn in ranks), np.int64)
    for drawn in ranks:
        total[: len(drawn.sizes)] += drawn.sizes
    sizes, steps = np.unique(total, return_counts=True)
    return {int(sizes[at]): int(steps[at]) for at in np.argsort(-steps, kind="stable")}


def step_costs(epoch: Epoch, cost: Cost | None) -> NDArray[np.float64] | None:
    """Return the cost of each step that every rank makes, one row for each rank."""
    steps = min(len(drawn.sizes) for drawn in epoch.ranks)
    if cost is None or steps == 0:
        return None
    return np.array([_costs_of(drawn.first_steps(steps), cost) for drawn in epoch.ranks])


def _costs_of(drawn: Drawn, cost: Cost) -> NDArray[np.float64]:
    if len(drawn.items) and int(drawn.items.min()) < 0:
        raise InvalidOptionError(
            "audit was given cost= and a loader whose keys are no indices, so what one costs cannot be looked up. "
            "Leave cost out, or sample indices."
        )
    if callable(cost):
        names, places = np.unique(drawn.items, return_inverse=True)
        each = np.array([cost(int(index)) for index in names], np.float64)[places]
    else:
        each = np.asarray(cost, np.float64)[drawn.items]
    ends = np.concatenate([[0.0], np.cumsum(each)])
    stops = np.cumsum(drawn.sizes)
    found: NDArray[np.float64] = ends[stops] - ends[stops - drawn.sizes]
    return found


def imbalance(costs: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Return the slowest rank's cost over the ranks' mean, of all steps and of the worst one; None where all is 0."""
    slowest, mean = costs.max(axis=0), costs.mean(axis=0)
    if not mean.any():
        return None, None
    return float(slowest.sum() / mean.sum()), float((slowest[mean > 0] / mean[mean > 0]).max())


def pictured(epoch: Epoch, judged: Judged, coding: Coding, costs: NDArray[np.float64] | None) -> Pictured:
    """Return what pictures of an epoch are drawn of."""
    positions = _later_occurrences(epoch, judged)
    mark = "padding" if judged.padding else "repeated"

    def shown(part: slice) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
        places = [range(len(drawn.items))[part] for drawn in epoch.ranks]
        names = tuple(
            tuple(coding.name(int(drawn.items[place])) for place in rank_places)
            for drawn, rank_places in zip(epoch.ranks, places, strict=True)
        )
        marks = tuple(
            tuple(mark if (rank, place) in positions else "" for place in rank_places)
            for rank, rank_places in enumerate(places)
        )
        return names, marks

    longest = max(len(drawn.items) for drawn in epoch.ranks)
    items, marks = shown(slice(0, _PICTURED_ITEMS))
    start = max(_PICTURED_ITEMS, longest - _PICTURED_ITEMS)
    tail_items, tail_marks = shown(slice(start, None))
    return Pictured(
        items,
        marks,
        tuple(tuple(int(size) for size in drawn.sizes[:_PICTURED_STEPS]) for drawn in epoch.ranks),
        tail_items,
        tail_marks,
        () if costs is None else tuple(tuple(map(float, row[:_PICTURED_STEPS])) for row in costs),
    )


def _later_occurrences(epoch: Epoch, judged: Judged) -> set[tuple[int, int]]:
    """Where, as (rank, place), samples that are got too often stand for the second time and later."""
    ends = [(drawn.items[:_PICTURED_ITEMS], drawn.items[-_PICTURED_ITEMS:]) for drawn in epoch.ranks]
    near = np.unique(np.concatenate([part for pair in ends for part in pair]))
    wanted = near[np.isin(near, judged.samples.repeated)]
    seen: set[int] = set()
    found = [
        (int(place), rank, int(drawn.items[place]))
        for rank, drawn in enumerate(epoch.ranks)
        for place in np.flatnonzero(np.isin(drawn.items, wanted))
    ]
    later = set()
    for place, rank, item in sorted(found):
        if item in seen:
            later.add((rank, place))
        seen.add(item)
    return later
