"""Hold what ranks drew, as plain arrays of numbers."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_patch.auditing.draw.coding import Numbers
from ddp_patch.auditing.epoch_report import Units

__all__ = ["Drawn", "Epoch", "signature"]

# Hash this many items at once: converting them all would need twice the memory of an epoch.
_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class Drawn:
    """Hold what one rank drew in one epoch.

    Attributes:
        items: Number of each item in the order drawn, shape (items,).
        sizes: Number of items in each step's batch, shape (steps,).
        ended: Whether the epoch came to its end; if not, these are its first items.
        lengths: What ``len(loader)`` returned before and after the epoch; None where it raised.
        seconds: Time spent drawing, without the time spent recording.
        memory: Bytes by which the process grew while drawing; None where the system does not report it.
        error: The exception that ended the epoch, as text; None without one.
        asked: Whether an iterable dataset asked which worker it is in.
        idle: Numbers of the workers that gave nothing of an iterable dataset.
        parts: How long each part of the stream is that ranks share by itself; empty where they share one stream.
    """

    items: Numbers
    sizes: Numbers
    ended: bool
    lengths: tuple[int | None, int | None] = (None, None)
    seconds: float = 0.0
    memory: int | None = None
    error: str | None = None
    asked: bool = False
    idle: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()

    def first_steps(self, steps: int) -> "Drawn":
        """Return what the first ``steps`` steps drew."""
        sizes = self.sizes[:steps]
        return replace(self, items=self.items[: int(sizes.sum())], sizes=sizes, ended=False)


@dataclass(frozen=True, slots=True)
class Epoch:
    """Hold one epoch as every rank drew it, and as a single process would.

    Attributes:
        number: The epoch's number, from 0.
        ranks: What each rank drew, by rank.
        alone: What a single process would draw, its last incomplete batch included.
        units: Whether ranks shard samples or whole batches.
        is_iterable: Whether items are samples read from an iterable dataset, not indices.
        unpatched: What the unpatched loader of an iterable dataset gives a single process; None where none is patched.
    """

    number: int
    ranks: Sequence[Drawn]
    alone: Drawn
    units: Units
    is_iterable: bool
    unpatched: Drawn | None = None

    @property
    def is_sample(self) -> bool:
        """Tell whether only a part of the epoch was drawn."""
        return not all(drawn.ended for drawn in (*self.ranks, self.alone))

    @property
    def expected(self) -> int:
        """Return how many samples or batches a single process would get."""
        return len(self.alone.items) if self.units == "samples" else len(self.alone.sizes)

    @property
    def parts(self) -> tuple[int, ...]:
        """Return how many units each part has that ranks share in rounds of its own; one where they share a stream."""
        return self.alone.parts or (self.expected,)

    @property
    def filling(self) -> int:
        """Return how many units fill the last round of each part."""
        return sum(-length % len(self.ranks) for length in self.parts)

    @property
    def steps(self) -> int:
        """Return how many steps the rank with the most steps makes."""
        return max(len(drawn.sizes) for drawn in self.ranks)


def signature(ranks: Sequence[Drawn]) -> bytes:
    """Return a hash of what ranks drew: two epochs with one order have one hash."""
    running = hashlib.blake2b(digest_size=16)
    for drawn in ranks:
        running.update(b"%d:" % len(drawn.items))
        for start in range(0, len(drawn.items), _PIECE):
            running.update(drawn.items[start : start + _PIECE].astype(np.int64).tobytes())
    return running.digest()
