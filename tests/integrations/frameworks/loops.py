"""A training loop as one writes it with torch alone, for frameworks that leave the loop to their users."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from frameworks.base import Epochs
from frameworks.kinds import features

__all__ = ["train"]


def train(
    model: Any,
    loader: Any,
    epochs: Sequence[int | None],
    *,
    set_epoch: Callable[[int], object] | None = None,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
) -> Epochs:
    """Train for some epochs and return what was seen."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    seen: Epochs = []
    for epoch in epochs:
        if epoch is not None and set_epoch is not None:
            set_epoch(epoch)
        seen.append([])
        for batch in loader:
            seen[-1].append(batch)
            optimizer.zero_grad()
            backward(model(features(batch)).square().mean())
            optimizer.step()
    return seen
