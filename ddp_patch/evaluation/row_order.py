"""Where the rows of all ranks go: each comes after those with smaller keys."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Keys", "RowOrder", "SampleOrder", "array_of", "joined", "keys_of"]

# The keys of a rank's rows, in order. No two rows of any ranks have the same.
Keys: TypeAlias = "range | np.ndarray[Any, Any]"


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


def keys_of(runs: Iterable[range]) -> Keys:
    """Return keys that come in runs: as one, or as an array.

    Examples:
        >>> keys_of([range(1, 5, 3), range(7, 9, 3)]), keys_of([range(2), range(5, 6)]).tolist()
        (range(1, 8, 3), [0, 1, 5])
    """
    rest = joined(runs)
    first, second = next(rest, range(0)), next(rest, None)
    return first if second is None else np.fromiter(chain.from_iterable(chain([first, second], rest)), np.int64)


def array_of(keys: Keys) -> np.ndarray[Any, Any]:
    """Return keys as an array."""
    return np.arange(keys.start, keys.stop, keys.step) if isinstance(keys, range) else keys


class RowOrder:
    """The order of rows with these keys, share by share. Where no key is left out, it takes no memory of its own.

    Examples:
        >>> [places.tolist() for places in RowOrder([range(10, 15, 2), np.array([13, 11])]).places()]
        [[0, 2, 4], [3, 1]]
        >>> [places.tolist() for places in RowOrder([np.array([0, 1, 8]), range(5, 6)]).places()]
        [[0, 1, 3], [2]]
    """

    def __init__(self, keys: Sequence[Keys]) -> None:
        self.keys = keys
        self.rows: int = sum(map(len, keys))
        ends = [(run[0], run[-1]) if isinstance(run, range) else (run.min(), run.max()) for run in keys if len(run)]
        self._first = int(min((first for first, _ in ends), default=0))
        is_dense = max((last for _, last in ends), default=-1) - self._first + 1 == self.rows
        self._sorted = None if is_dense else np.sort(np.concatenate([*map(array_of, keys)]))

    def places(self, begin: int = 0, end: int | None = None) -> list[np.ndarray[Any, Any]]:
        """Return where these rows of each share go."""
        runs = [array_of(run[begin:end]) for run in self.keys]
        if self._sorted is None:
            return [run - self._first for run in runs]
        return [np.searchsorted(self._sorted, run) for run in runs]


class SampleOrder:
    """The order of the samples of whole batches.

    Args:
        batches: The order of the batches.
        sizes: How many samples each of a share's batches has, share by share.

    Attributes:
        rows: How many samples there are.
        sizes: How many each batch has, in order.

    Examples:
        >>> samples = SampleOrder(RowOrder([range(0, 3, 2), range(1, 2)]), [np.array([2, 1]), np.array([3])])
        >>> [places.tolist() for places in samples.places()], samples.sizes.tolist()
        ([[0, 1, 5], [2, 3, 4]], [2, 3, 1])
    """

    def __init__(self, batches: RowOrder, sizes: Sequence[np.ndarray[Any, Any]]) -> None:
        where = batches.places()
        self.sizes: np.ndarray[Any, Any] = np.zeros(batches.rows, np.int64)
        for places, own in zip(where, sizes, strict=True):
            self.sizes[places] = own
        self.rows: int = int(self.sizes.sum())
        begins = np.cumsum(self.sizes) - self.sizes
        self._places = [
            np.repeat(begins[places] - np.cumsum(own) + own, own) + np.arange(own.sum())
            for places, own in zip(where, sizes, strict=True)
        ]

    def places(self, begin: int = 0, end: int | None = None) -> list[np.ndarray[Any, Any]]:
        """Return where these rows of each share go."""
        return [places[begin:end] for places in self._places]
