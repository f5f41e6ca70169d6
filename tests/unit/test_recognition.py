"""What shards itself: known by the numbers that it holds, by its name, or by what it says."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from messages import missing, raises
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
)
from zoo import Indices, N

from ddp_patch import (
    DDPBatchSamplerWrapper,
    DDPSamplerWrapper,
    assert_loaders_patched,
    check_loaders_is_patched,
    patch_dataloader_to_ddp,
)
from ddp_patch.errors import AlreadyPatchedError, AssumedShardedWarning
from ddp_patch.loaders.recognition import shards_itself, world_of

# Stand-ins hold what the real classes hold, under the same names.


class OfReplicas(Sampler[int]):
    """As timm's, torchvision's and Ultralytics' hold their world; others have other names for it."""

    names = ("rank", "num_replicas")

    def __init__(self, rank: Any, ranks: Any) -> None:
        vars(self).update(zip(self.names, (rank, ranks), strict=True))

    def __iter__(self) -> Iterator[int]:
        rank, ranks = (vars(self)[name] for name in self.names)
        return islice(range(N), rank, None, ranks)


class OfMMEngine(OfReplicas):
    """As mmengine's DefaultSampler and InfiniteSampler, and lhotse's samplers with a world."""

    names = ("rank", "world_size")


class OfDetectron2(OfReplicas):
    names = ("_rank", "_world_size")


class OfTransformers(OfReplicas):
    names = ("process_index", "num_processes")


class InSlots:
    __slots__ = ("num_replicas", "rank", "unset")

    def __init__(self, rank: Any, ranks: Any) -> None:
        self.rank, self.num_replicas = rank, ranks

    def __iter__(self) -> Iterator[int]:
        return islice(range(N), self.rank, None, self.num_replicas)


SAMPLERS: list[Callable[[Any, Any], Any]] = [OfReplicas, OfMMEngine, OfDetectron2, OfTransformers, InSlots]


class Zipped(Sampler[Any]):
    """As lhotse's ZipSampler and RoundRobinSampler, which are made for a world of 1 and hold those that are not."""

    def __init__(self, *samplers: Any) -> None:
        self.rank, self.world_size, self.samplers = 0, 1, samplers

    def __iter__(self) -> Iterator[Any]:
        return zip(*self.samplers, strict=False)


class World:
    """As mosaicml's."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.node, self.num_nodes, self.is_multinode = 0, 1, False
        self.rank, self.num_ranks, self.ranks_per_node = rank, ranks, ranks
        self.worker, self.num_workers, self.is_leader = rank, ranks, rank == 0


class Stream(IterableDataset[int]):
    """As mosaicml's StreamingDataset: two worlds, of which tensor parallelism makes one smaller."""

    def __init__(self, rank: int, ranks: int, replication: int = 1) -> None:
        self.shuffle, self.local = True, "/data"
        self._unique_rank_world = World(rank, ranks)
        self._parallel_rank_world = World(rank // replication, ranks // replication)

    def __iter__(self) -> Iterator[int]:
        world = self._parallel_rank_world
        return iter(range(world.rank, N, world.num_ranks))


class _Env:
    def __init__(self, **world: int) -> None:
        vars(self).update(world)


class Within(IterableDataset[int]):
    """Holds what does, or something beside it."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


def litdata(rank: int, ranks: int) -> Within:
    """As litdata's StreamingDataset: the workers of one process are no ranks."""
    ours = _Env(world_size=ranks, global_rank=rank, num_nodes=1)
    return Within(distributed_env=ours, worker_env=_Env(world_size=1, rank=0), seed=42)


def timm(rank: int, ranks: int) -> Within:
    """As timm's IterableImageDataset, whose reader splits."""
    return Within(reader=SimpleNamespace(root="/data", dist_rank=rank, dist_num_replicas=ranks), transform=None)


class Drawing(IterableDataset[int]):
    """As lhotse's IterableDatasetWrapper."""

    def __init__(self, sampler: Any) -> None:
        self.dataset, self.sampler = Indices(), sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)


class OfLightning(DistributedSampler[Any]):
    """As Lightning's, which derive from torch's."""


def over(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Indices(), sampler=sampler, batch_size=4)


def by_batches(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Indices(), batch_sampler=BatchSampler(sampler, 4, drop_last=False))


