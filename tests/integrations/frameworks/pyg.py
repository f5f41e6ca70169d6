"""PyTorch Geometric's ``DataLoader``."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from ddp_patch import patch_dataloader_to_ddp
from frameworks.base import Epochs, Framework
from frameworks.kinds import Batch, made_anew, tiny_model
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


class Streamed(IterableDataset[Data]):
    """The graphs of a stream of numbers."""

    def __init__(self, numbers: Any, graphs: list[Data]) -> None:
        self.numbers, self.graphs = numbers, graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def __iter__(self) -> Iterator[Data]:
        return (self.graphs[number] for number in self.numbers)


def passes(loader: Any, patched: bool, epochs: Sequence[int | None]) -> Epochs:
    """Make a loader of as many graphs with the same batches."""
    graphs = [Data(x=torch.ones(number + 1, 1), number=number) for number in range(len(loader.dataset))]
    is_iterable = isinstance(loader.dataset, IterableDataset)
    ready = made_anew(DataLoader, loader, Streamed(loader.dataset, graphs) if is_iterable else graphs)
    if patched:
        ready = patch_dataloader_to_ddp(ready)
    model = DistributedDataParallel(tiny_model())
    return train(model, Numbered(ready), epochs, set_epoch=lambda epoch: ready.sampler.set_epoch(epoch))


FRAMEWORK = Framework(("torch_geometric",), passes, moves=False)
