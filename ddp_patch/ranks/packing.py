"""Pickle objects of the user's that travel to another rank.

Unpickling runs code that the sender chooses: SECURITY.md lists where.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def packed(value: Any) -> bytes:
    """Pickle a value. Tensors arrive detached, and tensors on other devices are copied through the CPU."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def unpacked(data: Any) -> Any:
    """Return the value that ``packed`` has pickled."""
    return pickle.loads(data)  # noqa: S301 - from a rank of this training


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values; a contiguous tensor on the CPU shares its memory."""
    plain: torch.Tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    dense = plain.contiguous()  # its dimensions of one element may still have any stride
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


class _Pickler(pickle.Pickler):
    """A pickler that pickles only the values of a tensor; torch would pickle the whole storage of a view."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild a tensor, or NotImplemented for the usual way."""
        is_plain = type(value) is torch.Tensor and value.layout == torch.strided and not value.is_quantized
        if not is_plain or value.is_meta:
            return NotImplemented
        data = bytes_of(value).numpy() if value.numel() else np.empty(0, np.uint8)
        return _tensor, (data, value.dtype, tuple(value.shape), value.device.type)


def _tensor(data: Any, dtype: torch.dtype, shape: Sequence[int], device: str) -> torch.Tensor:
    """Rebuild a tensor from its bytes."""
    return torch.from_numpy(data).view(dtype).reshape(shape).to(device)
