"""The batch samplers of Sentence Transformers."""

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers.base.sampler import (
    DefaultBatchSampler,
    GroupByLabelBatchSampler,
    NoDuplicatesBatchSampler,
    ProportionalBatchSampler,
    RoundRobinBatchSampler,
)
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, SubsetRandomSampler

from third_party.base import Case, N


def pairs(n: int = N, first: int = 0) -> Dataset:
    numbers = list(range(first, first + n))
    columns = {"anchor": [f"question {n // 2}" for n in numbers], "number": numbers}
    return Dataset.from_dict({**columns, "label": [n % 3 for n in numbers]})


def numbers(batch: Any) -> tuple[int, ...]:
    return tuple(torch.as_tensor(batch["number"]).tolist())


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def batched(kind: Any, data: Any, given: Any, **options: Any) -> Any:
    return DataLoader(data, batch_sampler=kind(given, batch_size=4, drop_last=False, generator=generator(), **options))


def default() -> Any:
    return batched(DefaultBatchSampler, pairs(), SubsetRandomSampler(range(N), generator=generator()))


def no_duplicates() -> Any:
    return batched(NoDuplicatesBatchSampler, pairs(), pairs().select_columns("anchor"))


def by_label() -> Any:
    return batched(GroupByLabelBatchSampler, pairs(), pairs(), valid_label_columns=["label"])


def several(kind: Any) -> Any:
    datasets: Any = ConcatDataset([pairs(13), pairs(8, first=13)])
    samplers = [
        DefaultBatchSampler(RandomSampler(range(len(one)), generator=generator()), batch_size=3, drop_last=False)
        for one in datasets.datasets
    ]
    sampler = kind(dataset=datasets, batch_samplers=samplers, generator=generator(), seed=3)
    return DataLoader(datasets, batch_sampler=sampler)


MADE: dict[str, Callable[[], Any]] = {
    "`DefaultBatchSampler`": default,
    "`NoDuplicatesBatchSampler`": no_duplicates,
    "`GroupByLabelBatchSampler`": by_label,
    "`RoundRobinBatchSampler`": lambda: several(RoundRobinBatchSampler),
    "`ProportionalBatchSampler`": lambda: several(ProportionalBatchSampler),
}
CASES = [
    Case("sentence-transformers", name, lambda world, make=make: make(), items=numbers, whole=True)  # type: ignore[misc]  # a default binds it
    for name, make in MADE.items()
]
