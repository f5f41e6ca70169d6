"""The epoch that a user sets on an iterable dataset is the next one, as one that is set on the loader."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from zoo import as_it_is

from ddp_patch import loader_state, patch_dataloader_to_ddp

N = 12


class Told(IterableDataset[tuple[int, int]]):
    """Gives each sample with the epoch that it was told."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def now(self) -> int:
        return self.epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        info = get_worker_info()
        for index in range(0 if info is None else info.id, N, 1 if info is None else info.num_workers):
            yield self.now(), index


class ToldUnderAnotherName(Told):
    def __init__(self) -> None:
        self._current_epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._current_epoch = epoch

    def now(self) -> int:
        return self._current_epoch


class ToldUnseen(Told):
    """Keeps what follows from its epoch alone."""

    def __init__(self) -> None:
        self.seed = 1000

    def set_epoch(self, epoch: int) -> None:
        self.seed = 1000 + epoch

    def now(self) -> int:
        return self.seed - 1000


class Counts(Told):
    """Goes to the next epoch by itself."""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        yield from super().__iter__()
        self.epoch += 1


WORKERS: dict[str, dict[str, Any]] = {
    "main": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


def ranks_of(dataset: Any, **options: Any) -> list[Any]:
    given: Any = DataLoader(dataset, batch_size=2, collate_fn=as_it_is, **options)
    return [patch_dataloader_to_ddp(given, rank=rank, num_replicas=2) for rank in range(2)]


def epoch_of(ranks: list[Any], before: Callable[[], object] = int) -> int:
    """Go through an epoch on all ranks, after something on each; each sample comes once, and all in one epoch."""
    found = []
    for loader in ranks:
        before()  # simulated ranks share one dataset; real ones have one each
        found += [item for batch in loader for item in batch]
    assert sorted(index for _, index in found) == [*range(N)]
    (epoch,) = {int(epoch) for epoch, _ in found}
    return epoch


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [Told, ToldUnderAnotherName])
def test_an_epoch_that_is_set_on_the_users_dataset(kind: type[Told], workers: str) -> None:
    """Before the patch, and after it."""
    dataset = kind()
    dataset.set_epoch(4)
    ranks = ranks_of(dataset, **WORKERS[workers])
    for epoch in (4, 5, 6, 9):
        assert epoch_of(ranks, partial(dataset.set_epoch, epoch)) == epoch
    assert epoch_of(ranks) == 10


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", [Told, ToldUnderAnotherName, ToldUnseen])
def test_an_epoch_that_is_set_through_the_loader(kind: type[Told], workers: str) -> None:
    ranks = ranks_of(kind(), **WORKERS[workers])
    assert epoch_of(ranks) == 0
    for loader in ranks:
        loader.dataset.set_epoch(5)
    assert [epoch_of(ranks) for _ in range(2)] == [5, 6]
    for loader in ranks:
        loader.set_epoch(3)
    assert epoch_of(ranks) == 3


def test_a_state_that_is_taken_before_a_pass_has_the_epoch_that_was_set() -> None:
    (loader, _) = ranks_of(Told())
    assert len(list(loader)) == 3
    loader.set_epoch(5)
    assert loader_state(loader)["epoch"] == 5


def test_a_dataset_that_counts_by_itself_goes_on_as_before() -> None:
    (loader, _) = ranks_of(Counts())
    assert [{epoch for batch in loader for epoch, _ in batch} for _ in range(3)] == [{0}, {1}, {2}]


def augmented(batch: list[Any]) -> float:
    return float(torch.rand(()))


def test_workers_are_seeded_for_the_epoch_that_is_set_on_the_dataset() -> None:
    def drawn(on_dataset: bool) -> list[float]:
        given: Any = DataLoader(Told(), 2, collate_fn=augmented, num_workers=2)
        loader = patch_dataloader_to_ddp(given, rank=0, num_replicas=2, seed=0)
        (loader.dataset if on_dataset else loader).set_epoch(3)
        return list(loader)

    assert drawn(on_dataset=True) == drawn(on_dataset=False)
