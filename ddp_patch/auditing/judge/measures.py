"""Numbers about what ranks got: global batches, and cost."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddp_patch.auditing.draw.coding import Numbers
from ddp_patch.auditing.draw.drawing import Drawn
from ddp_patch.auditing.judge.judging import Epoch
from ddp_patch.errors import InvalidOptionError

__all__ = ["Cost", "global_batches", "imbalance", "step_costs"]

Cost: TypeAlias = Callable[[int], float] | Sequence[float] | NDArray[Any]


def global_batches(ranks: Sequence[Drawn]) -> tuple[tuple[int, int], ...]:
    """Return, in the order of the steps, how many samples all ranks have in a step, and in how many steps on end."""
    total = np.zeros(max(len(drawn.sizes) for drawn in ranks), np.int64)
    for drawn in ranks:
        total[: len(drawn.sizes)] += drawn.sizes
    begins = np.flatnonzero(np.diff(total, prepend=-1))
    return tuple(zip(total[begins].tolist(), np.diff(begins, append=len(total)).tolist(), strict=True))


def step_costs(epoch: Epoch, cost: Cost | None) -> NDArray[np.float64] | None:
    """Return the cost of each step, one row for each rank; 0 where it makes none."""
    steps = max(len(drawn.sizes) for drawn in epoch.ranks)
    if cost is None or steps == 0:
        return None
    return np.array([np.pad(_costs_of(drawn, cost), (0, steps - len(drawn.sizes))) for drawn in epoch.ranks])


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
