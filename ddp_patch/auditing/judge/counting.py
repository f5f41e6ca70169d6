"""What the ranks got together, counted against what one process would get."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_patch.auditing.draw.coding import Numbers
from ddp_patch.auditing.draw.drawing import Drawn

__all__ = ["Coverage", "as_units", "batches_of", "coverage", "dense"]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often each thing was got by all ranks, against how often by one process.

    Attributes:
        missing: The numbers of what was got too seldom, each once.
        lacking: By how much, in all.
        repeated: The numbers of what was got too often, each once.
        extra: By how much, in all.
        distinct: How many different things are expected.
        is_known: Whether that can be told of what was drawn.
    """

    missing: Numbers
    lacking: int
    repeated: Numbers
    extra: int
    distinct: int
    is_known: bool = True

    def unknown(self) -> "Coverage":
        """Return it where what is missing and repeated cannot be told."""
        return Coverage(self.missing[:0], 0, self.repeated[:0], 0, self.distinct, is_known=False)

    def of_another_draw(self) -> "Coverage":
        """Return it where other things were drawn: only in number can there be too few or too many."""
        both = min(self.lacking, self.extra)
        if both == 0:
            return self
        none = self.missing[:0]
        return replace(self, missing=none, lacking=self.lacking - both, repeated=none, extra=self.extra - both)


def coverage(expected: Numbers, shares: Sequence[Numbers]) -> Coverage:
    """Count what the shares hold against what is expected.

    Examples:
        >>> found = coverage(np.array([0, 1, 2]), [np.array([0, 2]), np.array([2, 0])])
        >>> found.missing.tolist(), found.repeated.tolist(), found.extra
        ([1], [0, 2], 2)
    """
    names, (counted, *others) = dense([expected, *shares])
    difference = _counts(counted, len(names))
    distinct = int(np.count_nonzero(difference))
    for share in others:
        difference -= _counts(share, len(names))
    missing, repeated = np.flatnonzero(difference > 0), np.flatnonzero(difference < 0)
    lacking, extra = int(difference[missing].sum()), -int(difference[repeated].sum())
    return Coverage(names[missing], lacking, names[repeated], extra, distinct)


def dense(arrays: Sequence[Numbers]) -> tuple[Numbers, list[Numbers]]:
    """Number again what arrays hold, from 0 and with few gaps, so that a table of all numbers is small.

    Returns:
        The old numbers, by the new ones; and the arrays in new numbers.

    Examples:
        >>> names, (first, second) = dense([np.array([10**15, 7]), np.array([7])])
        >>> names.tolist(), first.tolist(), second.tolist()
        ([7, 1000000000000000], [1, 0], [0])
    """
    bounds = [int(bound) for array in arrays if len(array) for bound in (array.min(), array.max())]
    low, high = min(bounds, default=0), max(bounds, default=-1)
    if high - low < 4 * sum(map(len, arrays)) + 1024:
        names = np.arange(low, high + 1, dtype=np.result_type(*arrays))
        return names, [array - low if low else array for array in arrays]
    names, places = np.unique(np.concatenate(arrays), return_inverse=True)
    return names, np.split(places, np.cumsum([len(array) for array in arrays])[:-1])


def _counts(items: Numbers, span: int) -> Numbers:
    # Piece by piece: bincount makes 64 bits of its argument.
    counts = np.zeros(span, np.int32)
    for start in range(0, len(items), _PIECE):
        counts += np.bincount(items[start : start + _PIECE], minlength=span).astype(np.int32)
    return counts


_PIECE = 2**22


def as_units(drawn: Sequence[Drawn]) -> list[Numbers]:
    """Return, for each of those drawn, its batches as numbers: equal ones where the batches are."""
    known: dict[bytes, int] = {}
    return [
        np.array(
            [known.setdefault(batch.astype(np.int64).tobytes(), len(known)) for batch in batches_of(one)], np.int64
        )
        for one in drawn
    ]


def batches_of(drawn: Drawn) -> list[Numbers]:
    """Return the items of every step."""
    return np.split(drawn.items, np.cumsum(drawn.sizes)[:-1]) if len(drawn.sizes) else []
