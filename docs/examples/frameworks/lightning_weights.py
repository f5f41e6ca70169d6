"""Lightning: batches with their samples' weights, so that all ranks train what one process trains."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ddp_patch import iter_with_weights


class WeightedLoader:
    """For ``train_dataloader()``: gives ``(batch, weights)`` of a patched loader."""

    def __init__(self, loader: Any, dtype: torch.dtype | None = None) -> None:
        self.loader, self.dtype = loader, dtype

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        return iter_with_weights(self.loader, dtype=self.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position, which the Trainer saves."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume there."""
        self.loader.load_state_dict(state)
