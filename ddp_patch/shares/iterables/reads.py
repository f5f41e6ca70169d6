"""The source of a pass over an iterable dataset: indices for the workers, and what the workers report."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

from ddp_patch.plan import Done
from ddp_patch.shares.iterables.board import Board
from ddp_patch.shares.passes import Pass
from ddp_patch.shares.place import Mark
from ddp_patch.shares.sources import Source

__all__ = ["ReadByWorkers", "source_of"]

_INDICES = [None] * 1024


class ReadByWorkers(Source[None]):
    """Gives an index for every item that workers read: None, forever. Workers find the end, if there is one.

    Args:
        board: Where they write it.
        number: Which pass it is.
        is_counted: Whether ranks take equally much; they do where each reads the whole dataset.
    """

    draws_here: bool = False
    is_counted: bool

    def __init__(self, board: Board, number: int, is_counted: bool) -> None:
        self._board, self._number = board, number
        self.is_counted = is_counted

    def parts(self, skip: int) -> Iterator[list[None]]:
        """Yield indices without end."""
        while True:
            yield _INDICES

    def ends_within(self, items: int) -> bool:
        """Return True: nothing has to be drawn here to know what is left."""
        return True

    def ends_elsewhere(self) -> bool:
        """Return whether a worker has come to the end: from then on more is asked for than there is."""
        return any(length is not None for length in self._board.lengths(self._number))

    @property
    def is_in_parts(self) -> bool:
        """Whether several workers read a part each; False while that is unknown."""
        return self.is_counted and self._board.readers > 1 and self._board.ways(self._number) == {"parts"}

    @property
    def first_part(self) -> int:
        """Whose part the first worker reads."""
        return self._board.first_role(self._number)

    def lengths_found(self) -> Sequence[int | None]:
        """Return how many items the stream had, or each part of it; None if no worker came to the end."""
        lengths = self._board.lengths(self._number)
        return lengths if self.is_in_parts else [next((length for length in lengths if length is not None), None)]

    def mark(self, reader: int, batches: int, done: Done, before: Mark) -> Mark:
        """Return what is known of a reader's stream.

        Args:
            reader: Which worker it is.
            batches: How many batches of it were made in this pass.
            done: What was taken of it then.
            before: What was known of it when the pass began.
        """
        if not batches:
            return before
        first = self._board.first(self._number, reader, sum(ranks * taken for ranks, taken in done))
        return Mark(first or before.first, self._board.snapshot(self._number, reader, batches))

    @property
    def left_out(self) -> int:
        """How many items were left out because another package's loader resumed within the pass."""
        return self._board.offset(self._number)


def source_of(one: Pass[Any]) -> ReadByWorkers:
    """Return the source of a pass over an iterable dataset."""
    return cast(ReadByWorkers, one.source)
