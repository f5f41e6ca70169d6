"""Measure what ranks got: global batches, and the balance of their costs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from ddp_patch.auditing.draw.coding import Numbers
from ddp_patch.auditing.draw.drawn import Drawn, Epoch
from ddp_patch.auditing.draw.samples import layers_of
from ddp_patch.costs import Costs
from ddp_patch.errors import InvalidOptionError

__all__ = ["SampleCosts", "global_batches", "imbalance", "step_costs"]


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


@dataclass(frozen=True, slots=True)
class SampleCosts:
    """Tell what samples cost by their indices in the dataset below torch's ``Subset`` layers.

    Attributes:
        costs: What they cost by their indices in the loader's dataset.
        indices: Their indices in the loader's dataset, in the order of ``below``, shape (samples,).
        below: The same samples' indices below its ``Subset`` layers, ascending. None where it has none of these.
    """

    costs: Costs
    indices: Numbers | None = None
    below: Numbers | None = None

    @classmethod
    def in_dataset(cls, costs: Costs, dataset: Any) -> "SampleCosts":
        """Return the costs of a dataset's samples.

        Args:
            costs: What each index of the dataset costs.
            dataset: The dataset of a loader.

        Examples:
            >>> costs = SampleCosts.in_dataset(Costs([5.0, 7, 9], "sum"), Subset("abcdef", [4, 0, 2]))
            >>> costs.of(np.array([0, 4])).tolist()
            [7.0, 5.0]
        """
        if not isinstance(dataset, Subset):
            return cls(costs)
        below = layers_of(dataset)[-1]
        indices = np.argsort(below, kind="stable")
        return cls(costs, indices, below[indices])

    def of(self, indices: Numbers) -> NDArray[np.float64]:
        """Return what samples cost, given their indices below ``Subset`` layers, shape (samples,)."""
        if self.indices is not None and self.below is not None:
            indices = self.indices[np.searchsorted(self.below, indices)]
        return self.costs.of(indices)


def step_costs(epoch: Epoch, costs: SampleCosts | None) -> NDArray[np.float64] | None:
    """Look up what each rank's steps cost.

    Returns:
        The cost of each step, shape (ranks, steps), 0 where a rank makes no such step. None without ``costs``, for an
        epoch without a step, and for samples of an iterable dataset, which have no indices.
    """
    if costs is None or epoch.steps == 0 or epoch.is_iterable:
        return None
    return np.array([np.pad(_costs_of(drawn, costs), (0, epoch.steps - len(drawn.sizes))) for drawn in epoch.ranks])


def _costs_of(drawn: Drawn, costs: SampleCosts) -> NDArray[np.float64]:
    names, places = np.unique(drawn.items, return_inverse=True)
    if len(names) and int(names[0]) < 0:
        raise InvalidOptionError(
            "audit was given cost= and a loader whose keys are no indices, so what one costs cannot be looked up. "
            "Leave cost out, or sample indices."
        )
    return costs.costs.of_batches(costs.of(names)[places], drawn.sizes)


def imbalance(costs: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Return the slowest rank's cost over the ranks' mean: over all steps, and in the worst step; None if all cost 0.

    Args:
        costs: The cost of each step, shape (ranks, steps).
    """
    slowest, mean = costs.max(axis=0), costs.mean(axis=0)
    if not mean.any():
        return None, None
    return float(slowest.sum() / mean.sum()), float((slowest[mean > 0] / mean[mean > 0]).max())
