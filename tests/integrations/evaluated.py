"""What ranks give to metrics. It imports no package of metrics, which each rank would do anew."""

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from zoo import seed_ambient

from ddp_patch import gather_in_order, iter_with_mask, patch_dataloader_to_ddp

__all__ = ["SEED", "OnRank", "Outputs", "loader_of", "on_rank", "outputs_of"]

Outputs: TypeAlias = dict[str, torch.Tensor]
OnRank: TypeAlias = tuple[Outputs, Outputs, list[int]]

SEED = 3


def loader_of(outputs: Outputs, shuffle: bool) -> DataLoader[Any]:
    """A loader over what a classifier says of each sample, and the labels."""
    generator = torch.Generator().manual_seed(SEED) if shuffle else None
    return DataLoader(TensorDataset(*outputs.values()), batch_size=50, shuffle=shuffle, generator=generator)


def outputs_of(loader: Any) -> Outputs:
    logits, labels = zip(*loader, strict=True)
    return {"logits": torch.cat(logits), "labels": torch.cat(labels)}


def on_rank(rank: int, world_size: int, outputs: Outputs) -> list[OnRank]:
    """Not shuffled, and shuffled."""
    return [_evaluated(rank, loader_of(outputs, shuffle)) for shuffle in (False, True)]


def _evaluated(rank: int, given: DataLoader[Any]) -> OnRank:
    """What was gathered, what this rank put in, and how many of its samples a metric computed in place had right."""
    seed_ambient(SEED + rank)
    loader = patch_dataloader_to_ddp(given)
    own = outputs_of(loader)
    gathered = gather_in_order(own, loader)
    right = torch.zeros(2, dtype=torch.int64)
    for (logits, labels), mask in iter_with_mask(loader):
        right += torch.stack([(logits.argmax(dim=1) == labels)[mask].sum(), mask.sum()])
    dist.all_reduce(right)
    return gathered, own, right.tolist()
