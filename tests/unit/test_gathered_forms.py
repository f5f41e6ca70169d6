"""What outputs may look like, of several ranks, judged without sending anything."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from messages import raises
from torch.utils.data import DataLoader
from zoo import loader

from ddp_patch import InvalidOptionError, OutputsError, gather_in_order, gather_step, patch_dataloader_to_ddp
from ddp_patch.evaluation.connection import Connection, Members
from ddp_patch.evaluation.got import got_in_pass, got_in_step
from ddp_patch.evaluation.judging import judge
from ddp_patch.evaluation.nests import filled
from ddp_patch.evaluation.one_stream import require_one_stream
from ddp_patch.evaluation.places import StepStand, WholeStand, placed_in_step, placed_whole
from ddp_patch.evaluation.readings import Kind, cut
from ddp_patch.evaluation.report import report
from ddp_patch.evaluation.transfer import Given, gathered

N = 23


def shares(world_size: int, **options: Any) -> list[DataLoader[Any]]:
    given = {name: options.pop(name) for name in ("batch_size", "batch_sampler", "sampler") if name in options}
    return [
        patch_dataloader_to_ddp(loader(**given), rank=rank, num_replicas=world_size, **options)
        for rank in range(world_size)
    ]


def together(outputs: list[Any], loaders: Sequence[DataLoader[Any]], *, pad: Any = None, in_step: bool = False) -> Any:
    """As all ranks would have it, each rank's rows put where they belong."""
    operation, reports = "gather_step" if in_step else "gather_in_order", []
    for own, given in zip(outputs, loaders, strict=True):
        batches = require_one_stream(operation, given)
        got = partial(got_in_step, given, batches) if in_step else partial(got_in_pass, batches)
        reports.append(report(own, got, None, pad, None))
    agreement = judge(operation, range(len(loaders)), {rank: said for rank, (said, _) in enumerate(reports)})[0]
    whole = [stand for stand in agreement.stands if isinstance(stand, WholeStand)]
    steps = [stand for stand in agreement.stands if isinstance(stand, StepStand)]
    own_stand = reports[0][1].stand
    placed = placed_whole(whole, own_stand) if isinstance(own_stand, WholeStand) else placed_in_step(steps)
    leaves = {}
    for path, (kind, nest, columns) in agreement.leaves.items():
        rows = {}
        for name, column in columns.items():
            result: Any = None
            for rank, (_, own) in enumerate(reports):
                mine = [places if share == rank else [] for share, places in enumerate(placed[kind].places)]
                alone = Connection(Members([*range(len(loaders))], rank, None, 1.0), None)
                came = Given() if own.share is None else own.given(path, kind, name, pad)
                part = gathered(alone, column, type(placed[kind])(placed[kind].rows, mine), came, pad)
                result = part if result is None else put(result, part, [place for run in mine[rank] for place in run])
            rows[name] = result
        leaves[path] = cut(nest, rows, placed[kind].cuts) if kind is Kind.LIST else rows[next(iter(rows))]
    return filled(agreement.nest, leaves)


def put(result: Any, part: Any, places: list[int]) -> Any:
    for place in places:
        result[place] = part[place]
    return result


class Pair(NamedTuple):
    logits: Any
    names: Any = None


@dataclass(frozen=True)
class Output:
    logits: Any
    loss: Any = None
    more: dict[str, Any] = field(default_factory=dict)


def features(items: list[int]) -> torch.Tensor:
    return torch.tensor(items, dtype=torch.bfloat16)[:, None].expand(-1, 2)


NESTS: dict[str, Callable[[list[int]], Any]] = {
    "tensor": features,
    "array": lambda items: np.array(items, "f4"),
    "strings": lambda items: np.array([str(item) for item in items]),
    "list": lambda items: [{"id": item} for item in items],
    "named tuple": lambda items: Pair(features(items), [str(item) for item in items]),
    "tuple with None": lambda items: (features(items), None),
    "dataclass": lambda items: Output(features(items), more={"ids": items, "none": None}),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(other, np.ndarray):
        return bool(one.dtype == other.dtype and np.array_equal(one, other))
    if type(one) is not type(other):
        return False
    if isinstance(other, Output):
        return same(vars(one), vars(other))
    if isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in other)
    if isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", NESTS)
