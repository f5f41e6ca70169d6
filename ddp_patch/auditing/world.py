"""A simulated world: the samples of every rank in an epoch, compared with the samples of one process."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddp_patch.auditing.ranks import Audited, Coding, Numbers, Rank, RankGiven
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit
from ddp_patch.loaders.nested_samplers import length_of
from ddp_patch.options import Options
from ddp_patch.positions_and_padding import Batching, Plan
from ddp_patch.sharding.refusals import unit_shared

Costs: TypeAlias = NDArray[np.float64]
# Returns the cost of each of a rank's steps.
StepCosts: TypeAlias = Callable[[RankGiven], Costs]
# Three arrays of samples: missing on the ranks, repeated on the ranks, and never in one process. A sample is in an
# array as many times as it is missing or too many, in order.
Coverage: TypeAlias = tuple[Numbers, Numbers, Numbers]


@dataclass(frozen=True, slots=True)
class EpochGiven:
    """The samples of every rank in an epoch, and of a single process.

    Attributes:
        number: The epoch's number, from 0.
        ranks: The samples of each rank, by rank.
        alone: The samples of a single process, with its last, incomplete batch.
        parts: How many samples each part has, if ranks share several parts in separate rounds; else empty.
        is_iterable: Whether items are samples read from an iterable dataset, not indices.
    """

    number: int
    ranks: Sequence[RankGiven]
    alone: RankGiven
    parts: tuple[int, ...]
    is_iterable: bool

    @property
    def is_sample(self) -> bool:
        """Whether only a part of the epoch was drawn."""
        return not all(given.ended for given in (*self.ranks, self.alone))

    @property
    def largest_batch(self) -> int:
        """How many samples the largest batch has."""
        return max(int(given.sizes.max(initial=1)) for given in (*self.ranks, self.alone))

    def coverage(self) -> Coverage | None:
        """Compare the ranks' samples with one process's; return None if samples cannot be compared.

        Samples cannot be compared if all are equal, if an iterable dataset makes new samples in each pass, or if only a
        part of an epoch was drawn, in which one process repeats samples.
        """
        expected, shares = self.alone.items, [given.items for given in self.ranks]
        if self.is_constant or self._is_made_anew():
            return None
        if not self.is_sample:
            return coverage(expected, shares)
        is_distinct = len(np.unique(expected)) == len(expected)
        return coverage(np.unique(_joined(shares)), shares) if is_distinct else None

    @property
    def is_constant(self) -> bool:
        """Whether all samples are equal by value; indices of different samples never are."""
        items = self.alone.items
        is_by_value = len(items) > 1 and (self.is_iterable or items[0] < 0)
        return bool(is_by_value) and all(bool((each.items == items[0]).all()) for each in (self.alone, *self.ranks))

    def _is_made_anew(self) -> bool:
        """Return whether an iterable dataset makes new samples in each pass: ranks got few samples of one process.

        Rank 0 does not count, because it starts with the random states of the single process, and may make the same
        samples. Samples that are whole numbers never count as new.
        """
        got = _joined([given.items for given in self.ranks[1:]])
        if not self.is_iterable or self.is_sample or not len(self.alone.items) or got.max(initial=-1) >= 0:
            return False
        return bool(10 * np.count_nonzero(np.isin(got, self.alone.items)) < len(got))

    def foreign_batches(self) -> list[Numbers]:
        """Return the ranks' batches that one process does not make: they have other samples, or in another order."""
        own = {batch.astype(np.int64).tobytes() for batch in self.alone.batches}
        every = (batch for given in self.ranks for batch in given.batches)
        return [batch for batch in every if batch.astype(np.int64).tobytes() not in own]

    def has_torn_batches(self) -> bool:
        """Return whether several ranks have pieces of most of the batches that one process makes."""
        wholes = {frozenset(batch.tolist()) for batch in self.alone.batches}
        whole_of = {item: whole for whole in wholes for item in whole}
        ranks_with_piece: dict[frozenset[int], set[int]] = {}
        for rank, given in enumerate(self.ranks):
            for piece in {frozenset(batch.tolist()) for batch in given.batches}:
                for whole in {whole_of[item] for item in piece if item in whole_of}:
                    if piece < whole:
                        ranks_with_piece.setdefault(whole, set()).add(rank)
        return 2 * sum(len(ranks) > 1 for ranks in ranks_with_piece.values()) > len(wholes)


