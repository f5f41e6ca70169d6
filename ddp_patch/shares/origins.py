"""Where the items of a rank's share come from, if they were balanced by cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

__all__ = ["Origins"]

# This many windows, or items of two, are packed at once: a small window would take more for itself than for its items.
_PACKED_AT_ONCE = 256


class Origins:
    """The positions of a rank's items in the sampler's own order, a window at a time, in few bytes each.

    Attributes:
        skip: How many of the first ones do not count.

    Examples:
        >>> origins = Origins()
        >>> origins.add(np.array([1002, 1000]))
        >>> origins.add(np.array([1007]))
        >>> origins.places().tolist()
        [1002, 1000, 1007]
    """

    def __init__(self) -> None:
        self.skip: int = 0
        self._packed: list[tuple[int, NDArray[np.unsignedinteger]]] = []
        self._latest: list[NDArray[np.int64]] = []

    def add(self, places: NDArray[np.int64]) -> None:
        """Add the positions of the next items."""
        self._latest.append(places)
        if len(self._latest) >= _PACKED_AT_ONCE or sum(map(len, self._latest[-2:])) >= _PACKED_AT_ONCE:
            self._pack()

    def _pack(self) -> None:
        places = np.concatenate([np.empty(0, np.int64), *self._latest])
        self._latest = []
        if len(places):
            first = int(places.min())
            apart = places - first
            self._packed.append((first, apart.astype(np.min_scalar_type(int(apart.max())))))

    def places(self) -> NDArray[np.int64]:
        """Return the positions of all items except the skipped ones."""
        self._pack()
        found = [np.empty(0, np.int64), *(first + apart.astype(np.int64) for first, apart in self._packed)]
        return np.concatenate(found)[self.skip :]
