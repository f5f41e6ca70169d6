"""What ranks claim of their passes: what excludes what, whichever rank comes first; what it asks; what is kept."""

import multiprocessing
import random
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from claiming import Connection, Rank, connected, new_store, run_together
from torch.utils.data import DataLoader, IterableDataset
from zoo import Indices, N, as_it_is

from ddp_patch import DDPSamplerWrapper, loader_state, patch_dataloader_to_ddp
from ddp_patch.errors import RankMismatchError
from ddp_patch.ranks import pass_monitor
from ddp_patch.ranks.pass_facts import BegunPass, PassNumbers, Progress, Stage, State, Word, next_count

__all__ = ["connected"]

Program = list[tuple[Any, ...]]

LOOK = 1
LEFT, ENDED, FAILED, RUNNING = State.LEFT, State.ENDED, State.FAILED, State.RUNNING
SET, RESTORE, HEAR = ("sets_an_epoch",), ("restores",), ("hears",)


def takes(epoch: int, batches: int, over: State = RUNNING, **how: Any) -> tuple[Any, ...]:
    return "takes", epoch, batches, over, how


ONE_ORDER = {"has_one_order": True}
# What one rank does, what the other does, what the loader is like, and which rule they break.
CASES: dict[str, tuple[Program, Program, dict[str, Any], str | None]] = {
    # one epoch, one beginning
    "alike": ([takes(0, 8, ENDED), takes(1, 3)], [takes(0, 8, ENDED), takes(1, 5)], {}, None),
    "another epoch": ([takes(0, 3)], [takes(1, 3)], {}, "passes"),
    "another epoch of a single batch": ([takes(0, 1, ENDED)], [takes(1, 1, ENDED)], {}, "passes"),
    "another beginning": ([takes(0, 3, item=4)], [takes(0, 3)], {}, "passes"),
    # one digest
    "another order": ([takes(0, 8, order="abcxefgh")], [takes(0, 8)], {}, "order"),
    "another order, of two batches": ([takes(0, 2, order="ba", over=ENDED)], [takes(0, 2, ENDED)], {}, "order"),
    # the same data, as far as both know
    "other data": ([takes(0, 3, data="a")], [takes(0, 3, data="b")], {}, "data"),
    "data of which one rank knows nothing": ([takes(0, 3, data="a")], [takes(0, 3)], {}, None),
    # as many batches: where both meet is a count after the shorter one's end
    "left after 3 of 4": ([takes(0, 3), takes(1, 2)], [takes(0, 4), HEAR], {}, "length"),
    "left after 3 of 3": ([takes(0, 3), takes(1, 2)], [takes(0, 3), HEAR], {}, None),
    "over after 5, and after 7": ([takes(0, 5, ENDED)], [takes(0, 7, ENDED)], {}, "length"),
    "over after 1, and after 2": ([takes(0, 1, ENDED)], [takes(0, 2, ENDED)], {}, "length"),
    "over after 3, and after 9": ([takes(0, 3, ENDED)], [takes(0, 9, ENDED)], {}, "length"),
    "over after 4, and 4 so far": ([takes(0, 4, ENDED)], [takes(0, 4), HEAR], {}, None),
    "over after 2, and left after 3": ([takes(0, 2, ENDED)], [takes(0, 3, LEFT)], {}, "length"),
    # a length of its own
    "lengths of their own": ([takes(0, 3, ENDED, others=None)], [takes(0, 9, ENDED, others=None)], {}, None),
    # slack
    "one more, as may be": ([takes(0, 3, ENDED)], [takes(0, 4, ENDED)], {"slack": 1}, None),
    "one more at a count": ([takes(0, 1, ENDED)], [takes(0, 2, ENDED)], {"slack": 1}, None),
    "two more, and one may be": ([takes(0, 1, ENDED)], [takes(0, 3, ENDED)], {"slack": 1}, "length"),
    "three more, and two may be": ([takes(0, 5, ENDED)], [takes(0, 8, ENDED)], {"slack": 2}, "length"),
    # failed: the others may have been given the batch in place of which the error came, and leave when they hear of it
    "failed, and ended after one more": ([takes(0, 3, FAILED)], [takes(0, 4, ENDED)], {}, None),
    "failed, and left after three more": ([takes(0, 3, FAILED)], [takes(0, 6, LEFT)], {}, None),
    "failed, and ended after two more": ([takes(0, 3, FAILED)], [takes(0, 5, ENDED), HEAR], {}, "length"),
    "failed, and ended after nine more": ([takes(0, 3, FAILED)], [takes(0, 12, ENDED), HEAR], {}, "length"),
    "failed, and left before": ([takes(0, 3, FAILED), HEAR], [takes(0, 2, LEFT)], {}, "length"),
    "failed in the first batch, and an epoch set": (
        [takes(0, 0, FAILED), SET, takes(1, 2)],
        [takes(0, 1), SET, takes(1, 2)],
        {},
        None,
    ),
    # looks
    "a look that nobody struck": ([takes(0, LOOK), takes(1, 2)], [takes(0, 4), HEAR], {}, "length"),
    "a look before an epoch is set": ([takes(0, LOOK), SET, takes(0, 3)], [takes(0, 4)], {}, None),
    "two looks before": ([takes(0, LOOK), takes(1, LOOK), SET, takes(0, 3)], [takes(0, 4)], {}, None),
    "more than a look before": ([takes(0, 2), SET, takes(0, 3)], [takes(0, 4), HEAR], {}, "length"),
    "a look within a pass": ([takes(0, 3), takes(1, LOOK)], [takes(0, 4)], {}, None),
    "one order: a look": ([takes(0, LOOK), takes(1, 3)], [takes(0, 4)], ONE_ORDER, None),
    "one order, and looks that count": (
        [takes(0, LOOK), takes(1, 3)],
        [takes(0, 4), HEAR],
        {**ONE_ORDER, "forgets_looks": False},
        "length",
    ),
    "looks that do not count, and epochs that do": (
        [takes(0, LOOK), takes(1, 3)],
        [takes(0, 4)],
        {"forgets_looks": True},
        "passes",
    ),
    "one order: left": ([takes(0, 3), takes(1, 2)], [takes(0, 4), HEAR], ONE_ORDER, "length"),
    # as many passes over other loaders
    "validated alone": ([takes(0, 8, ENDED), takes(1, 2, others=1)], [takes(0, 8, ENDED), takes(1, 2)], {}, "others"),
    "a thread's": ([takes(0, 2, others=None)], [takes(0, 2, others=3)], {}, None),
    # a restored position
    "both restored": ([takes(0, 3), RESTORE, takes(0, 2)], [takes(0, 4), RESTORE, takes(0, 5)], {}, None),
    "both restored after a look of one": ([takes(0, 1), RESTORE, takes(2, 2)], [RESTORE, takes(2, 5)], {}, None),
    "one has restored by now": ([takes(0, 3), RESTORE, takes(0, 2)], [takes(0, 3)], {}, None),
    "one restored, the other went on": ([takes(0, 3), RESTORE, takes(0, 2)], [takes(0, 3), takes(1, 2)], {}, "passes"),
}


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("turns", ["one after the other", "the other way round", "in turn", "at random"])
@pytest.mark.parametrize("name", CASES)
def test_what_excludes_what_whoever_comes_first(name: str, turns: str) -> None:
    one, other, like, rule = CASES[name]
    store = new_store()
    ranks = [Rank(store, number, **like) for number in range(2)]
    numbers = random.Random(3)
    chosen: dict[str, Any] = {
        "one after the other": min,
        "the other way round": max,
        "in turn": lambda running: running[chosen["steps"].append(0) or len(chosen["steps"]) % len(running)],
        "steps": [],
        "at random": numbers.choice,
    }
    found = run_together(ranks, [one, other], chosen[turns])
    if rule is not None and not found:  # it was told after they heard
        found = run_together(ranks, [[HEAR], [HEAR]], min)
    assert {*found} == (set() if rule is None else {rule})


