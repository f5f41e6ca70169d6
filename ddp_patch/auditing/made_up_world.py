"""A made-up world: every rank's draws, in one process or in several."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from ddp_patch.auditing.drawn import Coding, EpochDraws, Numbers, RankDraws, Traits, signature
from ddp_patch.auditing.epoch_report import Units
from ddp_patch.auditing.simulate import Rank, ranks_of
from ddp_patch.auditing.subject import Audited
from ddp_patch.errors import InvalidOptionError
from ddp_patch.testing import run_ranks

__all__ = ["Alone", "MadeUpWorld", "Progress", "RealRank", "WorldOf", "real_ranks_of", "same_items"]


@dataclass(frozen=True, slots=True)
class RealRank:
    """Hold what a real rank drew.

    Attributes:
        traits: Describes its loader.
        epochs: What it drew, by epoch number.
        coding: Gave its items their numbers, in its own process.
        digest: A hash of the samples that the dataset below torch's ``Subset`` layers holds in memory; None where it
            holds none, and where no factory makes datasets.
        layers: The indices of that dataset and of each ``Subset`` above it.
    """

    traits: Traits
    epochs: Mapping[int, RankDraws]
    coding: Coding
    digest: str | None = None
    layers: Sequence[Numbers] = ()

    @property
    def base(self) -> object:
        """Return what stands for the dataset, which is this process's own."""
        return self

    def epoch(self, number: int, coding: Coding) -> RankDraws:
        """Return an epoch, its items in the numbers of another coding."""
        drawn = self.epochs[number]
        return replace(drawn, items=coding.adopt(self.coding, drawn.items).astype(np.int64))


def real_ranks_of(subject: Audited, seeds: Sequence[int], numbers: Sequence[int], timeout: float) -> list[RealRank]:
    """Start a process for every rank, draw epochs there one after the other, and return what each rank drew.

    Args:
        subject: What is audited.
        seeds: For each rank, as which one it is seeded.
        numbers: The epochs to draw.
        timeout: Seconds until every rank must have returned.

    Raises:
        InvalidOptionError: The subject cannot be pickled.
    """
    try:
        pickled = pickle.dumps(subject)
    except Exception as error:
        raise InvalidOptionError(
            f"audit with processes=True sends what it audits to other processes, and pickling {subject.name} raised "
            f"{type(error).__name__}: {error}. Pass a factory that is a function of a module."
        ) from error
    return run_ranks(sampling, len(seeds), pickled, numbers, seeds, timeout=timeout)


def sampling(rank: int, world_size: int, pickled: bytes, numbers: Sequence[int], seeds: Sequence[int]) -> RealRank:
    """Draw epochs on one rank; errors call it by this name."""
    subject: Audited = pickle.loads(pickled)  # noqa: S301 - the parent's own
    coding = Coding()
    one = Rank(lambda: subject.made_for(rank, world_size, is_real=True), subject, seeds[rank])
    epochs = {number: one.epoch(number, coding) for number in numbers}
    if not subject.is_made:
        return RealRank(one.traits, epochs, coding)
    return RealRank(one.traits, epochs, coding, one.digest, one.layers)


# Makes the ranks of a world: of what, as which ranks they are seeded, and the epochs that they will draw.
WorldOf: TypeAlias = Callable[[Audited, Sequence[int], Sequence[int]], Sequence[Rank | RealRank]]


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

    def __init__(self, subject: Audited, numbers: Sequence[int], world_of: WorldOf, seed: int = 0) -> None:
        (alone,) = world_of(subject, [seed], numbers)
        self.rank: Rank | RealRank = alone
        self._subject, self._world_of, self._seed = replace(subject, by_one_worker=True), world_of, seed
        self._one: Rank | RealRank | None = None
        self._workers: int = self.rank.traits.num_workers
        if self.rank.traits.is_iterable and self._workers > 1 and not subject.patches:
            (self._one,) = world_of(self._subject, [seed], numbers)

    def epoch(self, number: int, coding: Coding) -> RankDraws:
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

    def _drawn_anew(self, number: int, coding: Coding) -> RankDraws:
        """Draw an epoch with one worker in a process that is seeded otherwise."""
        numbers = range(number + 1)
        (other,) = self._world_of(self._subject, [self._seed + 1], numbers)
        return [other.epoch(each, coding) for each in numbers][-1]


