"""Inspect a world's epochs one after the other, collect problems, and make the report."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ddp_patch.auditing.drawn import EpochDraws, RankDraws, signature
from ddp_patch.auditing.judge_causes import About, cause_of, of_a_split, unsharded
from ddp_patch.auditing.judge_costs import SampleCosts, imbalance, step_costs
from ddp_patch.auditing.judge_coverage import Judge, Judged
from ddp_patch.auditing.judge_problems import (
    Lost,
    Problem,
    coverage_kinds,
    error_problem,
    idle_problem,
    index_problem,
    length_problem,
    lost_of,
    lost_problem,
    no_step_problem,
    order_problem,
    steps_problem,
    unpatched_problem,
)
from ddp_patch.auditing.pictured import Pictured, pictured
from ddp_patch.auditing.report import Report
from ddp_patch.auditing.words import EpochReport
from ddp_patch.auditing.world import MadeUpWorld
from ddp_patch.streams.stream_sampler import faster_by_worker

__all__ = ["Expectations", "Inspection", "beside"]


@dataclass(frozen=True, slots=True)
class Expectations:
    """Say what the user expects of the ranks.

    Attributes:
        padding: Whether samples may be repeated to fill the last round.
        epochs_differ: Whether every epoch must have another order.
        allow: Kinds of problem that do not make the audit fail.
        costs: What samples cost, if it is known.
    """

    padding: bool
    epochs_differ: bool
    allow: frozenset[str]
    costs: SampleCosts | None


class Inspection:
    """Collect what is found epoch by epoch.

    Args:
        world: Draws the epochs.
        expect: What the user expects.
    """

    def __init__(self, world: MadeUpWorld, expect: Expectations) -> None:
        subject = world.subject
        self._world, self._expect = world, expect
        self._judge = Judge(world.traits, subject.options.get("uneven"), expect.padding, not subject.patches)
        self._problems: list[Problem] = []  # one of each kind
        self._epochs: list[EpochReport] = []
        # Of the epochs in which no rank raised: hashes of their orders, and how many items one process draws.
        self._orders: list[bytes] = []
        self._lengths: list[int] = []
        self._is_sample = False
        self._lost: list[Lost] = []  # of the epochs in which samples were lost
        self._pictured = Pictured()
        self._first: RankDraws  # what rank 0 drew in epoch 0

    def report(self) -> Report:
        """Draw and inspect every epoch, and return the report."""
        for epoch in self._world.drawn():
            self._inspect(epoch)
            del epoch  # free it before the next one is drawn
        self._compare_orders()
        self._compare_lost()
        allowed = self._expect.allow
        return Report(
            name=self._world.subject.name,
            how=self._how(),
            world_size=self._world.world_size,
            units="batches" if all(epoch.units == "batches" for epoch in self._epochs) else "samples",
            epochs=tuple(self._epochs),
            epochs_differ=None if len(self._orders) < 2 else len(set(self._orders)) == len(self._orders),
            is_sample=self._is_sample,
            problems=tuple(problem for problem in self._problems if problem.kind not in allowed),
            allowed=tuple(problem for problem in self._problems if problem.kind in allowed),
            pictured=self._pictured,
            note=self._note(),
        )

    def _note(self) -> str | None:
        """Return what would be faster, by what rank 0 drew in epoch 0."""
        traits, ranks = self._world.traits, self._world.world_size
        if ranks == 1 or not traits.is_iterable or traits.divides_batches or len(self._parts) < 2:
            return None
        return faster_by_worker(self._world.subject.name, ranks, sum(self._parts))

    def _how(self) -> str:
        world, subject = self._world, self._world.subject
        what = "patched by patch_dataloader_to_ddp" if subject.patch else "the loader as it is"
        if subject.is_made:
            what = "loaders as returned by your factory"
        what += " with cost=" * ("cost" in subject.options)
        what = f"on real ranks: {what}" if world.processes else f"simulated: {what}, in one process, each rank seeded "
        what += "differently" * (not world.processes) + ", reading the iterable dataset" * world.traits.is_iterable
        if (some := len(world.iterating)) < world.world_size:
            what += f"; {some} ranks iterate their loaders, and the others' shares are cut likewise"
        return what

    def _add(self, problem: Problem | None) -> None:
        """Note a problem, if there is one, unless one of its kind was noted before."""
        if problem is not None and all(noted.kind != problem.kind for noted in self._problems):
            self._problems.append(problem)

    def _inspect(self, drawn: EpochDraws) -> None:
        epoch, judged = self._judge.judge(drawn)
        is_simulated = self._world.subject.is_made and not self._world.processes
        about = About(epoch, judged, self._world.coding, is_simulated)
        had_problems = bool(self._problems)
        failure = error_problem(epoch)
        self._add(failure)
        self._add(index_problem(epoch, self._world.traits))
        if failure is None:
            self._inspect_shards(about)
        costs = step_costs(epoch, self._expect.costs)
        if not self._epochs:
            self._first, self._parts = epoch.ranks[0], epoch.parts
        if not self._epochs or (self._problems and not had_problems):
            # Picture the first epoch with a problem, or else the first.
            self._pictured = pictured(epoch, judged, costs)
        self._epochs.append(_epoch_report(about, costs))

    def _inspect_shards(self, about: About) -> None:
        """Look for problems in an epoch in which no rank raised."""
        epoch, judged, world = about.epoch, about.judged, self._world
        self._orders.append(signature(epoch.ranks))
        self._lengths.append(len(epoch.alone.items))
        self._is_sample |= epoch.is_sample
        self._add(steps_problem(epoch, self._judge.uneven_steps(epoch)))
        self._add(length_problem(epoch))
        self._add(idle_problem(epoch, world.traits))
        self._add(no_step := no_step_problem(epoch))
        self._add(unpatched_problem(epoch, world.unpatched_anew, world.coding, world.traits.num_workers))
        if judged.is_covered:
            self._add(self._unsharded(about))
        elif judged.found.is_known and no_step is None and not self._coverage_problems():
            again = partial(self._again, epoch)
            causes = cause_of(about, again, world.traits, self._expect.padding)
            self._problems += map(of_a_split, causes) if world.traits.may_be_split else causes
        only_lacks = judged.found.extra == judged.padding and not judged.found.unexpected
        if no_step is None and judged.found.lacking and only_lacks:
            self._lost.append(lost_of(epoch, judged, world.traits))

    def _again(self, epoch: EpochDraws) -> tuple[EpochDraws, Judged]:
        """Draw an epoch again on ranks that are all seeded alike, and judge it."""
        return self._judge.judge(self._world.alike(epoch))

    def _coverage_problems(self) -> list[Problem]:
        return [problem for problem in self._problems if problem.kind in coverage_kinds]

    def _unsharded(self, about: About) -> Problem | None:
        """Check in the first epoch whether all ranks draw the same, where counting cannot tell."""
        can_tell = about.judged.found.is_known and not about.epoch.is_sample
        if can_tell or self._epochs or self._world.world_size == 1:
            return None
        return unsharded(about, self._world.alike(about.epoch))

    def _compare_orders(self) -> None:
        """Check whether epochs repeat an order."""
        orders, world = len(set(self._orders)), self._world
        if orders == len(self._orders) or not len(self._first.items):
            return
        is_told = world.subject.set_epoch
        may_tell = orders == 1 and (world.traits.keeps_workers or not is_told)
        tells = may_tell and world.is_changed_by_epoch(self._first)
        fewest = min(self._lengths)
        self._add(order_problem(tells, world.epochs, orders, self._expect.epochs_differ, fewest, is_told=is_told))

    def _compare_lost(self) -> None:
        """Check whether every epoch loses the same samples, unless another problem explains them."""
        if len(self._lost) < self._world.epochs:
            return
        kinds = [problem.kind for problem in self._coverage_problems()]
        is_tail = kinds == ["missing"] and all(lost.are_last for lost in self._lost)
        if kinds and not is_tail:
            return
        problem = lost_problem(self._lost, self._world.coding)
        if problem is not None:
            self._problems = [*(other for other in self._problems if other.kind != "missing"), problem]


def _epoch_report(about: About, costs: NDArray[np.float64] | None) -> EpochReport:
    epoch, judged = about.epoch, about.judged
    balance, worst_balance = imbalance(costs) if costs is not None else (None, None)
    return EpochReport(
        epoch=epoch.number,
        items=tuple(len(drawn.items) for drawn in epoch.ranks),
        steps=tuple(len(drawn.sizes) for drawn in epoch.ranks),
        units=epoch.units,
        expected=epoch.expected,
        distinct=judged.found.distinct,
        missing=None if epoch.is_sample or not judged.found.is_known else judged.found.lacking,
        repeated=judged.found.extra if judged.found.is_known else None,
        foreign=judged.found.unexpected if judged.found.is_known else None,
        padding=judged.padding,
        dropped=judged.dropped,
        imbalance=balance,
        worst_imbalance=worst_balance,
    )


def beside(report: Report, balanced: Report) -> Report:
    """Return a report with that of the same loader patched with ``cost=``, whose problems become its own."""
    known = {problem.kind for problem in (*report.problems, *report.allowed)}

    def both(own: Sequence[Problem], others: Sequence[Problem]) -> tuple[Problem, ...]:
        new = (problem for problem in others if problem.kind not in known)
        return (*own, *(replace(problem, where=f"with cost=, {problem.where}") for problem in new))

    problems, allowed = both(report.problems, balanced.problems), both(report.allowed, balanced.allowed)
    return replace(report, balanced=balanced, problems=problems, allowed=allowed)
