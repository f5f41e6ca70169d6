"""The one call: draw every rank's epochs, compare them, and report."""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from ddp_patch.auditing.draw.drawing import Drawn
from ddp_patch.auditing.draw.made_up_world import MadeUpWorld, Progress
from ddp_patch.auditing.draw.subject import Factory, Subject
from ddp_patch.auditing.judge.causes import About, cause_of, coverage_kinds, unshared
from ddp_patch.auditing.judge.judging import (
    Allowance,
    Epoch,
    Judged,
    allowance,
    in_its_units,
    judge_epoch,
    signature,
)
from ddp_patch.auditing.judge.measures import Cost, global_batches, imbalance, step_costs
from ddp_patch.auditing.judge.properties import (
    Lost,
    error_problem,
    length_problem,
    lost_of,
    lost_problem,
    no_step_problem,
    order_problem,
    steps_problem,
)
from ddp_patch.auditing.pictured import Pictured
from ddp_patch.auditing.report import EpochReport, Kind, Problem, Report, problem_kinds
from ddp_patch.auditing.show.binning import pictured
from ddp_patch.errors import InvalidOptionError
from ddp_patch.options import whole_number

__all__ = ["audit"]

# So many items of all ranks are drawn, unless the user says how many.
_MOST = 16_000_000

# Options of patch_dataloader_to_ddp() that a made-up world takes the place of, and those that take real ranks.
_OF_A_REAL_RANK = {"rank", "num_replicas", "process_group", "device_mesh", "data_parallel_dimensions"}
_COMMUNICATING = {"agreement": "leader", "verify": True}


