"""Programs of users on real ranks: what each rank was given, and one judge of it."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from users import N, begin_anew
from zoo import seed_ambient

from ddp_patch import errors, patch_dataloader_to_ddp
from ddp_patch.errors import DDPPatchError

__all__ = [
    "Case",
    "Epoch",
    "Me",
    "Run",
    "Together",
    "cases_of",
    "disappointed",
    "ids",
    "run_case",
    "run_cases",
    "verdict",
]

# When the ranks meet, as by an all-reduce: in each step as in DDP, after each epoch, or never.
Together: TypeAlias = Literal["steps", "epochs", "never"]

_TIMEOUT_S = 5.0  # that ranks wait for each other where this package lets them
_FEW = 4  # ways to make a loader, which are all tried on 2 and on 3 ranks
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
        told: The error of this package that ended it.
        failed: Another error that ended it.
        is_stuck: Whether it waited for ranks that had ended.
        warned: Warnings of this package.
        patches: How many loaders it patched.
        owed: What some rank must be told by the end, though each epoch is whole.
    """

    epochs: list[Epoch] = field(default_factory=list)
    told: str = ""
    failed: str = ""
    is_stuck: bool = False
    warned: list[str] = field(default_factory=list)
    patches: int = 0
    owed: str = ""


class _OthersStopped(Exception):  # noqa: N818 - no error: their launcher would end this rank
    """Another rank raised, or has ended while this one waits for it."""


class Me:
    """A rank, as a user's program sees it.

    Attributes:
        rank: Its number.
        world: How many there are.
        run: What comes of it.
    """

    def __init__(self, rank: int, world: int, together: Together) -> None:
        self.rank, self.world, self.run = rank, world, Run()
        self._together = together
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
            if self._together == "steps" and threading.get_ident() == self._thread:
                self.meet()
            if number == most:
                break

    def train(self, loader: Iterable[Any], due: Iterable[int] = range(N), most: int | None = None, **how: Any) -> Epoch:
        """Train an epoch, or begin one and break it off after so many steps."""
        epoch = self.begin(due, is_part=most is not None, **how)
        for _ in self.step(epoch, loader, most):
            pass
        self.end()
        return epoch

    def end(self) -> None:
        """End an epoch."""
        if self._together == "epochs":
            self.meet()

    def meet(self) -> None:
        """Wait for the others in a collective, as a training does."""
        goes_on, stopped = self._counted("goes on")
        if goes_on < self.world:
            self.run.is_stuck = not stopped
            raise _OthersStopped

    def leave(self) -> None:
        """Take part once more, so that nobody waits for this rank in vain."""
        self._counted("stopped" if self.run.told or self.run.failed else "ended")

    def _counted(self, this: str) -> tuple[int, int]:
        """Return how many ranks go on and how many stopped."""
        counts = torch.tensor([this == "goes on", this == "stopped"], dtype=torch.int64)
        dist.all_reduce(counts)
        return int(counts[0]), int(counts[1])


@dataclass(frozen=True)
class Case:
    """A program, and what may come of it.

    Attributes:
        program: What a rank does.
        expected: "right", "told", or both.
        together: When the ranks meet.
        is_quiet: Whether nothing may be warned of.
        world_sizes: On how many ranks it is run.
    """

    program: Callable[[Me], None]
    expected: frozenset[str]
    together: Together = "steps"
    is_quiet: bool = False
    world_sizes: tuple[int, ...] = (2, 3)


