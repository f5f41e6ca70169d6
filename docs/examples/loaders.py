"""Loaders to audit: one as it should be, and two set-ups made by hand that lose something."""

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

names: Any = [f"{number}.jpg" for number in range(103)]
lengths = [1 + number % 7 for number in range(103)]
train: DataLoader[Any] = DataLoader(names, batch_size=8, shuffle=True)


def by_torch(rank: int, world_size: int) -> DataLoader[Any]:
    """Return a rank's loader with torch's own sampler; the training must not forget set_epoch()."""
    return DataLoader(names, batch_size=8, sampler=DistributedSampler(names, world_size, rank))


def by_slices(rank: int, world_size: int) -> DataLoader[Any]:
    """Return a rank's loader over a slice of a shuffle that every rank draws for itself."""
    return DataLoader(names, batch_size=8, sampler=torch.randperm(len(names))[rank::world_size].tolist())
