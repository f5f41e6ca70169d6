"""Hashes of what samplers give: fingerprints of some items, and the digest of a whole stream.

A digest is 64 bits over all items up to a count, at counts that follow from the stream alone. Two ranks that draw one
stream have equal digests wherever both have come as far. From the first item that differs on, they have others.
"""

import marshal
import os
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import Any

import numpy as np
import torch

__all__ = [
    "END",
    "Digest",
    "as_array",
    "few_numbers",
    "few_places",
    "fingerprint",
    "mark_counts",
    "next_mark",
    "number_of",
    "number_or_zero",
]

# How many elements of such a list are looked at.
_ELEMENTS = 8
# How many of a large tensor's numbers.
_OF_A_TENSOR = 64
# Whole numbers of so many bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

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
    running = blake2b(digest_size=16)
    for part in chain.from_iterable(map(_encoded, items)):
        running.update(part)
    return running.hexdigest()


def number_of(items: Iterable[Any]) -> int:
    """Return the fingerprint of items as a whole number of 60 bits."""
    return int(fingerprint(items)[:15], 16)


def number_or_zero(item: Any) -> int:
    """Return an item's fingerprint as a whole number; 0 if it cannot be looked into."""
    try:
        return number_of([item])
    except Exception:  # noqa: BLE001 - an object of the user's, which nothing else may ever look into
        return 0


def few_numbers(values: Any) -> bytes:
    r"""Return the type and the shape of a tensor or array, and at most 64 of its numbers, evenly spread, as bytes.

    Examples:
        >>> few_numbers(np.arange(6, dtype=np.int8))
        b'int8(6,)\x00\x01\x02\x03\x04\x05'
        >>> one, other = torch.zeros(3, 224, 224), torch.zeros(3, 224, 224)
        >>> other[2] = 1
        >>> few_numbers(one) == few_numbers(other), len(few_numbers(one)) < 300
        (False, True)
    """
    shape = tuple(values.shape)
    content: bytes = as_array(values)[few_places(shape)].tobytes()
    return f"{values.dtype}{shape}".encode() + content


def as_array(values: Any) -> Any:
    """Return an array of a tensor's numbers, which takes less time to look into: of types that numpy lacks, of bits."""
    if not isinstance(values, torch.Tensor):
        return values
    values = values.detach()
    try:
        return values.numpy()
    except (TypeError, RuntimeError):
        plain = values.resolve_conj().resolve_neg()
        return plain.numpy() if plain.dtype.is_complex else plain.view(_BITS[plain.element_size()]).numpy()


