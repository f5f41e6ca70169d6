"""Which rank gets whose batch in each step, if a dataset splits itself: arithmetic on how many batches ranks hold.

In a round every rank takes its own next batch. A rank that holds none, and reads none, gets a batch that another rank
holds beyond its own.
"""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

from ddp_patch.options import Uneven
from ddp_patch.positions_and_padding import made_in_turn, turn_after


class Round(NamedTuple):
    """One step of all ranks.

    Attributes:
        gets: Each rank's batch: the rank that holds it, and its place among the batches held there; None for no batch.
        taken: How many of its batches, from the first one on, each rank has given away after the round.
    """

    gets: Sequence[tuple[int, int] | None]
    taken: tuple[int, ...]


def next_round(held: Sequence[int], reads: Sequence[bool], uneven: Uneven) -> Round | None:
    """Return the next round; None if ranks must read more for it, or, where none reads, if the pass is over.

    Ranks that hold most give batches away. Where fewer batches than ranks are left in all, ``uneven`` decides:
    ``"drop"`` leaves these batches out, ``"keep"`` leaves some ranks without a batch, and ``"pad"`` gives such ranks a
    repeat of a batch of the same round.

    Args:
        held: How many batches each rank holds.
        reads: Whether each rank may have more.
        uneven: How an incomplete round ends.

    Examples:
        >>> next_round([1, 3, 0], [True, True, False], "pad")
        Round(gets=[(0, 0), (1, 0), (1, 1)], taken=(1, 2, 0))
        >>> next_round([1, 1, 0], [True, False, False], "pad")
    """
    if sum(held) < len(held) and (any(reads) or uneven == "drop" or not any(held)):
        return None
    without = held.count(0)
    beyond = [(rank, place) for rank, count in enumerate(held) for place in range(1, min(count, without + 1))]
    richest = iter(sorted(beyond, key=lambda each: each[1] - held[each[0]]))
    gets = [(rank, 0) if count else next(richest, None) for rank, count in enumerate(held)]
    given = [each for each in gets if each is not None]
    repeats = cycle(given)
    if uneven == "pad":
        gets = [each or next(repeats) for each in gets]
    of_ranks = [rank for rank, _ in given]
    return Round(gets, tuple(map(of_ranks.count, range(len(held)))))


def rounds_ahead(held: Sequence[int], reads: Sequence[bool], uneven: Uneven) -> list[Round]:
    """Return the rounds that follow from what ranks hold, whatever they read later; places count from the first round.

    They end where a rank that reads on has no batch left: its next one may be its own.

    Examples:
        >>> [step.taken for step in rounds_ahead([3, 2], [True, True], "pad")]
        [(1, 1), (1, 1)]
        >>> [step.gets for step in rounds_ahead([3, 1], [True, False], "pad")]
        [[(0, 0), (1, 0)], [(0, 1), (0, 2)]]
    """
    rounds, left = list[Round](), [*held]
    while all(left[rank] or not reads[rank] for rank in range(len(held))):
        if (step := next_round(left, reads, uneven)) is None:
            break
        gone = [before - now for before, now in zip(held, left, strict=True)]
        rounds.append(step._replace(gets=[get and (get[0], gone[get[0]] + get[1]) for get in step.gets]))
        left = [count - taken for count, taken in zip(left, step.taken, strict=True)]
    return rounds


class BalancedRounds:
    """The rounds of a pass, for states: how many batches they took of each rank, and where the ranks' workers end.

    Attributes:
        count: How many rounds there were.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self._ends: Sequence[Sequence[int]] = ()
        self._runs: list[list[Any]] = []  # the batches that a round took, and how often in a row: most rounds are alike

    def note_ends(self, ends: Sequence[Sequence[int]]) -> None:
        """Record how many batches each rank's workers make in all, in the order of their turns; -1 for unknown ones."""
        self._ends = ends

    def add(self, step: Round) -> None:
        """Record another round."""
        self.count += 1
        if self._runs and self._runs[-1][0] == step.taken:
            self._runs[-1][1] += 1
        else:
            self._runs.append([step.taken, 1])

    def taken(self, rounds: int) -> tuple[int, ...]:
        """Return how many of each rank's own batches the first rounds took.

        Examples:
            >>> rounds = BalancedRounds()
            >>> for step in rounds_ahead([4, 2], [False, False], "pad"):
            ...     rounds.add(step)
            >>> rounds.taken(2), rounds.taken(3)
            ((2, 2), (4, 2))
        """
        total: tuple[int, ...] = ()
        for taken, times in self._runs:
            counted = min(times, rounds)
            total = tuple(a + counted * b for a, b in zip(total or (0,) * len(taken), taken, strict=True))
            rounds -= counted
        return total

    def items_taken(self, rounds: int, before: Sequence[int], size: int) -> list[int]:
        """Return how many items were taken in all of each part: of the first rank's parts, then of the second one's.

        Args:
            rounds: After how many rounds of the pass.
            before: How many items were taken of each part before the pass began.
            size: How many items a batch has.

        Examples:
            >>> rounds = BalancedRounds()
            >>> rounds.note_ends([(1, -1), (2, 0)])
            >>> for step in rounds_ahead([3, 2], [True, False], "keep"):
            ...     rounds.add(step)
            >>> rounds.items_taken(2, [0, 0, 0, 0], size=1), rounds.items_taken(2, [1, 0, 1, 1], size=1)
            ([1, 1, 2, 0], [2, 1, 3, 1])
        """
        found, parts = list[int](), iter(before)
        for ends, taken in zip(self._ends, self.taken(rounds), strict=True):
            of_rank = [items // size for items in islice(parts, len(ends))]
            now = made_in_turn([None if end < 0 else end for end in ends], taken)
            first = turn_after(of_rank)
            found += [size * (made + now[(part - first) % len(ends)]) for part, made in enumerate(of_rank)]
        return found
