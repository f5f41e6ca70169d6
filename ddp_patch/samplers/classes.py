"""Labels of any hashable type, told apart and numbered."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError
from ddp_patch.samplers.checks import sequence

__all__ = ["Classes", "Labels", "plain", "smallest"]

Labels: TypeAlias = Sequence[Hashable] | npt.NDArray[Any] | torch.Tensor


def smallest(n: int) -> type[np.integer[Any]]:
    """The smallest integers that hold ``range(n)``: the fewer bytes, the faster they are sorted and looked up."""
    return next((kind for kind in (np.int16, np.int32) if n <= np.iinfo(kind).max), np.int64)


@dataclass(frozen=True)
class Classes:
    """Which samples have which label.

    Attributes:
        labels: Each label once; sorted where labels can be compared, else as they first come.
        codes: For each sample the number of its label.
    """

    labels: list[Hashable]
    codes: npt.NDArray[np.integer[Any]]

    @classmethod
    def of(cls, name: str, labels: "Labels | Classes") -> Self:
        """Tell labels apart, unless they are already.

        Args:
            name: What they are called in errors.
            labels: One for each sample.

        Raises:
            SamplerError: There is none, they are no flat sequence, or one is not hashable or not equal to itself.
        """
        if isinstance(labels, cls):
            return labels
        given = sequence(name, labels, "every sample has one")
        if isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype != object and len(given):
            found, codes = np.unique(given, return_inverse=True)
            names: list[Hashable] = [plain(label) for label in found]
        else:
            names, codes = _told_apart(name, given)
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
        """The samples' indices, label by label."""
        return np.argsort(self.codes, kind="stable").astype(smallest(len(self.codes)))


def plain(label: Any) -> Any:
    """Return a label as Python has it, so that a tensor or a scalar of numpy's equals it."""
    if not isinstance(label, torch.Tensor | np.generic):
        return label
    item = label.item()
    # For a time in nanoseconds Python has an int only, and None for none.
    is_lost = isinstance(label, np.datetime64 | np.timedelta64) and (item is None or isinstance(item, int))
    return label if is_lost else item


def _told_apart(name: str, labels: npt.NDArray[Any] | list[Any]) -> tuple[list[Hashable], npt.NDArray[np.int64]]:
    if isinstance(labels, np.ndarray) and labels.ndim != 1:
        raise SamplerError(
            f"{name} has the shape {labels.shape}: one label for each sample makes a flat sequence. Pass one, "
            "say labels.argmax(axis=1) of one-hot rows."
        )
    numbers: dict[Hashable, int] = {}
    rows = (label for label in labels if isinstance(label, torch.Tensor) and label.numel() != 1)
    if (row := next(rows, None)) is not None:
        raise SamplerError(
            f"{name} has a tensor of the shape {tuple(row.shape)} for a sample: every sample has one label. Pass "
            "numbers, say row.argmax() of one-hot rows."
        )
    all_plain = [plain(label) for label in labels]
    if not all_plain:
        raise SamplerError(f"{name} is empty: there is nothing to draw from. Pass one label for each sample.")
    for index, label in enumerate(all_plain):
        try:
            numbers.setdefault(label, len(numbers))
        except TypeError as error:
            raise SamplerError(
                f"{name}[{index}]={label!r} is a {type(label).__name__}, which is not hashable, so samples cannot be "
                "told apart by it. Pass labels that are, say tuples for lists."
            ) from error
    codes = np.fromiter((numbers[label] for label in all_plain), np.int64, len(all_plain))
    try:
        names = sorted(numbers)  # type: ignore[type-var]  # whether they can be compared is found out
    except TypeError:
        return list(numbers), codes
    rank = np.empty(len(names), np.int64)
    rank[[numbers[label] for label in names]] = np.arange(len(names))
    return list(names), rank[codes]
