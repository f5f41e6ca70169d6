"""What agreeing costs: of the patch, and of comparing passes.

Prints a table for 2 to 8 gloo ranks on this machine, and writes it into ``docs/architecture.md``. Run it with ``nox -s
agreement``.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pages import show_and_put
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.orders.chunks import Drawn, start_iterating
from ddp_patch.orders.digest import Digest
from ddp_patch.orders.random_states import PrivateRNG
from ddp_patch.positions_and_padding import Plan
from ddp_patch.ranks import agreement
from ddp_patch.testing import run_ranks

ITEMS = 100_000
REPEATS = 5
STEPS, STEP_MS = 1000, 10
MEASURED = (
    "patch, bytes of a record",
    "patch, ms",
    "comparison of passes, ms",
    "all comparisons, % of steps",
    "of a stream, % of steps",
    "digest, times as slow",
)
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


class Shuffled(Sampler[int]):
    """A sampler that is not torch's, so that its order is drawn, not looked up."""

    def __init__(self, items: int = ITEMS) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __iter__(self) -> Any:
        return iter(torch.randperm(self.items).tolist())


class Stream(IterableDataset[int]):
    """Numbers, of which nobody knows how many come."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(range(self.items))


def measure(rank: int, world_size: int) -> tuple[float, ...]:
    """One rank's medians."""
    meet_as_torchrun_does(rank, world_size)
    loader: DataLoader[Any] = DataLoader(np.arange(ITEMS), batch_size=100, sampler=Shuffled())  # type: ignore[arg-type]
    records: list[int] = []
    module: Any = agreement
    original = module.exchange

    def noted(members: Any, doing: str, record: Any, *how: Any) -> Any:
        records.append(len(json.dumps(record, default=str)))
        return original(members, doing, record, *how)

    module.exchange = noted
    patch_ms = timed(lambda: patch_dataloader_to_ddp(loader))
    indices, stream = (in_steps(patch_dataloader_to_ddp(made(world_size))) for made in (drawn, streamed))
    made = statistics.median(each for each in indices if each > 0.01)  # some are left out, as they would take long
    compared = made, percent(indices), percent(stream), digested(rank)
    return records[0], patch_ms, *compared


def drawn(world_size: int) -> DataLoader[Any]:
    """Make a loader of whole numbers that are drawn, with as many batches for each rank as there are steps."""
    items = 4 * STEPS * world_size
    return DataLoader(np.arange(items), batch_size=4, sampler=Shuffled(items))  # type: ignore[arg-type]  # as above


def streamed(world_size: int) -> DataLoader[Any]:
    """Make a loader of a stream whose end nobody knows."""
    return DataLoader(Stream(4 * STEPS * world_size), batch_size=4)


def in_steps(loader: DataLoader[Any]) -> list[float]:
    """Take an epoch in steps, and return how many milliseconds each comparison took, and each count that was left."""
    monitor: Any = loader.sampler.rank_passes.monitor  # type: ignore[attr-defined]  # ours
    spent: list[float] = []
    monitor.compare = timing(monitor.compare, spent)
    monitor.report_step = timing(monitor.report_step, spent)
    dist.barrier()
    for _ in loader:
        time.sleep(STEP_MS / 1000)
    return spent


def timing(act: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Return a function that notes how many milliseconds it takes."""

    def timed(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return act(*args, **options)
        finally:
            spent.append(1000 * (time.perf_counter() - start))

    return timed


def percent(spent: list[float]) -> float:
    """Return how much of the steps that is."""
    return 100 * sum(spent) / (STEPS * STEP_MS)


def digested(rank: int) -> float:
    """How many times as long it takes to draw whole numbers with a digest as without, in turn, on the first rank.

    The others wait: ranks have more cores in a training than here.
    """
    ratios = [1.0]
    for _ in range(20 * REPEATS if rank == 0 else 0):
        without, taken = (drawn_s(noted) for noted in (None, Digest()))
        ratios.append(taken / without)
    dist.barrier()
    return statistics.median(ratios)


def drawn_s(noted: Digest | None) -> float:
    """How many seconds it takes to draw whole numbers, noted or not."""
    start = time.perf_counter()
    states = PrivateRNG(0, 0)
    chunks = Drawn(start_iterating(map(int, range(ITEMS))), lambda: states, Plan(0, 8), digest=noted)
    for _ in chunks:
        pass
    return time.perf_counter() - start


def meet_as_torchrun_does(rank: int, world_size: int) -> None:
    """Have a group whose store is reached by TCP."""
    hosted = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False) if rank == 0 else None
    port = [None if hosted is None else hosted.port]
    dist.broadcast_object_list(port)
    store = hosted or dist.TCPStore("127.0.0.1", int(port[0] or 0), world_size, False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def timed(act: Callable[[], object]) -> float:
    """The median of some runs, in milliseconds, all ranks beginning together."""
    times = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        act()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])  # the first warms up


def main() -> None:
    """Measure, print and write the table."""
    columns = [["", *MEASURED]]
    for world_size in (2, 4, 8):
        ranks = run_ranks(measure, world_size, timeout=300)
        slowest = [max(values) for values in zip(*ranks, strict=True)]
        figures = (f"{value:,.0f}" if value >= 10 else f"{value:.2f}" for value in slowest)
        columns.append([f"{world_size} ranks", *figures])
    show_and_put(PAGE, "agreement", list(zip(*columns, strict=True)), f"{ITEMS:,} items, the slowest rank")


if __name__ == "__main__":
    main()
