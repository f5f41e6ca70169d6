"""Pickle what has to be an object of the user's on another rank.

Whatever reads this runs what the sender says: SECURITY.md lists it.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["bytes_of", "packed", "unpacked"]


def packed(value: Any, *, by_value: bool = False) -> bytes:
    """Pickle a value; tensors arrive detached, and those of other devices than the CPU travel through it.

    Args:
        value: The value.
        by_value: Whether equal values are to be equal bytes, also where one holds an object twice and the other one two
            equal ones. What holds itself raises then.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.fast = by_value
    pickler.dump(value)
    return file.getvalue()


def unpacked(data: Any) -> Any:
    """Return the value of which ``packed`` made these bytes."""
    return pickle.loads(data)  # noqa: S301 - our own ranks'


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values: the same memory where it lies there in order, on the CPU."""
    plain: torch.Tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    dense = plain.contiguous()  # whose dimensions of one element may have any stride
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


class _Pickler(pickle.Pickler):
    """Pickles the values of tensors alone; torch would pickle all of the storage that a view is a part of."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to make a tensor again, or NotImplemented for the usual way."""
        is_plain = type(value) is torch.Tensor and value.layout == torch.strided and not value.is_quantized
        if not is_plain or value.is_meta:
            return NotImplemented
        # Dimensions in the order in which their elements lie in memory, which convolutions compute by.
        order = sorted(range(value.dim()), key=lambda at: -value.stride(at))
        ordered = value.detach().permute(order)
        data = bytes_of(ordered).numpy() if value.numel() else np.empty(0, np.uint8)
        return _tensor, (data, value.dtype, tuple(ordered.shape), value.device.type, order)


def _tensor(data: Any, dtype: torch.dtype, shape: Sequence[int], device: str, order: Sequence[int]) -> torch.Tensor:
    """Make a tensor of these bytes again."""
    ordered = torch.from_numpy(data).view(dtype).reshape(shape).to(device)
    return ordered.permute([order.index(at) for at in range(len(order))])
