"""The fingerprint of a pass, taken as its stream is drawn: what all ranks drew can be compared up to equal counts."""

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from ddp_patch.orders.fingerprint import COMPARED, fingerprint, is_known
from ddp_patch.orders.orders import Order

__all__ = ["Mark", "PassFingerprint"]

logger: logging.Logger = logging.getLogger("ddp_patch")

# How many items had been drawn, and a hash of those that were looked at up to there.
Mark: TypeAlias = tuple[int, int]

# So many items are all looked at: of plain indices, of others, and of each later chunk of a stream.
_FIRST_PLAIN, _FIRST, _OF_CHUNK = 1024, 256, 16
# A mark is made when this part more was drawn since the one before, so that there are few.
_GROWTH = 1.25
_END = -7  # where an item's position would stand
_UNSEEN: set[type] = set()


class PassFingerprint:
    """Hashes the first items of a stream, a few of each later chunk, and how many there were.

    Hashes of whole numbers are Python's own, which are the same in all processes and take the least time.

    Attributes:
        marks: The fingerprints at growing counts, the last of them after the end once that was found.

    Examples:
        >>> one, other = PassFingerprint(), PassFingerprint()
        >>> one.add(0, [3, 1, 2])
        >>> other.add(0, [3, 2, 1])
        >>> one.marks[0][0], one.marks == other.marks
        (3, False)
    """

    def __init__(self) -> None:
        self.marks: list[Mark] = []
        self._hash, self._next, self._first = 0, 1, _FIRST_PLAIN

    def wanted(self, start: int, *, is_begun: bool) -> int:
        """Return how many items of a chunk to look at, from ``start`` on; fewer if it has looked at some already."""
        return max(self._first - start, 0 if is_begun else _OF_CHUNK)

    def add(self, start: int, items: Sequence[Any]) -> None:
        """Add items that stand at ``start`` and after."""
        if not items:
            return
        plain = _plain_hash(items)
        if plain is None:
            self._first = _FIRST
            _say_if_unseen(items[0])
            plain = int(fingerprint(items)[:15], 16)
        self._hash = hash((self._hash, start, plain))
        until = start + len(items)
        if until >= self._next or start < self._first:
            self._mark(until)

    def add_order(self, order: Order) -> None:
        """Add some items of an order that can be looked up, evenly spread, and its length."""
        free = order.length if order.free is None else min(order.free, order.length)
        self.add(0, list(order.at(range(0, free, max(1, free // COMPARED)))))
        self.end(order.length)

    def add_window(self, start: int, order: "np.ndarray[Any, Any]") -> None:
        """Add the order of a balanced window."""
        self._hash = hash((self._hash, start, int(fingerprint([order])[:15], 16)))
        self._mark(start + len(order))

    def end(self, count: int) -> None:
        """Add how many items the stream had."""
        self._hash = hash((self._hash, _END, count))
        self._mark(count)

    def _mark(self, count: int) -> None:
        self.marks.append((count, self._hash))
        self._next = int(count * _GROWTH) + 1


def _plain_hash(items: Sequence[Any]) -> int | None:
    """Return a hash of indices, or of lists of them; None if they are anything else."""
    kinds = set(map(type, items))
    if kinds == {int}:
        return hash(tuple(items))
    if kinds <= {list, tuple} and set(map(type, chain.from_iterable(items))) <= {int}:
        return hash(tuple(map(tuple, items)))
    return None


def _say_if_unseen(item: Any) -> None:
    """Log, once, that items of a class count by their class alone."""
    if not is_known(item) and type(item) not in _UNSEEN:
        _UNSEEN.add(type(item))
        logger.info(
            "Items of a sampler are not compared between ranks, but by their class: a %s has no value that is the same "
            "in every process. Let it be a dataclass, or give indices.",
            type(item).__name__,
        )
