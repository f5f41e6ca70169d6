"""Mistakes that users of other projects reported there: shared right, or named by the audit, with the real packages."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

from ddp_patch import audit

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when datasets is imported: nothing here is downloaded

import datasets
from datasets.distributed import split_dataset_by_node

N = 40


def rows(shards: int = 4, numbers: range = range(N)) -> Any:
    return datasets.Dataset.from_dict({"number": numbers}).to_iterable_dataset(shards)


def halves() -> list[Any]:
    return [rows(4, range(N // 2)), rows(4, range(N // 2, N))]


def of(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=4, **options)


def split(dataset: Any, rank: int, world_size: int) -> Any:
    return dataset if world_size == 1 else split_dataset_by_node(dataset, rank, world_size)


# Hugging Face: what a split does to its neighbours. Each case with the dataset that the remedy leaves, unsplit.
SPLITS: dict[str, tuple[Callable[[int, int], Any], Callable[[], Any]]] = {
    # huggingface/datasets 8568: up to 5.1 each rank got all of it, and since then each rank skips for itself
    "skip after the split": (lambda rank, size: split(rows(), rank, size).skip(3), lambda: rows().skip(3)),
    "split after skip": (lambda rank, size: split(rows().skip(3), rank, size), lambda: rows().skip(3)),
    # huggingface/datasets 7868: in 4.4 each rank got all of it
    "interleaved splits": (
        lambda rank, size: datasets.interleave_datasets([split(half, rank, size) for half in halves()]),
        lambda: datasets.interleave_datasets(halves()),
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_the_audit_finds_what_a_split_loses_and_the_whole_dataset_holds(name: str) -> None:
    make, whole = SPLITS[name]
    report = audit(lambda rank, size: of(make(rank, size)), world_size=2, epochs=1)
    (problem,) = report.problems
    assert problem.kind in {"not_sharded", "missing", "foreign"}
    assert "patch_dataloader_to_ddp()" in problem.remedy or "make(0, 1)" in problem.remedy
    assert audit(of(whole()), world_size=2).ok


def test_a_split_that_shares_right_passes() -> None:
    mixed = [datasets.interleave_datasets([split_dataset_by_node(rows(), rank, 2)]) for rank in range(2)]
    assert audit(lambda rank, size: of(mixed[rank] if size == 2 else rows()), world_size=2, epochs=1).ok
