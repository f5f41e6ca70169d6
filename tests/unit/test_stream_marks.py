"""What readers mark of a stream to its end, and what two readers' marks show."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quick import soaked

from ddp_patch.orders.fingerprint import hashes_if_any
from ddp_patch.ranks.order_verdicts import (
    PartMarks,
    alike_marks,
    next_mark,
    position,
    stream_mismatch,
)
from ddp_patch.streams.shared_state import MarksInMemory


def marked(items: Iterable[Any], *, upto: int | None = None) -> PartMarks:
    """Return what a reader marks of these items; its end only if it reads them all."""
    listed = list(items)
    marks, wanted = [], 0
    for place, item in enumerate(listed[:upto]):
        if place == wanted:
            marks.append(hashes_if_any(item))
            wanted = next_mark(place)
    return PartMarks.of(marks, len(listed) if upto is None else None)


@given(st.integers(0, 500))
def test_the_position_of_a_mark_is_that_of_the_ones_before(mark: int) -> None:
    place = 0
    for _ in range(mark):
        place = next_mark(place)
    assert position(mark) == place


@given(st.integers(64, 10**9))
def test_a_mark_follows_within_a_sixteenth(place: int) -> None:
    assert place < next_mark(place) <= place + place // 16


def named(number: int) -> dict[str, Any]:
    return {"file": f"{number}.png", "x": torch.rand(2)}


def labelled(number: int) -> tuple[torch.Tensor, int]:
    return torch.rand(2), random.Random(number).randrange(10)


def augmented(number: int) -> torch.Tensor:
    return torch.rand(2)


def plain(number: int) -> int:
    return number


KEPT: dict[str, Callable[[int], Any]] = {"named": named, "labelled": labelled, "plain": plain}
SKIPPED = [*range(500), *range(501, 1000)]


@pytest.mark.parametrize("kind", [*KEPT, "augmented"])
def test_readers_of_one_stream_are_alike_however_far_they_are(kind: str) -> None:
    make = {**KEPT, "augmented": augmented}[kind]
    whole = marked(map(make, range(1000)))
    for upto in (0, 1, 100, 777, None):
        assert stream_mismatch([whole], [marked(map(make, range(1000)), upto=upto)]) is None


@pytest.mark.parametrize("kind", KEPT)
def test_an_item_that_is_skipped_shows(kind: str) -> None:
    mine, theirs = (marked(map(KEPT[kind], numbers), upto=900) for numbers in (range(1000), SKIPPED))
    found = stream_mismatch([mine], [theirs])
    assert found is not None
    assert not found.is_end
    assert 500 < found.count < 600


@pytest.mark.parametrize("kind", [*KEPT, "augmented"])
def test_an_end_that_another_reader_is_past_shows(kind: str) -> None:
    make = {**KEPT, "augmented": augmented}[kind]
    mine, theirs = marked(map(make, range(600))), marked(map(make, range(1000)), upto=650)
    for one, other in ((mine, theirs), (theirs, mine)):
        found = stream_mismatch([PartMarks(), one], [PartMarks(), other])
        assert found is not None
        assert (found.part, found.count, found.is_end) == (1, 600, True)
    assert stream_mismatch([mine], [marked(map(make, range(1000)), upto=600)]) is None


def test_augmentation_that_changes_an_item_here_and_there_shows_nothing() -> None:
    mine, theirs = ([number if random.random() > 0.02 else -number for number in range(1, 1000)] for _ in range(2))
    assert stream_mismatch([marked(mine)], [marked(theirs)]) is None


@pytest.mark.parametrize("share", [0.02, 0.3, *map(soaked, (0.05, 0.1, 0.2))])
@pytest.mark.parametrize("make", [str, int], ids=["names", "numbers"])
def test_items_of_which_some_are_augmented_show_nothing_at_any_moment(share: float, make: Callable[[int], Any]) -> None:
    rng = random.Random(0)
    for _ in range(40):
        mine, theirs = ([make(n if rng.random() > share / 2 else -n) for n in range(1, 300)] for _ in range(2))
        whole = marked(mine)
        for upto in range(16, 300, 8):
            assert stream_mismatch([whole], [marked(theirs, upto=upto)]) is None


def test_a_number_that_names_the_item_shows_that_its_text_is_augmented() -> None:
    mine, theirs = (marked((n, f"{n} {random.random() if n > 200 else ''}") for n in range(600)) for _ in range(2))
    assert stream_mismatch([mine], [theirs]) is None


def test_a_skipped_item_shows_in_the_numbers_where_all_names_are_alike() -> None:
    def sorted_by_class(number: int) -> tuple[str, int]:
        return ("cat" if number < 990 else "dog"), number

    mine, theirs = (marked(map(sorted_by_class, numbers), upto=900) for numbers in (range(1000), SKIPPED))
    found = stream_mismatch([mine], [theirs])
    assert found is not None
    assert 500 < found.count < 600


@pytest.mark.parametrize("kind", KEPT)
def test_an_order_over_a_large_range_shows_after_a_pass_that_was_alike(kind: str) -> None:
    def read(seed: int | None) -> list[PartMarks]:
        numbers = range(100_000) if seed is None else random.Random(seed).sample(range(100_000), 900)
        return [marked(map(KEPT[kind], numbers[:900]))]

    before = alike_marks(read(None), read(None))
    assert stream_mismatch(read(1), read(2)) is None
    found = stream_mismatch(read(1), read(2), before)
    assert found is not None
    assert found.count <= 3
    assert stream_mismatch(read(3), read(3), before) is None


def test_what_was_augmented_in_a_pass_shows_nothing_in_the_next() -> None:
    def read() -> list[PartMarks]:
        return [marked(random.sample(range(10**9), 900))]

    assert stream_mismatch(read(), read(), alike_marks(read(), read())) is None


def test_an_order_that_differs_from_the_beginning_shows() -> None:
    mine, theirs = (random.sample(range(80), 80) for _ in range(2))
    found = stream_mismatch([marked(mine)], [marked(theirs)])
    assert found is not None
    assert found.count <= 20


def test_marks_of_the_latest_passes_and_the_ends_of_earlier_ones() -> None:
    marks = MarksInMemory(parts=2)
    for number in range(6):
        marks.begin(number, f"epoch {number}")
        for part in range(2):
            assert list(marks.watching(part, number, iter(range(100 + number)))) == [*range(100 + number)]
    found = marks.passes()
    assert {name: [part.end for part in parts] for name, parts in found.items()} == {
        f"epoch {number} (0)": [100 + number] * 2 for number in range(6)
    }
    assert [len(parts[0].items) > 0 for parts in found.values()] == [False] * 4 + [True] * 2


def test_a_pass_that_came_to_its_end_before_is_another_attempt() -> None:
    marks = MarksInMemory(parts=1)
    for number, reads in enumerate((3, 10, 10)):
        marks.begin(number, "epoch 0")
        for _ in zip(range(reads), marks.watching(0, number, iter(range(9))), strict=False):
            pass
    assert list(marks.passes()) == ["epoch 0 (0)", "epoch 0 (1)"]


def test_another_reader_of_the_same_part_marks_nothing() -> None:
    marks = MarksInMemory(parts=1)
    marks.begin(1, "epoch 0")
    first, again = (marks.watching(0, 1, iter(range(9))) for _ in range(2))
    next(first)
    assert list(marks.watching(0, 1, iter(range(9)))) == [*range(9)]
    assert list(marks.watching(0, 0, iter(range(9)))) == [*range(9)]
    (parts,) = marks.passes().values()
    assert (len(parts[0].items), parts[0].end) == (1, None)
    del again
