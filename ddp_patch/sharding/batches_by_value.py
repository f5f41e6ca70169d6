"""How a batch leaves a worker: a small, plain batch by value; torch makes a file in shared memory for each tensor."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from ddp_patch.ranks.exchange import bytes_of
from ddp_patch.sharding.saved_state import NotedBatch
from ddp_patch.walks import elements

# The largest batch, in bytes, whose tensors leave a worker in the message itself. torch would make a file in shared
# memory for each tensor, and open it in the main process, which costs several times as much.
_SMALL_BYTES = 2**16
# The types that torch's own functions collate without calling other code, and the containers that may have them.
_SCALARS = frozenset({bool, int, float, str, bytes, type(None)})
_CONTAINERS = frozenset({list, tuple, dict})


def by_value(collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a ``collate_fn`` whose batches leave a worker by value if they are small and plain."""
    return partial(_collated, collate_fn, os.getpid())


def _collated(collate_fn: Callable[[Any], Any], process: int, samples: Any) -> Any:
    """Return the batch of some samples, ready to be pickled if this is a worker's process."""
    made = collate_fn(samples)
    if os.getpid() == process:  # the main process, which sends nothing
        return made
    if type(made) is NotedBatch:
        return made._replace(batch=_by_value(made.batch, samples))
    return _by_value(made, samples)


def _by_value(batch: Any, samples: Any) -> Any:
    """Return a batch whose tensors are pickled by value if they are small and plain; else the batch unchanged."""
    tensors = _plain_tensors(batch) or {}
    if not tensors or not all(map(_is_dense, tensors.values())):
        return batch
    filled = [tensor for tensor in tensors.values() if tensor.nbytes]
    memories = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in filled}
    if sum(tensor.nbytes for tensor in filled) > _SMALL_BYTES or len(memories) < len(filled):
        return batch  # views of one memory stay views
    # torch's collate_fn makes batches in shared memory. A dataset may share a tensor on purpose, for other processes to
    # see what it writes.
    are_shared = any(memory.is_shared() for memory in memories.values())
    if are_shared and (_plain_tensors(samples) or {}).keys() & tensors.keys():
        return batch
    return _replaced(batch, {key: _TensorByValue(tensor) for key, tensor in tensors.items()})


def _plain_tensors(value: Any) -> dict[int, torch.Tensor] | None:
    """Return the tensors in lists, tuples and dicts of plain values, by their ids.

    Return None if there is anything else, such as an object of a class, or a container that appears twice.

    Examples:
        >>> found = _plain_tensors({"x": torch.ones(2), "y": [1, "a"]})
        >>> [tensor.tolist() for tensor in found.values()], _plain_tensors([object()])
        ([[1.0, 1.0]], None)
    """
    tensors: dict[int, torch.Tensor] = {}
    seen = set[int]()

    def is_plain(part: Any) -> bool:
        kind = type(part)
        if kind is torch.Tensor:
            tensors[id(part)] = part
        if kind not in _CONTAINERS:
            return kind in _SCALARS or kind is torch.Tensor or kind is np.ndarray
        if id(part) in seen:
            return False
        seen.add(id(part))
        parts = elements(part)
        return _SCALARS.issuperset(map(type, parts)) or all(map(is_plain, parts))

    return tensors if is_plain(value) else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has only values, a type and a shape. torch pickles all other tensors."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized or tensor.requires_grad:
        return False
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _replaced(value: Any, new: Mapping[int, Any]) -> Any:
    """Return plain containers with other tensors in them."""
    if id(value) in new:
        return new[id(value)]
    if _SCALARS.issuperset(map(type, elements(value))):
        return value
    if isinstance(value, dict):
        return {key: _replaced(each, new) for key, each in value.items()}
    return type(value)(_replaced(each, new) for each in value)


class _TensorByValue:
    """A tensor that is pickled by value, and unpickled as a tensor with memory of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._parts = bytes_of(tensor).numpy().tobytes(), tensor.dtype, tuple(tensor.shape)

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        return _tensor, self._parts


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()  # into memory that torch aligns
    return values.view(dtype).reshape(shape)
