"""What it costs to run a script as one process on two ranks, beside DistributedDataParallel and a single process.

    python benchmarks/one_process.py

Two gloo ranks on this machine, with one thread each; a single process with one thread. Steps of the three alternate in
turns of a few, and the fastest turn counts. ``nox -s bench`` runs this; it writes a table of ``docs/autopatch.md``.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pages import show_and_put
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import autopatch
from ddp_patch.testing import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "autopatch.md"
PARAMETERS = (10_000, 1_000_000, 25_000_000)
BATCH, TURNS = 256, 7
PASS = 40  # steps


def model_of(parameters: int) -> nn.Sequential:
    """Return four square layers of about as many parameters in all."""
    width = round((parameters / 4) ** 0.5)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())))


def steps_of(model: nn.Module, batch: int) -> Callable[[int], float]:
    """Return what trains some steps, and returns the seconds that one took."""
    width = next(iter(model.parameters())).shape[1]
    loader = DataLoader(TensorDataset(torch.randn(batch * PASS, width)), batch_size=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(least: int) -> float:
        began, done = time.perf_counter(), 0
        while done < least:
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).pow(2).mean().backward()
                optimizer.step()
                done += 1
        return (time.perf_counter() - began) / done

    return train


def on_ranks(rank: int, world_size: int, parameters: int, turns: int) -> dict[str, list[float]]:
    """Return what steps took on a rank: in seconds, each way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parallel = steps_of(DistributedDataParallel(model_of(parameters)), BATCH // world_size)
    took: dict[str, list[float]] = {"DistributedDataParallel": [], "as one process": []}
    for _ in range(turns):
        parallel(1)
        took["DistributedDataParallel"].append(parallel(steps(parameters)))
        with autopatch(as_one_process=True):
            one = steps_of(model_of(parameters), BATCH)
            one(1)
            took["as one process"].append(one(steps(parameters)))
    return took


def steps(parameters: int) -> int:
    """Return how many steps a turn has."""
    return max(PASS, 400_000 // parameters)


def alone(parameters: int, turns: int) -> list[float]:
    """Return what steps took in a single process."""
    train = steps_of(model_of(parameters), BATCH)
    train(1)
    return [train(steps(parameters)) for _ in range(turns)]


def hook_microseconds(repeats: int = 2000, turns: int = 15) -> float:
    """Return what a ``backward()`` takes longer where one rank runs as one process."""
    weight = torch.ones((), requires_grad=True)

    def fastest() -> float:
        found = []
        for _ in range(turns):
            began = time.perf_counter()
            for _ in range(repeats):
                (weight * 2).backward()
            found.append((time.perf_counter() - began) / repeats)
        return min(found)

    fastest()
    before = fastest()
    with autopatch(as_one_process=True):
        optimizer = torch.optim.SGD([weight], lr=0.1)
        hooked = fastest()
        del optimizer
    return 1e6 * (hooked - before)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--turns", type=int, default=TURNS, help="how often each way is measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [["parameters", "one process, ms a step", "DistributedDataParallel", "as one process"]]
    for parameters in PARAMETERS:
        single = min(alone(parameters, arguments.turns))
        ranks = run_ranks(on_ranks, 2, parameters, arguments.turns, timeout=600)
        fastest = {way: max(min(rank[way]) for rank in ranks) for way in ranks[0]}
        rows.append([f"{parameters:,}", f"{1e3 * single:.2f}", *(f"{1e3 * one:.2f}" for one in fastest.values())])
    show_and_put(PAGE, "one process", rows, "Two gloo ranks, batches of 256 samples in all")
    print(f"Hook of backward() on one rank: {hook_microseconds():.2f} us")


if __name__ == "__main__":
    main()
