"""Samples by class: draws with a proportion for each class, and batches of P labels with K samples each."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, partial
from math import gcd
from numbers import Rational
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError
from ddp_patch.samplers.keyed import At, KeyedSampler, Positions, generator_of, sequence, smallest, whole

Labels: TypeAlias = Sequence[Hashable] | npt.NDArray[Any] | torch.Tensor


@dataclass(frozen=True)
class Classes:
    """Which samples have which label.

    Attributes:
        labels: Each label once, sorted if labels can be compared, otherwise in the order of their first samples.
        codes: The number of each sample's label in ``labels``, in the shape ``(samples,)``.

    Examples:
        >>> classes = Classes.of("labels", ["dog", "cat", "dog"])
        >>> classes.labels, classes.codes.tolist(), classes.members.tolist()
        (['cat', 'dog'], [1, 0, 1], [1, 0, 2])
    """

    labels: list[Hashable]
    codes: npt.NDArray[np.integer[Any]]

    @classmethod
    def of(cls, name: str, labels: "Labels | Classes") -> Self:
        """Number the labels, unless ``labels`` are numbered already.

        Args:
            name: The name of the labels in error messages.
            labels: Each sample's label.

        Raises:
            SamplerError: There are no labels, or no flat sequence of labels; or a label is not hashable or not equal to
                itself.
        """
        if isinstance(labels, cls):
            return labels
        given = sequence(name, labels)
        if not len(given) or getattr(given, "ndim", 1) != 1:
            raise SamplerError(
                f"{name} has the shape {np.shape(given)}: each sample has one label. Pass a flat sequence of labels, "
                "such as labels.argmax(axis=1) of one-hot rows."
            )
        if isinstance(given, np.ndarray) and given.dtype != object:
            found, codes = np.unique(given, return_inverse=True)
            names: list[Hashable] = found.tolist()
            _require_shared(name, names)
        else:
            plain = [_plain(label) for label in given]
            _require_shared(name, plain)
            names, codes = _numbered(plain)
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


def _plain(label: Any) -> Any:
    """Return a scalar of numpy or torch as the equal Python object."""
    is_scalar = isinstance(label, np.generic) or (isinstance(label, torch.Tensor) and label.numel() == 1)
    return label.item() if is_scalar else label


def _require_shared(name: str, labels: list[Any]) -> None:
    """Raise SamplerError if no two samples can share a label, because it is not hashable or not equal to itself."""
    for label in labels:
        try:
            is_shared = not isinstance(label, torch.Tensor) and hash(label) is not None and bool(label == label)
        except TypeError:
            is_shared = False
        if not is_shared:
            raise SamplerError(
                f"{name} has {label!r}, a {type(label).__name__}, which is not hashable or not equal to itself, so no "
                "two samples share it. Pass numbers, strings or tuples; of one-hot rows, their argmax."
            )


def _numbered(labels: list[Hashable]) -> tuple[list[Hashable], npt.NDArray[np.int64]]:
    """Return each label once, and the number of each sample's label among them."""
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    codes = np.fromiter((numbers[label] for label in labels), np.int64, len(labels))
    try:
        names = sorted(numbers)  # type: ignore[type-var]  # labels that cannot be compared raise
    except TypeError:
        return list(numbers), codes
    rank = np.empty(len(names), np.int64)
    rank[[numbers[label] for label in names]] = np.arange(len(names))
    return list(names), rank[codes]


def _taken_from(order: npt.NDArray[np.integer[Any]], positions: Positions) -> npt.NDArray[np.int64]:
    """Return the items at some positions of an order, whose integers may have fewer bytes."""
    return np.take(order, positions, axis=0).astype(np.int64)


