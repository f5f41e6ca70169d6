"""Ranks that run one program never exclude each other, however fast each is; what is different on one is found."""

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from claiming import Rank, connected, new_store, run_together
from hypothesis import HealthCheck, assume, given, settings

from ddp_patch.ranks.pass_facts import State

__all__ = ["connected"]

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


def program_of(script: list[Iterates], *, takes_looks: bool) -> list[tuple[Any, ...]]:
    """Return the acts of a rank that runs a script."""
    acts: list[tuple[Any, ...]] = []
    upcoming = 0
    for does in script:
        if does.restores:
            acts.append(("restores",))
            upcoming = 0
        if does.epoch is not None:
            acts += [("takes", upcoming + look, 1) for look in range(does.looks if takes_looks else 0)]
            acts.append(("sets_an_epoch",))
            upcoming = does.epoch
        over = State.ENDED if does.steps > BATCHES else State.RUNNING
        acts.append(("takes", upcoming, min(does.steps, BATCHES), over, {"nested": does.nested}))
        upcoming += 1 + bool(does.nested)
    return acts


scripts = st.lists(
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
SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)


@pytest.mark.usefixtures("connected")
@SHARED
@given(scripts, st.randoms(use_true_random=False))
def test_one_program_on_three_ranks_excludes_nothing_at_any_moment(script: list[Iterates], random: Any) -> None:
    store = new_store()
    ranks = [Rank(store, number, 3) for number in range(3)]
    programs = [program_of(script, takes_looks=number == 1) for number in range(3)]
    assert run_together(ranks, programs, random.choice) == []


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
        batches=st.integers(2, 6),
        state=st.sampled_from([State.LEFT, State.LEFT, State.ENDED, State.FAILED]),
        order=st.sampled_from(["abcdef", "abcdef", "abcdef", "abdcef"]),
        others=st.sampled_from([0, 0, 0, 0, 1]),
    ),
    max_size=3,
)


def exclude(mine: list[Made], theirs: list[Made]) -> bool:
    """Say by brute force whether two ranks' passes exclude each other."""
    for ours, other in zip(mine, theirs, strict=False):
        if (ours.epoch, ours.others) != (other.epoch, other.others):
            return True
        common = min(ours.batches, other.batches)
        # Orders are compared up to a count; where both are over after as many batches, up to there, too.
        ended = [one.state is State.ENDED for one in (ours, other)]
        seen = max(count for count in (2, 4) if count <= common)
        if ours.batches == other.batches and ended[0] == ended[1]:
            seen = len(ours.order) if ended[0] else max(count for count in (2, 3, 4, 6) if count <= common)
        if ours.order[:seen] != other.order[:seen]:
            return True
        assume(ours.order == other.order or seen == common)  # else it follows from who comes first
        for behind, further in ((ours, other), (other, ours)):
            if behind.state is not State.FAILED and further.batches > behind.batches:
                return True
            is_through = further.state is State.ENDED and further.batches > behind.batches + 1
            if behind.state is State.FAILED and is_through:
                return True
    return False


@pytest.mark.usefixtures("connected")
@SHARED
@given(passes, passes, st.randoms(use_true_random=False))
def test_the_verdict_is_that_of_brute_force(mine: list[Made], theirs: list[Made], random: Any) -> None:
    store = new_store()
    ranks = [Rank(store, number) for number in range(2)]
    programs = [
        [("takes", one.epoch, one.batches, one.state, {"order": one.order, "others": one.others}) for one in made]
        for made in (mine, theirs)
    ]
    found = run_together(ranks, programs, random.choice)
    found = found or run_together(ranks, [[("hears",)], [("hears",)]], min)
    assert bool(found) == exclude(mine, theirs)
