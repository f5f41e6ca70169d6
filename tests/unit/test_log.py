"""The log of passes: what contradicts what, by its five rules; and what a pass tells it and waits for."""

import multiprocessing
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Self

import pytest
from torch.utils.data import DataLoader, IterableDataset
from zoo import Indices, N, as_it_is

from ddp_patch import DDPSamplerWrapper, loader_state, patch_dataloader_to_ddp
from ddp_patch.orders.digest import Digest
from ddp_patch.ranks import pass_monitor
from ddp_patch.ranks.log import VERSION, Entry, LoggedPass, Progress, Record, State, record_of, text_of
from ddp_patch.ranks.pass_monitor import PassMonitor


class Rank:
    """A rank that makes passes over a loader."""

    def __init__(self, *, has_one_order: bool = False, forgets_looks: bool | None = None, slack: int = 0) -> None:
        self.log = PassMonitor(slack=slack)
        self.log.has_one_order = has_one_order
        self.log.forgets_looks = has_one_order if forgets_looks is None else forgets_looks

    def takes(
        self,
        epoch: int,
        batches: int,
        state: State = State.RUNNING,
        *,
        begins_at: str = "0",
        order: str = "abcdefgh",
        others: int = 0,
        is_own: bool = False,
        compares: bool = True,
    ) -> Self:
        """Make a pass of so many batches."""
        digest = Digest()
        digest.add(list(order[:batches]))
        told = Progress(batches, batches, state, is_own)
        self.log.add(LoggedPass(epoch, begins_at, lambda: told, lambda: digest.marks, None if is_own else others))
        if compares:
            self.log.settle()
        return self

    def all_of(self, epoch: int, batches: int = 8, **options: object) -> Self:
        return self.takes(epoch, batches, State.ENDED, **options)  # type: ignore[arg-type]  # as takes

    def sets_an_epoch(self) -> Self:
        self.log.strike_looks()
        return self

    def restores(self) -> Self:
        self.log.cut_off()
        return self


