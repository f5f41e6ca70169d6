"""What the main process and its workers share in memory."""

import math
from collections.abc import Sequence
from typing import Literal, cast

import torch

from ddp_patch.orders.fingerprint import fingerprint

__all__ = ["SharedWorkerState", "shared_arrays"]


# Remember the epochs of this many passes: iterators may live side by side.
_LATEST = 64
_UNKNOWN, _ONE_STREAM = -1, -2


class SharedWorkerState:
    """What the main process and its workers report to each other, in shared memory.

    The main process writes which epoch each of the latest passes is over, and how many states were loaded. A worker
    writes whose part of the dataset it reads, and at the end how many items that had, and their fingerprint; where the
    dataset splits itself over all ranks' workers, how many batches it made.

    Args:
        readers: How many workers read the dataset; 1 where the main process does.
    """

    def __init__(self, readers: int) -> None:
        self.readers: int = readers
        of_each = (_LATEST, readers)
        self._ends, self._offsets, self._roles, self._made, self._epochs, self._latest, self._loads = shared_arrays(
            (*of_each, 2), (*of_each, 2), of_each, of_each, (_LATEST,), (1,), (1,)
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
        for noted in (self._roles, self._ends, self._made):
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

    def is_one_stream(self, number: int) -> bool:
        """Return whether all readers of pass ``number`` read one stream; False while that is unknown."""
        return self.ways(number) == {"stream"}

    def is_in_parts(self, number: int) -> bool:
        """Return whether each reader of pass ``number`` reads a part; False while that is unknown."""
        return self.ways(number) == {"parts"}

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

    def end_batches(self, number: int, role: int, batches: int) -> None:
        """Write how many batches the reader of a role made in pass ``number`` of a dataset that splits itself."""
        self._made[number % _LATEST, role] = batches

    def batches_made(self, number: int) -> Sequence[int]:
        """Return how many batches the reader of each role made in pass ``number``; -1 before it came to the end."""
        return cast("list[int]", self._made[number % _LATEST].tolist())

    def lengths(self, number: int) -> Sequence[int | None]:
        """Return how many items the reader of each role found in pass ``number``; None before it came to the end."""
        return [length if length >= 0 else None for length in self._ends[number % _LATEST, :, 0].tolist()]

    def facts(self, number: int) -> dict[str, object]:
        """Return what pass ``number`` has drawn, as facts to compare; nothing before all readers came to the end."""
        drawn, orders = self._ends[number % _LATEST].T.tolist()
        if min(orders) < 0:
            return {}
        # Readers of one stream have all drawn it.
        is_split = self.is_in_parts(number)
        order = fingerprint(orders) if is_split else orders[0]
        return {"drawn in the epoch before": sum(drawn) if is_split else drawn[0], "order of the epoch before": order}


def shared_arrays(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return tensors of -1 in memory that the workers share; all in one file, of which a process may have few."""
    sizes = list(map(math.prod, shapes))
    together = torch.full((sum(sizes),), -1, dtype=torch.int64, device="cpu")
    together.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return [part.view(shape) for part, shape in zip(torch.split(together, sizes), shapes, strict=True)]
