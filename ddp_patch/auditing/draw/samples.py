"""Tell which sample an index of a rank's dataset stands for, where each rank has a dataset of its own."""

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from itertools import chain
from os import PathLike
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from ddp_patch.auditing.draw.coding import Numbers
from ddp_patch.streams.fingerprint import fingerprint

__all__ = ["base_of", "contents", "digest", "in_base", "layers_of"]

# Samples in memory, by index.
Held: TypeAlias = Sequence[Any] | NDArray[Any] | torch.Tensor
# What a fingerprint tells by its value. It tells any other object by its type alone.
_PLAIN = (type(None), int, float, complex, str, bytes, bytearray, Enum, date, time, timedelta, PathLike)
_ARRAYS = (torch.Tensor, np.ndarray, np.generic)


def base_of(dataset: Any) -> Any:
    """Return the dataset below all ``Subset`` layers, or the dataset itself where it has none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def in_base(dataset: Any, items: Iterable[Any]) -> list[Any]:
    """Translate a dataset's indices to indices of the dataset below its ``Subset`` layers.

    Examples:
        >>> in_base(Subset(Subset("abcdef", [1, 3, 5]), [2, 0]), [0, 1])
        [5, 1]
    """
    found = list(items)
    while isinstance(dataset, Subset):
        indices = dataset.indices
        found = [[indices[one] for one in item] if isinstance(item, list) else indices[item] for item in found]
        dataset = dataset.dataset
    return found


def layers_of(dataset: Any) -> list[Numbers]:
    """Return the indices that each layer of a dataset has in the dataset at its base, from there upwards.

    Returns:
        An array for the base and one for each ``Subset`` above it, shape (samples of the layer,). The list ends before
        a layer that has no length or whose indices are no whole numbers.

    Examples:
        >>> [layer.tolist() for layer in layers_of(Subset(Subset("abcd", [3, 1, 0]), [2, 0]))]
        [[0, 1, 2, 3], [3, 1, 0], [0, 3]]
    """
    below = layers_of(dataset.dataset) if isinstance(dataset, Subset) else []
    try:
        found = [operator.index(index) for index in in_base(dataset, range(len(dataset)))]
        return [*below, np.array(found, np.int64)]
    except Exception:  # noqa: BLE001 - the user's dataset may raise anything
        return below


def contents(dataset: Any) -> Held | None:
    """Return the samples of a dataset that holds them in memory, by index; None for any other dataset.

    Examples:
        >>> contents(Subset(["a", "b", "c"], [2, 0]))
        ['c', 'a']
    """
    match dataset:
        case list() | tuple() | range() | np.ndarray() | torch.Tensor():
            return dataset
        case TensorDataset():
            return [*zip(*dataset.tensors, strict=True)]
        case Subset():
            below = contents(dataset.dataset)
            return None if below is None else [below[index] for index in dataset.indices]
        case ConcatDataset():
            parts = [held for part in dataset.datasets if (held := contents(part)) is not None]
            return [*chain.from_iterable(parts)] if len(parts) == len(dataset.datasets) else None
    return None


def digest(dataset: Any) -> str | None:
    """Return a hash of the samples that a dataset holds in memory; None where it holds none or they cannot be told."""
    held = contents(dataset)
    match held:
        case None:
            return None
        case range():
            return fingerprint([repr(held)])
        case torch.Tensor():
            return fingerprint([held])
        case np.ndarray() if not held.dtype.hasobject:
            return fingerprint([held])
    return fingerprint(held) if all(map(_is_told, held)) else None


def _is_told(item: Any) -> bool:
    """Tell whether an item has a value that a fingerprint tells."""
    match item:
        case list() | tuple() | Set():
            return all(map(_is_told, item))
        case Mapping():
            return all(_is_told(value) for value in item.values())
    if is_dataclass(item) and not isinstance(item, type):
        return all(_is_told(getattr(item, field.name)) for field in fields(item))
    return isinstance(item, (*_PLAIN, *_ARRAYS))