@pytest.mark.usefixtures("connected")
def test_a_rank_hears_that_others_left_the_pass_that_it_is_in() -> None:
    ranks = [Rank(store, number) for store in [new_store()] for number in range(3)]
    (rule,) = run_together(ranks[:2], [[takes(0, 3), takes(1, 2)], [takes(0, 5)]], min)
    assert rule == "length"
    assert run_together(ranks[2:], [[takes(0, 2)]], min) == ["length"]  # though it may come to 3 as well


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("world", [2, 64])
def test_a_comparison_is_two_requests_however_many_ranks_there_are(world: int) -> None:
    store = new_store()
    ranks = [Rank(store, number, world) for number in range(world)]
    assert run_together(ranks, [[takes(0, 12, ENDED)] for _ in ranks], min) == []
    asked = max((rank.connection.asked for rank in ranks), key=len)
    compared = [name for name, key in asked if name == "compare_set"]
    assert len(compared) <= 2 * 4 + 4  # at 2, 4 and 8 batches, and at the end; the last one tells that all have begun
    assert len(store.get("ranks/loader/0/8")) < 100


@pytest.mark.usefixtures("connected")
def test_what_is_claimed_of_a_pass_goes_when_all_have_begun_the_one_after_the_next() -> None:
    store = new_store()
    ranks, counts = [Rank(store, number) for number in range(2)], []
    for epoch in range(50):
        program = [takes(epoch, 12, ENDED)]
        assert run_together(ranks, [program, program], random.Random(epoch).choice) == []
        counts.append(store.num_keys())
    assert max(counts) < 25


def test_counts_thin_out() -> None:
    counts = [2]
    while counts[-1] < 10**6:
        counts.append(next_count(counts[-1]))
    assert len(counts) < 60
    assert all(one < other <= 2 * one for one, other in pairwise(counts))


