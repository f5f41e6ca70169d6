"""What two ranks' records tell: commented cases, without ranks."""

import pickle
import pickletools
from collections.abc import Sequence
from typing import Any

import pytest

from ddp_patch.ranks import pass_monitor
from ddp_patch.ranks.histories import (
    History,
    NotesReport,
    PassMismatch,
    PassProgress,
    PassRecord,
    PassState,
    ReadAhead,
    pass_mismatch,
)
from ddp_patch.ranks.mailbox import Peers

OPEN, LEFT, ENDED, UNKNOWN = PassState
SIZE = 4

# A pass: which epoch was set before it, if one was; its epoch; the items taken; its state.
Pass = tuple[bool, int, int, PassState]


def half() -> int:
    return 6


def record(*passes: Pass) -> PassRecord:
    history = History(SIZE)
    for chosen, epoch, items, state in passes:
        if chosen:
            history.choose()
        history.begin(epoch, lambda items=items, state=state: PassProgress(items, state), half)  # type: ignore[misc]
    return history.record()


AUTO, SET = False, True
WHOLE, WHOLE1 = (AUTO, 0, 12, ENDED), (AUTO, 1, 12, ENDED)
CASES: list[tuple[str, Sequence[Pass], Sequence[Pass], tuple[int, int, int] | None]] = [
    ("mine looked and trains on", [(AUTO, 0, 4, LEFT), (AUTO, 1, 5, OPEN)], [(AUTO, 0, 5, OPEN)], (0, 4, 1)),
    ("mine looked twice, and may set the epoch", [(AUTO, 0, 4, LEFT), (AUTO, 1, 4, LEFT)], [WHOLE], None),
    ("mine looked and set the epoch", [(AUTO, 0, 4, LEFT), (SET, 0, 9, OPEN)], [WHOLE], None),
    ("mine looked long, and resumed where all did", [(AUTO, 0, 9, LEFT), (SET, 3, 9, OPEN)], [(SET, 3, 9, OPEN)], None),
    ("mine set another epoch", [(SET, 1, 5, OPEN)], [(SET, 0, 5, OPEN)], (0, 0, 1)),
    ("theirs has not gone beyond a look", [(SET, 1, 5, OPEN)], [(AUTO, 0, 4, OPEN)], None),
    ("mine is slower", [(AUTO, 0, 5, OPEN)], [WHOLE, (AUTO, 1, 12, ENDED), (AUTO, 2, 8, OPEN)], None),
    ("mine never began", [], [WHOLE, (AUTO, 1, 4, OPEN)], None),
    ("both broke off alike", [(SET, 0, 8, LEFT), (SET, 1, 8, OPEN)], [(SET, 0, 8, LEFT)], None),
    ("mine broke off earlier", [(SET, 0, 8, LEFT), (SET, 1, 8, OPEN)], [(SET, 0, 12, ENDED)], (0, 8, 1)),
    ("mine keeps an iterator", [(AUTO, 0, 4, OPEN), (AUTO, 1, 12, ENDED), (AUTO, 2, 0, OPEN)], [WHOLE], (0, 4, 1)),
    ("mine may go on with it", [(AUTO, 0, 4, OPEN), (AUTO, 1, 12, OPEN)], [WHOLE], None),
    ("mine cannot be told", [(AUTO, 0, 4, UNKNOWN), (AUTO, 1, 8, OPEN)], [WHOLE], None),
    ("mine went back, theirs may have looked on", [WHOLE, (SET, 0, 12, OPEN)], [WHOLE, (AUTO, 1, 6, OPEN)], None),
    ("mine went back, theirs went on", [WHOLE, (SET, 0, 12, OPEN)], [WHOLE, (AUTO, 1, 8, OPEN)], (1, 0, 0)),
    ("mine went back, theirs chose the next", [WHOLE, (SET, 0, 12, OPEN)], [WHOLE, (SET, 1, 5, OPEN)], (1, 0, 0)),
    ("mine went back, theirs is slower", [WHOLE, (SET, 0, 12, OPEN)], [(AUTO, 0, 8, OPEN)], None),
    ("mine went on, theirs looks", [(SET, 3, 5, OPEN)], [(AUTO, 0, 6, OPEN)], None),
    ("mine broke off, and chose since", [(AUTO, 0, 4, LEFT), WHOLE1, (SET, 5, 8, OPEN)], [WHOLE], (0, 4, 1)),
    (
        "theirs chose it too",
        [(AUTO, 0, 4, LEFT), WHOLE1, (SET, 5, 8, OPEN)],
        [(AUTO, 0, 6, LEFT), (SET, 5, 0, OPEN)],
        None,
    ),
    ("theirs had trained", [(AUTO, 0, 4, LEFT), WHOLE1, (SET, 5, 8, OPEN)], [WHOLE, (SET, 5, 0, OPEN)], (0, 4, 1)),
    ("mine looked whole, both chose", [WHOLE, (SET, 1, 8, OPEN)], [(SET, 1, 5, OPEN)], None),
    ("theirs may be about to", [(AUTO, 0, 4, LEFT), (SET, 5, 8, OPEN)], [(AUTO, 0, 6, OPEN)], None),
    ("mine looked before, and chose alone", [WHOLE, (AUTO, 1, 6, LEFT), (SET, 3, 8, OPEN)], [WHOLE, WHOLE1], (1, 6, 3)),
    (
        "mine broke off, both chose the next",
        [(AUTO, 0, 8, LEFT), (SET, 1, 8, OPEN)],
        [WHOLE, (SET, 1, 5, OPEN)],
        (0, 8, 1),
    ),
    ("mine looked, both chose the next", [(AUTO, 0, 4, LEFT), (SET, 1, 8, OPEN)], [(SET, 1, 5, OPEN)], None),
    ("mine went on, theirs trains", [(SET, 3, 5, OPEN)], [(AUTO, 0, 7, OPEN)], (0, 0, 3)),
]