# ---- counting ----


def coverage(expected: Numbers, shares: Sequence[Numbers]) -> Coverage:
    """Compare the samples in the ranks' shares with the expected samples.

    Examples:
        >>> [found.tolist() for found in coverage(np.array([0, 1, 2]), [np.array([0, 2]), np.array([2, 0, 0, 7])])]
        [[1], [0, 0, 2], [7]]
    """
    names, (counted, got) = dense([expected, _joined(shares)])
    difference = counts_of(counted, len(names))
    is_expected = difference > 0
    difference -= counts_of(got, len(names))

    def as_often(where: Numbers) -> Numbers:
        return np.repeat(names[where], np.abs(difference[where]))

    too_seldom, too_often = np.flatnonzero(difference > 0), np.flatnonzero(difference < 0)
    repeated = is_expected[too_often]
    return as_often(too_seldom), as_often(too_often[repeated]), as_often(too_often[~repeated])


def _joined(parts: Sequence[Numbers]) -> Numbers:
    """Concatenate arrays, of which there may be none."""
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def dense(arrays: Sequence[Numbers]) -> tuple[Numbers, list[Numbers]]:
    """Renumber the elements of arrays, from 0 and with few gaps, so that a table indexed by number is small.

    Returns:
        The old number of each new number, shape (numbers,); and the arrays in new numbers.

    Examples:
        >>> names, (first, second) = dense([np.array([10**15, 7]), np.array([7])])
        >>> names.tolist(), first.tolist(), second.tolist()
        ([7, 1000000000000000], [1, 0], [0])
    """
    bounds = [int(bound) for array in arrays if len(array) for bound in (array.min(), array.max())]
    low, high = min(bounds, default=0), max(bounds, default=-1)
    if high - low < 4 * sum(map(len, arrays)) + 1024:  # dense enough already, as indices of a dataset are
        names = np.arange(low, high + 1, dtype=np.result_type(*arrays))
        return names, [array - low if low else array for array in arrays]
    names, places = np.unique(np.concatenate(arrays), return_inverse=True)
    return names, np.split(places, np.cumsum([len(array) for array in arrays])[:-1])


# How many items are counted at once: bincount converts its argument to 64 bits.
_PIECE = 2**21


def counts_of(items: Numbers, span: int) -> Numbers:
    """Return how often each number below ``span`` occurs, shape (span,)."""
    counts = np.zeros(span, np.int32)
    for start in range(0, len(items), _PIECE):
        counts += np.bincount(items[start : start + _PIECE], minlength=span).astype(np.int32)
    return counts


def signature(ranks: Sequence[RankGiven]) -> bytes:
    """Return a hash of the ranks' samples in order: two epochs with the same order have the same hash."""
    running = hashlib.blake2b(digest_size=16)
    for given in ranks:
        running.update(b"%d:" % len(given.items))
        running.update(np.ascontiguousarray(given.items, np.int64).data)
    return running.digest()


# ---- the world ----


# Returns a rank's share of the samples of one process.
_Cut: TypeAlias = Callable[[int, RankGiven], RankGiven]
# Up to _ALL ranks all iterate their loaders; of more ranks, only _SOME.
_ALL, _SOME = 64, 8


