"""How many steps an epoch has, which samples a step holds, and whose turn is next: arithmetic, without workers.

A loader without workers, or one whose workers share one stream, is the case of a single part.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple, get_args

from ddp_patch.errors import NoStepsError
from ddp_patch.options import Uneven
from ddp_patch.plan import ITEMS, Batching, Plan
from ddp_patch.sharding.drawing import Sizes

__all__ = [
    "BatchRecord",
    "DividedBatches",
    "Part",
    "Schedule",
    "StepSamples",
    "divided",
    "made_in_turn",
    "of_whole_batches",
    "places_of_parts",
    "require_steps",
    "turn_after",
]


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
    if not batching.loses_a_rank(plan, *lengths):
        return
    why = (
        f", and drop_last=True leaves out a batch of fewer than batch_size={batching.size}"
        if batching.drop_last
        else ""
    )
    parts = f" in {len(lengths)} parts, one for each worker" if len(lengths) > 1 else ""
    raise NoStepsError(
        f"A rank would make no step in an epoch: {name} has {_counted(sum(lengths), 'item')}{parts}, of which "
        f"{plan.num_replicas} ranks take {sum(map(plan.least, lengths))} each with uneven={plan.uneven!r}{why}. One "
        f"process makes {_counted(sum(map(batching.count, lengths)), 'step')} of them. Use one of these: "
        f"{', '.join(_remedies(plan, batching, lengths, in_batches))}."
    )


def _remedies(plan: Plan, batching: Batching, lengths: Sequence[int], in_batches: bool) -> Iterator[str]:
    """Yield each change that alone gives every rank a step, or loses nothing."""
    if batching.drop_last and (most := max(map(plan.least, lengths))):
        yield f"a batch_size of at most {most}"
    if batching.drop_last and not Batching(batching.size, drop_last=False).loses_a_rank(plan, *lengths):
        yield "drop_last=False"
    for uneven in get_args(Uneven):
        if not batching.loses_a_rank(replace(plan, uneven=uneven), *lengths):
            yield f"uneven={uneven!r}"
    if in_batches and not ITEMS.loses_a_rank(plan, *map(batching.count, lengths)):
        yield "share='batches'"
    fewer = (Plan(0, ranks, plan.uneven) for ranks in range(plan.num_replicas - 1, 0, -1))
    most = next(some.num_replicas for some in fewer if not batching.loses_a_rank(some, *lengths))
    yield f"at most {_counted(most, 'rank')}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


class StepSamples(NamedTuple):
    """The samples of one step. On each rank, padding comes after what is not.

    Attributes:
        items: How many samples this rank's batch has.
        real: How many of them are not padding.
        total: How many samples are not padding on all ranks together; None if this rank alone cannot know.
        until: Up to which step the following ones surely have the same numbers.
    """

    items: int
    real: int
    total: int | None
    until: int


def divided(plan: Plan, samples: int, until: int) -> StepSamples:
    """Return the samples of a step that is a batch of one process, divided.

    Args:
        plan: This rank's share of a batch.
        samples: How many samples the batch has.
        until: As in the result.

    Examples:
        >>> [divided(Plan(rank, 4), 3, until=1)[:3] for rank in (0, 3)]
        [(1, 1, 3), (1, 0, 3)]
    """
    own, repeated = plan.divide(samples)
    return StepSamples(len(own) + len(repeated), len(own), samples, until)


def of_whole_batches(plan: Plan, round_: int, length: int | None, sizes: Sizes) -> int | None:
    """Return how many samples the whole batches of a round have that are not padding; None if that is not known.

    Args:
        plan: A rank's share of the batches.
        round_: Which round.
        length: How many batches all ranks share; None while nobody has found the end.
        sizes: How many samples each has, as far as they are known.

    Examples:
        >>> sizes = Sizes()
        >>> for size in (4, 2, 5):
        ...     sizes.add(size)
        >>> [of_whole_batches(Plan(0, 2), round_, 3, sizes) for round_ in (0, 1)]
        [6, 5]
    """
    positions = _positions(plan, round_, length)
    known = positions is not None and all(position < len(sizes) for position in positions)
    return sum(sizes[position] for position in positions or ()) if known else None


def _positions(plan: Plan, round_: int, length: int | None) -> Sequence[int] | None:
    """Return which batches are in a round, but for padding."""
    if length is None:
        start = round_ * plan.num_replicas
        return None if plan.needs_length else range(start, start + plan.num_replicas)
    shares = (replace(plan, rank=rank).share(length) for rank in range(plan.num_replicas))
    return [share[round_] for share in shares if round_ < len(share) and share[round_] < length]


@dataclass(frozen=True, slots=True)
class DividedBatches:
    """A rank's rows in a pass over divided batches: one for each sample that it got.

    Attributes:
        plan: The rank's share of a batch.
        sizes: How many samples each batch has.

    Examples:
        >>> rows = DividedBatches(Plan(1, 2), [3, 2])
        >>> rows.samples, rows.rows, list(rows.real_places()), list(rows)
        (3, 2, [0, 2], [range(1, 3, 2), range(4, 5, 2)])
    """

    plan: Plan
    sizes: Iterable[int]

    def _steps(self) -> Iterator[StepSamples]:
        return (divided(self.plan, size, 0) for size in self.sizes)

    def own_sizes(self) -> list[int]:
        """Return how many rows this rank has of each batch."""
        return [step.items for step in self._steps()]

    @property
    def samples(self) -> int:
        """How many rows there are."""
        return sum(step.items for step in self._steps())

    @property
    def rows(self) -> int:
        """How many of them are not padding."""
        return sum(step.real for step in self._steps())

    @property
    def length(self) -> int:
        """How many samples all batches have together."""
        return sum(self.sizes)

    def real_places(self) -> Iterator[int]:
        """Yield which rows are not padding."""
        at = 0
        for step in self._steps():
            yield from range(at, at + step.real)
            at += step.items

    def __iter__(self) -> Iterator[range]:
        """Yield where the rows of each batch that are not padding lie among all ranks', in the stream's order."""
        for start, size in zip(accumulate(chain([0], self.sizes)), self.sizes, strict=False):
            own, _ = self.plan.divide(size)
            yield range(start + own.start, start + own.stop, own.step)

    def of_ranks(self) -> "list[DividedBatches]":
        """Return every rank's."""
        return [replace(self, plan=replace(self.plan, rank=rank)) for rank in range(self.plan.num_replicas)]


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
    low, rounds = 0, batches  # the most whole rounds that fit
    while low < rounds:
        middle = (low + rounds + 1) // 2
        if sum(min(own, middle) for own in known) <= batches:
            low = middle
        else:
            rounds = middle - 1
    made = [min(own, rounds) for own in known]
    over = batches - sum(made)
    for place, own in enumerate(known):
        if over and own > rounds:
            made[place], over = made[place] + 1, over - 1
    return made


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
    """

    skip: int = 0
    length: int | None = None
    worker: int = 0

    def batches(self, plan: Plan, batching: Batching) -> int | None:
        """Return how many batches a rank still makes of it; None while the end is unknown."""
        return None if self.length is None else batching.count(max(0, len(plan.share(self.length)) - self.skip))


class BatchRecord(NamedTuple):
    """One batch.

    Attributes:
        part: Whose it is: an index into ``Schedule.parts``.
        first: The position of its first item in the rank's share of that part.
        items: How many items it has.
        real: How many of them are not padding.
    """

    part: int
    first: int
    items: int
    real: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The batches of one rank, in the order in which the loader gives them: each worker's first, then each one's next.

    A worker that has come to its end is passed over.

    Attributes:
        plan: The rank's share of each part.
        batching: How a worker makes batches of it.
        parts: What each worker reads, from the one whose turn is first.

    Examples:
        >>> schedule = Schedule(Plan(0, 2), Batching(2, drop_last=False), (Part(length=4), Part(length=7)))
        >>> schedule.count, [tuple(schedule.turn(number)) for number in range(3)]
        (3, [(0, 0, 2, 2), (1, 0, 2, 2), (1, 2, 2, 2)])
    """

    plan: Plan
    batching: Batching
    parts: Sequence[Part]

    @property
    def _batches(self) -> list[int | None]:
        return [part.batches(self.plan, self.batching) for part in self.parts]

    @property
    def count(self) -> int | None:
        """How many batches there are; None while an end is unknown."""
        found = [batches for batches in self._batches if batches is not None]
        return sum(found) if len(found) == len(self.parts) else None

    @property
    def most(self) -> int | None:
        """How many batches the rank with the largest share makes; None while an end is unknown."""
        return self._on_rank(0).count

    def _on_rank(self, rank: int) -> "Schedule":
        return replace(self, plan=replace(self.plan, rank=rank))

    @property
    def samples(self) -> int:
        """How many items all batches have together, as far as ends are known."""
        return sum(turn.items for turn in self.all())

    @property
    def length(self) -> int:
        """How many items all ranks share in all parts, as far as ends are known."""
        return sum(part.length or 0 for part in self.parts)

    def made(self, batches: int) -> list[int]:
        """Return how many of the first batches each part has made."""
        return made_in_turn(self._batches, batches)

    def _next(self, batches: int) -> tuple[int, int]:
        """Return whose turn comes after this many batches, and how many it has made before."""
        if len(self.parts) == 1:
            return 0, batches
        before, after = self.made(batches), self.made(batches + 1)
        return next(((place, made) for place, made in enumerate(before) if after[place] > made), (0, 0))

    def taken(self, batches: int) -> list[int]:
        """Return how many items of its share of each part the rank has taken after this many batches."""
        return [
            self._end(part, part.skip + made * self.batching.size)
            for part, made in zip(self.parts, self.made(batches), strict=True)
        ]

    def _end(self, part: Part, items: int) -> int:
        return items if part.length is None else max(part.skip, min(items, self.plan.rounds(part.length)))

    def turn(self, number: int) -> BatchRecord:
        """Return batch ``number``, from 0."""
        return self._turn(*self._next(number))

    def _turn(self, place: int, number: int) -> BatchRecord:
        part, size = self.parts[place], self.batching.size
        first = part.skip + number * size
        if part.length is None:  # no padding comes before the end is found
            return BatchRecord(place, first, size, size)
        share, padding = len(self.plan.share(part.length)), len(self.plan.padding(part.length))
        items = max(0, min(size, share - first))
        return BatchRecord(place, first, items, max(0, min(items, share - padding - first)))

    def total(self, number: int) -> int:
        """Return how many samples that are not padding batch ``number`` has on all ranks together."""
        place, made = self._next(number)
        part, size, ranks = self.parts[place], self.batching.size, range(self.plan.num_replicas)
        if part.length is None or made < self._whole(part):
            return size * len(ranks)
        schedule = [self._on_rank(rank)._turn(place, made) for rank in ranks]
        return sum(turn.real for turn in schedule if turn.items == size or not self.batching.drop_last)

    def whole_after(self, number: int) -> int:
        """Return up to which batch, from ``number`` on, all surely are whole on every rank; ``number`` if none is."""
        if len(self.parts) > 1 or self.parts[0].length is None:
            return number
        return max(number, self._whole(self.parts[0]))

    def _whole(self, part: Part) -> int:
        """Return how many first batches of a part, whose end is known, are full and without padding on every rank."""
        length, plan = part.length or 0, self.plan
        real = length // plan.num_replicas
        if plan.needs_length and plan.uneven == "pad":  # the last ranks' runs are padding
            real = max(0, length - (plan.num_replicas - 1) * plan.rounds(length))
        return max(0, real - part.skip) // self.batching.size

    def all(self) -> Iterator[BatchRecord]:
        """Yield all batches, as far as ends are known."""
        most = [own or 0 for own in self._batches]
        for number in range(max(most, default=0)):
            yield from (self._turn(place, number) for place, own in enumerate(most) if own > number)

    @property
    def rows(self) -> int:
        """How many samples of all batches are not padding, as far as ends are known."""
        return sum(turn.real for turn in self.all())

    def real_places(self) -> Iterator[int]:
        """Yield which of this rank's samples, counted as they come, are not padding."""
        at = 0
        for turn in self.all():
            yield from range(at, at + turn.real)
            at += turn.items

    def positions(self) -> Iterator[tuple[int, int, int]]:
        """Yield where each sample that is not padding lies in the unpatched loader's order; see ``positions_in``."""
        return chain.from_iterable(map(self.positions_in, self.all()))

    def positions_in(self, turn: BatchRecord) -> Iterator[tuple[int, int, int]]:
        """Yield where each sample of a batch that is not padding lies in the unpatched loader's order.

        Yields:
            Its batch's number among those of its worker, the worker's number, and its index in the batch.
        """
        size, ranks = self.batching.size, self.plan.num_replicas
        for item in range(turn.first, turn.first + turn.real):
            number, place = divmod(item * ranks + self.plan.rank, size)
            yield number, self.parts[turn.part].worker, place

    def are_alike(self, batches: int) -> bool:
        """Return whether every rank has made the same batches of each part after this many."""
        return self._on_rank(0).made(batches) == self._on_rank(self.plan.num_replicas - 1).made(batches)


def places_of_parts(ranks: Sequence[Schedule]) -> list[list[range]]:
    """Return the positions of each rank's samples among all ranks', in the unpatched loader's order.

    Args:
        ranks: The batches of each rank, of parts whose ends are known.

    Examples:
        >>> parts = (Part(length=3), Part(length=2, worker=1))
        >>> ranks = [Schedule(Plan(rank, 2), Batching(2, drop_last=False), parts) for rank in range(2)]
        >>> [[place for run in runs for place in run] for runs in places_of_parts(ranks)]
        [[0, 4, 2], [1, 3]]
    """
    positions = [list(schedule.positions()) for schedule in ranks]
    place_of = {position: place for place, position in enumerate(sorted(chain.from_iterable(positions)))}
    return [[range(place_of[position], place_of[position] + 1) for position in of_rank] for of_rank in positions]