def cases_of(cases: dict[str, Case]) -> Callable[..., Callable[[Any], Any]]:
    """Return a decorator that notes a program among these cases: once, or for each way ``of`` to make its loader.

    Where there are many ways, every other is tried on 2 ranks, and those between on 3.
    """

    def noted(expected: str, of: Mapping[str, Any] | None = None, **how: Any) -> Callable[[Any], Any]:
        def note(program: Any) -> Any:
            name, allowed = program.__name__.replace("_", " "), frozenset(expected.split(" or "))
            for place, (kind, make) in enumerate(({"": None} if of is None else of).items()):
                sizes = {"world_sizes": (2 + place % 2,)} if of is not None and len(of) > _FEW else {}
                run = program if of is None else lambda me, make=make: program(me, make)
                cases[f"{name}: {kind}".removesuffix(": ")] = Case(run, allowed, **{**sizes, **how})
            return program

        return note

    return noted


def ids(batch: Any) -> Iterator[int]:
    """Yield the numbers of a batch's samples."""
    if isinstance(batch, torch.Tensor):
        yield from batch.flatten().tolist()
    elif isinstance(batch, Mapping):
        yield from ids(batch["id"])
    elif isinstance(batch, list):
        for item in batch:
            yield from ids(item)
    elif isinstance(batch, tuple):
        yield from ids(batch[0])
    else:
        yield int(getattr(batch, "id", batch))


def run_case(rank: int, world: int, program: Callable[[Me], None], together: Together) -> Run:
    """Run a program on this rank to its end, or until a rank raises."""
    seed_ambient(1000 + rank)
    begin_anew()
    me = Me(rank, world, together)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program(me)
            me.leave()
        except _OthersStopped:
            pass
        except DDPPatchError as error:
            me.run.told = f"{type(error).__name__}: {error}"
            me.leave()
        except Exception as error:  # noqa: BLE001 - whatever it is, the judge tells it
            me.run.failed = f"{type(error).__name__}: {error}"
            me.leave()
    me.run.warned = [str(one.message) for one in caught if one.category.__module__ == errors.__name__]
    return me.run


def run_cases(rank: int, world: int, cases: Mapping[str, Case]) -> dict[str, Run]:
    """Run programs one after the other, each with loaders of its own, and whatever became of those before."""
    runs = {}
    for name, case in cases.items():
        if world in case.world_sizes:
            runs[name] = run_case(rank, world, case.program, case.together)
            dist.monitored_barrier(timeout=timedelta(seconds=_LATE_S))
    return runs


def verdict(runs: Sequence[Run]) -> str:
    """Return "right" or "told", or what went wrong.

    Told counts if a rank raised while no rank, or not every rank, had left the epoch in which the first sample was
    lost. Where ranks meet in each step, all stop at that moment; elsewhere the others go on, to their end.

    Args:
        runs: Those of all ranks.
    """
    if failed := sorted({run.failed for run in runs if run.failed}):
        return f"failed: {'; '.join(failed)}"
    told = min(len(run.epochs) - 1 for run in runs) if any(run.told for run in runs) else None
    for number in range(max(len(run.epochs) for run in runs)):
        if told is not None and number >= told:
            break
        if lost := _lost([run.epochs[number] for run in runs if number < len(run.epochs)], len(runs)):
            late = "" if told is None else f"; told in epoch {told}"
            stuck = "; ranks wait for others that have ended" if any(run.is_stuck for run in runs) else ""
            return f"lost in silence: epoch {number}: {lost}{late}{stuck}"
    if told is None and any(run.is_stuck for run in runs):
        return "lost in silence: ranks wait for others that have ended"
    if told is None and (owed := next((run.owed for run in runs if run.owed), "")):
        return f"lost in silence: {owed}"
    return "right" if told is None else "told"


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


def disappointed(ranks: Sequence[Mapping[str, Run]], cases: Mapping[str, Case]) -> dict[str, str]:
    """Return each case that is not as expected, and what came of it."""
    found = {}
    for name in ranks[0]:
        runs, case = [rank[name] for rank in ranks], cases[name]
        said, warned = verdict(runs), [text for run in runs for text in run.warned]
        if said not in case.expected:
            found[name] = f"{said} {[run.told for run in runs if run.told][:1]}"
        elif case.is_quiet and warned:
            found[name] = f"warned: {warned[0]}"
    return found
