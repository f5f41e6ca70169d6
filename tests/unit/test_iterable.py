"""Iterable datasets: what one process with the same workers reads, and who reads what."""

import gc
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from iterables import SplitByInit, init_splits
from messages import raises
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info
from zoo import N, Source, as_it_is, seed_ambient

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import UnsupportedLoaderError


def batches(dataset: IterableDataset[Any], rank: int, workers: int, **options: Any) -> list[Any]:
    seed_ambient(rank)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=3, num_workers=workers, collate_fn=as_it_is)
    return list(patch_dataloader_to_ddp(loader, rank=rank, num_replicas=2, seed=1, **options))


class Counted(Source):
    """Notes each item that is read, by appending to a file of the reader's."""

    def __init__(self, folder: Path, splits: bool, shuffles: bool = False) -> None:
        super().__init__(splits=splits, shuffles=shuffles)
        self.folder = folder

    def __iter__(self) -> Iterator[int]:
        for item in super().__iter__():
            with (self.folder / str(os.getpid())).open("a") as file:
                file.write(f"{item}\n")
            yield item


def read(folder: Path) -> Counter[int]:
    return Counter(int(line) for path in folder.iterdir() for line in path.read_text().split())


@pytest.mark.parametrize(("splits", "workers", "times"), [(True, 0, 2), (True, 2, 2), (False, 0, 2), (False, 2, 4)])
def test_each_rank_reads_all_once_and_each_worker_where_the_dataset_does_not_split_itself(
    splits: bool, workers: int, times: int, tmp_path: Path
) -> None:
    made = [batches(Counted(tmp_path, splits), rank, workers) for rank in (0, 1)]
    items = Counter(chain.from_iterable(chain.from_iterable(made)))
    assert items.keys() == set(range(N))
    assert items.total() == N + 1  # of 23, or of parts of 12 and 11, one is repeated
    assert read(tmp_path) == Counter(dict.fromkeys(range(N), times))


@pytest.mark.parametrize("workers", [0, 2])
def test_by_worker_has_nobody_read_what_they_drop(workers: int, tmp_path: Path) -> None:
    options = {"share": "by_worker", "uneven": "keep"}
    ranks = [batches(Counted(tmp_path, True, shuffles=True), rank, workers, **options) for rank in (0, 1)]
    assert Counter(item for batch in chain(*ranks) for item in batch) == Counter(range(N))
    assert read(tmp_path) == Counter(range(N))


def test_by_worker_a_worker_init_fn_splits_over_all_ranks_workers() -> None:
    items: Counter[int] = Counter()
    for rank in range(2):
        loader = DataLoader(SplitByInit(), 3, num_workers=2, worker_init_fn=init_splits, collate_fn=as_it_is)
        patched = patch_dataloader_to_ddp(loader, rank=rank, num_replicas=2, share="by_worker", uneven="keep")
        items.update(chain.from_iterable(patched))
    assert items == Counter(range(N))


class Asking(IterableDataset[int]):
    """Gives 8 numbers, and then asks for its worker."""

    def __iter__(self) -> Iterator[int]:
        yield from range(8)
        get_worker_info()


def test_asking_after_the_last_item_splits_nothing() -> None:
    ranks = [chain.from_iterable(batches(Asking(), rank, 2)) for rank in (0, 1)]
    assert Counter(chain(*ranks)) == Counter(range(8))


