"""Of what of an item its name consists, so that ranks can tell which sample it is."""

from collections import UserDict
from dataclasses import dataclass
from datetime import date
from enum import IntEnum
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_patch.streams.reports import name_of


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
    "a member that is a number": (Level.HIGH, b"HIGH"),
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
