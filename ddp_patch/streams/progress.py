"""How far a pass has come, and its states."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import length_hint
from typing import Any, TypeVar

__all__ = ["Given", "Progress", "State"]

T = TypeVar("T")


class State(Enum):
    """The states of a pass, in the order in which it goes through them."""

    NOT_BEGUN = "not begun"  # nothing was asked for
    RUNNING = "running"
    ENDED = "ended"  # all items were given
    LEFT = "left"  # broken off before


@dataclass
class Given:
    """How many batches of its current pass a loader with one iterator for all epochs has given.

    After a ``break`` such a loader continues in the same pass, so a training loop's own count may be another.

    Attributes:
        batches: How many, since the pass began.
        is_within: Whether the pass has begun and not ended.
    """

    batches: int = 0
    is_within: bool = False

    def begin(self) -> None:
        """Record that a pass begins with the next batch."""
        self.batches, self.is_within = 0, False

    def count(self) -> None:
        """Record that a batch was given."""
        self.batches, self.is_within = self.batches + 1, True

    def end(self) -> None:
        """Record that there are no more batches."""
        self.is_within = False


class Progress:
    """How far a pass has come. It changes by its methods alone.

    Args:
        skip: How many items were taken before the pass, which continues after these.

    Attributes:
        given: How many items were given, those before the pass included.
        state: Which state the pass is in.
    """

    def __init__(self, skip: int = 0) -> None:
        self.skip: int = skip
        self.given: int = skip
        self.state: State = State.NOT_BEGUN
        self._run: Iterator[Any] = iter(())

    @property
    def taken(self) -> int:
        """How many of the items given were taken, those before the pass included."""
        return self.given - length_hint(self._run)

    @property
    def is_ended(self) -> bool:
        """Whether all items were given."""
        return self.state is State.ENDED

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be asked for."""
        return self.state in {State.ENDED, State.LEFT}

    def begin(self) -> None:
        """Record that the first item was asked for."""
        self.state = State.RUNNING

    def give(self, part: Sequence[T]) -> Iterator[T]:
        """Give the items that come next; return an iterator over them."""
        self.given += len(part)
        self._run = run = iter(part)
        return run

    def end(self) -> None:
        """Record that there are no more items."""
        self.state = State.ENDED

    def leave(self) -> None:
        """Record that nobody will ask for more; a pass that has ended stays so."""
        if self.state is not State.ENDED:
            self.state = State.LEFT
