"""Loaders without ``seed=`` adopt a state's, every user of the seed reads the one in force, and workers draw apart."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from messages import Words, raises
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info
from zoo import Indices, N, as_it_is, draw_ambient, seed_ambient

from ddp_patch import DDPBatchSamplerWrapper, DDPSamplerWrapper, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import StateError
from ddp_patch.orders.random_states import PrivateRNG, loader_seed

SAVED = 2**70  # any whole number, and none that fits into 64 bits


class Augmented(Indices):
    """Each sample comes with a random number, as an augmentation draws it."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), float(torch.rand(()))


class Shuffled(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        for index in torch.randperm(N).tolist():
            yield index, -1 if worker is None else worker.id


class OfRandomLength(Sampler[int]):
    """Its length follows from the seed, as that of a batch sampler which packs."""

    def __len__(self) -> int:
        return 8 + int(torch.randint(8, ()))

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self)).tolist())


def by_wrapper(rank: int, num_replicas: int, **options: Any) -> DataLoader[Any]:
    sampler = DDPSamplerWrapper(RandomSampler(Indices()), rank=rank, num_replicas=num_replicas, **options)
    return DataLoader(Indices(), 3, sampler=sampler, collate_fn=as_it_is)


def by_batches(rank: int, num_replicas: int, **options: Any) -> DataLoader[Any]:
    batches = BatchSampler(RandomSampler(Indices()), 3, drop_last=False)
    sampler = DDPBatchSamplerWrapper(batches, rank=rank, num_replicas=num_replicas, **options)
    return DataLoader(Indices(), batch_sampler=sampler, collate_fn=as_it_is)


def patched(make: Callable[[], DataLoader[Any]], **more: Any) -> Callable[..., DataLoader[Any]]:
    def start(rank: int, num_replicas: int, **options: Any) -> DataLoader[Any]:
        return patch_dataloader_to_ddp(make(), rank=rank, num_replicas=num_replicas, **more, **options)

    return start


def augmented(**options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), 3, shuffle=True, num_workers=2, collate_fn=as_it_is, **options)


def iterable(workers: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(Shuffled(), 3, num_workers=workers, collate_fn=as_it_is, **options)


USERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "shuffle=True": patched(lambda: DataLoader(Indices(), 3, shuffle=True, collate_fn=as_it_is)),
    "a length that follows from the seed": patched(
        lambda: DataLoader(Indices(), 3, sampler=OfRandomLength(), collate_fn=as_it_is)
    ),
    "iterable": patched(iterable),
    "iterable, workers": patched(lambda: iterable(2)),
    "iterable, persistent workers": patched(lambda: iterable(2, persistent_workers=True)),
    "iterable, by_worker": patched(lambda: iterable(2), share="by_worker", uneven="keep"),
    "DDPSamplerWrapper, shuffled twice": by_wrapper,
    "DDPBatchSamplerWrapper, shuffled twice": by_batches,
}


@pytest.mark.parametrize("user", USERS)
def test_a_loader_without_a_seed_adopts_that_of_the_state(user: str) -> None:
    start = USERS[user]
    whole, stopped, again = start(1, 2, seed=SAVED), start(1, 2, seed=SAVED), start(1, 2)
    epochs = [list(whole) for _ in range(3)]
    assert list(start(1, 2)) != epochs[0]
    list(stopped)
    list(again)  # workers that persist are running now
    iterator = iter(stopped)
    state = None
    for number, _ in enumerate(iterator):
        if number == 1:
            state = loader_state(stopped, batches_done=2)
            break
    del iterator
    assert state is not None
    restore_loader(again, state)
    rest = list(again)
    assert rest == epochs[1][2:]
    assert list(again) == epochs[2]
    assert loader_state(again, batches_done=len(epochs[2])) == loader_state(whole, batches_done=len(epochs[2]))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_seeded_by_the_seed_that_was_adopted(persistent: bool) -> None:
    start = patched(lambda: augmented(persistent_workers=persistent))
    stopped, fresh, again = start(1, 2, seed=SAVED), start(1, 2, seed=SAVED), start(1, 2)
    assert list(again) != list(stopped)
    restore_loader(again, loader_state(stopped, batches_done=len(stopped)))
    fresh.set_epoch(1)  # type: ignore[attr-defined]  # the patched one's
    assert [list(again), list(again)] == [[], list(fresh)]


@pytest.mark.parametrize("seed", [7, 0])
def test_a_seed_that_was_chosen_is_kept_and_the_error_says_which_to_pass(seed: int) -> None:
    start = USERS["shuffle=True"]
    state = loader_state(start(0, 2, seed=123), batches_done=0)
    chosen = start(0, 2, seed=seed)
    facts: Words = ("another loader", f"seed: 123 in the state; {seed} here")
    with raises(StateError, facts, ("seed=123", "no seed")):
        restore_loader(chosen, state)
    assert list(chosen) == list(start(0, 2, seed=seed))  # as it was
    for remedy in ({"seed": 123}, {}):
        again = start(0, 2, **remedy)
        restore_loader(again, state)
        assert list(again) == list(start(0, 2, seed=123))


def test_a_pass_that_runs_keeps_the_seed_that_it_began_with() -> None:
    start = USERS["DDPSamplerWrapper, shuffled twice"]
    running, expected = start(0, 1), list(start(0, 1))
    iterator = iter(running)
    first = next(iterator)
    restore_loader(running, loader_state(start(0, 1, seed=5), batches_done=0))
    assert [first, *iterator] == expected


