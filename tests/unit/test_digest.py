"""What stands for streams and their items: digests, fingerprints, names of items and hashes of the first ones."""

import os
import random
import subprocess
import sys
from array import array
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import IntEnum
from itertools import combinations
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_patch.loaders.overlap import common_items, is_more_than_padding, row_hashes
from ddp_patch.orders.digest import END, Digest, fingerprint, mark_counts, next_mark
from ddp_patch.streams.item_names import ItemNames


def digest_of(items: Sequence[Any], *parts: int) -> Digest:
    """Return the digest of items that come in parts of these sizes, and then the rest."""
    digest, start = Digest(), 0
    for part in parts:
        digest.add(items[start : start + part])
        start += part
    digest.add(items[start:])
    digest.end()
    return digest


# Items that are alike on every rank, and how they come there: each has a digest of its own.
KINDS: dict[str, list[Any]] = {
    "indices": [3, 1, 2],
    "other indices": [3, 2, 1],
    "batches": [[3, 1], [2]],
    "an empty batch": [[], [3, 1, 2]],
    "pairs": [(3, 1), (2, 0)],
    "indices and names": [(3, "a"), (1, "b")],
    "a name among indices": [3, "a", 2],
    # The first items are hashed one by one, later ones many at once.
    "a name among many indices": [*range(200), "a", *range(20)],
    "a name among many pairs": [*((at, 0) for at in range(200)), (1, "a"), *((at, 0) for at in range(20))],
    "a tensor among many indices": [*range(200), torch.tensor(1), *range(20)],
    "large numpy's": [np.int64(2**62)] * 200,
    "large": [2**70, -(2**70)],
    "tensors": [torch.tensor(3), torch.tensor(1)],
    "other arrays": [np.array([1, 3]), np.array([2])],
    "keys": [{"index": 3}, {"index": 1}],
    "sets": [{"b", "a"}, {"c"}],
    "nothing": [None, None],
}


def name_of(item: Any) -> bytes | None:
    return ItemNames(may_move=True).name_of(item)


def told() -> dict[str, object]:
    """Return the digests, a fingerprint and a name, as this process has them."""
    return {
        **{name: digest_of(items).marks for name, items in KINDS.items()},
        "fingerprint": fingerprint([{"a", "b", "c", "d"}, {"x": {"y", "z"}}, "text", (1, 2.5), b""]),
        "name": name_of({key: [key, 1, None] for key in {"some", "names", "of", "fields"}}),
    }


def test_any_two_neighbours_that_change_places_show_at_the_next_mark() -> None:
    items = list(range(300))
    alike = digest_of(items)
    for place in range(299):
        other = digest_of([*items[:place], items[place + 1], items[place], *items[place + 2 :]])
        for count, value in alike.marks.items():
            assert (other.marks[count] == value) == (0 < count <= place)


def test_a_mark_comes_when_a_quarter_more_came() -> None:
    counts = mark_counts()
    assert [next(counts) for _ in range(12)] == [1, 2, 3, 4, 6, 8, 11, 14, 18, 23, 29, 37]
    digest = digest_of(range(37))
    assert [*digest.marks] == [1, 2, 3, 4, 6, 8, 11, 14, 18, 23, 29, 37, END]
    reached = 0
    for _ in range(200):
        reached = next_mark(reached)
    assert reached > 10**18


def test_each_kind_of_items_has_a_digest_of_its_own() -> None:
    found = [str(digest_of(items).marks) for items in KINDS.values()]
    assert len(set(found)) == len(found)


def test_every_process_says_the_same_whatever_its_hash_seed() -> None:
    """Of digests, of fingerprints of orders, and of items' names."""
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", "import test_digest; print(test_digest.told())"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)  # noqa: S603 - ours
    assert done.stdout.strip() == str(told())


def test_names_are_the_same_on_every_version_of_python() -> None:
    digest = Digest()
    for name in (b"cat.jpg", b"dog.jpg"):
        digest.add([name])
    assert digest.marks == {1: -2022825537374352244, 2: -6696986435618097094}


