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


def packed(value: Any) -> bytes:
    """Pickle a value; tensors arrive detached, and those of other devices than the CPU travel through it."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
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
        data = bytes_of(value).numpy() if value.numel() else np.empty(0, np.uint8)
        return _tensor, (data, value.dtype, tuple(value.shape), value.device.type)


def _tensor(data: Any, dtype: torch.dtype, shape: Sequence[int], device: str) -> torch.Tensor:
    """Make a tensor of these bytes again."""
    return torch.from_numpy(data).view(dtype).reshape(shape).to(device)
