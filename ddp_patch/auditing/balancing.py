"""Find what is audited beside a loader whose costs are known: the same loader patched with ``cost=``."""

import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ddp_patch.auditing.draw.subject import Subject
from ddp_patch.auditing.judge.measures import SampleCosts
from ddp_patch.costs import Costs
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.facts import Level, LoaderFacts
from ddp_patch.options import Options, as_index
from ddp_patch.shares.balance import require_costs, require_one_of_each
from ddp_patch.shares.units import unit_shared

__all__ = ["balanced", "costs_of_samples"]


def costs_of_samples(subject: Subject, costs: Costs | None) -> SampleCosts | None:
    """Return what samples cost by the indices that the audit compares; None where it is not known.

    Raises:
        InvalidOptionError: The loader's dataset has more samples than there are costs, or fewer.
    """
    if costs is None:
        return None
    if not isinstance(subject.make, LoaderFacts):
        return SampleCosts(costs)
    require_one_of_each(subject.make, costs)
    return SampleCosts.in_dataset(costs, subject.make.dataset)


def balanced(subject: Subject, costs: Costs, window: int, world_size: int, processes: bool) -> Subject | str:
    """Return what is audited, patched with ``cost=``, or a sentence that says why it cannot be.

    Args:
        subject: What is audited, which can be patched without ``cost=``.
        costs: What each index of the loader's dataset costs.
        window: How many steps a window has.
        world_size: The number of ranks.
        processes: Whether ranks are real processes, to which costs are sent.
    """
    if not isinstance(subject.make, LoaderFacts):
        return "A factory makes finished loaders: let it patch with cost=, and audit that."
    if not subject.patch:
        return "patch=False leaves the loader as it is."
    if world_size == 1:
        return "One rank waits for nobody."
    if processes and (why_not := _why_not_sent(costs)) is not None:
        return why_not
    try:
        facts = unit_shared(subject.make, subject.options.get("share", "auto"))
        divides = Options(**subject.options).divides_batches
        costs = _of_items(facts.level, costs, divides)
        balance: dict[str, Any] = {"cost": costs, "cost_of": costs.cost_of, "cost_window": window}
        Options(**subject.options, **balance)  # refuses what cannot hold with cost=
        require_costs(facts, costs)
    except InvalidOptionError as refused:
        return str(refused)
    return replace(subject, balance=balance)


def _why_not_sent(costs: Costs) -> str | None:
    """Say why costs cannot be sent to other processes; None if they can."""
    try:
        pickle.dumps(costs)
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything
        return (
            f"Pickling cost= for processes=True raised {type(error).__name__}: {error}. Pass a function of a module, "
            "or one number for each index."
        )
    return None


def _of_items(level: Level, costs: Costs, divides: bool) -> Costs:
    """Return costs as the patch takes them: of a function, those of whole batches where these are shared."""
    if costs.function is None or level is Level.SAMPLE or divides:
        return costs
    return Costs(_OfItem(costs), "sum")


@dataclass(frozen=True, slots=True)
class _OfItem:
    """Tell what an item of a stream costs, an index or a batch of them, where a function tells it of each index."""

    costs: Costs

    def __call__(self, item: Any) -> float:
        indices = [item] if as_index(item) is not None else list(item)
        (cost,) = self.costs.of_batches(self.costs.of(indices), np.array([len(indices)])).tolist()
        return float(cost)
