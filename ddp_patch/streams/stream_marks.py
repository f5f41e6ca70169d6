"""What ranks compare of a stream: one digest of each pass, of its items' names, which workers mark in shared memory.

An item's name is what of it says which sample it is, and is the same in every process.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from itertools import islice
from typing import Any, Final, TypeVar
from uuid import UUID

import numpy as np
import torch

from ddp_patch.compat.packages import SAMPLE_KEY
from ddp_patch.orders.digest import END, Digest, mark_counts
from ddp_patch.streams.shared_state import MOST_MARKS, STREAM, SharedWorkerState

__all__ = ["StreamDigest", "marked", "name_of"]

T = TypeVar("T")

_COUNTS = list(islice(mark_counts(), MOST_MARKS))
_PLACES = {count: place for place, count in enumerate(_COUNTS)}
# So many names are hashed at once, which takes less time than one by one.
_AT_ONCE = 64

# A list that is longer counts by its length and so many of its elements, a text by its length and pieces of this size.
_ELEMENTS, _PIECE = 64, 512
_EMPTY: Final = {dict, list, tuple}


def marked(items: Iterator[T], report: np.void) -> Iterator[T]:
    """Pass on what the reader of a part reads from its first item on, and mark in its report what comes.

    Examples:
        >>> shared = SharedWorkerState(readers=1)
        >>> report = shared.report(1, part=0)
        >>> list(marked(iter("ab"), report)), int(report["read"])
        (['a', 'b'], 2)
    """
    number, digest, names, are_named, wanted = report["number"], Digest(), list[bytes](), False, 1
    report["marks"] = 0
    first: bytes | None = None
    are_one = True  # whether all names so far are the same, which tells no items apart
    for item in items:
        name = name_of(item)
        if first is None:
            first = name
        elif are_one and (are_one := name == first):
            name = name_of(item, with_numbers=True)
        # One that has none counts as any other such, so that the others are compared.
        names.append(name or b"")
        are_named = are_named or name is not None
        if len(names) == wanted:
            digest.add_names(names)
            names.clear()
            place = _PLACES.get(digest.count)
            if place is not None and report["number"] == number:  # else a later pass has the memory
                report["values"][place], report["has_names"] = digest.value, are_named
                report["marks"] = place + 1  # last: the mark is there when it counts
            wanted = min(_AT_ONCE, digest.until_mark)
        yield item
    if names:
        digest.add_names(names)
    digest.end()
    if report["number"] == number:
        report["end"], report["has_names"] = digest.marks[END], are_named
        report["read"] = digest.count


class StreamDigest:
    """The digest of one pass over a stream, whatever the number of its readers.

    Readers of one stream have the same. Where each reads a part, that of all parts at a count is the hash of theirs.

    Args:
        shared: Where readers mark it.
        number: The pass.
    """

    def __init__(self, shared: SharedWorkerState, number: int) -> None:
        self._shared, self._number = shared, number

    def _reported(self, what: str) -> list[Any]:
        return self._shared.reported(self._number, what)

    @property
    def _is_one_stream(self) -> bool:
        return self._shared.ways(self._number) == {STREAM}

    def _parts(self) -> list[tuple[list[int], int | None]]:
        """Return the marks of each part, and the digest of all of it, or None before its end."""
        # The ends first, and how many marks there are before these: what they tell of was written before.
        read, ends, made, values = map(self._reported, ("read", "end", "marks", "values"))
        return [
            (of_part[: max(0, count)], end if length >= 0 else None)
            for of_part, count, length, end in zip(values, made, read, ends, strict=True)
        ]

    @property
    def marks(self) -> dict[int, int]:
        """The values of all marks that are known, by their counts; none before it is known whether there are parts.

        Where a part ended before a count, its end counts: so it differs from that of a stream that goes on.
        """
        if len(self._shared.ways(self._number)) != 1:
            return {}
        parts = [
            marks if end is None else marks + [end] * (len(_COUNTS) + 1 - len(marks)) for marks, end in self._parts()
        ]
        values = max(parts, key=len) if self._is_one_stream else map(hash, zip(*parts, strict=False))
        return dict(zip((*_COUNTS, END), values, strict=False))

    @property
    def asked_rank(self) -> bool:
        """Whether the dataset asked which rank it is on, by its first item, or was made for its rank."""
        return 1 in self._reported("asked_rank")

    @property
    def is_unnamed(self) -> bool:
        """Whether none of the items that were read so far has a name: then no more than their number is compared."""
        return max(self._reported("marks")) > 0 and 1 not in self._reported("has_names")

    def workers_differ(self) -> tuple[int, int] | None:
        """Return where workers that read one stream differ: the count, and which one has others than worker 0."""
        if not self._is_one_stream:
            return None
        (first, first_end), *others = self._parts()
        for worker, (marks, end) in enumerate(others, 1):
            differ = (count for count, one, other in zip(_COUNTS, first, marks, strict=False) if one != other)
            if (count := next(differ, None)) is not None:
                return count, worker
            if None not in {first_end, end} and first_end != end:
                return self._reported("read")[0], worker
        return None


# ---- names ----


def name_of(item: Any, *, with_numbers: bool = False) -> bytes | None:
    """Return an item's name; None if it has none, as tensors and floats alone.

    That is all strings, bytes, paths and enum members in it: in mappings, lists, tuples and dataclasses, too. Whole
    numbers, truth values and times count only where it has none of these, because augmentation makes numbers: it may
    tell where it cut an image. A mapping with the key ``__key__`` counts by that key alone.

    Args:
        item: The item.
        with_numbers: Whether whole numbers count in any case, as where all items have the same texts.

    Examples:
        >>> name_of({"x": torch.rand(3), "file": "7.png", "cut at": 3}), name_of((torch.rand(3), 7))
        (b'7.png', b'7')
        >>> name_of(torch.rand(3)), name_of([])
        (None, b'')
    """
    kind = type(item)
    if kind is int:
        return b"%d" % item
    if item is None or (kind in _EMPTY and not item):
        return b""
    names: list[bytes] = []
    numbers: list[bytes] = []
    try:
        if kind is str and len(item) < _PIECE:
            return item.encode("utf-8", "surrogatepass")  # type: ignore[no-any-return]  # a str is no other type
        _find(item, names, numbers)
    except Exception:  # noqa: BLE001 - an object of the user's, which nothing else may ever look into
        return None
    parts = names + numbers if with_numbers else names or numbers
    return b"\0".join(parts) if parts else None


def _find(value: Any, names: list[bytes], numbers: list[bytes]) -> None:
    """Add the names and numbers in a value, in an order that is the same in every process: frequent types first."""
    kind = type(value)
    if kind is float or value is None or (kind is torch.Tensor and value.ndim):
        return
    if kind is str and len(value) < _PIECE:
        names.append(value.encode("utf-8", "surrogatepass"))
    elif kind is int:
        numbers.append(b"%d" % value)
    elif kind is dict:
        _find_in_mapping(value, names, numbers)
    elif kind is tuple or kind is list:
        _find_in_list(value, names, numbers)
    else:
        _find_other(value, names, numbers)


def _find_in_mapping(mapping: Mapping[Any, Any], names: list[bytes], numbers: list[bytes]) -> None:
    if SAMPLE_KEY in mapping:
        _find(mapping[SAMPLE_KEY], names, numbers)
        return
    try:
        keys = sorted(mapping)  # their own order may depend on the process, as that of a set does
    except TypeError:  # they are of several types
        keys = sorted(mapping, key=repr)
    for key in keys:
        _find(mapping[key], names, numbers)


def _find_in_list(value: Sequence[Any], names: list[bytes], numbers: list[bytes]) -> None:
    """Find what is in a list; only evenly spread elements of a long one, which counts by its length then, too."""
    length = len(value)
    some = value[:: -(-length // _ELEMENTS)] if length > _ELEMENTS else value
    if length and {int}.issuperset(map(type, some)):  # as tokens are
        numbers.append(repr((length, *some)).encode())
        return
    if length > _ELEMENTS and type(some[0]) is str:
        names.append(b"%d" % length)
    for each in some:
        _find(each, names, numbers)


def _find_other(value: Any, names: list[bytes], numbers: list[bytes]) -> None:  # noqa: C901 - one flat table of types
    match value:
        case Enum():  # before int(), because an IntEnum's members are ints
            names.append(value.name.encode())
        case str():
            names.append(_pieces(str.__str__(value)).encode("utf-8", "surrogatepass"))
        case bytes() | bytearray():
            names.append(bytes(_pieces(value)))
        case os.PathLike():
            names.append(os.fsencode(value))
        case UUID():
            names.append(value.bytes)
        case int() | np.integer() | np.bool_():
            numbers.append(b"%d" % int(value))
        case date() | time() | timedelta() | np.datetime64() | np.timedelta64():
            numbers.append(str(value).encode())
        case torch.Tensor():
            # As Hugging Face's datasets make of whole numbers.
            if not value.ndim and value.device.type == "cpu" and not (value.is_floating_point() or value.is_complex()):
                numbers.append(b"%d" % int(value))
        case Mapping():
            _find_in_mapping(value, names, numbers)
        case list() | tuple():
            _find_in_list(value, names, numbers)
        case _ if is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                _find(getattr(value, field.name), names, numbers)


def _pieces(text: Any) -> Any:
    """Return a text, or bytes; of long ones the beginning, the middle and the end, and how long they are."""
    if len(text) <= 4 * _PIECE:
        return text
    middle, length = len(text) // 2, str(len(text))
    pieces = text[:_PIECE] + text[middle : middle + _PIECE] + text[-_PIECE:]
    return pieces + (length if isinstance(text, str) else length.encode())