MAKERS: list[Callable[[int, int], DataLoader[Any]]] = [
    *(lambda rank, ranks, kind=kind: over(kind(rank, ranks)) for kind in SAMPLERS),
    lambda rank, ranks: by_batches(OfMMEngine(rank, ranks)),
    lambda rank, ranks: over(OfReplicas(np.int64(rank), np.int64(ranks))),
    lambda rank, ranks: over(Zipped(OfMMEngine(rank, ranks), OfMMEngine(rank, ranks))),
    lambda rank, ranks: over(Zipped(Zipped(OfMMEngine(0, 1), OfMMEngine(rank, ranks)))),
    lambda rank, ranks: DataLoader(Stream(rank, ranks)),
    lambda rank, ranks: DataLoader(litdata(rank, ranks)),
    lambda rank, ranks: DataLoader(Within(_datasets=[litdata(rank, ranks), litdata(rank, ranks)])),
    lambda rank, ranks: DataLoader(timm(rank, ranks)),
    lambda rank, ranks: DataLoader(Drawing(OfMMEngine(rank, ranks))),
    lambda rank, ranks: over(DistributedSampler(Indices(), rank=rank, num_replicas=ranks)),
    lambda rank, ranks: by_batches(DistributedSampler(Indices(), rank=rank, num_replicas=ranks, shuffle=False)),
    lambda rank, ranks: over(OfLightning(Indices(), rank=rank, num_replicas=ranks)),
]


@pytest.mark.parametrize("make", MAKERS)
def test_what_was_made_for_one_rank_of_several_stays_or_is_refused_and_for_one_process_is_patched(
    make: Callable[[int, int], Any],
) -> None:
    given = make(1, 4)
    assert check_loaders_is_patched(given)
    assert_loaders_patched([given])
    assert patch_dataloader_to_ddp(given, rank=1, num_replicas=4) is given
    with raises(AlreadyPatchedError, ("sharded already", "rank 1 of 4", "rank 0 of 2"), "rank 0 of 2"):
        patch_dataloader_to_ddp(make(1, 4), rank=0, num_replicas=2)
    remedied, of_one = make(0, 2), make(0, 1)
    assert patch_dataloader_to_ddp(remedied, rank=0, num_replicas=2) is remedied
    assert not check_loaders_is_patched(of_one)
    patched = patch_dataloader_to_ddp(of_one, rank=1, num_replicas=4)
    assert patched is not of_one
    assert check_loaders_is_patched(patched)


def test_a_distributed_sampler_for_one_process_is_shared_as_any_other_one() -> None:
    """It shuffles by seed and epoch, and takes the epoch from the share."""
    own: Any = DistributedSampler(Indices(), num_replicas=1, rank=0, seed=5)
    given = DataLoader(Indices(), batch_size=4, sampler=own)
    ranks = [patch_dataloader_to_ddp(given, rank=rank, num_replicas=2, uneven="keep") for rank in range(2)]
    for epoch in range(2):
        own.set_epoch(epoch)
        whole = list(own)
        for rank, loader in enumerate(ranks):
            loader.set_epoch(epoch)
            assert torch.cat([*loader]).tolist() == whole[rank::2]


def test_ranks_that_replicate_each_other_share_as_one() -> None:
    assert world_of(Stream(3, 4, replication=2)) == (1, 2)
    given = DataLoader(Stream(3, 4, replication=2))
    assert patch_dataloader_to_ddp(given, rank=1, num_replicas=2) is given


def split_by_node(source: Any, group: Any = None) -> Any:
    """As webdataset's: it asks for the world when it runs."""
    return source


def pipeline(*stages: Any) -> Within:
    """As webdataset's DataPipeline and WebDataset keep their stages."""
    return Within(pipeline=[*stages], length=-1, repetitions=1)


