"""Whether two readers read in one order, told by hashes of their first items."""

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from enum import Enum, IntEnum
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_patch.orders.fingerprint import ItemHashes, hashes_of
from ddp_patch.ranks.order_verdicts import (
    PartMarks,
    Verdict,
    compare,
    compare_parts,
)

ALIKE, OTHER_ORDER, UNKNOWN = Verdict.ALIKE, Verdict.OTHER_ORDER, Verdict.UNKNOWN


def notes(items: Sequence[Any], *, is_all: bool = False) -> PartMarks:
    return PartMarks.of([hashes_of(item) for item in items], len(items) if is_all else None, is_final=True)


def augmented(*kept: Any) -> list[Any]:
    """Items that no other reader has, with what augmentation keeps."""
    return [(random.random(), one) for one in kept]


def keyed(*keys: str) -> list[Any]:
    return [{"__key__": key, "png": random.random(), "crop": random.randrange(10**9)} for key in keys]


def shuffled(items: Sequence[Any], seed: int = 1) -> list[Any]:
    return random.Random(seed).sample(list(items), len(items))


MANY = range(100)
# What one reader noted, what the other did, whether these are all their items, and what that tells.
TABLE: dict[str, tuple[Sequence[Any], Sequence[Any], bool, Verdict]] = {
    "nothing": ([], [], True, ALIKE),
    "nothing yet": ([], [1, 2], False, ALIKE),
    "the same": (MANY, MANY, False, ALIKE),
    "one is behind": (MANY[:3], MANY, False, ALIKE),
    "a partner of each, shuffled": (
        [(f"{number}.png", partner) for number, partner in zip(MANY, shuffled(MANY), strict=True)],
        [(f"{number}.png", partner) for number, partner in zip(MANY, shuffled(MANY, 2), strict=True)],
        True,
        ALIKE,
    ),
    "a few flipped": (
        [(number, number % 7 == 0) for number in MANY],
        [(number, False) for number in MANY],
        False,
        ALIKE,
    ),
    "constant": ([0] * 9, [0] * 9, False, ALIKE),
    "objects of an unknown type": ([object()] * 9, [object()] * 9, False, ALIKE),
    # another order
    "shuffled": (MANY, shuffled(MANY), False, OTHER_ORDER),
    "reversed": (MANY, MANY[::-1], False, OTHER_ORDER),
    "another begin": (MANY[:50], MANY[1:51], False, OTHER_ORDER),
    "another part of it": (MANY[:50], MANY[40:90], False, OTHER_ORDER),
    "every second one": (MANY[::2], MANY[::3], False, OTHER_ORDER),
    "two, all of them": ([0, 1], [1, 0], True, OTHER_ORDER),
    "three, all of them": ("abc", "bca", True, OTHER_ORDER),
    "augmented, names moved": (augmented(*MANY), augmented(*MANY[::-1]), False, OTHER_ORDER),
    "augmented, keys differ": (keyed("a", "b"), keyed("a", "c"), False, OTHER_ORDER),
    "some twice": ([*MANY, 7, 7], shuffled([*MANY, 7, 7]), False, OTHER_ORDER),
    "shuffled within classes": (
        [(index, index // 50) for index in MANY],
        [(index, index // 50) for index in (*shuffled(range(50)), *shuffled(range(50, 100)))],
        False,
        OTHER_ORDER,
    ),
    # augmentation
    "augmented, names kept": (augmented(*"abc"), augmented(*"abc"), False, ALIKE),
    "augmented, keys kept": (keyed("a", "b"), keyed("a", "b"), False, ALIKE),
    "augmented, classes kept": (augmented(0, 0, 1, 0), augmented(0, 0, 1, 0), False, ALIKE),
    "one is augmented": ([("a", 0.5), ("b", 0.5)], [("a", 0.5), ("b", 0.25)], False, ALIKE),
    "one, augmented": (augmented("a"), augmented("a"), True, ALIKE),
    "augmented, names kept and numbers drawn": (
        [(name, random.random(), random.randrange(10**9)) for name in "abc"],
        [(name, random.random(), random.randrange(10**9)) for name in "abc"],
        False,
        ALIKE,
    ),
    "augmented, texts drawn and labels kept": (
        [(str(random.random()), index % 3) for index in range(9)],
        [(str(random.random()), index % 3) for index in range(9)],
        False,
        ALIKE,
    ),
    "dates kept": (
        augmented(date(2020, 1, 1), date(2021, 1, 1)),
        augmented(date(2020, 1, 1), date(2021, 1, 1)),
        False,
        ALIKE,
    ),
    # cannot be told
    "two of a few": ([0, 1], [1, 0], False, UNKNOWN),
    "few moved": (range(7), range(7)[::-1], False, UNKNOWN),
    "nothing in common": (range(9), range(20, 29), False, UNKNOWN),
    "augmented": (augmented(0.5, 0.5), augmented(0.5, 0.5), False, UNKNOWN),
    "augmented, one class": (augmented(*[0] * 9), augmented(*[0] * 9), False, UNKNOWN),
    "augmented, classes moved": (augmented(0, 1, 0), augmented(1, 0, 0), False, UNKNOWN),
    "two classes": ([0, 1] * 50, [1, 0] * 50, True, UNKNOWN),
    "only what is in order is named": (
        [*augmented("a", "b"), (0.5,)],
        [*augmented("a", "b"), (0.25,)],
        False,
        UNKNOWN,
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_two_readers_first_items_tell_this(case: str) -> None:
    one, other, is_all, expected = TABLE[case]
    mine, theirs = notes(one, is_all=is_all), notes(other, is_all=is_all)
    assert compare(mine, theirs) is compare(theirs, mine) is expected


seeds = st.integers(0, 2**32)


@given(st.integers(20, 256), seeds, seeds)
def test_a_shuffle_of_items_is_found_and_augmentation_is_not(n: int, seed: int, other: int) -> None:
    one, two = shuffled(range(n), seed), shuffled(range(n), other)
    same = one == two
    assert compare(notes(one, is_all=True), notes(two, is_all=True)) is (ALIKE if same else OTHER_ORDER)
    assert compare(notes(augmented(*one)), notes(augmented(*one))) is ALIKE


@given(st.integers(1, 5000), seeds)
def test_items_that_are_drawn_again_and_again_are_no_evidence(kinds: int, seed: int) -> None:
    rng = random.Random(seed)
    one, other = ([rng.randrange(kinds) for _ in range(256)] for _ in range(2))
    assert compare(notes(one), notes(other)) is not OTHER_ORDER


@given(st.integers(1, 100), st.integers(1, 5), seeds)
def test_items_that_come_several_times_each_augmented_or_not_are_no_evidence(n: int, times: int, seed: int) -> None:
    rng = random.Random(seed)
    order = [rng.randrange(n) for _ in range(n * times)]
    one, other = ([(float(index), rng.random() < 0.5) for index in order] for _ in range(2))
    assert compare(notes(one), notes(other)) is not OTHER_ORDER


hashes = st.integers(0, 2**62)


@given(st.lists(st.builds(ItemHashes, hashes, hashes, hashes)))
def test_notes_are_sent_whole(items: list[ItemHashes]) -> None:
    sent = {"epoch 0": [PartMarks.of(items, is_final=True), PartMarks.of(items[:1], end=1), PartMarks()]}
    assert pickle.loads(pickle.dumps(sent)) == sent  # noqa: S301 - its own


def test_the_first_part_that_differs_is_named_and_another_order_before_what_cannot_be_told() -> None:
    same, unsure = notes(MANY), notes(range(200, 300))
    moved = notes([0, *shuffled(range(1, 100), 3)])
    found = compare_parts([same, same, same], [same, unsure, moved])
    assert (found.verdict, found.part) == (OTHER_ORDER, 2)
    assert moved.items[found.item] != same.items[found.item]
    assert moved.items[: found.item] == same.items[: found.item]
    assert compare_parts([same, same], [same, unsure]).part == 1
    assert compare_parts([same], [same, moved]).verdict is ALIKE  # what only one has is not compared
    assert not compare_parts([same], [PartMarks()]).is_final


def test_items_in_another_part_have_another_order() -> None:
    one, other = notes(MANY[:50], is_all=True), notes(MANY[50:], is_all=True)
    found = compare_parts([one, other], [other, one])
    assert (found.verdict, found.part, found.item) == (OTHER_ORDER, 0, 0)
    few = [notes([0, 1], is_all=True), notes([2, 3], is_all=True)]
    assert compare_parts(few, few[::-1]).verdict is OTHER_ORDER
    # Two have come into the other part, which is no evidence as long as the streams go on.
    assert compare_parts([notes([0, 1]), notes([2, 3])], [notes([2, 3]), notes([0, 1])]).verdict is UNKNOWN


def test_a_part_of_which_one_reader_has_read_more_moves_none_of_the_next_part() -> None:
    same, mine, theirs = notes(MANY), notes(range(200, 203)), notes(range(300, 400))
    assert compare_parts([mine, same], [theirs, same]).verdict is UNKNOWN
    assert compare_parts([theirs, same], [mine, same]).verdict is UNKNOWN


@given(st.integers(1, 5000), seeds)
def test_items_that_are_drawn_again_and_again_by_all_workers_are_no_evidence(kinds: int, seed: int) -> None:
    rng = random.Random(seed)
    mine, theirs = ([notes([rng.randrange(kinds) for _ in range(256)]) for _ in range(2)] for _ in range(2))
    assert compare_parts(mine, theirs).verdict is not OTHER_ORDER


def test_the_workers_of_one_rank_are_compared_with_its_first() -> None:
    same, moved = notes(MANY), notes(shuffled(MANY))
    assert compare_parts([same, same], [same, same]).verdict is ALIKE
    found = compare_parts([same, same], [same, moved])
    assert (found.verdict, found.part) == (OTHER_ORDER, 1)


@dataclass
class Row:
    image: Any
    name: str | None


class Split(Enum):
    TRAIN = 0
    TEST = 1


class Count(IntEnum):
    ONE = 1
    TWO = 2


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value


NAMES, NUMBERS = "names", "numbers"
# Two items, and by which of their hashes they differ, apart from that of the whole.
KEPT: list[tuple[Any, Any, str]] = [
    ("a", "b", NAMES),
    (b"a", b"b", NAMES),
    (PurePosixPath("a"), PurePosixPath("b"), NAMES),
    (Split.TRAIN, Split.TEST, NAMES),
    (Count.ONE, Count.TWO, NAMES),
    (1, 2, NUMBERS),
    (1, True, NUMBERS),
    (date(2020, 1, 1), date(2020, 1, 2), NUMBERS),
    ({"x": torch.rand(2), "id": 1}, {"x": torch.rand(2), "id": 2}, NUMBERS),
    ({"x": 0.5, "a": 1}, {"x": 0.5, "b": 1}, NUMBERS),
    ({"name": "a", "crop": 1}, {"name": "a", "crop": 2}, NUMBERS),
    ({"name": "a", "label": 1}, {"name": "b", "label": 1}, NAMES),
    ((np.ones(1), ["a"]), (np.ones(1), ["b"]), NAMES),
    ([1, 2, 3], [1, 2, 4], NUMBERS),
    ([1, 2, "a"], [1, 2, "b"], NAMES),
    (Row(torch.ones(1), "a"), Row(torch.ones(1), "b"), NAMES),
    ([torch.ones(1), "a"], ["a", torch.ones(1)], NAMES),
]


@pytest.mark.parametrize(("one", "other", "by"), KEPT)
def test_names_and_numbers_have_hashes_of_their_own(one: Any, other: Any, by: str) -> None:
    hashes = [hashes_of(item)._asdict() for item in (one, other)]
    assert [name for name in (NAMES, NUMBERS) if hashes[0][name] != hashes[1][name]] == [by]
    assert 0 not in {told[by] for told in hashes}


UNNAMED: list[Any] = [0.5, None, torch.ones(2), np.ones(2), np.int64(3), [0.5], {}, (), [], Opaque(3), Row(1.0, None)]


@pytest.mark.parametrize("item", UNNAMED)
def test_what_augmentation_changes_has_none(item: Any) -> None:
    assert hashes_of(item)[1:] == (0, 0)


def test_a_key_alone_counts_where_there_is_one() -> None:
    one, other = hashes_of({"__key__": "a", "crop": 3}), hashes_of({"__key__": "a", "crop": 4})
    assert one.is_keyed
    assert one.names == other.names
    assert one.whole != other.whole
    assert not hashes_of({"key": "a"}).is_keyed


def test_hashes_fit_into_signed_numbers_of_64_bits() -> None:
    assert all(0 <= one < 2**63 for item in range(300) for one in hashes_of({"__key__": item}))
