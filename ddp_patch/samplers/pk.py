"""Batches of P labels with K instances each."""

from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError
from ddp_patch.samplers.checks import whole
from ddp_patch.samplers.classes import Classes, Labels, smallest
from ddp_patch.samplers.passes import At, KeyedSampler, taken_from

__all__ = ["PKBatchSampler"]

# Of so many rows or fewer, instances are drawn together: more do not stay in the processor's caches.
_ROWS = 2**12
# Up to so many instances of a label are compared each with each: that takes their square in time, but little of it.
_MOST_COMPARED = 256


class PKBatchSampler(KeyedSampler[list[int]]):
    """Batches of p labels with k instances each, as metric learning needs them to find positives and negatives.

    In an epoch every label comes once; where p does not divide the labels, the last batch is filled up with labels
    that have come before. The instances are chosen uniformly and none comes twice in a batch; of a label with fewer
    than k each comes as often as any other, or once more.

    With categories, the labels of a category come together, so that a batch has few categories and negatives that are
    hard to tell from positives.

    Args:
        labels: One for each sample, of any hashable type: a list, array or tensor.
        p: How many labels a batch has.
        k: How many instances of each.
        categories: One for each sample, the same for all samples of a label.
        max_categories: How many categories a batch has at most; with ``categories`` only.
        seed: What every epoch's batches follow from, together with the epoch's number.
        generator: What each pass draws one number from instead; without either, torch's global generator.

    Raises:
        SamplerError: There are fewer than p labels, categories are too small to fill a batch, or an argument is of
            another kind.

    Examples:
        >>> labels = ["a", "a", "a", "b", "b", "b", "c"]
        >>> batches = PKBatchSampler(labels, p=2, k=2, seed=0)
        >>> [[len(batch), len({labels[index] for index in batch})] for batch in batches]
        [[4, 2], [4, 2]]

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
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(seed, generator)
        self._classes = Classes.of("labels", labels)
        self.p = whole("p", p, 1, "a batch has so many labels")
        self.k = whole("k", k, 1, "a batch has so many instances of each label")
        if self.p > len(self._classes.labels):
            raise SamplerError(
                f"p={p} labels were asked for in a batch, and there are {len(self._classes.labels)}: no batch could be "
                f"made. Pass p of at most {len(self._classes.labels)}."
            )
        self.batch_size = self.p * self.k
        self._category_of = self._categories(categories, max_categories)
        self._apart = self._category_of is not None and max_categories == 1

    def _categories(self, categories: Labels | None, most: int | None) -> npt.NDArray[np.integer] | None:
        """Return each label's category; None where categories do not matter."""
        if categories is None and most is None:
            return None
        if categories is None or most is None:
            given, lacking = (
                ("max_categories", "categories") if categories is None else ("categories", "max_categories")
            )
            raise SamplerError(
                f"{given} was given without {lacking}: it takes both to limit the categories in a batch. Pass "
                f"{lacking} too, or neither."
            )
        most = whole("max_categories", most, 1, "a batch has at most so many categories")
        found = Classes.of("categories", categories)
        if len(found.codes) != len(self._classes.codes):
            raise SamplerError(
                f"categories has {len(found.codes)} entries and labels {len(self._classes.codes)}: every sample has "
                "one of each. Pass sequences of one length."
            )
        category_of = np.zeros(len(self._classes.labels), found.codes.dtype)
        category_of[self._classes.codes] = found.codes
        if len(odd := np.flatnonzero(category_of[self._classes.codes] != found.codes)):
            label = self._classes.codes[odd[0]]
            first, second = found.codes[odd[0]], category_of[label]
            raise SamplerError(
                f"The label {self._classes.labels[label]!r} is in the categories {found.labels[first]!r} and "
                f"{found.labels[second]!r}: a label belongs to one. Pass labels that are told apart by their category, "
                "say pairs of both."
            )
        return category_of if self._limits(found, category_of, most) else None

    def _limits(self, found: Classes, category_of: npt.NDArray[np.integer], most: int) -> bool:
        """Whether a batch could have more categories; if so, every one must be large enough not to let it."""
        if len(found.labels) <= most:
            return False
        # In a row of such categories, any p labels lie in `most` of them: those at both ends may be cut.
        least = self.p if most == 1 else -(-(self.p - 1) // (most - 1))
        sizes = np.bincount(category_of)
        if sizes.min() < least:
            small = int(sizes.argmin())
            raise SamplerError(
                f"The category {found.labels[small]!r} has {sizes[small]} labels, and batches of p={self.p} "
                f"labels from at most max_categories={most} need at least {least} in each. Pass a smaller p or a "
                "larger max_categories, or join small categories."
            )
        return True

    def __len__(self) -> int:
        if self._category_of is not None and self._apart:
            return int((-(-np.bincount(self._category_of) // self.p)).sum())
        return -(-len(self._classes.labels) // self.p)

    def _order(self, key: np.random.SeedSequence) -> At:
        rng = np.random.Generator(np.random.PCG64(key))
        chosen = self._rows(rng)
        picks = _instances(rng, self._classes.sizes[chosen], self.k)
        batches = self._classes.members[self._classes.starts[chosen][:, None] + picks]
        return partial(taken_from, batches.reshape(len(self), self.batch_size))

    def _rows(self, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """The labels of all batches, p by p: a ring of labels, cut."""
        ring = rng.permutation(len(self._classes.labels))
        if self._category_of is None:
            return np.resize(ring, len(self) * self.p)  # which goes on from its beginning
        number = int(self._category_of.max()) + 1
        place = rng.permutation(number).astype(smallest(number))
        ring = ring[np.argsort(place[self._category_of[ring]], kind="stable")]
        if self._apart:
            sizes = np.bincount(self._category_of)
            rings = np.split(ring, np.cumsum(sizes[np.argsort(place)])[:-1])
            ring = np.concatenate([np.resize(part, -(-len(part) // self.p) * self.p) for part in rings])
        else:  # cut anywhere, so that the labels that come again are as likely of one category as of another
            ring = np.roll(ring, rng.integers(len(ring)))
        rows = np.resize(ring, (len(self), self.p))
        return rng.permutation(rows).reshape(-1)  # neighbours are of one category


def _instances(rng: np.random.Generator, sizes: npt.NDArray[np.int64], k: int) -> npt.NDArray[np.integer]:
    """Draw k of ``range(size)`` for each size: all different, or each as often as any other or once more."""
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
    """Draw as ``_instances`` does, a column for each size: Floyd's algorithm on all columns at once."""
    # Of each column the first `fresh` places are drawn; the others go through the whole range.
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
