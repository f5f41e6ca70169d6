"""Draw epochs on all ranks of a world on this machine, and in a single process to compare them with."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from ddp_patch.auditing.draw.coding import Coding
from ddp_patch.auditing.draw.drawn import Drawn, Epoch, signature
from ddp_patch.auditing.draw.processes import RealRank, real_ranks_of
from ddp_patch.auditing.draw.simulate import Rank, ranks_of
from ddp_patch.auditing.draw.subject import Subject
from ddp_patch.auditing.draw.traits import Traits
from ddp_patch.auditing.report import Units
from ddp_patch.errors import InvalidOptionError

__all__ = ["MadeUpWorld", "Progress"]

Progress: TypeAlias = Callable[[int, int], object]  # called with how many draws are done, and how many there are


class MadeUpWorld:
    """Draw what is audited on every rank, and in a world of one rank, which gets everything there is to shard.

    Args:
        subject: What is audited.
        world_size: The number of ranks.
        epochs: How many epochs each rank draws.
        processes: Whether ranks are real processes; otherwise this process simulates them.
        timeout: Seconds until every real rank must have returned.
        progress: Called after each draw.

    Attributes:
        coding: Gives every item its number.
        traits: Describes rank 0's loader.
        units: Whether ranks shard samples or whole batches, as the single process's loader says.

    Raises:
        InvalidOptionError: Each rank has a dataset of its own, so one index is another sample on each.
    """

    def __init__(
        self, subject: Subject, world_size: int, epochs: int, processes: bool, timeout: float, progress: Progress
    ) -> None:
        if processes and subject.patches:
            # Real ranks take rank 0's seed. Fix one, so that the single process has the same.
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
        """Make the ranks, and the single process to compare them with."""
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
        """Yield every epoch, drawn just then. Call it once: ranks go on from where they are."""
        # Keep no reference to an epoch here: it may be large, and the caller drops it before the next one is drawn.
        return map(self._epoch, range(self.epochs))

    def _epoch(self, number: int) -> Epoch:
        per_epoch = self.world_size + 1
        drawn = []
        for place, rank in enumerate((*self._ranks, self._alone), start=1):
            drawn.append(rank.epoch(number, self.coding))
            self._progress(number * per_epoch + place, self.epochs * per_epoch)
        *ranks, alone = drawn
        return Epoch(number, _in_step(ranks), alone, self.units, self.traits.is_iterable)

    def alike(self, epoch: Epoch) -> Epoch:
        """Draw an epoch again, on new ranks that are all seeded alike."""
        numbers = range(epoch.number + 1)
        ranks = self._world_of(self.subject, self.world_size, numbers, alike=True)
        for number in numbers:
            drawn = [rank.epoch(number, self.coding) for rank in ranks]
        return replace(epoch, ranks=_in_step(drawn), units=self.units)

    def is_changed_by_epoch(self, first: Drawn) -> bool:
        """Tell whether ``set_epoch(1)`` would have given rank 0 another first pass than ``first``."""
        ranks = self._world_of(replace(self.subject, set_epoch=True), self.world_size, [1])
        again = ranks[0].epoch(1, self.coding).first_steps(len(first.sizes))
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
    """Cut what was drawn of a longer epoch to the same number of steps on every rank."""
    if all(drawn.ended or drawn.error for drawn in ranks):
        return list(ranks)
    steps = min(len(drawn.sizes) for drawn in ranks if not drawn.ended)
    return [drawn if len(drawn.sizes) <= steps else drawn.first_steps(steps) for drawn in ranks]
