"""What is to be audited, with how its steps balance."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader

from ddp_patch.auditing.counting import SampleCosts
from ddp_patch.auditing.inspection import Expectations, Inspection
from ddp_patch.auditing.made_up_world import MadeUpWorld, Progress
from ddp_patch.auditing.report import Report, place_in_code
from ddp_patch.auditing.simulate import returned_by
from ddp_patch.auditing.subject import Audited, Factory, name_of
from ddp_patch.costs import Cost, CostOf, Costs
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.facts import Level, LoaderFacts, look_at
from ddp_patch.options import COST_WINDOW, Options, as_index
from ddp_patch.sharding.refusals import require_costs, require_one_of_each, unit_shared

__all__ = ["Request", "balanced", "costs_of_samples", "ignore"]


def costs_of_samples(subject: Audited, costs: Costs | None) -> SampleCosts | None:
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


def balanced(subject: Audited, costs: Costs, window: int, world_size: int, processes: bool) -> Audited | str:
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


@dataclass(slots=True)
class _Steps:
    """Count how much of the audit is done, over all worlds that it simulates.

    Attributes:
        show: Called with how much is done, and how much there is.
        worlds: How many worlds are simulated.
        before: How many of them are done.
    """

    show: Progress
    worlds: int = 1
    before: int = 0

    def __call__(self, done: int, total: int) -> None:
        self.show(self.before * total + done, self.worlds * total)


def ignore(done: int, total: int) -> None:
    """Show nobody how much is done."""


def _unsharded(make: Factory) -> DataLoader[Any]:
    """Return what a factory makes for a single process, for the patch to shard."""
    single = returned_by(make)
    if isinstance(single, DataLoader) and (found := look_at(single).sharded_by) is not None:
        raise InvalidOptionError(
            f"audit with patched=True patches what {name_of(make)}(0, 1) returns, and that is sharded already "
            f"({type(found).__name__}). Let it return the loader without that sampler where world_size is 1, or leave "
            "patched=True out."
        )
    return cast(DataLoader[Any], single)


@dataclass(frozen=True, slots=True)
class Request:
    """Say what was asked for, all of it checked; the arguments are those of ``audit``."""

    world_size: int
    epochs: int
    patch: bool
    patched: bool
    set_epoch: bool
    padding: bool
    epochs_differ: bool
    allow: frozenset[str]
    cost: Cost | None
    cost_of: CostOf
    cost_window: int
    max_items: int
    processes: bool
    timeout: float
    options: Mapping[str, Any] = field(default_factory=dict)

    def report(self, audited: DataLoader[Any] | Factory, progress: Progress) -> Report:
        """Audit one loader or factory."""
        steps = _Steps(progress, worlds=2 if self.patched else 1)
        if not self.patched:
            return self._report(audited, steps)
        # What the patch is asked to do differently has nothing to do with the loader as it is.
        before = replace(self, patch=False, options={}, cost_window=COST_WINDOW)._report(audited, steps)
        after = self._report(audited if isinstance(audited, DataLoader) else _unsharded(audited), steps)
        return replace(before, why_not_balanced=None, patched=replace(after, code=before.code))

    def _report(self, audited: DataLoader[Any] | Factory, steps: _Steps) -> Report:
        report = self._inspected(audited, steps)
        steps.before += 1
        return replace(report, code=place_in_code(audited))

    def _inspected(self, audited: DataLoader[Any] | Factory, steps: _Steps) -> Report:
        make = look_at(audited) if isinstance(audited, DataLoader) else audited
        subject = Audited(make, self.patch, self.options, self.set_epoch, self.max_items)
        costs = self._costs(subject)
        expect = Expectations(self.padding, self.epochs_differ, self.allow, costs_of_samples(subject, costs))

        def world_of(subject: Audited) -> MadeUpWorld:
            return MadeUpWorld(subject, self.world_size, self.epochs, self.processes, self.timeout, steps)

        given = world_of(subject)
        if costs is None:
            return Inspection(given, expect).report()
        again = balanced(subject, costs, self.cost_window, self.world_size, self.processes)
        if isinstance(again, str):
            return replace(Inspection(given, expect).report(), why_not_balanced=again)
        steps.worlds += 1
        report = Inspection(given, expect).report()
        del given  # free its ranks, before the others are made
        steps.before += 1
        return report.beside(Inspection(world_of(again), expect).report())

    def _costs(self, subject: Audited) -> Costs | None:
        """Check what samples cost, and what is said of it."""
        options = Options(cost=self.cost, cost_of=self.cost_of, cost_window=self.cost_window)
        if options.cost_window != COST_WINDOW and not subject.patches:
            raise InvalidOptionError(
                f"audit was given cost_window={self.cost_window} for patch_dataloader_to_ddp(), which is not called. "
                "Leave it out, or pass an unpatched loader."
            )
        return options.costs
