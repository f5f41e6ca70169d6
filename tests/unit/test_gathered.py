"""What several ranks gather, after a pass and in a step, judged without sending anything."""

from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import pytest
import torch
from gathered import assert_same, outputs_for, shares, together
from iterables import ShardPerWorker
from messages import raises
from torch.utils.data import DataLoader
from zoo import loader

from ddp_patch import gather_in_order, gather_step, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import OutputsError, UnsupportedLoaderError

N = 23


def test_every_form_comes_as_one_process_has_it() -> None:
    """In all rows, and as a list of batches; ranks that got nothing pass None."""
    for n, world_size, uneven in product((0, 2, 7, N), (1, 2, 3, 5), ("pad", "keep")):
        loaders = shares(world_size, sampler=list(range(n)), batch_size=3, uneven=uneven)
        batches = [list(given) for given in loaders]
        flat = [[item for batch in of_rank for item in batch] for of_rank in batches]
        rows = together([outputs_for(items) if items else None for items in flat], loaders)
        if not n:
            assert rows is None
            continue
        assert_same(rows, outputs_for(list(range(n))))
        lists = together([[in_lists(batch) for batch in of_rank] or None for of_rank in batches], loaders)
        assert_same(lists, [in_lists(list(range(n))[at : at + 3]) for at in range(0, n, 3)])


def in_lists(items: list[int]) -> dict[str, Any]:
    """Outputs of a batch; arrays of all batches have one width of texts, and the machine's order of bytes."""
    outputs = outputs_for(items)
    return {**outputs, "arrays": outputs["arrays"][2:7]}


BATCHES = [[0, 1, 2], [3], [], [4, 5], [6, 7, 8, 9], [10]]


@pytest.mark.parametrize("uneven", ["pad", "keep"])
def test_lists_of_parts_of_batches_come_as_lists_of_whole_ones(uneven: Any) -> None:
    """Some ranks' parts are padding, or have one sample each."""
    filled = [batch for batch in BATCHES if batch]
    of_three = [[*range(N)][at : at + 3] for at in range(0, N, 3)]
    ways: list[tuple[list[list[int]], dict[str, Any]]] = [
        (of_three, {"sampler": list(range(N)), "batch_size": 3}),
        ([[item] for item in range(N)], {"sampler": list(range(N)), "batch_size": 1}),
        (filled, {"batch_sampler": filled}),
    ]
    for (expected, given), world_size in product(ways, (1, 2, 3, 5)):
        loaders = shares(world_size, share="within_batches", uneven=uneven, **given)
        batches = [list(one) for one in loaders]
        lists = together([[in_lists(batch) for batch in of_rank] or None for of_rank in batches], loaders)
        assert_same(lists, [in_lists(batch) for batch in expected])
        apart = together([([*of_rank], {"b": [*of_rank]}) if of_rank else None for of_rank in batches], loaders)
        assert apart == (expected, {"b": expected})
        rows = together([[item for batch in of_rank for item in batch] or None for of_rank in batches], loaders)
        assert rows == [item for batch in expected for item in batch]


@pytest.mark.parametrize("uneven", ["pad", "keep"])
def test_whole_batches_have_rows_or_are_a_list_unless_one_is_empty(uneven: Any) -> None:
    filled = [batch for batch in BATCHES if batch]
    for world_size, given_batches in product((1, 2, 4, 5, 7), (BATCHES, filled)):
        loaders = shares(world_size, batch_sampler=given_batches, uneven=uneven)
        batches = [list(given) for given in loaders]
        flat = [[item for batch in of_rank for item in batch] for of_rank in batches]
        rows = [
            (torch.tensor(own, dtype=torch.int64), own) if one else None for own, one in zip(flat, batches, strict=True)
        ]
        tensor, items = together(rows, loaders)
        assert tensor.tolist() == items == list(range(11))
        lists = [[(torch.tensor(batch), batch) for batch in of_rank] or None for of_rank in batches]
        if given_batches is filled:
            assert [items for _, items in together(lists, loaders)] == filled
        else:
            with raises(OutputsError, "one per sample", "one row per sample"):
                together(lists, loaders)


def test_batches_of_one_sample_are_rows_whatever_these_are() -> None:
    """All of one rank's could be a list of batches."""
    loaders = shares(2, batch_size=1, sampler=[0, 1, 2, 3])
    boxes = [[torch.zeros(1 + item % 2, 4) for batch in given for item in batch] for given in loaders]
    assert [len(one) for one in together(boxes, loaders)] == [1, 2, 1, 2]


