"""How many steps an epoch has, which samples a step holds, and whose turn is next: arithmetic, without workers.

A loader without workers, or one whose workers share one stream, is the case of a single part.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeVar, get_args

from ddp_patch.errors import NoStepsError
from ddp_patch.options import Uneven
from ddp_patch.plan import ONE_PER_STEP, Batching, Plan

__all__ = [
    "BatchRecord",
    "Part",
    "Schedule",
    "Sizes",
    "made_in_turn",
    "ready_in_turn",
    "require_steps",
    "turn_after",
]

T = TypeVar("T")


def require_steps(plan: Plan, batching: Batching, name: str, lengths: Sequence[int], *, in_batches: bool) -> None:
    """Refuse an epoch if a rank would make no step in it. Every rank decides the same.

    Args:
        plan: A rank's share.
        batching: How the rank makes batches of it.
        name: What yields the items.
        lengths: How many items it yields, in each of the parts that are sharded.
        in_batches: Whether the loader's whole batches can be sharded instead.

    Raises:
        NoStepsError: One process makes at least one step of them.
    """
    if not batching.leaves_rank_without_step(plan, *lengths):
        return
    why = ""
    if batching.drop_last:
        why = f", and drop_last=True leaves out a batch of fewer than batch_size={batching.size}"
    parts = f" in {len(lengths)} parts, one for each worker" if len(lengths) > 1 else ""
    raise NoStepsError(
        f"A rank would make no step in an epoch: {name} has {_counted(sum(lengths), 'item')}{parts}, of which "
        f"{plan.num_replicas} ranks take {sum(map(plan.smallest_share, lengths))} each with "
        f"uneven={plan.uneven!r}{why}. One process makes {_counted(sum(map(batching.count, lengths)), 'step')} of "
        f"them. Use one of these: {', '.join(_remedies(plan, batching, lengths, in_batches))}."
    )


def _remedies(plan: Plan, batching: Batching, lengths: Sequence[int], in_batches: bool) -> Iterator[str]:
    """Yield each change that alone gives every rank a step, or loses nothing."""
    if batching.drop_last and (most := max(map(plan.smallest_share, lengths))):
        yield f"a batch_size of at most {most}"
    if batching.drop_last and not Batching(batching.size, drop_last=False).leaves_rank_without_step(plan, *lengths):
        yield "drop_last=False"
    for uneven in get_args(Uneven):
        if not batching.leaves_rank_without_step(replace(plan, uneven=uneven), *lengths):
            yield f"uneven={uneven!r}"
    if in_batches and not ONE_PER_STEP.leaves_rank_without_step(plan, *map(batching.count, lengths)):
        yield "share='batches'"
    fewer = (Plan(0, ranks, plan.uneven) for ranks in range(plan.num_replicas - 1, 0, -1))
    most = next(some.num_replicas for some in fewer if not batching.leaves_rank_without_step(some, *lengths))
    yield f"at most {_counted(most, 'rank')}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _size_of(item: object) -> int:
    """Return how many samples an item of a stream has: a batch as many as it gives, a key one."""
    if type(item) is list:  # most batches: don't ask what else it may be
        return len(item)
    try:
        if isinstance(item, Iterable) and not isinstance(item, Sized | Iterator):
            return sum(1 for _ in item)
        return len(item) if isinstance(item, Sized) else 1
    except TypeError:  # as of a tensor without dimensions
        return 1


class Sizes:
    """The sizes of a stream's batches, in runs of equal ones.

    Examples:
        >>> sizes = Sizes()
        >>> sizes.add(4, batches=5)
        >>> sizes.add(3)
        >>> len(sizes), sizes[4], sizes[5], list(sizes)
        (6, 4, 3, [4, 4, 4, 4, 4, 3])
    """

    def __init__(self) -> None:
        self._sizes = array("q")
        self._ends = array("q")  # after how many batches each run ends

    def add(self, size: int, batches: int = 1) -> None:
        """Add some batches of a size."""
        if not batches:
            return
        if self._sizes and self._sizes[-1] == size:
            self._ends[-1] += batches
        else:
            self._sizes.append(size)
            self._ends.append(len(self) + batches)

    def recording(self, stream: Iterable[T]) -> Iterator[T]:
        """Pass a stream's items on as they come, and add the size of each; a batch that is an iterator is read."""
        for item in stream:
            own: Any = list(item) if isinstance(item, Iterator) else item
            self.add(_size_of(own))
            yield own

    def same_size_until(self, number: int) -> int:
        """Return the first batch after batch ``number`` whose size may be another, as far as they are known."""
        return self._ends[bisect_right(self._ends, number)]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> int:
        return self._sizes[bisect_right(self._ends, number)]

    def __iter__(self) -> Iterator[int]:
        begins = chain([0], self._ends)
        return chain.from_iterable(
            repeat(size, end - begin) for size, begin, end in zip(self._sizes, begins, self._ends, strict=False)
        )


