"""Check that a loader can be evaluated: its ranks share one stream, or there is only one process."""

from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.loaders.facts import Level
from ddp_patch.loaders.recognition import require_loader, sharded_by
from ddp_patch.shares.batches import Batches, require_batches

__all__ = ["is_alone", "require_one_stream"]


def is_alone(operation: str, loader: DataLoader[Any]) -> bool:
    """Return whether the loader is unpatched and this process the only one."""
    require_loader(operation, loader)
    return sharded_by(loader) is None and (not dist.is_initialized() or dist.get_world_size() == 1)


def require_one_stream(operation: str, loader: DataLoader[Any]) -> Batches:
    """Return how a loader makes batches of its share; raise if its ranks do not share one stream."""
    batches = require_batches(operation, loader)
    if batches.sampler.agreed.options.iterable_sharding == "by_worker" and batches.level is Level.ITERABLE:
        raise UnsupportedLoaderError(
            f"{operation} was given a loader with iterable_sharding='by_worker': its dataset decides what each worker "
            "reads, so there is no common order and no padding. Use iterable_sharding='exact'."
        )
    return batches
