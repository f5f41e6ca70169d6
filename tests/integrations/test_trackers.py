"""Mistakes that users of other projects reported there: shared right, or named by the audit, with the real packages."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from zoo import Indices, as_it_is, seeded_generator

from ddp_patch import audit, patch_dataloader_to_ddp

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when datasets is imported: nothing here is downloaded

import datasets
from datasets.distributed import split_dataset_by_node

# torchdata 0.11 calls it in the constructor of every loader.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

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


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stateful_loaders_state_at_an_epochs_end_yields_the_whole_next_epoch(workers: int) -> None:
    """pytorch/data 1437: a loader that loads it had an empty epoch, or the last one again."""

    def patched(rank: int) -> Any:
        shuffle: dict[str, Any] = {"shuffle": True, "generator": seeded_generator()}
        given: Any = StatefulDataLoader(Indices(23), batch_size=4, collate_fn=as_it_is, num_workers=workers, **shuffle)
        return patch_dataloader_to_ddp(given, rank=rank, num_replicas=2)

    for rank in range(2):
        whole = patched(rank)
        epochs = [[*whole] for _ in range(5)]
        given, seen = patched(rank), []
        for passes in (2, 2, 1):  # stopped after each of these, as in the report
            seen += [[*given] for _ in range(passes)]
            state = given.state_dict()
            given = patched(rank)
            given.load_state_dict(state)
        assert seen == epochs
        assert all(epochs)
