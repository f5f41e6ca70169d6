"""The one call: draw every rank's epochs, compare them, and report."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from ddp_patch.auditing.coding import Coding, Numbers
from ddp_patch.auditing.judge import (
    About,
    Allowance,
    Epoch,
    Judged,
    cause_of,
    judge_epoch,
    lost_problem,
    order_problem,
    signature,
)
from ddp_patch.auditing.measures import Cost, global_batches, imbalance, pictured, step_costs
from ddp_patch.auditing.processes import drawn_by_processes
from ddp_patch.auditing.report import EpochReport, Kind, Pictured, Problem, Report, Units, problem_kinds
from ddp_patch.auditing.simulate import Drawn, Factory, Rank, Subject, made_of_batches, ranks_of, stream_of
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loader import Level, level, samplers_in_use

__all__ = ["Progress", "audit"]

Progress: TypeAlias = Callable[[int, int], object]  # how many of how many draws are done

# Options of patch_dataloader_to_ddp() that real ranks alone can follow.
_COMMUNICATING = {"agreement", "verify", "process_group", "device_mesh", "data_parallel_dimensions"}


def audit(
    loader: DataLoader[Any] | Factory,
    world_size: int,
    epochs: int = 2,
    *,
    patch: bool = True,
    set_epoch: bool = False,
    padding: bool = True,
    epochs_differ: bool = False,
    allow: Collection[Kind] = (),
    cost: Cost | None = None,
    max_items: int = 2_000_000,
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
        allow: Problems, by their names in ``ddp_patch.auditing.problem_kinds``, that ``report.allowed`` tells of instead.
        cost: What a sample costs, such as its length: a sequence, or a function of its index. For the balance of ranks.
        max_items: How many items of each rank's epoch are drawn; where there are more, the report is of a sample.
        processes: Draw on real ranks, processes of a gloo group, which differ in all that processes differ in (a hash
            seed, generators that are not seeded). What is audited must be picklable.
        timeout: Seconds until every one of these must have returned.
        progress: Called with how many of how many draws are done.
        options: Passed on to ``patch_dataloader_to_ddp``.

    Returns:
        The report, frozen. ``report.ok`` says whether all holds.

    Raises:
        NotALoaderError: ``loader`` is neither a loader nor a function that returns one.
        InvalidOptionError: An option has no meaning; or the loader is one rank's share already, or cannot be copied.
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
    _check(world_size, epochs, max_items, allow)
    subject = Subject(loader, patch, options, set_epoch, max_items)
    world = _World(subject, world_size, epochs, processes, timeout, progress or _ignore)
    expect = _Expectations(padding, epochs_differ, frozenset(allow), cost)
    return _Audit(world, expect).report()


def _check(world_size: int, epochs: int, max_items: int, allow: Collection[str]) -> None:
    for name, value in {"world_size": world_size, "epochs": epochs, "max_items": max_items}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidOptionError(
                f"audit with {name}={value!r} can draw nothing: pass a whole number of at least 1."
            )
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


class _World:
    """All ranks, and one process alone beside them, drawn epoch by epoch."""

    def __init__(
        self, subject: Subject, world_size: int, epochs: int, processes: bool, timeout: float, progress: Progress
    ) -> None:
        made_up = subject
        if processes and isinstance(subject.make, DataLoader) and subject.patch:
            # Real ranks take rank 0's seed, and one process alone must have the same.
            subject = replace(subject, options={"seed": 0, **subject.options})
            # A made-up world has nobody to communicate with.
            alone = {name: value for name, value in subject.options.items() if name not in _COMMUNICATING}
            made_up = replace(subject, options=alone)
        self._made_up = made_up
        self.subject, self.world_size, self.epochs = subject, world_size, epochs
        self.processes, self._timeout, self._progress = processes, timeout, progress
        self.coding = Coding()
        whole = replace(made_up, max_items=subject.max_items * world_size)
        self._alone = Rank(lambda: stream_of(whole.loader(0, 1)), whole, seeded_as=0)
        self.units: Units = "batches" if made_of_batches(self._alone.loader) else "samples"
        self.first = Rank(lambda: made_up.loader(0, world_size), made_up, seeded_as=0).loader

    def drawn(self) -> Iterator[Epoch]:
        """Draw every epoch."""
        ranks = self._epochs_of_ranks(alike=False)
        done, of = 0, self.epochs * (self.world_size + 1)
        for number in range(self.epochs):
            alone = self._alone.epoch(number, self.coding)
            drawn = []
            for one in ranks(number):
                drawn.append(one)
                done += 1
                self._progress(done, of)
            done += 1
            self._progress(done, of)
            yield Epoch(number, _in_step(drawn), alone, self.units)

    def alike(self, epoch: Epoch) -> Epoch:
        """Draw an epoch again with all ranks seeded alike."""
        ranks = self._epochs_of_ranks(alike=True)
        for number in range(epoch.number + 1):
            drawn = list(ranks(number))
        return Epoch(epoch.number, _in_step(drawn), epoch.alone, self.units)

    def _epochs_of_ranks(self, alike: bool) -> Callable[[int], Iterator[Drawn]]:
        if self.processes:
            by_rank = drawn_by_processes(self.subject, self.world_size, self.epochs, alike, self._timeout, self.coding)
            return lambda number: (epochs[number] for epochs in by_rank)
        ranks = ranks_of(self.subject, self.world_size, alike)
        return lambda number: (rank.epoch(number, self.coding) for rank in ranks)

    def is_changed_by_epoch(self, first: Drawn) -> bool:
        """Tell whether rank 0's first pass would be another if ``set_epoch(1)`` had been called."""
        rank = Rank(lambda: self._made_up.loader(0, self.world_size), self._made_up, seeded_as=0)
        steps = len(first.sizes)
        return signature([rank.epoch(1, self.coding, tells_epoch=True).first_steps(steps)]) != signature([first])


