"""A made-up world: what every rank is given, in one process or in several."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from ddp_patch.auditing.given import Coding, EpochGiven, RankGiven, joined, signature
from ddp_patch.auditing.ranks import Rank, RealRank, drawn_anew, ranks_of
from ddp_patch.auditing.subject import Audited, Traits
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit
from ddp_patch.options import Options
from ddp_patch.plan import Batching, Plan
from ddp_patch.sharding.refusals import unit_shared

__all__ = ["MadeUpWorld"]


# Cuts what one process gets into a rank's share.
_Cut: TypeAlias = Callable[[int, RankGiven], RankGiven]
# Let all of up to this many ranks iterate their loaders; of more, let some.
_ALL, _SOME = 64, 8


class MadeUpWorld:
    """Draw what is audited on every rank, and in a world of one rank, which gets everything there is to shard.

    Args:
        subject: What is audited.
        world_size: The number of ranks.
        epochs: How many epochs each rank draws.
        timeout: Seconds until every real rank, a process of its own, must have returned; None where this process
            simulates them.

    Attributes:
        coding: Gives every item its number.
        traits: Describes rank 0's loader.
        by_value: Whether samples are compared by their values, because each rank holds data of its own in memory.
        iterating: Which ranks iterate their own loaders. The others' shares are cut from what one process gets, as
            long as that gives what these iterate.

    Raises:
        InvalidOptionError: Each rank has a dataset of its own, so one index is another sample on each, and the samples
            are not held in memory.
    """

    def __init__(self, subject: Audited, world_size: int, epochs: int, timeout: float | None) -> None:
        self.processes: bool = timeout is not None
        if self.processes and subject.patches:
            # Real ranks take rank 0's seed. Fix one, so that the single process has the same.
            subject = replace(subject, options={"seed": 0, **subject.options})
        self.subject: Audited = subject
        self.world_size: int = world_size
        self.epochs: int = epochs
        self.coding: Coding = Coding()
        self._timeout = timeout
        self._cut = None if self.processes or world_size <= _ALL else _cut_of(subject, world_size)
        self.iterating: Sequence[int] = range(world_size)
        if self._cut is not None:
            self.iterating = np.linspace(0, world_size - 1, _SOME).astype(int).tolist()
        self._ranks = self._made(subject, self.iterating)
        # What balanced ranks get is compared with what one process gets without: it loses nothing in a deal.
        given = {name: value for name, value in subject.options.items() if name != "cost"}
        self._whole = replace(subject, max_items=subject.max_items * world_size, whole=True, options=given)
        (self._alone,) = ranks_of(self._whole, [0], range(epochs), timeout)
        self.traits: Traits = self._ranks[0].traits
        self.by_value: bool = subject.is_made and self._holds_own_data()

    def _made(self, subject: Audited, only: Sequence[int] | None = None) -> Sequence[Rank | RealRank]:
        """Make ranks that iterate their own loaders."""
        return ranks_of(subject, range(self.world_size), range(self.epochs), self._timeout, only)

    def _holds_own_data(self) -> bool:
        """Tell whether ranks have datasets of their own below torch's ``Subset`` layers, which hold their samples."""
        everyone = [*self._ranks, self._alone]
        if len({id(rank.base) for rank in everyone}) == 1:
            return False
        if all(rank.traits.is_in_memory for rank in everyone):
            return True
        *lengths, alone = (rank.traits.base_length for rank in everyone)
        if other := [rank for rank, length in enumerate(lengths) if length != alone]:
            raise InvalidOptionError(
                f"audit compares what ranks draw with what one process does, and in {self.subject.name}(rank, "
                f"world_size) the dataset of rank {other[0]} of {len(lengths)} has length {lengths[other[0]]}, that of "
                f"rank 0 of 1 length {alone}: indices are each rank's own and cannot be compared, and the samples are "
                "not held in memory. Make every rank's loader over the whole dataset, or over a "
                "torch.utils.data.Subset of it."
            )
        return False

    def drawn(self) -> Iterator[EpochGiven]:
        """Yield every epoch, drawn just then. Call it once: ranks go on from where they are."""
        # Keep no reference to an epoch here: it may be large, and the caller drops it before the next one is drawn.
        return map(self._epoch, range(self.epochs))

    def _epoch(self, number: int) -> EpochGiven:
        *ranks, alone = (rank.epoch(number, self.coding, self.by_value) for rank in (*self._ranks, self._alone))
        if not self.subject.patches:
            alone = alone.read_once()
        if self._cut is not None:
            ranks = self._with_others(self._cut, number, ranks, alone)
        # Each batch that is divided is a part that ranks share, too.
        parts = tuple(alone.sizes.tolist()) if self.traits.divides_batches else alone.parts
        return EpochGiven(number, _in_step(ranks), alone, self._alone.traits.units, parts, self.traits.is_iterable)

    def _with_others(self, cut: _Cut, number: int, some: Sequence[RankGiven], alone: RankGiven) -> list[RankGiven]:
        """Return what all ranks get: cut from what one process does if some of them got just that, else iterated."""
        ranks = [cut(rank, alone) for rank in range(self.world_size)]
        own = dict(zip(self.iterating, some, strict=True))
        if all(_are_equal(*_in_step([mine, ranks[rank]])) for rank, mine in own.items()):
            return [own.get(rank, share) for rank, share in enumerate(ranks)]
        self._cut, self.iterating = None, range(self.world_size)
        self._ranks = self._made(self.subject)
        return drawn_anew(self._ranks, number, self.coding, self.by_value)

    def alike(self, epoch: EpochGiven) -> EpochGiven:
        """Draw an epoch again, on new ranks that are all seeded alike."""
        if self._cut is not None:
            return epoch  # what one process gets does not depend on how ranks are seeded
        ranks = ranks_of(self.subject, [0] * self.world_size, range(epoch.number + 1), self._timeout)
        return replace(epoch, ranks=_in_step(drawn_anew(ranks, epoch.number, self.coding, self.by_value)))

    def is_changed_by_epoch(self, first: RankGiven) -> bool:
        """Tell whether ``set_epoch(1)`` would have given rank 0 another first pass than ``first``."""
        subject = replace(self.subject, set_epoch=True)
        ranks = ranks_of(subject, range(self.world_size), [1], self._timeout, only=[0])
        again = ranks[0].epoch(1, self.coding, self.by_value).first_steps(len(first.sizes))
        return signature([again]) != signature([first])

    def unpatched(self, seed: int) -> RankGiven:
        """Draw the first epoch of the loader as it is, whole, in one process."""
        subject = replace(self._whole, patch=False, options={}, set_epoch=True)
        (rank,) = ranks_of(subject, [seed], [0], self._timeout)
        return rank.epoch(0, self.coding)