class World:
    """Simulates the loader on every rank, and in a world of one rank, which gets all samples.

    Args:
        subject: The subject of the audit.
        world_size: The number of ranks.

    Attributes:
        coding: The numbers of all items.
        iterating: The ranks that iterate their own loaders. Other ranks' shares are computed from the samples of one
            process, as long as the computed shares of the iterating ranks are right.
        rank0: Rank 0, whose loader is like every rank's.

    Raises:
        InvalidOptionError: Each rank has a dataset of its own, so the same index is a different sample on each rank,
            and the samples are not in memory.
    """

    def __init__(self, subject: Audited, world_size: int) -> None:
        self.subject: Audited = subject
        self.world_size: int = world_size
        self.coding: Coding = Coding()
        self._cut = None if world_size <= _ALL else _cut_of(subject, world_size)
        some = np.linspace(0, world_size - 1, _SOME).astype(int).tolist()
        self.iterating: Sequence[int] = range(world_size) if self._cut is None else some
        self._ranks = [Rank(subject, rank, world_size, rank) for rank in self.iterating]
        # Compare balanced ranks with one process without cost=, to find samples that balancing loses.
        given = {name: value for name, value in subject.options.items() if name != "cost"}
        self._whole = replace(subject, max_items=subject.max_items * world_size, whole=True, options=given)
        self._alone = Rank(self._whole, 0, 1, 0)
        self.rank0: Rank = self._ranks[0]
        # Compare samples by their values if each rank has data of its own in memory.
        self._by_value = subject.is_made and self._holds_own_data()

    def _holds_own_data(self) -> bool:
        """Return whether ranks have datasets of their own below torch's ``Subset`` layers, with samples in memory."""
        everyone = [*self._ranks, self._alone]
        if len({id(rank.base) for rank in everyone}) == 1:
            return False
        if all(rank.is_in_memory for rank in everyone):
            return True
        *lengths, alone = (None if rank.is_iterable else length_of(rank.base, ()) for rank in everyone)
        if other := [rank for rank, length in enumerate(lengths) if length != alone]:
            raise InvalidOptionError(
                f"audit compares what ranks draw with what one process does, and in {self.subject.name}(rank, "
                f"world_size) the dataset of rank {other[0]} of {len(lengths)} has length {lengths[other[0]]}, that of "
                f"rank 0 of 1 length {alone}: indices are each rank's own and cannot be compared, and the samples are "
                "not held in memory. Make every rank's loader over the whole dataset, or over a "
                "torch.utils.data.Subset of it."
            )
        return False

    def epoch(self, number: int) -> EpochGiven:
        """Draw an epoch. Ranks go on from the epoch before, so draw all epochs in order."""
        *ranks, alone = (rank.epoch(number, self.coding, self._by_value) for rank in (*self._ranks, self._alone))
        if not self.subject.patches:
            alone = alone.read_once()
        if self._cut is not None:
            ranks = self._with_others(self._cut, number, ranks, alone)
        # Each divided batch is a part that ranks share, too.
        parts = tuple(alone.sizes.tolist()) if self.rank0.divides_batches else alone.parts
        return EpochGiven(number, _in_step(ranks), alone, parts, self.rank0.is_iterable)

    def _with_others(self, cut: _Cut, number: int, some: Sequence[RankGiven], alone: RankGiven) -> list[RankGiven]:
        """Return the samples of all ranks: computed from one process's if some ranks confirm it, else iterated."""
        ranks = [cut(rank, alone) for rank in range(self.world_size)]
        own = dict(zip(self.iterating, some, strict=True))
        if all(_are_equal(*_in_step([mine, ranks[rank]])) for rank, mine in own.items()):
            return [own.get(rank, share) for rank, share in enumerate(ranks)]
        self._cut, self.iterating = None, range(self.world_size)
        self._ranks = [Rank(self.subject, rank, self.world_size, rank) for rank in self.iterating]
        return self._drawn_to(number, self._ranks)

    def _drawn_to(self, number: int, ranks: Sequence[Rank]) -> list[RankGiven]:
        """Draw an epoch on new ranks, after drawing the epochs before it."""
        for before in range(number):
            for rank in ranks:
                rank.epoch(before, self.coding, self._by_value)
        return [rank.epoch(number, self.coding, self._by_value) for rank in ranks]

    def alike(self, epoch: EpochGiven) -> EpochGiven:
        """Draw an epoch again, on new ranks that are all seeded alike."""
        if self._cut is not None:
            return epoch  # the samples of one process do not depend on how ranks are seeded
        ranks = [Rank(self.subject, rank, self.world_size, 0) for rank in range(self.world_size)]
        return replace(epoch, ranks=_in_step(self._drawn_to(epoch.number, ranks)))

    def is_changed_by_epoch(self, first: RankGiven) -> bool:
        """Return whether ``set_epoch(1)`` changes the order of rank 0's first pass."""
        rank = Rank(replace(self.subject, set_epoch=True), 0, self.world_size, 0)
        again = rank.epoch(1, self.coding, self._by_value).first_steps(len(first.sizes))
        return signature([again]) != signature([first])

    def unpatched(self, seeded_as: int) -> RankGiven:
        """Draw the whole first epoch of the unpatched loader in one process."""
        subject = replace(self._whole, patch=False, options={}, set_epoch=True)
        return Rank(subject, 0, 1, seeded_as).epoch(0, self.coding)


