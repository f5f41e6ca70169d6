"""Loaders to audit: two as they should be, and two set-ups made by hand that lose something."""

from random import Random
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

names: Any = [f"{number}.jpg" for number in range(103)]
lengths = [1 + number % 7 for number in range(103)]
train: DataLoader[Any] = DataLoader(names, batch_size=8, shuffle=True)

# Texts differ in length, and a step takes as long as its longest batch.
drawn = Random(0)
tokens = [round(drawn.lognormvariate(5, 0.6)) for _ in range(2000)]
texts: DataLoader[Any] = DataLoader(range(len(tokens)), batch_size=4, shuffle=True)  # type: ignore[arg-type]  # a dataset


def by_torch(rank: int, world_size: int) -> DataLoader[Any]:
    """Return a rank's loader with torch's own sampler; the training must not forget set_epoch()."""
    return DataLoader(names, batch_size=8, sampler=DistributedSampler(names, world_size, rank))


def by_slices(rank: int, world_size: int) -> DataLoader[Any]:
    """Return a rank's loader over a slice of a shuffle that every rank draws for itself."""
    return DataLoader(names, batch_size=8, sampler=torch.randperm(len(names))[rank::world_size].tolist())
