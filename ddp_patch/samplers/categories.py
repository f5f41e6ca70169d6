"""The categories that labels belong to, checked: whether batches can be limited to a few of them."""

import numpy as np
import numpy.typing as npt

from ddp_patch.errors import SamplerError
from ddp_patch.samplers.checks import whole
from ddp_patch.samplers.classes import Classes, Labels

__all__ = ["categories_of"]


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
