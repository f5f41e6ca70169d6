"""Batches for frameworks that move nothing but tensors."""

from typing import Any, Self

import torch

from frameworks.kinds import Batch

__all__ = ["NotedTensor"]


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

    def as_batch(self) -> Batch:
        """Return what a framework's training step is said to have seen."""
        return Batch(self.tolist(), self.moved_to)
