"""How far a pass over a sampler has come, and from where a resumed one goes on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any, TypeVar

import torch

__all__ = ["Progress", "blocks"]

T = TypeVar("T")

_FIRST_BLOCK, _LARGEST_BLOCK = 64, 4096


@dataclass
class Progress:
    """How far a pass has come."""

    epoch: int
    generators: list[torch.Tensor]  # the states of the sampler's generators before the pass
    resumed: dict[str, Any] | None = None  # the state that this pass goes on from, until it is reached
    given: int = 0
    part: Iterator[Any] = field(default_factory=lambda: iter(()))

    def __post_init__(self) -> None:
        self.skip = self.resumed["taken"] if self.resumed else 0
        self.ended = self.resumed["ended"] if self.resumed else False

    @property
    def taken(self) -> int:
        """How many of this rank's items were taken, those before a resume included."""
        return max(self.skip, self.given - length_hint(self.part))

    def begin(self, part: Sequence[T]) -> Iterator[T]:
        """Return an iterator over the part of this rank's items that comes next."""
        self.part = iter(part[max(0, self.skip - self.given) :])
        self.given += len(part)
        return self.part


def blocks(positions: range, largest: int = _LARGEST_BLOCK) -> Iterator[range]:
    """Cut positions into blocks: a short one first, so that the first batch comes at once, then twice as many each."""
    start, size = 0, _FIRST_BLOCK
    while start < len(positions):
        yield positions[start : start + size]
        start, size = start + size, min(2 * size, largest)