# The fingerprint of a stream: no two of other items, types or orders have the same.


@dataclass(frozen=True)
class Key:
    name: str
    at: int


class Colour(IntEnum):
    RED = 0
    BLUE = 1


@dataclass(frozen=True)
class OtherKey:
    name: str
    at: int


# No two of these are the same stream.
STREAMS: list[list[Any]] = [
    *([], [0, 1], [1, 0], [[0], 1], ["0", "1"]),
    *([one] for one in (None, 0, False, 0.0, "0", "01", b"0", float("nan"), "\ud800", object())),
    *([one] for one in (np.int64(0), np.int32(0), np.array([0]), np.array([[0]]), torch.tensor(0), torch.tensor([0]))),
    *([one] for one in ([], (), [0], (0,), [0, 1], {0}, {0: 1}, {1: 0}, OrderedDict({0: 1}), range(2))),
    *([one] for one in (Key("a", 0), Key("a", 1), OtherKey("a", 0), Colour.RED, Colour.BLUE)),
    *([one] for one in (deque([0]), deque([1]), array("i", [0]), array("i", [1]), slice(0, 1), slice(1, 2))),
    *([one] for one in (PurePosixPath("a"), PurePosixPath("b"), date(2020, 1, 1), datetime(2020, 1, 1), Decimal("0"))),
    *([one] for one in (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse())),
]


def test_order_type_and_value_count() -> None:
    prints = [fingerprint(stream) for stream in STREAMS]
    same = [(a, b) for (a, one), (b, other) in combinations(enumerate(prints), 2) if one == other]
    assert [(STREAMS[a], STREAMS[b]) for a, b in same] == []


class Cuts:
    """Holds its parts in a list, and others."""

    def __init__(self, *cuts: Any) -> None:
        self.cuts, self.opened = [*cuts], [object()] * 99

    def __len__(self) -> int:
        return len(self.cuts)


class Odd:
    def __len__(self) -> int:
        raise OSError


def test_an_object_counts_by_lists_as_long_as_it_is() -> None:
    assert fingerprint([Cuts("a", "b")]) == fingerprint([Cuts("a", "b")]) != fingerprint([Cuts("b", "a")])
    assert fingerprint([Odd()]) == fingerprint([Odd()])


def test_what_has_no_order_has_none() -> None:
    assert fingerprint([{"a", "b", "c"}]) == fingerprint([{"c", "b", "a"}])
    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])
    assert fingerprint([object()]) == fingerprint([object()])


@given(st.lists(st.integers(), min_size=2, unique=True))
def test_any_swap_shows(stream: list[int]) -> None:
    assert fingerprint([stream[1], stream[0], *stream[2:]]) != fingerprint(stream)


# Of what of an item its name consists, so that ranks can tell which sample it is.


class Level(IntEnum):
    HIGH = 3


@dataclass
class Row:
    picture: Any
    file: str


class Locked(dict[Any, Any]):
    def __getitem__(self, key: Any) -> Any:
        raise RuntimeError("not here")


class Opaque:
    pass


PICTURE = torch.rand(3, 4)

