"""The ranks of a pass whose datasets split themselves, simulated in one process: each runs the true loop in a thread.

They talk over a channel that is a few lists. Between two talks no rank depends on another, so that the order in which
the threads come to run changes nothing.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from threading import Condition
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ddp_patch.options import Uneven
from ddp_patch.streams.even_steps import AHEAD, BalancedRounds, OwnBatches, even_steps, next_round

Batch = tuple[int, int]


class LostError(Exception):
    """Another rank has left."""


@dataclass
class Network:
    """What the ranks have sent each other, and after how many talks some have left."""

    talks: list[dict[int, list[int]]] = field(default_factory=list)
    sent: dict[tuple[int, int], deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    left: dict[int, int] = field(default_factory=dict)
    changed: Condition = field(default_factory=Condition)

    def leave(self, rank: int, talks: int) -> None:
        with self.changed:
            self.left.setdefault(rank, talks)
            self.changed.notify_all()

    def wait_for(self, is_there: Callable[[], bool], talks: int) -> None:
        """Wait until something is there; raise if somebody left who would have to bring it."""
        ready = self.changed.wait_for(lambda: is_there() or any(at <= talks for at in self.left.values()), timeout=20)
        assert ready, "the ranks would wait for ever"
        if not is_there():
            raise LostError


class FakeChannel:
    """Of one rank."""

    def __init__(self, network: Network, index: int, world: int) -> None:
        self.network, self.index, self.world = network, index, world
        self.talks = self.batches_delivered = 0
        self.sent_to = Counter[tuple[int, int]]()  # by after how many talks, and to whom

    def gathered(self, row: Sequence[int]) -> list[list[int]]:
        with self.network.changed:
            if self.talks == len(self.network.talks):
                self.network.talks.append({})
            rows = self.network.talks[self.talks]
            rows[self.index] = list(row)
            self.network.changed.notify_all()
            self.network.wait_for(lambda: len(rows) == self.world, self.talks)
        self.talks += 1
        return [rows[rank] for rank in range(self.world)]

    def swapped(self, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        for target, value in given.items():
            self.sent_to[self.talks, target] += 1
            with self.network.changed:
                self.network.sent[self.index, target].append(value)
                self.network.changed.notify_all()
        return {source: self._received(self.network.sent[source, self.index]) for source in sources}

    def _received(self, sent: deque[Any]) -> Any:
        with self.network.changed:
            self.network.wait_for(lambda: bool(sent), self.talks - 1)
            return sent.popleft()


@dataclass(frozen=True)
class Case:
    """What happens: how many batches each rank's workers make, which fails, and who leaves after how many."""

    counts: list[int]
    uneven: Uneven
    fails: Batch | None = None
    breaks: dict[int, int] = field(default_factory=dict)


class Rank:
    """One rank: its workers make so many batches, and may fail at one."""

    def __init__(self, network: Network, index: int, case: Case) -> None:
        self.index, self.case = index, case
        self.channel = FakeChannel(network, index, len(case.counts))
        self.rounds, self.got = BalancedRounds(), list[Batch]()
        self.most_held = 0
        self.own = OwnBatches(self.batches())
        self.error: BaseException | None = None

    def batches(self) -> Iterator[Batch]:
        for number in range(self.case.counts[self.index]):
            if (self.index, number) == self.case.fails:
                raise LookupError
            yield self.index, number

    def ends(self) -> list[int]:
        return [-1 if self.own.reads else self.case.counts[self.index]]

    def run(self) -> None:
        """Iterate to the end, to an error, or to where it breaks off."""
        self.own.read(1)
        steps = even_steps(self.own, cast(Any, self.channel), self.rounds, self.case.uneven, self.ends)
        try:
            for batch in steps:
                self.most_held = max(self.most_held, self.own.held)
                self.got.append(batch)
                if len(self.got) == self.case.breaks.get(self.index):
                    break
        except (LostError, LookupError) as error:
            self.error = error
        self.channel.network.leave(self.index, self.channel.talks)


def simulated(case: Case) -> list[Rank]:
    """Run all ranks to their ends; raise if they would wait for ever."""
    network = Network()
    ranks = [Rank(network, index, case) for index in range(len(case.counts))]
    with ThreadPoolExecutor(len(ranks)) as threads:
        list(threads.map(Rank.run, ranks))
    return ranks


worlds = st.lists(st.integers(0, 6) | st.integers(0, 90), min_size=2, max_size=8)
unevens: st.SearchStrategy[Uneven] = st.sampled_from(["pad", "drop", "keep"])
whole_cases = st.builds(Case, worlds, unevens)


@st.composite
def failing_cases(draw: st.DrawFn) -> Case:
    """One in which a rank's workers fail, but not at once: that is told when the pass begins."""
    counts = draw(worlds.filter(lambda counts: max(counts) > 1))
    rank = draw(st.sampled_from([rank for rank, count in enumerate(counts) if count > 1]))
    return Case(counts, draw(unevens), (rank, draw(st.integers(1, counts[rank] - 1))))


@st.composite
def left_cases(draw: st.DrawFn, *, together: bool) -> Case:
    """One that a rank leaves alone, or all after the same batch."""
    case, after = draw(whole_cases), draw(st.integers(1, 60))
    leaving = range(len(case.counts)) if together else [draw(st.integers(0, len(case.counts) - 1))]
    return Case(case.counts, case.uneven, breaks=dict.fromkeys(leaving, after))


