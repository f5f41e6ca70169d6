"""A world of ranks on this machine: in this process, or real ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from ddp_patch.auditing.coding import Coding
from ddp_patch.auditing.drawing import Drawn
from ddp_patch.auditing.judge import Epoch, signature
from ddp_patch.auditing.processes import RealRank, real_ranks_of
from ddp_patch.auditing.report import Units
from ddp_patch.auditing.simulate import Rank, ranks_of
from ddp_patch.auditing.subject import Subject
from ddp_patch.auditing.traits import Traits

__all__ = ["MadeUpWorld", "Progress"]

Progress: TypeAlias = Callable[[int, int], object]  # how many of how many draws are done


class MadeUpWorld:
    """Draws what is audited on every rank, and in a world of one rank, which gets what there is to share.

    Args:
        subject: What is audited.
        world_size: How many ranks.
        epochs: How many epochs each draws.
        processes: Whether the ranks are real ones.
        timeout: How many seconds these may take.
        progress: Called with how many of how many draws are done.

    Attributes:
        coding: Gives every item its number.
        traits: Of rank 0's loader.
        units: What is shared.
    """

    def __init__(
        self, subject: Subject, world_size: int, epochs: int, processes: bool, timeout: float, progress: Progress
    ) -> None:
        if processes and subject.patches:
            # Real ranks take rank 0's seed, and one process alone must have the same.
            subject = replace(subject, options={"seed": 0, **subject.options})
        self.subject: Subject = subject
        self.world_size: int = world_size
        self.epochs: int = epochs
        self.processes: bool = processes
        self._timeout, self._progress = timeout, progress
        self.coding: Coding = Coding()
        self._ranks = self._world_of(subject, world_size, range(epochs))
        self.traits: Traits = self._ranks[0].traits
        whole = replace(subject, max_items=subject.max_items * world_size, whole=True)
        (self._alone,) = self._world_of(whole, 1, range(epochs))
        self.units: Units = self._alone.traits.units

    def _world_of(
        self, subject: Subject, world_size: int, numbers: Sequence[int], alike: bool = False
    ) -> Sequence[Rank | RealRank]:
        if self.processes:
            return real_ranks_of(subject, world_size, numbers, alike, self._timeout)
        return ranks_of(subject, world_size, alike)

    def drawn(self) -> Iterator[Epoch]:
        """Draw every epoch; once."""
        done, of = 0, self.epochs * (self.world_size + 1)
        for number in range(self.epochs):
            drawn = []
            for rank in (*self._ranks, self._alone):
                drawn.append(rank.epoch(number, self.coding))
                done += 1
                self._progress(done, of)
            *shares, alone = drawn
            del drawn
            yield Epoch(number, _in_step(shares), alone, self.units)

    def alike(self, epoch: Epoch) -> Epoch:
        """Draw an epoch again with all ranks seeded alike."""
        numbers = range(epoch.number + 1)
        ranks = self._world_of(self.subject, self.world_size, numbers, alike=True)
        for number in numbers:
            drawn = [rank.epoch(number, self.coding) for rank in ranks]
        return Epoch(epoch.number, _in_step(drawn), epoch.alone, self.units)

    def is_changed_by_epoch(self, first: Drawn) -> bool:
        """Tell whether rank 0's first pass would be another if ``set_epoch(1)`` had been called."""
        told = self._world_of(replace(self.subject, set_epoch=True), self.world_size, [1])
        again = told[0].epoch(1, self.coding).first_steps(len(first.sizes))
        return signature([again]) != signature([first])


def _in_step(ranks: Sequence[Drawn]) -> list[Drawn]:
    """Cut what is a sample to as many steps on every rank."""
    if all(drawn.ended or drawn.error for drawn in ranks):
        return list(ranks)
    steps = min(len(drawn.sizes) for drawn in ranks if not drawn.ended)
    return [drawn if len(drawn.sizes) <= steps else drawn.first_steps(steps) for drawn in ranks]
