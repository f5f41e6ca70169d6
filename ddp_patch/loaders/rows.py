"""Hashes of the samples in a batch, by their content."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np
import torch

__all__ = ["row_hashes"]

# So many bytes of a sample's array are looked at, evenly spread.
_BYTES = 1024
_SCALARS = (str, bytes, int, float, bool, np.generic)


def row_hashes(batch: Any, most: int) -> list[int]:
    """Return a hash of 32 bits for each of the first samples in a batch, the same in every process.

    A sample is what a batch has at one place in all of its tensors, arrays and lists of plain values. Its tensors count
    by their bytes. Nothing is known of tensors on accelerators, nor of batches of other objects.

    Args:
        batch: The batch, as a loader gives it.
        most: How many samples to look at.

    Examples:
        >>> row_hashes({"x": torch.eye(3), "name": ["a", "b", "c"]}, most=2) == row_hashes([torch.eye(3)], most=2)
        False
        >>> len(row_hashes((torch.eye(3), [1, 2, 3]), most=9)), row_hashes(object(), most=9)
        (3, [])
        >>> row_hashes(torch.ones(0, 3), most=9)  # an empty batch
        []
    """
    columns = [column for column in _columns(batch) if len(column)]
    if not columns:
        return []
    # Most of what a batch holds has one value for each sample.
    size = Counter(map(len, columns)).most_common(1)[0][0]
    count = min(most, size)
    bytes_of = [_bytes_of(column, count) for column in columns if len(column) == size]
    rows = zip(*bytes_of, strict=True)
    return [int.from_bytes(blake2b(b"\0".join(row), digest_size=4).digest(), "little") for row in rows]


def _columns(value: Any) -> Iterator[Any]:
    """Yield what has one value for each sample."""
    if isinstance(value, torch.Tensor):
        if value.ndim and value.device.type == "cpu" and value.layout == torch.strided and not value.is_nested:
            yield value
    elif isinstance(value, np.ndarray):
        if value.ndim and not value.dtype.hasobject:
            yield value
    elif isinstance(value, list | tuple) and value and all(isinstance(part, _SCALARS) for part in value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _columns(part)


def _bytes_of(column: Any, count: int) -> Sequence[bytes]:
    if isinstance(column, list | tuple):
        return [repr(value).encode("utf-8", "surrogatepass") for value in column[:count]]
    first = column[:count]
    width = prod(first.shape[1:])
    if isinstance(first, torch.Tensor):
        plain = first.detach().resolve_conj().resolve_neg().reshape(count, width).contiguous().view(torch.uint8).numpy()
    else:
        plain = np.ascontiguousarray(first).reshape(count, width).view(np.uint8)
    return [row.tobytes() for row in plain[:, :: max(1, plain.shape[1] // _BYTES)]]