def test_a_pass_counts_as_far_as_it_had_come_when_the_next_took_its_second_batch() -> None:
    numbers, batches = PassNumbers(), [3, 0]
    first = BegunPass(Word(0, 0), lambda: Progress(batches[0], batches[0]))
    second = BegunPass(Word(0, 1), lambda: Progress(batches[1], batches[1]))
    numbers.add(first)
    numbers.add(second)
    seen = []
    for batches[0], batches[1] in [(3, 1), (4, 1), (4, 2), (6, 3)]:
        assert first.stage is not Stage.ASKED  # the next has begun
        first.report(Progress(batches[0], batches[0]))
        numbers.settle()
        seen.append((first.progress().most, first.progress().state.name))
    assert seen == [(3, "RUNNING"), (4, "RUNNING"), (4, "LEFT"), (4, "LEFT")]


def test_a_pass_that_was_struck_and_goes_on_counts_again() -> None:
    numbers, batches = PassNumbers(), [0]
    begun = BegunPass(Word(0, 0), lambda: Progress(batches[0], batches[0]))
    numbers.add(begun)
    numbers.strike_looks()
    batches[0] = 2
    numbers.settle()
    assert begun.number is None
    numbers.goes_on(begun)
    numbers.goes_on(begun)
    numbers.settle()
    assert begun.number == 0


JUNK = [
    "",
    "junk",
    "{}",
    "[]",
    "null",
    "7",
    '["a"]',
    "[0]",
    '[0,0,0,0,"",0,0,9,null]',
    "[0,0,0,1,null]",
    '[0,0,0,0,"",0,0,1,7]',
]


@pytest.mark.parametrize("junk", JUNK)
def test_junk_is_no_word(junk: str) -> None:
    assert Word.of(junk) is None


# How long a rank waits, at the end of a pass whose end nobody knew, for others that may be given more.


def ends_after(rank: Rank, epoch: int, batches: int) -> None:
    """Come to the end of a pass after so many batches."""
    Connection.current = rank.connection
    begun = rank.monitor.begin(epoch, 0, lambda: Progress(batches, batches, ENDED))
    assert begun is not None
    for batch in range(1, batches + 1):
        rank.monitor.report_step(begun, batch)
    rank.monitor.compare(begun)
    rank.monitor.wait_for_end(begun, batches)


@pytest.mark.usefixtures("connected")
def test_a_rank_waits_in_vain_once_and_is_told_of_longer_passes_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(pass_monitor, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(pass_monitor, "sleep", slept.append)
    store = new_store()
    one, other = (Rank(store, number) for number in range(2))
    ends_after(one, 0, 3)
    assert 10 <= sum(slept) <= 10.5
    ends_after(other, 0, 3)
    ends_after(other, 1, 3)
    ends_after(one, 1, 3)
    assert sum(slept) <= 21
    Connection.current = other.connection
    begun = other.monitor.begin(2, 0, lambda: Progress(4, 4))
    assert begun is not None
    for batch in range(1, 5):
        other.monitor.report_step(begun, batch)
    with pytest.raises(RankMismatchError, match="epoch 2 ended after 3 batches on rank 0, and others were given more"):
        ends_after(one, 2, 3)
    assert sum(slept) <= 21


# What a pass took.


class Held(IterableDataset[int]):
    """Comes to its end when it is told to."""

    def __init__(self) -> None:
        self.may_end = multiprocessing.Event()

    def __iter__(self) -> Iterator[int]:
        yield from range(8)
        self.may_end.wait(60)


@pytest.mark.parametrize("takes_all", [True, False])
def test_what_a_pass_took_does_not_depend_on_when_its_worker_finds_the_end(takes_all: bool) -> None:
    """Else two ranks that do the same would claim other facts."""
    dataset = Held()
    given: Any = DataLoader(dataset, 2, collate_fn=as_it_is, num_workers=1)
    train: Any = patch_dataloader_to_ddp(given, rank=0, num_replicas=2)
    batches = iter(train)
    next(batches)
    one = train.sampler.rank_passes.epochs.latest
    assert one.delivery.progress()[:3] == (1, 1, RUNNING)
    dataset.may_end.set()
    while one.source.lengths_found() == [None]:  # the test's time limit ends it
        time.sleep(0.001)
    assert one.delivery.progress()[:3] == (1, 1, RUNNING)
    if takes_all:
        assert len(list(batches)) == 1
    del batches
    assert one.delivery.progress()[:3] == ((2, 2, ENDED) if takes_all else (1, 1, RUNNING))


def test_who_asks_for_a_state_changes_nothing() -> None:
    """Only rank 0 may save checkpoints. Else it would count in batches from then on, and the others in items."""
    sampler: DDPSamplerWrapper[int] = DDPSamplerWrapper(range(N), False, rank=0, num_replicas=2)
    loader = DataLoader(Indices(), 3, sampler=sampler, collate_fn=as_it_is)
    batches = iter(loader)
    next(batches)
    latest: Any = sampler.rank_passes.epochs.latest
    before = latest.delivery.progress()
    assert loader_state(loader, batches_done=1)["taken"] == [6]
    assert latest.delivery.progress() == before
