"""Measure what ranks got: global batches, and the balance of their costs."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddp_patch.auditing.draw.coding import Numbers
from ddp_patch.auditing.draw.drawn import Drawn, Epoch
from ddp_patch.errors import InvalidOptionError

__all__ = ["Cost", "global_batches", "imbalance", "step_costs"]

Cost: TypeAlias = Callable[[int], float] | Sequence[float] | NDArray[Any]


def global_batches(epoch: Epoch) -> tuple[tuple[int, int], ...]:
    """Return the sizes of global batches in the order of the steps.

    Returns:
        For each run of equal global batches, how many samples all ranks together have in a step, and how many steps the
        run has.
    """
    total = np.zeros(epoch.steps, np.int64)
    for drawn in epoch.ranks:
        total[: len(drawn.sizes)] += drawn.sizes
    begins = np.flatnonzero(np.diff(total, prepend=-1))
    return tuple(zip(total[begins].tolist(), np.diff(begins, append=len(total)).tolist(), strict=True))


def step_costs(epoch: Epoch, cost: Cost | None) -> NDArray[np.float64] | None:
    """Look up what each rank's steps cost.

    Returns:
        The cost of each step, shape (ranks, steps), 0 where a rank makes no such step. None without ``cost``, and for
        an epoch without a step.
    """
    if cost is None or epoch.steps == 0:
        return None
    return np.array([np.pad(_costs_of(drawn, cost), (0, epoch.steps - len(drawn.sizes))) for drawn in epoch.ranks])


def _costs_of(drawn: Drawn, cost: Cost) -> NDArray[np.float64]:
    names, places = np.unique(drawn.items, return_inverse=True)
    if len(names) and int(names[0]) < 0:
        raise InvalidOptionError(
            "audit was given cost= and a loader whose keys are no indices, so what one costs cannot be looked up. "
            "Leave cost out, or sample indices."
        )
    total = np.concatenate([[0.0], np.cumsum(_looked_up(cost, names)[places])])  # before each item, and after the last
    stops = np.cumsum(drawn.sizes)
    found: NDArray[np.float64] = total[stops] - total[stops - drawn.sizes]
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
    unusable = np.flatnonzero(~((found >= 0) & (found < np.inf)))
    if len(unusable):
        raise _unusable(f"gave {found[unusable[0]]} for sample {indices[unusable[0]]}")
    return found


def _unusable(did: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"audit looked up what samples cost, and cost= {did}. Pass a sequence with one finite number of at least 0 "
        "for every index, or a function that returns one."
    )


def imbalance(costs: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Return the slowest rank's cost over the ranks' mean: over all steps, and in the worst step; None if all cost 0.

    Args:
        costs: The cost of each step, shape (ranks, steps).
    """
    slowest, mean = costs.max(axis=0), costs.mean(axis=0)
    if not mean.any():
        return None, None
    return float(slowest.sum() / mean.sum()), float((slowest[mean > 0] / mean[mean > 0]).max())
