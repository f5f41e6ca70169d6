"""Batches of P labels with K instances each."""

from functools import partial
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError
from ddp_patch.samplers.checks import whole
from ddp_patch.samplers.classes import Classes, Labels, categories_of, smallest
from ddp_patch.samplers.keyed import At, KeyedSampler, generator_of, taken_from

__all__ = ["PKBatchSampler"]

# How many rows of instances are drawn at once: more do not fit in the processor's caches.
_ROWS = 2**12
# The largest k for which each instance is compared with each other: for more, the square of k takes too long.
_MOST_COMPARED = 256


class PKBatchSampler(KeyedSampler[list[int]]):
    """Make batches of p labels with k instances each, as metric learning needs them to find positives and negatives.

    Every label comes once in an epoch. If p does not divide the number of labels, the last batch is filled up with
    labels that have come before. With ``num_batches``, labels come round after round, in a new order each time, and
    each as often as the others or once more. Instances are chosen uniformly for each batch, and none comes twice in it.
    If a label has fewer than k, each comes as often as the others or once more.

    With categories, the labels of a category come together. A batch then has few categories, and negatives that are
    hard to tell from positives. Batches that are filled up then end each round, not only the last one.

    Args:
        labels: Each sample's label, of any hashable type: a list, array or tensor.
        p: How many labels a batch has.
        k: How many instances of each label a batch has.
        categories: Each sample's category, the same for all samples of a label.
        max_categories: How many categories a batch has at most; needs ``categories``.
        num_batches: How many batches an epoch has, such as ``len(labels) // (p * k)`` to draw as many samples as there
            are. Default: as many as have every label once.
        seed: Every epoch's batches follow from it and the epoch's number.
        generator: Used if there is no seed: each pass draws one number from it, or else from torch's global generator.

    Raises:
        SamplerError: There are fewer than p labels, categories are too small to fill a batch, or an argument is of
            another kind.

    Examples:
        >>> labels = ["a", "a", "a", "b", "b", "b", "c"]
        >>> batches = PKBatchSampler(labels, p=2, k=2, seed=0)
        >>> [[len(batch), len({labels[index] for index in batch})] for batch in batches]
        [[4, 2], [4, 2]]
        >>> len(PKBatchSampler([0, 1] * 500, p=2, k=2)), len(PKBatchSampler([0, 1] * 500, p=2, k=2, num_batches=250))
        (1, 250)

    Source:
        Hermans, Beyer and Leibe, "In Defense of the Triplet Loss for Person Re-Identification", 2017. Categories are
        those of open-metric-learning's category samplers. Instances are drawn by Floyd's algorithm: Bentley and Floyd,
        "Programming pearls: a sample of brilliance", Communications of the ACM, 1987.
    """

    def __init__(
        self,
        labels: Labels,
        p: int,
        k: int,
        *,
        categories: Labels | None = None,
        max_categories: int | None = None,
        num_batches: int | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(seed, generator)
        self._classes = Classes.of("labels", labels)
        self.p: int = whole("p", p, 1, "it is the number of labels in a batch")
        self.k: int = whole("k", k, 1, "it is the number of instances of each label in a batch")
        if self.p > len(self._classes.labels):
            raise SamplerError(
                f"p={p} asks for more labels in a batch than the {len(self._classes.labels)} that there are. Pass p of "
                f"at most {len(self._classes.labels)}."
            )
        self.batch_size: int = self.p * self.k
        self._category_of = categories_of(self._classes, categories, max_categories, self.p)
        self._is_one_category = self._category_of is not None and max_categories == 1  # in each batch
        given = self._in_round if num_batches is None else num_batches
        self.num_batches: int = whole("num_batches", given, 1, "it is the number of batches in an epoch", bits=63)

    def __len__(self) -> int:
        return self.num_batches

    @property
    def _in_round(self) -> int:
        """How many batches it takes to have every label once."""
        if self._category_of is not None and self._is_one_category:
            return int((-(-np.bincount(self._category_of) // self.p)).sum())
        return -(-len(self._classes.labels) // self.p)

    def _order(self, key: np.random.SeedSequence) -> At:
        rng = generator_of(key)
        chosen = self._labels_of_batches(rng)
        picks = _instances(rng, self._classes.sizes[chosen], self.k)
        batches = self._classes.members[self._classes.starts[chosen][:, None] + picks]
        return partial(taken_from, batches.reshape(len(self), self.batch_size))

    def _labels_of_batches(self, rng: np.random.Generator) -> npt.NDArray[np.integer]:
        """Return the labels of all batches, p for each, in the shape ``(batches * p,)``."""
        if self._category_of is None:
            return _rounds(rng, len(self._classes.labels), self.num_batches * self.p, self.p)
        rounds = [self._round(rng, self._category_of) for _ in range(-(-self.num_batches // self._in_round))]
        return np.concatenate(rounds)[: self.num_batches].reshape(-1)

    def _round(self, rng: np.random.Generator, category_of: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Return the labels of the batches that have every label once, in the shape ``(batches, p)``."""
        ring = rng.permutation(len(self._classes.labels))
        number = int(category_of.max()) + 1
        place = rng.permutation(number).astype(smallest(number))
        ring = ring[np.argsort(place[category_of[ring]], kind="stable")]
        if self._is_one_category:
            sizes = np.bincount(category_of)
            rings = np.split(ring, np.cumsum(sizes[np.argsort(place)])[:-1])
            ring = np.concatenate([np.resize(part, -(-len(part) // self.p) * self.p) for part in rings])
        else:  # begin anywhere, so that the labels that fill the last batch up may be of any category
            ring = np.roll(ring, rng.integers(len(ring)))
        batches = np.resize(ring, (self._in_round, self.p))
        return rng.permutation(batches)  # or neighbouring batches would share their categories


def _rounds(rng: np.random.Generator, labels: int, places: int, p: int) -> npt.NDArray[np.integer]:
    """Return labels round after round: each once a round, and none twice in a batch of p."""
    if places < labels + p:
        return np.resize(rng.permutation(labels), places)  # resize() begins again where the round ends
    number = -(-places // labels)
    rounds = rng.permuted(np.tile(np.arange(labels, dtype=smallest(labels)), (number, 1)), axis=1)
    period = p // gcd(labels, p)  # after this many rounds, one begins where a batch does
    if period > 1:
        # Elsewhere it begins in a batch with the last labels of the round before. So let a row be indices into the row
        # before, and let the first ones that are not among the last there come first.
        held = (np.arange(number) * labels % p)[:, None]
        is_new = rounds < labels - held
        comes_first = is_new & (np.cumsum(is_new, axis=1) <= p - held)
        rounds = np.take_along_axis(rounds, np.argsort(~comes_first, axis=1, kind="stable"), axis=1)
    for turn in range(1, period):
        places_before = rounds[turn::period]
        before = rounds[turn - 1 :: period][: len(places_before)]
        rounds[turn::period] = np.take_along_axis(before, places_before, axis=1)
    return rounds.reshape(-1)[:places]


def _instances(rng: np.random.Generator, sizes: npt.NDArray[np.int64], k: int) -> npt.NDArray[np.integer]:
    """Draw k instances from ``range(size)`` for each size, as evenly as possible.

    They are all different if the size allows it. Otherwise each comes as often as the others or once more.

    Returns:
        A row for each size, in the shape ``(sizes, k)``.
    """
    kind = smallest(max(int(sizes.max()), k))
    found = np.empty((len(sizes), k), kind)
    if k > _MOST_COMPARED:
        for row, size in zip(found, sizes.tolist(), strict=True):
            fresh = k if size >= k else k % size
            row[:fresh] = rng.choice(size, fresh, replace=False, shuffle=False)
            row[fresh:] = np.arange(k - fresh) % size
        return found
    for start in range(0, len(sizes), _ROWS):
        block = slice(start, start + _ROWS)
        found[block] = _floyd(rng, sizes[block].astype(kind), k).T
    return found


def _floyd(rng: np.random.Generator, sizes: npt.NDArray[np.integer], k: int) -> npt.NDArray[np.integer]:
    """Draw a column of instances for each size, by Floyd's algorithm on all columns at once."""
    # The first `fresh` elements of a column are drawn; the others go through the whole range.
    fresh = np.where(sizes < k, k % sizes, k).astype(sizes.dtype)
    picks = np.empty((k, len(sizes)), sizes.dtype)
    few = np.flatnonzero(sizes < k)
    picks[:, few] = (np.arange(k)[:, None] - fresh[few]) % sizes[few]
    for place in range(int(fresh.max())):
        top = sizes - fresh + sizes.dtype.type(place)
        drawn = (rng.random(len(sizes)) * (top + 1.0)).astype(sizes.dtype)
        taken = (picks[:place] == drawn).any(axis=0)
        np.copyto(picks[place], np.where(taken, top, drawn), where=place < fresh)
    return picks
