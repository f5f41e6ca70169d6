"""How far a pass has come."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import length_hint
from typing import Any, TypeVar

from ddp_patch.place import Held, Place
from ddp_patch.plan import Done

__all__ = ["Progress"]

T = TypeVar("T")


@dataclass
class Progress:
    """How far a pass has come.

    Attributes:
        epoch: Which epoch it is over.
        held: What the samplers held before it.
        before: What other numbers of ranks had taken of the epoch; the pass is over the rest.
        skip: How many items of its share in that rest this rank had taken.
        resumes: Whether it goes on from a place that was loaded.
        now: Of that place, until it is reached.
        given: How many items of the share were drawn, those skipped included.
        length: How many items the rest has, once its end was found.
        ended: Whether the stream came to its end.
        over: Whether nothing more will be asked for.
        after: What the samplers held after it, where another rank draws.
        sizes: How many samples each item has that was given, oldest first, where somebody wants to know.
        to_end: Draws what is left of the stream, nothing of which is this rank's; None where another rank draws.
    """

    epoch: int
    held: Held = field(default_factory=Held)
    before: Done = ()
    skip: int = 0
    resumes: bool = False
    now: tuple[int, Held] | None = None
    given: int = 0
    length: int | None = None
    ended: bool = False
    over: bool = False
    after: Held | None = None
    sizes: deque[int] | None = None
    to_end: Callable[[], object] | None = None
    part: Iterator[Any] = field(default_factory=lambda: iter(()))

    @classmethod
    def at(cls, place: Place, num_replicas: int, *, resumes: bool) -> "Progress":
        """Return the progress of a pass that goes on from a place."""
        before, skip = place.split(num_replicas)
        return cls(place.epoch, place.held, before, skip, resumes, place.now)

    @property
    def taken(self) -> int:
        """How many items of the share were taken, those skipped included."""
        return max(self.skip, self.given - length_hint(self.part))

    @property
    def begins_at(self) -> str:
        """Where the pass begins, to be compared between ranks."""
        return " + ".join([*(f"{ranks} x {taken}" for ranks, taken in self.before), str(self.skip)])

    def place(self, num_replicas: int, taken: int, now: Held | None = None) -> Place:
        """Return where the pass stands when so many items of the share were taken."""
        done = (*self.before, (num_replicas, taken)) if taken else self.before
        return Place(self.epoch, done, self.held, now=None if now is None else (self.given, now))

    def end(self, num_replicas: int, after: Held) -> Place:
        """Return where the pass stands when all was taken."""
        return replace(self.place(num_replicas, self.taken), held=self.after or after, ended=True)

    def draw_to_end(self) -> bool:
        """Bring what the samplers hold to where it is after the epoch, all of which was given; tell whether it is."""
        if self.held and not self.ended and self.after is None:
            if self.to_end is None:
                return False
            self.to_end()
        return True

    def begin(self, part: Sequence[T]) -> Iterator[T]:
        """Return an iterator over the part of this rank's items that comes next."""
        new = part[max(0, self.skip - self.given) :]
        self.part = iter(new)
        self.given += len(part)
        if self.sizes is not None:
            self.sizes.extend(map(_samples, new))
        return self.part


def _samples(item: Any) -> int:
    try:
        return len(item)
    except TypeError:  # no batch, but a key
        return 1
