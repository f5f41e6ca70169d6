"""Batches as runs of one array of indices."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_patch.samplers.passes import Positions

__all__ = ["Batches", "Runs", "cut"]


@dataclass(frozen=True, slots=True)
class Runs:
    """Where batches begin and end in an array.

    Attributes:
        starts: Each batch's first position.
        stops: The position after each batch's last.
    """

    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def at(self, chosen: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> "Runs":
        """Return the runs with these numbers, in their order, or those that a mask keeps."""
        return Runs(self.starts[chosen], self.stops[chosen])


@dataclass(frozen=True, slots=True)
class Batches:
    """An epoch of batches.

    Attributes:
        items: The samples of all batches.
        runs: Where each batch lies among them.

    Examples:
        >>> batches = Batches(np.array([7, 8, 9]), cut(np.array([3]), 2))
        >>> batches(np.array([1, 0]))
        [[9], [7, 8]]
    """

    items: npt.NDArray[np.integer[Any]]
    runs: Runs

    def __len__(self) -> int:
        return len(self.runs)

    def __call__(self, positions: Positions) -> list[list[int]]:
        """Return the batches at some positions."""
        chosen = self.runs.at(positions)
        bounds = zip(chosen.starts.tolist(), chosen.stops.tolist(), strict=True)
        return [self.items[start:stop].tolist() for start, stop in bounds]


def cut(sizes: npt.NDArray[np.int64], batch_sizes: npt.NDArray[np.int64] | int) -> Runs:
    """Cut consecutive groups into batches; a group's last batch holds what is left.

    Args:
        sizes: How many samples each group has.
        batch_sizes: How many samples make a batch: one number for each group, or one for all.

    Examples:
        >>> runs = cut(np.array([5, 2]), np.array([2, 2]))
        >>> runs.starts.tolist(), runs.stops.tolist()
        ([0, 2, 4, 5], [2, 4, 5, 7])
    """
    if isinstance(batch_sizes, int):
        batch_sizes = np.full(len(sizes), min(batch_sizes, sizes.max(initial=1)))
    batch_sizes = np.clip(batch_sizes, 1, np.maximum(sizes, 1))  # so that no sum below overflows
    counts = -(-sizes // batch_sizes)
    group = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a batch within its group
    ends = np.cumsum(sizes)
    starts = (ends - sizes)[group] + number * batch_sizes[group]
    return Runs(starts, np.minimum(starts + batch_sizes[group], ends[group]))
