"""Samples by class: how classes are read, and batches of P labels with K instances each."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import gcd
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError
from ddp_patch.samplers.checks import sequence, whole
from ddp_patch.samplers.keyed import At, KeyedSampler, generator_of, taken_from

__all__ = ["Classes", "Labels", "PKBatchSampler", "categories_of", "plain", "smallest"]


Labels: TypeAlias = Sequence[Hashable] | npt.NDArray[Any] | torch.Tensor


def smallest(n: int) -> type[np.integer[Any]]:
    """Return the smallest type of integers that holds ``range(n)``, which is the fastest to sort and look up.

    Examples:
        >>> smallest(1000)
        <class 'numpy.int16'>
    """
    return next((kind for kind in (np.int16, np.int32) if n <= np.iinfo(kind).max), np.int64)


@dataclass(frozen=True)
class Classes:
    """Which samples have which label.

    Attributes:
        labels: Each label once: sorted if labels can be compared, otherwise in the order of their first samples.
        codes: Each sample's label, as its number in ``labels``, in the shape ``(samples,)``.

    Examples:
        >>> classes = Classes.of("labels", ["dog", "cat", "dog"])
        >>> classes.labels, classes.codes.tolist(), classes.members.tolist()
        (['cat', 'dog'], [1, 0, 1], [1, 0, 2])
    """

    labels: list[Hashable]
    codes: npt.NDArray[np.integer[Any]]

    @classmethod
    def of(cls, name: str, labels: "Labels | Classes") -> Self:
        """Number the labels, unless they are numbered already.

        Args:
            name: The name of the labels in error messages.
            labels: Each sample's label.

        Raises:
            SamplerError: There are no labels, they are no flat sequence, or one is not hashable or not equal to itself.
        """
        if isinstance(labels, cls):
            return labels
        given = sequence(name, labels, "every sample has one")
        if isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype != object and len(given):
            found, codes = np.unique(given, return_inverse=True)
            names: list[Hashable] = [plain(label) for label in found]
        else:
            names, codes = _numbered(name, _plain_labels(name, given))
        if odd := [label for label in names if label != label]:
            raise SamplerError(
                f"{name} has {odd[0]!r}, which is not equal to itself, so no two samples share it. Give these samples "
                "a label, or leave them out."
            )
        return cls(names, codes.astype(smallest(len(names))))

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """How many samples each label has."""
        return np.bincount(self.codes, minlength=len(self.labels))

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each label's samples begin in ``members``."""
        return np.cumsum(self.sizes) - self.sizes

    @cached_property
    def members(self) -> npt.NDArray[np.integer[Any]]:
        """The samples' indices, grouped by label."""
        return np.argsort(self.codes, kind="stable").astype(smallest(len(self.codes)))


def plain(label: Any) -> Any:
    """Return a scalar of numpy's or torch's as the Python object that equals it.

    Examples:
        >>> plain(torch.tensor(3)), plain(np.str_("cat"))
        (3, 'cat')
    """
    if not isinstance(label, torch.Tensor | np.generic):
        return label
    item = label.item()
    # Python has no times in nanoseconds, so item() gives an int for one, and None for numpy's "not a time".
    is_lost = isinstance(label, np.datetime64 | np.timedelta64) and (item is None or isinstance(item, int))
    return label if is_lost else item


def _plain_labels(name: str, labels: npt.NDArray[Any] | list[Any]) -> list[Any]:
    """Return the labels as Python objects, or raise SamplerError unless each sample has one."""
    if isinstance(labels, np.ndarray) and labels.ndim != 1:
        raise SamplerError(
            f"{name} has the shape {labels.shape}: one label for each sample makes a flat sequence. Pass one, "
            "say labels.argmax(axis=1) of one-hot rows."
        )
    rows = (label for label in labels if isinstance(label, torch.Tensor) and label.numel() != 1)
    if (row := next(rows, None)) is not None:
        raise SamplerError(
            f"{name} has a tensor of the shape {tuple(row.shape)} for a sample: every sample has one label. Pass "
            "numbers, say row.argmax() of one-hot rows."
        )
    if not len(labels):
        raise SamplerError(f"{name} is empty: there is nothing to draw from. Pass one label for each sample.")
    return [plain(label) for label in labels]


