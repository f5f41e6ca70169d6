"""A made-up world: what every rank is given, in one process or in several."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from ddp_patch.auditing.cut import Cut
from ddp_patch.auditing.drawn import Coding, EpochDraws, RankDraws, Units, signature
from ddp_patch.auditing.ranks import Rank
from ddp_patch.auditing.subject import Audited, Traits
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.options import Options
from ddp_patch.testing import run_ranks

__all__ = ["MadeUpWorld", "Progress", "ranks_of"]


@dataclass(frozen=True, slots=True)
class RealRank:
    """Hold what a real rank was given.

    Attributes:
        traits: Describes its loader.
        epochs: What it was given, by epoch number.
        coding: Gave its items their numbers, in its own process.
        digest: A hash of the samples that the dataset below torch's ``Subset`` layers holds in memory; None where it
            holds none, and where no factory makes datasets.
    """

    traits: Traits
    epochs: Mapping[int, RankDraws]
    coding: Coding
    digest: str | None = None

    @property
    def base(self) -> object:
        """Return what stands for the dataset, which is this process's own."""
        return self

    def epoch(self, number: int, coding: Coding) -> RankDraws:
        """Return an epoch, its items in the numbers of another coding."""
        drawn = self.epochs[number]
        return replace(drawn, items=coding.adopt(self.coding, drawn.items).astype(np.int64))


def sampling(rank: int, world_size: int, pickled: bytes, numbers: Sequence[int], seeds: Sequence[int]) -> RealRank:
    """Draw epochs on one rank; errors call it by this name."""
    subject: Audited = pickle.loads(pickled)  # noqa: S301 - the parent's own
    coding = Coding()
    here = Rank(subject, rank, world_size, seeds[rank], is_real=True)
    epochs = {number: here.epoch(number, coding) for number in numbers}
    return RealRank(here.traits, epochs, coding, here.digest if subject.is_made else None)


def ranks_of(
    subject: Audited,
    seeds: Sequence[int],
    numbers: Sequence[int],
    timeout: float | None = None,
    only: Sequence[int] | None = None,
) -> Sequence[Rank | RealRank]:
    """Return the ranks of a world.

    Args:
        subject: What is audited.
        seeds: For each rank, as which one it is seeded.
        numbers: The epochs that they will draw.
        timeout: Seconds until every real rank must have returned, each in a process where it draws one epoch after the
            other; None for ranks that this process simulates.
        only: Which ranks to make, where this process simulates them; None for all.

    Raises:
        InvalidOptionError: The subject cannot be pickled for real ranks.
    """
    if timeout is None:
        return [Rank(subject, rank, len(seeds), seeds[rank]) for rank in only or range(len(seeds))]
    try:
        pickled = pickle.dumps(subject)
    except Exception as error:
        raise InvalidOptionError(
            f"audit with processes=True sends what it audits to other processes, and pickling {subject.name} raised "
            f"{type(error).__name__}: {error}. Pass a factory that is a function of a module."
        ) from error
    return run_ranks(sampling, len(seeds), pickled, numbers, seeds, timeout=timeout)


def _drawn_anew(ranks: "Sequence[Rank | RealRank | _Alone]", number: int, coding: Coding) -> list[RankDraws]:
    """Draw an epoch, and those before it, on new ranks."""
    for before in range(number):
        for rank in ranks:
            rank.epoch(before, coding)
    return [rank.epoch(number, coding) for rank in ranks]


class _Alone:
    """Draws what one process gets of a loader, with all its workers, and of what they all read, once.

    Several workers that all read the whole of an iterable dataset give every sample several times. That is no more to
    share than what one of them reads.

    Args:
        subject: What is audited, whole.
        numbers: The epochs to draw.
        timeout: As of ``ranks_of``.
        seed: As which rank it is seeded.

    Attributes:
        rank: The process.
    """

    def __init__(self, subject: Audited, numbers: Sequence[int], timeout: float | None, seed: int = 0) -> None:
        (alone,) = ranks_of(subject, [seed], numbers, timeout)
        self.rank: Rank | RealRank = alone
        self._subject, self._timeout, self._seed = replace(subject, by_one_worker=True), timeout, seed
        self._by_one_worker: Rank | RealRank | None = None
        self._workers: int = self.rank.traits.num_workers
        if self.rank.traits.is_iterable and self._workers > 1 and not subject.patches:
            (self._by_one_worker,) = ranks_of(self._subject, [seed], numbers, timeout)

    def epoch(self, number: int, coding: Coding) -> RankDraws:
        """Draw the next pass as epoch ``number``."""
        drawn = self.rank.epoch(number, coding)
        if self._by_one_worker is None:
            return drawn
        once = self._by_one_worker.epoch(number, coding)
        if drawn.error is not None or once.error is not None:
            return drawn  # a dataset may need all of its workers
        is_read_by_all = _is_each(drawn, once, self._workers)
        if not (is_read_by_all or drawn.asked):
            # Workers that do not know which they are read different samples if these are drawn at random.
            (other,) = _drawn_anew(
                ranks_of(self._subject, [self._seed + 1], range(number + 1), self._timeout), number, coding
            )
            is_read_by_all = not once.has_same_samples(other)
        return replace(once, by_worker=drawn.by_worker, asked=drawn.asked) if is_read_by_all else drawn