def all_come_once_in_equal_steps(case: Case) -> None:
    ranks = simulated(case)
    counts, world, batches = case.counts, len(case.counts), sum(case.counts)
    together = Counter(chain.from_iterable(rank.got for rank in ranks))
    everything = Counter((rank, number) for rank, count in enumerate(counts) for number in range(count))
    steps = [len(rank.got) for rank in ranks]
    assert not any(rank.error for rank in ranks)
    assert max(steps) - min(steps) <= (case.uneven == "keep")
    assert max(steps) == (batches // world if case.uneven == "drop" else -(-batches // world))
    assert together | everything == (everything if case.uneven == "drop" else together)
    assert (everything - together).total() == (batches % world if case.uneven == "drop" else 0)
    repeated = together - everything
    assert repeated.total() == (-batches % world if case.uneven == "pad" else 0)
    # What comes again comes in one step, so that its weight can be told.
    assert set(repeated) <= {rank.got[-1] for rank in ranks if rank.got}
    # Positions follow from what all know alike, and from a rank's own first batches.
    for number in range(ranks[0].rounds.count + 1):
        consumed = ranks[0].rounds.taken(number) or (0,) * world
        assert all((rank.rounds.taken(number) or (0,) * world) == consumed for rank in ranks)
        given_then = {batch for rank in ranks for batch in rank.got[:number]}
        assert given_then == {(rank, number) for rank, count in enumerate(consumed) for number in range(count)}
    # A rank that alone reads needs a batch for each other one.
    most = max(AHEAD, world)
    assert all(rank.most_held <= most for rank in ranks)
    assert all(messages == 1 for rank in ranks for messages in rank.channel.sent_to.values())


def all_know_of_a_failure_at_the_same_step(case: Case) -> None:
    ranks = simulated(case)
    failed, number = cast(Batch, case.fails)
    errors = [type(rank.error) for rank in ranks]
    assert errors == [LookupError if index == failed else LostError for index in range(len(ranks))]
    steps = [len(rank.got) for rank in ranks]
    assert max(steps) == min(steps)
    given_out = {batch for rank in ranks for batch in rank.got}
    assert len([owner for owner, _ in given_out if owner == failed]) <= number
    if min(case.counts) > number:  # all that came before is given
        assert max(steps) == number


def nobody_waits_for_who_left(case: Case) -> None:
    ranks = simulated(case)
    (gone, after), *_ = case.breaks.items()
    if len(ranks[gone].got) < after or not any(rank.error for rank in ranks):
        # It came to the end before, or broke off when all knew what was left.
        all_steps = -(-sum(case.counts) // len(ranks)) if case.uneven != "drop" else sum(case.counts) // len(ranks)
        whole = {all_steps, all_steps - (case.uneven == "keep")}
        assert all(len(rank.got) in whole for rank in ranks if rank.index != gone or len(rank.got) != after)
        return
    # They go on for what was agreed then.
    assert all(rank.error for rank in ranks if rank.index != gone)
    assert all(len(rank.got) <= after + AHEAD * len(ranks) for rank in ranks)


def who_leaves_with_all_leaves_nothing_behind(case: Case) -> None:
    ranks = simulated(case)
    assert not any(rank.error for rank in ranks)
    after = case.breaks[0]
    assert len({min(after, len(rank.got)) for rank in ranks}) <= 1 + (case.uneven == "keep")
    # What was handed over and not given yet does not count as consumed.
    consumed = ranks[0].rounds.taken(ranks[0].rounds.count)
    assert {batch for rank in ranks for batch in rank.got} == {
        (r, n) for r, many in enumerate(consumed) for n in range(many)
    }
    if all(len(rank.got) == after for rank in ranks):
        for rows in ranks[0].channel.network.talks:  # an incomplete one would keep its connections
            assert len(rows) == len(ranks)


CLAIMS: list[tuple[st.SearchStrategy[Case], Callable[[Case], None]]] = [
    (whole_cases, all_come_once_in_equal_steps),
    (failing_cases(), all_know_of_a_failure_at_the_same_step),
    (left_cases(together=False), nobody_waits_for_who_left),
    (left_cases(together=True), who_leaves_with_all_leaves_nothing_behind),
]


@pytest.mark.parametrize("examples", [100, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("some", "claim"), CLAIMS, ids=[claim.__name__ for _, claim in CLAIMS])
def test_passes(some: st.SearchStrategy[Case], claim: Callable[[Case], None], examples: int) -> None:
    settings(max_examples=examples)(given(some)(claim))()


@given(st.lists(st.integers(998, 1002), min_size=2, max_size=8), unevens)
@settings(max_examples=10)
def test_the_ranks_talk_after_several_steps(counts: list[int], uneven: Uneven) -> None:
    ranks = simulated(Case(counts, uneven))
    assert len(ranks[0].channel.network.talks) < 1000 / AHEAD + 10
    assert min(len(rank.got) for rank in ranks) >= 998


@given(st.lists(st.integers(0, 5), min_size=2, max_size=9))
def test_whoever_holds_most_hands_over_most(held: list[int]) -> None:
    if step := next_round(held, [False] * len(held), "keep"):
        after = [count - taken for count, taken in zip(held, step.taken, strict=True)]
        donors = {each[0] for rank, each in enumerate(step.gets) if each and each[0] != rank}
        assert all(each == (rank, 0) for rank, each in enumerate(step.gets) if held[rank])
        assert all(after[rank] >= max(after) - 1 for rank in donors)
