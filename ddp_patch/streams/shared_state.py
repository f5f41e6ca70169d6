"""What the main process and its workers tell each other in shared memory, because no note that travels can carry it.

A worker finds its end after its last batch, and torch then sends nothing of ours; to look one item ahead would hold
each batch back until the next item is there. Nor do notes travel through iterators that are not torch's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["LARGEST", "MOST_MARKS", "PARTS", "STREAM", "SharedWorkerState"]

# The latest passes are known: iterators may live side by side.
_PASSES_KEPT = 32
# A part has at most so many marks: enough for 10**12 items.
MOST_MARKS = 128
# The largest state of a dataset, in bytes, that travels. A stream with larger ones is read again.
LARGEST = 64 * 1024

# How a reader reads: the one stream that all read, or a part of its own.
STREAM, PARTS = range(2)

# What a reader reports of a pass. All numbers are -1 until they are known.
_REPORT = np.dtype(
    [
        ("number", np.int64),  # the pass
        ("worker", np.int64),  # which worker the reader is
        ("way", np.int64),  # STREAM or PARTS
        ("length", np.int64),  # how many items it found by its end
        ("spent_ms", np.int64),  # how long the dataset took to give these
        ("batches", np.int64),  # where the dataset splits itself: of how many batches it has read the items
        ("all_batches", np.int64),  # and how many these are in the end
        ("asked_rank", np.int64),  # whether the dataset asked for its rank by its first item, or was made for it
        ("has_names", np.int64),  # whether one of the items that the ranks compare had a name
        ("marks", np.int64),  # how many marks it has made of them
        ("values", np.int64, (MOST_MARKS,)),  # these: the digests at the first counts
        ("read", np.int64),  # how many items it has read in all
        ("end", np.int64),  # the digest of all
    ]
)
# What the main process tells: its latest pass, and which epoch each pass is over.
_BEGUN = np.dtype([("latest", np.int64), ("epochs", np.int64, (_PASSES_KEPT,))])
# The dataset's own state at the end of a pass.
_STATE = np.dtype([("number", np.int64), ("size", np.int64), ("data", np.uint8, (LARGEST,))])


class SharedWorkerState:
    """What the main process and its workers tell each other, in one piece of shared memory.

    Args:
        readers: How many workers read the dataset; 1 where the main process does.
        keeps_states: Whether a worker leaves, at its end, its dataset's own state: the next pass goes on from that.

    Examples:
        >>> shared = SharedWorkerState(readers=2)
        >>> shared.begin(1, epoch=0)
        >>> shared.report(1, part=0)["length"] = 7
        >>> shared.lengths(1), shared.lengths(2)
        ([7, None], [None, None])
    """

    def __init__(self, readers: int, *, keeps_states: bool = False) -> None:
        self.readers: int = readers
        size = _BEGUN.itemsize + _PASSES_KEPT * readers * _REPORT.itemsize + keeps_states * readers * _STATE.itemsize
        self._memory = torch.full((size,), 255, dtype=torch.uint8, device="cpu")  # every number is -1
        self._map()

    def _map(self) -> None:
        """Lay records over the memory; that of a copy is not shared yet."""
        self._memory.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        memory, begun = self._memory.numpy(), _BEGUN.itemsize
        reported = begun + _PASSES_KEPT * self.readers * _REPORT.itemsize
        (self._begun,) = memory[:begun].view(_BEGUN)
        self._reports = memory[begun:reported].view(_REPORT).reshape(_PASSES_KEPT, self.readers)
        self._states = memory[reported:].view(_STATE)

    def __getstate__(self) -> dict[str, Any]:
        return {"readers": self.readers, "_memory": self._memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map()

    # ---- what the main process writes ----

    @property
    def latest_pass(self) -> int:
        """The number of the latest pass that was begun; -1 before the first."""
        return int(self._begun["latest"])

    def begin(self, number: int, epoch: int) -> None:
        """Write which epoch pass ``number`` is over."""
        self._begun["epochs"][number % _PASSES_KEPT] = epoch
        self._begun["latest"] = number

    def epoch_of(self, number: int) -> int | None:
        """Return which epoch pass ``number`` is over; None if no pass was begun."""
        epoch = int(self._begun["epochs"][number % _PASSES_KEPT])
        return None if epoch < 0 else epoch

    # ---- what readers write ----

    def report(self, number: int, part: int) -> np.void:
        """Return what the reader of a part reports of pass ``number``, to write into it: a blank one at first.

        A worker may begin it before the pass has begun.
        """
        slot = self._reports[number % _PASSES_KEPT]
        if slot[part]["number"] != number:
            slot[part : part + 1].view(np.int64)[:] = -1
            slot[part]["number"] = number
        report: np.void = slot[part]
        return report

    def reported(self, number: int, what: str) -> list[Any]:
        """Return one of the reported values for each part in pass ``number``; -1 where it is not known."""
        slot = self._reports[number % _PASSES_KEPT]
        is_known = slot["number"] == number
        found: list[Any] = np.where(is_known if slot[what].ndim == 1 else is_known[:, None], slot[what], -1).tolist()
        return found

    def ways(self, number: int) -> set[int]:
        """Return how the readers of pass ``number`` read, as far as they know it: STREAM, PARTS or both."""
        return {*self.reported(number, "way")} - {-1}

    def first_part(self, number: int) -> int:
        """Return whose part the first reader of pass ``number`` reads; each next one reads the next."""
        both = zip(self.reported(number, "worker"), self.reported(number, "way"), strict=True)
        return next(((part - worker) % self.readers for part, (worker, way) in enumerate(both) if way == PARTS), 0)

    def lengths(self, number: int) -> Sequence[int | None]:
        """Return how many items the reader of each part found in pass ``number``; None before it came to the end."""
        return [length if length >= 0 else None for length in self.reported(number, "length")]

    def batches_noted(self, number: int) -> tuple[Sequence[int], Sequence[bool]]:
        """Return how many batches the reader of each part has noted in pass ``number``, and whether these are all."""
        in_all, so_far = self.reported(number, "all_batches"), self.reported(number, "batches")
        made = [max(0, every, some) for every, some in zip(in_all, so_far, strict=True)]
        return made, [every >= 0 for every in in_all]

    def keep_state(self, number: int, part: int, state: bytes | None) -> None:
        """Write the dataset's own state, pickled, of the reader of a part at the end of pass ``number``."""
        if part < len(self._states) and state is not None:
            self._states[part]["data"][: len(state)] = np.frombuffer(state, np.uint8)
            self._states[part]["number"], self._states[part]["size"] = number, len(state)

    def states(self, number: int) -> Sequence[bytes | None]:
        """Return what the reader of each part wrote at the end of pass ``number``; nothing unless this keeps states."""
        return [kept["data"][: kept["size"]].tobytes() if kept["number"] == number else None for kept in self._states]