def audit(
    loader: DataLoader[Any] | Factory,
    world_size: SupportsIndex,
    epochs: SupportsIndex = 2,
    *,
    patch: bool = True,
    set_epoch: bool = False,
    padding: bool = True,
    epochs_differ: bool = False,
    allow: Collection[Kind] = (),
    cost: Cost | None = None,
    max_items: SupportsIndex | None = None,
    processes: bool = False,
    timeout: float = 120.0,
    progress: Progress | None = None,
    **options: Any,
) -> Report:
    """Run the sampling of every rank of a made-up world on this machine, and report what each rank would get.

    Only sampling runs: indices are drawn from the loader's ``batch_sampler`` or ``sampler``, and no dataset's
    ``__getitem__`` is called. An iterable dataset has no indices, so it is read, once for every rank and worker; its
    workers are simulated in this process. What a subclass adds in its own ``__iter__`` is not seen. The given loader is
    not changed, and the global random states are as before.

    Args:
        loader: A loader, which is copied for every rank; or a function ``make(rank, world_size)`` that returns a rank's
            finished loader, which is audited as it stands: one that any library has prepared. It is called for a world
            of one rank too, for what one process would get.
        world_size: The number of ranks.
        epochs: How many epochs each rank draws.
        patch: Whether a loader is shared by ``patch_dataloader_to_ddp``; with False it is audited as it stands.
        set_epoch: Whether the training calls ``set_epoch(epoch)`` before each epoch, so that the audit does.
        padding: Whether samples may be repeated to fill the last round; False for an evaluation.
        epochs_differ: Whether every epoch must have another order.
        allow: Problems, by their names in ``ddp_patch.auditing.problem_kinds``, which ``report.allowed`` tells of.
        cost: What a sample costs, such as its length: a sequence, or a function of its index (where every rank has a
            ``Subset`` of its own, that in the dataset below). For the balance of ranks.
        max_items: How many items of each rank's epoch are drawn; where there are more, the report is of a sample.
            Without it, 16 million of all ranks together.
        processes: Draw on real ranks, processes of a gloo group, which differ in all that processes differ in (a hash
            seed, generators that are not seeded). What is audited must be picklable.
        timeout: Seconds until every one of these must have returned.
        progress: Called with how many of how many draws are done.
        options: Passed on to ``patch_dataloader_to_ddp``.

    Returns:
        The report, frozen. ``report.ok`` says whether all holds.

    Raises:
        NotALoaderError: ``loader`` is neither a loader nor a function that returns one.
        InvalidOptionError: An option has no meaning; the loader is one rank's share already, or cannot be copied; or
            each rank has a dataset of its own, whose indices cannot be compared.
        RanksFailedError: A real rank raised or did not return in time.
        DDPPatchError: What ``patch_dataloader_to_ddp`` raises for this loader and these options.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10), batch_size=2, shuffle=True)
        >>> report = audit(loader, world_size=4)
        >>> report.ok, report.epochs[0].items, report.epochs[0].steps, report.epochs[0].padding
        (True, (3, 3, 3, 3), (2, 2, 2, 2), 2)
        >>> [problem.kind for problem in audit(loader, world_size=4, patch=False).problems]
        ['not_sharded']
    """
    ranks, passes = _positive("world_size", world_size), _positive("epochs", epochs)
    most = -(-_MOST // ranks) if max_items is None else _positive("max_items", max_items)
    _check_allowed(allow)
    _check_options(options, processes)
    subject = Subject(loader, patch, options, set_epoch, most)
    world = MadeUpWorld(subject, ranks, passes, processes, timeout, progress or _ignore)
    expect = _Expectations(padding, epochs_differ, frozenset(allow), cost)
    return _Audit(world, expect).report()


def _positive(name: str, value: SupportsIndex) -> int:
    found = whole_number(name, value)
    if found < 1:
        raise InvalidOptionError(f"audit with {name}={found} can draw nothing: pass a whole number of at least 1.")
    return found


def _check_options(options: Mapping[str, Any], processes: bool) -> None:
    if given := sorted(_OF_A_REAL_RANK & options.keys()):
        raise InvalidOptionError(
            f"audit was given {', '.join(given)} for patch_dataloader_to_ddp(), which says where one real rank is, and "
            "makes a world of its own. Leave that out; for a device mesh, pass a factory that makes it, and "
            "processes=True."
        )
    for name, value in _COMMUNICATING.items():
        if options.get(name) == value and not processes:
            raise InvalidOptionError(
                f"audit with {name}={value!r} needs ranks that communicate, and those of one process do not. Pass "
                "processes=True, too."
            )


def _check_allowed(allow: Collection[str]) -> None:
    if isinstance(allow, str):
        raise InvalidOptionError(f"allow={allow!r} is one string, and several may be named. Pass allow=[{allow!r}].")
    if unknown := sorted(set(allow) - set(problem_kinds)):
        raise InvalidOptionError(
            f"allow={unknown} names no kind of problem. Those that exist: {', '.join(problem_kinds)}."
        )


def _ignore(done: int, of: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Expectations:
    padding: bool
    epochs_differ: bool
    allow: frozenset[str]
    cost: Cost | None


@dataclass(slots=True)
class _Audit:
    """One audit under way."""

    world: MadeUpWorld
    expect: _Expectations
    problems: list[Problem] = field(default_factory=list)
    epochs: list[EpochReport] = field(default_factory=list)
    signatures: list[bytes] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    pictured: Pictured = field(default_factory=Pictured)
    first: Drawn | None = None  # of rank 0
    fewest: int = sys.maxsize  # items of an epoch
    is_sample: bool = False
    seeds_agree: bool | None = True

    def report(self) -> Report:
        for epoch in self.world.drawn():
            self._look_at(epoch)
            del epoch  # the next one needs as much memory
        self._look_at_order()
        self._look_at_tail()
        allowed = self.expect.allow
        one = self.first or Drawn(np.empty(0, np.int32), np.empty(0, np.int32), ended=True)
        return Report(
            name=self.world.subject.name,
            how=self._how(),
            world_size=self.world.world_size,
            units="batches" if all(epoch.units == "batches" for epoch in self.epochs) else "samples",
            epochs=tuple(self.epochs),
            epochs_differ=None if len(self.signatures) < 2 else len(set(self.signatures)) == len(self.signatures),
            seeds_agree=self.seeds_agree,
            is_sample=self.is_sample,
            seconds=one.seconds,
            memory=one.memory,
            problems=tuple(problem for problem in self.problems if problem.kind not in allowed),
            allowed=tuple(problem for problem in self.problems if problem.kind in allowed),
            pictured=self.pictured,
        )

    def _how(self) -> str:
        subject = self.world.subject
        if not isinstance(subject.make, DataLoader):
            shared = "as the factory made it"
        else:
            shared = "shared by patch_dataloader_to_ddp" if subject.patch else "as it stands"
        read = ", reading the iterable dataset" if self.world.traits.is_iterable else ""
        where = "on real ranks" if self.world.processes else "in one process, every rank seeded differently"
        return f"{shared}, {where}{read}"

    def _add(self, problem: Problem | None) -> None:
        """Note a problem, if there is one, of a kind that was not noted yet."""
        if problem is not None and all(noted.kind != problem.kind for noted in self.problems):
            self.problems.append(problem)

    def _allowance(self, epoch: Epoch) -> Allowance:
        return allowance(epoch, self.world.traits, self.world.subject.options.get("uneven"), self.expect.padding)

    def _judge(self, epoch: Epoch) -> Judged:
        return judge_epoch(epoch, self._allowance(epoch))

    def _look_at(self, epoch: Epoch) -> None:
        epoch = in_its_units(epoch, self._allowance)
        judged = self._judge(epoch)
        known = len(self.problems)
        failure = error_problem(epoch)
        self._add(failure)
        if failure is None:
            self._look_at_shares(epoch, judged)
        else:
            self.seeds_agree = None
        costs = step_costs(epoch, self.expect.cost)
        self.first = self.first or epoch.ranks[0]
        if not self.epochs or (self.problems and not known):
            self.pictured = pictured(epoch, judged, self.world.coding, costs)
        self.epochs.append(_epoch_report(epoch, judged, About(epoch, judged, self.world.coding), costs))

    def _look_at_shares(self, epoch: Epoch, judged: Judged) -> None:
        self.is_sample |= epoch.is_sample
        self.signatures.append(signature(epoch.ranks))
        self.fewest = min(self.fewest, len(epoch.alone.items))
        self._add(steps_problem(epoch, self._allowance(epoch).uneven))
        self._add(length_problem(epoch))
        self._add(no_step := no_step_problem(epoch))
        if judged.is_covered and (problem := self._unshared(epoch, judged)) is not None:
            self._add(problem)
            self.seeds_agree = None
        elif not judged.found.is_known or no_step is not None:
            self.seeds_agree = None
        elif not (judged.is_covered or self._causes()):
            self._find_cause(epoch, judged)
        if no_step is None and judged.found.lacking and judged.found.extra == judged.padding:
            self.lost.append(lost_of(epoch, judged, self.world.traits))

    def _causes(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.kind in coverage_kinds]

    def _unshared(self, epoch: Epoch, judged: Judged) -> Problem | None:
        """Look, once, at whether all ranks draw the same, where counting cannot tell."""
        can_tell = judged.found.is_known and not epoch.is_sample
        if can_tell or self.epochs or self.world.world_size == 1:
            return None
        return unshared(epoch, self.world.alike(epoch), judged, self.world.coding)

    def _find_cause(self, epoch: Epoch, judged: Judged) -> None:
        def alike() -> tuple[Epoch, Judged]:
            again = in_its_units(self.world.alike(epoch), self._allowance)
            return again, self._judge(again)

        cause = cause_of(epoch, judged, alike, self.world.traits, self.world.coding, self.expect.padding)
        self.problems += cause.problems
        self.seeds_agree = cause.seeds_agree

    def _look_at_order(self) -> None:
        orders = len(set(self.signatures))
        if orders == len(self.signatures) or self.first is None or not len(self.first.items):
            return
        tells = orders == 1 and not self.world.subject.set_epoch and self.world.is_changed_by_epoch(self.first)
        self._add(order_problem(tells, self.world.epochs, orders, self.expect.epochs_differ, self.fewest))

    def _look_at_tail(self) -> None:
        """Where nothing else explains them: are the samples that are lost the same in every epoch?"""
        if len(self.lost) < self.world.epochs:
            return
        kinds = [cause.kind for cause in self._causes()]
        is_tail = kinds == ["missing"] and all(lost.are_last for lost in self.lost)
        if kinds and not is_tail:
            return
        problem = lost_problem(self.lost, self.world.coding)
        if problem is not None:
            self.problems = [*(other for other in self.problems if other.kind != "missing"), problem]


def _epoch_report(epoch: Epoch, judged: Judged, about: About, costs: NDArray[np.float64] | None) -> EpochReport:
    balance = imbalance(costs) if costs is not None else (None, None)
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
        padding=judged.padding,
        dropped=judged.dropped,
        global_batches=global_batches(epoch.ranks),
        imbalance=balance[0],
        worst_imbalance=balance[1],
    )
