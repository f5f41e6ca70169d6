"""What the main process and its workers share in memory."""

import math
from collections.abc import Sequence
from typing import Literal

import torch

from ddp_patch.orders.fingerprint import fingerprint

__all__ = ["Ends", "SharedWorkerState", "shared_arrays"]


# Remember the epochs of this many passes: iterators may live side by side.
_LATEST = 64
_UNKNOWN, _ONE_STREAM = -1, -2


class SharedWorkerState:
    """What the main process and its workers report to each other, in shared memory.

    The main process writes which epoch each of the latest passes is over, and how many states were loaded. A worker
    writes whose part of the dataset it reads, and at the end how many items that had, and their fingerprint.

    Args:
        readers: How many workers read the dataset; 1 where the main process does.
    """

    def __init__(self, readers: int = 1) -> None:
        self.readers: int = readers
        of_each = (_LATEST, readers)
        self._ends, self._offsets, self._roles, self._epochs, self._latest, self._loads = shared_arrays(
            (*of_each, 2), (*of_each, 2), of_each, (_LATEST,), (1,), (1,)
        )

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
        for noted in (self._roles, self._ends):
            noted[number % _LATEST] = -1
        self._latest[0] = number

    def epoch_of(self, number: int) -> int | None:
        """Return which epoch pass ``number`` is over; None if no pass was begun."""
        epoch = int(self._epochs[number % _LATEST])
        return epoch if epoch >= 0 else None

    def note_role(self, number: int, reader: int, role: int | None) -> None:
        """Write which worker's part a reader reads in pass ``number``; None if all read one stream."""
        self._roles[number % _LATEST, reader] = _ONE_STREAM if role is None else role

    def ways(self, number: int) -> set[Literal["stream", "parts"]]:
        """Return how the readers of pass ``number`` read, as far as they wrote it: all one stream, or each a part."""
        roles = self._roles[number % _LATEST].tolist()
        return {"stream" if role == _ONE_STREAM else "parts" for role in roles if role != _UNKNOWN}

    def first_role(self, number: int) -> int:
        """Return whose part the first reader of pass ``number`` reads; each next one reads the next."""
        found = self._roles[number % _LATEST].tolist()
        return next(((role - reader) % self.readers for reader, role in enumerate(found) if role >= 0), 0)

    def note_offset(self, number: int, reader: int, items: int) -> None:
        """Write that a reader leaves out this many items in pass ``number`` because another package's loader resumed.

        A worker may write it before the pass has begun.
        """
        self._offsets[number % _LATEST, reader] = torch.tensor([number, items])

    def offset(self, number: int) -> int:
        """Return how many items the reader of pass ``number`` leaves out that leaves out most, as above."""
        return max((items for noted, items in self._offsets[number % _LATEST].tolist() if noted == number), default=0)

    def end(self, number: int, role: int, length: int, order: str | None = None) -> None:
        """Write how many items the reader of a role found in pass ``number``, and their fingerprint if it was taken."""
        digits = -1 if order is None else int(order[:15], 16)
        self._ends[number % _LATEST, role] = torch.tensor([length, digits])

    def lengths(self, number: int) -> Sequence[int | None]:
        """Return how many items the reader of each role found in pass ``number``; None before it came to the end."""
        return [length if length >= 0 else None for length in self._ends[number % _LATEST, :, 0].tolist()]

    def facts(self, number: int) -> dict[str, object]:
        """Return what pass ``number`` has drawn, as facts to compare; nothing before all readers came to the end."""
        drawn, orders = self._ends[number % _LATEST].T.tolist()
        if min(orders) < 0:
            return {}
        # Readers of one stream have all drawn it.
        is_split = self.ways(number) == {"parts"}
        order = fingerprint(orders) if is_split else orders[0]
        return {"drawn in the epoch before": sum(drawn) if is_split else drawn[0], "order of the epoch before": order}


class Ends:
    """How many batches each worker made in its latest pass, in memory that the main process and its workers share.

    Args:
        readers: How many workers there are; 1 where the main process reads.
    """

    def __init__(self, readers: int) -> None:
        (self._ends,) = shared_arrays((readers, 2))

    def write(self, worker: int, number: int, batches: int) -> None:
        """Write that a worker made this many batches in pass ``number``."""
        self._ends[worker] = torch.tensor([number, batches])

    def of(self, number: int) -> list[int]:
        """Return how many each worker made in pass ``number``; -1 for those that have not come to its end."""
        return [batches if passed == number else -1 for passed, batches in self._ends.tolist()]


def shared_arrays(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return tensors of -1 in memory that the workers share; all in one file, of which a process may have few."""
    sizes = list(map(math.prod, shapes))
    together = torch.full((sum(sizes),), -1, dtype=torch.int64, device="cpu")
    together.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return [part.view(shape) for part, shape in zip(torch.split(together, sizes), shapes, strict=True)]
