"""One pass over a rank's share of an epoch: where it began, how far it has come, what is known of its end."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ddp_patch.place import Held, Place
from ddp_patch.plan import Done
from ddp_patch.progress import Progress

__all__ = ["EpochPass"]

T = TypeVar("T")


@dataclass(kw_only=True)
class EpochPass(Progress):
    """A pass over this rank's share of an epoch, or of what is left of one.

    Attributes:
        epoch: Which epoch it is over.
        held: What the samplers held before it.
        before: What other numbers of ranks had taken of the epoch; the pass is over the rest.
        resumes: Whether it goes on from a place that was loaded.
        now: Of that place, until it is reached.
        length: How many items the rest has, once its end was found.
        over: Whether nothing more will be asked for.
        after: What the samplers held after it, where another rank draws.
        sizes: How many samples each item has that was given, oldest first, where somebody wants to know.
        to_end: Draws what is left of the stream, nothing of which is this rank's; None where another rank draws.
    """

    epoch: int
    held: Held = field(default_factory=Held)
    before: Done = ()
    resumes: bool = False
    now: tuple[int, Held] | None = None
    length: int | None = None
    over: bool = False
    after: Held | None = None
    sizes: deque[int] | None = None
    to_end: Callable[[], object] | None = None

    @classmethod
    def at(cls, place: Place, num_replicas: int, *, resumes: bool) -> "EpochPass":
        """Return the pass that goes on from a place."""
        before, skip = place.split(num_replicas)
        return cls(epoch=place.epoch, held=place.held, before=before, skip=skip, resumes=resumes, now=place.now)

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
            self.to_end = _nothing
        return True

    def begin(self, part: Sequence[T]) -> Iterator[T]:
        """Return an iterator over what is not to be skipped of this rank's items that come next."""
        if self.sizes is not None:
            self.sizes.extend(map(_samples, part[max(0, self.skip - self.given) :]))
        return super().begin(part)


def _nothing() -> None:
    """Draw what is left when all was drawn."""


def _samples(item: Any) -> int:
    try:
        return len(item)
    except TypeError:  # no batch, but a key
        return 1
