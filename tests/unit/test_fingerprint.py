from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import IntEnum
from itertools import combinations
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_patch.orders.digest import fingerprint


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