def test_every_form_comes_as_one_process_has_it(name: str) -> None:
    """In all rows, and as a list of batches; ranks that got nothing pass None."""
    make = NESTS[name]
    for n, world_size, uneven in product((0, 2, 7, N), (1, 2, 3, 5), ("pad", "keep")):
        loaders = shares(world_size, sampler=list(range(n)), batch_size=3, uneven=uneven)
        batches = [list(given) for given in loaders]
        flat = [[item for batch in of_rank for item in batch] for of_rank in batches]
        rows = together([make(items) if items else None for items in flat], loaders)
        if not n:
            assert rows is None
            continue
        assert same(rows, make(list(range(n)))), (n, world_size, uneven)
        lists = together([[make(batch) for batch in of_rank] or None for of_rank in batches], loaders)
        size = 3 if any(len(items) > len(of_rank) for items, of_rank in zip(flat, batches, strict=True)) else 1
        alone = [make(list(range(n))[at : at + size]) for at in range(0, n, size)]
        assert len(lists) == len(alone)
        if name != "strings":  # as wide as the widest of all
            assert same(lists, alone), (n, world_size, uneven)


BATCHES = [[0, 1, 2], [3], [], [4, 5], [6, 7, 8, 9], [10]]


@pytest.mark.parametrize("layout", ["interleaved", "contiguous"])
@pytest.mark.parametrize("uneven", ["pad", "keep"])
def test_whole_batches_have_rows_of_samples_or_of_batches(uneven: Any, layout: Any) -> None:
    for world_size in (1, 2, 4, 5, 7):
        loaders = shares(world_size, batch_sampler=BATCHES, uneven=uneven, layout=layout)
        batches = [list(given) for given in loaders]
        samples = [
            torch.tensor([item for batch in of_rank for item in batch], dtype=torch.int64) for of_rank in batches
        ]
        means = [np.array([len(batch) for batch in of_rank]) for of_rank in batches]
        found = together(
            [(*rows, one) if one else None for *rows, one in zip(samples, means, batches, strict=True)], loaders
        )
        assert found[0].tolist() == list(range(11))
        assert found[1].tolist() == [len(batch) for batch in BATCHES]
        assert found[2] == BATCHES
        padded = together(
            [[torch.full((len(batch), len(batch)), 1) for batch in of_rank] or None for of_rank in batches],
            loaders,
            pad=0,
        )
        assert [tuple(batch.shape) for batch in padded] == [(len(batch), 4) for batch in BATCHES]
        assert torch.cat(padded).sum(dim=1).tolist() == [len(batch) for batch in BATCHES for _ in batch]


def wide(items: list[int], least: int = 1) -> torch.Tensor:
    """Each row has as many ones as its number, and is as wide as the batch's widest."""
    width = max([least, *items])
    return torch.tensor([[1.0] * item + [-1.0] * (width - item) for item in items], dtype=torch.bfloat16)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_rows_of_different_widths_are_padded_to_the_widest_of_all_ranks(world_size: int) -> None:
    loaders = shares(world_size, sampler=list(range(7)), batch_size=2)
    batches = [list(given) for given in loaders]
    found = torch.cat(together([[wide(batch) for batch in of_rank] for of_rank in batches], loaders, pad=-1))
    assert torch.equal(found, wide(list(range(7))))
    flat = [[item for batch in of_rank for item in batch] for of_rank in batches]
    expected = wide(list(range(7)))
    assert torch.equal(together([wide(items) for items in flat], loaders, pad=-1), expected)
    for dtype in ("f4", "O"):
        arrays = together([wide(items).float().numpy().astype(dtype) for items in flat], loaders, pad=-1)
        assert np.array_equal(arrays.astype("f4"), expected.float().numpy())


def test_without_pad_different_widths_are_an_error_that_names_it() -> None:
    loaders = shares(2, sampler=list(range(6)), batch_size=2)
    batches = [list(given) for given in loaders]
    flat = [[item for batch in of_rank for item in batch] for of_rank in batches]
    with raises(OutputsError, ("rank 0 passed tensor torch.bfloat16 (n, 4)", "rank 1", "(n, 5)"), "pad="):
        together([wide(items) for items in flat], loaders)
    with raises(OutputsError, ("rank 0 passed", "(n, 2..4) at [i]", "(n, 3..5)"), "pad="):
        together([[wide(batch) for batch in of_rank] for of_rank in batches], loaders)


@pytest.mark.parametrize(
    ("pad", "dtype"), [(0.5, torch.int64), (-100, torch.uint8), (2, torch.bool), (1j, torch.float32)]
)
def test_a_pad_that_the_rows_do_not_hold(pad: Any, dtype: torch.dtype) -> None:
    loaders = shares(2)
    flat = [[item for batch in given for item in batch] for given in loaders]
    outputs = [torch.zeros(len(items), 1 + rank, dtype=dtype) for rank, items in enumerate(flat)]
    with raises(InvalidOptionError, (f"pad={pad}", str(dtype)), "number"):
        together(outputs, loaders, pad=pad)
    for of_strings in ([np.array([["a"] * (1 + rank)] * len(items)) for rank, items in enumerate(flat)],):
        with raises(InvalidOptionError, (f"pad={pad}", "str"), "number"):
            together(of_strings, loaders, pad=pad)


