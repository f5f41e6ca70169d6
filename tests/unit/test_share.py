"""What is shared: samples, whole batches, or what ``share="auto"`` takes the samplers to ask for."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from messages import raises
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from zoo import ALL_KINDS, Kind, PKBatches, Source, as_it_is, by_torch, loader, seed_ambient, units
from zoo import Drawn as DrawnIndices

from ddp_patch import DDPBatchSamplerWrapper, iter_with_mask, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import InvalidOptionError, StateError
from ddp_patch.positions_and_padding import Plan
from ddp_patch.sharding.sampler import describe_share

# Samplers of other packages, as they are there.


class MPerClassSampler(Sampler[int]):
    """pytorch-metric-learning's: so many samples of a class, then of the next, and classes anew for each batch."""

    __module__ = "pytorch_metric_learning.samplers.m_per_class_sampler"

    def __init__(self, labels: Sequence[int], m: int, batch_size: int, length_before_new_iter: int) -> None:
        self.m_per_class, self.batch_size, self.list_size = m, batch_size, length_before_new_iter
        self.labels = sorted(set(labels))
        self.labels_to_indices = {label: [i for i, own in enumerate(labels) if own == label] for label in self.labels}

    def __len__(self) -> int:
        return self.list_size

    def __iter__(self) -> Iterator[int]:
        indices: list[int] = []
        for _ in range(self.list_size // self.batch_size):
            np.random.shuffle(self.labels)
            for label in self.labels[: self.batch_size // self.m_per_class]:
                indices += np.random.choice(self.labels_to_indices[label], self.m_per_class, replace=False).tolist()
        return iter(indices)


class RepeatSampler(Sampler[int]):
    """trl's: each prompt several times running, so that the answers to it are compared with each other."""

    __module__ = "trl.trainer.utils"

    def __init__(self, data_source: Sequence[int], mini_repeat_count: int, batch_size: int, repeat_count: int) -> None:
        self.num_samples, self.mini_repeat_count = len(data_source), mini_repeat_count
        self.batch_size, self.repeat_count = batch_size, repeat_count
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return self.num_samples // self.batch_size * self.batch_size * self.mini_repeat_count * self.repeat_count

    def __iter__(self) -> Iterator[int]:
        indices = torch.randperm(self.num_samples, generator=self.generator).tolist()
        chunks = [indices[at : at + self.batch_size] for at in range(0, self.num_samples, self.batch_size)]
        for chunk in chunks:
            for _ in range(self.repeat_count if len(chunk) == self.batch_size else 0):
                yield from (index for index in chunk for _ in range(self.mini_repeat_count))


LABELS = [i % 10 for i in range(100)]


def m_per_class() -> DataLoader[Any]:
    return loader(8, sampler=MPerClassSampler(LABELS, m=4, batch_size=8, length_before_new_iter=96))


def repeated() -> DataLoader[Any]:
    return loader(8, sampler=RepeatSampler(range(20), mini_repeat_count=4, batch_size=2, repeat_count=1))


def patched(given: DataLoader[Any], world_size: int = 2, rank: int = 0, **options: Any) -> Any:
    return patch_dataloader_to_ddp(given, rank=rank, num_replicas=world_size, **{"seed": 3} | options)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sampler_that_is_known_to_put_groups_together_is_shared_in_whole_batches(world_size: int) -> None:
    for rank in range(world_size):
        for batch in patched(m_per_class(), world_size, rank):
            assert sorted(Counter(LABELS[index] for index in batch).values()) == [4, 4]
        for batch in patched(repeated(), world_size, rank):
            assert sorted(Counter(batch).values()) == [4, 4]
        if world_size == 2:  # item by item, where a user asks for it by name, groups are torn
            for batch in patched(m_per_class(), 2, rank, share="samples"):
                assert min(Counter(LABELS[index] for index in batch).values()) == 2


@pytest.mark.parametrize("make", [m_per_class, repeated, loader])
def test_what_is_no_stream_is_shared_as_by_default_with_by_worker(make: Callable[[], DataLoader[Any]]) -> None:
    """So that one call serves a stream and its validation."""
    for rank in range(2):
        seed_ambient(7)
        expected = patched(make(), 2, rank)
        seed_ambient(7)
        given = patched(make(), 2, rank, share="by_worker")
        assert describe_share(given) == describe_share(expected)
        assert list(given) == list(expected)


def test_a_subclass_of_such_a_sampler_and_no_sampler_of_the_same_name_is_known() -> None:
    class Own(MPerClassSampler):
        pass

    class Other(DrawnIndices):
        __qualname__ = "MPerClassSampler"

    own = loader(8, sampler=Own(LABELS, m=4, batch_size=8, length_before_new_iter=96))
    assert isinstance(patched(own).batch_sampler, DDPBatchSamplerWrapper)
    assert type(patched(loader(sampler=Other(by_torch, lazily=True))).batch_sampler) is BatchSampler


# The contract: every kind of loader, in whole batches.

SHARED_IN_BATCHES = [
    replace(kind, batches=kind.make().batch_sampler is not None)
    for kind in ALL_KINDS
    if not isinstance(kind.make().dataset, IterableDataset) and not kind.endless
]


def epochs_of(kind: Kind, rank: int, world_size: int, **options: Any) -> list[list[Any]]:
    seed_ambient(1000 * world_size + rank)
    one = patched(kind.make(), world_size, rank, **options)
    return [units(kind, one) for _ in range(kind.epochs)]


@pytest.mark.parametrize("kind", SHARED_IN_BATCHES, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore::ddp_patch.errors.StreamLengthWarning")
def test_whole_batches_of_one_process_go_to_one_rank_each(kind: Kind) -> None:
    """``share="auto"`` in a world of one makes the batches of one process."""
    streams = epochs_of(kind, 0, 1)
    assert epochs_of(kind, 0, 1, share="batches") == streams
    for rank in range(3):
        plan = Plan(rank, 3)
        shares = [[stream[p % len(stream)] for p in plan.share(len(stream))] for stream in streams]
        assert epochs_of(kind, rank, 3, share="batches") == shares


# How torch's BatchSampler is drawn.


# What users and frameworks read of the loader.


def test_the_patched_loader_keeps_what_is_read_of_it() -> None:
    given = loader(shuffle=True, drop_last=True)
    mine = patched(given, share="batches")
    assert (mine.batch_size, mine.drop_last) == (4, True)
    assert (mine.batch_sampler.batch_size, mine.batch_sampler.drop_last) == (4, True)
    assert isinstance(mine.batch_sampler, DDPBatchSamplerWrapper)
    assert mine.sampler is mine.batch_sampler
    assert mine.batch_sampler.sampler is given.sampler


def test_a_state_is_of_whole_batches_and_of_their_size() -> None:
    whole = [list(one) for one in (patched(loader(shuffle=True), 2, rank, share="batches") for rank in range(2))]
    running = patched(loader(shuffle=True), share="batches")
    iterator = iter(running)
    next(iterator)
    state = loader_state(running, batches_done=1)
    assert state["parts"] == [[[2, 1]]]
    resumed = patched(loader(shuffle=True), 1, share="batches")
    restore_loader(resumed, state)
    assert list(resumed) == [whole[0][1], whole[1][1], whole[0][2], whole[1][2]]
    for other in (patched(loader(shuffle=True)), patched(loader(5, shuffle=True), share="batches")):
        with raises(StateError, "another loader", "Build"):
            restore_loader(other, state)


def test_masks_tell_which_batches_are_padding() -> None:
    masks = [
        [mask.tolist() for _, mask in iter_with_mask(patched(loader(), 4, rank, share="batches"))] for rank in (1, 3)
    ]
    assert masks == [[[True] * 4, [True] * 3], [[True] * 4, [False] * 4]]


# What cannot be shared so.


def test_samples_of_a_batch_sampler_are_refused_and_what_is_no_way_to_share() -> None:
    with raises(InvalidOptionError, "share='batch'", ("'auto'", "'samples'", "'batches'")):
        patched(loader(), share="batch")
    with raises(InvalidOptionError, ("share='samples'", "PKBatches"), "share='batches'"):
        patched(loader(batch_sampler=PKBatches()), share="samples")
    assert len(list(patched(loader(batch_sampler=PKBatches()), share="batches"))) == 4
    assert len(list(patched(loader(batch_sampler=BatchSampler(range(16), 4, False)), share="samples"))) == 2


class InBatches(IterableDataset[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(range(23), 4, False))


def test_batches_of_an_iterable_dataset_are_refused_and_those_that_it_makes_are_shared() -> None:
    with raises(InvalidOptionError, ("share='batches'", "batch_size=3", "Source"), "batch_size=None"):
        patched(DataLoader(Source(), batch_size=3), share="batches")
    for rank in range(2):
        mine = patched(DataLoader(InBatches(), batch_size=None, collate_fn=as_it_is), 2, rank, share="batches")
        assert list(mine) == list(InBatches())[rank::2]


@pytest.mark.parametrize("share", ["auto", "samples", "batches"])
def test_items_of_a_loader_without_batch_size_are_what_they_are(share: Any) -> None:
    given = loader(None, sampler=BatchSampler(range(16), 4, False))
    assert list(patched(given, share=share)) == [[0, 1, 2, 3], [8, 9, 10, 11]]