def _is_each(drawn: RankDraws, once: RankDraws, workers: int) -> bool:
    """Tell whether each of several workers drew what one alone draws, as far as both were drawn."""
    if drawn.ended != once.ended or (drawn.ended and len(drawn.items) != workers * len(once.items)):
        return False
    steps = min(len(drawn.sizes) // workers, len(once.sizes))
    each = np.repeat(np.sort(once.first_steps(steps).items), workers)
    return np.array_equal(np.sort(drawn.first_steps(steps * workers).items), each)


# In a world of more ranks than this, of a patched loader some alone iterate their own.
_ALL, _SOME = 64, 8
Progress: TypeAlias = Callable[[int, int], object]  # called with how many draws are done, and how many there are


class MadeUpWorld:
    """Draw what is audited on every rank, and in a world of one rank, which gets everything there is to shard.

    Args:
        subject: What is audited.
        world_size: The number of ranks.
        epochs: How many epochs each rank draws.
        timeout: Seconds until every real rank, a process of its own, must have returned; None where this process
            simulates them.
        progress: Called after each draw.

    Attributes:
        coding: Gives every item its number.
        traits: Describes rank 0's loader.
        units: Whether ranks shard samples or whole batches, as the single process's loader says.
        iterating: Which ranks iterate their own loaders. The others' shares are cut from what one process gets, as
            long as that gives what these iterate.

    Raises:
        InvalidOptionError: Each rank has a dataset of its own, so one index is another sample on each, and the samples
            are not held in memory.
    """

    def __init__(
        self, subject: Audited, world_size: int, epochs: int, timeout: float | None, progress: Progress
    ) -> None:
        self.processes: bool = timeout is not None
        if self.processes and subject.patches:
            # Real ranks take rank 0's seed. Fix one, so that the single process has the same.
            subject = replace(subject, options={"seed": 0, **subject.options})
        self.world_size: int = world_size
        self.epochs: int = epochs
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
        self.iterating: Sequence[int] = range(self.world_size)
        self._cut: Cut | None = None
        if self.world_size > _ALL and subject.patch and isinstance(subject.make, LoaderFacts) and not self.processes:
            options = Options(**subject.options)
            self._cut = Cut.of_loader(subject.make, self.world_size, options, subject.max_items)
        if self._cut is not None:
            self.iterating = np.linspace(0, self.world_size - 1, _SOME).astype(int).tolist()
        self._ranks = self._made()
        # What balanced ranks get is compared with what one process gets without: it loses nothing in a deal.
        given = {name: value for name, value in subject.options.items() if name != "cost"}
        whole = replace(subject, max_items=subject.max_items * self.world_size, whole=True, options=given)
        self._alone = _Alone(whole, range(self.epochs), self._timeout)
        # A patched loader goes through its epochs by itself.
        self._given = replace(whole, patch=False, options={}, set_epoch=True)
        is_given = subject.patches and self._ranks[0].traits.is_iterable
        self._unpatched = _Alone(self._given, range(self.epochs), self._timeout) if is_given else None

    def _made(self) -> Sequence[Rank | RealRank]:
        """Make the ranks that iterate their own loaders."""
        return ranks_of(self.subject, range(self.world_size), range(self.epochs), self._timeout, only=self.iterating)

    def _everyone(self) -> Sequence[Rank | RealRank]:
        return [*self._ranks, self._alone.rank]

    def _has_one_base(self) -> bool:
        """Tell whether an index of the dataset below ``Subset`` layers is one sample on all ranks, as far as one sees.

        Only of data in memory are the samples compared: an audit reads no other.
        """
        everyone = self._everyone()
        if len({id(rank.base) for rank in everyone}) == 1:
            return True
        return len({rank.traits.base_length for rank in everyone}) == 1 and len(self._digests()) == 1

    def _digests(self) -> set[str | None]:
        one_of_each = {id(rank.base): rank for rank in self._everyone()}
        return {rank.digest for rank in one_of_each.values()}

    def drawn(self) -> Iterator[EpochDraws]:
        """Yield every epoch, drawn just then. Call it once: ranks go on from where they are."""
        # Keep no reference to an epoch here: it may be large, and the caller drops it before the next one is drawn.
        return map(self._epoch, range(self.epochs))

    def _epoch(self, number: int) -> EpochDraws:
        per_epoch = len(self._ranks) + 1
        drawn = []
        for place, rank in enumerate((*self._ranks, self._alone), start=1):
            drawn.append(rank.epoch(number, self.coding))
            self._progress(number * per_epoch + place, self.epochs * per_epoch)
        *ranks, alone = drawn
        if self._cut is not None:
            ranks = self._with_others(self._cut, number, ranks, alone)
        unpatched = None if self._unpatched is None else self._unpatched.epoch(number, self.coding)
        parts = self._parts(alone, unpatched)
        return EpochDraws(number, _in_step(ranks), alone, self.units, parts, self.traits.is_iterable, unpatched)

    def _with_others(self, cut: Cut, number: int, some: Sequence[RankDraws], alone: RankDraws) -> list[RankDraws]:
        """Return what all ranks get: cut from what one process does if some of them got just that, else iterated."""
        ranks = [cut.share(rank, alone) for rank in range(self.world_size)]
        own = dict(zip(self.iterating, some, strict=True))
        if all(_are_equal(*_in_step([mine, ranks[rank]])) for rank, mine in own.items()):
            return [own.get(rank, share) for rank, share in enumerate(ranks)]
        self._cut, self.iterating = None, range(self.world_size)
        self._ranks = self._made()
        return _drawn_anew(self._ranks, number, self.coding)

    def _parts(self, alone: RankDraws, unpatched: RankDraws | None) -> tuple[int, ...]:
        """Return how many units each part has that ranks share by itself; none where they share one stream."""
        if self.traits.divides_batches:
            return tuple(alone.sizes.tolist())
        # Workers that ask which they are read a part each.
        is_in_parts = unpatched is not None and unpatched.asked and self.subject.options.get("share") != "by_worker"
        return alone.by_worker if is_in_parts else ()

    def unpatched_anew(self, number: int) -> RankDraws:
        """Draw an epoch of the unpatched loader once more, in a process that is seeded otherwise."""
        (drawn,) = _drawn_anew([_Alone(self._given, range(number + 1), self._timeout, seed=1)], number, self.coding)
        return drawn

    def alike(self, epoch: EpochDraws) -> EpochDraws:
        """Draw an epoch again, on new ranks that are all seeded alike."""
        if self._cut is not None:
            return epoch  # what one process gets does not depend on how ranks are seeded
        ranks = ranks_of(self.subject, [0] * self.world_size, range(epoch.number + 1), self._timeout)
        drawn = _in_step(_drawn_anew(ranks, epoch.number, self.coding))
        return replace(epoch, ranks=drawn, units=self.units)

    def is_changed_by_epoch(self, first: RankDraws) -> bool:
        """Tell whether ``set_epoch(1)`` would have given rank 0 another first pass than ``first``."""
        subject = replace(self.subject, set_epoch=True)
        ranks = ranks_of(subject, range(self.world_size), [1], self._timeout, only=[0])
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


def _are_equal(one: RankDraws, other: RankDraws) -> bool:
    """Tell whether a rank got the same samples in the same batches, and all of them where the other did."""
    is_same = np.array_equal(one.items, other.items) and np.array_equal(one.sizes, other.sizes)
    return is_same and one.ended == other.ended and one.error is None


def _in_step(ranks: Sequence[RankDraws]) -> list[RankDraws]:
    """Cut what was drawn of a longer epoch to the same number of steps on every rank."""
    if all(drawn.ended or drawn.error for drawn in ranks):
        return list(ranks)
    steps = min(len(drawn.sizes) for drawn in ranks if not drawn.ended)
    return [drawn if len(drawn.sizes) <= steps else drawn.first_steps(steps) for drawn in ranks]