def same_items(first: RankDraws, second: RankDraws) -> bool:
    """Tell whether two processes drew the same samples, in whatever order."""
    return np.array_equal(_in_order(first), _in_order(second))


def _is_each(drawn: RankDraws, once: RankDraws, workers: int) -> bool:
    """Tell whether each of several workers drew what one alone draws, as far as both were drawn."""
    if drawn.ended != once.ended or (drawn.ended and len(drawn.items) != workers * len(once.items)):
        return False
    schedule = min(len(drawn.sizes) // workers, len(once.sizes))
    each = np.repeat(_in_order(once.first_steps(schedule)), workers)
    return np.array_equal(_in_order(drawn.first_steps(schedule * workers)), each)


def _in_order(drawn: RankDraws) -> Any:
    return np.sort(drawn.items)


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
        self, subject: Audited, world_size: int, epochs: int, processes: bool, timeout: float, progress: Progress
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

    def _begin(self, subject: Audited) -> None:
        """Make the ranks, and the single process to compare them with."""
        self.subject: Audited = subject
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

    def _world_of(self, subject: Audited, seeds: Sequence[int], numbers: Sequence[int]) -> Sequence[Rank | RealRank]:
        """Return the ranks of a world, each seeded as one of the ``seeds`` says."""
        if self.processes:
            return real_ranks_of(subject, seeds, numbers, self._timeout)
        return ranks_of(subject, seeds)

    def drawn(self) -> Iterator[EpochDraws]:
        """Yield every epoch, drawn just then. Call it once: ranks go on from where they are."""
        # Keep no reference to an epoch here: it may be large, and the caller drops it before the next one is drawn.
        return map(self._epoch, range(self.epochs))

    def _epoch(self, number: int) -> EpochDraws:
        per_epoch = self.world_size + 1
        drawn = []
        for place, rank in enumerate((*self._ranks, self._alone), start=1):
            drawn.append(rank.epoch(number, self.coding))
            self._progress(number * per_epoch + place, self.epochs * per_epoch)
        *ranks, alone = drawn
        unpatched = None if self._unpatched is None else self._unpatched.epoch(number, self.coding)
        return EpochDraws(number, _in_step(ranks), alone, self.units, self.traits.is_iterable, unpatched)

    def unpatched_anew(self, number: int) -> RankDraws:
        """Draw an epoch of the unpatched loader once more, in a process that is seeded otherwise."""
        numbers = range(number + 1)
        again = Alone(self._given, numbers, self._world_of, seed=1)
        return [again.epoch(each, self.coding) for each in numbers][-1]

    def alike(self, epoch: EpochDraws) -> EpochDraws:
        """Draw an epoch again, on new ranks that are all seeded alike."""
        numbers = range(epoch.number + 1)
        ranks = self._world_of(self.subject, [0] * self.world_size, numbers)
        for number in numbers:
            drawn = [rank.epoch(number, self.coding) for rank in ranks]
        return replace(epoch, ranks=_in_step(drawn), units=self.units)

    def is_changed_by_epoch(self, first: RankDraws) -> bool:
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


def _in_step(ranks: Sequence[RankDraws]) -> list[RankDraws]:
    """Cut what was drawn of a longer epoch to the same number of steps on every rank."""
    if all(drawn.ended or drawn.error for drawn in ranks):
        return list(ranks)
    steps = min(len(drawn.sizes) for drawn in ranks if not drawn.ended)
    return [drawn if len(drawn.sizes) <= steps else drawn.first_steps(steps) for drawn in ranks]
