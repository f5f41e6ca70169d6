"""What is shared: samples, whole batches, parts of batches, or what ``share="auto"`` takes samplers to ask for."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from messages import raises
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from trying import over_in_turn
from zoo import (
    ALL_KINDS,
    STEPS,
    Indices,
    Kind,
    PKBatches,
    Source,
    as_it_is,
    by_torch,
    comparable,
    loader,
    seed_ambient,
    units,
)
from zoo import Drawn as DrawnIndices

from ddp_patch import DDPBatchSamplerWrapper, iter_with_mask, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import InvalidOptionError, StateError, UnsupportedLoaderError
from ddp_patch.positions_and_padding import Plan
from ddp_patch.sharding.sampler import describe_share

pytestmark = pytest.mark.filterwarnings("ignore::ddp_patch.errors.StreamLengthWarning")  # some kinds have it

# Samplers that are known by their names in other packages.


class MPerClassSampler(Sampler[int]):
    """pytorch-metric-learning's: so many samples of a class, then of the next."""

    __module__ = "pytorch_metric_learning.samplers.m_per_class_sampler"

    def __len__(self) -> int:
        return 96

    def __iter__(self) -> Iterator[int]:
        return (10 * place + start % 10 for start in range(24) for place in range(4))


class RepeatSampler(MPerClassSampler):
    """trl's: each prompt several times running, so that the answers to it are compared with each other."""

    __module__ = "trl.trainer.utils"

    def __iter__(self) -> Iterator[int]:
        return (prompt for prompt in range(24) for _ in range(4))


LABELS = [i % 10 for i in range(100)]


def m_per_class() -> DataLoader[Any]:
    return loader(8, sampler=MPerClassSampler())


def repeated() -> DataLoader[Any]:
    return loader(8, sampler=RepeatSampler())


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

    own = loader(8, sampler=Own())
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
def test_whole_batches_of_one_process_go_to_one_rank_each(kind: Kind) -> None:
    """``share="auto"`` in a world of one makes the batches of one process."""
    streams = epochs_of(kind, 0, 1)
    assert epochs_of(kind, 0, 1, share="batches") == streams
    for rank in range(3):
        plan = Plan(rank, 3)
        shares = [[stream[p % len(stream)] for p in plan.share(len(stream))] for stream in streams]
        assert epochs_of(kind, rank, 3, share="batches") == shares


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


# ``share="within_batches"``: each batch of one process is one step, divided over the ranks.


DIVISIBLE = [replace(kind, batches=True) for kind in ALL_KINDS if kind.make().batch_sampler is not None]
WAYS: list[dict[str, Any]] = [{"uneven": "pad"}, {"uneven": "keep"}]


def divided(given: DataLoader[Any], world_size: int = 2, rank: int = 0, **options: Any) -> Any:
    return patched(given, world_size, rank, **{"share": "within_batches"} | options)


def divided_epochs(kind: Kind, world_size: int, rank: int, **options: Any) -> list[list[list[Any]]]:
    """The batches of epochs, or the first ones of an endless one; after checking what len() said."""
    seed_ambient(1000 * world_size + rank)
    one, epochs = divided(kind.make(), world_size, rank, **options), []
    for _ in range(kind.tried):
        batches = islice(one, STEPS) if kind.endless else one
        epochs.append([[comparable(item) for item in batch] for batch in batches])
        assert not kind.sized or len(one) == len(epochs[-1])
    return epochs


def part(batch: list[Any], plan: Plan) -> list[Any]:
    return [batch[place] for place in chain(*plan.divide(len(batch)))]


@over_in_turn(DIVISIBLE, "way", WAYS)
def test_every_batch_of_one_process_is_a_step_of_all_ranks(kind: Kind, way: dict[str, Any]) -> None:
    alone = divided_epochs(kind, 1, 0, share="auto")
    world_size = 2 if kind.make().num_workers else 3  # starting workers takes long
    for rank in range(world_size):
        plan = Plan(rank, world_size, **way)
        expected = [[part(batch, plan) for batch in batches] for batches in alone]
        assert divided_epochs(kind, world_size, rank, **way) == expected


def test_a_batch_smaller_than_the_world_gives_every_rank_a_sample() -> None:
    """The divided batches of 5 samples, 2 a batch, on 3 ranks, and their masks."""
    for uneven in ("pad", "keep"):
        ranks = [divided(DataLoader(Indices(5), 2, collate_fn=as_it_is), 3, rank, uneven=uneven) for rank in range(3)]
        found = [[(batch, mask.tolist()) for batch, mask in iter_with_mask(one)] for one in ranks]
        assert found == [
            [([0], [True]), ([2], [True]), ([4], [True])],
            [([1], [True]), ([3], [True]), ([4], [False])],
            [([0], [False]), ([2], [False]), ([4], [False])],
        ]


