"""Draws with a given proportion for each class."""

from collections.abc import Hashable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from numbers import Rational
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError
from ddp_patch.samplers.checks import whole
from ddp_patch.samplers.classes import Classes, Labels, plain
from ddp_patch.samplers.keyed import At, KeyedSampler, generator_of, taken_from

__all__ = ["WeightedClassSampler"]


class WeightedClassSampler(KeyedSampler[int]):
    """Draw indices with an exact proportion for each class, and uniformly within a class.

    A class of weight w gets ``length * w / sum(weights)`` draws. These numbers are rounded, each by less than one, so
    that they sum to ``length``. If a class has enough samples, none comes twice. Otherwise each comes as often as the
    others or once more, and chance decides which. ``WeightedRandomSampler`` draws each index independently: if it draws
    from a class as often as the class has samples, it leaves out 37 % of them on average.

    Args:
        labels: Each sample's label, of any hashable type: a list, array or tensor.
        weights: Each label's weight, on any scale: a mapping, or a sequence for the labels 0, 1, 2 and so on.
        length: How many indices an epoch has.
        seed: Every epoch's order follows from it and the epoch's number.
        generator: Used if there is no seed: each pass draws one number from it, or else from torch's global generator.

    Raises:
        SamplerError: A label has no weight or a weight no label, weights are negative, not finite or all zero, or
            an argument is of another kind.

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
        classes: Any = Classes.of("labels", labels)  # which numbers them once
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
        return partial(taken_from, order)


def _evenly(rng: np.random.Generator, members: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Draw ``count`` members, each as often as the others or once more, in no random order."""
    times, rest = divmod(count, len(members))
    # Draw those that come once more, or those that do not: the fewer are faster.
    few = rng.choice(len(members), min(rest, len(members) - rest), replace=False, shuffle=False)
    once_more = members[few] if 2 * rest <= len(members) else np.delete(members, few)
    return np.concatenate([np.tile(members, times), once_more])


def _checked(weights: Any, labels: list[Hashable]) -> list[Fraction]:
    """Return each label's weight as an exact fraction, or raise SamplerError."""
    by_label = _by_label(weights)
    if lacking := [label for label in labels if label not in by_label]:
        raise SamplerError(
            f"weights has none for the label {lacking[0]!r}, so it is unclear how often to draw it. Give every label a "
            "weight; with 0 it is not drawn."
        )
    known = set(labels)
    if unknown := [label for label in by_label if label not in known]:
        raise SamplerError(
            f"weights has one for {unknown[0]!r}, which is not one of the labels, so there is nothing to draw for it. "
            "Leave it out; a sequence of weights is for the labels 0, 1, 2 and so on."
        )
    exact = {label: _exact(weight) for label, weight in by_label.items()}
    for label, weight in by_label.items():
        if exact[label] is None:
            raise SamplerError(
                f"weights[{label!r}]={weight!r} is not a finite number of at least 0, as proportions need. Pass one."
            )
    if not any(exact.values()):
        raise SamplerError(
            f"weights={by_label} are all 0, so no class can be drawn. Give at least one label a weight above 0."
        )
    return [exact[label] or Fraction(0) for label in labels]


def _exact(weight: Any) -> Fraction | None:
    """Return a weight as a fraction, or None unless it is a finite number of at least 0."""
    if isinstance(weight, bool) or not isinstance(weight, Rational | float | Decimal):
        return None
    try:
        exact = Fraction(weight)
    except (OverflowError, ValueError):  # not finite, or no number
        return None
    return exact if exact >= 0 else None


def _by_label(weights: Any) -> dict[Hashable, Any]:
    """Return the weights that were given, by label, or raise SamplerError."""
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
    found: dict[Hashable, Any] = {}
    for label, weight in pairs:
        is_scalar = isinstance(weight, np.generic) or (isinstance(weight, torch.Tensor) and weight.numel() == 1)
        found[plain(label)] = weight.item() if is_scalar else weight
    return found


def _largest_remainder(weights: list[Fraction], length: int) -> list[int]:
    """Round ``length * weight / sum(weights)`` to whole numbers that sum to ``length``.

    The largest remainders are rounded up; where remainders are equal, the first ones.
    """
    total = sum(weights)
    quotas = [length * weight / total for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])
    for i in by_remainder[: length - sum(counts)]:
        counts[i] += 1
    return counts
