"""Draw epochs on all ranks of a world on this machine, and in a single process to compare them with."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from ddp_patch.auditing.draw.alone import Alone
from ddp_patch.auditing.draw.coding import Coding, Numbers
from ddp_patch.auditing.draw.drawn import Drawn, Epoch, signature
from ddp_patch.auditing.draw.processes import RealRank, real_ranks_of
from ddp_patch.auditing.draw.simulate import Rank, ranks_of
from ddp_patch.auditing.draw.subject import Subject
from ddp_patch.auditing.draw.traits import Traits
from ddp_patch.auditing.epoch_report import Units
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
        InvalidOptionError: Each rank has a dataset of its own, so one index is another sample on each, and the samples
            are not held in memory.
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
        traits = [rank.traits for rank in self._everyone()]
        if subject.is_made and not self._has_one_base():
            if None in self._digests():
                raise _incomparable(subject.name, traits)
            self._begin(replace(subject, by_contents=True))
        self.traits: Traits = traits[0]
        self.units: Units = traits[-1].units

    def _begin(self, subject: Subject) -> None:
        """Make the ranks, and the single process to compare them with."""
        self.subject: Subject = subject
        self._ranks = self._world_of(subject, range(self.world_size), range(self.epochs))
        # What balanced ranks get is compared with what one process gets without: it loses nothing in a deal.
        whole = replace(subject, max_items=subject.max_items * self.world_size, whole=True, balance={})
        self._alone = Alone(whole, range(self.epochs), self._world_of)
        # A patched loader goes through its epochs by itself.
        self._given = replace(whole, patch=False, options={}, set_epoch=True)
        is_given = subject.patches and self._ranks[0].traits.is_iterable
        self._unpatched = Alone(self._given, range(self.epochs), self._world_of) if is_given else None

    def _everyone(self) -> Sequence[Rank | RealRank]:
        return [*self._ranks, self._alone.rank]

    def _has_one_base(self) -> bool:
        """Tell whether an index of the dataset below ``Subset`` layers is one sample on all ranks, as far as one sees.

        Only of data in memory are the samples compared: an audit reads no other.
        """
        everyone = self._everyone()
        if len({id(rank.base) for rank in everyone}) == 1:
            return True
        return len({rank.traits.base_length for rank in everyone}) == 1 and len(set(self._digests())) == 1

    def _digests(self) -> list[str | None]:
        known: dict[int, str | None] = {}
        ranks = self._everyone()
        return [known[at] if (at := id(rank.base)) in known else known.setdefault(at, rank.digest) for rank in ranks]

    def whole(self) -> Numbers | None:
        """Return the indices of what all ranks' datasets are made of: the last layer that they have in common.

        Returns:
            Indices of the dataset below ``Subset`` layers, shape (samples,). None where there are none to compare.
        """
        if not self.subject.is_made or self.subject.by_contents or self.traits.is_iterable:
            return None
        common = None
        for first, *others in zip(*(rank.layers for rank in self._everyone()), strict=False):
            if not all(np.array_equal(first, other) for other in others):
                break
            common = first
        return common

    def _world_of(self, subject: Subject, seeds: Sequence[int], numbers: Sequence[int]) -> Sequence[Rank | RealRank]:
        """Return the ranks of a world, each seeded as one of the ``seeds`` says."""
        if self.processes:
            return real_ranks_of(subject, seeds, numbers, self._timeout)
        return ranks_of(subject, seeds)

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
        unpatched = None if self._unpatched is None else self._unpatched.epoch(number, self.coding)
        return Epoch(number, _in_step(ranks), alone, self.units, self.traits.is_iterable, unpatched)

    def unpatched_anew(self, number: int) -> Drawn:
        """Draw an epoch of the unpatched loader once more, in a process that is seeded otherwise."""
        numbers = range(number + 1)
        again = Alone(self._given, numbers, self._world_of, seed=1)
        return [again.epoch(each, self.coding) for each in numbers][-1]

    def alike(self, epoch: Epoch) -> Epoch:
        """Draw an epoch again, on new ranks that are all seeded alike."""
        numbers = range(epoch.number + 1)
        ranks = self._world_of(self.subject, [0] * self.world_size, numbers)
        for number in numbers:
            drawn = [rank.epoch(number, self.coding) for rank in ranks]
        return replace(epoch, ranks=_in_step(drawn), units=self.units)

    def is_changed_by_epoch(self, first: Drawn) -> bool:
        """Tell whether ``set_epoch(1)`` would have given rank 0 another first pass than ``first``."""
        ranks = self._world_of(replace(self.subject, set_epoch=True), range(self.world_size), [1])
        again = ranks[0].epoch(1, self.coding).first_steps(len(first.sizes))
        return signature([again]) != signature([first])


def _incomparable(name: str, traits: Sequence[Traits]) -> InvalidOptionError:
    *ranks, alone = map(_size_of_data, traits)
    rank = next((rank for rank, size in enumerate(ranks) if size != alone), len(ranks) - 1)
    return InvalidOptionError(
        f"audit compares what ranks draw with what one process does, and in {name}(rank, world_size) the dataset of "
        f"rank {rank} of {len(ranks)} has {ranks[rank]}, that of rank 0 of 1 {alone}: indices are each rank's own and "
        "cannot be compared, and the samples are not held in memory as values. Make every rank's loader over the whole "
        "dataset, or over a torch.utils.data.Subset of it."
    )


def _size_of_data(traits: Traits) -> str:
    if traits.dataset_length is None:
        return "no length"
    below = "" if traits.base_length == traits.dataset_length else f" over a dataset of length {traits.base_length}"
    return f"length {traits.dataset_length}{below}"


def _in_step(ranks: Sequence[Drawn]) -> list[Drawn]:
    """Cut what was drawn of a longer epoch to the same number of steps on every rank."""
    if all(drawn.ended or drawn.error for drawn in ranks):
        return list(ranks)
    steps = min(len(drawn.sizes) for drawn in ranks if not drawn.ended)
    return [drawn if len(drawn.sizes) <= steps else drawn.first_steps(steps) for drawn in ranks]
