"""Ranks that run one program never contradict each other, however fast each is; what is different on one is found."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import hypothesis.strategies as st
from hypothesis import given, settings

from ddp_patch.orders.digest import Digest
from ddp_patch.ranks.log import LoggedPass, Progress, Record, State
from ddp_patch.ranks.pass_monitor import PassMonitor

BATCHES = 5  # of an epoch


@dataclass(frozen=True)
class Iterates:
    """Something that a training script does with a loader.

    Attributes:
        epoch: What it passes to set_epoch() first, if it does.
        steps: After how many batches it breaks off; whole epochs have fewer.
        nested: How many batches it takes of another iterator, after its own first one.
        looks: How often one rank alone looks at a batch before that, if an epoch is set.
        restores: Whether it restores a position first.
    """

    epoch: int | None
    steps: int
    nested: int
    looks: int
    restores: bool


class Rank:
    """Runs a program; tells after each step the log and every record that another rank may have read by then."""

    def __init__(self, *, takes_looks: bool = False) -> None:
        self.log, self.upcoming, self.takes_looks = PassMonitor(), 0, takes_looks
        self.records: list[Record] = []

    def runs(self, program: Sequence[Iterates]) -> Iterator[None]:
        for does in program:
            if does.restores:
                self.log.cut_off()
                self.upcoming = 0
            if does.epoch is not None:
                for _ in range(does.looks if self.takes_looks else 0):
                    yield from self.iterates(1)
                self.log.strike_looks()
                self.upcoming = does.epoch
            yield from self.iterates(does.steps, does.nested)

    def iterates(self, steps: int, nested: int = 0) -> Iterator[None]:
        given, state, epoch, digest = 0, State.RUNNING, self.upcoming, Digest()
        self.upcoming += 1
        begun = LoggedPass(epoch, "0", lambda: Progress(given, given, state), lambda: digest.marks)
        self.log.add(begun)
        yield from self.publishes()
        for step in range(min(steps, BATCHES)):
            digest.add([(epoch, step)])
            given += 1
            if begun.is_told:
                begun.tell(Progress(given, given, state))
            self.log.goes_on(begun)
            yield from self.publishes()
            if not step and nested:
                yield from self.iterates(nested)
        if steps > BATCHES:
            state = State.ENDED
            if begun.is_told:
                begun.tell(Progress(given, given, state))
        yield from self.publishes()

    def publishes(self) -> Iterator[None]:
        self.log.settle()
        self.records.append(self.log.record())
        yield


programs = st.lists(
    st.builds(
        Iterates,
        epoch=st.none() | st.integers(0, 3),
        steps=st.integers(1, BATCHES + 1),
        nested=st.sampled_from([0, 0, 1, 3]),
        looks=st.integers(0, 3),
        restores=st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=5,
)


@given(programs, st.randoms(use_true_random=False))
def test_one_program_on_two_ranks_contradicts_nothing_at_any_moment(program: list[Iterates], random: object) -> None:
    ranks = [Rank(), Rank(takes_looks=True)]
    running = {rank: rank.runs(program) for rank in ranks}
    while running:
        rank = random.choice(list(running))  # type: ignore[attr-defined]  # Hypothesis's own
        if next(running[rank], running) is running:
            del running[rank]
        for one, other in (ranks, reversed(ranks)):
            for record in other.records:
                assert one.log.difference(record) is None


@dataclass(frozen=True)
class Made:
    """A pass that is over, but for the last."""

    epoch: int
    batches: int
    state: State
    order: str
    others: int


passes = st.lists(
    st.builds(
        Made,
        epoch=st.sampled_from([0, 0, 0, 1]),
        batches=st.integers(2, 4),
        state=st.sampled_from([State.RUNNING, State.RUNNING, State.ENDED, State.FAILED]),
        order=st.sampled_from(["abcd", "abcd", "abcd", "abdc"]),
        others=st.sampled_from([0, 0, 0, 0, 1]),
    ),
    max_size=3,
)


def logged(made: Sequence[Made]) -> tuple[PassMonitor, list[Record]]:
    """Return the log of some passes, and all records that were left of it."""
    log, records = PassMonitor(), []
    for one in made:
        given, state, digest = 0, State.RUNNING, Digest()

        def progress() -> Progress:
            return Progress(given, given, state)  # noqa: B023 - each pass is over when the next begins

        log.add(LoggedPass(one.epoch, "0", progress, partial(getattr, digest, "marks"), one.others))
        for given in range(1, one.batches + 1):
            digest.add(one.order[given - 1])
            state = one.state if given == one.batches else State.RUNNING
            log.settle()
            records.append(log.record())
        final = Progress(given, given, state)
        log._passes[-1].progress = lambda final=final: final  # type: ignore[misc]
    log.settle()
    return log, [*records, log.record()]


def contradict(mine: Sequence[Made], theirs: Sequence[Made]) -> bool:
    """Say by brute force whether two ranks' passes break a rule."""
    for number, (ours, other) in enumerate(zip(mine, theirs, strict=False)):
        if (ours.epoch, ours.others) != (other.epoch, other.others):
            return True
        common = min(ours.batches, other.batches)
        if ours.order[:common] != other.order[:common]:
            return True
        for behind, further, passes_made in ((ours, other, mine), (other, ours, theirs)):
            is_left = behind.state is State.RUNNING and number < len(passes_made) - 1
            if (is_left or behind.state is State.ENDED) and further.batches > behind.batches:
                return True
            is_through = further.state is State.ENDED and further.batches > behind.batches + 1
            if behind.state is State.FAILED and is_through:
                return True
    return False


@settings(max_examples=500)
@given(passes, passes)
def test_the_verdict_is_that_of_brute_force(mine: list[Made], theirs: list[Made]) -> None:
    (log, records), (other_log, other_records) = logged(mine), logged(theirs)
    found = any(log.difference(record) for record in other_records)
    found = found or any(other_log.difference(record) for record in records)
    assert found == contradict(mine, theirs)