def _numbered(name: str, labels: list[Any]) -> tuple[list[Hashable], npt.NDArray[np.int64]]:
    """Return each label once, and each sample's number among these."""
    numbers: dict[Hashable, int] = {}
    for index, label in enumerate(labels):
        try:
            numbers.setdefault(label, len(numbers))
        except TypeError as error:
            raise SamplerError(
                f"{name}[{index}]={label!r} is a {type(label).__name__}, which is not hashable, so samples cannot be "
                "grouped by it. Pass hashable labels, such as tuples instead of lists."
            ) from error
    codes = np.fromiter((numbers[label] for label in labels), np.int64, len(labels))
    try:
        names = sorted(numbers)  # type: ignore[type-var]  # labels that cannot be compared raise
    except TypeError:
        return list(numbers), codes
    rank = np.empty(len(names), np.int64)
    rank[[numbers[label] for label in names]] = np.arange(len(names))
    return list(names), rank[codes]


def categories_of(
    labels: Classes, categories: Labels | None, most: int | None, p: int
) -> npt.NDArray[np.integer] | None:
    """Return each label's category, or None if any p labels lie in few enough categories.

    Args:
        labels: Each sample's label.
        categories: Each sample's category; None if they do not matter.
        most: How many categories a batch has at most.
        p: How many labels a batch has.

    Returns:
        The number of each label's category, in the shape ``(labels,)``.

    Raises:
        SamplerError: Only one of ``categories`` and ``most`` is given, they do not fit the samples, a label is in two
            categories, or a category has too few labels.

    Examples:
        >>> labels = Classes.of("labels", ["ash", "ash", "oak", "owl", "eel"])  # numbered in sorted order
        >>> categories_of(labels, ["tree", "tree", "tree", "animal", "animal"], most=1, p=2).tolist()
        [1, 0, 1, 0]
    """
    if categories is None and most is None:
        return None
    if categories is None or most is None:
        given, lacking = ("max_categories", "categories") if categories is None else ("categories", "max_categories")
        raise SamplerError(
            f"{given} was given without {lacking}: limiting the categories in a batch needs both. Pass "
            f"{lacking} too, or neither."
        )
    most = whole("max_categories", most, 1, "it limits the categories in a batch")
    found = Classes.of("categories", categories)
    category_of = _by_label(labels, found)
    if len(found.labels) <= most:
        return None
    _require_large(found, category_of, most, p)
    return category_of


def _by_label(labels: Classes, categories: Classes) -> npt.NDArray[np.integer]:
    """Return each label's category, or raise SamplerError unless every label has one."""
    if len(categories.codes) != len(labels.codes):
        raise SamplerError(
            f"categories has {len(categories.codes)} entries and labels {len(labels.codes)}: every sample has "
            "one of each. Pass sequences of one length."
        )
    category_of = np.zeros(len(labels.labels), categories.codes.dtype)
    category_of[labels.codes] = categories.codes
    if len(odd := np.flatnonzero(category_of[labels.codes] != categories.codes)):
        label = labels.codes[odd[0]]
        first, second = categories.codes[odd[0]], category_of[label]
        raise SamplerError(
            f"The label {labels.labels[label]!r} is in the categories {categories.labels[first]!r} and "
            f"{categories.labels[second]!r}: a label belongs to one. Pass labels that differ by their "
            "category, say pairs of both."
        )
    return category_of


def _require_large(categories: Classes, category_of: npt.NDArray[np.integer], most: int, p: int) -> None:
    """Raise SamplerError if a category is too small to keep batches within ``most`` categories."""
    # Labels are in a row, category by category. p neighbours may begin and end in the middle of a category, but must
    # hold the categories between these whole.
    least = p if most == 1 else -(-(p - 1) // (most - 1))
    sizes = np.bincount(category_of)
    if sizes.min() < least:
        small = int(sizes.argmin())
        raise SamplerError(
            f"The category {categories.labels[small]!r} has {sizes[small]} labels, and batches of p={p} "
            f"labels from at most max_categories={most} need at least {least} in each. Pass a smaller p or a "
            "larger max_categories, or join small categories."
        )


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
