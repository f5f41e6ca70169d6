"""Batches of samples of alike lengths, and windows over a time series."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from ddp_patch.errors import SamplerError
from ddp_patch.orders.orders import Permutation
from ddp_patch.samplers.checks import Integers, flag, integers, whole
from ddp_patch.samplers.classes import smallest
from ddp_patch.samplers.keyed import At, KeyedSampler, Positions, generator_of

__all__ = ["LengthBatches", "LengthBucketBatchSampler", "WindowDataset", "WindowSampler", "cut"]


@dataclass(frozen=True, slots=True)
class LengthBatches:
    """An epoch of batches.

    Attributes:
        items: The samples of all batches.
        bounds: Where each batch begins among them and where it ends, in the shape ``(batches, 2)``.

    Examples:
        >>> batches = LengthBatches(np.array([7, 8, 9]), cut(np.array([3]), 2))
        >>> batches(np.array([1, 0]))
        [[9], [7, 8]]
    """

    items: npt.NDArray[np.integer[Any]]
    bounds: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds)

    def __call__(self, positions: Positions) -> list[list[int]]:
        """Return the batches at some positions."""
        return [self.items[start:stop].tolist() for start, stop in self.bounds[positions].tolist()]


def cut(sizes: npt.NDArray[np.int64], batch_sizes: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
    """Cut consecutive groups into batches; a group's last batch holds what is left.

    Args:
        sizes: How many samples each group has.
        batch_sizes: How many samples make a batch: one number for each group, or one for all.

    Returns:
        Each batch's first position, and the one after its last, in the shape ``(batches, 2)``.

    Examples:
        >>> cut(np.array([5, 2]), np.array([2, 2])).tolist()
        [[0, 2], [2, 4], [4, 5], [5, 7]]
    """
    if isinstance(batch_sizes, int):
        batch_sizes = np.full(len(sizes), min(batch_sizes, sizes.max(initial=1)))
    batch_sizes = np.clip(batch_sizes, 1, np.maximum(sizes, 1))  # so that no sum below overflows
    counts = -(-sizes // batch_sizes)
    group = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a batch within its group
    ends = np.cumsum(sizes)
    starts = (ends - sizes)[group] + number * batch_sizes[group]
    return np.stack([starts, np.minimum(starts + batch_sizes[group], ends[group])], axis=1)


class LengthBucketBatchSampler(KeyedSampler[list[int]]):
    """Make shuffled batches of samples of similar length, by a token budget or a fixed batch size.

    Samples are sorted into buckets by length. In a bucket, no sample is more than ``max_padding`` shorter than the
    longest, so at most this part of a batch is padding. Each batch comes from one bucket, and its padded tokens
    (samples times the longest) are at most ``max_tokens``. A bucket's last batch has the rest. Every epoch shuffles the
    samples of each bucket, and the batches; the number of batches stays the same.

    Args:
        lengths: Each sample's length, in tokens: a list, array or tensor.
        max_tokens: How many tokens a padded batch has at most.
        batch_size: How many samples a batch has, instead of ``max_tokens``.
        max_padding: How large a part of a batch may be padding, from 0 to less than 1. Less padding makes more batches.
        seed: Every epoch's batches follow from it and the epoch's number.
        generator: Used if there is no seed: each pass draws one number from it, or else from torch's global generator.

    Raises:
        SamplerError: A sample is longer than ``max_tokens``, both or neither of ``max_tokens`` and ``batch_size`` are
            given, or an argument is of another kind.

    Examples:
        >>> lengths = [10, 3, 10, 10, 3, 3]
        >>> batches = LengthBucketBatchSampler(lengths, max_tokens=20, seed=0)
        >>> sorted(sorted(lengths[index] for index in batch) for batch in batches)
        [[3, 3, 3], [10], [10, 10]]
    """

    def __init__(
        self,
        lengths: Integers,
        *,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        max_padding: float = 0.1,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(seed, generator)
        found = integers("lengths", lengths, 1, "batches are made by how many tokens a sample has")
        if (max_tokens is None) == (batch_size is None):
            raise SamplerError(
                f"max_tokens={max_tokens!r} and batch_size={batch_size!r}: each says how large a batch is. Pass one "
                "of them."
            )
        self.max_tokens: int | None = _at_least_one("max_tokens", max_tokens, "it limits the padded tokens in a batch")
        self.batch_size: int | None = _at_least_one("batch_size", batch_size, "it is the number of samples in a batch")
        if self.max_tokens is not None and (longest := int(found.max())) > self.max_tokens:
            raise SamplerError(
                f"lengths[{found.argmax()}]={longest} is longer than max_tokens={self.max_tokens}, so no batch can "
                "hold that sample. Pass a larger max_tokens, or shorten it or leave it out."
            )
        self.max_padding: float = _part(max_padding)
        items, self._sizes, longest_of = _buckets(found, self.max_padding)
        batch_sizes = self.batch_size or min(self.max_tokens or 0, sys.maxsize) // longest_of
        self._batches = LengthBatches(items, cut(self._sizes, batch_sizes))

    def __len__(self) -> int:
        return len(self._batches)

    def _order(self, key: np.random.SeedSequence) -> At:
        rng = generator_of(key)
        items = self._batches.items.copy()
        for bucket in np.split(items, np.cumsum(self._sizes)[:-1]):  # views, so this shuffles `items`
            rng.shuffle(bucket)
        return LengthBatches(items, self._batches.bounds[rng.permutation(len(self))])


def _at_least_one(name: str, value: object, reason: str) -> int | None:
    return None if value is None else whole(name, value, 1, reason)


def _part(value: Any) -> float:
    """Return a number from 0 to less than 1 as a float, or raise SamplerError."""
    part = -1.0 if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not 0 <= part < 1:
        raise SamplerError(
            f"max_padding={value!r} is not a number from 0 to less than 1: it is the part of a batch that may be "
            "padding. Pass one, say 0.1."
        )
    return part


def _buckets(
    lengths: npt.NDArray[np.int64], max_padding: float
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sort samples into buckets, from the longest on.

    Returns:
        The samples bucket by bucket, each bucket's size, and each bucket's longest sample.
    """
    longest_first = np.argsort(-lengths, kind="stable").astype(smallest(len(lengths)))
    values, counts = np.unique(-lengths, return_counts=True)
    firsts = [0]  # where each bucket begins among the values
    while True:
        least = int(-values[firsts[-1]]) * (1 - max_padding)
        end = int(np.searchsorted(values, -least, side="right"))
        if end == len(values):
            return longest_first, np.add.reduceat(counts, firsts), -values[firsts]
        firsts.append(end)