class WeightedClassSampler(KeyedSampler[int]):
    """Draw indices with an exact proportion for each class, and uniformly within a class.

    A class of weight w gets ``length * w / sum(weights)`` draws. These numbers are rounded, each by less than one, so
    that they sum to ``length``. If a class has enough samples, no sample comes twice. Otherwise each sample comes as
    often as the others or once more, by chance. ``WeightedRandomSampler`` draws each index independently: if it draws
    from a class as often as the class has samples, it leaves out 37 % of the samples on average.

    Args:
        labels: Each sample's label, of any hashable type: a list, array or tensor.
        weights: Each label's weight, on any scale: a mapping, or a sequence for the labels 0, 1, 2 and so on.
        length: How many indices an epoch has.
        seed: Every epoch's order follows from the seed and the epoch's number.
        generator: If there is no seed, each pass draws one number from this generator, or else from torch's global one.

    Raises:
        SamplerError: A label has no weight or a weight no label, weights are negative, not finite or all zero, or an
            argument has a wrong type.

    Examples:
        >>> sampler = WeightedClassSampler(["cat"] * 8 + ["dog"] * 2, {"cat": 1, "dog": 2}, length=9, seed=0)
        >>> drawn = list(sampler)
        >>> sum(index < 8 for index in drawn), sorted(index for index in drawn if index >= 8)
        (3, [8, 8, 8, 9, 9, 9])
        >>> len(WeightedClassSampler.upsample([0, 0, 0, 1])), len(WeightedClassSampler.downsample([0, 0, 0, 1]))
        (6, 2)

    Source:
        The rounding is Hamilton's method of largest remainders: Balinski and Young, "Fair Representation", 1982.
    """

    def __init__(
        self,
        labels: Labels,
        weights: Mapping[Any, float] | Sequence[float] | npt.NDArray[Any] | torch.Tensor,
        length: int,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(seed, generator)
        self._classes = Classes.of("labels", labels)
        self._length = whole("length", length, 1, "it is the number of indices in an epoch")
        self._counts = _largest_remainder(_checked(weights, self._classes.labels), self._length)

    @classmethod
    def n_per_class(
        cls, labels: Labels, n: int, *, seed: int | None = None, generator: torch.Generator | None = None
    ) -> Self:
        """Return a sampler that draws n indices of every class.

        Examples:
            >>> WeightedClassSampler.n_per_class(["cat", "cat", "dog"], n=5).counts
            {'cat': 5, 'dog': 5}
        """
        n = whole("n", n, 1, "it is the number of indices of every class in an epoch")
        classes: Any = Classes.of("labels", labels)  # number the labels only once
        weights = dict.fromkeys(classes.labels, 1)
        return cls(classes, weights, n * len(weights), seed=seed, generator=generator)

    @classmethod
    def upsample(cls, labels: Labels, *, seed: int | None = None, generator: torch.Generator | None = None) -> Self:
        """Return a sampler that draws as many indices of every class as the largest class has.

        No sample is left out.

        Examples:
            >>> WeightedClassSampler.upsample(["cat", "cat", "dog"]).counts
            {'cat': 2, 'dog': 2}
        """
        classes: Any = Classes.of("labels", labels)
        return cls.n_per_class(classes, int(classes.sizes.max()), seed=seed, generator=generator)

    @classmethod
    def downsample(cls, labels: Labels, *, seed: int | None = None, generator: torch.Generator | None = None) -> Self:
        """Return a sampler that draws as many indices of every class as the smallest class has.

        No sample comes twice.

        Examples:
            >>> WeightedClassSampler.downsample(["cat", "cat", "dog"]).counts
            {'cat': 1, 'dog': 1}
        """
        classes: Any = Classes.of("labels", labels)
        return cls.n_per_class(classes, int(classes.sizes.min()), seed=seed, generator=generator)

    def __len__(self) -> int:
        return self._length

    @property
    def counts(self) -> dict[Hashable, int]:
        """How many indices of each class an epoch has, by label."""
        return dict(zip(self._classes.labels, self._counts, strict=True))

    def _order(self, key: np.random.SeedSequence) -> At:
        rng = generator_of(key)
        classes = np.split(self._classes.members, self._classes.starts[1:])
        order = np.concatenate([_evenly(rng, *each) for each in zip(classes, self._counts, strict=True)])
        rng.shuffle(order)
        return partial(_taken_from, order)


def _evenly(rng: np.random.Generator, members: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Draw ``count`` members, each as often as the others or once more; their order is not random."""
    times, rest = divmod(count, len(members))
    # Draw the members that come once more, or the members that do not, whichever are fewer: this is faster.
    few = rng.choice(len(members), min(rest, len(members) - rest), replace=False, shuffle=False)
    once_more = members[few] if 2 * rest <= len(members) else np.delete(members, few)
    return np.concatenate([np.tile(members, times), once_more])


def _checked(weights: Any, labels: list[Hashable]) -> list[Fraction]:
    """Return each label's weight as an exact fraction, or raise SamplerError."""
    by_label = _by_label(weights)
    if differing := by_label.keys() ^ set(labels):
        label = next(label for label in (*labels, *by_label) if label in differing)
        raise SamplerError(
            f"weights and labels differ in {label!r}, which is in one of them alone. Give every label a weight, which "
            "may be 0, and leave out others; a sequence of weights is for the labels 0, 1, 2 and so on."
        )
    exact = [_exact(by_label[label]) for label in labels]
    if None in exact or not any(exact):
        raise SamplerError(
            f"weights={by_label} are not finite numbers of at least 0, with one above 0. Pass such proportions."
        )
    return [weight or Fraction(0) for weight in exact]


def _exact(weight: Any) -> Fraction | None:
    """Return a weight as a fraction, or None unless it is a finite number of at least 0."""
    if isinstance(weight, bool) or not isinstance(weight, Rational | float | Decimal):
        return None
    try:
        exact = Fraction(weight)
    except (OverflowError, ValueError):  # not finite, or not a number
        return None
    return exact if exact >= 0 else None


def _by_label(weights: Any) -> dict[Hashable, Any]:
    """Return the weights by label, or raise SamplerError."""
    if isinstance(weights, Mapping):
        pairs = list(weights.items())
    elif isinstance(weights, torch.Tensor | np.ndarray) and weights.ndim:
        pairs = list(enumerate(weights.tolist()))
    elif isinstance(weights, Sequence) and not isinstance(weights, str):
        pairs = list(enumerate(weights))
    else:
        raise SamplerError(
            f"weights={weights!r} is a {type(weights).__name__}, and every label needs a weight. Pass a mapping from "
            "label to weight, or a sequence for the labels 0, 1, 2 and so on."
        )
    return {_plain(label): _plain(weight) for label, weight in pairs}


def _largest_remainder(weights: list[Fraction], length: int) -> list[int]:
    """Round ``length * weight / sum(weights)`` to whole numbers that sum to ``length``.

    The largest remainders are rounded up; of equal remainders, the first.
    """
    total = sum(weights)
    quotas = [length * weight / total for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])
    for i in by_remainder[: length - sum(counts)]:
        counts[i] += 1
    return counts


# How many rows of instances are drawn at once: more rows do not fit in the processor's caches.
_ROWS = 2**12
# The largest k for which each instance is compared with each other: for a larger k, k**2 comparisons take too long.
_MOST_COMPARED = 256


class PKBatchSampler(KeyedSampler[list[int]]):
    """Make batches of p labels with k instances each, in which metric learning finds positives and negatives.

    Every label comes once in an epoch. If p does not divide the number of labels, the last batch is filled up with
    labels that have come before. With ``num_batches``, labels come round after round, each round in a new order, so
    each label comes as often as the others or once more. Instances are chosen uniformly for each batch, and no instance
    comes twice in a batch. If a label has fewer than k instances, each comes as often as the others or once more.

    Args:
        labels: Each sample's label, of any hashable type: a list, array or tensor.
        p: How many labels a batch has.
        k: How many instances of each label a batch has.
        num_batches: How many batches an epoch has, such as ``len(labels) // (p * k)`` to draw as many samples as there
            are. Default: the number in which every label comes once.
        seed: Every epoch's batches follow from the seed and the epoch's number.
        generator: If there is no seed, each pass draws one number from this generator, or else from torch's global one.

    Raises:
        SamplerError: There are fewer than p labels, or an argument has a wrong type.

    Examples:
        >>> labels = ["a", "a", "a", "b", "b", "b", "c"]
        >>> batches = PKBatchSampler(labels, p=2, k=2, seed=0)
        >>> [[len(batch), len({labels[index] for index in batch})] for batch in batches]
        [[4, 2], [4, 2]]
        >>> len(PKBatchSampler([0, 1] * 500, p=2, k=2)), len(PKBatchSampler([0, 1] * 500, p=2, k=2, num_batches=250))
        (1, 250)

    Source:
        Hermans, Beyer and Leibe, "In Defense of the Triplet Loss for Person Re-Identification", 2017. Instances
        are drawn by Floyd's algorithm: Bentley and Floyd, "Programming pearls: a sample of brilliance", Communications
        of the ACM, 1987.
    """

    def __init__(
        self,
        labels: Labels,
        p: int,
        k: int,
        *,
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
        given = -(-len(self._classes.labels) // self.p) if num_batches is None else num_batches
        self.num_batches: int = whole("num_batches", given, 1, "it is the number of batches in an epoch", bits=63)

    def __len__(self) -> int:
        return self.num_batches

    def _order(self, key: np.random.SeedSequence) -> At:
        rng = generator_of(key)
        chosen = _rounds(rng, len(self._classes.labels), self.num_batches * self.p, self.p)
        picks = _instances(rng, self._classes.sizes[chosen], self.k)
        batches = self._classes.members[self._classes.starts[chosen][:, None] + picks]
        return partial(_taken_from, batches.reshape(len(self), self.batch_size))


def _rounds(rng: np.random.Generator, labels: int, places: int, p: int) -> npt.NDArray[np.integer]:
    """Return labels round after round: each label once in a round, and no label twice in a batch of p."""
    if places < labels + p:
        return np.resize(rng.permutation(labels), places)  # resize() repeats the permutation
    number = -(-places // labels)
    rounds = rng.permuted(np.tile(np.arange(labels, dtype=smallest(labels)), (number, 1)), axis=1)
    period = p // gcd(labels, p)  # after this many rounds, a round begins with a batch
    if period > 1:
        # Any other round begins within a batch, after the last labels of the round before. So let a row be indices into
        # the row before, and move to its beginning the first indices that are not among those last labels.
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

    The instances are all different if the size allows it. Otherwise each comes as often as the others or once more.

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
    # The first `fresh` elements of a column are drawn; the other elements run through the whole range.
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
