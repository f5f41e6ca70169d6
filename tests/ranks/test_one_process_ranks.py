"""Unedited scripts of one process on several real ranks: every rank ends with the model and the numbers of one rank."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from divided_programs import PROGRAMS, RANDOM, run_program
from quick import run_ranks, soaked
from scripts_of_one import SCRIPTS, run
from torch import nn
from torch.utils.data import DataLoader
from zoo import seed_ambient

from ddp_patch import autopatch, leave_alone, unpatched
from ddp_patch.errors import RankMismatchError, WorldError
from ddp_patch.running import comparing


def results(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    own = folder / f"rank-{rank}"
    own.mkdir()
    found = {}
    for name in SCRIPTS:
        with autopatch(as_one_process=True):
            found[name] = run(name, own, folder)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run_ranks(results, 1, tmp_path_factory.mktemp("alone"))
    return found


@pytest.mark.parametrize("world_size", [soaked(2), 3, soaked(4)])
def test_every_rank_ends_with_the_model_of_one_rank(world_size: int, tmp_path: Path, alone: dict[str, Any]) -> None:
    ranks = run_ranks(results, world_size, tmp_path)
    for name in SCRIPTS:
        near = 1e-4 if "float32" in name else 1e-9
        for of_rank in ranks:
            for found, wanted in zip(of_rank[name]["parameters"], alone[name]["parameters"], strict=True):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=near, err_msg=name)
            np.testing.assert_allclose(of_rank[name]["history"], alone[name]["history"], rtol=near, err_msg=name)


def programs(rank: int, world_size: int) -> dict[str, Any]:
    sources = {name: source for name, (_, source) in PROGRAMS.items()}
    return {name: run_program(source) for name, source in {**sources, **RANDOM}.items()}


@pytest.mark.parametrize("world_size", [2, soaked(3), soaked(4)])
def test_calls_are_divided_where_that_is_the_same(world_size: int) -> None:
    (alone,), ranks = run_ranks(programs, 1), run_ranks(programs, world_size)
    for name, (fate, _) in PROGRAMS.items():
        told = ranks[0][name]["told"]
        assert not fate or ("divided over" in told) is (fate == "divided"), f"{name}: {told}"
        assert fate in told, f"{name}: {told}"
        for of_rank in ranks:
            for found, wanted in zip(of_rank[name]["found"], alone[name]["found"], strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12, err_msg=name)
            assert of_rank[name]["later"] == alone[name]["later"], name
    for name in PROGRAMS:
        assert "the same but for dropout" not in ranks[0][name]["told"], name
    for name in RANDOM:
        assert "divided over" in ranks[0][name]["told"], name
        assert "the same but for dropout (random numbers drawn within divided calls)" in ranks[0][name]["told"], name
        assert all(of_rank[name]["found"] == ranks[0][name]["found"] for of_rank in ranks), name
        assert all(of_rank[name]["later"] == ranks[0][name]["later"] for of_rank in ranks), name


# ---- random numbers ----


def drawn_within(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.weight * torch.rand_like(rows)

    torch.manual_seed(3)
    with autopatch(as_one_process=True):
        model, found = Noise(), []
        for _ in range(3):
            found = model(torch.zeros(7)).tolist()
        return found, torch.rand(2).tolist()


def test_rows_of_other_ranks_get_other_random_numbers_and_all_go_on_alike() -> None:
    first, other = run_ranks(drawn_within, 2)
    assert first == other
    assert len({*first[0]}) == 7


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def drawing_twice(rank: int, world_size: int) -> list[str]:
    rows, told = torch.ones(5, 3, 4), Told()
    logging.getLogger("ddp_patch.autopatch").addHandler(told)
    with autopatch(as_one_process=True):
        for model in (nn.LSTM(4, 2, num_layers=2, dropout=0.5), nn.LSTM(4, 2), nn.Dropout(0.5)):
            for _ in range(8):
                model(rows)
    return [text for text in told.texts if "the same but for dropout" in text]


def test_a_model_that_draws_says_so_once_and_one_that_draws_nothing_does_not() -> None:
    (line,), others = run_ranks(drawing_twice, 2)
    assert "LSTM: calls are divided, the same but for dropout (random numbers drawn within divided calls)." in line
    assert others == []


# ---- what calls leave ----


def held_by_others(rank: int, world_size: int) -> str:
    """Let a group hold the tensors that it is given, as threads of gloo may for a moment."""
    held: list[Any] = []
    gather = dist.all_gather

    def holding(*args: Any, **options: Any) -> Any:
        held.append(args)
        return gather(*args, **options)

    with patch.object(dist, "all_gather", holding), autopatch(as_one_process=True) as summary:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        for _ in range(8):
            model(torch.randn(9, 2)).sum().backward()
    return " ".join(str(summary).split())


def test_tensors_that_a_group_still_holds_are_not_what_a_call_leaves() -> None:
    # Also, the bias before batch normalisation has a gradient of rounding alone.
    for summary in run_ranks(held_by_others, 3):
        assert "Sequential: 8 calls, 7 divided over 3 ranks" in summary


def rounded(rank: int, world_size: int) -> str:
    with patch.dict(comparing._CLOSE, {torch.float32: 0.0}), autopatch(as_one_process=True) as summary:
        model = nn.Sequential(nn.Linear(9, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        trained(model, torch.randn(31, 9), 9)
        assert all(each.dtype != torch.float64 for each in (*model.parameters(), *model.buffers()))
        assert torch.get_default_dtype() == torch.float32
    return str(summary)


def test_what_differs_by_rounding_alone_is_the_same_in_double_precision() -> None:
    for summary in run_ranks(rounded, 2):
        assert "Sequential: 9 calls, 8 divided over 2 ranks" in summary


def keeping_later(rank: int, world_size: int) -> tuple[str, list[float]]:
    kept: list[Any] = []

    class Keeps(nn.Linear):
        def forward(self, rows: Any) -> Any:
            out = super().forward(rows)
            if begins:
                kept.append(out)
            return out * 2

    begins: list[bool] = []
    with autopatch(as_one_process=True) as summary:
        model = Keeps(2, 1)
        for _ in range(4):
            model(torch.ones(8, 2))
        begins.append(True)
        for _ in range(8):
            model(torch.ones(8, 2))
    return str(summary), [len(each) for each in kept[-5:]]


def test_a_model_that_later_keeps_tensors_is_whole_from_then_on() -> None:
    for summary, sizes in run_ranks(keeping_later, 2):
        assert "Keeps: 12 calls, 6 divided over 2 ranks" in summary
        assert "it leaves a tensor that requires a gradient elsewhere" in " ".join(summary.split())
        assert sizes == [8] * 5


# ---- what is told ----


def trained(model: Any, rows: Any, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(rows).pow(2).mean().backward()
        optimizer.step()


def other_ways(rank: int, model: Any) -> None:
    trained(model, torch.ones(8, 2), 3 + rank)
    trained(nn.Sequential(nn.Linear(2, 1)), torch.ones(8, 2), 2)


def left_earlier(rank: int, model: Any) -> None:
    trained(model, torch.ones(8, 2), 3 + rank)


def drifting(rank: int, model: Any) -> None:
    for _ in range(2):
        trained(model, torch.ones(8, 2), 3)
        with torch.no_grad():
            model.weight += float(rank)


def other_rows(rank: int, model: Any) -> None:
    trained(model, torch.rand(8, 2, generator=torch.Generator().manual_seed(rank)), 4)


class Later(nn.Module):
    """Compares samples from some call on, which no attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(2, 1), [0]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(rows)
        return out - out.mean() if COMPARES else out


