"""What a step, ``len()`` and the first batch cost on real ranks, beside torch's ``DistributedSampler``.

    python benchmarks/steps.py --before FOLDER

Two gloo ranks take the same batches of 10 at once, over torch's ``DistributedSampler`` and over patched loaders, one
after the other, again and again; the fastest pass of rank 0 counts. A sampler of the user's stands beside every
second index of it, taken by hand, as ``DistributedSampler`` has none; whole batches beside a loader that gives each
rank all of them: nobody else shards these. ``--before`` measures another tree as well, which has a folder
``ddp_patch``. ``nox -s bench`` puts the table into ``docs/benchmarks.md``, and two of its rows into ``README.md``.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from speed import Numbers, OfTheUser
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.testing import run_ranks

README = Path(__file__).parents[1] / "README.md"
PAGE = README.with_name("docs") / "benchmarks.md"
RANKS, BATCH, SAMPLES = 2, 10, 80_000
STEPS = {0: 2000, 2: 300}  # of a pass, by workers
CASES = {"samples": "a shuffled loader", "sampler": "a sampler of the user's", "batches": "whole batches"}


class Every:
    """Every so-manieth index of another sampler, as one writes it by hand."""

    def __init__(self, sampler: OfTheUser, rank: int) -> None:
        self.sampler, self.rank = sampler, rank

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self.sampler), self.rank, None, RANKS)

    def __len__(self) -> int:
        return len(range(self.rank, len(self.sampler), RANKS))


def loaders(case: str, workers: int, n: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return a loader that takes as many steps without this package, and a patched one."""
    data = Numbers(n)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    beside: DataLoader[Any] = DataLoader(data, BATCH, sampler=DistributedSampler(data), **options)
    if case == "batches":
        half = BatchSampler(OfTheUser(range(n // RANKS)), BATCH, drop_last=False)
        beside = DataLoader(data, batch_sampler=half, **options)
        given: DataLoader[Any] = DataLoader(
            data, batch_sampler=BatchSampler(RandomSampler(data), BATCH, drop_last=False), **options
        )
        return beside, patch_dataloader_to_ddp(given, share="batches")
    if case == "sampler":
        beside = DataLoader(data, BATCH, sampler=Every(OfTheUser(data), dist.get_rank()), **options)
    sampler = OfTheUser(data) if case == "sampler" else RandomSampler(data)
    return beside, patch_dataloader_to_ddp(DataLoader(data, BATCH, sampler=sampler, **options))


def a_step(loader: DataLoader[Any]) -> float:
    """Return how many seconds a step of one pass takes, between the first and the last."""
    dist.barrier()
    batches, steps = iter(loader), len(loader) - 2
    next(batches)
    start = time.perf_counter()
    for _ in islice(batches, steps):
        pass
    took_s = time.perf_counter() - start
    list(batches)
    return took_s / steps


def the_ends(loader: DataLoader[Any]) -> float:
    """Return how many seconds a pass of two steps takes."""
    dist.barrier()
    start = time.perf_counter()
    list(loader)
    return time.perf_counter() - start


def the_first(loader: DataLoader[Any]) -> float:
    """Return how many seconds it takes until the first batch."""
    dist.barrier()
    start = time.perf_counter()
    next(iter(loader))
    return time.perf_counter() - start


def the_length(loader: DataLoader[Any]) -> float:
    """Return how many seconds ``len()`` takes within an epoch."""
    start = time.perf_counter()
    for _ in range(1000):
        len(loader)
    return (time.perf_counter() - start) / 1000


def measure(rank: int, ranks: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Return the microseconds of each row, of the loader without this package and of the patched one."""
    torch.manual_seed(rank)
    rows: dict[str, tuple[float, float]] = {}

    def fastest(name: str, both: tuple[DataLoader[Any], DataLoader[Any]], times: Callable[..., float]) -> None:
        found: list[list[float]] = [[], []]
        for epoch in range(repeats):
            for loader, of_loader in zip(both, found, strict=True):
                sampler: Any = loader.sampler
                (getattr(loader, "set_epoch", None) or getattr(sampler, "set_epoch", int))(epoch)
                of_loader.append(1e6 * times(loader))
        rows[name] = min(found[0]), min(found[1])

    for workers, steps in STEPS.items():
        for case, name in CASES.items():
            fastest(f"a step, {name}, {workers} workers", loaders(case, workers, RANKS * BATCH * steps), a_step)
    for case, name in CASES.items():
        fastest(f"a pass of 2 steps, {name}", loaders(case, 0, RANKS * BATCH * 2), the_ends)
    for case, name in CASES.items():
        fastest(f"`len()`, {name}", loaders(case, 0, RANKS * BATCH), the_length)
    fastest(f"the first of {SAMPLES:,} samples", loaders("samples", 0, SAMPLES), the_first)
    return rows


def of_tree(folder: Path, repeats: int) -> dict[str, tuple[float, float]]:
    """Return the figures of a tree, measured in processes that import it."""
    paths = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--here", "--repeats", str(repeats)]
    output = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=True).stdout  # noqa: S603 - this very Python
    found: dict[str, tuple[float, float]] = json.loads(output)
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--before", type=Path, help="also measure this tree, which holds ddp_patch/")
    parser.add_argument("--repeats", type=int, default=12, help="how many passes of each are made")
    parser.add_argument("--rounds", type=int, default=3, help="how often each tree is measured, in turn")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(run_ranks(measure, RANKS, arguments.repeats, timeout=600)[0]))
        return
    from pages import commit, markdown, put, show, show_and_put

    before = None if arguments.before is None else arguments.before.absolute()
    trees = {"now": README.parent, **({} if before is None else {commit(before): before})}
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: defaultdict(list) for name in trees}
    for _ in range(arguments.rounds):
        for name, folder in trees.items():
            for row, both in of_tree(folder, arguments.repeats).items():
                found[name][row].append(both)
    head = ["microseconds", "without", *(f"patched, {name}" if name != "now" else "patched" for name in trees)]
    rows = []
    for row, of_now in found["now"].items():
        cells = [f"{min(plain for plain, _ in of_now):.2f}"]
        for name in trees:
            plain, patched = (min(column) for column in zip(*found[name][row], strict=True))
            cells.append(f"{patched:.2f} ({patched / plain:.2f})")
        rows.append([row, *cells])
    show([head, *rows], "steps")
    told = [row[:3] for row in [head, *rows] if "len()" not in row[0]]
    put(PAGE, "steps", markdown(told[0], told[1:]))
    shuffled = [[f"{workers} workers", *cells[1:3]] for cells, workers in zip(rows[:: len(CASES)], STEPS, strict=False)]
    show_and_put(README, "step", [["a step, microseconds", "`DistributedSampler`", "patched (ratio)"], *shuffled])


if __name__ == "__main__":
    main()
