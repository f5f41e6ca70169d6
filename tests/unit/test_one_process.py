"""Parts of a script that runs as one process, without other ranks."""

import copy
import gc
import os
import random
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from messages import raises
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import autopatch
from ddp_patch.errors import (
    InvalidOptionError,
    RankMismatchError,
    UnsupportedLoaderError,
    WorldError,
)
from ddp_patch.running.context import running
from ddp_patch.running.gradients import Gradients, StepWeight
from ddp_patch.running.launch import is_rank, take_slurm
from ddp_patch.running.loader_reports import Patterns
from ddp_patch.running.lockstep import Act, Counts
from ddp_patch.running.one_process import Mode, OneProcessOptions, _backend_here
from ddp_patch.running.random_numbers import RandomNumbers, seed_all
from ddp_patch.running.replicas import Replicas, batch_norms, models_of, sync_batch_norms

TRAIN, TEST = "train", "test"
BACKWARD, END = "backward", "end"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ([(TRAIN, 1.0), BACKWARD, (TRAIN, 0.8), BACKWARD], [1.0, 0.8]),
        ([BACKWARD], [1.0]),
        ([(TRAIN, 0.8), BACKWARD, BACKWARD, BACKWARD], [0.8, 0.8, 0.8]),  # several losses of a batch
        ([(TRAIN, 0.8), (TRAIN, 0.8), BACKWARD], [0.8]),  # one loss of two batches
        ([(TRAIN, 1.0), (TRAIN, 0.8), BACKWARD], "several batches of train"),
        ([(TEST, 1.2), (TRAIN, 0.8), BACKWARD, (TRAIN, 0.9), BACKWARD], [0.8, 0.9]),  # a look at another loader
        ([(TEST, 1.2), (TRAIN, 0.8), BACKWARD, (TEST, 1.2), (TRAIN, 0.8), BACKWARD], "test and train"),
        ([(TEST, 1.0), (TEST, 1.2), (TEST, END), (TRAIN, 0.8), BACKWARD], [0.8]),  # an evaluation
        ([(TRAIN, 1.0), (TRAIN, 1.2), (TRAIN, END), BACKWARD], "several batches of train"),
        ([(TRAIN, 1.0), (TRAIN, 1.0), BACKWARD, (TRAIN, 1.0), BACKWARD, (TRAIN, END), BACKWARD], [1.0, 1.0, 1.0]),
    ],
)
def test_the_weight_is_that_of_the_batch_that_was_taken(
    script: list[str | tuple[str, float | str]], expected: list[float] | str
) -> None:
    step = StepWeight()
    passes = {name: step.begin(name) for name in (TRAIN, TEST)}

    def weights() -> list[float]:
        found = []
        for event in script:
            if isinstance(event, str):
                found.append(step.of_backward())
            elif isinstance(event[1], str):
                step.end(passes[event[0]])
            else:
                step.take(passes[event[0]], event[1])
        return found

    if isinstance(expected, str):
        with pytest.raises(UnsupportedLoaderError, match=expected):
            weights()
    else:
        assert weights() == expected


def test_batches_that_are_kept_are_not_used_again_with_another_weight() -> None:
    batches = [{"x": torch.zeros(2)}, {"x": torch.zeros(1)}]
    for weights, is_kept in (((1.0, 0.8), True), ((0.8, 0.8), True), ((1.0, 0.8), False)):
        step = StepWeight()
        train = step.begin(TRAIN)
        for weight, batch in zip(weights, batches, strict=True):
            step.take(train, weight, batch if is_kept else copy.deepcopy(batch))
            step.of_backward()
        step.end(train)
        if is_kept and len(set(weights)) > 1:
            with pytest.raises(UnsupportedLoaderError, match="used again after its pass"):
                step.of_backward()
        else:
            assert step.of_backward() == 0.8  # all data at once


class Meeting:
    """Stands for the ranks: it keeps what this one compares, and says what all have."""

    def __init__(self, of_ranks: list[list[int]]) -> None:
        self.compared: list[int] = []
        self.of_ranks = of_ranks

    def meet(self, act: Act, usual: int) -> bool:
        self.compared.append(usual)
        return not self.of_ranks

    def gathered(self, value: object) -> list[list[int]]:
        return self.of_ranks


