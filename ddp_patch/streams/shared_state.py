"""What the main process and its workers share in memory."""

import math
import pickle
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ddp_patch.orders.fingerprint import fingerprint
from ddp_patch.sharding.position import StreamStart

__all__ = ["FIRST", "Ends", "Ring", "SharedWorkerState", "shared_arrays"]


# The largest snapshot, in bytes. A stream with larger ones is read again.
_LARGEST = 64 * 1024


class Ring:
    """The latest snapshots of each worker: as many as it may be batches ahead of the training loop, and two more.

    Args:
        readers: How many workers there are.
        ahead: How many batches each may be ahead.
    """

    def __init__(self, readers: int, ahead: int) -> None:
        self._slots = ahead + 2
        self._next = 0
        self._heads = torch.zeros(readers, self._slots, 3, dtype=torch.int64, device="cpu")
        self._bytes = torch.zeros(readers, self._slots, _LARGEST, dtype=torch.uint8, device="cpu")
        for shared in (self._heads, self._bytes):
            shared.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it unannotated

    def write(self, number: int, reader: int, batches: int, data: bytes) -> bool:
        """Write the pickled snapshot that a worker took after this many batches; return False if it is too large."""
        if len(data) > _LARGEST:
            return False
        self._next = (self._next + 1) % self._slots
        head, place = self._heads[reader, self._next], self._bytes[reader, self._next]
        head[:] = 0  # whoever reads it meanwhile finds none
        place[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        head[:] = torch.tensor([number, batches, len(data)])
        return True

    def read(self, number: int, reader: int, batches: int) -> tuple[Any, ...]:
        """Return the snapshot that a worker took after this many batches of a pass; an empty tuple if there is none."""
        for head, place in zip(self._heads[reader], self._bytes[reader], strict=True):
            found, made, size = head.tolist()
            if (found, made) == (number, batches) and size:
                return (pickle.loads(place[:size].numpy().tobytes()),)  # noqa: S301 - our worker's
        return ()


# By how many of its first items a stream is recognised.
FIRST = 8

# Remember the epochs of this many passes: iterators may live side by side.
_LATEST = 64
_UNKNOWN, _ONE_STREAM = -1, -2


class SharedWorkerState:
    """What the main process and its workers report to each other, in shared memory.

    The main process writes which epoch each of the latest passes is over, and how many states were loaded. A worker
    writes whose part of the dataset it reads, how that begins, the dataset's own states, and at the end how many items
    the part had, and their fingerprint.

    Args:
        readers: How many workers read the dataset; 1 where the main process does.
        ahead: How many batches each may be ahead, if the dataset has a state; otherwise None.
    """

    def __init__(self, readers: int = 1, ahead: int | None = None) -> None:
        self.readers: int = readers
        self._ring = None if ahead is None else Ring(readers, ahead)
        of_each = (_LATEST, readers)
        self._firsts, self._ends, self._offsets, self._roles, self._epochs, self._latest, self._loads = shared_arrays(
            (*of_each, FIRST, len(StreamStart._fields)), (*of_each, 2), (*of_each, 2), of_each, (_LATEST,), (1,), (1,)
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
        for noted in (self._roles, self._ends, self._firsts):
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

    def note_first(self, number: int, reader: int, first: StreamStart) -> None:
        """Write what the first items were that a reader read in pass ``number``."""
        self._firsts[number % _LATEST, reader, first.seen - 1] = torch.tensor(first)

    def note_offset(self, number: int, reader: int, items: int) -> None:
        """Write that a reader leaves out this many items in pass ``number`` because another package's loader resumed.

        A worker may write it before the pass has begun.
        """
        self._offsets[number % _LATEST, reader] = torch.tensor([number, items])

    def offset(self, number: int) -> int:
        """Return how many items the reader of pass ``number`` leaves out that leaves out most, as above."""
        return max((items for noted, items in self._offsets[number % _LATEST].tolist() if noted == number), default=0)

    def leave(self, number: int, reader: int, batches: int, state: bytes) -> bool:
        """Write the dataset's own state, pickled, after this many batches of pass ``number``.

        Return False where there is no room for it.
        """
        return self._ring is not None and self._ring.write(number, reader, batches, state)

    def snapshot(self, number: int, reader: int, batches: int) -> tuple[Any, ...]:
        """Return the dataset's own state after this many batches of pass ``number``, if there is one."""
        return () if self._ring is None else self._ring.read(number, reader, batches)

    def first(self, number: int, reader: int, items: int) -> StreamStart | None:
        """Return the hashes of the first items, this many, that a reader read in pass ``number``.

        None if it did not read the beginning.
        """
        if not items:
            return None
        first = StreamStart(*self._firsts[number % _LATEST, reader, min(FIRST, items) - 1].tolist())
        return None if first.seen < 0 else first

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
