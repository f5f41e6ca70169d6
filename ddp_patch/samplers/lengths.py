"""Batches of samples of similar length."""

import sys
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError
from ddp_patch.samplers.batches import Batches, cut
from ddp_patch.samplers.checks import Integers, integers, whole
from ddp_patch.samplers.classes import smallest
from ddp_patch.samplers.passes import At, KeyedSampler

__all__ = ["LengthBucketBatchSampler"]


class LengthBucketBatchSampler(KeyedSampler[list[int]]):
    """Shuffled batches of samples of similar length, so many in each as a token budget allows, or a fixed number.

    Samples are put into buckets from the longest on; in each, the shortest is at most ``max_padding`` shorter than the
    longest, so no more of a padded batch is padding. A batch comes from one bucket, and its padded tokens (items times
    longest) are at most ``max_tokens``. In each epoch the samples of a bucket meet others, and the batches come in
    another order; their number is the same. The last batch of a bucket holds what is left.

    Args:
        lengths: Of the samples, in tokens: a list, array or tensor.
        max_tokens: How many tokens a padded batch has at most.
        batch_size: How many samples a batch has, instead of ``max_tokens``.
        max_padding: Which part of a batch is padding at most, from 0 to less than 1: the less, the more batches.
        seed: What every epoch's batches follow from, together with the epoch's number.
        generator: What each pass draws one number from instead; without either, torch's global generator.

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
                f"max_tokens={max_tokens!r} and batch_size={batch_size!r}: either says how large a batch is. Pass one "
                "of them."
            )
        self.max_tokens = (
            None if max_tokens is None else whole("max_tokens", max_tokens, 1, "a batch has at most so many")
        )
        self.batch_size = (
            None if batch_size is None else whole("batch_size", batch_size, 1, "a batch has so many samples")
        )
        if self.max_tokens is not None and (longest := int(found.max())) > self.max_tokens:
            raise SamplerError(
                f"lengths[{found.argmax()}]={longest} is longer than max_tokens={self.max_tokens}, so no batch can "
                "hold that sample. Pass a larger max_tokens, or shorten it or leave it out."
            )
        self.max_padding = _part(max_padding)
        self._members, sizes, longest_of = _buckets(found, self.max_padding)
        self._starts, self._stops = cut(sizes, self.batch_size or min(self.max_tokens or 0, sys.maxsize) // longest_of)
        self._splits = np.cumsum(sizes)[:-1]

    def __len__(self) -> int:
        return len(self._starts)

    def _order(self, key: np.random.SeedSequence) -> At:
        rng = np.random.Generator(np.random.PCG64(key))
        items = self._members.copy()
        for bucket in np.split(items, self._splits):  # views
            rng.shuffle(bucket)
        return Batches(items, self._starts, self._stops).ordered(rng.permutation(len(self)))


def _part(value: Any) -> float:
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
    """Return the samples bucket by bucket, from the longest on, and each bucket's size and longest."""
    longest_first = np.argsort(-lengths, kind="stable").astype(smallest(len(lengths)))
    values, counts = np.unique(-lengths, return_counts=True)
    firsts = [0]  # where among the values, from the longest on, a bucket begins
    while True:
        least = int(-values[firsts[-1]]) * (1 - max_padding)
        end = int(np.searchsorted(values, -least, side="right"))
        if end == len(values):
            return longest_first, np.add.reduceat(counts, firsts), -values[firsts]
        firsts.append(end)