def test_parameters_are_compared_after_passes_and_at_the_end() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    gradients = Gradients(None, Counts(), print, print, print)
    gradients.add(optimizer)
    ranks = Meeting([])
    replicas = Replicas(cast(Any, ranks), gradients, Counts(), print)
    for has_ended, act in ((False, Act.LOADER), (True, Act.LOADER), (False, Act.LOADER), (False, Act.END)):
        replicas.may_have_changed |= has_ended
        replicas.meet(act)
    nothing, sums = hash(()) >> 2, hash((0,)) >> 2
    assert ranks.compared == [nothing, sums, nothing, sums]
    # A rank that has not collected all garbage yet has more parameters.
    Replicas(cast(Any, Meeting([[0], [1, 0]])), gradients, Counts(), print).meet(Act.END)
    with pytest.raises(RankMismatchError, match=r"parameter 0, of shape \(1,\), between rank 0 and ranks 1, 2"):
        Replicas(cast(Any, Meeting([[0], [1], [1]])), gradients, Counts(), print).meet(Act.END)


def test_models_are_evaluated_when_all_are_in_evaluation_mode() -> None:
    first, second = nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)
    gradients = Gradients(None, Counts(), print, print, print)
    replicas = Replicas(None, gradients, Counts(), print)
    assert not replicas.are_evaluated  # there are none
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    gradients.add(optimizer)
    found = []
    for modes in ((True, True), (False, True), (False, False)):
        first.train(modes[0])
        second.train(modes[1])
        found.append(replicas.are_evaluated)
    assert found == [False, False, True]
    first[0].train()
    assert not replicas.are_evaluated
    first[0].eval()
    del optimizer
    assert replicas.are_evaluated  # after the function that trained has returned


def test_models_are_found_by_their_parameters() -> None:
    first, loss = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.MSELoss()
    second = copy.deepcopy(first)
    wrapped = nn.ModuleDict({"model": second})
    parameters = [*second.parameters(), *first.parameters()]
    assert models_of(parameters) == [wrapped, first]
    assert models_of([nn.Parameter(torch.zeros(1))]) == []
    assert batch_norms([wrapped, loss]) == ["ModuleDict.model.1"]
    with pytest.raises(UnsupportedLoaderError, match="accelerators only"):
        sync_batch_norms([first])


def test_a_loader_that_is_dropped_keeps_no_data() -> None:
    def used() -> Any:
        loader = DataLoader(TensorDataset(torch.randn(6, 1)), batch_size=2)
        list(loader)
        with torch.no_grad():
            list(loader)
        return weakref.ref(loader.dataset)

    with autopatch(as_one_process=True):
        data = used()
        gc.collect()
        assert data() is None


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), np.random.rand(), random.random()


def test_a_rank_draws_its_own_numbers_in_divided_passes_alone() -> None:
    found = []
    for rank in range(2):
        seed_all(5)
        numbers = RandomNumbers(5, rank)
        first = numbers.enter(own=True)
        before = drawn()
        numbers.begin_own()
        own = drawn()
        inner = numbers.enter(own=False)
        within = drawn()
        numbers.leave(inner)
        later = drawn()
        numbers.leave(first)
        found.append((before, own, within, later, drawn()))
    for place, is_own in enumerate((False, True, False, True, False)):
        a, b = found[0][place], found[1][place]
        assert (set(a) & set(b) == set()) if is_own else a == b


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "n7"}, None),  # the batch script itself,
        (
            {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n7"},
            ("3", "4", "1", "n7"),
        ),
        (
            {
                "SLURM_PROCID": "3",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_STEP_NODELIST": "n[7-8]",
                "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
            },
            ("3", "4", "0", "10.0.0.7"),
        ),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[7-8]"}, "MASTER_ADDR"),
    ],
)
def test_tasks_of_slurm_are_ranks(
    environment: dict[str, str], expected: tuple[str, ...] | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    monkeypatch.setattr(os, "environ", environment)
    if isinstance(expected, str):
        with pytest.raises(WorldError, match=expected):
            take_slurm()
        return
    take_slurm()
    assert is_rank() == (expected is not None)
    if expected is not None:
        assert tuple(environment[name] for name in names) == expected
        assert 20_000 <= int(environment["MASTER_PORT"]) < 30_000


# How many GPUs there are, LOCAL_RANK, and which one the rank takes.
GPUS: list[tuple[int, str | None, list[int]]] = [
    (0, None, []),
    (0, "1", []),
    (1, None, [0]),
    (1, "3", [0]),  # a launcher may show each rank its own one
    (4, "3", [3]),
]


def sees(monkeypatch: pytest.MonkeyPatch, count: int, local_rank: str | None) -> list[int]:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    return chosen


@pytest.mark.parametrize(("count", "local_rank", "taken"), GPUS)
def test_a_rank_takes_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, count: int, local_rank: str | None, taken: list[int]
) -> None:
    chosen = sees(monkeypatch, count, local_rank)
    assert _backend_here() == ("cpu:gloo,cuda:nccl" if count else "gloo")
    assert chosen == taken