def made_in_turn(most: Sequence[int | None], batches: int) -> list[int]:
    """Return how many of the first batches each of some workers has made that take turns.

    Args:
        most: How many each makes in all, from the one whose turn is first; None if that is not known.
        batches: How many batches were made.

    Examples:
        >>> made_in_turn([1, None, 3], 6)
        [1, 3, 2]
    """
    known = [batches if own is None else own for own in most]

    def made_in(rounds: int) -> list[int]:
        return [min(own, rounds) for own in known]

    # The most whole rounds that fit.
    rounds = bisect_right(range(batches + 1), batches, key=lambda number: sum(made_in(number))) - 1
    made = made_in(rounds)
    over = batches - sum(made)
    for place, own in enumerate(known):
        if over and own > rounds:
            made[place], over = made[place] + 1, over - 1
    return made


def ready_in_turn(made: Sequence[int], are_over: Sequence[bool]) -> int:
    """Return how many batches come, in turn, before one that a worker has yet to make.

    Args:
        made: How many each worker has made, from the one whose turn is first.
        are_over: Whether it makes no more.

    Examples:
        >>> ready_in_turn([3, 1, 2], [False, False, True]), ready_in_turn([3, 1, 2], [True, True, True])
        (4, 6)
    """
    awaited = min(((count, place) for place, count in enumerate(made) if not are_over[place]), default=None)
    if awaited is None:
        return sum(made)
    rounds, awaited_at = awaited
    return sum(min(count, rounds + (place < awaited_at)) for place, count in enumerate(made))


