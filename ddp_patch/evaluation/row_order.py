"""Where the rows of all ranks go: each comes after those with smaller keys."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Place", "Placed", "RowKeys", "array_of", "joined", "keys_of", "placed", "placed_samples"]

# Numbers that follow each other in a rank's rows: keys, or places.
Place: TypeAlias = "range | np.ndarray[Any, Any]"

# The keys of a rank's rows, in order: few ascending runs, or one array. No two rows of any ranks have the same.
RowKeys: TypeAlias = Sequence[Place]

_MOST_RUNS = 64  # an array needs less memory than many more
_BLOCK = 2**20  # how many keys are compared at once
_BATCHES = 2**10  # the samples of how many batches are placed at once


def joined(runs: Iterable[range]) -> Iterator[range]:
    """Join runs of numbers wherever one continues the one before.

    Examples:
        >>> list(joined([range(0, 3, 2), range(4, 7, 2), range(0), range(9, 10), range(10, 11)]))
        [range(0, 7, 2), range(9, 11)]
    """
    latest = range(0)
    for run in filter(None, runs):
        step = run[0] - latest[-1] if latest else 0
        if step > 0 and all(len(each) == 1 or each.step == step for each in (latest, run)):
            latest = range(latest[0], run[-1] + 1, step)
        else:
            yield from filter(None, [latest])
            latest = run
    yield from filter(None, [latest])


def keys_of(runs: Iterable[range]) -> RowKeys:
    """Return keys that come in runs: as few runs, or as an array.

    Examples:
        >>> keys_of([range(1, 5, 3), range(7, 9, 3)])
        [range(1, 8, 3)]
    """
    rest = joined(runs)
    first = list(islice(rest, _MOST_RUNS + 1))
    if len(first) <= _MOST_RUNS:
        return first
    return [np.fromiter(chain.from_iterable(chain(first, rest)), np.int64)]


def array_of(run: Place) -> np.ndarray[Any, Any]:
    """Return the numbers of a run as an array."""
    return np.arange(run.start, run.stop, run.step) if isinstance(run, range) else run


def _nowhere(share: int) -> Iterator[Place]:
    return iter(())


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the rows of all ranks go.

    Attributes:
        counts: How many rows each share has.
        places: Returns where those of a share go, in order. Nobody asks on a rank that does not get them.
    """

    counts: Sequence[int]
    places: Callable[[int], Iterator[Place]] = _nowhere

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return sum(self.counts)


def placed(keys: Sequence[RowKeys]) -> Placed:
    """Return where rows with these keys go, share by share.

    Examples:
        >>> dense = placed([[range(10, 15, 2)], [np.array([13, 11])]])
        >>> list(dense.places(0)), [place.tolist() for place in dense.places(1)]
        ([range(0, 5, 2)], [[3, 1]])
        >>> [place.tolist() for place in placed([[range(2), range(8, 9)], [range(5, 6)]]).places(0)]
        [[0, 1], [3]]
    """
    order = _KeyOrder([run for of_share in keys for run in of_share if len(run)])
    counts = [sum(map(len, of_share)) for of_share in keys]
    return Placed(counts, lambda share: chain.from_iterable(map(order.places, keys[share])))


class _KeyOrder:
    """Tells how many of some keys are smaller than another one."""

    def __init__(self, runs: RowKeys) -> None:
        rows = sum(map(len, runs))
        ends = [(run[0], run[-1]) if isinstance(run, range) else (int(run.min()), int(run.max())) for run in runs]
        self._first = min((first for first, _ in ends), default=0)
        self._is_dense = max((last for _, last in ends), default=-1) - self._first + 1 == rows
        arrays = [] if self._is_dense else map(array_of, runs)
        self._sorted = np.sort(np.concatenate([np.empty(0, np.int64), *arrays]))

    def places(self, run: Place) -> Iterator[Place]:
        """Yield the places of some rows, by their keys."""
        if self._is_dense and isinstance(run, range):
            yield range(run.start - self._first, run.stop - self._first, run.step)
            return
        for start in range(0, len(run), _BLOCK):
            keys = array_of(run[start : start + _BLOCK])
            yield keys - self._first if self._is_dense else np.searchsorted(self._sorted, keys)


def placed_samples(batches: Placed, sizes: Sequence[Sequence[int]]) -> tuple[Placed, Sequence[int]]:
    """Return where the samples of whole batches go, and how many each batch has, in order.

    Args:
        batches: Where the batches go.
        sizes: How many samples each of a share's batches has, share by share.

    Examples:
        >>> samples, in_order = placed_samples(placed([[range(0, 3, 2)], [range(1, 2)]]), [[2, 1], [3]])
        >>> [place.tolist() for place in samples.places(0)], in_order
        ([[0, 1, 5]], [2, 3, 1])
    """
    in_order = np.zeros(batches.rows, np.int64)
    for share, of_share in enumerate(sizes):
        in_order[np.concatenate([np.empty(0, np.int64), *map(array_of, batches.places(share))])] = of_share
    begins = np.cumsum(in_order) - in_order

    def places(share: int) -> Iterator[Place]:
        for run in batches.places(share):
            for start in range(0, len(run), _BATCHES):
                block = array_of(run[start : start + _BATCHES])
                own = in_order[block]
                yield np.repeat(begins[block] - np.cumsum(own) + own, own) + np.arange(own.sum())

    return Placed(list(map(sum, sizes)), places), in_order.tolist()