NAMES: dict[str, tuple[Any, bytes | None]] = {
    "a number": (7, b"7"),
    "a text": ("7.png", b"7.png"),
    "bytes": (b"7", b"7"),
    "a path": (PurePosixPath("a/7"), b"a/7"),
    "a member that is a number": (Level.HIGH, b"3"),
    "a truth value": (True, b"1"),
    "a date": (date(2020, 1, 2), b"2020-01-02"),
    "a number of numpy's": (np.int32(7), b"7"),
    "a tensor of one number": (torch.tensor(7), b"7"),
    # Within containers.
    "a picture and its label": ((PICTURE, 7), b"7"),
    "a picture, its file and where it was cut": ({"x": PICTURE, "cut": 3, "file": "7.png"}, b"7.png"),
    "nested": ({"x": [PICTURE, {"meta": ("a", [{"file": "7"}])}]}, b"a\x007"),
    "a dataclass": (Row(PICTURE, "7.png"), b"7.png"),
    "a mapping of another class": (UserDict(b="2", a="1"), b"1\x002"),
    "a key": ({"__key__": "7", "png": b"augmented", "json": {"a": "b"}}, b"7"),
    "a key in a mapping of another class": (UserDict(__key__="7", png=b"augmented"), b"7"),
    "tokens": ({"ids": [5, 6, 7]}, b"(3, 5, 6, 7)"),
    "keys of several types": ({2: "b", "1": "a"}, b"a\0b"),
    "a missing field": ({"file": None, "label": 7}, b"7"),
    "nothing": (None, b""),
    "an empty list": ([], b""),
    # There is no name in it.
    "a picture": (PICTURE, None),
    "a float": (0.5, None),
    "a tensor of numbers": (torch.tensor([1, 2]), None),
    "pictures": ({"x": PICTURE, "y": [PICTURE, 0.5]}, None),
    "a set, which has no order": ({1, 2}, None),
    "an object": (Opaque(), None),
    "what raises": (Locked(a=1), None),
    "a dataclass itself": (Row, None),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_name_is_the_texts_and_only_without_them_the_numbers(case: str) -> None:
    item, name = NAMES[case]
    assert name_of(item) == name


@pytest.mark.parametrize("kind", [str, PurePosixPath])
def test_paths_of_files_that_move_count_as_they_lie_beside_the_first_one(kind: type) -> None:
    def names(folder: str, *paths: str, may_move: bool = True) -> list[bytes | None]:
        of = ItemNames(may_move=may_move).name_of
        return [of({"file": kind(f"{folder}/{path}"), "x": PICTURE}) for path in paths]

    paths = ("a/1.png", "a/2.png", "b/1.png", "c.png")
    here = names("/data", *paths)
    assert here == [b"1.png", b"2.png", b"../b/1.png", b"../c.png"]
    assert names("/scratch/job-7/data", *paths) == here
    assert names("/data", *reversed(paths)) != here[::-1]
    assert names("/data", "b/1.png", "a/2.png", "a/1.png", "c.png") != here
    assert names("", "1", "a/1") == [b"1", b"a/1"]
    assert names("/data", "1", may_move=False) == [b"data/1"]  # two ranks' folders may be others


# What ranks compare of an item: its names, and its numbers; or its values, if it has neither.
IDENTITIES: dict[str, tuple[Any, bytes, bool]] = {
    "a number": (7, b"", True),
    "a text": ("7.png", b"7.png", False),
    "a long path": ("/scratch/rank0/cats/7.png", b"cats/7.png", False),
    "a path": (PurePosixPath("rank0/cats/7.png"), b"cats/7.png", False),
    "a signed URL": ("https://host/cats/7.png?signature=1", b"cats/7.png", False),
    "a text with a slash": ("cats/or/dogs", b"cats/or/dogs", False),
    "a text and numbers": ({"text": "a", "ids": [1, 2]}, b"a", True),
    "a key": ({"__key__": "7", "label": 3}, b"7", False),
    "texts in an array": (np.array(["a", "b"]), b"a\0b", False),
    "whole numbers in a tensor": (torch.arange(9), b"", True),
    "whole numbers in an array": (np.arange(9), b"", True),
    "a date": (date(2020, 1, 2), b"", True),
    "floats": (0.5, b"", True),
    "a picture": ({"x": PICTURE}, b"", True),
    "a picture of half floats": (PICTURE.bfloat16(), b"", True),
    "a picture and a text": ((PICTURE, "cat"), b"cat", False),
    "nothing": (None, b"", False),
    "an object": (Opaque(), b"", False),
    "what raises": (Locked(a=1), b"", False),
}


@pytest.mark.parametrize("case", IDENTITIES)
def test_names_count_apart_from_numbers_and_values_only_without_both(case: str) -> None:
    item, names, has_numbers = IDENTITIES[case]
    found = ItemNames().identity_of(item)
    assert (found[0], found[1] != b"") == (names, has_numbers)


@pytest.mark.parametrize(
    "made", [lambda x: torch.full((9, 9), x), lambda x: torch.full((9, 9), int(x)), lambda x: np.full(9, x), float]
)
def test_items_of_other_values_have_other_identities(made: Callable[[float], Any]) -> None:
    of = ItemNames().identity_of
    assert of(made(1.0)) == of(made(1.0)) != of(made(2.0))
    assert of((made(1.0), 3)) != of((made(1.0), 4))


def test_the_order_of_a_mapping_does_not_count() -> None:
    assert name_of({"a": "1", "b": "2"}) == name_of({"b": "2", "a": "1"}) != name_of({"a": "2", "b": "1"})


def test_of_long_lists_and_texts_some_counts_and_their_length() -> None:
    for long in ([*range(100_000)], [str(n) for n in range(100_000)], "x" * 100_000, b"x" * 100_000):
        name = name_of(long)
        assert name is not None
        assert len(name) < 2000
        assert name != name_of(long[:-1])
        assert name != name_of(long[1:])


@given(st.recursive(st.text() | st.integers() | st.floats() | st.binary() | st.none(), st.lists))
def test_it_never_raises(item: Any) -> None:
    name_of(item)
    name_of({"a": item, "b": (item, PICTURE)})


def test_what_holds_itself_has_no_name() -> None:
    item: list[Any] = []
    item.append(item)
    assert name_of(item) is None


# What the first items of two ranks are, and how many they may have in common by chance.


def are_alike(of_ranks: tuple[list[int], list[int]], passes: int = 1) -> bool:
    return is_more_than_padding(passes * common_items(*of_ranks))


def test_the_same_items_are_unlikely_and_so_are_two_shuffles_of_one_dataset() -> None:
    rng = random.Random(1)
    assert are_alike((list(range(12)), list(range(12))))
    assert are_alike((rng.sample(range(1000), 256), rng.sample(range(1000), 256)))
    few = (rng.sample(range(10000), 256), rng.sample(range(10000), 256))
    assert are_alike(few, passes=3)


def test_items_that_all_are_alike_show_nothing() -> None:
    assert not are_alike(([7] * 9, [7] * 9))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0), (4,), (4, 2)])
