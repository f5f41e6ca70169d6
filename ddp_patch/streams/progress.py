"""How far a pass over a sampler has come."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any, TypeVar

__all__ = ["Progress"]

T = TypeVar("T")


@dataclass(kw_only=True)
class Progress:
    """Counts the items that were taken from a pass.

    Attributes:
        skip: How many items an earlier pass took, which this one skips.
        given: How many items were drawn, skipped ones included.
        ended: Whether there are no more items.
        part: The drawn items that nobody has taken yet.

    Examples:
        >>> progress = Progress(skip=1)
        >>> part = progress.begin(["a", "b", "c"])
        >>> next(part), progress.taken
        ('b', 2)
    """

    skip: int = 0
    given: int = 0
    ended: bool = False
    part: Iterator[Any] = field(default_factory=lambda: iter(()))

    @property
    def taken(self) -> int:
        """How many items were taken, skipped ones included."""
        return max(self.skip, self.given - length_hint(self.part))

    def begin(self, part: Sequence[T]) -> Iterator[T]:
        """Return an iterator over the items that were drawn next, without those to skip."""
        self.part = iter(part[max(0, self.skip - self.given) :])
        self.given += len(part)
        return self.part