@lru_cache
def few_places(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return slices of a tensor of some shape that choose at most 64 of its numbers, evenly spread.

    Examples:
        >>> few_places((1, 640))
        (slice(None, None, 1), slice(None, None, 10))
        >>> torch.zeros(3, 224, 224)[few_places((3, 224, 224))].shape
        torch.Size([3, 4, 5])
    """
    steps, left = [slice(None)] * len(shape), _OF_A_TENSOR
    dimensions = sorted(range(len(shape)), key=shape.__getitem__)  # the smallest first, of which all may count
    for place, dimension in enumerate(dimensions):
        size, most = max(1, shape[dimension]), int(left ** (1 / (len(shape) - place)) + 1e-9)
        steps[dimension] = slice(None, None, -(-size // most))
        left //= min(most, size)
    return tuple(steps)


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


# A mark is made when this part more came since the one before, so that there are few: 100 of a billion items.
_GROWTH = 1.25
# So many items are hashed at once, from the first few on.
_BLOCK = 256
# So many blocks of the latest items are known: more than is drawn ahead.
_BLOCKS_KEPT = 1024
# Stands for a count where all items came.
END = -1

# Python's hashes of these are the same in all processes; of floats not, because each NaN has its own.
_NUMBERS = frozenset({int, bool, np.int64, np.int32})


def next_mark(count: int) -> int:
    """Return the first count after this one at which a mark is made.

    Examples:
        >>> [next_mark(count) for count in (0, 1, 2, 3, 4, 100, 300)]
        [1, 2, 3, 4, 6, 126, 512]
    """
    after = int(count * _GROWTH) + 1
    return after if after < _BLOCK else -(-after // _BLOCK) * _BLOCK


def mark_counts() -> Iterator[int]:
    """Yield the counts at which marks are made of items that come one by one, in order."""
    count = 0
    while True:
        yield (count := next_mark(count))


class Digest:
    """Takes the digest of items that come in parts. It is the same whatever the parts.

    Plain whole numbers, and tuples and lists of them, are hashed by Python: these hashes are the same in all processes
    and take a few nanoseconds. All else is hashed by its value; objects of unknown types count by their types alone.

    Attributes:
        count: How many items came.
        marks: The digests at growing counts, by the count; in the order in which they were made.

    Examples:
        >>> one, other = Digest(), Digest()
        >>> one.add([3, 1, 2])
        >>> other.add([3, 2])
        >>> other.add([1])
        >>> list(one.marks)
        [1, 2, 3]
        >>> one.marks[1] == other.marks[1], one.marks[2] == other.marks[2]
        (True, False)
    """

    def __init__(self) -> None:
        self.count: int = 0
        self.marks: dict[int, int] = {}
        self._next = 1
        self._value = 0  # of all items but those that wait
        self._waiting: list[Any] = []
        self._blocks: deque[tuple[int, int]] = deque(maxlen=_BLOCKS_KEPT)

    def add(self, items: Sequence[Any]) -> None:
        """Add the items that come next."""
        self.count += len(items)
        waiting = self._waiting = [*self._waiting, *items] if self._waiting else list(items)
        hashed, start = self.count - len(waiting), 0
        while (size := next_mark(hashed) - hashed if hashed < _BLOCK else _BLOCK) <= len(waiting) - start:
            self._add_hash(_hash_of(waiting[start : start + size]), hashed + size)
            hashed, start = hashed + size, start + size
        del waiting[:start]

    def add_hash(self, value: int, items: int) -> None:
        """Add items that come at once, always so many, of which no more than a hash is known."""
        self.count += items
        self._add_hash(value, self.count)

    def add_names(self, names: Sequence[bytes]) -> None:
        """Add items by their names: so many at once on every rank, and no more than ``until_mark``.

        Source: BLAKE2b, over the digest so far and the names.
        """
        self.count += len(names)
        data = self._value.to_bytes(8, "little", signed=True) + b"\xff".join(names)
        self._note(_bytes_hash(data), self.count)

    @property
    def value(self) -> int:
        """The digest of all items but the latest ones, which wait to be hashed together."""
        return self._value

    @property
    def until_mark(self) -> int:
        """How many more items there are to the next mark."""
        return self._next - self.count

    def end(self) -> None:
        """Add that there are no more items."""
        value = hash((self._value, _hash_of(self._waiting))) if self._waiting else self._value
        self.marks[END] = hash((value, END, self.count))

    def before(self, count: int) -> tuple[int, int] | None:
        """Return the latest known digest of at most so many items: of how many, and the digest; None if none is."""
        latest = (block for block in reversed(self._blocks) if block[0] <= count)
        marked = ((at, value) for at, value in reversed(self.marks.items()) if 0 < at <= count)
        return next(latest, None) or next(marked, None)

    def _add_hash(self, value: int, count: int) -> None:
        self._note(hash((self._value, value)), count)

    def _note(self, value: int, count: int) -> None:
        """Record the digest of so many items."""
        self._value = value
        self._blocks.append((count, value))
        if count >= self._next:
            self.marks[count], self._next = value, next_mark(count)


def _hash_of(items: Sequence[Any]) -> int:
    """Return a hash of items that is the same in every process."""
    if _are_numbers(items):
        return hash(tuple(items))
    if list in set(map(type, items)):
        items = [tuple(item) if type(item) is list else item for item in items]
    first = items[0]
    try:
        if type(first) is tuple and _are_numbers(chain.from_iterable(items)):
            return hash(tuple(items))
        if type(first) is torch.Tensor:
            items = [item.tolist() for item in items]
        return _bytes_hash(marshal.dumps(items, 0))  # type: ignore[arg-type]  # it refuses what has no plain value
    except (TypeError, ValueError, AttributeError):
        return number_of(items)


def _are_numbers(items: Iterable[Any]) -> bool:
    """Return whether all are plain whole numbers: then so is their sum, which takes less time than to look at each."""
    try:
        with np.errstate(over="ignore"):
            return type(sum(items)) in _NUMBERS
    except Exception:  # noqa: BLE001 - objects of the user's may raise anything where they are added
        return False


def _bytes_hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
