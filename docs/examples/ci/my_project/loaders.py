"""The project's loaders, as one process would use them, and as its training does."""

from typing import Any

from torch.utils.data import DataLoader

from ddp_patch import patch_dataloader_to_ddp


def make_loaders() -> dict[str, DataLoader[Any]]:
    """Return the finished loaders."""
    return {
        "train": DataLoader(range(1000), batch_size=16, shuffle=True, drop_last=True),
        "val": DataLoader(range(100), batch_size=16),
    }


def distributed_loaders() -> dict[str, DataLoader[Any]]:
    """Return this rank's loaders, which is what the training iterates."""
    return {name: patch_dataloader_to_ddp(loader) for name, loader in make_loaders().items()}
