"""Decide who takes which batch in each round, if ranks read different amounts: arithmetic, without torch."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heapreplace
from itertools import cycle
from typing import Any, NamedTuple

from ddp_patch.options import Uneven
from ddp_patch.plan import made_in_turn, turn_after

__all__ = [
    "AHEAD",
    "AHEAD_IF_FAST",
    "BalancedRounds",
    "BatchSource",
    "Holding",
    "NextMove",
    "Round",
    "RoundPlan",
    "ahead_of_next",
    "gets_of",
    "next_round",
    "rounds_ahead",
]

# How many batches a rank reads beyond those of the planned rounds, at most: more where steps are fast, as exchanging
# reports takes as long as some of these, and where batches are small. A round may need more of it at the end.
AHEAD, AHEAD_IF_FAST = 4, 128


class Holding(NamedTuple):
    """What a rank reports.

    Attributes:
        held: How many batches it holds beyond those of the planned rounds.
        reads: Whether its own workers may have more.
    """

    held: int
    reads: bool


class BatchSource(NamedTuple):
    """Where a rank's batch comes from.

    Attributes:
        rank: The rank that holds it.
        place: Which of the batches held there, from 0.
    """

    rank: int
    place: int


@dataclass(frozen=True, slots=True)
class Round:
    """One step of all ranks.

    Attributes:
        gets: Where each rank's batch comes from; None for a rank that gets none.
        taken: How many batches each rank has no longer after the round: its first ones.
        hands_over: Whether a rank gets another one's batch.
    """

    gets: Sequence[BatchSource | None]
    taken: tuple[int, ...] = field(init=False)
    hands_over: bool = field(init=False)

    def __post_init__(self) -> None:
        given = Counter(source.rank for source in set(self.gets) if source is not None)
        object.__setattr__(self, "taken", tuple(given[rank] for rank in range(len(self.gets))))
        is_other = (source is not None and source.rank != rank for rank, source in enumerate(self.gets))
        object.__setattr__(self, "hands_over", any(is_other))


class NextMove(Enum):
    """What else can follow from what the ranks hold."""

    READ_MORE = "read more, then say again what you hold"
    END = "the pass is over"


def next_round(ranks: Sequence[Holding], uneven: Uneven) -> Round | NextMove:
    """Return the next round of a pass, what must come before it, or that there is none.

    Every rank takes its own batch if it has one. A rank without gets one that another holds beyond its own, from
    whoever holds most. Where fewer batches than ranks are left in all, ``uneven`` decides: ``"drop"`` leaves them out,
    ``"keep"`` leaves some ranks without, and ``"pad"`` gives these a repeat of a batch of the same round.

    Examples:
        >>> next_round([Holding(1, True), Holding(3, True), Holding(0, False)], "pad").gets[2]
        BatchSource(rank=1, place=1)
        >>> next_round([Holding(1, True), Holding(1, False), Holding(0, False)], "pad").name
        'READ_MORE'
    """
    held = [rank.held for rank in ranks]
    if sum(held) < len(ranks):
        if any(rank.reads for rank in ranks):
            return NextMove.READ_MORE
        if not any(held) or uneven == "drop":
            return NextMove.END
    own = [BatchSource(rank, 0) if count else None for rank, count in enumerate(held)]
    if all(own):
        return Round(own)
    surplus = _surplus(held)
    gets = [source or next(surplus, None) for source in own]
    if uneven == "pad":
        repeats = cycle([source for source in gets if source is not None])
        gets = [source or next(repeats) for source in gets]
    return Round(gets)


def _surplus(held: Sequence[int]) -> Iterator[BatchSource]:
    """Yield what ranks hold beyond their own next batch: from the largest surplus first, of equal ones the first."""
    heap = [(1 - count, rank) for rank, count in enumerate(held) if count > 1]
    heapify(heap)
    while heap and heap[0][0]:
        less, rank = heap[0]
        heapreplace(heap, (less + 1, rank))
        yield BatchSource(rank, held[rank] + less)


def ahead_of_next(ranks: Sequence[Holding], taken: Sequence[int]) -> int:
    """Return how many batches each rank that still reads must hold before the next round.

    Args:
        ranks: What the ranks said before this round.
        taken: How many batches of each the round takes.
    """
    reading = sum(rank.reads for rank in ranks)
    if all(rank.reads or rank.held > gone for rank, gone in zip(ranks, taken, strict=True)):
        return 1
    return -(-len(ranks) // max(1, reading))


def rounds_ahead(ranks: Sequence[Holding], uneven: Uneven) -> list[Round]:
    """Return the rounds that follow from what the ranks reported, whatever else they read.

    A rank that reads on takes part for as long as it has batches of its own: later ones may be its own too.

    Examples:
        >>> [step.taken for step in rounds_ahead([Holding(3, True), Holding(2, True)], "pad")]
        [(1, 1), (1, 1)]
        >>> [step.taken for step in rounds_ahead([Holding(5, True), Holding(1, False)], "pad")]
        [(1, 1), (2, 0), (2, 0)]
    """
    rounds: list[Round] = []
    while isinstance(step := next_round(ranks, uneven), Round):
        alike = 1 if step.hands_over else max(1, min(rank.held for rank in ranks))
        rounds += [step] * alike
        ranks = [Holding(rank.held - alike * gone, rank.reads) for rank, gone in zip(ranks, step.taken, strict=True)]
        if any(rank.reads and not rank.held for rank in ranks):
            break
    return rounds


def gets_of(rounds: Sequence[Round], ranks: int) -> tuple[list[list[BatchSource]], list[int]]:
    """Return what each rank gets in some rounds, with places that count from their beginning, and what they take.

    Examples:
        >>> gets, taken = gets_of(rounds_ahead([Holding(3, True), Holding(1, False)], "pad"), 2)
        >>> [tuple(source) for source in gets[1]], taken
        ([(1, 0), (0, 2)], [3, 1])
    """
    gets: list[list[BatchSource]] = [[] for _ in range(ranks)]
    taken = [0] * ranks
    for step in rounds:
        for of_rank, source in zip(gets, step.gets, strict=True):
            if source is not None:
                of_rank.append(BatchSource(source.rank, taken[source.rank] + source.place))
        taken = [before + gone for before, gone in zip(taken, step.taken, strict=True)]
    return gets, taken


class RoundPlan:
    """The rounds that all ranks have agreed on, and when one of them reports again. It is the same on every rank.

    The ranks agree on as many rounds as the poorest surely has batches for: on one at first, then on up to twice as
    many as before. The next reports travel while those rounds are made.

    Args:
        rank: This rank's number.
        uneven: What becomes of an incomplete round.

    Attributes:
        ranks: What each rank reported last.
        is_over: Whether there are no more rounds after the planned ones.
        least: How many batches beyond the planned ones a rank that still reads must report.
        wanted: How many it reads if it need not wait long for them.
        is_fast: Whether it is worth waiting a little for these.
        gets: What each rank gets in the planned rounds, in order; places count from the first that they take.
        takes: How many of its own the planned rounds take.
        has_reported: Whether it has reported since all were last heard.
    """

    def __init__(self, rank: int, uneven: Uneven) -> None:
        self._rank, self._uneven = rank, uneven
        self._rounds: deque[Round] = deque()
        self._planned = 0  # how many rounds, when all were last heard
        self.ranks: Sequence[Holding] = ()
        self.is_over: bool = False
        self.least: int = 1
        self.wanted: int = 1
        self.is_fast: bool = False
        self.gets: Sequence[Sequence[BatchSource]] = ()
        self.takes: int = 0
        self.has_reported: bool = False

    def hear(self, ranks: Sequence[Holding], *, is_fast: bool, room: int) -> None:
        """Plan by what all ranks reported.

        Args:
            ranks: What they reported.
            is_fast: Whether steps were fast on this one.
            room: How many batches it reads ahead then, at most.
        """
        self.ranks, self.is_fast, self.has_reported = ranks, is_fast, False
        rounds = rounds_ahead(ranks, self._uneven)
        self.is_over = not rounds and next_round(ranks, self._uneven) is NextMove.END
        self._rounds.extend(rounds)
        self._planned = len(rounds)
        self.gets, taken = gets_of(rounds, len(ranks))
        self.takes = taken[self._rank]
        self.least = ahead_of_next(ranks, taken)
        self.wanted = max(self.least, min(room if is_fast else AHEAD, 2 * self.least * len(rounds)))

    def next(self) -> Round | None:
        """Return the next round; None if the ranks must hear of each other first."""
        return self._rounds.popleft() if self._rounds else None

    def may_report(self, held: int, reads: bool) -> bool:
        """Return whether to report now, in the background of what follows, and not when more is asked for.

        Before the last planned round, only a rank that holds as many again does, or the next plan would be shorter. Not
        if its report could be its last one: nobody would miss it if it then left.

        Args:
            held: How many batches it holds beyond those of the planned rounds.
            reads: Whether there may be more.
        """
        left = len(self._rounds)
        if self.has_reported or left > self._planned // 2 or (left and not reads):
            return False
        enough = max(self.least, self.takes) if left or self.is_fast else self.least
        return held >= enough or not reads


class BalancedRounds:
    """The rounds of a pass: what they took, by which it can be resumed, and where the ranks' workers end.

    Attributes:
        count: How many rounds there were.
        batches_delivered: How many batches this rank was given in them.
        ends: Each rank's workers, in order: how many batches each made in all; -1 where that is not known yet.
        is_over: Whether all ranks came to the end.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self.batches_delivered: int = 0
        self.ends: Sequence[Sequence[int]] = ()
        self.is_over: bool = False
        self._runs: list[list[Any]] = []  # what a round took, and how often: most are alike

    def hear(self, ends: Sequence[Sequence[int]]) -> None:
        """Record what the ranks reported of their workers' ends."""
        self.ends = ends

    def add(self, taken: tuple[int, ...]) -> None:
        """Record another round, which took so many of each rank's own batches."""
        self.count += 1
        if self._runs and self._runs[-1][0] == taken:
            self._runs[-1][1] += 1
        else:
            self._runs.append([taken, 1])

    def give(self) -> None:
        """Record that this rank is given a batch."""
        self.batches_delivered += 1

    def end(self) -> None:
        """Record that all ranks came to the end."""
        self.is_over = True

    def taken(self, rounds: int) -> tuple[int, ...]:
        """Return how many of each rank's own batches the first rounds took.

        Examples:
            >>> rounds = BalancedRounds()
            >>> for taken in [(1, 1), (1, 1), (2, 0)]:
            ...     rounds.add(taken)
            >>> rounds.taken(2), rounds.taken(3)
            ((2, 2), (4, 2))
        """
        total: tuple[int, ...] = ()
        for taken, times in self._runs:
            counted = min(times, rounds)
            total = tuple(a + counted * b for a, b in zip(total or (0,) * len(taken), taken, strict=True))
            rounds -= counted
        return total

    def made(self, rounds: int, before: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return how many batches of each rank's workers were taken in all, after the first rounds.

        Args:
            rounds: How many rounds.
            before: How many were taken of each before the pass began.

        Examples:
            >>> rounds = BalancedRounds()
            >>> rounds.hear([(1, -1), (2, 0)])
            >>> for taken in [(1, 1), (2, 1)]:
            ...     rounds.add(taken)
            >>> rounds.made(2, [(0, 0), (0, 0)])
            [[1, 2], [2, 0]]
        """
        return [_made(*of_rank) for of_rank in zip(before, self.ends, self.taken(rounds), strict=True)]


def _made(before: Sequence[int], ends: Sequence[int], taken: int) -> list[int]:
    first = turn_after(before)
    parts = [(first + step) % len(before) for step in range(len(before))]
    most = [None if ends[part] < 0 else ends[part] - before[part] for part in parts]
    made = dict(zip(parts, made_in_turn(most, taken), strict=True))
    return [count + made[part] for part, count in enumerate(before)]
