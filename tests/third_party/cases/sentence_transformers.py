"""The batch samplers of Sentence Transformers."""

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

from third_party.base import Case, N, World

PACKAGE = "sentence-transformers"


def pairs(n: int = N, first: int = 0) -> Dataset:
    numbers = list(range(first, first + n))
    columns = {"anchor": [f"question {n // 2}" for n in numbers], "number": numbers}
    return Dataset.from_dict({**columns, "label": [n % 3 for n in numbers]})


def numbers(batch: Any) -> tuple[int, ...]:
    return tuple(torch.as_tensor(batch["number"]).tolist())


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def default(world: World) -> Any:
    sampler = DefaultBatchSampler(
        SubsetRandomSampler(range(N), generator=generator()), batch_size=4, drop_last=False, generator=generator()
    )
    return DataLoader(pairs(), batch_sampler=sampler)


def no_duplicates(world: World) -> Any:
    sampler = NoDuplicatesBatchSampler(
        pairs().select_columns("anchor"), batch_size=4, drop_last=False, generator=generator()
    )
    return DataLoader(pairs(), batch_sampler=sampler)


def by_label(world: World) -> Any:
    sampler = GroupByLabelBatchSampler(
        pairs(), batch_size=4, drop_last=False, valid_label_columns=["label"], generator=generator()
    )
    return DataLoader(pairs(), batch_sampler=sampler)


def several(kind: Any) -> Any:
    datasets: Any = ConcatDataset([pairs(13), pairs(8, first=13)])
    samplers = [
        DefaultBatchSampler(RandomSampler(range(len(one)), generator=generator()), batch_size=3, drop_last=False)
        for one in datasets.datasets
    ]
    return DataLoader(
        datasets, batch_sampler=kind(dataset=datasets, batch_samplers=samplers, generator=generator(), seed=3)
    )


CASES = [
    Case(PACKAGE, "`DefaultBatchSampler`", default, items=numbers, whole=True),
    Case(PACKAGE, "`NoDuplicatesBatchSampler`", no_duplicates, items=numbers, whole=True),
    Case(PACKAGE, "`GroupByLabelBatchSampler`", by_label, items=numbers, whole=True),
    Case(PACKAGE, "`RoundRobinBatchSampler`", lambda world: several(RoundRobinBatchSampler), items=numbers, whole=True),
    Case(
        PACKAGE,
        "`ProportionalBatchSampler`",
        lambda world: several(ProportionalBatchSampler),
        items=numbers,
        whole=True,
    ),
]
