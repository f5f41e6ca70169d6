"""Arithmetic on ranges: which items of a stream a rank takes, which of them are padding, which batch has an item.

The ranks take a stream of n items in rounds of one item each: rank r of R has the positions r, r + R, and so on.
Positions from n on are padding, which repeats the stream's first items and counts for nothing. In a pass that begins
after k items, rank r has the positions k + r, k + r + R, and so on, whichever ranks took the first k. A batch is the
next ``size`` positions of a rank's share. If each worker reads a part of the stream, the workers make batches in turn.

    Plan       the positions of a rank            4 ranks, 10 items: rank 3 has 3, 7, 11; 11 is padding
    Batching   how many items a batch takes       2 items: rank 3 makes [3, 7] and [11]
    Schedule   all batches of a rank, in turn     the second has 1 sample: 0 real ones, and 2 real ones on all ranks
"""

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, TypeVar

from ddp_patch.errors import NoStepsError
from ddp_patch.options import Options, Uneven, check_choice
from ddp_patch.validation import check_rank, counted

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's share of any stream, as positions.

    The ranks share a stream of n items in rounds of one item each. ``uneven`` decides what happens to the last round
    if n is not a multiple of ``num_replicas``. A position p >= n is padding: it repeats the item at ``p % n``.

    Args:
        rank: This rank, in ``range(num_replicas)``.
        num_replicas: How many ranks share the stream.
        uneven: ``"pad"`` repeats the stream's first items to fill the last round, ``"drop"`` leaves that round out,
            ``"keep"`` gives some ranks one item less.

    Raises:
        InvalidOptionError: An argument has a value that it does not take.

    Examples:
        >>> [list(Plan(rank, 3).share(7)) for rank in range(3)]
        [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
        >>> [list(Plan(rank, 3, uneven="keep").share(7)) for rank in range(3)]
        [[0, 3, 6], [1, 4], [2, 5]]

    Source:
        ``torch.utils.data.DistributedSampler(shuffle=False)`` for "pad" and "drop".
    """

    rank: int
    num_replicas: int
    uneven: Uneven = "pad"

    def __post_init__(self) -> None:
        check_rank(self.rank, self.num_replicas)
        check_choice("uneven", self.uneven)

    @classmethod
    def of_stream(cls, options: Options, rank: int, num_replicas: int) -> Self:
        """Return a rank's share of the stream: all of it where each batch is divided."""
        return cls(0, 1) if options.divides_batches else cls(rank, num_replicas, options.uneven)

    @classmethod
    def of_batch(cls, options: Options, rank: int, num_replicas: int) -> Self | None:
        """Return a rank's share of each batch, for ``divide``; None if batches are not divided."""
        return cls(rank, num_replicas, options.uneven) if options.divides_batches else None

    def total(self, n: int) -> int:
        """Return how many positions all ranks together take from a stream of n items."""
        if self.uneven == "keep" or n == 0:
            return n
        rounds = n // self.num_replicas if self.uneven == "drop" else -(-n // self.num_replicas)
        return rounds * self.num_replicas

    def largest_share(self, n: int) -> int:
        """Return the size of the largest share of a stream of n items."""
        return -(-self.total(n) // self.num_replicas)

    def smallest_share(self, n: int) -> int:
        """Return the size of the smallest share of a stream of n items."""
        return self.total(n) // self.num_replicas

    def share(self, n: int, taken: int = 0) -> range:
        """Return the positions that this rank takes from a stream of n items, in order.

        Args:
            n: How many items the stream has.
            taken: How many items were taken before, by any ranks.

        Examples:
            >>> [list(Plan(rank, 2).share(7, taken=4)) for rank in range(2)]
            [[4, 6], [5, 7]]
        """
        return range(taken + self.rank, taken + self.total(max(0, n - taken)), self.num_replicas)

    def padding(self, n: int, taken: int = 0) -> range:
        """Return the part of ``share(n, taken)`` that repeats items, as positions >= n."""
        share = self.share(n, taken)
        real = len(range(share.start, min(share.stop, n), share.step))
        return share[real:]

    def own_and_repeated(self, n: int, taken: int = 0) -> tuple[range, range]:
        """Return the positions of this rank's own items, and of the items that its padding repeats.

        Both are positions below n, although ``share(n, taken)`` has padding as positions >= n.
        """
        share, padding = self.share(n, taken), self.padding(n, taken)
        if not padding:
            return share, padding
        # One offset fits all padding: the padding is shorter than the stream, or this rank has a single item of it.
        offset = padding.start // n * n
        return share[: len(share) - len(padding)], range(padding.start - offset, padding.stop - offset, padding.step)

    def divide(self, n: int) -> tuple[range, range]:
        """Return ``own_and_repeated`` of a batch of n samples, of which every rank gets at least one.

        A rank without a sample would make no step, and the others would wait for it.

        Examples:
            >>> [tuple(map(list, Plan(rank, 3, uneven="keep").divide(2))) for rank in range(3)]
            [([0], []), ([1], []), ([], [0])]
        """
        own, repeated = self.own_and_repeated(n)
        return own, repeated if own or repeated else range(min(n, 1))

    def slice_of_chunk(self, size: int) -> slice:
        """Return the slice of this rank's items in a chunk of this size, which begins with a round."""
        return slice(self.rank, self.total(size), self.num_replicas)


@dataclass(frozen=True, slots=True)
class Batching:
    """How a loader makes batches (steps) from items.

    Attributes:
        size: How many items a batch takes: its samples, or 1 if an item is a whole batch.
        drop_last: Whether an incomplete last batch is left out.
    """

    size: int
    drop_last: bool

    def count(self, items: int) -> int:
        """Return how many batches a number of items make."""
        return items // self.size if self.drop_last else -(-items // self.size)

    def leaves_rank_without_step(self, plan: Plan, *lengths: int) -> bool:
        """Return whether a rank makes no step in an epoch in which one process makes some.

        With ``uneven="keep"`` and no ``drop_last``, the answer is False: the other ranks have all items, so none is
        lost.

        Args:
            plan: A rank's share.
            lengths: How many items the epoch has, or each worker's part of it.
        """
        if plan.uneven == "keep" and not self.drop_last:
            return False
        return any(map(self.count, lengths)) and not any(self.count(plan.smallest_share(n)) for n in lengths)


# Each item is a step: a whole batch, or an item that nothing is known to make batches of.
ONE_PER_STEP = Batching(1, drop_last=False)


def _size_of(item: object) -> int:
    """Return how many samples an item of a stream has: the length of a batch; 1 for a key."""
    if type(item) is list:  # most batches are lists: skip the slower checks
        return len(item)
    try:
        if isinstance(item, Iterable) and not isinstance(item, Sized | Iterator):
            return sum(1 for _ in item)
        return len(item) if isinstance(item, Sized) else 1
    except TypeError:  # a tensor without dimensions has no len()
        return 1


class Sizes:
    """The sizes of a stream's batches, stored in runs of equal sizes.

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
        """Yield a stream's items, and add the size of each; read a batch that is an iterator into a list."""
        for item in stream:
            own: Any = list(item) if isinstance(item, Iterator) else item
            self.add(_size_of(own))
            yield own

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> int:
        return self._sizes[bisect_right(self._ends, number)]


def made_in_turn(most: Sequence[int | None], batches: int) -> list[int]:
    """Return how many of the first batches each worker has made, if the workers take turns.

    Args:
        most: How many batches each worker makes in all, in the order of their turns; None for an unknown number.
        batches: How many batches all workers have made.

    Examples:
        >>> made_in_turn([1, None, 3], 6)
        [1, 3, 2]
    """
    known = [batches if own is None else own for own in most]

    def made_in(rounds: int) -> list[int]:
        return [min(own, rounds) for own in known]

    # How many whole rounds the batches contain.
    rounds = bisect_right(range(batches + 1), batches, key=lambda number: sum(made_in(number))) - 1
    made = made_in(rounds)
    over = batches - sum(made)
    for place, own in enumerate(known):
        if over and own > rounds:
            made[place], over = made[place] + 1, over - 1
    return made


def turn_after(made: Sequence[int]) -> int:
    """Return which worker's turn is next, if each worker has made this many batches.

    Examples:
        >>> turn_after([3, 1, 3, 2]), turn_after([2, 2])
        (3, 0)
    """
    latest = max(place for place, count in enumerate(made) if count == max(made))
    return (latest + 1) % len(made)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a stream that one worker reads.

    Attributes:
        taken: How many items were taken before, by any ranks.
        length: How many items the part has, with the taken ones; None while the end is unknown.
        worker: The number of the worker. A pass that resumes may begin with any worker's turn.
    """

    taken: int = 0
    length: int | None = None
    worker: int = 0

    @property
    def most_items(self) -> int:
        """``length``; while the end is unknown, a number that no length reaches."""
        return sys.maxsize if self.length is None else self.length

    def batches(self, plan: Plan, batching: Batching) -> int | None:
        """Return how many batches a rank still makes of the part; None while the end is unknown."""
        return None if self.length is None else batching.count(len(plan.share(self.length, self.taken)))


class BatchRecord(NamedTuple):
    """One batch of a rank: real items first, then padding.

    An item is what the ranks share: a sample, or a whole batch where the ranks share or divide batches.

    Attributes:
        part: The part that the batch is made of: an index into ``Schedule.parts``.
        first: How many items of the rank's share of the part come before the batch in the pass.
        items: How many items of the share the batch takes.
        real_items: How many of these items are not padding.
        samples: How many samples this rank gets.
        real_samples: How many of these samples are not padding.
        samples_of_all: How many samples are not padding on all ranks together; None if this rank cannot know alone.
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
    """The batches of one rank, in the loader's order: each worker's first batch, then each worker's second.

    A worker that has come to its end is skipped.

    Attributes:
        plan: The rank's share of each part.
        batching: How a worker makes batches of its items.
        parts: The part of each worker, in the order of their turns.
        sizes: If items are batches, the sizes of this rank's batches, as far as they were drawn.
        sizes_of_all: The sizes of all ranks' batches, in the stream's order; None if this rank does not see them.
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
        """Return how many items of each part all ranks have taken after this many batches."""
        each = self.batching.size * self.plan.num_replicas
        return [
            max(part.taken, min(part.taken + made * each, part.most_items))
            for part, made in zip(self.parts, self.made(batches), strict=True)
        ]

    def record(self, number: int) -> BatchRecord:
        """Return the record of batch ``number``, from 0."""
        place, made = self._part_of(number)
        record = self._record(number, place, made)
        return record._replace(samples_of_all=self._total(record)) if self.batch_plan is None else record

    def records(self) -> Iterator[BatchRecord]:
        """Yield the records of all batches, as far as ends are known; ``samples_of_all`` only for divided batches."""
        most = [own or 0 for own in self._batches]
        turns = ((place, made) for made in range(max(most, default=0)) for place, own in enumerate(most) if own > made)
        for number, (place, made) in enumerate(turns):
            yield self._record(number, place, made)

    def _part_of(self, number: int) -> tuple[int, int]:
        """Return the part of batch ``number``, and how many batches of this part come before it."""
        if len(self.parts) == 1:
            return 0, number
        before, after = self.made(number), self.made(number + 1)
        return next(((place, made) for place, made in enumerate(before) if after[place] > made), (0, 0))

    def _record(self, number: int, place: int, made: int) -> BatchRecord:
        part, size = self.parts[place], self.batching.size
        first = made * size
        left = len(self.plan.share(part.most_items, part.taken)) - first
        items = max(0, min(size, left))
        real = max(0, min(size, left - len(self.plan.padding(part.most_items, part.taken))))
        samples = items if self.sizes is None else self.sizes[number]
        if self.batch_plan is not None:
            own, repeated = self.batch_plan.divide(samples)
            return BatchRecord(place, first, items, real, len(own) + len(repeated), len(own), samples)
        real_samples = real if self.sizes is None else samples * bool(real)
        return BatchRecord(place, first, items, real, samples, real_samples, None)

    @property
    def knows_totals(self) -> bool:
        """Whether this rank alone knows how many samples each batch has on all ranks.

        If ranks skip a worker that has ended at different steps, the same step has batches of different workers.
        """
        if self.batch_plan is not None:
            return True
        if self.sizes is not None:
            return self.sizes_of_all is not None
        return self.plan.uneven != "keep" or len(self.parts) == 1

    def _total(self, record: BatchRecord) -> int | None:
        """Return how many samples that are not padding an undivided batch has on all ranks together."""
        if not self.knows_totals:
            return None
        part, plan, size = self.parts[record.part], self.plan, self.batching.size
        n, ranks, after = max(0, part.most_items - part.taken), plan.num_replicas, record.first + size
        if self.batching.drop_last and plan.uneven == "keep":  # a rank with too few items leaves it out
            return size * max(0, min(ranks, n - (after - 1) * ranks))
        positions = range(record.first * ranks, min(after * ranks, n, plan.total(n)))
        if self.sizes is None or (sizes := self.sizes_of_all) is None:
            return len(positions)
        # Each rank's item is a whole batch.
        return sum(map(sizes.__getitem__, positions)) if positions.stop <= len(sizes) else None

    def keys(self, records: Iterable[BatchRecord]) -> Iterator[range]:
        """Yield keys by which to sort all ranks' items into the stream's order, in ranges; padding has no key.

        A key is the item's position in the stream, in which several workers' batches take turns. Where batches are
        divided, a key is a sample's position among the samples of the records.

        Args:
            records: Batches of this schedule, in order.
        """
        start = 0
        for record in records:
            if self.batch_plan is None:
                part = self.parts[record.part]
                share = self.plan.share(part.most_items, part.taken)
                own = share[record.first : record.first + record.real_items]
                yield from _in_turns(own, self.batching.size, part.worker, len(self.parts))
            else:
                own, _ = self.batch_plan.divide(record.samples_of_all or 0)
                yield range(start + own.start, start + own.stop, own.step)
                start += record.samples_of_all or 0


def _in_turns(positions: range, size: int, worker: int, workers: int) -> Iterator[range]:
    """Yield positions in a worker's part as positions in the stream, in which the workers' batches take turns."""
    if workers == 1:
        yield positions
        return
    while positions:
        batch = positions[0] // size  # the number of the batch in one process
        here = positions[: len(range(positions[0], (batch + 1) * size, positions.step))]
        shift = (batch * workers + worker - batch) * size
        yield range(here.start + shift, here.stop + shift, here.step)
        positions = positions[len(here) :]


def require_steps(plan: Plan, batching: Batching, name: str, lengths: Sequence[int]) -> None:
    """Refuse an epoch in which a rank would make no step. Every rank decides the same.

    Args:
        plan: A rank's share.
        batching: How the rank makes batches of it.
        name: What yields the items.
        lengths: How many items each sharded part has.

    Raises:
        NoStepsError: A rank would make no step, and one process makes at least one.
    """
    if not batching.leaves_rank_without_step(plan, *lengths):
        return
    why = ""
    if batching.drop_last:
        why = f", and drop_last=True leaves out a batch of fewer than batch_size={batching.size}"
    parts = f" in {len(lengths)} parts, one for each worker" if len(lengths) > 1 else ""
    remedies = ["fewer ranks"]
    if most := max(map(plan.smallest_share, lengths)):
        remedies += ["drop_last=False", f"a batch_size of at most {most}"]
    elif not batching.drop_last:
        remedies += ["uneven='pad'"]
    raise NoStepsError(
        f"A rank would make no step in an epoch: {name} has {counted(sum(lengths), 'item')}{parts}, of which "
        f"{plan.num_replicas} ranks take {sum(map(plan.smallest_share, lengths))} each with "
        f"uneven={plan.uneven!r}{why}. One process makes {counted(sum(map(batching.count, lengths)), 'step')} of "
        f"them. Use one of these: {', '.join(remedies)}."
    )