def _cut_of(subject: Audited, world_size: int) -> _Cut | None:
    """Return what cuts a rank's share of a patched loader; None if that is more than cutting one order."""
    if not subject.patch or not isinstance(subject.make, LoaderFacts):
        return None
    options = Options(**subject.options)
    shared = unit_shared(subject.make, options.share)
    if shared.unit is ShardedUnit.ITERABLE or options.divides_batches or options.costs is not None:
        return None
    if shared.unit is ShardedUnit.SAMPLE:
        batching, most = shared.batching, subject.max_items
        return lambda rank, alone: share_of_samples(Plan(rank, world_size, options.uneven), batching, most, alone)
    return lambda rank, alone: share_of_steps(Plan(rank, world_size, options.uneven), alone)


def share_of_samples(plan: Plan, batching: Batching, most: int, alone: RankGiven) -> RankGiven:
    """Return what a rank gets of the samples that one process does, in batches of its own; ``most`` of a long epoch.

    Examples:
        >>> alone = RankGiven(np.array([7, 8, 9, 5, 6]), np.array([2, 2, 1]), ended=True)
        >>> batching = Batching(2, drop_last=False)
        >>> [share_of_samples(Plan(rank, 2), batching, 100, alone).items.tolist() for rank in range(2)]
        [[7, 9, 6], [8, 5, 7]]
    """
    if alone.ended:
        own, again = plan.own_and_repeated(len(alone.items))
        items = alone.items[own.start : own.stop : own.step]
        items = joined([items, alone.items[again.start : again.stop : again.step]]) if again else items
    else:
        items = alone.items[plan.rank :: plan.num_replicas][:most]
    size, over = batching.size, len(items) % batching.size
    if over and (batching.drop_last or not alone.ended):
        items, over = items[: len(items) - over], 0
    sizes = np.full(-(-len(items) // size), size, np.int32)
    sizes[len(sizes) - 1 :] = over or size
    return RankGiven(items, sizes, alone.ended)


def share_of_steps(plan: Plan, alone: RankGiven) -> RankGiven:
    """Return what a rank gets of the steps that one process makes."""
    places = plan.own_and_repeated(len(alone.sizes)) if alone.ended else (plan.share(len(alone.sizes)),)
    steps = np.concatenate([np.asarray(part, np.int64) for part in places])
    ends = np.cumsum(alone.sizes)
    batches = [alone.items[ends[step] - alone.sizes[step] : ends[step]] for step in steps]
    return RankGiven(joined(batches), alone.sizes[steps], alone.ended)


def _are_equal(one: RankGiven, other: RankGiven) -> bool:
    """Tell whether a rank got the same samples in the same batches, and all of them where the other did."""
    is_same = np.array_equal(one.items, other.items) and np.array_equal(one.sizes, other.sizes)
    return is_same and one.ended == other.ended and one.error is None


def _in_step(ranks: Sequence[RankGiven]) -> list[RankGiven]:
    """Cut what was drawn of a longer epoch to the same number of steps on every rank."""
    if all(given.ended or given.error for given in ranks):
        return list(ranks)
    steps = min(len(given.sizes) for given in ranks if not given.ended)
    return [given if len(given.sizes) <= steps else given.first_steps(steps) for given in ranks]
