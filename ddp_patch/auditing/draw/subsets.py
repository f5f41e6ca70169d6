"""Translate indices of torch's ``Subset`` to indices of the dataset below."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Subset

__all__ = ["base_of", "in_base"]


def base_of(dataset: Any) -> Any:
    """Return the dataset below all ``Subset`` layers, or the dataset itself where it has none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def in_base(dataset: Any, items: Sequence[Any]) -> Sequence[Any]:
    """Translate a dataset's indices to indices of the dataset below its ``Subset`` layers.

    Examples:
        >>> in_base(Subset(Subset("abcdef", [1, 3, 5]), [2, 0]), [0, 1])
        [5, 1]
    """
    while isinstance(dataset, Subset):
        items = [dataset.indices[item] for item in items]
        dataset = dataset.dataset
    return items