def _in_step(ranks: Sequence[Drawn]) -> list[Drawn]:
    """Cut what is a sample to as many steps on every rank."""
    if all(drawn.ended or drawn.error for drawn in ranks):
        return list(ranks)
    steps = min(len(drawn.sizes) for drawn in ranks if not drawn.ended)
    return [drawn if len(drawn.sizes) <= steps else drawn.first_steps(steps) for drawn in ranks]


@dataclass(slots=True)
class _Audit:
    """One audit under way."""

    world: _World
    expect: _Expectations
    problems: list[Problem] = field(default_factory=list)
    epochs: list[EpochReport] = field(default_factory=list)
    signatures: list[bytes] = field(default_factory=list)
    lost: list[Numbers] = field(default_factory=list)
    pictured: Pictured = field(default_factory=Pictured)
    first: Drawn | None = None
    is_sample: bool = False
    seeds_agree: bool | None = True

    def report(self) -> Report:
        for epoch in self.world.drawn():
            self._look_at(epoch)
        self._look_at_order()
        self._look_at_tail()
        first = self.first or Drawn(np.empty(0, np.int32), np.empty(0, np.int32), ended=True)
        allowed = self.expect.allow
        return Report(
            name=self.world.subject.name,
            how=self._how(),
            world_size=self.world.world_size,
            units=self.world.units,
            epochs=tuple(self.epochs),
            epochs_differ=None if len(self.signatures) < 2 else len(set(self.signatures)) == len(self.signatures),
            seeds_agree=self.seeds_agree,
            is_sample=self.is_sample,
            seconds=first.seconds,
            memory=first.memory,
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
        read = ", reading the iterable dataset" if level(self.world.first) is Level.ITERABLE else ""
        where = "on real ranks" if self.world.processes else "in one process, every rank seeded differently"
        return f"{shared}, {where}{read}"

    def _look_at(self, epoch: Epoch) -> None:
        if self.first is None:
            self.first = epoch.ranks[0]
        self.is_sample |= epoch.is_sample and not self._errors(epoch)
        judged = judge_epoch(epoch, self._allowance(epoch))
        about = About(epoch, judged, self.world.coding)
        if not self._errors(epoch):
            self.signatures.append(signature(epoch.ranks))
            self._look_at_steps(epoch)
            self._look_at_length(epoch)
            if not judged.is_covered and self.seeds_agree and not self._has_cause():
                self._find_cause(epoch, judged)
            if judged.found.lacking:
                self.lost.append(judged.samples.missing)
        costs = step_costs(epoch, self.expect.cost)
        if not self.epochs:
            self.pictured = pictured(epoch, judged, self.world.coding, costs)
        self.epochs.append(_epoch_report(epoch, judged, about, costs))

    def _errors(self, epoch: Epoch) -> bool:
        """Tell whether a rank raised; the first time, note it."""
        raised = {rank: drawn.error for rank, drawn in enumerate(epoch.ranks) if drawn.error}
        if raised and not any(problem.kind == "error" for problem in self.problems):
            rank, error = next(iter(raised.items()))
            alone = f"raises {epoch.alone.error}" if epoch.alone.error else "does not"
            self._note(
                "error",
                f"Rank {rank} raises {error}",
                f"epoch {epoch.number}, ranks {', '.join(map(str, raised))}",
                f"In a training the other ranks would wait for it. One process alone {alone}.",
                "Mend the sampler, or pass epochs=1 if it is meant to last for one.",
            )
        return bool(raised)

    def _note(self, kind: Kind, what: str, where: str, why: str, remedy: str) -> None:
        self.problems.append(Problem(kind, what, where, why, remedy))

    def _noted(self, kind: Kind) -> bool:
        return any(problem.kind == kind for problem in self.problems)

    def _has_cause(self) -> bool:
        return any(problem.kind in _COVERAGE for problem in self.problems)

    def _allowance(self, epoch: Epoch) -> Allowance:
        loader, world = self.world.first, self.world.world_size
        size = int(max((drawn.sizes.max() for drawn in (*epoch.ranks, epoch.alone) if len(drawn.sizes)), default=1))
        uneven = self.world.subject.options.get("uneven")
        drops_round = uneven == "drop" or any(
            getattr(sampler, "drop_last", False) is True for sampler in samplers_in_use(loader)
        )
        dropped = world - 1 if drops_round else 0
        if self.world.units == "samples" and loader.drop_last:
            dropped += world * max(1, loader.num_workers) * (max(size, loader.batch_size or 1) - 1)
        return Allowance(world - 1 if self.expect.padding else 0, dropped, uneven=int(uneven == "keep"))

    def _find_cause(self, epoch: Epoch, judged: Judged) -> None:
        def alike() -> tuple[Epoch, Judged]:
            again = self.world.alike(epoch)
            return again, judge_epoch(again, self._allowance(again))

        cause = cause_of(epoch, judged, alike, self.world.first, self.world.coding, self.expect.padding)
        self.problems += cause.problems
        self.seeds_agree = cause.seeds_agree

    def _look_at_steps(self, epoch: Epoch) -> None:
        steps = [len(drawn.sizes) for drawn in epoch.ranks]
        if max(steps) - min(steps) <= self._allowance(epoch).uneven or self._noted("uneven_steps"):
            return
        fewest, most = steps.index(min(steps)), steps.index(max(steps))
        self._note(
            "uneven_steps",
            f"Rank {fewest} makes {min(steps)} steps and rank {most} makes {max(steps)}.",
            f"epoch {epoch.number}, {len(steps)} ranks",
            "Ranks with a step more wait in the all-reduce for ranks that have none: a training hangs or fails there.",
            "Share rounds of one item for each rank, as patch_dataloader_to_ddp() with uneven='pad' or 'drop' does.",
        )

    def _look_at_length(self, epoch: Epoch) -> None:
        for rank, drawn in enumerate(epoch.ranks):
            told = [length for length in drawn.told if length is not None]
            if drawn.ended and told and len(drawn.sizes) not in told and not self._noted("wrong_length"):
                self._note(
                    "wrong_length",
                    f"len() of rank {rank}'s loader says {told[0]} and it makes {len(drawn.sizes)} steps.",
                    f"epoch {epoch.number}, rank {rank}",
                    "Schedules, progress bars and shares that are planned from it are wrong.",
                    "Correct the sampler's __len__, or leave it out.",
                )

    def _look_at_order(self) -> None:
        if len(self.signatures) < 2 or len(set(self.signatures)) > 1 or self.first is None or not len(self.first.items):
            return
        tells = not self.world.subject.set_epoch and self.world.is_changed_by_epoch(self.first)
        problem = order_problem(tells, self.world.epochs, self.expect.epochs_differ)
        if problem is not None:
            self.problems.append(problem)

    def _look_at_tail(self) -> None:
        if len(self.lost) < self.world.epochs:
            return
        causes = [problem for problem in self.problems if problem.kind in _COVERAGE]
        is_a_few = len(self.lost[0]) < self.world.world_size * max(1, self.world.first.batch_size or 1)
        if [cause.kind for cause in causes] not in ([], ["missing"]) or (causes and not is_a_few):
            return
        problem = lost_problem(self.lost, self.world.coding, self.world.epochs)
        if problem is not None:
            self.problems = [other for other in self.problems if other.kind != "missing"] + [problem]


_COVERAGE = {
    "not_sharded",
    "double_sharding",
    "ranks_disagree",
    "torn_batch",
    "missing",
    "repeated",
    "padding",
}


def _epoch_report(epoch: Epoch, judged: Judged, about: About, costs: NDArray[np.float64] | None) -> EpochReport:
    balance = imbalance(costs) if costs is not None else (None, None)
    return EpochReport(
        epoch=epoch.number,
        items=tuple(len(drawn.items) for drawn in epoch.ranks),
        steps=tuple(len(drawn.sizes) for drawn in epoch.ranks),
        expected=epoch.expected,
        missing=None if epoch.is_sample else judged.found.lacking,
        missing_examples=about.missing(),
        repeated=judged.found.extra,
        repeated_examples=about.repeated(),
        padding=judged.padding,
        dropped=judged.dropped,
        global_batches=global_batches(epoch.ranks),
        imbalance=balance[0],
        worst_imbalance=balance[1],
    )
