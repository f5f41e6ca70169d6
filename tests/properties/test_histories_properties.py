"""Ranks that run one program never contradict each other, however fast each is; a pass of one rank alone is found."""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given, settings

from ddp_patch.orders.random_states import EpochCounter
from ddp_patch.ranks.histories import History, PassProgress, PassRecord, PassState, pass_mismatch

SIZE = 2  # items in a batch


@dataclass(frozen=True)
class Iterates:
    """Something that a training script does with a loader.

    Attributes:
        epoch: What it passes to set_epoch() first, if it does.
        steps: After how many batches it breaks off; whole epochs have fewer.
        nested: How many passes it makes in between, after the first step.
        keeps: Whether it keeps the iterator.
        looks: How many batches of each look that one rank alone takes before.
    """

    epoch: int | None
    steps: int
    nested: int
    keeps: bool
    looks: Sequence[int]


class Rank:
    """Runs a program, and tells a record at every moment at which another rank might read one."""

    def __init__(self, batches: int, takes_looks: bool = False) -> None:
        self.history, self.epochs = History(SIZE), EpochCounter()
        self.batches, self.takes_looks = batches, takes_looks

    def long_peek(self) -> int:
        return max(SIZE, self.batches * SIZE // 2)

    def runs(self, program: Sequence[Iterates]) -> list[PassRecord]:
        return [record for does in program for record in self.records(does)]

    def records(self, does: Iterates) -> Iterator[PassRecord]:
        if does.epoch is not None:
            for steps in does.looks if self.takes_looks else ():
                yield from self.iterates(min(steps, self.long_peek() // SIZE))
            self.choose(does.epoch)
        yield from self.iterates(does.steps, does.nested, does.keeps)

    def choose(self, epoch: int) -> None:
        self.epochs.set(epoch)
        self.history.choose()

    def iterates(self, steps: int, nested: int = 0, keeps: bool = False) -> Iterator[PassRecord]:
        progress = [PassProgress(0, PassState.OPEN)]
        epoch = self.epochs.upcoming
        self.epochs.begin(epoch)
        self.history.begin(epoch, lambda: progress[0], self.long_peek)
        yield self.history.record()
        for step in range(min(steps, self.batches)):
            progress[0] = PassProgress(step * SIZE + 1, PassState.OPEN)  # the next batch was asked for
            yield self.history.record()
            progress[0] = PassProgress((step + 1) * SIZE, PassState.OPEN)
            if step == 0:
                for _ in range(nested):
                    yield from self.iterates(self.batches)
        if steps >= self.batches:
            progress[0] = PassProgress(self.batches * SIZE, PassState.ENDED)
        elif not keeps:
            progress[0] = progress[0]._replace(state=PassState.ABANDONED)
        yield self.history.record()


programs = st.lists(
    st.builds(
        Iterates,
        epoch=st.none() | st.integers(0, 5),
        steps=st.integers(0, 9),
        nested=st.integers(0, 2),
        keeps=st.booleans(),
        looks=st.lists(st.just(1), max_size=2),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40)  # each compares every moment of a rank with every one of another
@given(program=programs, batches=st.integers(1, 8))
def test_ranks_that_run_one_program_never_contradict_each_other(program: list[Iterates], batches: int) -> None:
    """Whichever moments they are at."""
    rank = Rank(batches)
    records = rank.runs(program)
    for mine in records:
        for theirs in records:
            assert pass_mismatch(mine, theirs, SIZE, 0, rank.long_peek) is None


def agree(program: Sequence[Iterates], batches: int) -> bool:
    """Return whether a rank that looks in between never contradicts one that does not."""
    rank = Rank(batches)
    looking, plain = Rank(batches, takes_looks=True).runs(program), rank.runs(program)
    found = [
        pass_mismatch(*both, SIZE, 0, rank.long_peek)
        for mine in looking
        for theirs in plain
        for both in ((mine, theirs), (theirs, mine))
    ]
    return not any(found)


@settings(max_examples=40)  # each compares every moment of a rank with every one of another
@given(program=programs, batches=st.integers(1, 8))
def test_looks_before_an_epoch_is_set_contradict_nothing(program: list[Iterates], batches: int) -> None:
    assert agree(program, batches)


@settings(max_examples=40)  # each compares every moment of a rank with every one of another
@given(
    passes=st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 4), max_size=1)), min_size=1, max_size=4),
    batches=st.integers(1, 8),
)
def test_a_longer_look_before_each_whole_epoch_that_is_set_contradicts_nothing(
    passes: list[tuple[int, list[int]]], batches: int
) -> None:
    assert agree([Iterates(epoch, batches, 0, False, looks) for epoch, looks in passes], batches)


@given(epochs=st.integers(1, 40), extra=st.integers(0, 39), steps=st.integers(1, 4), batches=st.integers(2, 5))
def test_a_pass_of_one_rank_alone_is_found_once_both_have_gone_on(
    epochs: int, extra: int, steps: int, batches: int
) -> None:
    steps, extra = min(steps, batches - 1), min(extra, epochs - 1)
    alone, other = Rank(batches), Rank(batches)
    whole = Iterates(None, batches, 0, False, ())
    alone.runs([whole] * extra)
    other.runs([whole] * extra)
    alone.runs([Iterates(None, steps, 0, False, ())])
    after = zip(alone.records(whole), other.records(whole), strict=True)
    found = [pass_mismatch(mine, theirs, SIZE, 0, other.long_peek) for mine, theirs in after]
    assert found[-1] is not None
    assert found[-1] == (extra, steps * SIZE, extra + 1, True)


@given(program=programs)
def test_a_record_stays_small(program: list[Iterates]) -> None:
    rank = Rank(batches=3)
    for _ in range(20):
        records = rank.runs(program)
    sent = pickle.dumps(records[-1].plain())
    assert len(sent) < 4096
    assert PassRecord.of(pickle.loads(sent)) == records[-1]  # noqa: S301 - its own
