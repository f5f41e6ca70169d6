"""What the main process and the workers tell each other, and how a worker reads the dataset."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import get_worker_info

from ddp_patch.compat import worker_info_told

__all__ = ["Board", "Ends", "read_as", "this_worker"]

T = TypeVar("T")

# Remember the epochs of so many passes: iterators may live side by side.
_LATEST = 64


class Board:
    """What the main process and its workers tell each other, in memory that they share.

    The main process writes which epoch each of the latest passes is over, and how many states were loaded. A worker
    writes how many items a pass had, and their fingerprint, when it came to its end.
    """

    def __init__(self) -> None:
        self._latest = _shared(1)
        self._epochs = _shared(_LATEST)
        self._ends = _shared(_LATEST, 2)
        self._loads = _shared(1)

    @property
    def latest_pass(self) -> int:
        """The number of the latest pass that was begun; -1 before the first."""
        return int(self._latest)

    @property
    def loads(self) -> int:
        """The number of the latest state that was loaded; -1 before the first."""
        return int(self._loads)

    def load(self) -> int:
        """Write that another state was loaded; return its number."""
        self._loads += 1
        return self.loads

    def begin(self, number: int, epoch: int) -> None:
        """Write which epoch pass ``number`` is over."""
        self._epochs[number % _LATEST] = epoch
        self._ends[number % _LATEST] = -1
        self._latest[0] = number

    def epoch_of(self, number: int) -> int | None:
        """Return which epoch pass ``number`` is over; None if no pass was begun."""
        epoch = int(self._epochs[number % _LATEST])
        return epoch if epoch >= 0 else None

    def end(self, number: int, length: int) -> None:
        """Write that pass ``number`` had so many items."""
        self._ends[number % _LATEST, 0] = length

    def end_verified(self, number: int, length: int, order: str) -> None:
        """Write that pass ``number`` had so many items, with this fingerprint."""
        self._ends[number % _LATEST] = torch.tensor([length, int(order[:15], 16)])

    def length(self, number: int) -> int | None:
        """Return how many items pass ``number`` had, if it came to its end."""
        length = int(self._ends[number % _LATEST, 0])
        return length if length >= 0 else None

    def facts(self, number: int) -> dict[str, object]:
        """Return what pass ``number`` has drawn, as facts to compare; nothing if it did not come to its end."""
        drawn, order = self._ends[number % _LATEST].tolist()
        return {"drawn in the epoch before": drawn, "order of the epoch before": order} if order >= 0 else {}


class Ends:
    """How many batches each worker made in its latest pass, in memory that the main process and its workers share.

    Args:
        workers: How many workers there are; with 0, the main process reads.
    """

    def __init__(self, workers: int) -> None:
        self._ends = _shared(max(1, workers), 2)

    def write(self, worker: int, number: int, batches: int) -> None:
        """Write that a worker made so many batches in pass ``number``."""
        self._ends[worker] = torch.tensor([number, batches])

    def of(self, number: int) -> list[int]:
        """Return how many each worker made in pass ``number``; -1 for those that have not come to its end."""
        return [batches if passed == number else -1 for passed, batches in self._ends.tolist()]


def _shared(*shape: int) -> torch.Tensor:
    """Return a tensor of -1 in memory that the workers share."""
    tensor = torch.full(shape, -1, dtype=torch.int64, device="cpu")
    return tensor.share_memory_()  # type: ignore[no-any-return,no-untyped-call]  # torch leaves it unannotated


def this_worker() -> tuple[int, int]:
    """Return which worker of how many this is; the main process is the only one."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def read_as(info: Any, dataset: Iterable[T]) -> Iterator[T]:
    """Iterate the dataset while ``get_worker_info()`` tells it ``info``."""
    with worker_info_told(info):
        iterator = iter(dataset)
    while True:
        with worker_info_told(info):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
