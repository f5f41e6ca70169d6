"""The ranks of a pass whose datasets split themselves, simulated in one process: any order in which they come to run.

Each rank runs the true loop over a channel that is a few lists. Whoever waits for the others says so, and a scheduler
lets one of those go on that can. If none can, and nobody has left, they would wait for ever.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from random import Random
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from ddp_patch.options import Uneven
from ddp_patch.streams.balanced_rounds import AHEAD, AHEAD_IF_FAST, BalancedRounds, Holding, RoundPlan
from ddp_patch.streams.by_worker import WAITS, OwnBatches, even_steps

Batch = tuple[int, int]
PREFETCHED = 4  # how many batches a rank's workers are ahead
FAST, SLOW, MIXED = (0,), (1,), (0, 0.001, 1)  # seconds between two looks at the clock


class LostError(Exception):
    """Another rank has left."""


@dataclass
class Network:
    """What the ranks have sent each other, and who has left: before or after their part in how many gathers."""

    gathers: list[dict[int, list[int]]] = field(default_factory=list)
    sent: dict[tuple[int, int], deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    notes: dict[int, int] = field(default_factory=dict)


class FakeChannel:
    """Of one rank."""

    def __init__(self, network: Network, index: int, world: int) -> None:
        self.network, self.index, self.world = network, index, world
        self.begun = self.heard = 0
        self.sent_to = Counter[tuple[int, int]]()  # by after how many gathers, and to whom
        self.is_lost = self.is_sending = False

    def begin_gather(self, row: Sequence[int]) -> None:
        assert self.begun == self.heard, "one at a time"
        if self.begun == len(self.network.gathers):
            self.network.gathers.append({})
        self.network.gathers[self.begun][self.index] = list(row)
        self.begun += 1

    def is_gathered(self, number: int) -> bool:
        return len(self.network.gathers[number]) == self.world

    def has_gathered(self) -> bool:
        return self.begun > self.heard and self.is_gathered(self.heard)

    def gathered(self, meanwhile: Callable[[], bool]) -> list[list[int]]:
        meanwhile()
        if self.is_lost:
            raise LostError
        assert self.has_gathered()
        rows = self.network.gathers[self.heard]
        self.heard += 1
        return [rows[rank] for rank in range(self.world)]

    def meet(self) -> None:
        if self.is_lost:
            raise LostError

    def send(self, target: int, value: Any) -> None:
        self.sent_to[self.heard, target] += 1
        self.is_sending = True
        self.network.sent[self.index, target].append(value)

    def receive(self, source: int) -> Any:
        if self.is_lost:
            raise LostError
        sent = self.network.sent[source, self.index]
        assert sent, "it has come"
        return sent.popleft()

    def all_sent(self) -> None:
        if self.is_lost:
            raise LostError
        self.is_sending = False

    def count_batch(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self.network.notes.setdefault(self.index, self.begun)

    def say_goodbye(self, row: Sequence[int]) -> None:
        self.network.notes.setdefault(self.index, self.begun)
        self.begin_gather(row)

    def require_nobody_left(self) -> None:
        assert self.network.notes
        raise LostError


class Rank:
    """One rank: its workers make so many batches, and may fail at one."""

    def __init__(self, network: Network, index: int, case: "Case", random: Random) -> None:
        self.index, self.case, self.random = index, case, random
        self.channel, self.plan = FakeChannel(network, index, len(case.counts)), RoundPlan(index, case.uneven)
        self.rounds, self.got = BalancedRounds(), list[Batch]()
        self.made, self.most_held, self.most_beside, self.now = 0, 0, 0, 0.0
        self.own = OwnBatches(self.batches())
        self.own.read(1)
        self.own.ready = self.ready
        self.steps = even_steps(self.own, cast(Any, self.channel), self.plan, self.rounds, self.ends, self.clock)
        self.state: Any = None  # what the loop gave last
        self.error: BaseException | None = None
        self.is_over = False

    def batches(self) -> Iterator[Batch]:
        for number in range(self.case.counts[self.index]):
            if (self.index, number) == self.case.fails:
                raise LookupError
            self.made = max(self.made, number + 1)
            yield self.index, number

    def ready(self, received: int) -> int:
        most = received + (0 if self.case.is_behind else PREFETCHED)
        self.made = max(self.made, most if self.case.pace == FAST else self.random.randint(received, most))
        return self.made - received

    def ends(self) -> list[int]:
        return [-1 if self.own.reads else self.case.counts[self.index]]

    def clock(self) -> float:
        self.now += self.random.choice(self.case.pace)
        return self.now

    def can_go_on(self, ranks: Sequence["Rank"]) -> bool:
        if self.state is not WAITS:
            return True
        return self.channel.has_gathered() if self.gathers else not self.late(ranks)

    @property
    def gathers(self) -> bool:
        """Whether it waits for reports; otherwise for who sends it batches, or gets its own."""
        return self.channel.begun > self.channel.heard

    def late(self, ranks: Sequence["Rank"]) -> list["Rank"]:
        """Return with whom it exchanges batches and who has not heard of that yet."""
        partners = {
            ranks[source.rank if rank == self.index else rank]
            for rank, gets in enumerate(self.plan.gets)
            for source in gets
            if self.index in {rank, source.rank}
        }
        return [rank for rank in partners if rank.channel.heard < self.channel.heard]

    def run(self) -> None:
        """Go on until it waits, or has a batch, or more."""
        try:
            self.state = next(self.steps)
        except StopIteration:
            self.is_over = True
        except (LostError, LookupError) as error:
            self.is_over, self.error = True, error
            self.channel.network.notes.setdefault(self.index, self.channel.begun)
        else:
            self.most_held = max(self.most_held, self.own.held + len(self.own.due))
            if self.state is not WAITS:
                assert not self.channel.is_sending, "the loop may change its batch"
                self.most_beside = max(self.most_beside, self.own.held + len(self.own.due))
                self.got.append(self.state)
                if len(self.got) == self.case.breaks.get(self.index):
                    self.leave()

    def leave(self) -> None:
        self.is_over = True
        self.steps.close()
        self.channel.network.notes.setdefault(self.index, self.channel.begun)

    def hears_of_loss(self, ranks: Sequence["Rank"]) -> bool:
        """Whether what it waits for will not come, and it is told so."""
        if self.gathers:
            return any(self.channel.heard >= begun for begun in self.channel.network.notes.values())
        return any(rank.is_gone for rank in self.late(ranks))

    @property
    def is_gone(self) -> bool:
        """Whether it has left, and its connections are closed: not while it gathers, as others may need that."""
        return self.is_over and (not self.channel.begun or self.channel.is_gathered(self.channel.begun - 1))


@dataclass(frozen=True)
class Case:
    """What happens: how many batches each rank's workers make, which fails, and who leaves after how many.

    And how fast: seconds between two looks at the clock, and whether each batch must be waited for.
    """

    counts: list[int]
    uneven: Uneven
    seed: int
    fails: Batch | None = None
    breaks: dict[int, int] = field(default_factory=dict)
    pace: Sequence[float] = MIXED
    is_behind: bool = False


def simulated(case: Case) -> list[Rank]:
    """Run all ranks to their ends; raise if they wait for ever."""
    network, random = Network(), Random(case.seed)
    ranks = [Rank(network, index, case, random) for index in range(len(case.counts))]
    while active := [rank for rank in ranks if not rank.is_over]:
        if able := [rank for rank in active if rank.can_go_on(ranks)]:
            random.choice(able).run()
            continue
        told = [rank for rank in active if rank.hears_of_loss(ranks)]
        assert told, "all wait, and nobody has left"
        for rank in told:
            rank.channel.is_lost = True
            rank.run()
    return ranks


worlds = st.lists(st.integers(0, 6) | st.integers(0, 90), min_size=2, max_size=8)
unevens: st.SearchStrategy[Uneven] = st.sampled_from(["pad", "drop", "keep"])
seeds = st.integers(0, 2**32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A pass to its end."""
    return Case(draw(worlds), draw(unevens), draw(seeds), pace=draw(st.sampled_from([FAST, SLOW, MIXED])))


