"""Rounds of ranks that read unequally much: every batch once, equal steps, and nobody waits for ever."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

import hypothesis.strategies as st
from hypothesis import given

from ddp_patch.options import Uneven
from ddp_patch.streams.balanced_rounds import BalancedRounds, Holding, NextMove, Round, ahead_of_next, next_round

unevens: st.SearchStrategy[Uneven] = st.sampled_from(["pad", "drop", "keep"])
# How many batches each rank's workers make: none on some or on all, and one rank may have far more than the others.
reads = st.lists(st.integers(0, 6) | st.integers(0, 60), min_size=1, max_size=9)


class Rank:
    """Reads ahead as it is told to, and finds its end only by reading beyond it."""

    def __init__(self, rank: int, batches: int) -> None:
        self.left: Iterator[tuple[int, int]] = iter([(rank, number) for number in range(batches)])
        self.held: list[tuple[int, int]] = []
        self.reads = True

    def read_up_to(self, batches: int) -> None:
        while self.reads and len(self.held) < batches:
            if (batch := next(self.left, None)) is None:
                self.reads = False
            else:
                self.held.append(batch)


def made(
    counts: Sequence[int], uneven: Uneven
) -> tuple[list[list[tuple[int, int]]], list[list[tuple[int, int]]], BalancedRounds]:
    """Run a pass as the ranks do; return each rank's batches, what of each was left over, and what rounds took."""
    ranks = [Rank(rank, count) for rank, count in enumerate(counts)]
    got: list[list[tuple[int, int]]] = [[] for _ in counts]
    rounds, more = BalancedRounds(), 0
    for rank in ranks:
        rank.read_up_to(1)
    while (step := next_round(said := [Holding(len(r.held), r.reads) for r in ranks], uneven)) is not NextMove.END:
        taken: Sequence[int] = [0] * len(ranks)
        more = 0 if isinstance(step, Round) else more + 1
        assert more <= len(ranks) + 1, "each time that more is asked for, one runs out or there is enough"
        if isinstance(step, Round):
            taken = step.taken
            rounds.add(step.taken)
            hand_over(step, ranks, got)
        for rank in ranks:
            rank.read_up_to(ahead_of_next(said, taken))
    return got, [rank.held for rank in ranks], rounds


def hand_over(step: Round, ranks: Sequence[Rank], got: Sequence[list[tuple[int, int]]]) -> None:
    for target, source in enumerate(step.gets):
        if source is not None:
            got[target].append(ranks[source.rank].held[source.place])
            assert not ranks[target].held or source == (target, 0), "who has a batch takes its own first"
    for rank, taken in zip(ranks, step.taken, strict=True):
        del rank.held[:taken]


@given(reads, unevens)
def test_each_batch_comes_once_and_steps_are_equal(counts: list[int], uneven: Uneven) -> None:
    got, left, _ = made(counts, uneven)
    together, batches = Counter(chain(*got)), sum(counts)
    everything = Counter((rank, number) for rank, count in enumerate(counts) for number in range(count))
    steps = [len(batches) for batches in got]
    assert max(steps) - min(steps) <= (uneven == "keep")
    assert max(steps) == (batches // len(counts) if uneven == "drop" else -(-batches // len(counts)))
    if uneven == "drop":
        assert together + Counter(chain(*left)) == everything
    elif uneven == "keep":
        assert together == everything
    else:
        assert (together - everything).total() == -batches % len(counts)
        assert together | everything == together
        # What comes again comes in one step, so that its weight can be told.
        assert set(together - everything) <= {batches[-1] for batches in got if batches}


@given(reads, unevens, st.data())
def test_what_was_consumed_is_known_for_every_round(counts: list[int], uneven: Uneven, data: st.DataObject) -> None:
    got, _, all_rounds = made(counts, uneven)
    rounds = data.draw(st.integers(0, all_rounds.count))
    given_then = {batch for batches in got for batch in batches[:rounds]}
    by_rank = Counter(rank for rank, _ in given_then)
    if rounds:
        assert all_rounds.taken(rounds) == tuple(by_rank[rank] for rank in range(len(counts)))
    for rank, count in by_rank.items():  # a rank's batches go in its own order, so the count tells which
        assert {number for owner, number in given_then if owner == rank} == set(range(count))


@given(st.integers(1, 9), st.integers(0, 40))
def test_a_round_in_which_all_have_one_hands_nothing_over(ranks: int, batches: int) -> None:
    step = next_round([Holding(1 + batches, True)] * ranks, "pad")
    assert isinstance(step, Round)
    assert step.taken == (1,) * ranks
    assert not step.hands_over
    assert ahead_of_next([Holding(1, True)] * ranks, step.taken) == 1


@given(st.lists(st.integers(0, 5), min_size=2, max_size=9))
def test_whoever_holds_most_hands_over_most(held: list[int]) -> None:
    step = next_round([Holding(count, False) for count in held], "keep")
    if isinstance(step, Round):
        after = [count - taken for count, taken in zip(held, step.taken, strict=True)]
        donors = {source.rank for rank, source in enumerate(step.gets) if source and source.rank != rank}
        assert step.hands_over == bool(donors)
        assert all(after[rank] >= max(after) - 1 for rank in donors)


def test_the_tail_is_read_in_whole_rounds() -> None:
    #      held, reads                                     taken      ahead
    for ranks, taken, ahead in [
        ([(1, True), (1, True), (1, True)], (1, 1, 1), 1),
        ([(1, True), (1, True), (1, False)], (1, 1, 1), 2),  # the last one has none then
        ([(1, True), (1, True), (0, False)], (0, 0, 0), 2),
        ([(3, True), (0, False), (0, False)], (3, 0, 0), 3),
        ([(1, True), (2, False)], (1, 1), 1),  # its second is enough for the next
        ([(0, False), (2, False)], (0, 2), 2),  # nobody reads
    ]:
        assert ahead_of_next([Holding(*rank) for rank in ranks], taken) == ahead
