"""Users' programs on real ranks, and one judge of what each rank was given.

A program is a function of a ``Job``, which is this rank as a training script knows it:

    @program("error", each={"1 epoch": 1, "3 epochs": 3})
    def each_rank_shuffles_its_own_rows(job, epochs):
        dataset = users.Rows()
        train = job.patch(loader(dataset))
        for _ in range(epochs):
            random.shuffle(dataset.rows)
            job.train(train)

``complete`` means that every epoch has each sample once, in equally many steps on all ranks, and that nothing is raised
or warned of. ``error`` means that this package raises on some rank before the epoch ends in which a sample is lost;
``warned``, that samples are lost, and it warns that they may be.
Ranks meet in an all-reduce after each step, as in ``DistributedDataParallel``; in some programs after each epoch or
never. Where a program ``tells`` words, an error or a warning has them all.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from messages import Words, missing
from quick import run_ranks
from users import N, begin_anew, number_of
from zoo import seed_ambient

from ddp_patch import errors, patch_dataloader_to_ddp
from ddp_patch.errors import DDPPatchError, RankMismatchWarning

__all__ = ["AllReduce", "Epoch", "Job", "Programs", "Run", "ids", "run_job", "verdict"]

# After what the ranks meet.
AllReduce: TypeAlias = Literal["each step", "each epoch", "never"]

_TIMEOUT_S = 10.0  # that ranks wait for each other where this package lets them
_FEW = 9  # ways to run a program, which are all tried on 2 and on 3 ranks
_LATE_S = 90.0  # after which a test fails


@dataclass
class Epoch:
    """What a rank was given of an epoch.

    Attributes:
        due: What one process is given, in any order.
        is_part: Whether the ranks break it off.
        padding: How many samples may come once more.
        is_uneven: Whether ranks may make different numbers of steps.
        samples: Those that came.
        steps: How many batches they came in.
    """

    due: list[int]
    is_part: bool = False
    padding: int = 0
    is_uneven: bool = False
    samples: list[int] = field(default_factory=list)
    steps: int = 0

    def take(self, batch: Any) -> list[int]:
        """Note a batch, and return its samples."""
        samples = list(ids(batch))
        self.samples += samples
        self.steps += 1
        return samples


@dataclass
class Run:
    """What came of a program on one rank.

    Attributes:
        epochs: Those that it began.
        error: The error of this package that ended it.
        failed: Another error that ended it.
        is_stuck: Whether it waited for ranks that had ended.
        warned: Warnings of this package.
        patches: How many loaders it patched.
        owed: What some rank must raise by the end, though each epoch is whole.
    """

    epochs: list[Epoch] = field(default_factory=list)
    error: str = ""
    failed: str = ""
    is_stuck: bool = False
    warned: list[str] = field(default_factory=list)
    patches: int = 0
    owed: str = ""


class _OthersStopped(Exception):  # noqa: N818 - no error: their launcher would end this rank
    """Another rank raised, or has ended while this one waits for it."""


class Job:
    """A rank, as a user's program sees it.

    Attributes:
        rank: Its number.
        world: How many there are.
        run: What comes of it.
    """

    def __init__(self, rank: int, world: int, all_reduce: AllReduce) -> None:
        self.rank, self.world, self.run = rank, world, Run()
        self._all_reduce = all_reduce
        self._thread = threading.get_ident()

    def patch(self, raw: Any, **options: Any) -> Any:
        """Patch a loader."""
        self.run.patches += 1
        return patch_dataloader_to_ddp(raw, **{"timeout": _TIMEOUT_S, **options})

    def begin(self, due: Iterable[int] = range(N), **how: Any) -> Epoch:
        """Note that an epoch begins."""
        self.run.epochs.append(Epoch(list(due), **how))
        return self.run.epochs[-1]

    def step(self, epoch: Epoch, loader: Iterable[Any], most: int | None = None) -> Iterator[list[int]]:
        """Make the steps of an epoch, or so many, and yield each step's samples to the program."""
        for number, batch in enumerate(loader, 1):
            yield epoch.take(batch)
            if self._all_reduce == "each step" and threading.get_ident() == self._thread:
                self.meet()
            if number == most:
                break

    def train(
        self,
        loader: Iterable[Any],
        due: Iterable[int] = range(N),
        *,
        epochs: int = 1,
        most: int | None = None,
        **how: Any,
    ) -> Epoch:
        """Train some epochs, or begin one and break it off after so many steps; return the last."""
        for _ in range(epochs):
            epoch = self.begin(due, is_part=most is not None, **how)
            for _ in self.step(epoch, loader, most):
                pass
            self.end()
        return epoch

    def end(self) -> None:
        """End an epoch."""
        if self._all_reduce == "each epoch":
            self.meet()

    def meet(self) -> None:
        """Wait for the others in a collective, as a training does."""
        goes_on, stopped = self._counted("goes on")
        if goes_on < self.world:
            self.run.is_stuck = not stopped
            raise _OthersStopped

    def leave(self) -> None:
        """Take part once more, so that nobody waits for this rank in vain."""
        self._counted("stopped" if self.run.error or self.run.failed else "ended")

    def _counted(self, this: str) -> tuple[int, int]:
        """Return how many ranks go on and how many stopped."""
        counts = torch.tensor([this == "goes on", this == "stopped"], dtype=torch.int64)
        dist.all_reduce(counts)
        return int(counts[0]), int(counts[1])


@dataclass(frozen=True)
class _Program:
    """A program, what may come of it and is told then, after what its ranks meet, and on how many ranks it runs."""

    call: Callable[[Job], None]
    expected: Sequence[str]
    tells: Words
    all_reduce: AllReduce
    world_sizes: Sequence[int]