def turn_after(made: Sequence[int]) -> int:
    """Return whose turn it is when some workers have made this many batches: the one after the last.

    Examples:
        >>> turn_after([3, 1, 3, 2]), turn_after([2, 2])
        (3, 0)
    """
    latest = max(place for place, count in enumerate(made) if count == max(made))
    return (latest + 1) % len(made)


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker reads, or what is left of it.

    Attributes:
        skip: How many items of each rank's share were taken before.
        length: How many items all ranks share, those before included; None while nobody has found the end.
        worker: Whose it is, by the number of the worker. A pass that resumes may begin with another one's turn.
        least_items: How many items of each rank's share surely come, while nobody has found the end.
    """

    skip: int = 0
    length: int | None = None
    worker: int = 0
    least_items: int = 0

    def batches(self, plan: Plan, batching: Batching) -> int | None:
        """Return how many batches a rank still makes of it; None while the end is unknown."""
        return None if self.length is None else batching.count(max(0, len(plan.share(self.length)) - self.skip))


class BatchRecord(NamedTuple):
    """One batch of a rank: real items first, then padding.

    An item is what the ranks share: a sample, or a whole batch where they share or divide these.

    Attributes:
        part: Whose it is: an index into ``Schedule.parts``.
        first: The position of its first item in the rank's share of that part.
        items: How many items of the share it takes.
        real_items: How many of them are not padding.
        samples: How many samples this rank gets.
        real_samples: How many of them are not padding.
        samples_of_all: How many samples are not padding on all ranks together; None if this rank alone cannot know.
    """

    part: int
    first: int
    items: int
    real_items: int
    samples: int
    real_samples: int
    samples_of_all: int | None


@dataclass(frozen=True, slots=True)
class Schedule:
    """The batches of one rank, in the order in which the loader gives them: each worker's first, then each one's next.

    A worker that has come to its end is passed over.

    Attributes:
        plan: The rank's share of each part.
        batching: How a worker makes batches of it.
        parts: What each worker reads, from the one whose turn is first.
        sizes: How many samples each item of this rank's has, as far as it was drawn, where items are batches.
        sizes_of_all: The same of all ranks' items, in the stream's order; None if this rank does not see them.
        batch_plan: The rank's share of each batch, where batches are divided.

    Examples:
        >>> schedule = Schedule(Plan(0, 2), Batching(2, drop_last=False), (Part(length=4), Part(length=7)))
        >>> schedule.count, [tuple(schedule.record(number)) for number in range(3)]
        (3, [(0, 0, 2, 2, 2, 2, 4), (1, 0, 2, 2, 2, 2, 4), (1, 2, 2, 2, 2, 2, 3)])
        >>> divided = Schedule(Plan(0, 1), Batching(3, drop_last=False), [Part(length=5)], batch_plan=Plan(1, 2))
        >>> [(record.samples, record.real_samples, record.samples_of_all) for record in divided.records()]
        [(2, 1, 3), (1, 1, 2)]
    """

    plan: Plan
    batching: Batching
    parts: Sequence[Part]
    sizes: Sizes | None = None
    sizes_of_all: Sizes | None = None
    batch_plan: Plan | None = None

    @property
    def _batches(self) -> list[int | None]:
        return [part.batches(self.plan, self.batching) for part in self.parts]

    @property
    def count(self) -> int | None:
        """How many batches there are; None while an end is unknown."""
        found = [batches for batches in self._batches if batches is not None]
        return sum(found) if len(found) == len(self.parts) else None

    @property
    def most_batches(self) -> int | None:
        """How many batches the rank with the largest share makes; None while an end is unknown."""
        return self._on_rank(0).count

    @property
    def fewest_batches(self) -> int | None:
        """How many batches the rank with the smallest share makes; None while an end is unknown."""
        return self._on_rank(self.plan.num_replicas - 1).count

    def _on_rank(self, rank: int) -> "Schedule":
        return replace(self, plan=replace(self.plan, rank=rank))

    @property
    def length(self) -> int:
        """How many items all ranks share in all parts, as far as ends are known."""
        return sum(part.length or 0 for part in self.parts)

    def made(self, batches: int) -> list[int]:
        """Return how many of the first batches each part has made."""
        return made_in_turn(self._batches, batches)

    def are_alike(self, batches: int) -> bool:
        """Return whether every rank has made the same batches of each part after this many."""
        return self._on_rank(0).made(batches) == self._on_rank(self.plan.num_replicas - 1).made(batches)

    def taken(self, batches: int) -> list[int]:
        """Return how many items of its share of each part the rank has taken after this many batches."""
        return [
            self._end(part, part.skip + made * self.batching.size)
            for part, made in zip(self.parts, self.made(batches), strict=True)
        ]

    def _end(self, part: Part, items: int) -> int:
        return items if part.length is None else max(part.skip, min(items, self.plan.largest_share(part.length)))

    def record(self, number: int) -> BatchRecord:
        """Return batch ``number``, from 0."""
        place, made = self._part_of(number)
        record = self._record(number, place, made)
        return (
            record if self.batch_plan is not None else record._replace(samples_of_all=self._total(number, place, made))
        )

    def records(self) -> Iterator[BatchRecord]:
        """Yield all batches, as far as ends are known; without totals, which take long, unless they are divided."""
        most = [own or 0 for own in self._batches]
        turns = ((place, made) for made in range(max(most, default=0)) for place, own in enumerate(most) if own > made)
        for number, (place, made) in enumerate(turns):
            yield self._record(number, place, made)

    def _part_of(self, number: int) -> tuple[int, int]:
        """Return which part makes batch ``number``, and how many batches it has made before."""
        if len(self.parts) == 1:
            return 0, number
        before, after = self.made(number), self.made(number + 1)
        return next(((place, made) for place, made in enumerate(before) if after[place] > made), (0, 0))

    def _items(self, place: int, made: int) -> tuple[int, int, int]:
        """Return the first item of a part's batch after ``made`` others, how many it takes, and how many are real."""
        part, size = self.parts[place], self.batching.size
        first = part.skip + made * size
        if part.length is None:  # no padding comes before the end is found
            return first, size, size
        share, padding = self.plan.share(part.length), self.plan.padding(part.length)
        left = len(share) - first
        return first, max(0, min(size, left)), max(0, min(size, left - len(padding)))

    def _record(self, number: int, place: int, made: int) -> BatchRecord:
        first, items, real = self._items(place, made)
        samples = items if self.sizes is None else self.sizes[number]
        if self.batch_plan is not None:
            own, repeated = self.batch_plan.divide(samples)
            return BatchRecord(place, first, items, real, len(own) + len(repeated), len(own), samples)
        real_samples = real if self.sizes is None else samples * bool(real)
        return BatchRecord(place, first, items, real, samples, real_samples, None)

    @property
    def knows_totals(self) -> bool:
        """Whether this rank alone knows how many samples each batch has on all ranks.

        A worker that has ended is skipped. If ranks skip it at different steps, the same step belongs to different
        workers.
        """
        if self.batch_plan is not None:
            return True
        if self.sizes is not None:
            return self.sizes_of_all is not None
        return self.plan.uneven != "keep" or len(self.parts) == 1

    def _total(self, number: int, place: int, made: int) -> int | None:
        """Return how many samples that are not padding an undivided batch has on all ranks together."""
        part, size, ranks = self.parts[place], self.batching.size, range(self.plan.num_replicas)
        if not self.knows_totals:
            return None
        if self.sizes is not None and self.sizes_of_all is not None:
            return self._total_of_whole(part.skip + number, self.sizes_of_all)
        if part.length is None or made < self._alike(part):
            return size * len(ranks)
        of_ranks = (self._on_rank(rank)._items(place, made) for rank in ranks)
        return sum(real for _, items, real in of_ranks if items == size or not self.batching.drop_last)

    def _total_of_whole(self, round_: int, sizes: Sizes) -> int | None:
        """Return how many samples the whole batches of a round have that are not padding, if their sizes are known."""
        length, ranks = self.parts[0].length, self.plan.num_replicas
        positions: Sequence[int] = range(round_ * ranks, (round_ + 1) * ranks)
        if length is not None:
            shares = (replace(self.plan, rank=rank).share(length) for rank in range(ranks))
            positions = [share[round_] for share in shares if round_ < len(share) and share[round_] < length]
        elif self.plan.needs_length:
            return None
        is_known = all(position < len(sizes) for position in positions)
        return sum(sizes[position] for position in positions) if is_known else None

    def same_size_until(self, number: int) -> int:
        """Return the first batch from ``number`` on whose sample count may differ on some rank."""
        if self.sizes is None:
            return number if len(self.parts) > 1 else max(number, self._alike(self.parts[0]))
        if self.batch_plan is not None:
            return self.sizes.same_size_until(number)
        if self.sizes_of_all is None or self.plan.needs_length:
            return number
        skip, ranks = self.parts[0].skip, self.plan.num_replicas
        return self.sizes_of_all.same_size_until((skip + number) * ranks) // ranks - skip

    def _alike(self, part: Part) -> int:
        """Return how many first batches of a part surely are full and without padding on every rank."""
        plan, length = self.plan, part.length
        real = part.least_items if length is None else length // plan.num_replicas
        if length is not None and plan.needs_length and plan.uneven == "pad":  # the last ranks' runs are padding
            real = max(0, length - (plan.num_replicas - 1) * plan.largest_share(length))
        return max(0, real - part.skip) // self.batching.size

    def keys(self, records: Iterable[BatchRecord]) -> Iterator[range]:
        """Yield, for each item that is not padding, a key by which the items of all ranks are in the stream's order.

        That is its position in the stream, which several workers' batches make in turn. Where batches are divided, it
        is the sample's position among those of the records.

        Args:
            records: Batches of this schedule, in order.
        """
        start = 0
        for record in records:
            if self.batch_plan is None:
                yield from self._positions(record)
            else:
                own, _ = self.batch_plan.divide(record.samples_of_all or 0)
                yield range(start + own.start, start + own.stop, own.step)
                start += record.samples_of_all or 0

    def _positions(self, record: BatchRecord) -> Iterator[range]:
        plan, part, workers, size = self.plan, self.parts[record.part], len(self.parts), self.batching.size
        until = record.first + record.real_items
        if part.length is None:
            ranks = plan.num_replicas
            own = range(plan.rank + record.first * ranks, plan.rank + until * ranks, ranks)
        else:
            own = plan.share(part.length)[record.first : until]
        if workers == 1:
            yield own
            return
        while own:
            batch = own[0] // size  # of one process
            here = own[: len(range(own[0], (batch + 1) * size, own.step))]
            shift = (batch * workers + part.worker - batch) * size
            yield range(here.start + shift, here.stop + shift, here.step)
            own = own[len(here) :]