@pytest.mark.parametrize("n", [0, 7])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_number_of_steps_is_that_of_one_process(n: int, drop_last: bool) -> None:
    def makes() -> Iterator[DataLoader[Any]]:
        yield DataLoader(Indices(n), 4, drop_last=drop_last)
        if n:
            yield DataLoader(Indices(n), 4, drop_last=drop_last, shuffle=True)
        yield DataLoader(Source(n), 4, drop_last=drop_last)
        yield DataLoader(Source(n, splits=True), 4, drop_last=drop_last, num_workers=2)

    for number, given in enumerate(makes()):
        for rank in (0, 4):
            one = divided(given, 5, rank)
            assert len(list(one)) == len(list(given)), number
            if not isinstance(given.dataset, IterableDataset):
                assert len(one) == len(given)


def test_an_empty_batch_stays_empty() -> None:
    batches = [[1, 2], [], [3]]
    for rank in range(2):
        assert [len(batch) for batch in divided(loader(batch_sampler=batches), 2, rank)] == [1, 0, 1]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda batch: batch, [5, 8]),
        (iter, [5, 8]),
        (dict.fromkeys, None),
        (lambda batch: {*batch}, [5, 8]),
        (np.array, np.array([5, 8])),
        (torch.tensor, torch.tensor([5, 8])),
        (lambda batch: [(True, index) for index in batch], [(True, 5), (True, 8)]),
        (lambda batch: batch[0], None),
    ],
)
def test_a_batch_of_indices_may_have_any_type(made: Any, expected: Any) -> None:
    class Whole:
        def __len__(self) -> int:
            return 10

        def __getitems__(self, indices: Any) -> Any:
            return indices

    given: DataLoader[Any] = DataLoader(Whole(), batch_sampler=[made([5, 3, 8])], collate_fn=as_it_is)  # type: ignore[arg-type]  # torch's use
    if expected is None:
        with raises(UnsupportedLoaderError, ("within_batches", type(made([5, 3, 8])).__name__), "share='batches'"):
            list(divided(given))
    else:
        (batch,) = divided(given)
        assert type(batch) is type(expected)
        if isinstance(made([5]), set):
            assert len(batch) == 2
        else:
            assert np.array_equal(batch, expected)


@pytest.mark.parametrize("name", ["batches", "within_batches"])
@pytest.mark.parametrize(("world_size", "uneven"), [(1, "pad"), (3, "pad"), (3, "keep")])
def test_a_state_is_one_of_whole_batches(name: Any, world_size: int, uneven: Any) -> None:
    """So the rest may be divided over any number of ranks, or shared whole."""
    whole = list(divided(loader(shuffle=True), 1))
    stopped = divided(loader(shuffle=True), 2, share=name, uneven=uneven)
    iterator = iter(stopped)
    next(iterator)
    state = loader_state(stopped, batches_done=1)
    done = 2 if name == "batches" else 1
    rest = []
    for rank in range(world_size):
        resumed = divided(loader(shuffle=True), world_size, rank, uneven=uneven)
        restore_loader(resumed, state)
        assert len(resumed) == len(whole) - done
        rest.append(list(resumed))
    plans = [Plan(rank, world_size, uneven) for rank in range(world_size)]
    assert rest == [[part(batch, plan) for batch in whole[done:]] for plan in plans]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_resumes_after_whole_batches(workers: int) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Source(splits=True), 3, num_workers=workers, collate_fn=as_it_is)

    whole = list(make())
    for batches in range(0, len(whole), 1 + workers):
        stopped = divided(make())
        iterator = iter(stopped)
        assert list(islice(iterator, batches)) == [part(batch, Plan(0, 2)) for batch in whole[:batches]]
        state = loader_state(stopped, batches_done=batches)
        for rank in range(3):
            resumed = divided(make(), 3, rank)
            restore_loader(resumed, state)
            assert list(resumed) == [part(batch, Plan(rank, 3)) for batch in whole[batches:]]


# What cannot be divided.


def test_what_cannot_be_divided_is_refused() -> None:
    with raises(InvalidOptionError, ("uneven='drop'", "within_batches"), ("'pad'", "'keep'")):
        divided(loader(), uneven="drop")
    for given in (loader(None), DataLoader(Source(), batch_size=None)):
        with raises(InvalidOptionError, ("share='within_batches'", "batch_size=None"), "batch_size"):
            divided(given)
