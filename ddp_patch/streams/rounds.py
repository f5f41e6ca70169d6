"""Who gets whose batches where ranks read different amounts, and what that took: arithmetic, without torch.

In a round every rank takes its own next batch. Ranks that have none any more, and read none, get one that another holds
beyond its own.
"""

from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

from ddp_patch.options import Uneven
from ddp_patch.plan import made_in_turn, turn_after

__all__ = ["BalancedRounds", "Round", "gets_of", "next_round", "rounds_ahead"]


class Round(NamedTuple):
    """One step of all ranks.

    Attributes:
        gets: Each rank's batch: of which rank it is, and which of those that this one holds, from 0; None for no batch.
        taken: How many batches each rank has no longer after the round: its first ones.
    """

    gets: Sequence[tuple[int, int] | None]
    taken: tuple[int, ...]


def next_round(held: Sequence[int], reads: Sequence[bool], uneven: Uneven) -> Round | None:
    """Return the next round; None if ranks must read more for it, or, where none reads, if the pass is over.

    What is handed over comes from whoever holds most. Where fewer batches than ranks are left in all, ``uneven``
    decides: ``"drop"`` leaves them out, ``"keep"`` leaves some ranks without, and ``"pad"`` gives these a repeat of a
    batch of the same round.

    Args:
        held: How many batches each rank holds.
        reads: Whether each may have more.
        uneven: What becomes of an incomplete round.

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
    """Return the rounds that follow from what ranks hold, whatever else they read.

    A rank that reads on takes part for as long as it has batches of its own: later ones may be its own too.

    Examples:
        >>> [step.taken for step in rounds_ahead([3, 2], [True, True], "pad")]
        [(1, 1), (1, 1)]
        >>> [step.taken for step in rounds_ahead([5, 1], [True, False], "pad")]
        [(1, 1), (2, 0), (2, 0)]
    """
    ranks = len(held)
    alike = min(held)  # rounds in which each takes its own
    rounds = [Round([(rank, 0) for rank in range(ranks)], (1,) * ranks)] * alike
    left = [count - alike for count in held]
    while all(left[rank] or not reads[rank] for rank in range(ranks)) and (step := next_round(left, reads, uneven)):
        rounds.append(step)
        left = [count - gone for count, gone in zip(left, step.taken, strict=True)]
    return rounds


def gets_of(rounds: Sequence[Round], ranks: int) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Return what each rank gets in some rounds, with places that count from their beginning, and what they take.

    Examples:
        >>> gets_of(rounds_ahead([3, 1], [True, False], "pad"), 2)
        ([[(0, 0), (0, 1)], [(1, 0), (0, 2)]], [3, 1])
    """
    gets: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    taken = [0] * ranks
    for step in rounds:
        for of_rank, each in zip(gets, step.gets, strict=True):
            if each is not None:
                of_rank.append((each[0], taken[each[0]] + each[1]))
        taken = [before + gone for before, gone in zip(taken, step.taken, strict=True)]
    return gets, taken


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

    def add(self, step: Round, rank: int) -> bool:
        """Record another round; return whether this rank gets a batch in it."""
        self.count += 1
        if self._runs and self._runs[-1][0] == step.taken:
            self._runs[-1][1] += 1
        else:
            self._runs.append([step.taken, 1])
        is_given = step.gets[rank] is not None
        self.batches_delivered += is_given
        return is_given

    def taken(self, rounds: int) -> tuple[int, ...]:
        """Return how many of each rank's own batches the first rounds took.

        Examples:
            >>> rounds = BalancedRounds()
            >>> for step in rounds_ahead([4, 2], [False, False], "pad"):
            ...     _ = rounds.add(step, rank=0)
            >>> rounds.taken(2), rounds.taken(3)
            ((2, 2), (4, 2))
        """
        total: tuple[int, ...] = ()
        for taken, times in self._runs:
            counted = min(times, rounds)
            total = tuple(a + counted * b for a, b in zip(total or (0,) * len(taken), taken, strict=True))
            rounds -= counted
        return total

    def made(self, rounds: int, before: Sequence[Sequence[int]]) -> list[int]:
        """Return how many batches of each worker of the first rank, the second and so on were taken in all.

        Args:
            rounds: After so many rounds.
            before: How many were taken of each rank's workers before the pass began.

        Examples:
            >>> rounds = BalancedRounds()
            >>> rounds.ends = [(1, -1), (2, 0)]
            >>> for step in rounds_ahead([3, 2], [True, False], "keep"):
            ...     _ = rounds.add(step, rank=0)
            >>> rounds.made(2, [(0, 0), (0, 0)])
            [1, 1, 2, 0]
        """
        made: list[int] = []
        for of_workers, ends, taken in zip(before, self.ends, self.taken(rounds), strict=True):
            first = turn_after(of_workers)
            order = [*range(first, len(ends)), *range(first)]
            most = [None if ends[worker] < 0 else ends[worker] - of_workers[worker] for worker in order]
            now = dict(zip(order, made_in_turn(most, taken), strict=True))
            made += [count + now[worker] for worker, count in enumerate(of_workers)]
        return made
