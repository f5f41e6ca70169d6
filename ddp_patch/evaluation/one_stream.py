"""Which loaders can be evaluated: those whose ranks share one stream, or that are alone."""

from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.loaders.facts import Level
from ddp_patch.loaders.recognition import require_loader, sharded_by
from ddp_patch.shares.batches import Batches, require_batches

__all__ = ["is_alone", "require_one_stream"]


def is_alone(loader: DataLoader[Any]) -> bool:
    """Tell whether it is the unpatched loader of the only process."""
    require_loader("Evaluation", loader)
    return sharded_by(loader) is None and (not dist.is_initialized() or dist.get_world_size() == 1)


def require_one_stream(operation: str, loader: DataLoader[Any]) -> Batches:
    """Return how a loader's batches follow from its share; raise where the ranks share no one stream."""
    batches = require_batches(operation, loader)
    if batches.sampler.agreed.options.iterable_sharding == "by_worker" and batches.level is Level.ITERABLE:
        raise UnsupportedLoaderError(
            f"{operation} was given a loader with iterable_sharding='by_worker', whose dataset decides what each "
            "worker reads, so there is no one order and no padding. Use iterable_sharding='exact'."
        )
    return batches
