"""Pickle what has to be an object of the user's on another rank, and what is too large to be copied often.

Whatever reads this runs what the sender says: SECURITY.md lists it.
"""

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["bytes_of", "from_parts", "in_parts", "packed", "unpacked"]


def packed(value: Any, beside: Callable[[pickle.PickleBuffer], object] | None = None) -> bytes:
    """Pickle a value; tensors arrive detached, and those of other devices than the CPU travel through it.

    Args:
        value: Anything that can be pickled.
        beside: Called with the memory of each tensor and array, which then stays out of the pickle.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=beside).dump(value)
    return file.getvalue()


def unpacked(data: Any, beside: Sequence[torch.Tensor] = ()) -> Any:
    """Return a pickled value.

    Args:
        data: What ``packed`` returned.
        beside: The memory that stayed out of the pickle, in order. The value then lives in it.
    """
    return pickle.loads(data, buffers=[part.numpy() for part in beside])  # noqa: S301 - our own ranks'


def in_parts(value: Any) -> list[torch.Tensor]:
    """Return a value as bytes to send: its pickle, then the memory of each tensor and array, uncopied if possible."""
    parts: list[torch.Tensor] = []
    data = packed(value, lambda memory: parts.append(_as_tensor(memory.raw())))
    return [_as_tensor(memoryview(bytearray(data))), *parts]


def from_parts(parts: Sequence[torch.Tensor]) -> Any:
    """Return the value of which ``in_parts`` made these."""
    data, *beside = parts
    return unpacked(data.numpy().data, beside)


def _as_tensor(memory: memoryview) -> torch.Tensor:
    """Return the same memory as a tensor; a copy where it may not be written to."""
    if not len(memory):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8)


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
