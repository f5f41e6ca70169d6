"""The digest of a stream: 64 bits over all of its items up to a count, at counts that follow from the stream alone.

Two ranks that draw one stream have equal digests wherever both have come as far. From the first item that differs on,
they have others.
"""

import marshal
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_patch.orders.fingerprint import number_of, say_if_unseen

__all__ = ["END", "Digest", "Mark", "mark_counts", "next_mark"]

# A mark is made when this part more came since the one before, so that there are few: 100 of a billion items.
_GROWTH = 1.25
# Stands for a count where all items came.
END = -1

# Python's hashes of these are the same in all processes; of floats not, because each NaN has its own.
_NUMBERS = frozenset({int, bool, np.int64, np.int32})


class Mark(NamedTuple):
    """A digest at a count.

    Attributes:
        at: How many items it is of; ``END`` if it is of all, and of how many these are.
        value: The digest, 64 bits with a sign.
    """

    at: int
    value: int


def next_mark(count: int) -> int:
    """Return the first count after this one at which a mark is made.

    Examples:
        >>> [next_mark(count) for count in (0, 1, 2, 3, 4, 100)]
        [1, 2, 3, 4, 6, 126]
    """
    return int(count * _GROWTH) + 1


def mark_counts() -> Iterator[int]:
    """Yield the counts at which marks are made of items that come one by one, in order."""
    count = 0
    while True:
        yield (count := next_mark(count))


class Digest:
    """Takes the digest of items that come in parts, the same parts on every rank.

    Plain whole numbers, and tuples of them, are hashed by Python: these hashes are the same in all processes and take a
    few nanoseconds. All else is hashed by its value; objects of unknown types count by their types alone.

    Attributes:
        count: How many items came.
        value: The digest of all of them.
        marks: The digests at growing counts, by the count; in the order in which they were made.

    Examples:
        >>> one, other = Digest(), Digest()
        >>> one.add([3, 1, 2])
        >>> other.add([3, 2, 1])
        >>> list(one.marks)
        [1, 2, 3]
        >>> one.marks[1] == other.marks[1], one.marks[2] == other.marks[2]
        (True, False)
    """

    def __init__(self) -> None:
        self.count: int = 0
        self.value: int = 0
        self.marks: dict[int, int] = {}
        self._next = 1

    @property
    def latest(self) -> Mark | None:
        """The mark that was made last; None before the first."""
        return Mark(*next(reversed(self.marks.items()))) if self.marks else None

    def add(self, items: Sequence[Any]) -> None:
        """Add the items that come next."""
        while len(items) > (room := self._next - self.count):  # most parts lie between two marks: don't copy these
            self.add_hash(_hash_of(items[:room]), room)
            items = items[room:]
        if items:
            self.add_hash(_hash_of(items), len(items))

    def add_hash(self, value: int, items: int) -> None:
        """Add items that come at once, of which no more than a hash is known."""
        self.value = hash((self.value, value))
        self._count(items)

    def add_names(self, names: Sequence[bytes]) -> None:
        """Add items by their names: so many at once on every rank, and no more than ``until_mark``.

        Source: BLAKE2b, over the digest so far and the names.
        """
        data = self.value.to_bytes(8, "little", signed=True) + b"\xff".join(names)
        self.value = _bytes_hash(data)
        self._count(len(names))

    @property
    def until_mark(self) -> int:
        """How many more items there are to the next mark."""
        return self._next - self.count

    def end(self) -> None:
        """Add that there are no more items."""
        self.marks[END] = hash((self.value, END, self.count))

    def _count(self, items: int) -> None:
        self.count += items
        if self.count >= self._next:
            self.marks[self.count] = self.value
            self._next = next_mark(self.count)


def _hash_of(items: Sequence[Any]) -> int:
    """Return a hash of items that is the same in every process."""
    first = items[0]
    if _are_numbers(items):
        return hash(tuple(items))
    try:
        if type(first) is tuple and _are_numbers(chain.from_iterable(items)):
            return hash(tuple(items))
        if type(first) is torch.Tensor:
            items = [item.tolist() for item in items]
        return _bytes_hash(marshal.dumps(items, 0))  # type: ignore[arg-type]  # it refuses what has no plain value
    except (TypeError, ValueError, AttributeError):
        say_if_unseen(first)
        return number_of(items)


def _are_numbers(items: Iterable[Any]) -> bool:
    """Return whether all are plain whole numbers: then so is their sum, which takes less time than to look at each."""
    try:
        with np.errstate(over="ignore"):
            return type(sum(items)) in _NUMBERS
    except Exception:  # noqa: BLE001 - objects of the user's may raise anything where they are added
        return False


def _bytes_hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
