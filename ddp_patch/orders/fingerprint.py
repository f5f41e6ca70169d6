"""Fingerprints of what samplers give, and of passes as they are drawn."""

import hashlib
import logging
import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from itertools import chain
from typing import Any

import numpy as np
import torch

__all__ = [
    "COMPARED",
    "evenly_spread",
    "fingerprint",
    "is_known",
    "number_of",
    "number_or_zero",
    "say_if_unseen",
]

logger: logging.Logger = logging.getLogger("ddp_patch")

# How many items ranks compare, if they do not compare all.
COMPARED = 256

# How many elements of such a list are looked at.
_ELEMENTS = 8

# Named, because importing their modules takes longer than importing this package.
_TOLD_BY_REPR = {"decimal.Decimal", "fractions.Fraction", "uuid.UUID"}
# A list of only these is encoded by its repr, which is a tenth of the work.
_PLAIN = {bool, float, int, str, type(None)}


def fingerprint(items: Iterable[Any]) -> str:
    """Return the fingerprint of items in their order, 32 hexadecimal digits.

    Numbers, strings, bytes, paths, dates, enum members, tensors, arrays, dataclasses and containers of these count by
    type and value. The order within sets and mappings does not count. Any other object counts by its type alone; with a
    length, also by the first elements of the lists of that length that it holds, as lhotse's sets of cuts do.

    Examples:
        >>> fingerprint([1, 2]) == fingerprint([2, 1]), fingerprint([1]) == fingerprint([1.0])
        (False, False)
        >>> fingerprint([{"a", "b"}]) == fingerprint([{"b", "a"}])
        True
    """
    running = hashlib.blake2b(digest_size=16)
    for part in chain.from_iterable(map(_encoded, items)):
        running.update(part)
    return running.hexdigest()


def evenly_spread(length: int, about: int = COMPARED) -> range:
    """Return about so many positions of a sequence, evenly spread."""
    return range(0, length, max(1, length // about))


def number_of(items: Iterable[Any]) -> int:
    """Return the fingerprint of items as a whole number of 60 bits."""
    return int(fingerprint(items)[:15], 16)


def number_or_zero(item: Any) -> int:
    """Return an item's fingerprint as a whole number; 0 if it cannot be looked into."""
    try:
        return number_of([item])
    except Exception:  # noqa: BLE001 - an object of the user's, which nothing else may ever look into
        return 0


def is_known(item: Any) -> bool:
    """Return whether an item counts by its value, and not by its type alone.

    Examples:
        >>> is_known([]), is_known("7.png"), is_known(object())
        (True, True, False)
    """
    return any(True for _ in _content(item)) or _size(item) == 0


def _encoded(item: Any) -> Iterator[bytes]:
    """Yield an encoding that no other item has: its type, its length and its content."""
    kind = f"{type(item).__module__}.{type(item).__qualname__}".encode()
    content = b"".join(_content(item))
    yield b"%d:%b%d:" % (len(kind), kind, len(content))
    yield content


def _content(item: Any) -> Iterator[bytes]:  # noqa: C901 - one flat table of types
    match item:
        case Enum():  # before int(), because an IntEnum's members are ints
            yield item.name.encode()
        case None | bool() | int() | float() | complex() | str():
            yield repr(item).encode("utf-8", "surrogatepass")
        case bytes() | bytearray():
            yield bytes(item)
        case torch.Tensor() if item.is_meta or item.is_nested:
            yield str(item.dtype).encode()
        case torch.Tensor() if item.layout != torch.strided:
            yield from _encoded(item.detach().to_dense())
        case torch.Tensor():
            plain = item.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
            yield f"{item.dtype}{tuple(item.shape)}".encode()
            yield plain.view(torch.uint8).numpy().tobytes()
        case np.ndarray() | np.generic():
            yield f"{item.dtype.str}{item.shape}".encode()
            yield from _encoded(item.tolist()) if item.dtype.hasobject else (item.tobytes(),)
        case Mapping():
            yield from sorted(b"".join((*_encoded(key), *_encoded(value))) for key, value in item.items())
        case Set():
            yield from sorted(b"".join(_encoded(member)) for member in item)
        case os.PathLike():
            yield os.fsencode(item)
        case slice() | date() | time() | timedelta():
            yield repr(item).encode()
        case list() | tuple() if type(item) in {list, tuple} and _PLAIN.issuperset(map(type, item)):
            yield repr(item).encode()
        case list() | tuple() | range() | deque() | array():
            for member in item:
                yield from _encoded(member)
        case _ if is_dataclass(item) and not isinstance(item, type):
            for field in fields(item):
                yield from _encoded(getattr(item, field.name))
        case _ if not _TOLD_BY_REPR.isdisjoint(f"{kind.__module__}.{kind.__qualname__}" for kind in type(item).__mro__):
            yield repr(item).encode()
        case _ if _size(item):
            for held in getattr(item, "__dict__", {}).values():
                if type(held) in {list, tuple} and len(held) == _size(item):
                    yield from _encoded(held[:_ELEMENTS])


def _size(item: Any) -> int | None:
    try:
        return len(item)
    except Exception:  # noqa: BLE001 - it has none, or the user's code
        return None


_UNSEEN: set[type] = set()


def say_if_unseen(item: Any) -> None:
    """Log, once, that items of a class count by their class alone."""
    if not is_known(item) and type(item) not in _UNSEEN:
        _UNSEEN.add(type(item))
        logger.info(
            "Items of a sampler are not compared between ranks, but by their class: a %s has no value that is the same "
            "in every process. Let it be a dataclass, or give indices.",
            type(item).__name__,
        )
