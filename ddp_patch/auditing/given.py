"""What the ranks of a made-up world were given, as numbers, and how it compares with what one process is given."""

import hashlib
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_patch.orders.digest import fingerprint

__all__ = [
    "Coding",
    "Coverage",
    "EpochGiven",
    "Identity",
    "Numbers",
    "RankGiven",
    "Units",
    "counts_of",
    "coverage",
    "dense",
    "identities",
    "joined",
    "signature",
]


Numbers: TypeAlias = NDArray[np.integer[Any]]
Units: TypeAlias = Literal["samples", "batches"]
# A whole number; or a hash of any other key or sample, and its text to show to people.
Identity: TypeAlias = int | tuple[str, str]


def identities(items: Sequence[Any]) -> list[Identity]:
    """Return what tells items from others: indices, or samples where no indices are known."""
    if set(map(type, items)) == {int} and min(items) >= 0 and max(items) < 2**63:
        return list(items)
    return list(map(_identity, items))


def _identity(item: Any) -> Identity:
    number = item.item() if isinstance(item, torch.Tensor) and item.ndim == 0 else item
    is_index = isinstance(number, int | np.integer) and not isinstance(number, bool) and 0 <= number < 2**63
    return int(number) if is_index else (fingerprint([item]), reprlib.repr(item))


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


def joined(parts: Sequence[Numbers]) -> Numbers:
    """Return arrays, of which there may be none, one after the other."""
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class RankGiven:
    """Hold what one rank was given in one epoch.

    Attributes:
        items: Number of each item in the order given, shape (items,).
        sizes: Number of items in each step's batch, shape (steps,).
        ended: Whether the epoch came to its end; if not, these are its first items.
        lengths: What ``len(loader)`` returned before and after the epoch; None where it raised.
        error: The exception that ended the epoch, as text; None without one.
        workers: Which worker made each step's batch, shape (steps,).
        parts: How many items each worker's part of an iterable dataset has, where a patched loader's workers read a
            part each; empty where they do not.
    """

    items: Numbers
    sizes: Numbers
    ended: bool
    lengths: tuple[int | None, int | None] = (None, None)
    error: str | None = None
    workers: Numbers | None = None
    parts: tuple[int, ...] = ()

    @property
    def batches(self) -> list[Numbers]:
        """Return the items of each step."""
        return np.split(self.items, np.cumsum(self.sizes)[:-1]) if len(self.sizes) else []

    def first_steps(self, steps: int) -> "RankGiven":
        """Return what the first ``steps`` steps gave."""
        sizes = self.sizes[:steps]
        return replace(self, items=self.items[: int(sizes.sum())], sizes=sizes, ended=False)

    def has_same_samples(self, other: "RankGiven") -> bool:
        """Tell whether another process was given the same samples, in whatever order."""
        return len(self.items) == len(other.items) and np.array_equal(np.sort(self.items), np.sort(other.items))

    def read_once(self) -> "RankGiven":
        """Return what one worker was given if all workers were given the same, in whatever order.

        Workers that all read the whole of an iterable dataset have no more to share than one of them.

        Examples:
            >>> steps, workers = np.ones(4, int), np.array([0, 1, 0, 1])
            >>> RankGiven(np.array([5, 5, 6, 6]), steps, True, workers=workers).read_once().items.tolist()
            [5, 6]
        """
        if self.workers is None or not len(self.workers) or self.error is not None:
            return self
        of_item, first = np.repeat(self.workers, self.sizes), self.workers[0]
        sorted_items = [np.sort(self.items[of_item == worker]) for worker in range(int(self.workers.max()) + 1)]
        if not all(np.array_equal(sorted_items[0], other) for other in sorted_items):
            return self
        return replace(self, items=self.items[of_item == first], sizes=self.sizes[self.workers == first], workers=None)


@dataclass(frozen=True, slots=True)
class EpochGiven:
    """Hold one epoch as every rank was given it, and as a single process would.

    Attributes:
        number: The epoch's number, from 0.
        ranks: What each rank was given, by rank.
        alone: What a single process would be given, its last incomplete batch included.
        units: Whether ranks share samples or whole batches.
        parts: How many units each part has that ranks share in rounds of its own; empty where they share one stream.
        is_iterable: Whether items are samples read from an iterable dataset, not indices.
    """

    number: int
    ranks: Sequence[RankGiven]
    alone: RankGiven
    units: Units
    parts: tuple[int, ...]
    is_iterable: bool

    @property
    def is_sample(self) -> bool:
        """Tell whether only a part of the epoch was drawn."""
        return not all(given.ended for given in (*self.ranks, self.alone))

    @property
    def shares(self) -> list[int]:
        """Return how many samples or batches each rank got, by rank."""
        return [len(given.items if self.units == "samples" else given.sizes) for given in self.ranks]

    @property
    def expected(self) -> int:
        """Return how many samples or batches a single process would get."""
        return len(self.alone.items if self.units == "samples" else self.alone.sizes)

    @property
    def filling(self) -> int:
        """Return how many units fill the last round of each part."""
        return sum(-length % len(self.ranks) for length in self.parts or (self.expected,))

    @property
    def largest_batch(self) -> int:
        """Return how many samples the largest batch has."""
        return max(int(given.sizes.max(initial=1)) for given in (*self.ranks, self.alone))

    def coverage(self, units: Units) -> "Coverage | None":
        """Count samples or batches; None where they cannot be compared.

        They cannot where all samples are equal, where an iterable dataset makes others in each pass, and in a part of
        an epoch in which one process repeats some. Batches are equal if they hold the same samples in the same order.
        """
        every = [self.alone, *self.ranks]
        expected, *shards = [each.items for each in every] if units == "samples" else _numbered_batches(every)
        if self.is_constant or self._is_made_anew():
            return None
        if not self.is_sample:
            return coverage(expected, shards)
        is_distinct = len(np.unique(expected)) == len(expected)
        return coverage(np.unique(joined(shards)), shards) if is_distinct else None

    @property
    def is_constant(self) -> bool:
        """Tell whether all samples are equal, which indices of different samples never are."""
        items = self.alone.items
        is_by_value = len(items) > 1 and (self.is_iterable or items[0] < 0)
        return bool(is_by_value) and all(bool((each.items == items[0]).all()) for each in (self.alone, *self.ranks))

    def _is_made_anew(self) -> bool:
        """Tell whether ranks got hardly any sample that one process got of an iterable dataset, if none is a number.

        Rank 0 does not count: it starts with the random states of the single process, and may make the same samples.
        """
        got = joined([given.items for given in self.ranks[1:]])
        if not self.is_iterable or self.is_sample or not len(self.alone.items) or got.max(initial=-1) >= 0:
            return False
        return bool(10 * np.count_nonzero(np.isin(got, self.alone.items)) < len(got))


