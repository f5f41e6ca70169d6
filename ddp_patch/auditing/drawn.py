"""What the ranks of a made-up world were given, coded as numbers."""

import hashlib
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_patch.orders.fingerprint import fingerprint

__all__ = [
    "Coding",
    "EpochDraws",
    "Identity",
    "Numbers",
    "RankDraws",
    "Units",
    "identities",
    "joined",
    "narrow",
    "signature",
]


Numbers: TypeAlias = NDArray[np.integer[Any]]
Units: TypeAlias = Literal["samples", "batches"]
# An index; or a hash of any other key or sample, and its text to show to people.
Identity: TypeAlias = int | tuple[str, str]


def identities(items: Sequence[Any], by_value: bool = False) -> list[Identity]:
    """Return what tells items from others.

    Args:
        items: The items.
        by_value: Whether they are samples, which are no indices even where they are whole numbers.
    """
    if not by_value and set(map(type, items)) == {int} and min(items) >= 0 and max(items) < 2**63:
        return list(items)
    return [_identity(item, by_value) for item in items]


def _identity(item: Any, by_value: bool) -> Identity:
    number = item.item() if isinstance(item, torch.Tensor) and item.ndim == 0 else item
    is_index = isinstance(number, int | np.integer) and not isinstance(number, bool) and 0 <= number < 2**63
    return int(number) if is_index and not by_value else (fingerprint([item]), reprlib.repr(item))


class Coding:
    """Give every identity a number: an index is its own number, any other the next negative one.

    Examples:
        >>> coding = Coding()
        >>> coding.codes(identities([3, "a.jpg", 3, "b.jpg", "a.jpg"]))
        [3, -1, 3, -2, -1]
        >>> coding.name(-2)
        "'b.jpg'"
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by hash, in the order of their numbers
        self._numbers: dict[str, int] = {}

    def codes(self, found: Sequence[Identity]) -> list[int]:
        """Return the numbers of identities."""
        return [each if isinstance(each, int) else self._number(*each) for each in found]

    def name(self, code: int) -> str:
        """Return an item as text to show to people."""
        return str(code) if code >= 0 else list(self._names.values())[-1 - code]

    def adopt(self, other: "Coding", codes: Numbers) -> Numbers:
        """Translate the numbers of another coding, such as another process's, to this one's."""
        own = np.array([self._number(*pair) for pair in other._names.items()] or [0])
        return np.where(codes >= 0, codes, own[np.clip(-1 - codes, 0, len(own) - 1)])

    def _number(self, key: str, name: str) -> int:
        self._names.setdefault(key, name)
        return self._numbers.setdefault(key, -1 - len(self._numbers))


def narrow(numbers: Sequence[int]) -> Numbers:
    """Return whole numbers as an array, in 32 bits where they fit."""
    codes, bounds = np.array(numbers, np.int64), np.iinfo(np.int32)
    fits = not len(codes) or (codes.min() >= bounds.min and codes.max() <= bounds.max)
    return codes.astype(np.int32) if fits else codes


def joined(parts: Sequence[Numbers]) -> Numbers:
    """Return arrays, of which there may be none, one after the other."""
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class RankDraws:
    """Hold what one rank was given in one epoch.

    Attributes:
        items: Number of each item in the order given, shape (items,).
        sizes: Number of items in each step's batch, shape (steps,).
        ended: Whether the epoch came to its end; if not, these are its first items.
        lengths: What ``len(loader)`` returned before and after the epoch; None where it raised.
        error: The exception that ended the epoch, as text; None without one.
        asked: Whether an iterable dataset asked which worker it is in; seen of loaders that are not patched.
        by_worker: How many items came from each worker that reads an iterable dataset; empty for any other.
    """

    items: Numbers
    sizes: Numbers
    ended: bool
    lengths: tuple[int | None, int | None] = (None, None)
    error: str | None = None
    asked: bool = False
    by_worker: tuple[int, ...] = ()

    @property
    def batches(self) -> list[Numbers]:
        """Return the items of each step."""
        return np.split(self.items, np.cumsum(self.sizes)[:-1]) if len(self.sizes) else []

    @property
    def idle(self) -> tuple[int, ...]:
        """Return the numbers of the workers that gave nothing of an iterable dataset."""
        return tuple(worker for worker, given in enumerate(self.by_worker) if not given)

    def first_steps(self, steps: int) -> "RankDraws":
        """Return what the first ``steps`` steps gave."""
        sizes = self.sizes[:steps]
        return replace(self, items=self.items[: int(sizes.sum())], sizes=sizes, ended=False)

    def has_same_samples(self, other: "RankDraws") -> bool:
        """Tell whether another process was given the same samples, in whatever order."""
        return np.array_equal(np.sort(self.items), np.sort(other.items))


@dataclass(frozen=True, slots=True)
class EpochDraws:
    """Hold one epoch as every rank was given it, and as a single process would.

    Attributes:
        number: The epoch's number, from 0.
        ranks: What each rank was given, by rank.
        alone: What a single process would be given, its last incomplete batch included.
        units: Whether ranks share samples or whole batches.
        parts: How many units each part has that ranks share in rounds of its own; one where they share a stream.
        is_iterable: Whether items are samples read from an iterable dataset, not indices.
        unpatched: What the unpatched loader of an iterable dataset gives a single process; None where none is patched.
    """

    number: int
    ranks: Sequence[RankDraws]
    alone: RankDraws
    units: Units
    parts: tuple[int, ...]
    is_iterable: bool
    unpatched: RankDraws | None = None

    @property
    def is_sample(self) -> bool:
        """Tell whether only a part of the epoch was drawn."""
        return not all(drawn.ended for drawn in (*self.ranks, self.alone))

    @property
    def items(self) -> Numbers:
        """Return what all ranks were given, rank by rank."""
        return joined([drawn.items for drawn in self.ranks])

    def counted(self, drawn: RankDraws) -> int:
        """Return how many samples or batches there are in what a process was given."""
        return len(drawn.items if self.units == "samples" else drawn.sizes)

    @property
    def shards(self) -> list[int]:
        """Return how many samples or batches each rank got, by rank."""
        return [self.counted(drawn) for drawn in self.ranks]

    @property
    def expected(self) -> int:
        """Return how many samples or batches a single process would get."""
        return self.counted(self.alone)

    @property
    def filling(self) -> int:
        """Return how many units fill the last round of each part."""
        return sum(-length % len(self.ranks) for length in self.parts or (self.expected,))

    @property
    def steps(self) -> int:
        """Return how many steps the rank with the most steps makes."""
        return max(len(drawn.sizes) for drawn in self.ranks)

    @property
    def most_samples(self) -> int:
        """Return how many samples the rank with the most got."""
        return max(len(drawn.items) for drawn in self.ranks)

    @property
    def largest_batch(self) -> int:
        """Return how many samples the largest batch has."""
        return max(int(drawn.sizes.max(initial=1)) for drawn in (*self.ranks, self.alone))


# Hash this many items at once: converting them all would need twice the memory of an epoch.
_PIECE = 2**20


def signature(ranks: Sequence[RankDraws]) -> bytes:
    """Return a hash of what ranks were given: two epochs with one order have one hash."""
    running = hashlib.blake2b(digest_size=16)
    for drawn in ranks:
        running.update(b"%d:" % len(drawn.items))
        for start in range(0, len(drawn.items), _PIECE):
            running.update(drawn.items[start : start + _PIECE].astype(np.int64).tobytes())
    return running.digest()
