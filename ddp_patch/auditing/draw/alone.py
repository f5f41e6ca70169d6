"""Draw what a single process gets, with which the ranks are compared."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from ddp_patch.auditing.draw.coding import Coding
from ddp_patch.auditing.draw.drawn import Drawn
from ddp_patch.auditing.draw.processes import RealRank
from ddp_patch.auditing.draw.simulate import Rank
from ddp_patch.auditing.draw.subject import Subject

__all__ = ["Alone", "WorldOf", "same_items"]

# Makes the ranks of a world: of what, as which ranks they are seeded, and the epochs that they will draw.
WorldOf: TypeAlias = Callable[[Subject, Sequence[int], Sequence[int]], Sequence[Rank | RealRank]]


class Alone:
    """Draws what one process gets of a loader, with all its workers, and of what they all read, once.

    Several workers that all read the whole of an iterable dataset give every sample several times. That is no more to
    share than what one of them reads.

    Args:
        subject: What is audited, whole.
        numbers: The epochs to draw.
        world_of: Makes the process.
        seed: As which rank it is seeded.

    Attributes:
        rank: The process.
    """

    def __init__(self, subject: Subject, numbers: Sequence[int], world_of: WorldOf, seed: int = 0) -> None:
        (alone,) = world_of(subject, [seed], numbers)
        self.rank: Rank | RealRank = alone
        self._subject, self._world_of, self._seed = replace(subject, by_one_worker=True), world_of, seed
        self._one: Rank | RealRank | None = None
        self._workers: int = self.rank.traits.num_workers
        if self.rank.traits.is_iterable and self._workers > 1 and not subject.patches:
            (self._one,) = world_of(self._subject, [seed], numbers)

    def epoch(self, number: int, coding: Coding) -> Drawn:
        """Draw the next pass as epoch ``number``."""
        drawn = self.rank.epoch(number, coding)
        if self._one is None:
            return drawn
        once = self._one.epoch(number, coding)
        if drawn.error is not None or once.error is not None:
            return drawn  # a dataset may need all of its workers
        is_read_by_all = _is_each(drawn, once, self._workers)
        if not (is_read_by_all or drawn.asked):
            # Workers that do not know which they are read different samples if these are drawn at random.
            is_read_by_all = not same_items(once, self._drawn_anew(number, coding))
        return once if is_read_by_all else drawn

    def _drawn_anew(self, number: int, coding: Coding) -> Drawn:
        """Draw an epoch with one worker in a process that is seeded otherwise."""
        numbers = range(number + 1)
        (other,) = self._world_of(self._subject, [self._seed + 1], numbers)
        return [other.epoch(each, coding) for each in numbers][-1]


def same_items(first: Drawn, second: Drawn) -> bool:
    """Tell whether two processes drew the same samples, in whatever order."""
    return np.array_equal(_in_order(first), _in_order(second))


def _is_each(drawn: Drawn, once: Drawn, workers: int) -> bool:
    """Tell whether each of several workers drew what one alone draws, as far as both were drawn."""
    if drawn.ended != once.ended or (drawn.ended and len(drawn.items) != workers * len(once.items)):
        return False
    turns = min(len(drawn.sizes) // workers, len(once.sizes))
    each = np.repeat(_in_order(once.first_steps(turns)), workers)
    return np.array_equal(_in_order(drawn.first_steps(turns * workers)), each)


def _in_order(drawn: Drawn) -> Any:
    return np.sort(drawn.items)
