"""What it costs to run a script as one process on two ranks, beside DistributedDataParallel and a single process.

    python benchmarks/one_process.py

Two gloo ranks on this machine, with one thread each; a single process with one thread. Steps of the three alternate in
turns of a few, and the fastest turn counts. ``nox -s bench`` runs this; it writes a table of ``docs/autopatch.md``. It
prints, too, how much longer a script takes with ``-n 1`` (``--one-rank`` measures that alone).
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
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
ALONE = {"OMP_NUM_THREADS": "1"}
SCRIPT = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64 * 100, 256), torch.randn(64 * 100, 1)), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
began = time.perf_counter()
for epoch in range(30):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
print(time.perf_counter() - began)
"""


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


def of_one_rank(repeats: int) -> dict[str, float]:
    """Return how much longer a script of some seconds takes with ``-n 1``: medians of ratios of runs side by side.

    Both its training and the whole command count, and the command's seconds of the processor, which other programs on
    the machine do not change.
    """
    ratios: dict[str, list[float]] = {"training": [], "command": [], "command's processor": []}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        command = str(Path(sys.executable).with_name("ddp-patch"))
        ways = [[sys.executable, str(script)], [command, "run", "-n", "1", str(script)]]
        for _ in range(repeats):
            found = []
            for way in ways:
                began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
                done = subprocess.run(way, env=os.environ | ALONE, capture_output=True, text=True, check=True)  # noqa: S603 - our own
                took, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
                of_processor = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
                found.append((float(done.stdout), took, of_processor))
            for ratio, plain, run in zip(ratios.values(), *found, strict=True):
                ratio.append(run / plain)
    return {name: statistics.median(each) for name, each in ratios.items()}


def on_two(turns: int) -> None:
    """Measure two ranks, print and write."""
    torch.set_num_threads(1)
    rows = [["parameters", "one process, ms a step", "DistributedDataParallel", "as one process"]]
    for parameters in PARAMETERS:
        single = min(alone(parameters, turns))
        ranks = run_ranks(on_ranks, 2, parameters, turns, timeout=600)
        fastest = {way: max(min(rank[way]) for rank in ranks) for way in ranks[0]}
        rows.append([f"{parameters:,}", f"{1e3 * single:.2f}", *(f"{1e3 * one:.2f}" for one in fastest.values())])
    show_and_put(PAGE, "one process", rows, "Two gloo ranks, batches of 256 samples in all")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--turns", type=int, default=TURNS, help="how often each way is measured")
    parser.add_argument("--one-rank", action="store_true", help="measure -n 1 alone")
    arguments = parser.parse_args()
    if not arguments.one_rank:
        on_two(arguments.turns)
    for name, ratio in of_one_rank(arguments.turns).items():
        print(f"-n 1 beside python, {name}: {ratio:.3f}")


if __name__ == "__main__":
    main()
