"""Which samples a dataset was cut down to, where that can be told without loading them."""

import copy
from typing import Any

from torch.utils.data import IterableDataset, Subset

from ddp_patch.streams.fingerprint import COMPARED, fingerprint

__all__ = ["chosen_samples", "spread"]


def chosen_samples(dataset: Any) -> str | None:
    """Return a fingerprint of which samples a dataset was cut down to, or None where that cannot be told.

    Of torch's ``Subset`` the indices count, and of Hugging Face's map-style dataset the first row and the last, as
    they are stored: what ``split_dataset_by_node()`` returns for one bears no other mark.

    Examples:
        >>> halves = [Subset(range(10), range(start, start + 5)) for start in (0, 5)]
        >>> chosen_samples(halves[0]) == chosen_samples(halves[1])
        False
    """
    chosen: list[Any] = []
    try:
        while isinstance(dataset, Subset):
            chosen.append(spread(dataset.indices))
            dataset = dataset.dataset
        if _is_hugging_faces(dataset) and len(dataset):
            rows = copy.copy(dataset)
            rows.set_format("arrow")  # nothing is decoded or transformed
            chosen += [rows[0].to_pylist(), rows[len(dataset) - 1].to_pylist()]
        return fingerprint(chosen) if chosen else None
    except Exception:  # noqa: BLE001 - the user's indices, or a row that cannot be read yet
        return None


def _is_hugging_faces(dataset: object) -> bool:
    """Tell whether it is a ``datasets.Dataset``, which is named here and not imported."""
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(dataset).__mro__}
    return "datasets.arrow_dataset.Dataset" in names and not isinstance(dataset, IterableDataset)


def spread(values: Any) -> list[Any]:
    """Some of the values, from all over the sequence."""
    return [values[position] for position in range(0, len(values), max(1, len(values) // COMPARED))]
