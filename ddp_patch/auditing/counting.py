"""What the ranks got together, counted against what one process would get."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_patch.auditing.coding import Numbers
from ddp_patch.auditing.simulate import Drawn

__all__ = ["Coverage", "as_units", "batches_of", "coverage"]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often each thing was got by all ranks, against how often by one process.

    Attributes:
        missing: The numbers of what was got too seldom, each once.
        lacking: By how much, in all.
        repeated: The numbers of what was got too often, each once.
        extra: By how much, in all.
    """

    missing: Numbers
    lacking: int
    repeated: Numbers
    extra: int

    @property
    def is_exact(self) -> bool:
        """Whether the ranks together got what one process gets."""
        return self.lacking == self.extra == 0


def coverage(expected: Numbers, shares: Sequence[Numbers]) -> Coverage:
    """Count what the shares hold against what is expected.

    Examples:
        >>> found = coverage(np.array([0, 1, 2]), [np.array([0, 2]), np.array([2, 0])])
        >>> found.missing.tolist(), found.repeated.tolist(), found.extra
        ([1], [0, 2], 2)
    """
    arrays = [expected, *shares]
    bounds = [int(bound) for array in arrays if len(array) for bound in (array.min(), array.max())]
    if not bounds:
        return Coverage(expected, 0, expected, 0)
    low, span = min(bounds), max(bounds) - min(bounds) + 1
    if span <= 4 * sum(map(len, arrays)) + 1024:
        difference = _counts(expected, low, span)
        for share in shares:
            difference -= _counts(share, low, span)
        missing, repeated = np.flatnonzero(difference > 0), np.flatnonzero(difference < 0)
        return Coverage(missing + low, int(difference[missing].sum()), repeated + low, -int(difference[repeated].sum()))
    names, places = np.unique(np.concatenate(arrays), return_inverse=True)
    found = coverage(
        places[: len(expected)], np.split(places[len(expected) :], np.cumsum([len(s) for s in shares])[:-1])
    )
    return Coverage(names[found.missing], found.lacking, names[found.repeated], found.extra)


def _counts(items: Numbers, low: int, span: int) -> Numbers:
    # Piece by piece: bincount makes 64 bits of its argument.
    counts = np.zeros(span, np.int32)
    for start in range(0, len(items), _PIECE):
        counts += np.bincount(items[start : start + _PIECE].astype(np.int64) - low, minlength=span).astype(np.int32)
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
