"""The fingerprint of a pass, and what two ranks' notes of it show."""

import logging
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler

from ddp_patch.loaders.contents import Row, RowsSeen, rows_of
from ddp_patch.orders.chunks import draw, start_iterating
from ddp_patch.orders.fingerprint import PassFingerprint
from ddp_patch.orders.orders import order_of
from ddp_patch.ranks.histories import NotesReport, PassProgress, PassState
from ddp_patch.ranks.pass_monitor import PassNotes, notes_mismatch

KINDS: dict[str, Callable[[int], Any]] = {
    "indices": int,
    "numpy": np.int64,
    "tensors": torch.tensor,
    "words": str,
    "batches": lambda index: [index, -index - 1],
    "tuples": lambda index: (index, str(index)),
    "dicts": lambda index: {"index": index},
}


def drawn(items: list[Any], ranks: int = 3, rank: int = 0) -> PassFingerprint:
    """Return the fingerprint that a rank takes while it draws its share of some items."""
    noted = PassFingerprint()

    def kept(start: int, size: int) -> slice:
        return slice(rank, size, ranks) if start else slice(None)

    chunks = list(
        draw(start_iterating(items), nullcontext, round_size=ranks, ahead=True, selection=kept, fingerprint=noted)
    )
    assert sum(chunk.length for chunk in chunks) == len(items)
    noted.end(len(items))
    return noted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 7, 300, 20_000])
def test_all_ranks_take_one_fingerprint_of_one_order(kind: str, n: int) -> None:
    items = list(map(KINDS[kind], random.Random(1).sample(range(n), n)))
    taken = [drawn(items, rank=rank).prefix_hashes for rank in range(3)]
    assert taken[0] == taken[1] == taken[2]
    assert len(taken[0]) <= 60
    assert taken[0][-1][0] == n


def test_an_order_that_differs_late_in_a_chunk_shows() -> None:
    items = random.Random(1).sample(range(12_000), 12_000)
    other = [*items[:9000], *items[:8999:-1]]
    assert drawn(items).prefix_hashes != drawn(other).prefix_hashes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 1, 100, 255])
def test_the_first_items_are_all_looked_at(kind: str, place: int) -> None:
    items = list(map(KINDS[kind], range(300)))
    other = [*items]
    other[place], other[place + 1] = items[place + 1], items[place]
    assert drawn(items).prefix_hashes[-1] != drawn(other).prefix_hashes[-1]


def test_of_later_chunks_some_are() -> None:
    items = list(range(100_000))
    assert drawn(items).prefix_hashes != drawn([*items[:5000], *items[5001:], 5000]).prefix_hashes
    assert drawn(items).prefix_hashes != drawn(items[:-1]).prefix_hashes


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_is_given_the_same_items_with_a_fingerprint_as_without(rank: int) -> None:
    def share(noted: PassFingerprint | None) -> list[Any]:
        def kept(start: int, size: int) -> slice:
            return slice(rank, size, 3)

        chunks = draw(
            start_iterating(range(10_000)), nullcontext, round_size=3, ahead=True, selection=kept, fingerprint=noted
        )
        return [item for chunk in chunks for item in chunk.items]

    assert share(PassFingerprint()) == share(None) == [*range(rank, 10_000, 3)]


