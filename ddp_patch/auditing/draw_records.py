"""What the ranks of a made-up world drew, coded as numbers."""

import hashlib
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_patch.orders.fingerprint import fingerprint

__all__ = ["Coding", "EpochDraws", "Numbers", "RankDraws", "Units", "Value", "narrow", "same_items", "signature"]


Numbers = NDArray[np.integer[Any]]
Units: TypeAlias = Literal["samples", "batches"]


@dataclass(frozen=True, slots=True)
class Value:
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
            self._number(key, reprlib.repr(item.value if isinstance(item, Value) else item))
        return self._codes[key]

    def _number(self, key: str, name: str) -> int:
        if key not in self._codes:
            self._codes[key] = -1 - len(self._names)
            self._names.append(name)
        return self._codes[key]


def _index(item: Any) -> int | None:
    """Return an item as the index that a dataset would see, or None if it is another kind of key."""
    if isinstance(item, torch.Tensor) and item.ndim == 0:
        item = item.item()
    is_index = isinstance(item, int | np.integer) and not isinstance(item, bool) and 0 <= item < 2**63
    return int(item) if is_index else None


def narrow(codes: Numbers) -> Numbers:
    """Return the numbers in 32 bits where they fit, otherwise as they are."""
    bounds = np.iinfo(np.int32)
    fits = not len(codes) or (codes.min() >= bounds.min and codes.max() <= bounds.max)
    return codes.astype(np.int32) if fits else codes


# Hash this many items at once: converting them all would need twice the memory of an epoch.
_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class RankDraws:
    """Hold what one rank drew in one epoch.

    Attributes:
        items: Number of each item in the order drawn, shape (items,).
        sizes: Number of items in each step's batch, shape (steps,).
        ended: Whether the epoch came to its end; if not, these are its first items.
        lengths: What ``len(loader)`` returned before and after the epoch; None where it raised.
        seconds: Time spent drawing, without the time spent recording.
        memory: Bytes by which the process grew while drawing; None where the system does not report it.
        error: The exception that ended the epoch, as text; None without one.
        asked: Whether an iterable dataset asked which worker it is in.
        idle: Numbers of the workers that gave nothing of an iterable dataset.
        parts: How long each part of the stream is that ranks share by itself; empty where they share one stream.
    """

    items: Numbers
    sizes: Numbers
    ended: bool
    lengths: tuple[int | None, int | None] = (None, None)
    seconds: float = 0.0
    memory: int | None = None
    error: str | None = None
    asked: bool = False
    idle: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()

    @property
    def batches(self) -> list[Numbers]:
        """Return the items of each step."""
        return np.split(self.items, np.cumsum(self.sizes)[:-1]) if len(self.sizes) else []

    def first_steps(self, steps: int) -> "RankDraws":
        """Return what the first ``steps`` steps drew."""
        sizes = self.sizes[:steps]
        return replace(self, items=self.items[: int(sizes.sum())], sizes=sizes, ended=False)


def same_items(first: RankDraws, second: RankDraws) -> bool:
    """Tell whether two processes drew the same samples, in whatever order."""
    return np.array_equal(np.sort(first.items), np.sort(second.items))


@dataclass(frozen=True, slots=True)
class EpochDraws:
    """Hold one epoch as every rank drew it, and as a single process would.

    Attributes:
        number: The epoch's number, from 0.
        ranks: What each rank drew, by rank.
        alone: What a single process would draw, its last incomplete batch included.
        units: Whether ranks shard samples or whole batches.
        is_iterable: Whether items are samples read from an iterable dataset, not indices.
        unpatched: What the unpatched loader of an iterable dataset gives a single process; None where none is patched.
    """

    number: int
    ranks: Sequence[RankDraws]
    alone: RankDraws
    units: Units
    is_iterable: bool
    unpatched: RankDraws | None = None

    @property
    def is_sample(self) -> bool:
        """Tell whether only a part of the epoch was drawn."""
        return not all(drawn.ended for drawn in (*self.ranks, self.alone))

    @property
    def expected(self) -> int:
        """Return how many samples or batches a single process would get."""
        return len(self.alone.items) if self.units == "samples" else len(self.alone.sizes)

    @property
    def parts(self) -> tuple[int, ...]:
        """Return how many units each part has that ranks share in rounds of its own; one where they share a stream."""
        return self.alone.parts or (self.expected,)

    @property
    def filling(self) -> int:
        """Return how many units fill the last round of each part."""
        return sum(-length % len(self.ranks) for length in self.parts)

    @property
    def shards(self) -> list[int]:
        """Return how many samples or batches each rank got, by rank."""
        return [len(drawn.items if self.units == "samples" else drawn.sizes) for drawn in self.ranks]

    @property
    def steps(self) -> int:
        """Return how many steps the rank with the most steps makes."""
        return max(len(drawn.sizes) for drawn in self.ranks)

    @property
    def most_samples(self) -> int:
        """Return how many samples the rank with the most got."""
        return max(len(drawn.items) for drawn in self.ranks)


def signature(ranks: Sequence[RankDraws]) -> bytes:
    """Return a hash of what ranks drew: two epochs with one order have one hash."""
    running = hashlib.blake2b(digest_size=16)
    for drawn in ranks:
        running.update(b"%d:" % len(drawn.items))
        for start in range(0, len(drawn.items), _PIECE):
            running.update(drawn.items[start : start + _PIECE].astype(np.int64).tobytes())
    return running.digest()
