"""What the main process and its workers share in memory: ends, and what ranks compare of what was read."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import thread_time
from typing import Literal, TypeVar

import torch

from ddp_patch.orders.fingerprint import COMPARED, hashes_if_any
from ddp_patch.ranks.order_verdicts import PartMarks, next_mark

__all__ = ["LARGEST", "FirstItems", "MarksInMemory", "SharedWorkerState", "shared_arrays"]

T = TypeVar("T")


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


# The first pass may be a mere look at a batch, so some more are recorded. Which ones depends on their numbers, not on
# how far workers have read ahead, so that it is the same on all ranks.
_PASSES_NOTED = 3
# All parts together have this many notes of a pass, if that leaves each enough: ranks send them to each other.
_OF_ALL_PARTS = 2048
_FEWEST = 16
# Taking hashes may cost a reader this many seconds of a pass, and what one more item takes: items may be large.
_MOST_S = 1.0


class FirstItems:
    """Notes of the first items that the reader of each part read, in the first passes over a loader.

    Args:
        parts: How many parts there are.

    Examples:
        >>> first = FirstItems(parts=1)
        >>> first.begin(1, "epoch 0")
        >>> list(first.watching(0, 1, iter("ab")))
        ['a', 'b']
        >>> (notes,) = first.passes()["epoch 0 (1)"]
        >>> notes.count, notes.end
        (2, 2)
    """

    def __init__(self, parts: int) -> None:
        self.parts: int = parts
        self._most = min(COMPARED, max(_FEWEST, _OF_ALL_PARTS // parts))
        of_each = (_PASSES_NOTED, parts)
        self._hashes, self._counts, self._ends, self._finals, self._asked, self._is_settled = shared_arrays(
            (*of_each, self._most, 3), of_each, of_each, of_each, of_each, (1,)
        )
        self._names: list[str] = []

    def begin(self, number: int, name: str) -> None:
        """Note, in the main process, that pass ``number`` begins: from 1, and named alike on all ranks."""
        if number == len(self._names) + 1 <= _PASSES_NOTED:
            again = sum(known.startswith(f"{name} (") for known in self._names)
            self._names.append(f"{name} ({again + 1})")

    def settle(self) -> None:
        """Record that no more is needed."""
        self._is_settled[0] = 1

    def watching(
        self, part: int, number: int, items: Iterator[T], asked_rank: Callable[[], bool] = lambda: False
    ) -> Iterator[T]:
        """Return a part's items; the first ones are recorded as they are read.

        Args:
            part: The part.
            number: The pass.
            items: What the reader of the part reads.
            asked_rank: Tells whether the dataset has asked which rank it is on.
        """
        is_noted = 1 <= number <= _PASSES_NOTED and part < self.parts and self._is_settled[0] < 0
        # Another iterator's worker may be about the same part of the same pass.
        if is_noted and self._counts[number - 1, part] < 0:
            return self._noting(part, number, items, asked_rank)
        return items

    def _noting(self, part: int, number: int, items: Iterator[T], asked_rank: Callable[[], bool]) -> Iterator[T]:
        hashes, counts, asked = self._hashes[number - 1, part], self._counts[number - 1], self._asked[number - 1]
        counts[part] = count = 0
        spent_s = 0.0
        for item in items:
            began_s = thread_time()
            asked[part] = asked_rank()
            hashes[count] = torch.tensor(hashes_if_any(item))
            counts[part] = count = count + 1
            spent_s += thread_time() - began_s
            if count == self._most or spent_s > _MOST_S:
                self._finals[number - 1, part] = 1
                yield item
                break
            yield item
        else:
            self._ends[number - 1, part] = count
            self._finals[number - 1, part] = 1
        yield from items

    def marks_of(self, part: int, number: int) -> PartMarks:
        """Return what was recorded of a part in a pass."""
        # Writers set finals last, so read it first: the rest is then complete.
        final, end, count, asked = (
            int(noted[number - 1, part]) for noted in (self._finals, self._ends, self._counts, self._asked)
        )
        hashes = self._hashes[number - 1, part, : max(0, count)].numpy()
        return PartMarks.of(hashes, None if end < 0 else end, is_final=final > 0, asked_rank=asked > 0)

    def passes(self) -> dict[str, Sequence[PartMarks]]:
        """Return what was recorded of each pass, part by part, by what the ranks call the pass."""
        numbered = enumerate(self._names, 1)
        return {name: [self.marks_of(part, number) for part in range(self.parts)] for number, name in numbered}


# Marks of this many passes are kept: iterators may live side by side. The latest two are compared; of so many earlier
# ones only their ends, with ranks that are epochs behind.
_PASSES_KEPT, _FULLY_KEPT, _EARLIER = 4, 2, 16
# How many marks a part has at most: enough for 2**16 times the items that are all marked.
_MOST_MARKS = 576


class MarksInMemory:
    """The marks of the latest passes over a loader.

    Args:
        parts: How many parts there are.

    Examples:
        >>> marks = MarksInMemory(parts=1)
        >>> marks.begin(1, "epoch 0")
        >>> list(marks.watching(0, 1, iter("ab")))
        ['a', 'b']
        >>> (part,) = marks.passes()["epoch 0 (0)"]
        >>> part.count, part.end
        (2, 2)
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        of_each = (_PASSES_KEPT, parts)
        self._hashes, self._counts, self._ends, self._numbers = shared_arrays(
            (*of_each, _MOST_MARKS, 3), of_each, of_each, (_PASSES_KEPT,)
        )
        self._names: dict[int, str] = {}
        self._earlier: dict[str, Sequence[PartMarks]] = {}
        self._whole: Counter[str] = Counter()  # how often a pass of that name came to its end

    def begin(self, number: int, name: str) -> None:
        """Note, in the main process, that pass ``number`` begins, and its name, which is alike on all ranks."""
        for known, before in self._names.items():
            if before.startswith(f"{name} (") and None not in {part.end for part in self._of(known)}:
                self._whole[name] = max(self._whole[name], int(before.removeprefix(f"{name} (")[:-1]) + 1)
        slot = number % _PASSES_KEPT
        for noted in (self._counts, self._ends):
            noted[slot] = -1
        self._numbers[slot] = number
        self._names[number] = f"{name} ({self._whole[name]})"
        for known in sorted(self._names)[:-_FULLY_KEPT]:
            self._earlier[self._names.pop(known)] = [PartMarks(end=part.end) for part in self._of(known)]
        self._earlier = dict(list(self._earlier.items())[-_EARLIER:])

    def watching(self, part: int, number: int, items: Iterator[T]) -> Iterator[T]:
        """Return a part's items, of which some are marked as they are read.

        Args:
            part: The part.
            number: The pass.
            items: What the reader of the part reads, from its first item on.
        """
        slot = number % _PASSES_KEPT
        # Another iterator's worker may be about the same part of the same pass.
        is_mine = part < self._parts and self._numbers[slot] == number and self._counts[slot, part] < 0
        return self._marking(slot, part, items) if is_mine else items

    def _marking(self, slot: int, part: int, items: Iterator[T]) -> Iterator[T]:
        hashes, counts, spent_s = self._hashes[slot, part], self._counts[slot], 0.0
        counts[part] = made = place = wanted = 0
        for item in items:
            if place == wanted and made < _MOST_MARKS and spent_s < _MOST_S:
                began_s = thread_time()
                hashes[made] = torch.tensor(hashes_if_any(item))
                made, wanted = made + 1, next_mark(place)
                counts[part] = made
                spent_s += thread_time() - began_s
            place += 1
            yield item
        self._ends[slot, part] = place

    def _of(self, number: int) -> list[PartMarks]:
        slot = number % _PASSES_KEPT
        ends, counts = self._ends[slot].tolist(), self._counts[slot].tolist()  # read first: marks are made before
        return [
            PartMarks.of(
                self._hashes[slot, part, : max(0, counts[part])].numpy(), None if ends[part] < 0 else ends[part]
            )
            for part in range(self._parts)
        ]

    def passes(self) -> dict[str, Sequence[PartMarks]]:
        """Return the marks of the latest passes, part by part, by what the ranks call the pass."""
        return {**self._earlier, **{name: self._of(number) for number, name in self._names.items()}}