def _cut_of(subject: Audited, world_size: int) -> _Cut | None:
    """Return a function that computes a rank's share of a patched loader; None if an order alone does not suffice."""
    if not subject.patch or not isinstance(subject.make, LoaderFacts):
        return None
    options = Options(**subject.options)
    shared = unit_shared(subject.make, options.share)
    if shared.unit is ShardedUnit.ITERABLE or options.divides_batches or options.costs is not None:
        return None
    batching = shared.batching if shared.unit is ShardedUnit.SAMPLE else None
    return lambda rank, alone: share_of(Plan(rank, world_size, options.uneven), batching, alone)


def share_of(plan: Plan, batching: Batching | None, alone: RankGiven) -> RankGiven:
    """Return a rank's share of one process's samples: samples in batches of its own, or whole batches.

    Args:
        plan: The rank's plan.
        batching: How a rank makes batches of its samples; None if ranks share the batches of one process.
        alone: The samples of one process.

    Examples:
        >>> alone = RankGiven(np.array([7, 8, 9, 5, 6]), np.array([2, 2, 1]), ended=True)
        >>> [share_of(Plan(rank, 2), Batching(2, drop_last=False), alone).items.tolist() for rank in range(2)]
        [[7, 9, 6], [8, 5, 7]]
        >>> [share_of(Plan(rank, 2), None, alone).items.tolist() for rank in range(2)]
        [[7, 8, 6], [9, 5, 7, 8]]
    """
    n = len(alone.sizes if batching is None else alone.items)
    own, repeated = plan.own_and_repeated(n) if alone.ended else (range(plan.rank, n, plan.num_replicas), range(0))
    places = np.concatenate([np.arange(part.start, part.stop, part.step) for part in (own, repeated)])
    if batching is None:
        ends = np.cumsum(alone.sizes)
        batches = [alone.items[ends[place] - alone.sizes[place] : ends[place]] for place in places]
        return RankGiven(_joined(batches), alone.sizes[places], alone.ended)
    over = len(places) % batching.size
    if over and (batching.drop_last or not alone.ended):
        places, over = places[: len(places) - over], 0
    sizes = np.full(-(-len(places) // batching.size), batching.size, np.int32)
    sizes[len(sizes) - 1 :] = over or batching.size
    return RankGiven(alone.items[places], sizes, alone.ended)


def _are_equal(one: RankGiven, other: RankGiven) -> bool:
    """Return whether two ranks have the same samples in the same batches, and both ended or both did not."""
    is_same = np.array_equal(one.items, other.items) and np.array_equal(one.sizes, other.sizes)
    return is_same and one.ended == other.ended and one.error is None


def _in_step(ranks: Sequence[RankGiven]) -> list[RankGiven]:
    """If only a part of an epoch was drawn, cut all ranks to the same number of steps."""
    if all(given.ended or given.error for given in ranks):
        return list(ranks)
    steps = min(len(given.sizes) for given in ranks if not given.ended)
    return [given if len(given.sizes) <= steps else given.first_steps(steps) for given in ranks]