@st.composite
def failing_cases(draw: st.DrawFn) -> Case:
    """One in which a rank's workers fail, but not at once: that is told when the pass begins."""
    counts = draw(worlds.filter(lambda counts: max(counts) > 1))
    rank = draw(st.sampled_from([rank for rank, count in enumerate(counts) if count > 1]))
    return Case(counts, draw(unevens), draw(seeds), (rank, draw(st.integers(1, counts[rank] - 1))))


@st.composite
def left_cases(draw: st.DrawFn) -> Case:
    """One that a rank leaves alone."""
    case = draw(cases())
    rank, after = draw(st.integers(0, len(case.counts) - 1)), draw(st.integers(1, 60))
    return Case(case.counts, case.uneven, case.seed, breaks={rank: after}, pace=case.pace)


@st.composite
def broken_cases(draw: st.DrawFn) -> Case:
    """One that all ranks leave after the same batch."""
    case = draw(cases())
    breaks = dict.fromkeys(range(len(case.counts)), draw(st.integers(1, 60)))
    return Case(case.counts, case.uneven, case.seed, breaks=breaks, pace=case.pace)


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
    assert (together - everything).total() == (-batches % world if case.uneven == "pad" else 0)
    # Positions follow from what all know alike, and from a rank's own first batches.
    for number in range(ranks[0].rounds.count + 1):
        consumed = ranks[0].rounds.taken(number) or (0,) * world
        assert all((rank.rounds.taken(number) or (0,) * world) == consumed for rank in ranks)
        given_then = {batch for rank in ranks for batch in rank.got[:number]}
        assert given_then == {(rank, number) for rank, count in enumerate(consumed) for number in range(count)}
    # A rank that alone reads needs a batch for each other one.
    most = 2 * max(AHEAD if case.pace == SLOW else AHEAD_IF_FAST, world)
    assert all(rank.most_held <= most for rank in ranks)
    assert all(messages == 1 for rank in ranks for messages in rank.channel.sent_to.values())


