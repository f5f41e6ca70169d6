"""How far a sampler's items were taken."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any, TypeVar

__all__ = ["Progress"]

T = TypeVar("T")


@dataclass(kw_only=True)
class Progress:
    """How far a pass has come.

    Attributes:
        skip: How many items were taken before it: it goes on after these.
        given: How many items were drawn, those skipped included.
        ended: Whether there are no more.
        part: What of the drawn items was not taken yet.
    """

    skip: int = 0
    given: int = 0
    ended: bool = False
    part: Iterator[Any] = field(default_factory=lambda: iter(()))

    @property
    def taken(self) -> int:
        """How many items were taken, those skipped included."""
        return max(self.skip, self.given - length_hint(self.part))

    def begin(self, part: Sequence[T]) -> Iterator[T]:
        """Return an iterator over what is not to be skipped of the items that come next."""
        self.part = iter(part[max(0, self.skip - self.given) :])
        self.given += len(part)
        return self.part
