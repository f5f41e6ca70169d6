"""Unedited scripts of one process on several real ranks: every rank ends with the model of one rank."""

import gc
import itertools
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from quick import run_ranks, soaked
from scripts_of_one import SCRIPTS, run
from torch import nn
from torch.utils.data import DataLoader
from zoo import Source, seed_ambient

from ddp_patch import autopatch, leave_alone
from ddp_patch.errors import RankMismatchError, UnsupportedLoaderError, WorldError
from ddp_patch.options import Options
from ddp_patch.running.context import running
from ddp_patch.running.loader_reports import Patterns
from ddp_patch.running.one_process import OneProcess


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


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def random_loader(*shape: int, **options: Any) -> DataLoader[Any]:
    samples: Any = torch.randn(*shape)
    return DataLoader(samples, **options)


def trained(model: Any, loader: Any, steps: int = 100) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _, batch in zip(range(steps), loader, strict=False):
        model(batch).pow(2).mean().backward()
        optimizer.step()
    return optimizer


def parts_of_two_batches(rank: int, loader: Any, model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for is_one_step in (False, True):
        losses = (model(batch).mean() for batch in loader)
        for loss in [sum(losses)] if is_one_step else losses:
            loss.backward()
            optimizer.step()


def used_again(rank: int, loader: Any, model: Any) -> None:
    trained(model, itertools.cycle(loader))


def without_optimizer(rank: int, loader: Any, model: Any) -> None:
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for batch in loader:
            model(batch).mean().backward()
            if optimizer is not None:
                optimizer.step()
        optimizer = None


def changed_by_hand(rank: int, loader: Any, model: Any) -> None:
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    for _ in range(2):
        for batch in loader:
            model(batch).pow(2).mean().backward()
            optimizer.step()
            model.weight.data -= 0.1 * model.weight.grad


def steps_within_backward(rank: int, loader: Any, model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(loader):
        model(batch).pow(2).mean().backward()
        if number == 2:
            model.weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())


def other_ways(rank: int, loader: Any, model: Any) -> None:
    trained(model, loader, 3 + rank)
    with torch.no_grad():
        list(loader)


def left_earlier(rank: int, loader: Any, model: Any) -> None:
    optimizer = trained(model, loader, 3 + rank)
    for batch in loader:
        model(batch).mean().backward()
        optimizer.step()


def of_a_fixed_size(rank: int, loader: Any, model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        model(batch).view(5, 1).mean().backward()
        optimizer.step()


def drifting(rank: int, loader: Any, model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for batch in loader:
            model(batch).mean().backward()
            optimizer.step()
        with torch.no_grad():
            model.weight += float(rank)


def other_data(rank: int, loader: Any, model: Any) -> None:
    even = random_loader(8, 2, batch_size=2)
    _optimizer = trained(model, even)
    for _ in even:
        trained(model, random_loader(6, 2, batch_size=4))


def graphs_of_gradients(rank: int, loader: Any, model: Any) -> None:
    _optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(loader):
        model(batch).mean().backward(create_graph=number == 2)


def parallel(rank: int, loader: Any, model: Any) -> None:
    trained(model, loader)
    nn.parallel.DistributedDataParallel(nn.Linear(2, 1))


def spawning(rank: int, loader: Any, model: Any) -> None:
    multiprocessing: Any = torch.multiprocessing
    multiprocessing.spawn(print, nprocs=2)


def grouped(rank: int, loader: Any, model: Any) -> None:
    dist.init_process_group("gloo")


WRONG: list[tuple[Callable[..., None], type[Exception], list[str]]] = [
    (parts_of_two_batches, UnsupportedLoaderError, ["several batches of", "drop_last=True"]),
    (used_again, UnsupportedLoaderError, ["used again after its pass", "iterate the loader again"]),
    (without_optimizer, UnsupportedLoaderError, ["there is no optimizer", "--whole"]),
    (changed_by_hand, RankMismatchError, ["no longer train the same model", "differ first in weight"]),
    (steps_within_backward, UnsupportedLoaderError, ["makes a step while backward() runs"]),
    (other_ways, RankMismatchError, ["rank 0 begins to iterate", "rank 1 calls backward()", "after 4 calls"]),
    (left_earlier, RankMismatchError, ["rank 0 begins to iterate a loader that is whole", "rank 1 calls backward()"]),
    (
        of_a_fixed_size,
        RuntimeError,
        ["invalid for input", "part of each batch here, this one", "of 5 samples", "--whole"],
    ),
    (drifting, RankMismatchError, ["no longer train the same model", "weight, of shape (1, 2)", "rank 0 and rank 1"]),
    (other_data, RankMismatchError, ["random numbers differ between the ranks", "generator of its own"]),
    (graphs_of_gradients, UnsupportedLoaderError, ["create_graph=True", "--whole"]),
    (parallel, WorldError, ["wraps a model in DistributedDataParallel", "--mode ranks"]),
    (spawning, WorldError, ["calls spawn()", "2 ranks"]),
    (grouped, WorldError, ["calls init_process_group()", "--mode ranks"]),
]


def wrong(rank: int, world_size: int) -> list[tuple[type[BaseException] | type[None], str]]:
    errors: list[tuple[type[BaseException] | type[None], str]] = []
    for function, _, _ in WRONG:
        torch.manual_seed(0)
        loader = random_loader(23, 2, batch_size=5)
        model: Any = nn.Linear(2, 1)
        try:
            with autopatch(as_one_process=True, timeout=30):
                function(rank, loader, model)
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


def honest(rank: int, world_size: int) -> dict[str, Any]:
    seed_ambient(3 + rank)
    told = Told()
    logger = logging.getLogger("ddp_patch.autopatch")
    logger.addHandler(told)
    logger.setLevel(logging.INFO)
    found: dict[str, Any] = {"drawn": [], "errors": {}}
    with autopatch(as_one_process=True, timeout=30) as summary:
        loader = random_loader(24, 2, batch_size=5)
        looked_at = random_loader(11, 2, batch_size=3)
        found["sizes"] = [len(batch) for batch in looked_at]  # without no_grad
        items = random_loader(3, 5, 2, batch_size=None)
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        classes = nn.Parameter(torch.ones(2, 3))
        weighing = torch.optim.SGD([classes], lr=0.01)
        for is_weighed in (False, True):
            for batch in loader:
                if is_weighed:
                    targets = torch.zeros(len(batch), dtype=torch.int64)
                    loss: Any = nn.functional.cross_entropy(batch @ classes, targets, weight=torch.ones(3))
                    loss.backward()
                    weighing.step()
                    continue
                found["drawn"].append(torch.rand(1).item())
                error: Any = model(batch).pow(2).mean()
                if rank or len(found["drawn"]) != 2:  # as a script that looks at a clock
                    found["errors"][len(found["drawn"])] = error.item() * len(batch) / len(batch)
                error.backward()
                optimizer.step()
        list(DataLoader(Source(), batch_size=4))
        found["buffers before"] = model[1].running_mean.tolist()
        for batch in items:
            model(batch).pow(2).mean().backward()
        found["after"], found["python"] = torch.rand(1).item(), random.random()
        with torch.no_grad():
            found["whole"] = [len(batch) for batch in loader]
            found["buffers"] = model[1].running_mean.tolist()
    found["told"], found["table"] = told.texts, " ".join(str(summary).split())
    return found


def test_what_is_equal_on_every_rank_and_what_is_its_own() -> None:
    first, other = run_ranks(honest, 2)
    assert first["drawn"][0] == other["drawn"][0]  # before the first optimizer step
    assert not set(first["drawn"][1:]) & set(other["drawn"][1:])
    other["errors"].pop(2)  # which the first rank did not read, so that it is of the other's part
    assert first["errors"].keys() == other["errors"].keys() == {1, 3, 4, 5}
    np.testing.assert_allclose([*first["errors"].values()], [*other["errors"].values()], rtol=1e-6)
    assert (first["after"], first["python"]) == (other["after"], other["python"])
    assert first["whole"] == other["whole"] == [5, 5, 5, 5, 4]
    assert first["sizes"] == other["sizes"] == [3, 3, 3, 2]
    assert first["buffers before"] != other["buffers before"]
    assert first["buffers"] == other["buffers"]
    assert not other["told"]
    words = [
        "The ranks were seeded differently: all go on with the seed of rank 0.",
        "The loss is a mean by weights of the samples, so its gradient may not be that of the whole batch",
        "What is read at",
        "the loss of a whole batch is multiplied by the size of this rank's part",
        "2 ranks train as one process",
        "Batch normalisation sees this rank's part of each batch",
        "each batch divided over 2 ranks, 5 steps",
        "was divided, and backward() was not called in its pass",
        "whole on every rank, 4 steps",
    ]
    for word in words:
        assert sum(word in text for text in first["told"]) == 1, word
    assert "whole on every rank, 3 steps (it makes no batches)" in first["table"]
    assert "2 ranks trained as one process: 10 optimizer steps" in first["table"]


class Trainer:
    def __init__(self) -> None:
        self.model: Any = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1).eval())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.cycle = self


def dropped(rank: int, world_size: int) -> tuple[int, list[float]]:
    """Train one model after the other, where each rank collects garbage at another time."""
    seed_ambient(3)
    gc.disable()
    with autopatch(as_one_process=True, timeout=30):
        loader = random_loader(8, 2, batch_size=4)
        for _ in range(2):
            trainer = Trainer()
            for _ in range(2):
                for batch in loader:
                    trainer.model(batch).pow(2).mean().backward()
                    trainer.optimizer.step()
                    if rank:
                        gc.collect()
            with torch.no_grad():
                batches = len(list(loader))
    gc.enable()
    return batches, trainer.model[0].weight.flatten().tolist()


def test_ranks_may_collect_garbage_at_other_times() -> None:
    first, other = run_ranks(dropped, 2)
    assert first == other


def sizes(loader: Any, model: Any) -> Any:
    with torch.no_grad():
        evaluated = [len(batch) for batch in loader]
    optimizer, trained = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        for batch in loader:
            trained.append(len(batch))
            model(batch.double()).mean().backward()
            optimizer.step()
    return evaluated, trained


def with_options(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    def run_with(body: Callable[[Any, Any], Any], **chosen: Any) -> Any:
        torch.manual_seed(0)
        with running(OneProcess(Options(), Patterns("only"), Patterns("excepted"), **chosen)) as summary:
            result = body(random_loader(11, 2, batch_size=4), nn.Linear(2, 1, dtype=torch.float64))
        return result, " ".join(str(summary).split())

    def summed(loader: Any, model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in loader:
            model(batch.double()).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        for batch in loader:
            model(batch.double()).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.tolist()

    def saved(loader: Any, model: Any) -> Any:
        torch.optim.SGD(model.parameters(), lr=0.1)
        torch.save(model.state_dict(), folder / f"{world_size}-{rank}.pt")
        return (folder / f"{world_size}-{rank}.pt").exists()

    def converted(loader: Any, model: Any) -> Any:
        if world_size == 1:  # sees all of a batch
            return None
        normalised = nn.Sequential(model, nn.BatchNorm1d(1))
        torch.optim.SGD(normalised.parameters(), lr=0.1)
        return type(normalised[1]).__name__

    def left(loader: Any, model: Any) -> Any:
        return [[len(batch) for batch in leave_alone(loader)] for _ in range(3)]

    return {
        "sum": run_with(summed)[0],
        "whole": run_with(sizes, whole=Patterns("--whole", "test_one_process_ranks.py")),
        "unmatched": run_with(sizes, whole=Patterns("--whole", "no.py")),
        "saved": (run_with(saved)[0], (folder / f"{world_size}-{rank}.pt").exists()),
        "converted": run_with(converted, sync_batchnorm=True)[0],
        "left": run_with(left),
    }


def test_each_option_does_what_it_says(tmp_path: Path) -> None:
    (alone,), ranks = run_ranks(with_options, 1, tmp_path), run_ranks(with_options, 2, tmp_path)
    whole, parts = [4, 4, 3], ([2, 2, 2], [2, 2, 1])
    for rank, (found, part) in enumerate(zip(ranks, parts, strict=True)):
        np.testing.assert_allclose(found["sum"], alone["sum"], atol=1e-12)
        assert found["whole"][0] == (whole, whole * 2)
        assert "(--whole)" in found["whole"][1]
        assert found["unmatched"][0] == (whole, [whole[0], *part[1:], *part])  # the first one shows what it is for
        assert "'no.py' of --whole matched no loader" in found["unmatched"][1]
        assert found["saved"] == (True, rank == 0)  # each sees what it has saved; and it is there of the first rank
        assert found["converted"] == "SyncBatchNorm"
        sizes, table = found["left"]
        assert sizes == [whole] * 3
        assert "left alone (leave_alone() or unpatched()), 3 passes" in table
    assert "'no.py' of --whole matched no loader" in alone["unmatched"][1]
