"""Snapshots of the datasets' own states, in memory that workers share with the main process."""

import pickle
from typing import Any

import torch

__all__ = ["Ring"]

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
