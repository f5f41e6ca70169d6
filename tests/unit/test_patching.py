"""The one call and the guard: what is wrapped, what is kept, what comes back."""

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from messages import raises
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from zoo import NEWER, Drawn, EpochSeeded, Indices, N, PKBatches, Reversed, as_it_is, by_torch, loader, seeded_generator

import ddp_patch
from ddp_patch import (
    DDPBatchSamplerWrapper,
    DDPSamplerWrapper,
    PatchedLoader,
    assert_loaders_patched,
    check_loaders_is_patched,
    extract_loader_parameters,
    patch_dataloader_to_ddp,
)
from ddp_patch.errors import NotPatchedError, StreamLengthWarning, UnsupportedLoaderError
from ddp_patch.loaders.recognition import shards_itself
from ddp_patch.orders.random_states import epoch_seed, seed_worker

WORLD: dict[str, Any] = {"rank": 1, "num_replicas": 3}


@pytest.mark.parametrize("is_given", [False, True])
def test_torchs_batch_sampler_is_rebuilt_over_the_wrapped_sampler(is_given: bool) -> None:
    inner: Any = RandomSampler(Indices())
    over = {"batch_sampler": BatchSampler(inner, 5, drop_last=True)} if is_given else {"sampler": inner}
    given = loader(5, drop_last=not is_given, **over)
    patched = patch_dataloader_to_ddp(given, **WORLD)
    assert type(patched.batch_sampler) is BatchSampler
    assert isinstance(patched.sampler, DDPSamplerWrapper)
    assert patched.sampler.sampler is inner
    assert patched.batch_sampler.sampler is patched.sampler
    assert (patched.batch_size, patched.drop_last) == (5, True)
    assert (patched.batch_sampler.batch_size, patched.batch_sampler.drop_last) == (5, True)


class LastFirst(BatchSampler):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def test_a_wrapper_made_anew_as_torchs_batch_sampler_is_stays_what_it_was() -> None:
    """So Lightning does with the sampler that it finds in the loader."""
    for rank in range(2):
        given = loader(batch_sampler=LastFirst(SequentialSampler(Indices()), 4, drop_last=False))
        patched: Any = patch_dataloader_to_ddp(given, rank=rank, num_replicas=2)
        anew = type(patched.batch_sampler)(patched.sampler, batch_size=4, drop_last=False)
        assert list(anew) == list(patched.batch_sampler)
        facts = (
            type(patched.batch_sampler).__name__,
            "a SequentialSampler",
            "batch_size",
            "drop_last",
            "overfit_batches",
        )
        with raises(UnsupportedLoaderError, facts, "whole batch sampler"):
            type(patched.batch_sampler)(SequentialSampler(Indices()), batch_size=4, drop_last=False)
    with raises(TypeError, ("DDPBatchSamplerWrapper()", "batch_size, drop_last"), "set it on the DataLoader"):
        DDPBatchSamplerWrapper(PKBatches(), batch_size=4, drop_last=False, **WORLD)  # type: ignore[call-arg]  # on purpose


def test_a_wrapper_that_leaves_a_batch_out_is_not_rebuilt_to_keep_it() -> None:
    """As Lightning does to predict."""
    wrapper: Any = DDPBatchSamplerWrapper(BatchSampler(range(N), 4, drop_last=True), False, **WORLD)
    with raises(UnsupportedLoaderError, ("over itself", "drop_last=False", "predict"), "with drop_last=False"):
        type(wrapper)(wrapper, batch_size=4, drop_last=False)


@pytest.mark.parametrize("batch_size", [None, 4])
def test_everything_else_is_kept(batch_size: int | None) -> None:
    context = torch.multiprocessing.get_context("spawn")

    def init(worker_id: int) -> None: ...

    given = DataLoader(
        Indices(),
        batch_size=batch_size,
        num_workers=2,
        collate_fn=as_it_is,
        pin_memory=True,
        timeout=3.0,
        worker_init_fn=init,
        multiprocessing_context=context,
        generator=seeded_generator(),
        prefetch_factor=5,
        persistent_workers=True,
        pin_memory_device="cuda",
        **NEWER,
    )
    before = dict(vars(given))
    kept = extract_loader_parameters(given, ignore_data_related_parameters=True)
    patched = patch_dataloader_to_ddp(given, **WORLD)
    assert vars(given) == before
    new = extract_loader_parameters(patched, ignore_data_related_parameters=True)
    seeding = new.pop("worker_init_fn")
    assert (seeding.func, seeding.args[0]) == (seed_worker, kept.pop("worker_init_fn"))
    assert new == kept
    assert patched.dataset is given.dataset
    assert (type(patched), patched.batch_size) == (DataLoader, batch_size)