class OwnWay(IterableDataset[int]):
    """Splits itself in a way that cannot be seen."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4 + multiprocessing.current_process()._identity[-1] % 2))


def test_a_dataset_that_gives_workers_unequally_much_without_asking_is_refused() -> None:
    with raises(UnsupportedLoaderError, ("OwnWay", "never called", "4 and 5"), ("get_worker_info()", "num_workers=0")):
        batches(OwnWay(), 0, 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_random_numbers_are_alike_until_the_first_item_and_each_workers_own_after_it(workers: int) -> None:
    class Drawing(IterableDataset[float]):
        def __iter__(self) -> Iterator[float]:
            info = get_worker_info()
            assert info is None or info.num_workers == workers
            for _ in range(4):
                yield random.random()

    ranks = [[*chain.from_iterable(batches(Drawing(), rank, workers))] for rank in (0, 1)]
    drawn = Counter(chain(*ranks))
    assert drawn.total() == 4 * workers
    assert max(drawn.values()) == workers
    assert len(drawn) == 4 * workers - (workers - 1)


class Drawing(IterableDataset[Any]):
    """Draws each item."""

    def __iter__(self) -> Iterator[list[float]]:
        info = get_worker_info()
        for _ in range(40 + (info.id if info else 0)):
            yield [float(torch.rand(1)), float(np.random.random()), random.random()]


def draws_too(samples: list[Any]) -> Any:
    """Draw as an augmentation does, which then draws the same for no two batches."""
    torch.rand(1), np.random.random(), random.random()
    return default_collate(samples)


@pytest.mark.parametrize("options", [{}, {"share": "by_worker", "uneven": "keep"}], ids=["exact", "by_worker"])
@pytest.mark.parametrize("persistent", [False, True])
def test_what_a_dataset_draws_does_not_depend_on_what_the_collate_fn_draws(
    options: dict[str, Any], persistent: bool
) -> None:
    def passes(collate_fn: Any) -> list[Any]:
        patched, resumed = (
            patch_dataloader_to_ddp(
                DataLoader(Drawing(), 2, num_workers=2, persistent_workers=persistent, collate_fn=collate_fn),
                rank=1,
                num_replicas=2,
                seed=1,
                **options,
            )
            for _ in range(2)
        )
        given = [list(patched)]
        for _ in islice(patched, 3):
            pass
        given.append(list(patched))
        batches = iter(resumed)
        next(batches)
        state = loader_state(resumed)
        del batches
        restore_loader(resumed, state)
        given.append(list(resumed))
        return [torch.stack(list(batch)).tolist() for each in given for batch in each]

    assert passes(None) == passes(draws_too)  # torch's own collate_fn draws nothing


class Lazy(dict[str, int]):
    """Draws when it is looked into, as samples do that are transformed late."""

    def __getitem__(self, key: str) -> int:
        random.random()
        return super().__getitem__(key)


class Shuffled(IterableDataset[Any]):
    """One stream, shuffled by what is drawn meanwhile."""

    def __iter__(self) -> Iterator[Any]:
        waiting = list(range(41))
        while waiting:
            yield Lazy(number=waiting.pop(random.randrange(len(waiting))))


def test_what_draws_when_a_batch_is_made_changes_no_order() -> None:
    loader: DataLoader[Any] = DataLoader(Shuffled(), 3, num_workers=2)
    shares = [patch_dataloader_to_ddp(loader, rank=rank, num_replicas=2, uneven="keep") for rank in range(2)]
    numbers: list[int] = []
    for rank, share in enumerate(shares):
        seed_ambient(rank)
        numbers += [number for batch in share for number in batch["number"].tolist()]
    assert sorted(numbers) == list(range(41))


class Slow(Source):
    """Its second worker takes its time to begin."""

    def __iter__(self) -> Iterator[int]:
        time.sleep(0.2 * (torch.initial_seed() % 2))
        return super().__iter__()


def test_an_iterator_keeps_its_epoch_when_another_one_begins() -> None:
    def make() -> DataLoader[Any]:
        loader: DataLoader[Any] = DataLoader(Slow(shuffles=True), 1, num_workers=2, collate_fn=as_it_is)
        return patch_dataloader_to_ddp(loader, rank=0, num_replicas=1)

    expected = list(make())
    patched = make()
    first = iter(patched)
    beginning = [next(first)]
    second = iter(patched)
    next(second)
    assert beginning + list(first) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_patched_loader_that_was_made_anew_without_its_sampler_raises(workers: int) -> None:
    patched = patch_dataloader_to_ddp(DataLoader(Source(8), 2, num_workers=workers), rank=0, num_replicas=2)
    remedy = ("patch_dataloader_to_ddp()", "restore_loader()")
    with raises(UnsupportedLoaderError, ("Source", "without its sampler"), remedy):
        list(DataLoader(patched.dataset, 2, num_workers=workers))


class BySeed(IterableDataset[int]):
    """Asks for its seed, and gives all in an order of its own."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(random.Random(info.seed if info else 0).sample(range(N), N))


def test_a_seed_alone_is_not_what_a_dataset_splits_itself_by() -> None:
    given = DataLoader(BySeed(), 2, num_workers=2)
    patched = patch_dataloader_to_ddp(given, share="by_worker", uneven="keep", rank=0, num_replicas=2)
    with raises(UnsupportedLoaderError, ("BySeed", "id or num_workers", "read all of it"), "Leave share out"):
        list(patched)


class Opens(IterableDataset[int]):
    """Has something open while it is read, as a file or threads."""

    def __init__(self) -> None:
        self.open = 0

    def __iter__(self) -> Iterator[int]:
        self.open += 1
        assert get_worker_info() is None or get_worker_info().id >= 0  # type: ignore[union-attr]  # with "by_worker"
        try:
            yield from range(N)
        finally:
            self.open -= 1


@pytest.mark.parametrize(
    "options", [{}, {"share": "within_batches"}, {"share": "by_worker", "uneven": "keep"}], ids=str
)
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_pass_that_is_left_closes_what_the_dataset_has_open(options: dict[str, Any], is_resumed: bool) -> None:
    """At once, as torch's loader does: what is collected later may join threads at any moment."""
    dataset = Opens()
    train: Any = patch_dataloader_to_ddp(DataLoader(dataset, 2), rank=1, num_replicas=2, seed=1, **options)
    gc.disable()
    try:
        left = iter(train)
        next(left)
        if is_resumed:
            state = loader_state(train)
            del left
            restore_loader(train, state)
            left = iter(train)
            next(left)
        assert dataset.open == 1
        del left
        assert dataset.open == 0
    finally:
        gc.enable()