def wide(items: list[int], least: int = 1) -> torch.Tensor:
    """Each row has as many ones as its number, and is as wide as the batch's widest."""
    width = max([least, *items])
    return torch.tensor([[1.0] * item + [-1.0] * (width - item) for item in items], dtype=torch.bfloat16)


def test_different_widths_are_an_error_that_says_how_to_gather_them() -> None:
    loaders = shares(2, sampler=list(range(6)), batch_size=2)
    batches = [list(given) for given in loaders]
    flat = [[item for batch in of_rank for item in batch] for of_rank in batches]
    facts = "rank 0 passed tensor torch.bfloat16 (n, 4)", "rank 1", "(n, 5)"
    with raises(OutputsError, facts, "outputs.extend(rows)"):
        together([wide(items) for items in flat], loaders)
    with raises(
        OutputsError,
        ("rank 0 passed", "entry 1 is tensor torch.bfloat16 (n, 4)", "(n, 2), as entry 0"),
        "one row per sample",
    ):
        together([[wide(batch) for batch in of_rank] for of_rank in batches], loaders)
    rows = together([[row for batch in of_rank for row in wide(batch)] for of_rank in batches], loaders)
    assert [int(row.clamp(min=0).sum()) for row in rows] == list(range(6))


@dataclass
class Scaled:
    """Outputs whose making changes them."""

    logits: Any

    def __post_init__(self) -> None:
        self.logits = self.logits * 10


def test_a_dataclass_keeps_what_it_holds_whatever_its_making_does() -> None:
    loaders = shares(2, batch_size=2, sampler=list(range(7)))
    found = together([[Scaled(torch.tensor(batch)) for batch in given] for given in loaders], loaders)
    assert torch.cat([one.logits for one in found]).tolist() == [10 * item for item in range(7)]


def test_outputs_of_two_iterators_at_once_are_refused() -> None:
    loaders = shares(2)
    outputs = [[[*one] for one, _ in zip(given, given, strict=False)] for given in loaders]
    with raises(OutputsError, ("two iterators", "finish one"), "every rank"):
        together(outputs, loaders)


@pytest.mark.parametrize("done", [1, 2])
def test_after_a_restore_workers_come_in_the_order_of_one_process(done: int) -> None:
    def given() -> DataLoader[Any]:
        return DataLoader(ShardPerWorker((12, 12)), 2, num_workers=2, collate_fn=list)

    def make(rank: int, ranks: int) -> Any:
        return patch_dataloader_to_ddp(given(), rank=rank, num_replicas=ranks, seed=1)

    alone = [item for batch in given() for item in batch]
    taken, rests = [], []
    for rank in range(2):
        stopped = make(rank, 2)
        taken += [item for batch in islice(stopped, done) for item in batch]
        rests.append(make(rank, 2))
        restore_loader(rests[-1], loader_state(stopped, batches_done=done))
    found = together([[item for batch in rest for item in batch] for rest in rests], rests)
    assert found == [item for item in alone if item not in taken]


# ---- in a step ----


def test_each_step_has_the_samples_of_all_ranks_once() -> None:
    costs = {"cost": [*range(1, N + 1)]}
    ways: list[dict[str, Any]] = [{}, {"share": "within_batches"}, {"share": "batches"}]
    ways += [costs, {"share": "batches", **costs}, {"uneven": "drop"}]
    for way, world_size in product(ways, (1, 2, 3, 5)):
        loaders = shares(world_size, **way)
        seen = []
        for steps in zip(*loaders, strict=True):
            outputs = [(list(batch), torch.tensor(batch)) for batch in steps]
            rows, tensor = together(outputs, loaders, in_step=True)
            assert rows == tensor.tolist()
            assert rows == sorted(rows) or "cost" in way
            seen += rows
        in_order = "cost" not in way
        left_out = N % world_size if way.get("uneven") == "drop" else 0  # of samples
        assert (seen if in_order else sorted(seen)) == list(range(N - left_out)), (way, world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_samples_that_cost_has_put_in_another_order_come_step_by_step_alone(world_size: int) -> None:
    given, *_ = shares(world_size, cost=[*range(N)])
    rows = [row for batch in given for row in batch]
    with raises(UnsupportedLoaderError, ("gather_in_order", "cost="), ("Leave cost= out", "gather_step()")):
        gather_in_order(rows, given)


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
    with raises(OutputsError, ("rank 0", "after the loop", "epoch 0 is over"), remedy):
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
