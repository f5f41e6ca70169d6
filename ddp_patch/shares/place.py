"""A loader's position in its epochs, as plain values that can be saved."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddp_patch.plan import Done
from ddp_patch.shares.held import Held

__all__ = ["First", "Mark", "PartsDone", "Place", "Snapshots", "split"]


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The states of a dataset's generators within a pass, because others draw from them too.

    A ``DataLoader`` draws its workers' seed from its generator, which a dataset may share.

    Attributes:
        at_first: Their states when the first item was drawn, if they had moved since the pass began.
        latest: How many items of its share a rank had drawn when the state was taken, and their states then.
    """

    at_first: Sequence[Any] | None = None
    latest: tuple[int, Sequence[Any]] | None = None


@dataclass(frozen=True, slots=True)
class PartsDone:
    """How much was taken of an iterable dataset that workers read in parts.

    Attributes:
        first: Whose turn is next.
        done: What was taken of each worker's part.
    """

    first: int
    done: Sequence[Done]


class First(NamedTuple):
    """Hashes of a stream's first items, to recognise the stream after a restart.

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
        """Return whether another stream begins with the same items, perhaps augmented differently.

        Args:
            other: The hashes of the other stream.
            is_drawn: Whether that one may have been read already. Then only exactly the same items will do.
        """
        if is_drawn:
            return self.whole == other.whole and self.distinct >= min(2, self.seen)
        pairs = ((self.whole, other.whole), (self.names, other.names), (self.numbers, other.numbers))
        return any(one == again != 0 for one, again in pairs) or not (self.names or self.numbers)


@dataclass(frozen=True, slots=True)
class Mark:
    """What identifies an iterable dataset's stream, or one worker's part of it, besides how much was taken.

    Attributes:
        first: The hashes of its first items; None if nobody looked.
        state: The dataset's own state, as the only element; empty if it has no state with a position.
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
    """A position in the epochs: where a pass begins, or how far it is.

    Attributes:
        epoch: Which epoch it is over.
        done: What was taken of that epoch.
        held: What the samplers held before it; after it, if it has ended.
        ended: Whether nothing of it is left, so that the next pass is empty.
        snapshots: The states of the generators meanwhile.
        parts: What was taken of each part, if workers read parts of the stream.
        marks: What identifies an iterable dataset's stream there, or each of its parts.
        seed: The seed of the state that it was read from, if any.
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
        """Return what other numbers of ranks took, and how many items each of this many took after that."""
        return split(self.done, num_replicas)

    def following(self) -> "Place":
        """Return where the next epoch begins, if this one has ended; otherwise this position."""
        return Place(self.epoch + 1, held=self.held, seed=self.seed) if self.ended else self


def split(done: Done, num_replicas: int) -> tuple[Done, int]:
    """Return what other numbers of ranks took, and how many items each of this many took after that."""
    if done and done[-1][0] == num_replicas:
        return done[:-1], done[-1][1]
    return done, 0
