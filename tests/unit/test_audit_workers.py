"""The workers that an audit simulates read what torch's worker processes read, batch by batch."""

import random
from collections.abc import Callable, Iterator
from itertools import islice, product
from multiprocessing import Value
from traceback import clear_frames
from typing import Any

import numpy as np
import pytest
import torch
from quick import soaked
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from zoo import KINDS, as_it_is, draw_ambient, seed_ambient, seeded_generator

from ddp_patch import audit, patch_dataloader_to_ddp
from ddp_patch.auditing.draw_ranks import Workers
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
        loader, rank=1, num_replicas=3, share="by_worker", uneven="keep"
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


READERS = {"as it stands": 2, "by_worker": 2, "patched": 4}
TURNS = [(name, *way) for name, way in product(MAKERS, READERS.items())]


# Each maker in one way, and the others in the session soak.
@pytest.mark.parametrize(
    ("name", "way", "num_workers"),
    [turn if number % 3 == number // 3 % 3 else soaked(*turn) for number, turn in enumerate(TURNS)],
)
def test_simulated_workers_read_what_real_ones_do(name: str, way: str, num_workers: int) -> None:
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


class ByEpoch(IterableDataset[int]):
    """Shuffles by the epoch that it is told, as plain datasets do; its workers have copies."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).sample(range(40), 40)
        info = get_worker_info()
        return iter(order if info is None else order[info.id :: info.num_workers])


class BySharedEpoch(ByEpoch):
    """Keeps the epoch where its workers see it."""

    def __init__(self) -> None:
        self.shared = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # torch's

    @property
    def epoch(self) -> int:
        return int(self.shared)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.shared.fill_(epoch)


def in_one_process(dataset: Any, **options: Any) -> Any:
    given: DataLoader[Any] = DataLoader(dataset, batch_size=4, num_workers=2, **options)
    return audit(given, world_size=1, patch=False, set_epoch=True)


def test_persistent_workers_that_never_see_set_epoch_are_named_and_both_remedies_hold() -> None:
    (problem,) = in_one_process(ByEpoch(), persistent_workers=True).problems
    assert problem.kind == "same_order"
    assert "though set_epoch() was called" in problem.what
    assert "Leave persistent_workers=True out" in problem.remedy
    assert "tensor in shared memory" in problem.remedy
    assert in_one_process(ByEpoch()).ok
    assert in_one_process(BySharedEpoch(), persistent_workers=True).ok


class FewShards(IterableDataset[int]):
    """Splits its shards over its workers, by their number alone."""

    def __init__(self, shards: int, says_so: bool) -> None:
        self.shards = [range(40)[shard::shards] for shard in range(shards)]
        if says_so:
            self.num_shards = shards

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for shard in self.shards if info is None else self.shards[info.id :: info.num_workers]:
            yield from shard


@pytest.mark.parametrize(
    ("shards", "workers", "says_so", "is_found"),
    [(1, 2, False, True), (2, 4, False, True), (2, 3, False, False), (2, 3, True, True), (3, 3, True, False)],
)
@pytest.mark.parametrize("patch", [True, False])
def test_workers_that_get_nothing_are_named(
    shards: int, workers: int, says_so: bool, is_found: bool, patch: bool
) -> None:
    """Where a dataset does not say how many shards it has, one of three workers may have an empty one."""
    given: DataLoader[Any] = DataLoader(FewShards(shards, says_so), batch_size=4, num_workers=workers)
    report = audit(given, world_size=2 if patch else 1, patch=patch)
    assert [problem.kind for problem in report.problems] == ["idle_workers"] * is_found


def test_too_few_batches_for_all_workers_are_no_problem() -> None:
    given: DataLoader[Any] = DataLoader(FewShards(1, says_so=True), batch_size=30, num_workers=3)
    assert audit(given, world_size=1, patch=False).ok