@pytest.mark.parametrize(("mine", "theirs", "found"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_contradicts_what(
    mine: Sequence[Pass], theirs: Sequence[Pass], found: tuple[int, int, int] | None
) -> None:
    expected = None if found is None else PassMismatch(*found, is_mine=True)
    assert pass_mismatch(record(*mine), record(*theirs), SIZE, 0, half) == expected
    turned = pass_mismatch(record(*theirs), record(*mine), SIZE, 0, half)
    assert turned == (None if expected is None else expected._replace(is_mine=False))


def test_unequal_shares_may_differ_by_a_batch() -> None:
    mine, theirs = record((AUTO, 0, 8, LEFT), (AUTO, 1, 8, OPEN)), record((AUTO, 0, 12, ENDED))
    assert pass_mismatch(mine, theirs, SIZE, 0, half) is not None
    assert pass_mismatch(mine, theirs, SIZE, SIZE, half) is None


def test_of_a_thousand_epochs_the_latest_are_told() -> None:
    told = record(*((SET, epoch, 12, ENDED) for epoch in range(1000)))
    assert list(told.passes) == [*range(984, 1000)]
    assert told.since == 984
    told = told._replace(notes=(NotesReport(999, "0", 0, True, 0, [(4, 17)], []),))
    sent = pickle.dumps(told.plain())
    assert PassRecord.of(pickle.loads(sent)) == told  # noqa: S301 - its own
    assert len(sent) < 512
    assert "GLOBAL" not in {operation.name.removeprefix("STACK_") for operation, *_ in pickletools.genops(sent)}


def test_epochs_that_are_no_longer_told_contradict_nothing() -> None:
    """And what a rank broke off long ago is found as long as both tell of it."""
    whole = [(AUTO, epoch, 12, ENDED) for epoch in range(60)]
    broken = [*whole[:50], (AUTO, 50, 8, LEFT), *whole[51:]]
    assert pass_mismatch(record(*whole[:20]), record(*whole), SIZE, 0, half) is None
    assert pass_mismatch(record(*broken), record(*whole), SIZE, 0, half) == (50, 8, 51, True)


def test_what_was_surely_taken() -> None:
    assert ReadAhead(4).taken(9) == 9
    assert ReadAhead(4, ahead=8).taken(9) == 1
    assert ReadAhead(4, ahead=8).taken(5) == 0
    assert ReadAhead(4, drop_last=True).taken(9) == 8


def test_comparisons_take_no_more_than_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, cost, step = 0.0, 0.001, 0.01
    made: list[float] = []

    class Counted:
        def __init__(self, *_: Any) -> None: ...

        def post_and_read(self, _: str) -> dict[int, PassRecord]:
            nonlocal now
            now += cost
            made.append(now)
            return {}

    monkeypatch.setattr(pass_monitor, "Mailbox", Counted)
    monkeypatch.setattr(pass_monitor, "perf_counter", lambda: now)
    watch = pass_monitor.PassMonitor(Peers("loader", 1, 0, [1]))
    for due in range(10_000):
        watch.compare(due)
        if due == 50:
            assert len(made) == 52  # whenever they are due, at first; one when the watch begins
        now += step
    assert len(made) * cost < 0.01 * now