class Programs:
    """The programs of a module, where this is ``program``. Called, it is a decorator that adds one.

    Args, when called:
        expected: "complete", "error" or "warned", or several, in one text.
        each: Ways that the program is run in, each its second argument. Of many, every other is tried on 2 ranks, and
            those between on 3.
        tells: What an error or a warning must say. Without it, nothing may be warned of.
        all_reduce: After what the ranks meet.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self._programs: dict[str, _Program] = {}

    def __call__(
        self,
        expected: str,
        each: Mapping[str, Any] | None = None,
        tells: Words = (),
        all_reduce: AllReduce = "each step",
    ) -> Callable[[Any], Any]:
        def add(program: Any) -> Any:
            for place, (way, value) in enumerate(({"": None} if each is None else each).items()):
                call = program if each is None else lambda job, value=value: program(job, value)
                sizes = (2, 3) if each is None or len(each) <= _FEW else (2 + place % 2,)
                name = f"{program.__name__.replace('_', ' ')}: {way}".removesuffix(": ")
                self._programs[name] = _Program(call, expected.split(" or "), tells, all_reduce, sizes)
            return program

        return add

    def run(self, rank: int, world: int) -> dict[str, Run]:
        """Run them on a rank one after the other, each with loaders of its own, whatever became of those before."""
        runs = {}
        for name, program in self._programs.items():
            if world in program.world_sizes:
                runs[name] = run_job(rank, world, program.call, program.all_reduce)
                dist.monitored_barrier(timeout=timedelta(seconds=_LATE_S))
        return runs

    def unexpected(self, world: int) -> dict[str, str]:
        """Run them on so many ranks; return each that did not end as expected, and what came of it."""
        found, ranks = {}, run_ranks(_run_programs, world, self.module)
        for name in ranks[0]:
            runs, program = [rank[name] for rank in ranks], self._programs[name]
            came, warned = verdict(runs), [text for run in runs for text in run.warned]
            said = [*(run.error for run in runs if run.error), *warned]
            if came not in program.expected:
                found[name] = f"{came} {said[:1]}"
            elif came == "complete" and warned and not program.tells:
                found[name] = f"warned: {warned[0]}"
            elif program.tells and not any(not missing(text, program.tells) for text in said):
                found[name] = f"{program.tells} are not told: {said}"
        return found


def _run_programs(rank: int, world: int, module: str) -> dict[str, Run]:
    runs: dict[str, Run] = import_module(module).program.run(rank, world)
    return runs


def ids(batch: Any) -> Iterator[int]:
    """Yield the numbers of a batch's samples."""
    if isinstance(batch, torch.Tensor):
        yield from batch.flatten().tolist()
    elif isinstance(batch, Mapping):
        yield from ids(batch["id"]) if "id" in batch else [number_of(batch)]
    elif isinstance(batch, list):
        for item in batch:
            yield from ids(item)
    elif isinstance(batch, tuple):
        yield from ids(batch[0])
    else:
        yield int(getattr(batch, "id", batch))


def run_job(rank: int, world: int, program: Callable[[Job], None], all_reduce: AllReduce = "each step") -> Run:
    """Run a program on this rank to its end, or until a rank raises."""
    seed_ambient(1000 + rank)
    begin_anew()
    job = Job(rank, world, all_reduce)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program(job)
            job.leave()
        except _OthersStopped:
            pass
        except DDPPatchError as error:
            job.run.error = f"{type(error).__name__}: {error}"
            job.leave()
        except Exception as error:  # noqa: BLE001 - whatever it is, the judge names it
            job.run.failed = f"{type(error).__name__}: {error}"
            job.leave()
    job.run.warned = [str(one.message) for one in caught if one.category.__module__ == errors.__name__]
    return job.run


def verdict(runs: Sequence[Run]) -> str:
    """Return "complete", "error" or "warned", or what went wrong.

    An error counts if a rank raised while no rank, or not every rank, had left the epoch in which the first sample was
    lost. Where ranks meet in each step, all stop at that moment; elsewhere the others go on, to their end.

    Args:
        runs: Those of all ranks.
    """
    if failed := sorted({run.failed for run in runs if run.failed}):
        return f"failed: {'; '.join(failed)}"
    raised = min(len(run.epochs) - 1 for run in runs) if any(run.error for run in runs) else None
    for number in range(max(len(run.epochs) for run in runs)):
        if raised is not None and number >= raised:
            break
        if lost := _lost([run.epochs[number] for run in runs if number < len(run.epochs)], len(runs)):
            if any(f"explain {RankMismatchWarning.__name__}" in text for run in runs for text in run.warned):
                return "warned"
            late = "" if raised is None else f"; error in epoch {raised}"
            stuck = "; ranks wait for others that have ended" if any(run.is_stuck for run in runs) else ""
            return f"lost in silence: epoch {number}: {lost}{late}{stuck}"
    if raised is None and any(run.is_stuck for run in runs):
        return "lost in silence: ranks wait for others that have ended"
    if raised is None and (owed := next((run.owed for run in runs if run.owed), "")):
        return f"lost in silence: {owed}"
    return "complete" if raised is None else "error"


def _lost(epochs: Sequence[Epoch], ranks: int) -> str:
    """Return what is wrong with an epoch, given what each rank has of it."""
    if len(epochs) < ranks:
        return f"{ranks - len(epochs)} of {ranks} ranks did not begin it"
    due, given = Counter(epochs[0].due), Counter(sample for epoch in epochs for sample in epoch.samples)
    missing = 0 if epochs[0].is_part else (due - given).total()
    extra = (given - due).total()
    steps = [epoch.steps for epoch in epochs]
    if missing or extra > epochs[0].padding or (len(set(steps)) > 1 and not epochs[0].is_uneven):
        return f"{missing} of {due.total()} lost, {extra} too many, steps {steps}"
    return ""
