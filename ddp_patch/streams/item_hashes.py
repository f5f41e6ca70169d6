"""Hashes of an item, to compare items between ranks: of all of it, and of what augmentation keeps."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from typing import Any, Final, NamedTuple, TypeAlias

from ddp_patch.compat.datasets import SAMPLE_KEY
from ddp_patch.streams.fingerprint import fingerprint

__all__ = ["ItemHashes", "hashes_if_any", "hashes_of"]

_Types: TypeAlias = tuple[type, ...]

_NAMES: Final[_Types] = (str, bytes, os.PathLike, Enum)
_NUMBERS: Final[_Types] = (int, date, time, timedelta)
_NOTHING: Final = object()
_PLAIN: Final = {str, bytes, bool, int, float}
_HAS_SOME, _IS_KEY = 2, 1


class ItemHashes(NamedTuple):
    """What is recorded about an item: three numbers of less than 63 bits.

    Strings and whole numbers are apart, because augmentation may change one of them: it may write where it cut an
    image, or mask words of a text that keeps its label.

    Attributes:
        whole: A hash of all of it. An object of an unknown type counts by its type alone.
        names: A hash of its strings, bytes, paths and enum members, or of its key alone if it has one; 0 if none.
        numbers: A hash of its whole numbers, truth values, dates and times; 0 if none.
    """

    whole: int
    names: int
    numbers: int

    @property
    def is_keyed(self) -> bool:
        """Whether ``names`` is a hash of the item's key."""
        return bool(self.names & _IS_KEY)


def hashes_of(item: Any) -> ItemHashes:
    """Return an item's hashes; names and numbers are looked for in mappings, lists, tuples and dataclasses, too.

    Examples:
        >>> one, other = (hashes_of({"x": torch.rand(3), "file": "7.png", "cut at": cut}) for cut in (3, 8))
        >>> one.whole == other.whole, one.names == other.names, one.numbers == other.numbers
        (False, True, False)
        >>> hashes_of(torch.zeros(3))[1:]
        (0, 0)
    """
    whole, numbers = _hash(item), _hash_of_parts(item, _NUMBERS)
    if isinstance(item, Mapping) and SAMPLE_KEY in item:
        return ItemHashes(whole, _hash(item[SAMPLE_KEY]) << 2 | _HAS_SOME | _IS_KEY, numbers)
    return ItemHashes(whole, _hash_of_parts(item, _NAMES), numbers)


def hashes_if_any(item: Any) -> ItemHashes:
    """Return an item's hashes; zeros where looking into it raises, because training never may."""
    try:
        return hashes_of(item)
    except Exception:  # noqa: BLE001 - an object of the user's, which nothing else may ever look into
        return ItemHashes(0, 0, 0)


def _hash(value: Any) -> int:
    return int(fingerprint([value])[:15], 16)


def _hash_of_parts(item: Any, types: _Types) -> int:
    parts = _parts(item, types)
    return 0 if parts is _NOTHING else _hash(parts) << 2 | _HAS_SOME


def _parts(value: Any, types: _Types) -> Any:
    """Return what a value has of some types, or ``_NOTHING``."""
    match value:
        case _ if isinstance(value, types):
            return value if types is _NAMES or not isinstance(value, Enum) else _NOTHING
        case Mapping():
            return _kept(value.items(), types)
        case list() | tuple():
            kinds = set(map(type, value))
            if len(kinds) == 1 and kinds <= _PLAIN:  # as tokens are: not looked at one by one
                return value if issubclass(kinds.pop(), types) else _NOTHING
            return _kept(enumerate(value), types)
        case _ if is_dataclass(value) and not isinstance(value, type):
            return _kept(((field.name, getattr(value, field.name)) for field in fields(value)), types)
    return _NOTHING


def _kept(parts: Iterable[tuple[Any, Any]], types: _Types) -> Any:
    kept = {name: part for name, value in parts if (part := _parts(value, types)) is not _NOTHING}
    return kept or _NOTHING
