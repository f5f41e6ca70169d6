"""How a batch leaves a worker: small and plain ones are pickled by value, where torch makes files in shared memory."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ddp_patch.ranks.packing import bytes_of
from ddp_patch.sharding.saved_state import NotedBatch
from ddp_patch.walks import SCALARS, elements, plain_tensors

__all__ = ["by_value"]


# Small tensors leave a worker in the message itself, if a batch has at most so many bytes of them. torch would make a
# file in shared memory for each, and open it in the main process: several times the cost.
_SMALL_BYTES = 2**16


def by_value(collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a ``collate_fn`` whose batches leave a worker by value if they are small and plain."""
    return partial(_collated, collate_fn, os.getpid())


def _collated(collate_fn: Callable[[Any], Any], process: int, samples: Any) -> Any:
    """Return the batch of some samples, ready to be pickled if this is a worker's process."""
    made = collate_fn(samples)
    if os.getpid() == process:  # where nothing is sent
        return made
    if type(made) is NotedBatch:
        return made._replace(batch=_by_value(made.batch, samples))
    return _by_value(made, samples)


def _by_value(batch: Any, samples: Any) -> Any:
    """Return a batch whose tensors are pickled by value if they are small and plain; or as it is."""
    tensors = plain_tensors(batch) or {}
    if not tensors or not all(map(_is_dense, tensors.values())):
        return batch
    filled = [tensor for tensor in tensors.values() if tensor.nbytes]
    memories = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in filled}
    if sum(tensor.nbytes for tensor in filled) > _SMALL_BYTES or len(memories) < len(filled):
        return batch  # views of the same memory stay that
    # torch's collate_fn makes batches in shared memory; of its own there, a dataset may want that others see it write.
    are_shared = any(memory.is_shared() for memory in memories.values())
    if are_shared and (plain_tensors(samples) or {}).keys() & tensors.keys():
        return batch
    return _replaced(batch, {key: _TensorByValue(tensor) for key, tensor in tensors.items()})


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether its values, its type and its shape make a tensor. What others are like, torch sends."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized or tensor.requires_grad:
        return False
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _replaced(value: Any, new: Mapping[int, Any]) -> Any:
    """Return plain containers with other tensors in them."""
    if id(value) in new:
        return new[id(value)]
    if SCALARS.issuperset(map(type, elements(value))):
        return value
    if isinstance(value, dict):
        return {key: _replaced(each, new) for key, each in value.items()}
    return type(value)(_replaced(each, new) for each in value)


class _TensorByValue:
    """Is pickled as a tensor of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._parts = bytes_of(tensor).numpy().tobytes(), tensor.dtype, tuple(tensor.shape)

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        return _tensor, self._parts


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()  # where torch puts tensors
    return values.view(dtype).reshape(shape)