@pytest.mark.parametrize("stage", [split_by_node, partial(split_by_node, group=None)])
def test_a_pipeline_that_splits_by_node_shards_where_there_is_a_world(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = pipeline(["a.tar"], stage, str)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not shards_itself(dataset)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert shards_itself(dataset)
    assert not shards_itself(pipeline(["a.tar"], str))
    given = DataLoader(pipeline(dataset))
    assert patch_dataloader_to_ddp(given, rank=1, num_replicas=4) is given


# What is no such thing.


class Told(Indices):
    """Tells its world by properties, which nobody may ask."""

    @property
    def rank(self) -> int:
        raise OSError("it asks the network")

    world_size = num_replicas = rank


class Configured(Indices):
    """As research code keeps its arguments, which say nothing of what the dataset does."""

    def __init__(self) -> None:
        super().__init__()
        self.args = SimpleNamespace(rank=1, world_size=4, lr=0.1)
        self.augment = {"rank": 1, "world_size": 4}
        self.numbers = SimpleNamespace(rank=1, world_size=4, epochs=3)


NO_WORLDS = [(True, 4), (1, True), (4, 4), (-1, 4), (1.0, 4.0), ("1", "4"), (None, None), (torch.tensor(1), 4)]
NOT_SHARDED: list[Any] = [Within(rank=3, size=10), Told(), Configured(), OfReplicas, range(4), None]
NOT_SHARDED += [OfReplicas(*world) for world in NO_WORLDS]


@pytest.mark.parametrize("holder", NOT_SHARDED)
def test_numbers_that_tell_no_world(holder: Any) -> None:
    assert not shards_itself(holder)


class OwnLoader(DataLoader[Any]):
    """Holds its world for a log."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, batch_size=4)
        self.rank, self.world_size = 1, 4


def test_numbers_in_a_loader_prove_nothing() -> None:
    given = OwnLoader(Indices())
    assert not check_loaders_is_patched(given)
    assert len(list(patch_dataloader_to_ddp(given, rank=0, num_replicas=2).sampler)) == 12
    given.is_ddp_aware = True
    assert check_loaders_is_patched(given)


class Logging(Indices):
    """Holds its world for a log, and gives every rank the same."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world_size = 1, 4


def test_a_map_style_dataset_that_holds_a_world_counts_and_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    given = DataLoader(Logging(), batch_size=4)
    with pytest.warns(AssumedShardedWarning) as warned:
        assert patch_dataloader_to_ddp(given, rank=1, num_replicas=4) is given
    assert warned[0].filename == __file__
    said = ("Logging", "rank 1 of 4", "left as it is", "is_ddp_aware = False", "True")
    assert not missing(str(warned[0].message), said)
    with caplog.at_level(logging.INFO, logger="ddp_patch"):
        assert patch_dataloader_to_ddp(over(OfMMEngine(1, 4)), rank=1, num_replicas=4) is not None
    assert not missing(caplog.records[0].getMessage(), ("OfMMEngine", *said[1:]))


@pytest.mark.parametrize("given", [DataLoader(Logging()), over(OfMMEngine(1, 4)), over(InSlots(1, 4))])
def test_what_says_that_it_does_not_shard_is_sharded(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = given.dataset if isinstance(given.dataset, Logging) else given.sampler
    monkeypatch.setattr(type(holder), "is_ddp_aware", False, raising=False)
    assert not check_loaders_is_patched(given)
    assert patch_dataloader_to_ddp(given, rank=0, num_replicas=2) is not given


def test_a_distributed_sampler_may_say_that_it_does_not_shard() -> None:
    sampler: Any = DistributedSampler(Indices(), num_replicas=4, rank=1, shuffle=False)
    sampler.is_ddp_aware = False
    assert not shards_itself(sampler)
    sampler.is_ddp_aware = True
    with raises(AlreadyPatchedError, ("DistributedSampler", "rank 1 of 4", "rank 1 of 2"), "rank 1 of 2"):
        patch_dataloader_to_ddp(over(sampler), rank=1, num_replicas=2)


@dataclass
class Holding(Dataset[int]):
    held: Any

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return index


def test_datasets_are_found_wherever_they_are_kept() -> None:
    inner = Logging()
    held: Sequence[Any] = [inner, [inner], {"train": inner}, Subset(inner, range(N)), ConcatDataset([Indices(), inner])]
    for one in held:
        assert check_loaders_is_patched(DataLoader(Holding(one)))
    around = Holding(None)
    around.held = around  # itself
    assert not check_loaders_is_patched(DataLoader(around))


@pytest.mark.parametrize("wrapper", [DDPSamplerWrapper, DDPBatchSamplerWrapper])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_wrappers_refuse_what_shards_itself(wrapper: Any, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for sampler in (kind(1, 4), Zipped(OfMMEngine(1, 4))):
        remedy = ("original sampler", "is_ddp_aware = False")
        with raises(AlreadyPatchedError, (wrapper.__name__, type(sampler).__name__, "sharded already"), remedy):
            wrapper(sampler, False, rank=0, num_replicas=2)
    assert len(list(wrapper(SequentialSampler(Indices()), False, rank=0, num_replicas=2))) == 12
    monkeypatch.setattr(kind, "is_ddp_aware", False, raising=False)
    assert list(wrapper(kind(1, 4), False, rank=0, num_replicas=2))
