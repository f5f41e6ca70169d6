"""Lightning: batches with their samples' weights, by which all ranks train what one process trains."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ddp_patch import iter_with_weights


class WeightedLoader:
    """For ``train_dataloader()``: gives ``(batch, weights)`` of a patched loader."""

    def __init__(self, loader: DataLoader[Any], dtype: torch.dtype | None = None) -> None:
        self.loader, self.dtype = loader, dtype

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        return iter_with_weights(self.loader, dtype=self.dtype)
