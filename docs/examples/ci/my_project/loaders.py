"""The project's loaders, as one process would use them, and as its training does."""

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from ddp_patch import patch_dataloader_to_ddp


def make_loaders() -> dict[str, DataLoader[Any]]:
    """Return the finished loaders."""
    return {
        "train": DataLoader(TensorDataset(torch.arange(1000.0)), batch_size=16, shuffle=True, drop_last=True),
        "val": DataLoader(TensorDataset(torch.arange(100.0)), batch_size=16),
    }


def distributed_loaders() -> dict[str, DataLoader[Any]]:
    """Return this rank's loaders, which is what the training iterates."""
    return patch_dataloader_to_ddp(make_loaders())
