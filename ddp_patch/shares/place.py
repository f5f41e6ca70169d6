"""Where a loader stands in its epochs, as plain values that outlive the process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddp_patch.plan import Done
from ddp_patch.shares.held import Held

__all__ = ["First", "Mark", "PartsDone", "Place", "Snapshots", "split"]


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Where the samplers' generators stood within a pass, because others draw from them too.

    A ``DataLoader`` draws its workers' seed from its generator, which a sampler may share.

    Attributes:
        at_first: Their states when the first item was drawn, if they had moved since the pass began.
        latest: How many items of its share a rank had drawn when the state was taken, and their states then.
    """

    at_first: Sequence[Any] | None = None
    latest: tuple[int, Sequence[Any]] | None = None


@dataclass(frozen=True, slots=True)
class PartsDone:
    """What was taken of an iterable dataset that each of several workers reads a part of.

    Attributes:
        first: Whose turn is next.
        done: What was taken of each worker's part.
    """

    first: int
    done: Sequence[Done]


class First(NamedTuple):
    """What is known of a stream's first items, by which it is known again.

    Attributes:
        seen: How many there are.
        whole: A hash of them.
        names: A hash of their strings and the like; 0 if one has none.
        numbers: A hash of their whole numbers; 0 if one has none.
        distinct: How many different ones there are.
    """

    seen: int
    whole: int
    names: int
    numbers: int
    distinct: int

    def is_again(self, other: "First", is_drawn: bool) -> bool:
        """Tell whether another stream begins with the same items, which may be augmented in another way.

        Args:
            other: What is known of the other one's.
            is_drawn: Whether that one may not stand at its beginning. Then only the very same items will do.
        """
        if is_drawn:
            return self.whole == other.whole and self.distinct >= min(2, self.seen)
        pairs = ((self.whole, other.whole), (self.names, other.names), (self.numbers, other.numbers))
        return any(one == again != 0 for one, again in pairs) or not (self.names or self.numbers)


@dataclass(frozen=True, slots=True)
class Mark:
    """What is known of an iterable dataset's stream, or of one worker's part of it, besides how much was taken.

    Attributes:
        first: What is known of its first items; None where nobody looked.
        state: The dataset's own state there, as the only element; none where it has none that tells the place.
    """

    first: First | None = None
    state: Sequence[Any] = ()

    def plain(self) -> list[Any]:
        """Return it as plain values."""
        return [None if self.first is None else list(self.first), list(self.state)]

    @classmethod
    def of(cls, plain: Sequence[Any]) -> "Mark":
        """Return what ``plain`` made plain values of."""
        first, state = plain
        return cls(None if first is None else First(*first), tuple(state))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pass begins or stands.

    Attributes:
        epoch: Which epoch it is over.
        done: What was taken of that epoch.
        held: What the samplers held before it; or after it, where it has ended.
        ended: Whether nothing of it is left, so that the pass that comes next has nothing to give.
        snapshots: Where the generators stood meanwhile.
        parts: What was taken of each part, where workers read parts of the stream.
        marks: What is known of an iterable dataset's stream there, or of each of its parts.
        seed: The seed of the state that it was read from, if it was.
    """

    epoch: int
    done: Done = ()
    held: Held = field(default_factory=Held)
    ended: bool = False
    snapshots: Snapshots = field(default_factory=Snapshots)
    parts: PartsDone | None = None
    marks: Sequence[Mark] = ()
    seed: int | None = None

    @property
    def is_begun(self) -> bool:
        """Whether it is within a pass, not where one begins."""
        return bool(self.done)

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the epoch was taken."""
        return not any(taken for _, taken in self.done)

    def split(self, num_replicas: int) -> tuple[Done, int]:
        """Return what other numbers of ranks took, and how many items each of so many took after that."""
        return split(self.done, num_replicas)

    def following(self) -> "Place":
        """Return where the next epoch begins, if this one has ended; else this place."""
        return Place(self.epoch + 1, held=self.held, seed=self.seed) if self.ended else self


def split(done: Done, num_replicas: int) -> tuple[Done, int]:
    """Return what other numbers of ranks took, and how many items each of so many took after that."""
    if done and done[-1][0] == num_replicas:
        return done[:-1], done[-1][1]
    return done, 0
