"""Hugging Face's data sets."""

from typing import Any

from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from third_party.base import N, Case, Fate, World
from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp


def table() -> Dataset:
    return Dataset.from_dict({"number": list(range(N))})


def stream() -> Any:
    return table().to_iterable_dataset(num_shards=6)


def split(world: World) -> Any:
    return DataLoader(split_dataset_by_node(stream(), rank=world.rank, world_size=max(world.size, 2)), batch_size=4)


def whole(outer: Any, options: dict[str, Any]) -> Any:
    """Patch a loader of the whole one."""
    return patch_dataloader_to_ddp(DataLoader(stream(), batch_size=4), **options)


CASES = [
    Case("datasets", "`Dataset`", lambda world: DataLoader(table(), batch_size=4, shuffle=True)),
    Case("datasets", "`IterableDataset`", lambda world: DataLoader(stream(), batch_size=4)),
    Case("datasets", "`IterableDataset` with 2 workers", lambda world: DataLoader(stream(), batch_size=4, num_workers=2)),
]
