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
from ddp_patch.samplers.keyed import KeyedSampler, generator_of
from ddp_patch.samplers.passes import At

__all__ = ["LengthBucketBatchSampler"]


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
        self._batches = Batches(items, cut(self._sizes, batch_sizes))

    def __len__(self) -> int:
        return len(self._batches)

    def _order(self, key: np.random.SeedSequence) -> At:
        rng = generator_of(key)
        items = self._batches.items.copy()
        for bucket in np.split(items, np.cumsum(self._sizes)[:-1]):  # views, so this shuffles `items`
            rng.shuffle(bucket)
        return Batches(items, self._batches.runs.at(rng.permutation(len(self))))


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
