"""Indices of torch's Subsets, as indices of the dataset that these are of."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Subset

__all__ = ["base_of", "in_base"]


def base_of(dataset: Any) -> Any:
    """Return the dataset below a dataset's ``Subset`` layers: itself, if it is none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def in_base(dataset: Any, items: Sequence[Any]) -> Sequence[Any]:
    """Return what a dataset's indices are in the one below its ``Subset`` layers.

    Examples:
        >>> in_base(Subset(Subset("abcdef", [1, 3, 5]), [2, 0]), [0, 1])
        [5, 1]
    """
    while isinstance(dataset, Subset):
        items = [dataset.indices[item] for item in items]
        dataset = dataset.dataset
    return items