@pytest.mark.parametrize("pad", ["x", [0], torch.tensor(0), len])
def test_what_is_no_number_to_pad_with(pad: Any) -> None:
    given = patch_dataloader_to_ddp(loader(), rank=0, num_replicas=1)
    rows = [item for batch in given for item in batch]
    for one in (given, loader()):
        with raises(InvalidOptionError, ("pad=", "no number"), "pad=0"):
            gather_in_order(rows, one, pad=pad)


def test_a_single_process_pads_its_lists_of_batches_too() -> None:
    outputs: dict[str, Any] = {
        "ids": [wide([1, 2]), wide([3])],
        "texts": [["a"], ["b", "c"]],
        "rows": [1, 2, 3],
        "nothing": [],
    }
    found = gather_in_order(outputs, loader(), pad=-1)
    assert torch.equal(torch.cat(found["ids"]), wide([1, 2, 3]))
    assert [len(batch) for batch in found["ids"]] == [2, 1]
    assert {name: found[name] for name in ("texts", "rows", "nothing")} == {
        name: outputs[name] for name in ("texts", "rows", "nothing")
    }


# Steps.


def test_each_step_has_the_samples_of_all_ranks_once() -> None:
    costs = {"cost": [*range(1, N + 1)]}
    ways: list[dict[str, Any]] = [{}, {"layout": "contiguous"}, {"share": "within_batches"}, {"share": "batches"}]
    ways += [costs, {"share": "within_batches", **costs}, {"share": "batches", **costs}, {"uneven": "drop"}]
    for way, world_size in product(ways, (1, 2, 3, 5)):
        loaders = shares(world_size, **way)
        seen = []
        for steps in zip(*loaders, strict=True):
            outputs = [(list(batch), torch.tensor(batch)) for batch in steps]
            rows, tensor = together(outputs, loaders, in_step=True)
            assert rows == tensor.tolist()
            assert rows == sorted(rows)
            seen += rows
        in_order = way.get("layout") is None and (way.get("cost") is None or way.get("share") == "within_batches")
        left_out = N % world_size if way.get("uneven") == "drop" else 0  # of samples
        assert (seen if in_order else sorted(seen)) == list(range(N - left_out)), (way, world_size)


def test_a_batch_that_workers_have_read_ahead_is_not_the_step() -> None:
    given = patch_dataloader_to_ddp(loader(num_workers=1), rank=0, num_replicas=1)
    assert [row for batch in given for row in gather_step(batch, given)] == list(range(N))


def test_a_step_after_a_break_is_of_the_new_pass() -> None:
    given = patch_dataloader_to_ddp(loader(), rank=0, num_replicas=1)
    for batch in given:
        assert gather_step(batch, given) == batch
        break
    assert [gather_step(batch, given) for batch in given] == [list(range(N))[at : at + 4] for at in range(0, N, 4)]


def test_outputs_that_are_none_of_a_step() -> None:
    remedy = ("gather_step()", "every rank", "same step", "one row per sample")
    given = patch_dataloader_to_ddp(loader(), rank=0, num_replicas=1)
    with raises(OutputsError, ("rank 0", "no batch"), remedy):
        gather_step([1], given)
    for _ in given:
        with raises(OutputsError, ("rank 0 passed 1 rows", "one per sample"), remedy):
            gather_step([1], given)
    with raises(OutputsError, ("rank 0", "not in the loop", "epoch 0 is over"), remedy):
        gather_step([1], given)
    pair = shares(3, uneven="keep", sampler=list(range(13)))
    steps = [next(iter(one)) for one in pair]
    with raises(OutputsError, ("uneven='keep'", "a step less"), remedy):
        together(steps, pair, in_step=True)
    first, second = shares(2)
    runs = [iter(first), iter(second)]
    own = [next(run) for run in runs]
    own[1] = next(runs[1])
    with raises(OutputsError, ("rank 0", "step 1", "rank 1", "step 2"), "every rank"):
        together(own, [first, second], in_step=True)


def test_an_item_of_a_loader_without_batches_is_a_row() -> None:
    loaders: list[DataLoader[Any]] = [
        patch_dataloader_to_ddp(DataLoader(range(5), batch_size=None), rank=rank, num_replicas=2)  # type: ignore[arg-type]  # a range is a dataset
        for rank in range(2)
    ]
    found = [together([[item] for item in step], loaders, in_step=True) for step in zip(*loaders, strict=True)]
    assert found == [[0, 1], [2, 3], [4]]