def test_the_seeds_of_loaders_are_their_own_and_follow_from_what_they_are_told_alone() -> None:
    keys = [
        (seed, stream, number) for seed in (0, 2**64 - 1) for stream in ("00", "f0f0" * 8) for number in range(1, 50)
    ]
    seeds = [loader_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert seeds == [loader_seed(*key) for key in keys]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_streams_state_is_restored_by_the_loader_alone() -> None:
    """Workers that persist would know nothing of one that its sampler is given."""
    start = USERS["iterable, persistent workers"]
    running, expected = start(0, 1), list(start(0, 1, seed=5))
    state = loader_state(start(0, 1, seed=5), batches_done=0)
    list(running)
    with raises(StateError, "StreamSampler", ("loader_state(loader)", "restore_loader(loader, state)")):
        running.sampler.load_state_dict(state)  # type: ignore[attr-defined]  # the patched one's
    restore_loader(running, state)
    assert list(running) == expected


# Private streams of random numbers, and what workers draw.


def test_a_private_stream_goes_on_where_it_stopped() -> None:
    seed_ambient(0)
    with PrivateRNG(3, 1):
        whole = [draw_ambient() for _ in range(4)]
    rng = PrivateRNG(3, 1)
    parts = []
    for _ in range(4):
        with rng:
            parts.append(draw_ambient())  # one normal of a pair is left over each time
        draw_ambient()
    assert parts == whole


def test_seeds_and_epochs_give_streams_of_their_own() -> None:
    firsts = set()
    for seed, epoch in product([0, 1, 2**32, 2**64 + 1], [0, 1, 2**33]):
        with PrivateRNG(seed, epoch):
            firsts |= {float(torch.rand((), dtype=torch.float64)), float(np.random.rand()), random.random()}
    assert len(firsts) == 4 * 3 * 3


def test_leaving_restores_the_ambient_states_after_an_error_too() -> None:
    seed_ambient(5)
    draw_ambient()
    expected = draw_ambient(3)
    seed_ambient(5)
    draw_ambient()
    with pytest.raises(KeyError):
        fail_inside(PrivateRNG(0, 0))
    assert draw_ambient(3) == expected


def fail_inside(rng: PrivateRNG) -> None:
    with rng:
        seed_ambient(1)
        raise KeyError


class DrawnByWorkers(Dataset[tuple[float, ...]]):
    """Each item is what an augmentation would draw in a worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, ...]:
        info = get_worker_info()
        assert info is not None
        return (
            float(torch.rand((), dtype=torch.float64)),
            float(np.random.rand()),
            random.random(),
            float(np.random.default_rng(info.seed).random()),
        )


def augmentations(rank: int, seed: int, **options: object) -> list[tuple[float, ...]]:
    """Two epochs of one rank with two workers; ranks are seeded alike and share the loader's generator."""
    torch.manual_seed(0)
    loader: DataLoader[tuple[float, ...]] = DataLoader(
        DrawnByWorkers(),
        batch_size=1,
        num_workers=2,
        collate_fn=lambda batch: batch[0],
        generator=torch.Generator().manual_seed(0),
        **options,  # type: ignore[arg-type]
    )
    patched = patch_dataloader_to_ddp(loader, rank=rank, num_replicas=2, seed=seed)
    return [drawn for _ in range(2) for drawn in patched]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_differ_over_rank_worker_and_epoch_and_repeat_for_the_seed(persistent: bool) -> None:
    ranks = [augmentations(rank, 1, persistent_workers=persistent) for rank in range(2)]
    for library in range(3):
        drawn = [item[library] for rank in ranks for item in rank]
        assert len(set(drawn)) == 2 * 2 * 4  # ranks x epochs x items: no draw twice
    # ranks x workers x starts
    assert len({item[3] for rank in ranks for item in rank}) == 2 * 2 * (1 if persistent else 2)
    assert ranks[0] == augmentations(0, 1, persistent_workers=persistent)
    assert not set(augmentations(0, 2)) & set(ranks[0])


def seed_numpy_from_torch(worker_id: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)


def test_the_users_worker_init_fn_runs_after_the_seeding() -> None:
    ranks = [augmentations(rank, 1, worker_init_fn=seed_numpy_from_torch) for rank in range(2)]
    assert not {item[1] for item in ranks[0]} & {item[1] for item in ranks[1]}
    assert {item[1] for item in ranks[0]} != {item[1] for item in augmentations(0, 1)}


# The epoch that a user sets on an iterable dataset is the next one, as one that is set on the loader.

FEW = 12


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
        for index in range(0 if info is None else info.id, FEW, 1 if info is None else info.num_workers):
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
    assert sorted(index for _, index in found) == [*range(FEW)]
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


def drawn_once(batch: list[Any]) -> float:
    return float(torch.rand(()))


def test_workers_are_seeded_for_the_epoch_that_is_set_on_the_dataset() -> None:
    def drawn(on_dataset: bool) -> list[float]:
        given: Any = DataLoader(Told(), 2, collate_fn=drawn_once, num_workers=2)
        loader = patch_dataloader_to_ddp(given, rank=0, num_replicas=2, seed=0)
        (loader.dataset if on_dataset else loader).set_epoch(3)
        return list(loader)

    assert drawn(on_dataset=True) == drawn(on_dataset=False)
