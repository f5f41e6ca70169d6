"""Batches for frameworks that move nothing but tensors."""

from collections.abc import Iterator
from typing import Any, Self

import torch

from frameworks.kinds import Batch

__all__ = ["NotedTensor", "Seen", "as_batch"]


class NotedTensor(torch.Tensor):
    """The numbers of a batch's samples, and the devices that a framework moved them to."""

    moved_to: tuple[str, ...] = ()

    @classmethod
    def of(cls, numbers: list[int] | int) -> Self:
        """A batch, or the single sample of a loader that was left without batches."""
        return torch.tensor(numbers).reshape(-1).as_subclass(cls)

    def to(self, *args: Any, **options: Any) -> Any:
        """Return the tensor, moved."""
        moved: Any = super().to(*args, **options)
        moved.moved_to = (*self.moved_to, moved.device.type)
        return moved


def as_batch(numbers: torch.Tensor) -> Batch:
    """Return what a framework's training step is said to have seen; of a tensor that rank 0 sent, too."""
    return Batch(numbers.tolist(), getattr(numbers, "moved_to", ()))


class Seen:
    """A loader of tensors, whose batches are seen as numbers."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return map(as_batch, self.loader)