COMPARES: list[bool] = []


def later(rank: int, model: Any) -> None:
    model = Later()
    COMPARES.clear()
    trained(model, torch.arange(16.0).view(8, 2), 5)
    COMPARES.append(True)
    trained(model, torch.arange(16.0).view(8, 2), 4)


def parallel(rank: int, model: Any) -> None:
    nn.parallel.DistributedDataParallel(nn.Linear(2, 1))


def spawning(rank: int, model: Any) -> None:
    multiprocessing: Any = torch.multiprocessing
    multiprocessing.spawn(print, nprocs=2)


def grouped(rank: int, model: Any) -> None:
    dist.init_process_group("gloo")


WRONG: list[tuple[Callable[..., None], type[Exception], list[str]]] = [
    (
        other_ways,
        RankMismatchError,
        ["rank 0 makes a step of an optimizer", "rank 1 compares a call of Linear", "after 4 calls"],
    ),
    (
        left_earlier,
        RankMismatchError,
        ["rank 0 has come to its end", "rank 1 compares a call of Linear", "after 3 calls"],
    ),
    (drifting, RankMismatchError, ["of rank 1 is", "of its norm apart from rank 0's"]),
    (other_rows, RankMismatchError, ["makes a step of an optimizer, gradient 0 of SGD of rank 1", "nobody has seeded"]),
    (later, RankMismatchError, ["Call 8 of Later", "what it returns differs by", "Call 4 was the last", "unpatched()"]),
    (parallel, WorldError, ["wraps a model in DistributedDataParallel", "--mode ranks"]),
    (spawning, WorldError, ["calls spawn()", "2 ranks"]),
    (grouped, WorldError, ["calls init_process_group()", "--mode ranks"]),
]


