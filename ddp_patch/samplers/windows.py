"""Windows over a time series: a sampler of their starts, and a dataset."""

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ddp_patch.errors import SamplerError
from ddp_patch.samplers.keyed import At, KeyedSampler, Permutation, Positions, flag, generator_of, whole


class WindowSampler(KeyedSampler[int]):
    """Yield the starts of windows over a time series, with another random offset in each epoch.

    Windows follow each other at ``stride`` and wrap round at the end of the series. With the default stride an epoch
    sees every point once, and a few points twice if the window does not divide the series. Every point is equally
    likely to come twice, and equally likely to have any position in its window.

    Args:
        size: How many points the series has, less than 2**62.
        window: How many points a window has.
        stride: How many points lie between the starts of two successive windows. Default: ``window``.
        shuffle: Whether the windows come in a random order, or in the order of the series.
        seed: Every epoch's order follows from the seed and the epoch's number.
        generator: If there is no seed, each pass draws one number from this generator, or else from torch's global one.

    Raises:
        SamplerError: The window or the stride is longer than the series, or an argument has a wrong type.

    Examples:
        >>> sampler = WindowSampler(size=10, window=3, shuffle=False, seed=0)
        >>> starts = list(sampler)
        >>> len(starts), [(start - starts[0]) % 10 for start in starts]
        (4, [0, 3, 6, 9])
    """

    _block = 2**16  # see ScalableRandomSampler

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
        self.shuffle: bool = flag("shuffle", shuffle)

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
    """A dataset of windows: an index returns the window that begins there, and wraps round at the end.

    A window that does not wrap is a slice of the data, and a view without a copy if the data is an array or a tensor. A
    window that wraps has the same type. The windows of a ``range`` are lists.

    Args:
        data: A sequence, an array (also memory-mapped) or a tensor, with time as its first dimension.
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
    """Return a slice of the data as it is, but a range as a list: a window that wraps is no range."""
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