@pytest.mark.parametrize("as_batches", [False, True])
@pytest.mark.parametrize("before", [0, 2, 5, 29, 64, 500, 3000])
def test_all_whole_rounds_before_an_error_are_given_with_a_fingerprint_too(before: int, as_batches: bool) -> None:
    def failing() -> Iterator[Any]:
        for number in range(before):
            yield [number] if as_batches else number
        raise LookupError

    def kept(start: int, size: int) -> slice:
        return slice(1, size, 3)

    noted = PassFingerprint()
    chunks = draw(start_iterating(failing()), nullcontext, round_size=3, ahead=True, selection=kept, fingerprint=noted)
    given: list[Any] = []
    with pytest.raises(LookupError):
        given.extend(item for chunk in chunks for item in chunk.items)
    rounds = range(1, before // 3 * 3, 3)
    assert given == [[number] if as_batches else number for number in rounds]


class Unseen:
    """Has no value that is the same in every process."""


def test_items_without_a_value_are_told_once_and_count_alike(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ddp_patch"):
        taken = [drawn([Unseen() for _ in range(9)]).prefix_hashes for _ in range(2)]
    assert taken[0] == taken[1]
    assert sum("a Unseen has no value" in message for message in caplog.messages) == 1


def test_an_order_that_is_looked_up_has_a_fingerprint_before_its_first_item() -> None:
    taken = []
    for seed in (1, 1, 2):
        noted = PassFingerprint()
        for sampler in (RandomSampler(range(10**5)), RandomSampler(range(10), num_samples=10**6)):
            noted.add_order(order_of(sampler, 0, torch.Generator().manual_seed(seed)))
        taken.append(noted.prefix_hashes)
    assert taken[0] == taken[1] != taken[2]


class Holds(RowsSeen):
    """A dataset whose rows are always the same."""

    def __init__(self, rows: dict[str, Row]) -> None:
        super().__init__([])
        self.rows = rows

    def now(self) -> dict[str, Row]:
        return self.rows


def notes_of(
    items: list[int],
    taken: int = 9,
    state: PassState = PassState.OPEN,
    rows: Any = None,
    epoch: int = 0,
    is_old: bool = False,
) -> NotesReport:
    """Return what a rank left of a pass, of which it took some items."""
    noted = PassNotes("S", epoch, "0", 0, drawn(items), Holds(rows or {}), lambda: PassProgress(taken, state))
    for _ in range(2):
        noted.observe_dataset(4)
    return noted.report(peek_items=4, is_old=is_old)


def test_two_orders_differ_within_so_many_items() -> None:
    mine, theirs = notes_of([*range(99)]), notes_of([*range(60), *range(98, 59, -1)])
    found = notes_mismatch([mine], [theirs])
    assert found is not None
    assert found.count is not None
    assert 60 < found.count <= 99
    assert notes_mismatch([mine], [notes_of([*range(99)])]) is None


def test_a_look_is_not_compared_and_neither_is_another_epoch() -> None:
    mine, other = notes_of([*range(9)]), [*range(8, -1, -1)]
    assert notes_mismatch([mine], [notes_of(other, taken=4)]) is None
    assert notes_mismatch([notes_of([*range(9)], taken=4)], [notes_of(other)]) is None
    assert notes_mismatch([mine], [notes_of(other, taken=4, state=PassState.ENDED)]) is not None
    assert notes_mismatch([mine], [notes_of(other, epoch=1)]) is None


def test_a_rank_that_is_epochs_ahead_left_its_last_mark() -> None:
    items = [*range(99)]
    assert len(notes_of(items, is_old=True).prefix_hashes) == 1
    assert notes_mismatch([notes_of(items)], [notes_of(items, is_old=True)]) is None
    assert notes_mismatch([notes_of(items)], [notes_of(items[::-1], is_old=True)]) is not None


def test_the_notes_of_a_pass_that_is_over_keep_nothing_of_it() -> None:
    class Stands:
        state = PassState.OPEN

        def now(self) -> PassProgress:
            return PassProgress(9, self.state)

    stands = Stands()
    gone = weakref.ref(stands)
    notes = PassNotes("S", 0, "0", 0, drawn([*range(9)]), None, stands.now)
    notes.settle()
    stands.state = PassState.ABANDONED
    told = notes.report(4, is_old=True)
    notes.settle()
    del stands
    assert gone() is None
    assert notes.report(4, is_old=True) == told


FILES, OTHERS = Row("files", identifies=True), Row("others", identifies=True)
LOSSES, MORE = Row("losses", identifies=False), Row("more", identifies=False)
ORDER, REVERSED = Row("order", True, is_order=True), Row("reversed", True, is_order=True)
UNSHUFFLED = Row("unshuffled", False, is_order=True)
CHANGED, CHANGED_TOO = Row("changed", True, at_first="files"), Row("changed too", True, at_first="files")
OWN, OWN_TOO = Row("own", True, at_first="mine"), Row("own too", True, at_first="yours")
CLASSES, OTHER_CLASSES = Row("classes", False, is_whole=False), Row("other classes", False, is_whole=False)

ROWS: list[tuple[dict[str, Row], dict[str, Row], tuple[str, ...]]] = [
    ({"a": FILES}, {"a": FILES}, ()),
    ({"a": FILES}, {"a": OTHERS}, ("a",)),
    ({"a": FILES, "b": LOSSES}, {"a": FILES, "b": MORE}, ()),
    ({"b": LOSSES}, {"b": MORE}, ("b",)),
    ({"a": FILES, "b": ORDER}, {"a": FILES, "b": REVERSED}, ("b",)),
    ({"b": UNSHUFFLED}, {"b": ORDER}, ("b",)),
    ({"a": FILES, "b": UNSHUFFLED}, {"a": FILES, "b": ORDER}, ("b",)),
    ({"a": FILES}, {"b": OTHERS}, ()),
    ({"a": FILES, "b": CHANGED}, {"a": FILES, "b": CHANGED_TOO}, ("b",)),
    ({"a": FILES, "b": OWN}, {"a": FILES, "b": OWN_TOO}, ()),
    ({"b": OWN}, {"b": OWN_TOO}, ("b",)),
    ({"b": CLASSES}, {"b": OTHER_CLASSES}, ()),
    ({"b": CLASSES._replace(at_first="c")}, {"b": OTHER_CLASSES._replace(at_first="c")}, ("b",)),
    ({}, {}, ()),
]


@pytest.mark.parametrize(("mine", "theirs", "names"), ROWS)
def test_datasets_differ_in_what_names_their_samples(
    mine: dict[str, Row], theirs: dict[str, Row], names: tuple[str, ...]
) -> None:
    found = notes_mismatch([notes_of([*range(9)], rows=mine)], [notes_of([*range(9)], rows=theirs)])
    assert (() if found is None else found.attributes) == names


class Data(torch.utils.data.Dataset[int]):
    """Holds what it is given."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        raise AssertionError("nothing is loaded for a comparison")


class Slots:
    """An object without a ``__dict__``."""

    __slots__ = ("files",)

    def __init__(self, files: list[str]) -> None:
        self.files = files


class Record:
    """A row of a class of the user's."""

    def __init__(self, path: str) -> None:
        self.path = path


def words() -> Iterator[str]:
    return map("{}.png".format, range(20))


@pytest.mark.parametrize(
    ("held", "known", "found"),
    [
        ({"files": list(words())}, (), {"Data.files"}),
        ({"order": torch.randperm(20)}, (), {"Data.order"}),
        ({"order": list(range(20))}, (), {"Data.order"}),  # which one rank alone may shuffle
        ({"losses": [random.random() for _ in range(20)]}, (), set()),
        ({"losses": [random.random() for _ in range(20)]}, ("Data.losses",), {"Data.losses"}),
        ({"counts": [0] * 20}, (), set()),
        ({"x": torch.rand(20, 3)}, (), set()),
        ({"x": torch.rand(20, 3)}, ("Data.x",), {"Data.x"}),
        ({"ann": Data(inner=Data(files=list(words())))}, (), {"Data.files"}),
        ({"short": list(words())[:9]}, (), set()),
        ({"cache": [None] * 20}, (), set()),
        ({"pairs": [(word, random.random()) for word in words()]}, (), {"Data.pairs"}),
        ({"dicts": [{"path": word} for word in words()]}, (), {"Data.dicts"}),
        ({"files": [f"case_{number}/image.png" for number in range(20)]}, (), {"Data.files"}),
        ({"files": ["image.png"] * 20}, (), set()),
        ({"files": deque(words())}, (), {"Data.files"}),
        ({"by_number": dict(enumerate(words()))}, (), {"Data.by_number"}),
        ({"by_number": dict.fromkeys(range(20), "same")}, (), set()),
        ({"split": {"train": list(words()), "val": [1, 2]}}, (), {"Data.split['train']"}),
        ({"both": [list(words()), [0.5] * 20]}, (), {"Data.both[0]"}),
        ({"ann": Slots(list(words()))}, (), {"Data.ann.files"}),
        ({"records": list(map(Record, words()))}, (), {"Data.records[].path"}),
        ({"halves": list(words())[:10]}, (), set()),
        ({"halves": list(words())[:10]}, ("Data.halves",), {"Data.halves"}),
    ],
)
def test_which_attributes_are_compared_in_each_pass(held: dict[str, Any], known: Any, found: set[str]) -> None:
    assert set(rows_of(Data(**held), dict.fromkeys(known, "then"))) == found


def test_what_reading_changes_is_compared_no_more() -> None:
    data = Data(files=list(words()), log=[], last=[""] * 20)
    seen = RowsSeen(data)
    before = seen.now()
    assert set(seen.steady(before, seen.now())) == {"Data.files"}
    data.log, data.last = list(range(20)), list(words())  # type: ignore[attr-defined]  # of this one
    after = seen.now()
    assert set(after) == {"Data.files", "Data.log", "Data.last"}
    data.log.append(7)  # type: ignore[attr-defined]
    data.last[0] = "x.png"  # type: ignore[attr-defined]
    assert set(seen.steady(after, seen.now())) == {"Data.files"}
    assert set(seen.steady(seen.now(), seen.now())) == {"Data.files"}


def test_names_that_were_the_samples_at_the_patch_are_compared_whatever_changes_them() -> None:
    data = Data(files=list(words()))
    seen = RowsSeen(data)
    before = seen.now()
    data.files.reverse()  # type: ignore[attr-defined]  # of this one
    assert not seen.steady(before, now := seen.now())
    assert set(seen.steady(now, seen.now())) == {"Data.files"}
