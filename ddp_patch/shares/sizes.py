"""How many samples each batch of a stream has."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sized
from itertools import chain, repeat
from typing import TypeVar

__all__ = ["Sizes", "size_of"]

T = TypeVar("T")


def size_of(item: object) -> int:
    """Return how many samples an item of a stream has: a batch as many as it gives, a key one."""
    try:
        if isinstance(item, Iterable) and not isinstance(item, Sized | Iterator):
            return sum(1 for _ in item)
        return len(item) if isinstance(item, Sized) else 1
    except TypeError:  # as of a tensor without dimensions
        return 1


class Sizes:
    """The sizes of a stream's batches, in runs of equal ones.

    Examples:
        >>> sizes = Sizes()
        >>> sizes.add(4, batches=5)
        >>> sizes.add(3)
        >>> len(sizes), sizes[4], sizes[5], sizes.samples, list(sizes)
        (6, 4, 3, 23, [4, 4, 4, 4, 4, 3])
    """

    def __init__(self) -> None:
        self._sizes = array("q")
        self._ends = array("q")  # after how many batches each run ends
        self.samples: int = 0

    def add(self, size: int, batches: int = 1) -> None:
        """Add some batches of a size."""
        if not batches:
            return
        self.samples += size * batches
        if self._sizes and self._sizes[-1] == size:
            self._ends[-1] += batches
        else:
            self._sizes.append(size)
            self._ends.append(len(self) + batches)

    def of(self, stream: Iterator[T]) -> Iterator[T]:
        """Pass a stream's items on, and add the size of each."""
        for item in stream:
            own = list(item) if isinstance(item, Iterator) else item
            self.add(size_of(own))
            yield own  # type: ignore[misc]  # a batch read into a list

    def alike_until(self, number: int) -> int:
        """Return the first batch after batch ``number`` whose size may be another, as far as they are known."""
        return self._ends[bisect_right(self._ends, number)]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> int:
        return self._sizes[bisect_right(self._ends, number)]

    def __iter__(self) -> Iterator[int]:
        begins = chain([0], self._ends)
        return chain.from_iterable(
            repeat(size, end - begin) for size, begin, end in zip(self._sizes, begins, self._ends, strict=False)
        )
