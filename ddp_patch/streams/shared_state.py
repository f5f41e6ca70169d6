"""What the main process and its workers share in memory: what is read, how, and where it ends."""

import math
from collections.abc import Sequence
from typing import Literal

import torch

__all__ = ["LARGEST", "SharedWorkerState", "shared_arrays"]

# Remember the epochs of this many passes: iterators may live side by side.
_EPOCHS_KEPT = 64
_UNKNOWN, _ONE_STREAM = -1, -2

# The largest state of a dataset, in bytes, that travels. A stream with larger ones is read again.
LARGEST = 64 * 1024


class SharedWorkerState:
    """What the main process and its workers report to each other, in shared memory.

    The main process writes which epoch each of the latest passes is over, and how many states were loaded. A worker
    writes whose part of the dataset it reads, and at the end how many items that had; where the dataset splits
    itself over all ranks' workers, how many batches it made.

    Args:
        readers: How many workers read the dataset; 1 where the main process does.
        keeps_states: Whether a worker writes, at the end too, its dataset's own state: it goes on from that.
    """

    def __init__(self, readers: int, *, keeps_states: bool = False) -> None:
        self.readers: int = readers
        self._states = torch.zeros((readers if keeps_states else 0, LARGEST), dtype=torch.uint8)
        if keeps_states:
            self._states.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        of_each = (_EPOCHS_KEPT, readers)
        of_states = (len(self._states), 2)
        self._ends, self._offsets, self._parts, self._made, self._epochs, self._latest, self._loads, self._of_states = (
            shared_arrays((*of_each, 2), (*of_each, 2), of_each, of_each, (_EPOCHS_KEPT,), (1,), (1,), of_states)
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
        self._epochs[number % _EPOCHS_KEPT] = epoch
        for noted in (self._parts, self._ends, self._made):
            noted[number % _EPOCHS_KEPT] = -1
        self._latest[0] = number

    def epoch_of(self, number: int) -> int | None:
        """Return which epoch pass ``number`` is over; None if no pass was begun."""
        epoch = int(self._epochs[number % _EPOCHS_KEPT])
        return epoch if epoch >= 0 else None

    def note_part(self, number: int, worker_index: int, part: int | None) -> None:
        """Write which worker's part a reader reads in pass ``number``; None if all read one stream."""
        self._parts[number % _EPOCHS_KEPT, worker_index] = _ONE_STREAM if part is None else part

    def ways(self, number: int) -> set[Literal["stream", "parts"]]:
        """Return how the readers of pass ``number`` read, as far as they wrote it: all one stream, or each a part."""
        parts = self._parts[number % _EPOCHS_KEPT].tolist()
        return {"stream" if part == _ONE_STREAM else "parts" for part in parts if part != _UNKNOWN}

    def is_one_stream(self, number: int) -> bool:
        """Return whether all readers of pass ``number`` read one stream; False while that is unknown."""
        return self.ways(number) == {"stream"}

    def is_in_parts(self, number: int) -> bool:
        """Return whether each reader of pass ``number`` reads a part; False while that is unknown."""
        return self.ways(number) == {"parts"}

    def first_part(self, number: int) -> int:
        """Return whose part the first reader of pass ``number`` reads; each next one reads the next."""
        found = self._parts[number % _EPOCHS_KEPT].tolist()
        return next(((part - worker_index) % self.readers for worker_index, part in enumerate(found) if part >= 0), 0)

    def note_offset(self, number: int, worker_index: int, items: int) -> None:
        """Write that a reader leaves out this many items in pass ``number`` because another package's loader resumed.

        A worker may write it before the pass has begun.
        """
        self._offsets[number % _EPOCHS_KEPT, worker_index] = torch.tensor([number, items])

    def offset(self, number: int) -> int:
        """Return the largest number of items that a reader of pass ``number`` leaves out, as above."""
        return max(
            (items for noted, items in self._offsets[number % _EPOCHS_KEPT].tolist() if noted == number), default=0
        )

    def end(self, number: int, part: int, length: int, spent_s: float) -> None:
        """Write what the reader of a part found in pass ``number``.

        Args:
            number: The pass.
            part: The part.
            length: How many items it has.
            spent_s: How many seconds it took the dataset to give them.
        """
        self._ends[number % _EPOCHS_KEPT, part] = torch.tensor([length, round(1000 * spent_s)])

    def keep_state(self, number: int, part: int, state: bytes | None) -> None:
        """Write the dataset's own state, pickled, of the reader of a part at the end of pass ``number``, if it has one.

        Nothing is written unless this keeps states.
        """
        if part < len(self._states) and state is not None:
            self._states[part, : len(state)] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            self._of_states[part] = torch.tensor([number, len(state)])

    def states(self, number: int) -> Sequence[bytes | None]:
        """Return what the reader of each part wrote at the end of pass ``number``; nothing unless this keeps states."""
        noted = enumerate(self._of_states.tolist())
        return [self._states[part, :size].numpy().tobytes() if of == number else None for part, (of, size) in noted]

    def note_batches(self, number: int, part: int, batches: int, *, is_end: bool = False) -> None:
        """Write how many batches the reader of a part has made in pass ``number`` of a dataset that splits itself.

        Until its end, that is only how many it has read the items of.
        """
        # By numpy, which writes a number in a fraction of torch's time: this comes with every batch.
        self._made.numpy()[number % _EPOCHS_KEPT, part] = batches if is_end else -1 - batches

    def batches_noted(self, number: int) -> tuple[Sequence[int], Sequence[bool]]:
        """Return how many batches the reader of each part has noted in pass ``number``, and whether these are all."""
        noted = self._made.numpy()[number % _EPOCHS_KEPT].tolist()
        return [made if made >= 0 else -1 - made for made in noted], [made >= 0 for made in noted]

    def lengths(self, number: int) -> Sequence[int | None]:
        """Return how many items the reader of each part found in pass ``number``; None before it came to the end."""
        return [length if length >= 0 else None for length in self._ends[number % _EPOCHS_KEPT, :, 0].tolist()]

    def most_spent_s(self, number: int) -> float:
        """Return how many seconds the dataset took for its items in pass ``number``, where it took longest."""
        return int(self._ends[number % _EPOCHS_KEPT, :, 1].max()) / 1000


def shared_arrays(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return tensors of -1 in memory that the workers share; all in one file, of which a process may have few."""
    sizes = list(map(math.prod, shapes))
    together = torch.full((sum(sizes),), -1, dtype=torch.int64, device="cpu")
    together.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return [part.view(shape) for part, shape in zip(torch.split(together, sizes), shapes, strict=True)]
