"""Sketches of the indices or samples of each rank in a pass, by which ranks find samples in common."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from heapq import nsmallest
from math import prod
from typing import Any

import numpy as np
import torch

from ddp_patch.loaders.nested_samplers import epochs_in
from ddp_patch.orders.digest import number_or_zero

# How many bytes of a sample's array are hashed, evenly spread.
_LOOKED_AT = 1024

_SCALARS = (str, bytes, int, float, bool, np.generic)

# Hashes have 32 bits. Products of different indices with an odd number are different.
_ODD, _MASK = 0x9E3779B1, 2**32 - 1


# If no sampler shows the indices of a rank's part, the first samples of a pass are hashed, and then those of every 7th
# batch: a number of workers that take turns is seldom a multiple of 7.
SAMPLES, _EACH = 256, 7


class Sketch:
    """The smallest hashes of a rank's samples so far in a pass, so that all ranks choose the same samples to compare.

    The last item or batch is left out, because it may be padding.

    Args:
        most: How many hashes are kept.

    Attributes:
        seen: How many hashes were added, without the last batch.
        added: How many batches came.
        order: A hash of all hashes, in order.
        batches: The hashes of the first batches.

    Examples:
        >>> sketch = Sketch(most=2)
        >>> for batch in [[7, 3], [9, 1], [3, 0]]:
        ...     sketch.add(batch)
        >>> sketch.hashes
        [1, 3]

    Source:
        Cohen and Kaplan, Summarizing Data Using Bottom-k Sketches (2007).
    """

    def __init__(self, most: int = SAMPLES) -> None:
        self.seen: int = 0
        self.added: int = 0
        self.order: int = 0
        self.batches: list[Sequence[int]] = []
        self._most, self._largest = most, _MASK
        self._kept = set[int]()
        self._last: Sequence[int] = ()

    def add(self, hashes: Sequence[int]) -> None:
        """Add the hashes of the next batch, or of the next item."""
        self.added += 1
        self.order = hash((self.order, *hashes))  # a hash of whole numbers is the same in every process
        if self.seen < self._most:
            self.batches.append(hashes)
        self._kept.update([one for one in self._last if one <= self._largest])  # soon only a few hashes
        if len(self._kept) >= 2 * self._most:
            self._kept, self._largest = {*self.hashes}, self.hashes[-1]
        self.seen += len(self._last)
        self._last = hashes

    @property
    def hashes(self) -> list[int]:
        """The hashes in order."""
        return nsmallest(self._most, self._kept)

    def add_batch(self, batch: Any) -> None:
        """Add the samples of a batch."""
        if self.seen < self._most or not self.added % _EACH:
            self.add(row_hashes(batch, self._most))
        else:
            self.added += 1


class NotedIndices:
    """A wrapper around a loader's sampler or batch sampler that records the yielded indices.

    Args:
        wrapped: The sampler.
        gives_batches: Whether each item is a batch of indices.
        data: A fingerprint of the data, because indices of other data mean other samples.

    Attributes:
        sketch: The indices of the latest pass.
        epoch: The epoch of the latest pass, as set by ``set_epoch``; 0 if the samplers take no epoch.
    """

    def __init__(self, wrapped: Any, *, gives_batches: bool, data: str) -> None:
        self.sketch: Sketch = Sketch()
        self.epoch: int = 0
        self._wrapped, self._gives_batches, self._data = wrapped, gives_batches, int(data, 16)

    def __iter__(self) -> Iterator[Any]:
        self.sketch, self.epoch = sketch, _ = Sketch(), next(iter(epochs_in(self._wrapped)), 0)
        return self._noted(iter(self._wrapped), sketch)

    def _noted(self, items: Iterator[Any], sketch: Sketch) -> Iterator[Any]:
        for item in items:
            given: Any = list(item) if isinstance(item, Iterator) else item
            sketch.add(self._hashes_of(given if self._gives_batches else (given,)))
            yield given

    def _hashes_of(self, indices: Sequence[Any]) -> list[int]:
        """Return a hash of each index or key, the same in every process."""
        data = self._data
        if not {int}.issuperset(map(type, indices)):
            indices = [one if type(one) is int else number_or_zero(one) for one in indices]
        return [one * _ODD + data & _MASK for one in indices]

    def __len__(self) -> int:
        return len(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


def common_items(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many items two ranks have in common, by their hashes.

    Examples:
        >>> common_items([1, 2, 3, 4], [5, 6, 7, 1])
        1
    """
    return len({*mine} & {*theirs})


def is_more_than_padding(common: int, of: int = 0) -> bool:
    """Return whether this many items in common are more than padding.

    Args:
        common: How many items are the same.
        of: How many items are compared, if a whole part is compared. One in 16 may be padding.

    Examples:
        >>> is_more_than_padding(12), is_more_than_padding(9), is_more_than_padding(26, of=256)
        (True, False, False)
    """
    return common > 10 + of // 16


def row_hashes(batch: Any, most: int) -> list[int]:
    """Return a hash of 32 bits for each of the first samples in a batch, the same in every process.

    A sample is one row of all tensors, arrays and lists of plain values in a batch, or a single value. If texts, or
    else whole numbers, tell the samples of a batch apart, only these count, because other values may be augmented.
    Otherwise tensors count by their bytes. Tensors on accelerators and batches of other objects have no hashes.

    Args:
        batch: The batch, as a loader yields it.
        most: How many samples to hash.

    Examples:
        >>> row_hashes({"x": torch.eye(3), "name": ["a", "b", "c"]}, most=2) == row_hashes([torch.eye(3)], most=2)
        False
        >>> len(row_hashes((torch.eye(3), [1, 2, 3]), most=9)), row_hashes(object(), most=9)
        (3, [])
        >>> row_hashes(torch.ones(0, 3), most=9)  # an empty batch
        []
    """
    is_single = isinstance(batch, _SCALARS) or (isinstance(batch, torch.Tensor) and not batch.ndim)
    columns = [column for column in _columns([_plain(batch)] if is_single else batch) if len(column)]
    if not columns:
        return []
    # Most columns of a batch have one value for each sample.
    size = Counter(map(len, columns)).most_common(1)[0][0]
    columns = [column for column in columns if len(column) == size]
    names = ([column for column in columns if is_name(column)] for is_name in (_has_texts, _has_whole_numbers))
    for tried in (*names, columns):
        rows = [*zip(*(_bytes_of(column, min(most, size)) for column in tried), strict=True)]
        if rows and (tried is columns or len({*rows}) == len(rows) > 1):
            break
    return [int.from_bytes(blake2b(b"\0".join(row), digest_size=4).digest(), "little") for row in rows]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _has_texts(column: Any) -> bool:
    return isinstance(column, list | tuple) and isinstance(column[0], str | bytes)


def _has_whole_numbers(column: Any) -> bool:
    if isinstance(column, list | tuple):
        return isinstance(column[0], int)
    is_flat = column.ndim == 1
    if isinstance(column, torch.Tensor):
        return is_flat and not (column.is_floating_point() or column.is_complex())
    return is_flat and column.dtype.kind in "iu"


def _columns(value: Any) -> Iterator[Any]:
    """Yield the tensors, arrays and lists in a batch, which may have one value for each sample."""
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
    return [row.tobytes() for row in plain[:, :: max(1, plain.shape[1] // _LOOKED_AT)]]
