"""``share="within_batches"``: each batch of one process is one step, divided over the ranks."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from messages import raises
from torch.utils.data import DataLoader, IterableDataset
from trying import over_in_turn
from zoo import ALL_KINDS, STEPS, Indices, Kind, Source, as_it_is, comparable, loader, seed_ambient

from ddp_patch import iter_with_mask, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import InvalidOptionError, UnsupportedLoaderError
from ddp_patch.positions_and_padding import Plan

pytestmark = pytest.mark.filterwarnings("ignore::ddp_patch.errors.StreamLengthWarning")  # some kinds have it

DIVISIBLE = [replace(kind, batches=True) for kind in ALL_KINDS if kind.make().batch_sampler is not None]
WAYS: list[dict[str, Any]] = [{"uneven": "pad"}, {"uneven": "keep"}]


def divided(given: DataLoader[Any], world_size: int = 2, rank: int = 0, **options: Any) -> Any:
    chosen: dict[str, Any] = {"seed": 3, "share": "within_batches"} | options
    return patch_dataloader_to_ddp(given, rank=rank, num_replicas=world_size, **chosen)


def steps_of(kind: Kind, given: Any) -> list[list[Any]]:
    """The batches of an epoch, or the first ones of an endless one; after checking what len() said."""
    batches = [[comparable(item) for item in batch] for batch in (islice(given, STEPS) if kind.endless else given)]
    if kind.sized:
        assert len(given) == len(batches)
    return batches


def epochs_of(kind: Kind, world_size: int, rank: int, **options: Any) -> list[list[list[Any]]]:
    seed_ambient(1000 * world_size + rank)
    one = divided(kind.make(), world_size, rank, **options)
    return [steps_of(kind, one) for _ in range(kind.tried)]


def part(batch: list[Any], plan: Plan) -> list[Any]:
    return [batch[place] for place in chain(*plan.divide(len(batch)))]


@over_in_turn(DIVISIBLE, "way", WAYS)
def test_every_batch_of_one_process_is_a_step_of_all_ranks(kind: Kind, way: dict[str, Any]) -> None:
    alone = epochs_of(kind, 1, 0, share="auto")
    world_size = 2 if kind.make().num_workers else 3  # starting workers takes long
    for rank in range(world_size):
        plan = Plan(rank, world_size, **way)
        expected = [[part(batch, plan) for batch in batches] for batches in alone]
        assert epochs_of(kind, world_size, rank, **way) == expected


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
