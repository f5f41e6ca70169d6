"""Masks of padding over every kind of loader, places of gathered rows, and what evaluation refuses: without ranks."""

from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from messages import raises
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset
from trying import WORLDS, over_in_turn, patched
from zoo import BY_NAME, KINDS, STEPS, Indices, Kind, N, Source, as_it_is, in_turns, loader, out_of_order, units

from ddp_patch import (
    DDPBatchSamplerWrapper,
    DDPSamplerWrapper,
    gather_in_order,
    iter_with_mask,
    iter_with_weights,
    loader_state,
    patch_dataloader_to_ddp,
    restore_loader,
)
from ddp_patch.errors import NotALoaderError, NotPatchedError, OutputsError, UnsupportedLoaderError, WorldError
from ddp_patch.options import Uneven
from ddp_patch.positions_and_padding import Plan

pytestmark = pytest.mark.filterwarnings("ignore::ddp_patch.errors.StreamLengthWarning")  # some kinds have it

Masked = list[tuple[Any, torch.Tensor]]


def lengths_of(kind: Kind) -> list[int]:
    """How many items the stream of each epoch has."""
    alone = patched(kind, 0, 1)
    return [N if alone.drop_last else len(units(kind, alone)) for _ in range(kind.tried)]


def padding(kind: Kind, n: int, plan: Plan) -> Iterator[bool]:
    """Tell of each item of a rank's share whether it is padding."""
    if not kind.parts:
        return (place >= n for place in plan.share(n))
    parts = [[place >= length for place in plan.share(length)] for length in kind.parts]
    return iter(in_turns(parts, kind.make().batch_size or 1))


def masked(kind: Kind, given: DataLoader[Any]) -> Masked:
    batches = iter_with_mask(given)
    return list(islice(batches, STEPS) if kind.endless else batches)


def assert_false_on_padding_alone(given: DataLoader[Any], batches: Masked, padding: list[bool], whole: bool) -> None:
    """Where ``padding`` tells of each item of the share whether it is any."""
    assert all(mask.dtype == torch.bool for _, mask in batches)
    if given.batch_sampler is None:
        assert [mask.item() for _, mask in batches] == [not pads for pads in padding]  # no lists: no dimension
    elif whole:
        expected = [[not pads] * len(batch) for (batch, _), pads in zip(batches, padding, strict=True)]
        assert [mask.tolist() for _, mask in batches] == expected
    else:
        assert [len(mask) for _, mask in batches] == [len(batch) for batch, _ in batches]
        flat = [pads for _, mask in batches for pads in (~mask).tolist()]
        assert flat == padding[: len(flat)]
        assert len(flat) == len(padding) or given.drop_last


@over_in_turn(KINDS, "num_replicas", WORLDS)
def test_the_mask_is_false_on_padding_and_nowhere_else(kind: Kind, num_replicas: int) -> None:
    lengths = [10**9] * kind.tried if kind.endless else lengths_of(kind)
    alone = [] if kind.make().num_workers else [Plan(0, 1)]  # starting workers takes long
    for plan in (*alone, *(Plan(rank, num_replicas) for rank in range(num_replicas))):
        given = patched(kind, plan.rank, plan.num_replicas)
        for n in lengths:
            batches = masked(kind, given)
            steps = STEPS * (given.batch_size or 1) if kind.endless else None
            assert_false_on_padding_alone(given, batches, list(islice(padding(kind, n, plan), steps)), kind.batches)


@pytest.mark.parametrize("name", ["shuffle=True", "aspect-ratio batches", "batch_size=None", "iterable, 2 workers"])
@pytest.mark.parametrize("uneven", ["drop", "keep"])
def test_masks_of_other_ways_to_share(name: str, uneven: Uneven) -> None:
    kind = BY_NAME[name]
    ranks = 3 if kind.make().num_workers else 5
    lengths = lengths_of(kind)
    for rank in range(ranks):
        given = patched(kind, rank, ranks, uneven=uneven)
        for n in lengths:
            expected = list(padding(kind, n, Plan(rank, ranks, uneven)))
            assert_false_on_padding_alone(given, masked(kind, given), expected, kind.batches)


@pytest.mark.parametrize("name", ["shuffle=True", "aspect-ratio batches", "batch_size=None", "iterable, 2 workers"])
def test_masks_of_the_rest_of_a_pass(name: str) -> None:
    kind = BY_NAME[name]
    n = lengths_of(kind)[0]
    for rank in range(3):
        stopped = patched(kind, rank, 3)
        next(iter(stopped))
        again = patched(kind, rank, 3)
        restore_loader(again, loader_state(stopped, batches_done=1))
        done = 1 if kind.batches else again.batch_size or 1
        padding = [place >= n for place in Plan(rank, 3).share(n)][done:]
        assert_false_on_padding_alone(again, masked(kind, again), padding, kind.batches)