class Counting(DataLoader[Any]):
    """A loader that counts the epochs of its dataset, with a ``set_epoch`` of its own."""

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch


def pickled(patched: Any) -> Any:
    return pickle.loads(pickle.dumps(patched))  # noqa: S301 - our own


MADE: list[Callable[[], Any]] = [
    lambda: loader(shuffle=True),
    lambda: loader(batch_sampler=PKBatches()),
    lambda: Counting(Indices(), 4, shuffle=True, collate_fn=as_it_is),
]


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("copied", [lambda patched: patched, copy.copy, copy.deepcopy, pickled])
def test_a_patched_loader_and_its_samplers_can_be_told_the_epoch(make: Any, copied: Any) -> None:
    """Where frameworks and users look for ``set_epoch``: a copy tells its own sampler, and the user's loader."""
    patched: Any = copied(patch_dataloader_to_ddp(make(), **WORLD))
    assert isinstance(patched.sampler, DistributedSampler)  # of whole batches, too
    epochs = [list(patched) for _ in range(3)]
    assert epochs[0] != epochs[1]
    for told in (patched, patched.batch_sampler, patched.sampler):
        told.set_epoch(1)
        assert list(patched) == epochs[1]
    assert not isinstance(patched, Counting) or copied is copy.copy or patched.told == 1
    assert "set_epoch" not in vars(make())


class Delegating(DataLoader[Any]):
    """As Ray's wrapper: a loader with the attributes of another one, which is the one that it iterates."""

    wrapped: DataLoader[Any]

    def __init__(self, wrapped: DataLoader[Any]) -> None:
        vars(self).update(vars(wrapped))
        self.wrapped = wrapped

    def __iter__(self) -> Any:
        return iter(self.wrapped)


class Rebuilt(DataLoader[Any]):
    """As people write them: made of another one's parts, some of which are new, and iterating that one."""

    def __init__(self, given: DataLoader[Any]) -> None:
        super().__init__(given.dataset, given.batch_size, sampler=given.sampler)
        self.parts = [given]

    def __iter__(self) -> Any:
        return iter(self.parts[0])


def test_a_loader_that_draws_from_another_one_counts_as_that_and_cannot_be_patched() -> None:
    patched: Any = Delegating(patch_dataloader_to_ddp(loader(), **WORLD))
    assert check_loaders_is_patched(patched)
    assert patch_dataloader_to_ddp(patched, **WORLD) is patched
    with raises(UnsupportedLoaderError, ("Delegating", "__iter__", "'wrapped'"), "to Delegating"):
        patch_dataloader_to_ddp(Delegating(loader()), **WORLD)
    with raises(UnsupportedLoaderError, ("Rebuilt", "__iter__", "'parts'"), "to Rebuilt"):
        patch_dataloader_to_ddp(Rebuilt(loader()), **WORLD)
    beside: Any = loader()
    beside.validation, beside.itself = loader(sampler=beside.sampler), beside
    assert check_loaders_is_patched(patch_dataloader_to_ddp(beside, **WORLD))


def test_shuffle_is_torchs_own_order_under_the_epochs_seed() -> None:
    given = loader(shuffle=True)
    patched = patch_dataloader_to_ddp(given, rank=0, num_replicas=1, seed=5)
    for epoch in range(3):
        torch.manual_seed(epoch_seed(5, epoch))
        in_one_process = list(given.sampler)
        assert [i for batch in patched for i in batch] == in_one_process


@pytest.mark.parametrize(
    ("kind", "workers", "persistent"),
    [
        *product(["sample", "batch, lazily", "unbatched"], [0], [False]),
        ("sample", 2, True),
        ("batch, lazily", 2, False),
    ],
)
def test_a_generator_gives_what_it_gives_in_one_process(kind: str, workers: int, persistent: bool) -> None:
    """The loader draws its workers' base seed from the same generator, in a fixed order with the sampler."""

    def build() -> DataLoader[Any]:
        generator = seeded_generator()
        sampler = RandomSampler(Indices(), generator=generator)
        by_kind: dict[str, dict[str, Any]] = {
            "sample": {"shuffle": True},
            "batch, lazily": {"batch_sampler": LazyBatches(sampler)},
            "unbatched": {"batch_size": None, "sampler": sampler},
        }
        return loader(generator=generator, num_workers=workers, persistent_workers=persistent, **by_kind[kind])

    given, alone = build(), patch_dataloader_to_ddp(build(), rank=0, num_replicas=1)
    ranks = [patch_dataloader_to_ddp(build(), rank=rank, num_replicas=2) for rank in range(2)]
    shared = list if kind.startswith("batch") else flat
    for epoch in range(3):
        stream = shared(alone)
        assert epoch or stream == shared(given)  # later epochs follow from their numbers
        rounds = zip(*map(shared, ranks), strict=True)
        assert [unit for one_round in rounds for unit in one_round][: len(stream)] == stream


