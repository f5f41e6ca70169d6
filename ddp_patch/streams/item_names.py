"""The name of an item of a stream: what of it says which sample it is, and is the same in every process."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from typing import Any, Final
from uuid import UUID

import numpy as np
import torch

from ddp_patch.compat.packages import SAMPLE_KEY

__all__ = ["name_of"]

# A list that is longer counts by its length and so many of its elements, a text by its length and pieces of this size.
_ELEMENTS, _PIECE = 64, 512
_EMPTY: Final = {dict, list, tuple}


def name_of(item: Any) -> bytes | None:
    """Return an item's name; None if it has none, as tensors and floats alone.

    That is all strings, bytes, paths and enum members in it: in mappings, lists, tuples and dataclasses, too. Whole
    numbers, truth values and times count only where it has none of these, because augmentation makes numbers: it may
    tell where it cut an image. A mapping with the key ``__key__`` counts by that key alone.

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
    parts = names or numbers
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