def test_a_collate_fn_that_leaves_rows_out_has_no_mask() -> None:
    def collate(samples: list[int]) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([sample for sample in samples if sample % 5])}

    given = patch_dataloader_to_ddp(DataLoader(Indices(23), 4, collate_fn=collate), rank=0, num_replicas=2)
    with raises(UnsupportedLoaderError, ("iter_with_mask", "4 samples", "3 rows", "collate_fn"), "row for each sample"):
        list(iter_with_mask(given))


# One process, without a group: the loader is the unpatched one.


def ragged(samples: list[Any]) -> Any:
    """Neither of the parts of what it returns is as long as there are samples."""
    return [torch.stack([image for image, _ in samples]).flatten(), {"n": torch.zeros(99)}]


PAIRS = TensorDataset(torch.zeros(7, 3, 2), torch.zeros(7))
UNPATCHED: dict[str, tuple[DataLoader[Any], list[int | None]]] = {
    "collated to a list of two tensors": (DataLoader(PAIRS, 3), [3, 3, 1]),
    "collated to what tells no size": (DataLoader(PAIRS, 3, collate_fn=ragged, num_workers=2), [3, 3, 1]),
    "drop_last": (DataLoader(PAIRS, 3, collate_fn=as_it_is, drop_last=True), [3, 3]),
    "batches": (DataLoader(PAIRS, batch_sampler=[[0], [1, 2, 3, 4], []], collate_fn=as_it_is), [1, 4, 0]),
    "iterable": (DataLoader(Source(5), 2, num_workers=2), [2, 2, 2, 2, 1, 1]),  # torch reads it once for each worker
    "empty": (DataLoader(Source(0), 2), []),
    "no batches": (DataLoader(Indices(3), batch_size=None), [None] * 3),
}


@pytest.mark.parametrize("name", UNPATCHED)
def test_nothing_is_padding_in_a_loader_that_is_not_shared(name: str) -> None:
    given, sizes = UNPATCHED[name]
    for _ in range(2):
        batches = list(iter_with_mask(given))
        assert [mask.tolist() for _, mask in batches] == [True if size is None else [True] * size for size in sizes]
        for (batch, _), plain in zip(batches, given, strict=True):
            torch.testing.assert_close(batch, plain)


def test_outputs_of_an_unpatched_loader_come_back_as_they_are() -> None:
    outputs = [object()]
    assert gather_in_order(outputs, DataLoader(Indices(3))) is outputs


# A world of one: everything but sending.


def passed(**options: Any) -> DataLoader[Any]:
    """A loader of 23 items that one rank of one has gone through."""
    given = patch_dataloader_to_ddp(loader(**options), rank=0, num_replicas=1)
    list(given)
    return given


def test_a_pass_that_took_as_many_batches_as_len_says_is_whole() -> None:
    given = patch_dataloader_to_ddp(loader(), rank=0, num_replicas=1)
    iterator = iter(given)
    outputs = [item for _ in range(len(given)) for item in next(iterator)]
    assert gather_in_order(outputs, given) == list(range(23))


def test_nothing_in_nothing_out() -> None:
    empty = patch_dataloader_to_ddp(loader(sampler=[]), rank=0, num_replicas=1)
    list(empty)
    assert gather_in_order(None, empty) is None
    assert gather_in_order({"a": []}, empty) == {"a": []}
    assert gather_in_order(torch.zeros(0, 3), empty).shape == (0, 3)


BY_HAND: dict[Any, tuple[Any, list[Any], list[Any]]] = {
    DDPSamplerWrapper: (range(5), [([1, 3], [True, True]), ([0], [False])], [0, 1, 2, 3, 4]),
    DDPBatchSamplerWrapper: ([[0], [1, 2], [3, 4]], [([1, 2], [True, True]), ([0], [False])], [[0], [1, 2], [3, 4]]),
}


@pytest.mark.parametrize("wrapper", BY_HAND)
def test_loaders_wrapped_by_hand(wrapper: Any) -> None:
    items, expected, rows = BY_HAND[wrapper]

    def by_hand(rank: int, num_replicas: int) -> DataLoader[Any]:
        sampler = wrapper(items, False, rank=rank, num_replicas=num_replicas)
        if wrapper is DDPSamplerWrapper:
            return DataLoader(Indices(), 2, sampler=sampler, collate_fn=as_it_is)
        return DataLoader(Indices(), batch_sampler=sampler, collate_fn=as_it_is)

    assert [(batch, mask.tolist()) for batch, mask in iter_with_mask(by_hand(1, 2))] == expected
    alone = by_hand(0, 1)
    batches = list(alone)
    outputs = batches if wrapper is DDPBatchSamplerWrapper else [item for batch in batches for item in batch]
    assert gather_in_order(outputs, alone) == rows


# Places.


