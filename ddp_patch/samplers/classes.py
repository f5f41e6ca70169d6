"""Samples by class: how classes are read, and batches by category."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError
from ddp_patch.samplers.checks import sequence, whole

__all__ = ["Classes", "Labels", "categories_of", "plain", "smallest"]


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
