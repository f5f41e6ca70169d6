"""Batches of samples of alike lengths."""

import sys
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError
from ddp_patch.samplers.checks import Integers, integers, whole
from ddp_patch.samplers.classes import smallest
from ddp_patch.samplers.keyed import At, KeyedSampler, Positions, generator_of

__all__ = ["LengthBatches", "LengthBucketBatchSampler", "Runs", "cut"]


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
class LengthBatches:
    """An epoch of batches.

    Attributes:
        items: The samples of all batches.
        runs: Where each batch lies among them.

    Examples:
        >>> batches = LengthBatches(np.array([7, 8, 9]), cut(np.array([3]), 2))
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
        return LengthBatches(items, self._batches.runs.at(rng.permutation(len(self))))


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