@pytest.mark.parametrize("local_rank", [None, "4", "x", "-1"])
def test_a_rank_does_not_guess_which_gpu_is_its_own(monkeypatch: pytest.MonkeyPatch, local_rank: str | None) -> None:
    sees(monkeypatch, 4, local_rank)
    with raises(WorldError, ("4 GPUs", f"LOCAL_RANK={local_rank}", "from 0 to 3"), "torchrun"):
        _backend_here()


def test_one_rank_runs_without_a_process_group() -> None:
    model = nn.Linear(1, 1)
    batches = torch.arange(7.0).reshape(7, 1)
    loader: DataLoader[torch.Tensor] = DataLoader(list(batches), batch_size=3)  # type: ignore[arg-type]  # a list is one
    with autopatch(as_one_process=True) as summary:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in loader:
            model(batch).mean().backward()
            optimizer.step()
        with torch.no_grad():
            assert [len(batch) for batch in loader] == [3, 3, 1]
    assert "1 rank trained as one process: 3 optimizer steps." in str(summary)
    assert "whole under no_grad, else divided over 1 rank" in " ".join(str(summary).split())
    backward = torch.autograd.backward
    with autopatch():
        assert torch.autograd.backward is backward


@pytest.mark.parametrize("options", [{"share": "samples"}, {"dry_run": True}, {"rank": 0, "num_replicas": 2}])
def test_options_that_one_process_decides_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOptionError, match=next(iter(options))), autopatch(as_one_process=True, **options):  # type: ignore[arg-type]  # several kinds
        pass


VOICE = """
import os, sys
from pathlib import Path
from ddp_patch.running.voice import Voice
voice = Voice(1, Path(sys.argv[2]))
print("early")
print("error", file=sys.stderr)
getattr(voice, sys.argv[1])()
print("late")
os.system("echo of a child")
voice.report("reported")
"""


def test_a_silent_rank_speaks_only_of_errors(tmp_path: Path) -> None:
    for act in ("release", "silence"):
        command = [sys.executable, "-c", VOICE, act, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - our own
        assert done.stderr.splitlines()[-1] == "[rank 1] reported"
        if act == "release":
            assert sorted(done.stdout.split("\n")) == ["", "early", "late", "of a child"]
            assert done.stderr.startswith("error\n")
            assert not list(tmp_path.iterdir())
    assert not done.stdout
    assert "error" not in done.stderr
    assert set((tmp_path / "rank-1.log").read_text().splitlines()) == {"early", "error", "late", "of a child"}


def test_orders_follow_from_a_seed_that_is_given() -> None:
    def order(seed: int | None) -> list[int]:
        loader: Any = DataLoader(range(20), batch_size=4, shuffle=True)  # type: ignore[arg-type]  # a range is one
        with autopatch(as_one_process=True, seed=seed):
            return [int(item) for batch in loader for item in batch]

    found = []
    for manual in (1, 2):
        torch.manual_seed(manual)
        found.append((order(7), order(None)))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]
    one = running(Patterns(), {"share": "batches"}, OneProcessOptions(Mode.ONE_PROCESS))
    with pytest.raises(InvalidOptionError, match="share='batches'"), one:  # as a command line, which knows no mode yet
        pass