def _numbered_batches(every: Sequence[RankGiven]) -> list[Numbers]:
    """Number the batches of all that was given, so that equal batches have one number."""
    known: dict[bytes, int] = {}

    def number(batch: Numbers) -> int:
        return known.setdefault(batch.astype(np.int64).tobytes(), len(known))

    return [np.array([number(batch) for batch in each.batches], np.int64) for each in every]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Tell which things all ranks together got too seldom or too often, compared with a single process.

    Attributes:
        missing: Numbers of what was got too seldom, each once.
        lacking: By how many times, in total.
        repeated: Numbers of what was seen too often, each once.
        extra: By how many times, in total.
        foreign: Numbers of what a single process never gets, each once.
        unexpected: How many times it was got, in total.
        distinct: How many different things a single process gets.
    """

    missing: Numbers
    lacking: int
    repeated: Numbers
    extra: int
    foreign: Numbers
    unexpected: int
    distinct: int


def coverage(expected: Numbers, shards: Sequence[Numbers]) -> Coverage:
    """Count what the shards hold against what is expected.

    Examples:
        >>> found = coverage(np.array([0, 1, 2]), [np.array([0, 2]), np.array([2, 0])])
        >>> found.missing.tolist(), found.repeated.tolist(), found.extra
        ([1], [0, 2], 2)
    """
    names, (counted, got) = dense([expected, joined(shards)])
    difference = counts_of(counted, len(names))
    is_expected = difference > 0
    difference -= counts_of(got, len(names))
    missing, repeated = np.flatnonzero(difference > 0), np.flatnonzero((difference < 0) & is_expected)
    foreign = np.flatnonzero((difference < 0) & ~is_expected)
    lacking, extra, unexpected = (abs(int(difference[where].sum())) for where in (missing, repeated, foreign))
    distinct = int(np.count_nonzero(is_expected))
    return Coverage(names[missing], lacking, names[repeated], extra, names[foreign], unexpected, distinct)


def dense(arrays: Sequence[Numbers]) -> tuple[Numbers, list[Numbers]]:
    """Renumber what arrays hold, from 0 and with few gaps, so that a table indexed by number is small.

    Returns:
        The old number of each new one, shape (numbers,); and the arrays in new numbers, in their shapes.

    Examples:
        >>> names, (first, second) = dense([np.array([10**15, 7]), np.array([7])])
        >>> names.tolist(), first.tolist(), second.tolist()
        ([7, 1000000000000000], [1, 0], [0])
    """
    bounds = [int(bound) for array in arrays if len(array) for bound in (array.min(), array.max())]
    low, high = min(bounds, default=0), max(bounds, default=-1)
    if high - low < 4 * sum(map(len, arrays)) + 1024:  # dense enough already, as indices of a dataset are
        names = np.arange(low, high + 1, dtype=np.result_type(*arrays))
        return names, [array - low if low else array for array in arrays]
    names, places = np.unique(np.concatenate(arrays), return_inverse=True)
    return names, np.split(places, np.cumsum([len(array) for array in arrays])[:-1])


# Count this many items at once: bincount converts its argument to 64 bits.
_PIECE = 2**21


def counts_of(items: Numbers, span: int) -> Numbers:
    """Return how often each number below ``span`` occurs, shape (span,)."""
    counts = np.zeros(span, np.int32)
    for start in range(0, len(items), _PIECE):
        counts += np.bincount(items[start : start + _PIECE], minlength=span).astype(np.int32)
    return counts


def signature(ranks: Sequence[RankGiven]) -> bytes:
    """Return a hash of what ranks were given: two epochs with one order have one hash."""
    running = hashlib.blake2b(digest_size=16)
    for given in ranks:
        running.update(b"%d:" % len(given.items))
        running.update(np.ascontiguousarray(given.items, np.int64).data)
    return running.digest()