# What is refused.


class Alike:
    """A key that looks like the others."""

    def __repr__(self) -> str:
        return "key"


@dataclass
class Fixed:
    """A dataclass that needs more than its fields."""

    rows: Any
    more: InitVar[int]


REMEDY = ("gather_in_order()", "every rank", "one row per sample", "padding")
OUTPUTS: list[tuple[Any, tuple[str, ...]]] = [
    (None, ("passed None", "23, one per sample")),
    ({"loss": 0.5}, ("float", "['loss']", "tensor, array or list")),
    ((np.array(0.5),), ("ndarray", "dimensions", "[0]")),
    (torch.zeros(24), ("24 rows", "23, one per sample", "a list with one entry per batch")),
    ([[1]] * 6, ("6 rows", "23, one per sample", "entry 0 has 1 rows for a batch of 4")),
    ([[1] * 4] * 6, ("6 rows", "entry 5 has 4 rows for a batch of 3")),
    (
        [torch.zeros(4)] * 5 + [np.zeros(3)],
        ("6 rows", "entry 5 is array float64 (n), not tensor torch.float32 (n), as entry 0"),
    ),
    (
        [torch.zeros(4)] * 5 + [{"a": torch.zeros(3)}],
        ("6 rows", "entry 5 is tensor torch.float32 (n) at ['a'], not tensor torch.float32 (n), as"),
    ),
    ({"a": {"b": [1]}, "c": (np.zeros(23), [2, 3])}, ("1 rows at ['a']['b']", "23, one per")),
    (torch.zeros(23, 2).to_sparse(), ("sparse", "tensor")),
    (np.ma.zeros(23), ("masked array",)),
    (Fixed(torch.zeros(23), 1), ("TypeError", "'more'")),
    ({Alike(): [0] * 23, Alike(): [1] * 23}, ("keys look alike",)),
]


@pytest.mark.parametrize(("outputs", "facts"), OUTPUTS, ids=[" ".join(facts) for _, facts in OUTPUTS])
def test_outputs_that_are_none_of_a_pass(outputs: Any, facts: tuple[str, ...]) -> None:
    with raises(OutputsError, ("Gathering outputs", "rank 0", *facts), REMEDY):
        gather_in_order(outputs, passed())


def test_a_pass_that_is_none_or_not_whole() -> None:
    for kind in (BY_NAME["sequential"], BY_NAME["a sampler without len"], BY_NAME["iterable"]):
        given = patched(kind, 0, 1)
        for what in ("made no pass", "middle of epoch 0", "middle of epoch 1"):
            with raises(OutputsError, ("Gathering outputs", "rank 0", what), REMEDY):
                gather_in_order([0], given)
            iterator = iter(given)
            next(iterator)


def test_nobody_to_gather_from() -> None:
    given = patch_dataloader_to_ddp(loader(), rank=0, num_replicas=2)
    with raises(WorldError, ("gather_in_order", "2 ranks", "rank=", "num_replicas="), "process group"):
        gather_in_order(list(given), given)


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("gather_in_order", lambda loader: gather_in_order([], loader)),
        ("iter_with_mask", iter_with_mask),
        ("iter_with_weights", iter_with_weights),
    ],
)
def test_loaders_whose_shares_cannot_be_told(name: str, operation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the call, before anything is drawn."""
    patched_one = "patch_dataloader_to_ddp()"
    not_patched = (name, "DataLoader", "not patched"), (patched_one, "rank=0, num_replicas=1")
    sharded = (name, "a DistributedSampler shards", "not this package"), "Patch the loader"
    for given, error, facts, remedy in (
        ([1], NotALoaderError, (name, "torch.utils.data.DataLoader", "[1] (list)"), "loader itself"),
        (
            patch_dataloader_to_ddp(DataLoader(Source()), rank=0, num_replicas=1, share="by_worker"),
            UnsupportedLoaderError,
            (name, "share='by_worker'"),
            "Leave share out",
        ),
        (
            patch_dataloader_to_ddp(out_of_order(DataLoader(Indices(), num_workers=2)), rank=0, num_replicas=1),
            UnsupportedLoaderError,
            (name, "in_order=False", "2 workers"),
            "in_order=True",
        ),
        (
            loader(batch_sampler=Doubled(DDPSamplerWrapper(range(4), rank=0, num_replicas=1))),
            UnsupportedLoaderError,
            (name, "Doubled", "sharded sampler"),
            patched_one,
        ),
        (loader(sampler=DistributedSampler(Indices(), rank=0, num_replicas=2)), NotPatchedError, *sharded),
    ):
        with raises(error, facts, remedy):
            operation(given)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with raises(NotPatchedError, *not_patched):
        operation(loader())


class Doubled(BatchSampler):
    """A batch sampler over a sharded sampler that is not torch's own."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler, 2, drop_last=False)