class WindowSampler(KeyedSampler[int]):
    """Yield the starts of windows over a time series, with another random offset in each epoch.

    Windows follow each other at ``stride`` and wrap round at the end of the series. With the default stride an epoch
    sees every point once, and a few points twice if the window does not divide the series. Every point is equally
    likely to be one of these, and to be anywhere in its window.

    Args:
        size: How many points the series has, less than 2**62.
        window: How many points a window has.
        stride: How many points lie from one window's start to the next one's; by default ``window``.
        shuffle: Whether the windows come in a random order. Otherwise they come in the order of the series.
        seed: Every epoch's order follows from it and the epoch's number.
        generator: Used if there is no seed: each pass draws one number from it, or else from torch's global generator.

    Raises:
        SamplerError: The window or the stride is longer than the series, or an argument is of another kind.

    Examples:
        >>> sampler = WindowSampler(size=10, window=3, shuffle=False, seed=0)
        >>> starts = list(sampler)
        >>> len(starts), [(start - starts[0]) % 10 for start in starts]
        (4, [0, 3, 6, 9])
    """

    _block = 2**16  # as in ScalableRandomSampler

    def __init__(
        self,
        size: int,
        window: int,
        stride: int | None = None,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(seed, generator)
        self.size: int = whole("size", size, 1, "it is the number of points in the series", bits=62)
        self.window: int = _of_at_most("window", window, self.size, "would hold points twice")
        step = self.window if stride is None else stride
        self.stride: int = _of_at_most("stride", step, self.size, "would leave the series behind")
        self.shuffle: bool = flag("shuffle", shuffle, "windows come in a random order or in that of the series")

    def __len__(self) -> int:
        return -(-self.size // self.stride)

    def _order(self, key: np.random.SeedSequence) -> At:
        offset_key, shuffle_key = key.spawn(2)
        offset = int(generator_of(offset_key).integers(self.size))
        numbers = Permutation(len(self), shuffle_key) if self.shuffle else None
        return partial(self._starts, offset, numbers)

    def _starts(self, offset: int, numbers: Permutation | None, positions: Positions) -> Positions:
        windows = positions if numbers is None else numbers(positions)
        return (offset + windows * self.stride) % self.size


class WindowDataset(Dataset[Any]):
    """A dataset of windows: an index gives the window that begins there, and wraps round at the end.

    A window that does not wrap is a slice of the data, and a view without a copy if the data is an array or a tensor. A
    window that wraps has the same type. The windows of a ``range`` are lists.

    Args:
        data: A sequence, an array (memory-mapped ones too) or a tensor, with time as its first dimension.
        window: How many points a window has.

    Raises:
        SamplerError: ``window`` is not a whole number from 1 to ``len(data)``.

    Examples:
        >>> windows = WindowDataset(torch.arange(1, 11), window=3)
        >>> windows[6], windows[9]
        (tensor([7, 8, 9]), tensor([10,  1,  2]))
    """

    def __init__(self, data: Any, window: int) -> None:
        self.data = data
        self.window: int = _of_at_most("window", window, len(data), "would hold points twice")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, start: int) -> Any:
        if not 0 <= start < len(self.data):
            raise IndexError(
                f"window {start} begins outside of the series, whose {len(self.data)} points count from 0. Take "
                f"indices from WindowSampler(size={len(self.data)}, window={self.window})."
            )
        stop = start + self.window
        if stop <= len(self.data):
            return _points(self.data[start:stop])
        return _joined(_points(self.data[start:]), _points(self.data[: stop - len(self.data)]))


def _points(part: Any) -> Any:
    """Return a slice of the data, and a range as a list, because a window that wraps is no range."""
    return list(part) if isinstance(part, range) else part


def _joined(first: Any, second: Any) -> Any:
    """Concatenate two slices of the data and keep their type."""
    if isinstance(first, torch.Tensor):
        return torch.cat((first, second))
    if isinstance(first, np.ma.MaskedArray):
        return np.ma.concatenate((first, second))  # type: ignore[no-untyped-call]  # numpy's
    if isinstance(first, Sequence | array):
        return first + second
    return np.concatenate((first, second))


def _of_at_most(name: str, value: int, size: int, consequence: str) -> int:
    """Return a number from 1 to the series' size, or raise SamplerError."""
    number = whole(name, value, 1, "it counts points of the series")
    if number > size:
        raise SamplerError(
            f"{name}={number} is longer than the series, which has {size} points, and {consequence}. Pass at most "
            f"{size}."
        )
    return number