class LazyBatches:
    def __init__(self, sampler: RandomSampler) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        yield from BatchSampler(self.sampler, 4, drop_last=False)


def flat(loader: DataLoader[Any]) -> list[Any]:
    return [item for batch in loader for item in (batch if isinstance(batch, list) else [batch])]


class ShardsItself(Drawn):
    is_ddp_aware = True


SHARDED: list[Callable[[], Any]] = [
    lambda: DistributedSampler(Indices(), num_replicas=3, rank=1),
    lambda: DistributedSampler(Indices(0), num_replicas=3, rank=1),
    lambda: ShardsItself(by_torch, lazily=True),
]


@pytest.mark.parametrize("make", SHARDED)
def test_what_shards_is_left_as_it_is_wherever_it_is(make: Callable[[], Any]) -> None:
    for given in (
        loader(sampler=make()),
        loader(batch_size=None, sampler=make()),
        loader(batch_sampler=Reversed(BatchSampler(make(), 4, drop_last=False))),
    ):
        assert check_loaders_is_patched(given)
        assert patch_dataloader_to_ddp(given, **WORLD) is given


class Wrapping:
    """As Lightning Fabric's wrapper, which is no DataLoader and has its attributes."""

    def __init__(self, wrapped: Any) -> None:
        vars(self).update(vars(wrapped))


class Posing(Wrapping):
    """As accelerate's, which says that it is a DataLoader."""

    @property  # type: ignore[misc]  # so it is in accelerate
    def __class__(self) -> Any:
        return DataLoader


@pytest.mark.parametrize("wrap", [Wrapping, Posing])
def test_a_frameworks_wrapper_counts_as_what_it_wraps_and_cannot_be_patched(wrap: Any) -> None:
    patched = wrap(patch_dataloader_to_ddp(loader(), **WORLD))
    assert check_loaders_is_patched({"train": [patched]})
    assert patch_dataloader_to_ddp(patched, **WORLD) is patched
    unpatched = wrap(loader())
    with raises(NotPatchedError, "1 of 2 loaders: loaders['val'].", "patch_dataloader_to_ddp()"):
        assert_loaders_patched({"train": patched, "val": unpatched})
    with raises(UnsupportedLoaderError, (wrap.__name__, "framework", "DataLoader"), ("loader first", "framework")):
        patch_dataloader_to_ddp(unpatched, **WORLD)


@pytest.mark.parametrize("name", ["BatchSamplerShard", "IterableDatasetShard", "DataLoaderDispatcher"])
def test_what_accelerate_shares_with_is_known_by_name(name: str) -> None:
    shares = type(name, (), {"__module__": "accelerate.data_loader"})()
    assert shards_itself(shares)
    assert shards_itself(type("Subclass", (type(shares),), {})())
    assert not shards_itself(type(name, (), {"__module__": "accelerate.elsewhere"})())