def all_know_of_a_failure_at_the_same_step(case: Case) -> None:
    ranks = simulated(case)
    rank, number = cast(Batch, case.fails)
    steps = [len(rank.got) for rank in ranks]
    assert [type(rank.error) for rank in ranks] == [
        LookupError if index == rank else LostError for index in range(len(ranks))
    ]
    assert max(steps) == min(steps)
    given_out = {batch for rank in ranks for batch in rank.got}
    assert len([owner for owner, _ in given_out if owner == rank]) <= number
    if min(case.counts) > number:  # all that came before is given
        assert max(steps) == number


def nobody_waits_for_who_left(case: Case) -> None:
    ranks = simulated(case)
    (gone, after), *_ = case.breaks.items()
    if len(ranks[gone].got) < after or not any(rank.error for rank in ranks):
        # It came to the end before, or broke off when there was nothing more to ask for.
        all_steps = -(-sum(case.counts) // len(ranks)) if case.uneven != "drop" else sum(case.counts) // len(ranks)
        assert all(len(rank.got) in {all_steps, all_steps - (case.uneven == "keep")} for rank in ranks)
        return
    # They go on for what was agreed then, and for what had been reported.
    assert all(rank.is_over and len(rank.got) <= after + 4 * AHEAD_IF_FAST for rank in ranks)


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
        for rows in ranks[0].channel.network.gathers:  # an incomplete one would keep its connections
            assert len(rows) == len(ranks)


CLAIMS: list[tuple[st.SearchStrategy[Case], Callable[[Case], None]]] = [
    (cases(), all_come_once_in_equal_steps),
    (failing_cases(), all_know_of_a_failure_at_the_same_step),
    (left_cases(), nobody_waits_for_who_left),
    (broken_cases(), who_leaves_with_all_leaves_nothing_behind),
]
every_claim = pytest.mark.parametrize(("some", "claim"), CLAIMS, ids=[claim.__name__ for _, claim in CLAIMS])


@every_claim
def test_whatever_the_order(some: st.SearchStrategy[Case], claim: Callable[[Case], None]) -> None:
    settings(max_examples=200)(given(some)(claim))()


@pytest.mark.soak
@every_claim
def test_whatever_the_order_for_long(some: st.SearchStrategy[Case], claim: Callable[[Case], None]) -> None:
    settings(max_examples=10_000)(given(some)(claim))()


@given(st.integers(2, 8), st.integers(1, 30), seeds)
def test_a_batch_that_is_waited_for_is_given_at_once(world: int, batches: int, seed: int) -> None:
    ranks = simulated(Case([batches] * world, "pad", seed, pace=SLOW, is_behind=True))
    assert all(rank.most_beside == 0 for rank in ranks)


@given(st.lists(st.integers(998, 1002), min_size=2, max_size=8), unevens, seeds)
@settings(max_examples=20)
def test_where_steps_are_fast_the_ranks_seldom_talk(counts: list[int], uneven: Uneven, seed: int) -> None:
    ranks = simulated(Case(counts, uneven, seed, pace=FAST))
    assert len(ranks[0].channel.network.gathers) < 100
    assert min(len(rank.got) for rank in ranks) >= 998


def shared() -> torch.Tensor:
    """Return a tensor as a worker sends a large one."""
    made = torch.zeros(4)
    made.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return made


@pytest.mark.parametrize(
    ("batch", "room"),
    [
        (torch.zeros(4), AHEAD_IF_FAST),
        (["a", 1, None, 2.5], AHEAD_IF_FAST),
        ({f"column {number}": torch.zeros(4) for number in range(10)}, AHEAD_IF_FAST),
        ({f"column {number}": shared() for number in range(10)}, 25),  # files that are open
        ({"x": torch.zeros(2**18), "y": [torch.zeros(4)]}, 7),  # bytes of shared memory
        (torch.zeros(2**24), AHEAD),
        ({"of unknown size": object()}, AHEAD),
        ({"sparse": torch.eye(3).to_sparse()}, AHEAD),
        (b"1" * 2**20, 8),
    ],
)
def test_what_is_read_ahead_has_room(batch: Any, room: int) -> None:
    own = OwnBatches(iter([batch, batch]))
    assert own.room == AHEAD
    own.read(1)
    assert own.room == room


def test_who_reads_alone_reports_while_its_batches_are_taken() -> None:
    """It does when it has as many again as the plan took of it: that is more than one for each round."""
    plan = RoundPlan(0, "pad")
    plan.hear([Holding(8, reads=True), Holding(0, reads=False)], is_fast=True, room=AHEAD_IF_FAST)
    assert not plan.may_report(8, reads=True)
    for _ in range(2):
        assert plan.next() is not None
    assert [plan.may_report(held, reads=True) for held in (7, 8)] == [False, True]
