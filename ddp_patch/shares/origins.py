"""Where the items of a rank's share come from, where they were dealt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray  # which takes long to import

__all__ = ["Origins"]


class Origins:
    """The places of a rank's items in the stream as the sampler gives it, a window at a time, in few bytes each.

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
        self._windows: list[tuple[int, NDArray[np.unsignedinteger]]] = []

    def add(self, places: NDArray[np.int64]) -> None:
        """Add the places of the items that come next."""
        if len(places):
            first = int(places.min())
            apart = places - first
            self._windows.append((first, apart.astype(np.min_scalar_type(int(apart.max())))))

    def places(self) -> NDArray[np.int64]:
        """Return the places of all items, but for the first ones that are skipped."""
        found = [np.empty(0, np.int64), *(first + apart.astype(np.int64) for first, apart in self._windows)]
        return np.concatenate(found)[self.skip :]
