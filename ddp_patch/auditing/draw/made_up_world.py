"""A world of ranks on this machine: in this process, or real ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from ddp_patch.auditing.draw.coding import Coding
from ddp_patch.auditing.draw.drawing import Drawn
from ddp_patch.auditing.draw.processes import RealRank, real_ranks_of
from ddp_patch.auditing.draw.simulate import Rank, ranks_of
from ddp_patch.auditing.draw.subject import Subject
from ddp_patch.auditing.draw.traits import Traits
from ddp_patch.auditing.judge.judging import Epoch, signature
from ddp_patch.auditing.report import Units
from ddp_patch.errors import InvalidOptionError

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
        units: What is shared, as the loader says.

    Raises:
        InvalidOptionError: Each rank has a dataset of its own, so that indices mean something else on each.
    """

    def __init__(
        self, subject: Subject, world_size: int, epochs: int, processes: bool, timeout: float, progress: Progress
    ) -> None:
        if processes and subject.patches:
            # Real ranks take rank 0's seed, and one process alone must have the same.
            subject = replace(subject, options={"seed": 0, **subject.options})
        self.world_size: int = world_size
        self.epochs: int = epochs
        self.processes: bool = processes
        self._timeout, self._progress = timeout, progress
        self.coding: Coding = Coding()
        self._begin(subject)
        traits = [rank.traits for rank in (*self._ranks, self._alone)]
        if len({each.dataset_length for each in traits}) > 1:
            if len({each.base_length for each in traits}) > 1:
                raise _incomparable(subject.name, traits)
            self._begin(replace(subject, in_base=True))
        self.traits: Traits = traits[0]
        self.units: Units = traits[-1].units

    def _begin(self, subject: Subject) -> None:
        """Make the ranks, and the one process that they are compared with."""
        self.subject: Subject = subject
        self._ranks = self._world_of(subject, self.world_size, range(self.epochs))
        whole = replace(subject, max_items=subject.max_items * self.world_size, whole=True)
        (self._alone,) = self._world_of(whole, 1, range(self.epochs))

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
            yield Epoch(number, _in_step(shares), alone, self.units, self.traits.is_iterable)

    def alike(self, epoch: Epoch) -> Epoch:
        """Draw an epoch again with all ranks seeded alike."""
        numbers = range(epoch.number + 1)
        ranks = self._world_of(self.subject, self.world_size, numbers, alike=True)
        for number in numbers:
            drawn = [rank.epoch(number, self.coding) for rank in ranks]
        return replace(epoch, ranks=_in_step(drawn), units=self.units)

    def is_changed_by_epoch(self, first: Drawn) -> bool:
        """Tell whether rank 0's first pass would be another if ``set_epoch(1)`` had been called."""
        told = self._world_of(replace(self.subject, set_epoch=True), self.world_size, [1])
        again = told[0].epoch(1, self.coding).first_steps(len(first.sizes))
        return signature([again]) != signature([first])


def _incomparable(name: str, traits: Sequence[Traits]) -> InvalidOptionError:
    *ranks, alone = ("no length" if each.dataset_length is None else f"length {each.dataset_length}" for each in traits)
    rank = next(rank for rank, length in enumerate(ranks) if length != alone)
    return InvalidOptionError(
        f"audit compares what ranks draw with what one process does, and in {name}(rank, world_size) the dataset of "
        f"rank {rank} of {len(ranks)} has {ranks[rank]}, that of rank 0 of 1 {alone}: indices are each rank's own and "
        "cannot be compared. Make every rank's loader over the whole dataset, or over a torch.utils.data.Subset of it."
    )


def _in_step(ranks: Sequence[Drawn]) -> list[Drawn]:
    """Cut what is a sample to as many steps on every rank."""
    if all(drawn.ended or drawn.error for drawn in ranks):
        return list(ranks)
    steps = min(len(drawn.sizes) for drawn in ranks if not drawn.ended)
    return [drawn if len(drawn.sizes) <= steps else drawn.first_steps(steps) for drawn in ranks]