def wrong(rank: int, world_size: int) -> list[tuple[type[BaseException] | type[None], str]]:
    errors: list[tuple[type[BaseException] | type[None], str]] = []
    for function, _, _ in WRONG:
        torch.manual_seed(0)
        model: Any = nn.Linear(2, 1)
        try:
            with autopatch(as_one_process=True, timeout=60):
                function(rank, model)
        except Exception as error:  # noqa: BLE001 - its kind is compared
            errors.append((type(error), "\n".join([str(error), *getattr(error, "__notes__", [])])))
        else:
            errors.append((type(None), f"{function.__name__} raised nothing"))
    return errors


def test_what_cannot_be_the_training_of_one_process_is_an_error() -> None:
    for rank in run_ranks(wrong, 2):
        for (_, kind, words), (found, text) in zip(WRONG, rank, strict=True):
            assert found is kind, text
            for word in words:
                assert word in text


def honest(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    seed_ambient(3 + rank)
    told = Told()
    logger = logging.getLogger("ddp_patch.autopatch")
    logger.addHandler(told)
    logger.setLevel(logging.INFO)
    found: dict[str, Any] = {}
    with autopatch(as_one_process=True, timeout=60) as summary:
        samples: Any = torch.randn(24, 2)
        loader: Any = DataLoader(samples, batch_size=5, shuffle=True)
        model = nn.Linear(2, 1)
        found["rows"] = [batch.tolist() for batch in loader]
        for batch in loader:
            trained(model, batch, 1)
        with unpatched():
            trained(model, samples, 4)
        found["left"] = [len(batch) for batch in leave_alone(DataLoader(samples, batch_size=9))]
        found["after"] = torch.rand(1).item()
        torch.save(model.state_dict(), folder / f"{rank}.pt")
        found["is there"] = (folder / f"{rank}.pt").exists()
        found["is initialized"] = dist.is_initialized() if rank < 0 else None
    found["is there later"] = os.path.exists(folder / f"{rank}.pt")
    found["told"], found["table"] = told.texts, " ".join(str(summary).split())
    return found


def test_what_is_alike_and_what_is_told(tmp_path: Path) -> None:
    first, other = run_ranks(honest, 2, tmp_path)
    assert first["rows"] == other["rows"]
    assert (first["after"], first["left"]) == (other["after"], [9, 9, 6])
    assert (first["is there"], other["is there"]) == (True, True)  # each sees what it has saved
    assert (first["is there later"], other["is there later"]) == (True, False)
    assert not other["told"]
    for word in (
        "The ranks were seeded differently: all go on with the seed of rank 0.",
        "2 ranks train as one process",
    ):
        assert sum(word in text for text in first["told"]) == 1, word
    assert "Linear: 5 calls, 4 divided over 2 ranks" in first["table"]
    assert "2 ranks trained as one process: 9 optimizer steps" in first["table"]
