"""What outputs may look like, of several ranks, judged without sending anything."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gathered import shares, together
from messages import raises
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import OutputsError

N = 23


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
        alone = [make(list(range(n))[at : at + 3]) for at in range(0, n, 3)]
        assert len(lists) == len(alone)
        if name != "strings":  # as wide as the widest of all
            assert same(lists, alone), (n, world_size, uneven)


BATCHES = [[0, 1, 2], [3], [], [4, 5], [6, 7, 8, 9], [10]]


@pytest.mark.parametrize("uneven", ["pad", "keep"])
def test_whole_batches_have_rows_of_samples_or_of_batches(uneven: Any) -> None:
    for world_size in (1, 2, 4, 5, 7):
        loaders = shares(world_size, batch_sampler=BATCHES, uneven=uneven)
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


class Parts(IterableDataset[int]):
    """Twelve items for each worker."""

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        return iter(range(100 * info.id, 100 * info.id + 12))


@pytest.mark.parametrize("done", [1, 2])
def test_after_a_restore_workers_come_in_the_order_of_one_process(done: int) -> None:
    def make(rank: int, ranks: int) -> Any:
        given = DataLoader(Parts(), 2, num_workers=2, collate_fn=list)
        return patch_dataloader_to_ddp(given, rank=rank, num_replicas=ranks, seed=1)

    alone = [item for batch in DataLoader(Parts(), 2, num_workers=2, collate_fn=list) for item in batch]
    taken, rests = [], []
    for rank in range(2):
        stopped = make(rank, 2)
        taken += [item for batch in islice(stopped, done) for item in batch]
        rests.append(make(rank, 2))
        restore_loader(rests[-1], loader_state(stopped, batches_done=done))
    found = together([[item for batch in rest for item in batch] for rest in rests], rests)
    assert found == [item for item in alone if item not in taken]
