"""Batches as runs of one array of indices."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_patch.samplers.passes import Positions

__all__ = ["Batches", "cut"]


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches whose samples stand next to each other in an array.

    Attributes:
        items: The samples of all batches.
        starts: Where each batch begins.
        stops: Where each batch ends.
    """

    items: npt.NDArray[np.integer[Any]]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def __call__(self, positions: Positions) -> list[list[int]]:
        """Return the batches at some positions."""
        runs = zip(self.starts[positions].tolist(), self.stops[positions].tolist(), strict=True)
        return [self.items[start:stop].tolist() for start, stop in runs]

    def ordered(self, order: npt.NDArray[np.int64]) -> "Batches":
        """Return the same batches in another order."""
        return Batches(self.items, self.starts[order], self.stops[order])


def cut(
    sizes: npt.NDArray[np.int64], batch_sizes: npt.NDArray[np.int64] | int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cut groups that stand one behind the other into batches; the last of each group holds what is left.

    Args:
        sizes: How many samples each group has.
        batch_sizes: How many of each group make a batch, or of all groups alike; of any size.

    Returns:
        Where the batches begin, and where they end.

    Examples:
        >>> starts, stops = cut(np.array([5, 2]), np.array([2, 2]))
        >>> starts.tolist(), stops.tolist()
        ([0, 2, 4, 5], [2, 4, 5, 7])
    """
    if isinstance(batch_sizes, int):
        batch_sizes = np.full(len(sizes), min(batch_sizes, sizes.max(initial=1)))
    batch_sizes = np.clip(batch_sizes, 1, np.maximum(sizes, 1))  # none is larger, and so no sum below is
    counts = -(-sizes // batch_sizes)
    group = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a batch within its group
    ends = np.cumsum(sizes)
    starts = (ends - sizes)[group] + number * batch_sizes[group]
    return starts, np.minimum(starts + batch_sizes[group], ends[group])