SCHEDULERS = [
    {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
]


@pytest.mark.parametrize("variables", SCHEDULERS)
def test_a_scheduler_is_recognised_as_torch_does_by_the_size_that_its_script_sets(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="environment variable RANK expected"):
        dist.init_process_group("gloo")
    given = loader()
    with pytest.warns(ddp_patch.errors.NotDistributedWarning):
        assert patch_dataloader_to_ddp(given) is given
    monkeypatch.setenv("WORLD_SIZE", "4")
    remedy = ("torch.distributed.init_process_group()", "Fabric.launch()", "Accelerator()", "train_dataloader()")
    with raises(ddp_patch.errors.WorldError, "WORLD_SIZE=4", (*remedy, "rank=", "num_replicas=")):
        patch_dataloader_to_ddp(given)


def test_a_generator_that_two_loaders_share() -> None:
    """Each loader draws what it would alone, whatever the other has drawn: nobody knows when other ranks draw."""
    generator, one = seeded_generator(), loader(shuffle=True, generator=seeded_generator())
    one_rank = patch_dataloader_to_ddp(one, rank=0, num_replicas=1)
    alone = [flat(one_rank) for _ in range(2)]
    given = [loader(shuffle=True, generator=generator) for _ in range(2)]
    loaders = [patch_dataloader_to_ddp(one, rank=0, num_replicas=1) for one in given]
    assert [[flat(one) for one in loaders] for _ in range(2)] == [[epoch, epoch] for epoch in alone]


def test_a_loop_that_empties_its_batches_leaves_the_users_as_they_are() -> None:
    given = [[0, 1], [2], [3, 4]]
    for batch in DDPBatchSamplerWrapper(given, False, rank=0, num_replicas=2):
        batch.clear()
    assert given == [[0, 1], [2], [3, 4]]


@pytest.mark.parametrize("workers", [0, 1])
def test_two_live_iterators_are_two_epochs_and_the_count_goes_on(workers: int) -> None:
    def make() -> DataLoader[Any]:
        given = loader(batch_sampler=LazyBatches(RandomSampler(Indices())), num_workers=workers)
        return patch_dataloader_to_ddp(given, rank=0, num_replicas=2, seed=1)

    alone, paired = make(), make()
    epochs = [list(alone) for _ in range(4)]
    first, second = iter(paired), iter(paired)
    assert list(first) == epochs[0]
    assert list(second) == epochs[1]
    third, fourth = iter(paired), iter(paired)
    pairs = list(zip(third, fourth, strict=True))
    assert [list(each) for each in zip(*pairs, strict=True)] == epochs[2:]


class HandsOn(EpochSeeded):
    """Tells another sampler its epoch in each pass."""

    def __iter__(self) -> Iterator[int]:
        inner = EpochSeeded()
        inner.set_epoch(self.epoch)
        return iter(inner)


@pytest.mark.parametrize("inner", [EpochSeeded(), HandsOn()], ids=lambda inner: type(inner).__name__)
def test_an_epoch_that_the_user_sets_on_the_own_sampler_counts(inner: EpochSeeded) -> None:
    """As scripts do that were written for DistributedSampler, above all when they resume."""
    patched = patch_dataloader_to_ddp(loader(sampler=inner), rank=0, num_replicas=1)
    epochs = {epoch: np.random.default_rng(epoch).permutation(N).tolist() for epoch in (10, 11, 12)}
    for epoch in (10, 11):
        inner.set_epoch(epoch)
        assert flat(patched) == epochs[epoch]
    assert flat(patched) == epochs[12]


class Advances(EpochSeeded):
    """Advances its epoch in each pass."""

    def __iter__(self) -> Iterator[int]:
        yield from [*super().__iter__()]
        self.epoch += 1


def test_a_sampler_that_advances_its_epoch_is_not_taken_for_one_that_the_user_has_told_it() -> None:
    patched = patch_dataloader_to_ddp(loader(sampler=Advances()), rank=0, num_replicas=1)
    for epoch in range(3):
        assert flat(patched) == np.random.default_rng(epoch).permutation(N).tolist()


def test_samplers_in_two_threads_do_not_mix_their_states() -> None:
    def make(seed: int) -> DDPSamplerWrapper[int]:
        return DDPSamplerWrapper(Drawn(by_torch, lazily=True), False, rank=0, num_replicas=1, seed=seed)

    expected = [[list(sampler) for _ in range(50)] for sampler in (make(0), make(1))]
    torch.manual_seed(3)
    ambient = torch.rand(2)
    torch.manual_seed(3)
    with ThreadPoolExecutor(2) as pool:
        drawn = list(pool.map(lambda sampler: [list(sampler) for _ in range(50)], [make(0), make(1)]))
    assert drawn == expected
    assert torch.equal(torch.rand(2), ambient)


def test_a_loader_with_a_wrapper_made_by_hand_is_no_patched_loader() -> None:
    """It cannot be told its epoch, which type checkers would allow."""
    data: Any = range(6)
    by_hand: Any = DataLoader(data, sampler=DDPSamplerWrapper(SequentialSampler(data), rank=0, num_replicas=2))
    assert not isinstance(by_hand, PatchedLoader)
    assert isinstance(patch_dataloader_to_ddp(DataLoader(data), rank=0, num_replicas=2), PatchedLoader)


class OwnLength(DataLoader[int]):
    def __len__(self) -> int:
        return 23


def test_a_loader_class_with_a_length_of_its_own_is_told_of() -> None:
    with pytest.warns(StreamLengthWarning, match="len\\(\\) of the OwnLength says 23 .* each rank gets 12 batches"):
        patched = patch_dataloader_to_ddp(OwnLength(Indices(23)), rank=0, num_replicas=2)
    assert len(list(patched)) == 12
