"""What the ranks gather in one step, judged without sending anything."""

from itertools import product
from typing import Any

import pytest
import torch
from gathered import shares, together
from messages import raises
from torch.utils.data import DataLoader
from zoo import loader

from ddp_patch import gather_in_order, gather_step, patch_dataloader_to_ddp
from ddp_patch.errors import OutputsError, UnsupportedLoaderError

N = 23


def test_each_step_has_the_samples_of_all_ranks_once() -> None:
    costs = {"cost": [*range(1, N + 1)]}
    ways: list[dict[str, Any]] = [{}, {"share": "within_batches"}, {"share": "batches"}]
    ways += [costs, {"share": "within_batches", **costs}, {"share": "batches", **costs}, {"uneven": "drop"}]
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
