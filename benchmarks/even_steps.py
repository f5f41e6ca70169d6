"""What equal steps cost where a dataset splits itself: exchanges beside the steps, and how fast all workers read.

Prints two tables for gloo ranks on this machine; costs are simulated by sleeping, so few cores do. Run it with
``python benchmarks/even_steps.py``.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from agreement import meet_as_torchrun_does
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.compat.private_torch import MAKE_ITERATOR
from ddp_patch.testing import run_ranks

STEP_S, STEPS, REPEATS = 0.01, 300, 3
READ_S, BATCH = 0.01, 4
RANKS, WORKERS = 4, 2
SHARDS = {
    "equal": [300] * 8,
    "nearly equal": [300, 298, 301, 297, 302, 300, 299, 303],
    "one is twice as long": [600, *[300] * 7],
}


class Shards(IterableDataset[torch.Tensor]):
    """Reader r of n reads shards r, r + n, ...; each item costs so many seconds."""

    def __init__(self, sizes: Sequence[int], read_s: float) -> None:
        self.sizes, self.read_s = sizes, read_s

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        reader, readers = (info.id, info.num_workers) if info else (0, 1)
        for shard in range(reader, len(self.sizes), readers):
            for item in range(self.sizes[shard]):
                time.sleep(self.read_s)
                yield torch.tensor(item)


class Step(NamedTuple):
    """Milliseconds of a step, by the median of some epochs.

    Attributes:
        whole: How long it takes.
        waiting: How long the training loop waits for its batch.
        busy: How long the rank's processor works, which other load on the machine leaves alone.
    """

    whole: float
    waiting: float
    busy: float


def both(rank: int, world_size: int) -> tuple[Step, Step]:
    """A step of synchronous training, without and with the exchange."""
    meet_as_torchrun_does(rank, world_size)
    plain, even = (made([STEPS * BATCH] * world_size, 0, 0) for _ in range(2))
    del vars(plain)[MAKE_ITERATOR]
    found = [(stepped(plain), stepped(even)) for _ in range(REPEATS)]
    return tuple(Step(*map(statistics.median, zip(*steps, strict=True))) for steps in zip(*found, strict=True))  # type: ignore[return-value]  # of two


def stepped(loader: Any) -> Step:
    """One epoch."""
    gradient, waited = torch.zeros(1), 0.0
    dist.barrier()
    batches = iter(loader)
    next(batches)  # connecting comes once in an epoch
    begun = asked = time.perf_counter()
    busy = time.process_time()
    for _ in batches:
        waited += time.perf_counter() - asked
        time.sleep(STEP_S)
        dist.all_reduce(gradient)
        asked = time.perf_counter()
    seconds = asked - begun, waited, time.process_time() - busy
    return Step(*(1000 * value / (STEPS - 1) for value in seconds))


def share_of_all_readers(rank: int, world_size: int, sizes: Sequence[int]) -> tuple[float, int, float]:
    """One reader's items/s; how many batches this rank got after its first, and the seconds that took."""
    alone = islice(Shards([200], READ_S), 200)
    start = time.perf_counter()
    read = sum(1 for _ in alone)
    speed = read / (time.perf_counter() - start)
    batches = iter(made(sizes, WORKERS, READ_S))
    next(batches)
    start = time.perf_counter()
    items = sum(map(len, batches))
    return speed, items, time.perf_counter() - start


def made(sizes: Sequence[int], workers: int, read_s: float) -> Any:
    """Return a patched loader of shards of these sizes."""
    loader: DataLoader[Any] = DataLoader(Shards(sizes, read_s), BATCH, num_workers=workers)
    return patch_dataloader_to_ddp(loader, share="by_worker", seed=1)


def main() -> None:
    """Measure and print."""
    for world_size in (2, 8):
        ranks = run_ranks(both, world_size, timeout=300)
        plain, even = (Step(*map(max, zip(*steps, strict=True))) for steps in zip(*ranks, strict=True))
        for name, step in (("without", plain), ("with", even)):
            print(
                f"{world_size} ranks {name} an exchange: "
                + ", ".join(f"{k} {v:.2f} ms" for k, v in step._asdict().items())
            )
    for name, sizes in SHARDS.items():
        ranks = run_ranks(share_of_all_readers, RANKS, sizes, timeout=300)
        ideal = RANKS * WORKERS * min(speed for speed, _, _ in ranks)
        speed = sum(items for _, items, _ in ranks) / max(seconds for _, _, seconds in ranks)
        print(f"{name} shards: {speed:.0f} items/s, {speed / ideal:.2f} of {RANKS * WORKERS} readers' {ideal:.0f}")


if __name__ == "__main__":
    main()
