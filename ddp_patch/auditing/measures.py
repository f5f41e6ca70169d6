"""Numbers about what ranks got: global batches, and cost."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddp_patch.auditing.coding import Numbers
from ddp_patch.auditing.drawing import Drawn
from ddp_patch.auditing.judge import Epoch
from ddp_patch.errors import InvalidOptionError

__all__ = ["Cost", "global_batches", "imbalance", "step_costs"]

Cost: TypeAlias = Callable[[int], float] | Sequence[float] | NDArray[Any]


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
    names, places = np.unique(drawn.items, return_inverse=True)
    if len(names) and int(names[0]) < 0:
        raise InvalidOptionError(
            "audit was given cost= and a loader whose keys are no indices, so what one costs cannot be looked up. "
            "Leave cost out, or sample indices."
        )
    ends = np.concatenate([[0.0], np.cumsum(_looked_up(cost, names)[places])])
    stops = np.cumsum(drawn.sizes)
    found: NDArray[np.float64] = ends[stops] - ends[stops - drawn.sizes]
    return found


def _looked_up(cost: Cost, indices: Numbers) -> NDArray[np.float64]:
    try:
        if callable(cost):
            found = np.array([cost(int(index)) for index in indices], np.float64)
        else:
            found = np.asarray(cost, np.float64)[indices]
    except Exception as error:
        raise _unusable(f"raised {type(error).__name__}: {error}") from error
    if found.ndim != 1:
        raise _unusable(f"gave {found.ndim - 1} dimensions of numbers for each sample")
    if not np.all((found >= 0) & (found < np.inf)):
        at = int(np.flatnonzero(~((found >= 0) & (found < np.inf)))[0])
        raise _unusable(f"gave {found[at]} for sample {indices[at]}")
    return found


def _unusable(did: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"audit looked up what samples cost, and cost= {did}. Pass a sequence with one finite number of at least 0 "
        "for every index, or a function that returns one."
    )


def imbalance(costs: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Return the slowest rank's cost over the ranks' mean, of all steps and of the worst one; None where all is 0."""
    slowest, mean = costs.max(axis=0), costs.mean(axis=0)
    if not mean.any():
        return None, None
    return float(slowest.sum() / mean.sum()), float((slowest[mean > 0] / mean[mean > 0]).max())
