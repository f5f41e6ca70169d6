"""Real ranks of which one alone is given a whole pass: told before its script computes a number."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from quick import run_each
from torch.utils.data import DataLoader, IterableDataset
from zoo import Indices

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import DDPPatchError
from ddp_patch.ranks import claims, pass_monitor


class Stream(IterableDataset[str]):
    def __iter__(self) -> Any:
        return iter(f"row {number}" for number in range(12))


Loaders = tuple[Any, Any]


def evaluates_alone(rank: int, train: Any, val: Any) -> None:
    for _ in train:
        dist.barrier()
    if rank == 0:
        assert len(list(val)) == 3


def evaluates_alone_with_the_unpatched_loader(rank: int, train: Any, val: Any) -> None:
    list(train)
    if rank == 0:
        assert list(DataLoader(Indices(24), 4))


def ends_without_it(rank: int, train: Any, val: Any) -> None:
    list(train)
    if rank == 0:
        list(val)
    else:
        claims._leave_marks_of_exit()  # as at its exit


def trains_on_instead(rank: int, train: Any, val: Any) -> None:
    list(train)
    if rank == 0:
        list(val)
    else:
        for _ in range(9):
            next(batches := iter(train))
            next(batches)


def comes_later(rank: int, train: Any, val: Any) -> None:
    for loader in (train, val, train):
        time.sleep(0.3 * rank)
        list(loader)


def takes_a_part(rank: int, train: Any, val: Any) -> None:
    if rank == 0:
        next(batches := iter(val))
        next(batches)


# What ranks do, with which loader for validation, and what rank 0 is told.
CASES: list[tuple[Callable[[int, Any, Any], None], dict[str, Any], str]] = [
    (evaluates_alone, {}, "PartialPassWarning: rank 1 of 2 had not begun that pass"),
    (evaluates_alone, {"stream": True}, "PartialPassWarning: rank 1 of 2 had not begun that pass"),
    (evaluates_alone, {"uneven": "keep"}, ""),
    (evaluates_alone_with_the_unpatched_loader, {}, ""),
    (ends_without_it, {}, "RankMismatchError: rank 1 of 2 never began that pass: rank 1 has ended"),
    (trains_on_instead, {}, "RankMismatchError: never began that pass: rank 1 has made"),
    (comes_later, {}, ""),
    (takes_a_part, {}, ""),
]


def each_case(rank: int, ranks: int) -> list[str]:
    """Return what this rank is told of each."""
    found = []
    for does, options, _ in CASES:
        options = dict(options)
        data: Any = Stream() if options.pop("stream", False) else Indices(24)
        train, val = DataLoader(Indices(24), 4, shuffle=True), DataLoader(data, 2 if isinstance(data, Stream) else 4)
        train, val = patch_dataloader_to_ddp(train), patch_dataloader_to_ddp(val, **options)
        told = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                does(rank, train, val)
            except DDPPatchError as error:
                told.append(f"{type(error).__name__}: {error}")
        told += [f"{one.category.__name__}: {one.message}" for one in caught]
        found.append("; ".join(told))
        dist.barrier()
    return found


def without_much_patience(rank: int, ranks: int) -> list[str]:
    pass_monitor.PATIENCE_S = 2.0
    return each_case(rank, ranks)


def test_a_rank_that_is_given_a_whole_pass_alone_is_told() -> None:
    ((first, other),) = run_each(2, without_much_patience)
    for said, (does, options, expected) in zip(first, CASES, strict=True):
        kind, _, facts = expected.partition(": ")
        assert said.startswith(kind) if kind else not said, (does.__name__, options, said)
        assert facts in said, (does.__name__, options, said)
    assert other[0] == ""
