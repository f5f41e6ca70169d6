"""Hugging Face's data sets."""

from typing import Any

from datasets import Dataset
from torch.utils.data import DataLoader

from third_party.base import Case, N


def table() -> Dataset:
    return Dataset.from_dict({"number": list(range(N))})


def streamed(**options: Any) -> Any:
    return DataLoader(table().to_iterable_dataset(num_shards=6), batch_size=4, **options)


CASES = [
    Case("datasets", "`Dataset`", lambda world: DataLoader(table(), batch_size=4, shuffle=True)),
    Case("datasets", "`IterableDataset`", lambda world: streamed()),
    Case("datasets", "`IterableDataset` with 2 workers", lambda world: streamed(num_workers=2)),
]
