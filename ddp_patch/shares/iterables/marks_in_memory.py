"""Marks of what each reader of an iterable dataset reads, to the end of each pass, in shared memory."""

from collections import Counter
from collections.abc import Iterator
from time import thread_time
from typing import Any, TypeVar

import torch

from ddp_patch.ranks.stream_marks import PartMarks, following
from ddp_patch.shares.iterables.board import shared
from ddp_patch.streams.item_hashes import hashes_if_any

__all__ = ["MarksInMemory"]

T = TypeVar("T")

# Marks of this many passes are kept: iterators may live side by side. The latest two are compared; of so many earlier
# ones only their ends, with ranks that are epochs behind.
_KEPT, _COMPARED, _EARLIER = 4, 2, 16
# How many marks a part has at most: enough for 2**16 times the items that are all marked.
_MOST = 576
# Taking hashes may cost a reader this many seconds of a pass: items may be large.
_MOST_S = 1.0


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
        >>> len(part.items), part.end
        (2, 2)
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        of_each = (_KEPT, parts)
        self._hashes, self._counts, self._ends, self._numbers = shared((*of_each, _MOST, 3), of_each, of_each, (_KEPT,))
        self._names: dict[int, str] = {}
        self._earlier: dict[str, list[PartMarks]] = {}
        self._whole: Counter[str] = Counter()  # how often a pass of that name came to its end

    def begin(self, number: int, name: str) -> None:
        """Note, in the main process, that pass ``number`` begins, and its name, which is alike on all ranks."""
        for known, before in self._names.items():
            if before.startswith(f"{name} (") and None not in {part.end for part in self._of(known)}:
                self._whole[name] = max(self._whole[name], int(before.removeprefix(f"{name} (")[:-1]) + 1)
        slot = number % _KEPT
        for noted in (self._counts, self._ends):
            noted[slot] = -1
        self._numbers[slot] = number
        self._names[number] = f"{name} ({self._whole[name]})"
        for known in sorted(self._names)[:-_COMPARED]:
            self._earlier[self._names.pop(known)] = [PartMarks(end=part.end) for part in self._of(known)]
        self._earlier = dict(list(self._earlier.items())[-_EARLIER:])

    def watching(self, part: int, number: int, items: Iterator[T]) -> Iterator[T]:
        """Return a part's items, of which some are marked as they are read.

        Args:
            part: The part.
            number: The pass.
            items: What the reader of the part reads, from its first item on.
        """
        slot = number % _KEPT
        # Another iterator's worker may be about the same part of the same pass.
        is_mine = part < self._parts and self._numbers[slot] == number and self._counts[slot, part] < 0
        return self._marking(slot, part, items) if is_mine else items

    def _marking(self, slot: int, part: int, items: Iterator[T]) -> Iterator[T]:
        hashes, counts, spent_s = self._hashes[slot, part], self._counts[slot], 0.0
        counts[part] = made = place = wanted = 0
        for item in items:
            if place == wanted and made < _MOST and spent_s < _MOST_S:
                began_s = thread_time()
                hashes[made] = torch.tensor(hashes_if_any(item))
                made, wanted = made + 1, following(place)
                counts[part] = made
                spent_s += thread_time() - began_s
            place += 1
            yield item
        self._ends[slot, part] = place

    def _of(self, number: int) -> list[PartMarks]:
        slot = number % _KEPT
        ends, counts = self._ends[slot].tolist(), self._counts[slot].tolist()  # read first: marks are made before
        return [
            PartMarks.of(
                self._hashes[slot, part, : max(0, counts[part])].numpy(), None if ends[part] < 0 else ends[part]
            )
            for part in range(self._parts)
        ]

    def passes(self) -> dict[str, Any]:
        """Return the marks of the latest passes, part by part, by what the ranks call the pass."""
        return {**self._earlier, **{name: self._of(number) for number, name in self._names.items()}}
