"""Inspect a world's epochs one after the other, collect problems, and make the report."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ddp_patch.auditing.binning import pictured
from ddp_patch.auditing.causes import cause_of, coverage_kinds, unsharded
from ddp_patch.auditing.counting import (
    About,
    Allowance,
    Judged,
    SampleCosts,
    allowance,
    global_batches,
    imbalance,
    judge,
    judge_against,
    repeats_rank_0,
    step_costs,
)
from ddp_patch.auditing.drawn import EpochDraws, RankDraws, signature
from ddp_patch.auditing.epoch_report import EpochReport, Pictured, Problem
from ddp_patch.auditing.made_up_world import MadeUpWorld
from ddp_patch.auditing.properties import (
    Lost,
    error_problem,
    idle_problem,
    length_problem,
    lost_of,
    lost_problem,
    no_step_problem,
    order_problem,
    steps_problem,
    unpatched_problem,
)
from ddp_patch.auditing.report import Report
from ddp_patch.loaders.facts import LoaderFacts

__all__ = ["Expectations", "Inspection"]


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


@dataclass(frozen=True, slots=True)
class _Pass:
    """Keep what later epochs are compared with, instead of the epoch itself, which may be large.

    Attributes:
        signature: The hash of the epoch's order.
        items: How many items a single process would draw.
        is_sample: Whether only a part of the epoch was drawn.
    """

    signature: bytes
    items: int
    is_sample: bool


@dataclass(slots=True)
class Inspection:
    """Collect what is found epoch by epoch.

    Args:
        world: Draws the epochs.
        expect: What the user expects.

    Attributes:
        problems: The problems so far, one of each kind.
        epochs: What ranks got, epoch by epoch.
        passes: The epochs in which no rank raised, to compare their orders.
        lost: The samples that no rank got, for each epoch in which some were lost.
        pictured: What to draw pictures of.
        first: What rank 0 drew in epoch 0.
        seeds_agree: Whether ranks that are seeded differently draw one order; None where that cannot be told.
        is_against_whole: Whether ranks were compared with a whole dataset, because a factory ignores the world's size.
    """

    world: MadeUpWorld
    expect: Expectations
    problems: list[Problem] = field(default_factory=list)
    epochs: list[EpochReport] = field(default_factory=list)
    passes: list[_Pass] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    pictured: Pictured = field(default_factory=Pictured)
    first: RankDraws | None = None
    seeds_agree: bool | None = True
    is_against_whole: bool = False

    def report(self) -> Report:
        """Draw and inspect every epoch, and return the report."""
        for epoch in self.world.drawn():
            self._inspect(epoch)
            del epoch  # free it before the next one is drawn
        self._compare_orders()
        self._compare_lost()
        allowed = self.expect.allow
        one = self.first or RankDraws(np.empty(0, np.int32), np.empty(0, np.int32), ended=True)
        orders = len({each.signature for each in self.passes})
        return Report(
            name=self.world.subject.name,
            how=self._how(),
            world_size=self.world.world_size,
            units="batches" if all(epoch.units == "batches" for epoch in self.epochs) else "samples",
            epochs=tuple(self.epochs),
            epochs_differ=None if len(self.passes) < 2 else orders == len(self.passes),
            seeds_agree=self.seeds_agree,
            is_sample=any(each.is_sample for each in self.passes),
            seconds=one.seconds,
            memory=one.memory,
            problems=tuple(problem for problem in self.problems if problem.kind not in allowed),
            allowed=tuple(problem for problem in self.problems if problem.kind in allowed),
            pictured=self.pictured,
        )

    def _how(self) -> str:
        subject = self.world.subject
        if not isinstance(subject.make, LoaderFacts):
            what = "loaders as returned by your factory"
            if self.is_against_whole:
                what += " (make(0, 1) ignores world_size, so they are compared with the whole dataset)"
        else:
            what = "patched by patch_dataloader_to_ddp" if subject.patch else "the loader as it is"
            what += " with cost=" if subject.balance else ""
        read = ", reading the iterable dataset" if self.world.traits.is_iterable else ""
        if self.world.processes:
            return f"on real ranks: {what}{read}"
        return f"simulated: {what}, in one process, each rank seeded differently{read}"

    def _add(self, problem: Problem | None) -> None:
        """Note a problem, if there is one, unless one of its kind was noted before."""
        if problem is not None and all(noted.kind != problem.kind for noted in self.problems):
            self.problems.append(problem)

    def _allowance(self, epoch: EpochDraws) -> Allowance:
        return allowance(epoch, self.world.traits, self.world.subject.options.get("uneven"), self.expect.padding)

    def _inspect(self, drawn: EpochDraws) -> None:
        epoch, judged = self._judged(drawn)
        known = len(self.problems)
        failure = error_problem(epoch)
        self._add(failure)
        if failure is None:
            self._inspect_shards(epoch, judged)
        else:
            self.seeds_agree = None
        costs = step_costs(epoch, self.expect.costs)
        self.first = self.first or epoch.ranks[0]
        if not self.epochs or (self.problems and not known):
            # Picture the first epoch with a problem, or else the first.
            self.pictured = pictured(epoch, judged, self.world.coding, costs)
        self.epochs.append(_epoch_report(self._about(epoch, judged), costs))

    def _about(self, epoch: EpochDraws, judged: Judged) -> About:
        is_simulated = self.world.subject.is_made and not self.world.processes
        return About(epoch, judged, self.world.coding, is_simulated)

    def _judged(self, drawn: EpochDraws) -> tuple[EpochDraws, Judged]:
        """Judge an epoch by what one process gets, or by all of the dataset where a factory ignores the world's size.

        Shares that together are the whole dataset are right whatever the factory makes for one process.
        """
        epoch, judged = self._compared(drawn)
        if judged.is_covered or not repeats_rank_0(epoch) or (whole := self.world.whole()) is None:
            return epoch, judged
        against_whole = judge_against(whole, drawn, self._allowance)
        if not against_whole[1].is_covered:
            return epoch, judged
        self.is_against_whole = True
        return against_whole

    def _compared(self, drawn: EpochDraws) -> tuple[EpochDraws, Judged]:
        return judge(drawn, self._allowance, may_rebatch=not self.world.subject.patches)

    def _inspect_shards(self, epoch: EpochDraws, judged: Judged) -> None:
        """Look for problems in an epoch in which no rank raised."""
        self.passes.append(_Pass(signature(epoch.ranks), len(epoch.alone.items), epoch.is_sample))
        self._add(steps_problem(epoch, self._allowance(epoch).uneven))
        self._add(length_problem(epoch))
        self._add(idle_problem(epoch, self.world.traits))
        self._add(no_step := no_step_problem(epoch))
        self._add(self._lost_by_patching(epoch))
        if judged.is_covered and (problem := self._unsharded(epoch, judged)) is not None:
            self._add(problem)
            self.seeds_agree = None
        elif not judged.found.is_known or no_step is not None:
            self.seeds_agree = None
        elif not (judged.is_covered or self._coverage_problems()):
            self._find_cause(epoch, judged)
        if (
            no_step is None
            and judged.found.lacking
            and judged.found.extra == judged.padding
            and not judged.found.unexpected
        ):
            self.lost.append(lost_of(epoch, judged, self.world.traits))

    def _lost_by_patching(self, epoch: EpochDraws) -> Problem | None:
        """Check that a patched loader leaves out nothing of the unpatched one."""
        again = partial(self.world.unpatched_anew, epoch.number)
        return unpatched_problem(epoch, again, self.world.coding, self.world.traits.num_workers)

    def _coverage_problems(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.kind in coverage_kinds]

    def _unsharded(self, epoch: EpochDraws, judged: Judged) -> Problem | None:
        """Check in the first epoch whether all ranks draw the same, where counting cannot tell."""
        can_tell = judged.found.is_known and not epoch.is_sample
        if can_tell or self.epochs or self.world.world_size == 1:
            return None
        return unsharded(self._about(epoch, judged), self.world.alike(epoch))

    def _find_cause(self, epoch: EpochDraws, judged: Judged) -> None:
        def alike() -> tuple[EpochDraws, Judged]:
            return self._compared(self.world.alike(epoch))

        cause = cause_of(self._about(epoch, judged), alike, self.world.traits, self.expect.padding)
        self.problems += cause.problems
        self.seeds_agree = cause.seeds_agree

    def _compare_orders(self) -> None:
        """Check whether epochs repeat an order."""
        orders = len({each.signature for each in self.passes})
        if orders == len(self.passes) or self.first is None or not len(self.first.items):
            return
        is_told = self.world.subject.set_epoch
        may_tell = orders == 1 and (self.world.traits.keeps_workers or not is_told)
        tells = may_tell and self.world.is_changed_by_epoch(self.first)
        fewest = min(each.items for each in self.passes)
        demanded = self.expect.epochs_differ
        self._add(order_problem(tells, self.world.epochs, orders, demanded, fewest, is_told=is_told))

    def _compare_lost(self) -> None:
        """Check whether every epoch loses the same samples, unless another problem explains them."""
        if len(self.lost) < self.world.epochs:
            return
        kinds = [problem.kind for problem in self._coverage_problems()]
        is_tail = kinds == ["missing"] and all(lost.are_last for lost in self.lost)
        if kinds and not is_tail:
            return
        problem = lost_problem(self.lost, self.world.coding)
        if problem is not None:
            self.problems = [*(other for other in self.problems if other.kind != "missing"), problem]


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
        missing_examples=about.missing(),
        repeated=judged.found.extra if judged.found.is_known else None,
        repeated_examples=about.repeated(),
        foreign=judged.found.unexpected if judged.found.is_known else None,
        foreign_examples=about.foreign(),
        padding=judged.padding,
        dropped=judged.dropped,
        global_batches=global_batches(epoch),
        imbalance=balance,
        worst_imbalance=worst_balance,
    )
