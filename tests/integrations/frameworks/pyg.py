"""PyTorch Geometric's ``DataLoader``."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_patch import patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import Batch, tiny_model
from frameworks.loops import train

with warnings.catch_warnings():
    # Importing PyTorch Geometric 2.8 calls torch.jit.script, which torch 2.13 deprecates.
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

__all__ = ["FRAMEWORK"]


class Numbered:
    """A loader of graphs, whose batches are seen as the graphs' numbers."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return (Batch(graphs.number.tolist()) for graphs in self.loader)


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Make a loader of as many graphs with the same batches."""
    graphs = [Data(x=torch.ones(number + 1, 1), number=number) for number in range(len(loader.dataset))]
    ready: Any = DataLoader(graphs, batch_sampler=loader.batch_sampler)
    if patched:
        ready = patch_dataloader_to_ddp(ready)
    model = DistributedDataParallel(tiny_model())
    return train(model, Numbered(ready), epochs, set_epoch=lambda epoch: ready.sampler.set_epoch(epoch))


FRAMEWORK = Framework(("torch_geometric",), passes, moves=False)
