"""What an audit finds of the workers that read an iterable dataset."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_patch import audit


class ByEpoch(IterableDataset[int]):
    """Shuffles by the epoch that it is told, as plain datasets do; its workers have copies."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).sample(range(40), 40)
        info = get_worker_info()
        return iter(order if info is None else order[info.id :: info.num_workers])


class BySharedEpoch(ByEpoch):
    """Keeps the epoch where its workers see it."""

    def __init__(self) -> None:
        self.shared = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # torch's

    @property
    def epoch(self) -> int:
        return int(self.shared)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.shared.fill_(epoch)


def in_one_process(dataset: Any, **options: Any) -> Any:
    given: DataLoader[Any] = DataLoader(dataset, batch_size=4, num_workers=2, **options)
    return audit(given, world_size=1, patch=False, set_epoch=True)


def test_persistent_workers_that_never_see_set_epoch_are_named_and_both_remedies_hold() -> None:
    (problem,) = in_one_process(ByEpoch(), persistent_workers=True).problems
    assert problem.kind == "same_order"
    assert "though set_epoch() was called" in problem.what
    assert "Leave persistent_workers=True out" in problem.remedy
    assert "tensor in shared memory" in problem.remedy
    assert in_one_process(ByEpoch()).ok
    assert in_one_process(BySharedEpoch(), persistent_workers=True).ok


class FewShards(IterableDataset[int]):
    """Splits its shards over its workers, by their number alone."""

    def __init__(self, shards: int, says_so: bool) -> None:
        self.shards = [range(40)[shard::shards] for shard in range(shards)]
        if says_so:
            self.num_shards = shards

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for shard in self.shards if info is None else self.shards[info.id :: info.num_workers]:
            yield from shard


@pytest.mark.parametrize(
    ("shards", "workers", "says_so", "is_found"),
    [(1, 2, False, True), (2, 4, False, True), (2, 3, False, False), (2, 3, True, True), (3, 3, True, False)],
)
@pytest.mark.parametrize("patch", [True, False])
def test_workers_that_get_nothing_are_named(
    shards: int, workers: int, says_so: bool, is_found: bool, patch: bool
) -> None:
    """Where a dataset does not say how many shards it has, one of three workers may have an empty one."""
    given: DataLoader[Any] = DataLoader(FewShards(shards, says_so), batch_size=4, num_workers=workers)
    report = audit(given, world_size=2 if patch else 1, patch=patch)
    assert [problem.kind for problem in report.problems] == ["idle_workers"] * is_found


def test_too_few_batches_for_all_workers_are_no_problem() -> None:
    given: DataLoader[Any] = DataLoader(FewShards(1, says_so=True), batch_size=30, num_workers=3)
    assert audit(given, world_size=1, patch=False).ok
