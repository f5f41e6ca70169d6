"""torchtitan: its own dataloader, over the dataset and batches of a loader; ``tests/torchtitan`` has patched ones."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader

from frameworks.base import Epochs, Framework
from frameworks.kinds import tiny_model
from frameworks.loops import train

__all__ = ["FRAMEWORK"]


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Make its dataloader, as its own ones for text do."""
    name = "batch_size" if isinstance(loader.dataset, IterableDataset) else "batch_sampler"
    options = {name: getattr(loader, name), "collate_fn": loader.collate_fn}
    own = ParallelAwareDataloader(loader.dataset, dist.get_rank(), dist.get_world_size(), **options)
    return train(DistributedDataParallel(tiny_model()), own, epochs)


FRAMEWORK = Framework(("torchtitan",), passes, moves=False)
