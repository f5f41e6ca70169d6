"""One pass over a rank's share of an epoch: where it began, how far it has come, what is known of its end."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ddp_patch.plan import Done
from ddp_patch.shares.place import Held, Place
from ddp_patch.streams.progress import Progress

__all__ = ["EpochPass", "nothing_left"]

T = TypeVar("T")


@dataclass(kw_only=True)
class EpochPass(Progress):
    """A pass over this rank's share of an epoch, or of what is left of one.

    Attributes:
        epoch: Which epoch it is over.
        held: What the samplers held before it.
        before: What other numbers of ranks had taken of the epoch; the pass is over the rest.
        resumes: Whether it goes on from a place that was loaded.
        drawn_from: What the generators' states were when the first item was drawn, if they were others by then.
        now: Of the place that it goes on from, until it is reached.
        length: How many items the rest has, once its end was found.
        over: Whether nothing more will be asked for.
        after: What the samplers held after it, where another rank draws.
        sizes: How many samples each item has that was given, oldest first, where somebody wants to know.
        to_end: Draws on, and tells whether no more than so many items of the share come; None where that would be
            known on one rank and not on another.
    """

    epoch: int
    held: Held = field(default_factory=Held)
    before: Done = ()
    resumes: bool = False
    drawn_from: Held | None = None
    now: tuple[int, Held] | None = None
    length: int | None = None
    over: bool = False
    after: Held | None = None
    sizes: deque[int] | None = None
    to_end: Callable[[int], bool] | None = None

    @classmethod
    def at(cls, place: Place, num_replicas: int, *, resumes: bool) -> "EpochPass":
        """Return the pass that goes on from a place."""
        before, skip = place.split(num_replicas)
        return cls(
            epoch=place.epoch,
            held=place.held,
            before=before,
            skip=skip,
            resumes=resumes,
            drawn_from=place.drawn_from,
            now=place.now,
        )

    @property
    def begins_at(self) -> str:
        """Where the pass begins, to be compared between ranks."""
        return " + ".join([*(f"{ranks} x {taken}" for ranks, taken in self.before), str(self.skip)])

    def place(self, num_replicas: int, taken: int, now: Held | None = None) -> Place:
        """Return where the pass stands when so many items of the share were taken."""
        before = tuple(stint for stint in self.before if stint[1])
        told = None if now is None else (self.given, now)
        return Place(self.epoch, (*before, (num_replicas, taken)), self.held, drawn_from=self.drawn_from, now=told)

    def end(self, num_replicas: int, after: Held) -> Place:
        """Return where the pass stands when all was taken."""
        return replace(self.place(num_replicas, self.taken), held=self.after or after, ended=True)

    def is_at_end(self, unused: int = 0) -> bool:
        """Tell whether all was given but ``unused`` items; then the samplers hold what the epoch leaves in them."""
        if self.ended or self.after is not None:
            return True
        return self.to_end is not None and self.to_end(unused)

    def begin(self, part: Sequence[T]) -> Iterator[T]:
        """Return an iterator over what is not to be skipped of this rank's items that come next."""
        if self.sizes is not None:
            self.sizes.extend(map(_samples, part[max(0, self.skip - self.given) :]))
        return super().begin(part)


def nothing_left(unused: int) -> bool:
    """Tell that a pass is at its end: ``EpochPass.to_end`` where nothing has to be drawn to know it."""
    return True


def _samples(item: Any) -> int:
    try:
        return len(item)
    except TypeError:  # no batch, but a key
        return 1