LOOK = 1
CASES: dict[str, tuple[Rank, Rank, str | None]] = {
    # (a) one epoch, one beginning
    "alike": (Rank().all_of(0).takes(1, 3), Rank().all_of(0).takes(1, 5), None),
    "another epoch": (Rank().takes(0, 3), Rank().takes(1, 3), "passes"),
    "another beginning": (Rank().takes(0, 3, begins_at="4"), Rank().takes(0, 3), "passes"),
    # (b) one digest
    "another order": (Rank().takes(0, 5, order="abcxefgh"), Rank().takes(0, 4), "order"),
    # (c) no longer than where it is over
    "left": (Rank().takes(0, 3).takes(1, 2), Rank().takes(0, 4), "length"),
    "a length of its own": (Rank().all_of(0, 3, is_own=True), Rank().takes(0, 4, is_own=True), None),
    "failed before the ranks compared, and an epoch set": (
        Rank().takes(0, 1, State.FAILED, compares=False).sets_an_epoch().takes(1, 2),
        Rank().takes(0, 2).sets_an_epoch().takes(1, 2),
        None,
    ),
    "failed in the first batch, and an epoch set": (
        Rank().takes(0, 0, State.FAILED).sets_an_epoch().takes(1, 2),
        Rank().takes(0, 1).sets_an_epoch().takes(1, 2),
        None,
    ),
    # (d) looks
    "a look that nobody struck": (Rank().takes(0, LOOK).takes(1, 2), Rank().takes(0, 4), "length"),
    "a look before an epoch is set": (Rank().takes(0, LOOK).sets_an_epoch().takes(0, 3), Rank().takes(0, 4), None),
    "two looks before": (Rank().takes(0, LOOK).takes(1, LOOK).sets_an_epoch().takes(0, 3), Rank().takes(0, 4), None),
    "more than a look before": (Rank().takes(0, 2).sets_an_epoch().takes(0, 3), Rank().takes(0, 4), "length"),
    "a look within a pass": (Rank().takes(0, 3).takes(1, LOOK), Rank().takes(0, 4), None),
    "one order: a look": (
        Rank(has_one_order=True).takes(0, LOOK).takes(1, 3),
        Rank(has_one_order=True).takes(0, 4),
        None,
    ),
    "one order, and looks that count": (
        Rank(forgets_looks=False, has_one_order=True).takes(0, LOOK).takes(1, 3),
        Rank(has_one_order=True).takes(0, 4),
        "length",
    ),
    "looks that do not count, and epochs that do": (
        Rank(forgets_looks=True).takes(0, LOOK).takes(1, 3),
        Rank(forgets_looks=True).takes(0, 4),
        "passes",
    ),
    "one order: left": (
        Rank(has_one_order=True).takes(0, 3).takes(1, 2),
        Rank(has_one_order=True).takes(0, 4),
        "length",
    ),
    # (e) as many passes over other loaders
    "validated alone": (Rank().all_of(0).takes(1, 2, others=1), Rank().all_of(0).takes(1, 2), "others"),
    "a thread's": (Rank().takes(0, 2, is_own=True), Rank().takes(0, 2, others=3), None),
    # a restored position
    "both restored": (Rank().takes(0, 3).restores().takes(0, 2), Rank().takes(0, 4).restores().takes(0, 5), None),
    "both restored after a look of one": (
        Rank().takes(0, LOOK).restores().takes(2, 2),
        Rank().restores().takes(2, 5),
        None,
    ),
    "one has restored by now": (Rank().takes(0, 3).restores().takes(0, 2), Rank().takes(0, 3), None),
    "one restored, the other went on": (
        Rank().takes(0, 3).restores().takes(0, 2),
        Rank().takes(0, 3).takes(1, 2),
        "passes",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_contradicts_what(name: str) -> None:
    mine, theirs, rule = CASES[name]
    told = [one.log.difference(other.log.record()) for one, other in ((mine, theirs), (theirs, mine))]
    rules = {found.rule for found in told if found is not None}
    assert rules == (set() if rule is None else {rule})


@pytest.mark.parametrize("further", [Rank().takes(0, 3).takes(1, 2), Rank().takes(0, 3).takes(1, 2).takes(2, 2)])
def test_a_rank_hears_that_others_left_the_pass_that_it_is_in(further: Rank) -> None:
    found = Rank().takes(0, 5).log.difference(further.log.record())
    assert found is not None
    assert found.theirs is not None
    assert (found.rule, found.theirs.batches) == ("length", 3)
    assert Rank().takes(0, 3).log.difference(further.log.record()) is None


def test_one_rank_may_have_as_many_batches_more_as_it_has_readers() -> None:
    theirs = Rank().all_of(0, 7)
    assert Rank(slack=2).all_of(0, 5).log.difference(theirs.log.record()) is None
    found = Rank(slack=1).all_of(0, 5).log.difference(theirs.log.record())
    assert found is not None
    assert found.rule == "length"


def test_a_pass_counts_as_far_as_it_had_come_when_the_next_took_its_second_batch() -> None:
    log, batches = PassMonitor(), [3, 0]
    first = LoggedPass(0, "0", lambda: Progress(batches[0], batches[0]))
    second = LoggedPass(1, "0", lambda: Progress(batches[1], batches[1]))
    log.add(first)
    log.add(second)
    seen = []
    for batches[0], batches[1] in [(3, 1), (4, 1), (4, 2), (6, 3)]:
        assert first.is_told  # the next has begun
        first.tell(Progress(batches[0], batches[0]))
        log.settle()
        seen.append((first.progress().most, first.progress().state.name))
    assert seen == [(3, "RUNNING"), (4, "RUNNING"), (4, "LEFT"), (4, "LEFT")]


def test_a_pass_that_was_struck_and_goes_on_counts_again() -> None:
    log, batches = PassMonitor(), [0]
    begun = LoggedPass(0, "0", lambda: Progress(batches[0], batches[0]))
    log.add(begun)
    log.strike_looks()
    batches[0] = 2
    log.settle()
    assert log.record() == []
    log.goes_on(begun)
    log.goes_on(begun)
    log.settle()
    assert [entry.batches for entry in log.record()] == [2]


def test_of_a_thousand_passes_the_latest_are_kept() -> None:
    rank = Rank()
    for epoch in range(1000):
        rank.all_of(epoch)
    log = rank.log
    assert log.entry(980) is None
    assert log.difference(Rank().all_of(0).takes(1, 2).log.record()) is None


RECORDS: list[Record] = [
    [],
    [Entry(3, 3, "2 x 8 + 4", None, 12, State.FAILED, False, "c0ffee", None, (1, 2))],
    Rank().takes(0, 5).log.record(),
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_is_text_of_few_bytes(record: Record) -> None:
    text = text_of(record)
    assert record_of(text) == record
    assert record_of(text.encode()) == record
    assert len(text) < 100


JUNK = [b"", b"\x80junk", b"{}", b"[]", b"null", b"7", b'["a"]', f"[{VERSION + 1}]".encode()]
JUNK += [f"[{VERSION},{one}]".encode() for one in ("0", "[0]", '[0,0,"0",0,0,9,0,"",null,[]]')]


@pytest.mark.parametrize("junk", JUNK)
def test_junk_is_no_record(junk: bytes) -> None:
    assert record_of(junk) is None


# How long a rank waits, at the end of a pass whose end nobody knew, for others that may be given more.


@pytest.mark.parametrize(("step_s", "waits_s"), [(0.001, 3), (10, 20), (100, 60)])
def test_it_waits_for_steps_that_take_long_too(step_s: float, waits_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    times = iter([0.0, step_s, 2 * step_s, 2 * step_s])
    monkeypatch.setattr(pass_monitor, "perf_counter", lambda: next(times))
    monkeypatch.setattr(pass_monitor, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(pass_monitor, "sleep", lambda _: slept.append(0.25))
    given: Any = SimpleNamespace(
        leave=lambda *_: None,
        count=lambda *_: 0,
        left=lambda _: None,
        is_open=False,
        has_failed=False,
        post=lambda *_: None,
        members=[0, 1],
    )
    monitor, begun = PassMonitor(given), LoggedPass(0, "0", lambda: Progress(0, 0))
    given.is_open = True
    for batches in (1, 2, 3):
        monitor.give_step(begun, batches)
    monitor.end_steps(begun, 3)
    assert waits_s <= sum(slept) <= waits_s + 0.5


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
    """Else two ranks that do the same would have different logs."""
    dataset = Held()
    given: Any = DataLoader(dataset, 2, collate_fn=as_it_is, num_workers=1)
    train: Any = patch_dataloader_to_ddp(given, rank=0, num_replicas=2)
    batches = iter(train)
    next(batches)
    one = train.sampler.rank_passes.latest
    assert one.progress() == Progress(1, 1)
    dataset.may_end.set()
    while one.source.lengths_found() == [None]:  # the test's time limit ends it
        time.sleep(0.001)
    assert one.progress() == Progress(1, 1)
    if takes_all:
        assert len(list(batches)) == 1
    del batches
    assert one.progress() == (Progress(2, 2, State.ENDED) if takes_all else Progress(1, 1))


def test_who_asks_for_a_state_changes_nothing() -> None:
    """Only rank 0 may save checkpoints. Else it would count in batches from then on, and the others in items."""
    sampler: DDPSamplerWrapper[int] = DDPSamplerWrapper(range(N), False, rank=0, num_replicas=2)
    loader = DataLoader(Indices(), 3, sampler=sampler, collate_fn=as_it_is)
    batches = iter(loader)
    next(batches)
    latest: Any = sampler.rank_passes.latest
    before = latest.progress()
    assert loader_state(loader, batches_done=1)["taken"] == [6]
    assert latest.progress() == before
