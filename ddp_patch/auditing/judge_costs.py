"""Judge how evenly steps cost, and say how a loader is balanced."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from ddp_patch.auditing.drawn import EpochDraws, Numbers, RankDraws
from ddp_patch.auditing.subject import Audited, indexed
from ddp_patch.costs import Cost
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.options import Options
from ddp_patch.sharding.refusals import require_costs, require_one_of_each, unit_shared

__all__ = ["SampleCosts", "balanced", "costs_of_samples", "imbalance", "step_costs"]


class SampleCosts:
    """Tell what samples cost by their indices in the dataset below torch's ``Subset`` layers.

    Args:
        costs: What they cost by their indices in the loader's dataset.
        dataset: The loader's dataset; None where ``costs`` are those of the dataset below already.

    Examples:
        >>> costs = SampleCosts(Cost([5.0, 7, 9]), Subset("abcdef", [4, 0, 2]))
        >>> costs.of(np.array([0, 4])).tolist()
        [7.0, 5.0]
    """

    def __init__(self, costs: Cost, dataset: Any = None) -> None:
        self.costs: Cost = costs
        below: Any = indexed(dataset)
        own = enumerate(below.__getitems__(range(len(dataset)))) if isinstance(dataset, Subset) else None
        self._own = None if own is None else {int(index): place for place, index in own}

    def of(self, indices: Numbers) -> NDArray[np.float64]:
        """Return what samples cost, given their indices below ``Subset`` layers, shape (samples,)."""
        own = self._own
        return self.costs.of(indices if own is None else np.array([own[index] for index in indices.tolist()]))


def step_costs(epoch: EpochDraws, costs: SampleCosts | None) -> NDArray[np.float64] | None:
    """Look up what each rank's steps cost.

    Returns:
        The cost of each step, shape (ranks, steps), 0 where a rank makes no such step. None without ``costs``, for an
        epoch without a step, and for samples of an iterable dataset, which have no indices.
    """
    if costs is None or epoch.steps == 0 or epoch.is_iterable:
        return None
    return np.array([np.pad(_costs_of(drawn, costs), (0, epoch.steps - len(drawn.sizes))) for drawn in epoch.ranks])


def _costs_of(drawn: RankDraws, costs: SampleCosts) -> NDArray[np.float64]:
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


def costs_of_samples(subject: Audited, costs: Cost | None) -> SampleCosts | None:
    """Return what samples cost by the indices that the audit compares; None where it is not known.

    Raises:
        InvalidOptionError: The loader's dataset has more samples than there are costs, or fewer.
    """
    if costs is None:
        return None
    if not isinstance(subject.make, LoaderFacts):
        return SampleCosts(costs)
    require_one_of_each(subject.make, costs)
    return SampleCosts(costs, subject.make.dataset)


def balanced(subject: Audited, costs: Cost, world_size: int, processes: bool) -> Audited | str:
    """Return what is audited, patched with ``cost=``, or a sentence that says why it cannot be.

    Args:
        subject: What is audited, which can be patched without ``cost=``.
        costs: What each index of the loader's dataset costs.
        world_size: The number of ranks.
        processes: Whether ranks are real processes, to which costs are sent.
    """
    if not isinstance(subject.make, LoaderFacts):
        return "A factory makes finished loaders: let it patch with cost=, and audit that."
    if not subject.patch:
        return "patch=False leaves the loader as it is."
    if world_size == 1:
        return "One rank waits for nobody."
    try:
        pickle.dumps(costs if processes else None)
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything
        return (
            f"Pickling cost= for processes=True raised {type(error).__name__}: {error}. Pass a function of a module, "
            "or one number for each index."
        )
    try:
        facts = unit_shared(subject.make, subject.options.get("share", "auto"))
        balance: dict[str, Any] = {"cost": costs}
        Options(**subject.options, **balance)  # refuses what cannot hold with cost=
        require_costs(facts, costs)
    except InvalidOptionError as refused:
        return str(refused)
    return replace(subject, options={**subject.options, **balance})
