"""Two hashes of an item, by which ranks tell whether they read the same one: all of it, and what augmentation keeps."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from typing import Any, Final, NamedTuple

from ddp_patch.compat import SAMPLE_KEY
from ddp_patch.streams.fingerprint import fingerprint

__all__ = ["ItemHashes", "hashes_of"]

_HAS_STABLE, _IS_KEY = 2, 1
_NOTHING: Final = object()
_STABLE: Final = {bool, bytes, int, str, type(None)}


class ItemHashes(NamedTuple):
    """What is noted of an item: two numbers of less than 63 bits.

    Attributes:
        whole: A hash of all of it. An object of an unknown type counts by its type alone.
        stable: A hash of what augmentation does not change, or of the key alone if there is one; 0 if there is neither.
    """

    whole: int
    stable: int

    @property
    def is_keyed(self) -> bool:
        """Whether ``stable`` is a hash of the item's key."""
        return bool(self.stable & _IS_KEY)


def hashes_of(item: Any) -> ItemHashes:
    """Return an item's hashes.

    Strings, bytes, whole numbers, truth values, None, paths, dates and enum members are stable, also within mappings,
    lists, tuples and dataclasses. Numbers with a fraction, tensors and arrays are not: augmentation changes these.

    Examples:
        >>> one, other = hashes_of({"x": torch.rand(3), "id": 7}), hashes_of({"x": torch.rand(3), "id": 7})
        >>> one.whole == other.whole, one.stable == other.stable
        (False, True)
        >>> hashes_of(torch.zeros(3)).stable
        0
    """
    whole = _hash(item)
    if isinstance(item, Mapping) and SAMPLE_KEY in item:
        return ItemHashes(whole, _hash(item[SAMPLE_KEY]) << 2 | _HAS_STABLE | _IS_KEY)
    stable = _stable(item)
    return ItemHashes(whole, 0 if stable is _NOTHING else _hash(stable) << 2 | _HAS_STABLE)


def _hash(value: Any) -> int:
    return int(fingerprint([value])[:15], 16)


def _stable(value: Any) -> Any:
    """Return the part of a value that augmentation does not change, or ``_NOTHING``."""
    match value:
        case None | str() | bytes() | int() | Enum() | os.PathLike() | date() | time() | timedelta():
            return value
        case Mapping():
            return _kept(value.items())
        case list() | tuple() if value and _STABLE.issuperset(map(type, value)):
            return value  # as below, in a fraction of the time
        case list() | tuple():
            return _kept(enumerate(value))
        case _ if is_dataclass(value) and not isinstance(value, type):
            return _kept((field.name, getattr(value, field.name)) for field in fields(value))
    return _NOTHING


def _kept(parts: Iterable[tuple[Any, Any]]) -> Any:
    kept = {name: part for name, value in parts if (part := _stable(value)) is not _NOTHING}
    return kept or _NOTHING
