"""The workers that an audit simulates read what torch's worker processes read, batch by batch."""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing import Value
from traceback import clear_frames
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from zoo import KINDS, as_it_is, draw_ambient, seed_ambient, seeded_generator

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.auditing.draw.workers import Workers
from ddp_patch.loaders.copying import copy_loader
from ddp_patch.loaders.facts import look_at

MOST = 60  # batches; no kind has as many, but the endless one
SHARDS = [[*range(start, start + length)] for start, length in ((0, 5), (5, 7), (12, 4), (16, 6))]


class Shards(IterableDataset[int]):
    """One shard for each worker, which never has to ask whether it is in one."""

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        return iter(SHARDS[info.id])


class Random(IterableDataset[Any]):
    """Draws from all that is seeded in a worker, when it begins and with each item."""

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        yield from (info.id, info.num_workers, info.seed, info.dataset is self, torch.initial_seed())
        for _ in range(random.randint(3, 9)):
            yield draw_ambient()


class Shared:
    """As the epoch that open_clip's workers read: an object that holds a value in shared memory."""

    def __init__(self) -> None:
        self.value = Value("i", 0)


class Told(IterableDataset[int]):
    """Reads in its workers what the main process wrote when they ran already, and counts in memory of its own."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # torch's
        self.shared, self.passes = Shared(), 0

    def set_epoch(self, epoch: int) -> None:
        self.tensor[0] = self.shared.value.value = epoch

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from [int(self.tensor), self.shared.value.value, self.passes] * 3


def of(dataset: Any, persistent: bool = False, **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(
        dataset(), 2, num_workers=2, persistent_workers=persistent, collate_fn=as_it_is, **options
    )


def seeding(worker: int) -> None:
    """A worker_init_fn that seeds what a dataset draws from, and prepares the dataset."""
    info: Any = get_worker_info()
    np.random.seed(info.seed % 2**32)
    info.dataset.drawn = random.random()


MAKERS: dict[str, Callable[[], DataLoader[Any]]] = {
    **{kind.name: kind.make for kind in KINDS if kind.name.startswith("iterable")},
    "one shard for each worker": of(Shards),
    "one shard for each worker, drop_last": of(Shards, drop_last=True),
    "random": of(Random),
    "random, persistent": of(Random, persistent=True),
    "random, worker_init_fn": of(Random, worker_init_fn=seeding),
    "random, own generator": lambda: of(Random, generator=seeded_generator())(),
    "shared memory": of(Told),
    "shared memory, persistent": of(Told, persistent=True),
}
WAYS: dict[str, Callable[[DataLoader[Any]], DataLoader[Any]]] = {
    "as it stands": lambda loader: loader,
    "patched": lambda loader: patch_dataloader_to_ddp(loader, rank=1, num_replicas=3),
    "by_worker": lambda loader: patch_dataloader_to_ddp(
        loader, rank=1, num_replicas=3, iterable_sharding="by_worker", uneven="keep"
    ),
}


def epochs_of(loader: DataLoader[Any], passes: Callable[[], Iterator[Any]]) -> list[Any]:
    """Return two epochs, each with the error that ended it, and what the main process draws after it."""
    found: list[Any] = []
    tell = getattr(loader, "set_epoch", getattr(loader.dataset, "set_epoch", None))
    for epoch in range(2):
        seed_ambient(7 + epoch)
        if tell is not None:
            tell(epoch + 3)
        try:
            batches = [*islice(passes(), MOST)]
        except Exception as error:  # noqa: BLE001 - whatever the dataset raises
            found.append(type(error))
            clear_frames(error.__traceback__)  # see messages.raises
        else:
            found.append(batches)
        found.append(draw_ambient())
    return found


@pytest.mark.parametrize(("way", "num_workers"), [("as it stands", 2), ("by_worker", 2), ("patched", 4)])
@pytest.mark.parametrize("name", MAKERS)
def test_simulated_workers_read_what_real_ones_do(name: str, num_workers: int, way: str) -> None:
    """What a worker is told, which seeds it has, what it shares with the main process, and whose turn it is."""
    first, second = (
        WAYS[way](copy_loader(MAKERS[name](), num_workers=num_workers, prefetch_factor=2)) for _ in range(2)
    )
    workers = Workers(look_at(second))
    real = epochs_of(first, lambda: iter(first))
    simulated = epochs_of(second, workers.batches)
    if first.batch_sampler is None:
        simulated = [[item for (item,) in epoch] if i % 2 == 0 else epoch for i, epoch in enumerate(simulated)]
    assert simulated == real
