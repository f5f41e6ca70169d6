"""Give every item a whole number, so that arrays can hold millions of items and compare them."""

import operator
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_patch.streams.fingerprint import fingerprint

__all__ = ["Coding", "Content", "Numbers", "narrow"]

Numbers = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Content:
    """Stand for a sample by its value, which is no index even where it is a whole number.

    Attributes:
        value: The sample.
    """

    value: Any


class Coding:
    """Give every item a number: an index is its own number, any other key gets the next negative one.

    Examples:
        >>> coding = Coding()
        >>> coding.codes([3, "a.jpg", 3, "b.jpg", "a.jpg"]).tolist()
        [3, -1, 3, -2, -1]
        >>> coding.name(-2)
        "'b.jpg'"
    """

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._names: list[str] = []

    def codes(self, items: Sequence[Any]) -> Numbers:
        """Return the items' numbers, shape (items,)."""
        if set(map(type, items)) == {int}:
            try:
                codes = np.fromiter(items, np.int64, len(items))
            except OverflowError:  # an index beyond 64 bits is numbered like any other key
                pass
            else:
                if codes.min() >= 0:
                    return codes
        return np.fromiter(map(self._code, items), np.int64, len(items))

    def name(self, code: int) -> str:
        """Return an item as text to show to people."""
        return str(code) if code >= 0 else self._names[-1 - code]

    def adopt(self, other: "Coding", codes: Numbers) -> Numbers:
        """Translate the numbers of another coding, such as another process's, to this one's."""
        if not other._names:
            return codes
        own = [self._number(key, name) for key, name in zip(other._codes, other._names, strict=True)]
        return np.where(codes >= 0, codes, np.array(own)[np.minimum(-1 - codes, len(own) - 1)])

    def _code(self, item: Any) -> int:
        index = _index(item)
        if index is not None:
            return index
        key = fingerprint([item])
        if key not in self._codes:  # else save the time to name it
            self._number(key, reprlib.repr(item.value if isinstance(item, Content) else item))
        return self._codes[key]

    def _number(self, key: str, name: str) -> int:
        if key not in self._codes:
            self._codes[key] = -1 - len(self._names)
            self._names.append(name)
        return self._codes[key]


def _index(item: Any) -> int | None:
    """Return an item as the index that a dataset would see, or None if it is another kind of key."""
    is_tensor = (
        isinstance(item, torch.Tensor) and item.ndim == 0 and not (item.is_floating_point() or item.is_complex())
    )
    if isinstance(item, bool) or not (is_tensor or isinstance(item, int | np.integer)):
        return None
    index = operator.index(item)
    return index if 0 <= index < 2**63 else None


def narrow(codes: Numbers) -> Numbers:
    """Return the numbers in 32 bits where they fit, otherwise as they are."""
    bounds = np.iinfo(np.int32)
    fits = not len(codes) or (codes.min() >= bounds.min and codes.max() <= bounds.max)
    return codes.astype(np.int32) if fits else codes