def test_batches_of_any_shape_have_hashes(shape: tuple[int, ...]) -> None:
    assert len(row_hashes(torch.zeros(shape), most=9)) == shape[0]
    assert len(row_hashes(np.zeros(shape), most=9)) == shape[0]
    assert row_hashes(torch.zeros(shape), most=0) == []


@pytest.mark.parametrize(
    "named",
    [
        {"key": ["a", "b", "c"], "label": ["cat", "cat", "cat"]},
        {"id": torch.tensor([3, 1, 2]), "label": torch.tensor([0, 0, 1])},
        {"id": np.arange(3)},
        (["a", "b", "c"], [1, 1, 1]),
    ],
)
def test_where_names_tell_samples_apart_the_rest_may_be_augmented(named: Any) -> None:
    one, other = (row_hashes([named, torch.rand(3, 4)], most=9) for _ in range(2))
    assert one == other
    assert len({*one}) == 3


def test_labels_name_no_samples() -> None:
    labels = ["cat", "cat", "dog"], torch.tensor([1, 1, 2])
    assert row_hashes([*labels, torch.zeros(3)], most=9) != row_hashes([*labels, torch.ones(3)], most=9)


def test_a_single_value_is_a_sample() -> None:
    for value in (7, "7", 0.5, torch.tensor(7), np.int64(7)):
        assert len(row_hashes(value, most=9)) == 1
    assert row_hashes(torch.tensor(7), most=9) != row_hashes(torch.tensor(8), most=9)


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray])
def test_of_a_large_sample_some_bytes_count_wherever_they_lie(kind: Callable[[Any], Any]) -> None:
    batch = np.random.default_rng(0).random((4, 3, 64, 64))
    assert len({*row_hashes(kind(batch), most=9)}) == 4
    assert row_hashes(kind(batch.transpose(0, 2, 3, 1)), most=9) == row_hashes(
        kind(np.ascontiguousarray(batch.transpose(0, 2, 3, 1))), most=9
    )
