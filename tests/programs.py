"""User programs on real ranks: what users do after the patch, and a judge of what their ranks were given."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.compat.torch_groups import default_store
from ddp_patch.errors import DDPPatchError

__all__ = ["Program", "Run", "run_programs", "verdict"]

_MOST_S = 20.0


@dataclass
class Run:
    """What a rank was given: of each epoch its samples and steps, and the error that ended it, if one did."""

    epochs: list[tuple[list[int], int]] = field(default_factory=list)
    told: str = ""


@dataclass(frozen=True)
class Program:
    """A user's program.

    Attributes:
        make: Makes the loader.
        before: What a rank does before each epoch, with the rank, the given loader, the patched one and the epoch.
        learn: What it does with the samples of each batch.
        options: Of the patch.
        epochs: How many epochs are trained.
        expected: How often each sample comes in an epoch, or None if that is once for each of the dataset.
        steps: How many batches an epoch has at most; None for all.
        pause_s: How long a rank waits before each step, as a function of the rank.
        steps_together: Whether no rank begins a step before all have ended the one before, as in DDP.
    """

    make: Callable[[int], Any]
    before: Callable[[int, Any, Any, int], None] = lambda rank, raw, loader, epoch: None
    learn: Callable[[int, Any, Any, list[int]], None] = lambda rank, raw, loader, batch: None
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 3
    expected: Callable[[int], Sequence[int]] | None = None
    steps: int | None = None
    pause_s: Callable[[int], float] = lambda rank: 0.0
    steps_together: bool = True


class _Meeting:
    """Lets ranks step together as DDP does, until one of them stops: its all-reduce would end the others, too."""

    def __init__(self, name: str, world_size: int) -> None:
        self._name, self._size, self._store = f"programs/{name}", world_size, default_store()
        self._number = 0

    def meet(self) -> None:
        self._number += 1
        key, until = f"{self._name}/{self._number}", time.monotonic() + _MOST_S
        self._store.add(key, 1)
        while self._store.add(key, 0) < self._size and not self._store.add(f"{self._name}/stopped", 0):
            if time.monotonic() > until:
                raise TimeoutError(f"the other ranks did not come to step {self._number} of {self._name}")

    def stop(self) -> None:
        self._store.add(f"{self._name}/stopped", 1)


def _indices(batch: Any) -> list[int]:
    return [int(index) for index in (batch[0] if isinstance(batch, tuple) else batch)]


def run_program(name: str, program: Program, rank: int, world_size: int) -> Run:
    """Run a program on this rank."""
    seed_ambient(rank)
    meeting, run = _Meeting(name, world_size), Run()
    raw = program.make(rank)
    try:
        loader = patch_dataloader_to_ddp(raw, **program.options)
        for epoch in range(program.epochs):
            run.epochs.append(([], 0))
            program.before(rank, raw, loader, epoch)
            samples: list[int] = []
            for step, batch in enumerate(loader, 1):
                samples += _indices(batch)
                run.epochs[-1] = (samples, step)
                time.sleep(program.pause_s(rank))
                program.learn(rank, raw, loader, _indices(batch))
                if program.steps_together:
                    meeting.meet()
                if step == program.steps:
                    break
            meeting.meet()
    except DDPPatchError as error:
        run.told = f"{type(error).__name__} in epoch {len(run.epochs) - 1}: {error}"
        meeting.stop()
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return run


def run_programs(rank: int, world_size: int, programs: dict[str, Program]) -> dict[str, Run]:
    """Run programs one after the other, each with loaders of its own."""
    return {name: run_program(name, program, rank, world_size) for name, program in programs.items()}


def verdict(runs: Sequence[Run], expected: Sequence[Sequence[int]]) -> str:
    """Return "right" or "told", or what was lost in silence.

    Told counts within the epoch in which the first sample would be lost, before its rank began the next.

    Args:
        runs: Those of all ranks.
        expected: The samples of each epoch, as often as they come.
    """
    told = [len(run.epochs) - 1 for run in runs if run.told]
    for epoch, samples in enumerate(expected):
        if told and epoch >= min(told):
            return "told"
        of_ranks = [run.epochs[epoch] for run in runs]
        steps = {steps for _, steps in of_ranks}
        found = Counter(sample for given, _ in of_ranks for sample in given)
        if len(steps) > 1 or found != Counter(samples):
            lost = sum((Counter(samples) - found).values())
            return f"lost in silence: {lost} of {len(samples)} in epoch {epoch}, steps {sorted(steps)}"
    return "told" if told else "right"
