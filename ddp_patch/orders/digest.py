"""Hashes of the items that samplers yield: fingerprints of some items, and the digest of a whole stream.

A digest is a hash of all items up to a count, of 64 bits. A mark is a digest that is stored, at a count that follows
from the stream alone. Two ranks that draw the same stream have equal marks. From the first different item on, their
marks differ.
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

# How many elements of a list within an unknown object are hashed.
_ELEMENTS = 8
# How many numbers of a large tensor are hashed.
_OF_A_TENSOR = 64
# torch's integer types by their bytes.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Types that are hashed by repr, given by name: importing their modules takes longer than importing this package.
_BY_REPR = {"decimal.Decimal", "fractions.Fraction", "uuid.UUID"}
# A list of only these types is encoded by its repr, which is a tenth of the work.
_PLAIN = {bool, float, int, str, type(None)}


def fingerprint(items: Iterable[Any]) -> str:
    """Return the fingerprint of items in their order, 32 hexadecimal digits.

    Numbers, strings, bytes, paths, dates, enum members, tensors, arrays, dataclasses and containers of these count by
    type and value. The order within sets and mappings does not count. Any other object counts by its type. If it has a
    length, the first elements of its lists of that length count, too, as in lhotse's sets of cuts.

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
    """Return an item's fingerprint as a whole number; 0 if hashing the item raises an error."""
    try:
        return number_of([item])
    except Exception:  # noqa: BLE001 - the user's object may raise anything
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
    """Return a tensor as an array, which is faster to index. Numbers of a type that numpy lacks become integers."""
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
    """Return slices that choose at most 64 numbers of a tensor of this shape, evenly spread.

    Examples:
        >>> few_places((1, 640))
        (slice(None, None, 1), slice(None, None, 10))
        >>> torch.zeros(3, 224, 224)[few_places((3, 224, 224))].shape
        torch.Size([3, 4, 5])
    """
    steps, left = [slice(None)] * len(shape), _OF_A_TENSOR
    dimensions = sorted(range(len(shape)), key=shape.__getitem__)  # the smallest dimension first
    for place, dimension in enumerate(dimensions):
        size, most = max(1, shape[dimension]), int(left ** (1 / (len(shape) - place)) + 1e-9)
        steps[dimension] = slice(None, None, -(-size // most))
        left //= min(most, size)
    return tuple(steps)


def _encoded(item: Any) -> Iterator[bytes]:
    """Yield a unique encoding of an item: its type, the length of its content, and its content."""
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
        case _ if not _BY_REPR.isdisjoint(f"{kind.__module__}.{kind.__qualname__}" for kind in type(item).__mro__):
            yield repr(item).encode()
        case _ if (lists := _lists_in(item)) and (
            size := _size(item)
        ):  # its length is the user's code, and may be slow
            for held in lists:
                if len(held) == size:
                    yield from _encoded(held[:_ELEMENTS])


def _lists_in(item: Any) -> list[Any]:
    """Return the lists and tuples among an object's attributes."""
    return [held for held in getattr(item, "__dict__", {}).values() if type(held) in {list, tuple}]


def _size(item: Any) -> int | None:
    try:
        return len(item)
    except Exception:  # noqa: BLE001 - it has no length, or the user's code raises
        return None


# The count of each mark is about this many times the count before, so a billion items have only 100 marks.
_GROWTH = 1.25
# How many items are hashed at once, after the first few.
_BLOCK = 256
# How many digests of the latest blocks are kept: more than are drawn ahead.
_BLOCKS_KEPT = 1024
# The key of the last mark, after all items, instead of a count.
END = -1

# Types whose Python hashes are the same in all processes. Floats are left out, because each NaN has its own hash.
_NUMBERS = frozenset({int, bool, np.int64, np.int32})


def next_mark(count: int) -> int:
    """Return the first count of a mark after ``count``.

    Examples:
        >>> [next_mark(count) for count in (0, 1, 2, 3, 4, 100, 300)]
        [1, 2, 3, 4, 6, 126, 512]
    """
    after = int(count * _GROWTH) + 1
    return after if after < _BLOCK else -(-after // _BLOCK) * _BLOCK


def mark_counts() -> Iterator[int]:
    """Yield the counts of all marks of items that are added one by one, in order."""
    count = 0
    while True:
        yield (count := next_mark(count))


class Digest:
    """The digest of a stream whose items are added in parts; it does not depend on the parts.

    Plain whole numbers, and tuples and lists of them, are hashed by Python: these hashes are the same in all processes
    and take a few nanoseconds. Other items are hashed by their values; objects of unknown types count by their types
    alone.

    Attributes:
        count: How many items were added.
        marks: The stored digests by their counts, in the order of storing.

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
        self._value = 0  # the digest of all items but the waiting ones
        self._waiting: list[Any] = []
        self._blocks: deque[tuple[int, int]] = deque(maxlen=_BLOCKS_KEPT)

    def add(self, items: Sequence[Any]) -> None:
        """Add the next items."""
        self.count += len(items)
        waiting = self._waiting = [*self._waiting, *items] if self._waiting else list(items)
        hashed, start = self.count - len(waiting), 0
        while (size := next_mark(hashed) - hashed if hashed < _BLOCK else _BLOCK) <= len(waiting) - start:
            self._note(_hash_of(waiting[start : start + size]), hashed + size)
            hashed, start = hashed + size, start + size
        del waiting[:start]

    def add_hash(self, value: int, items: int) -> None:
        """Add a group of items by its hash. All groups of the stream must have the same size."""
        self.count += items
        self._note(value, self.count)

    @property
    def value(self) -> int:
        """The digest of all items but the latest ones, which wait to be hashed together."""
        return self._value

    @property
    def until_mark(self) -> int:
        """How many items to add until the next mark."""
        return self._next - self.count

    def end(self) -> None:
        """Store the mark of the stream's end."""
        value = hash((self._value, _hash_of(self._waiting))) if self._waiting else self._value
        self.marks[END] = hash((value, END, self.count))

    def before(self, count: int) -> tuple[int, int] | None:
        """Return the count and the value of the latest known digest at or before ``count``; None if there is none."""
        latest = (block for block in reversed(self._blocks) if block[0] <= count)
        marked = ((at, value) for at, value in reversed(self.marks.items()) if 0 < at <= count)
        return next(latest, None) or next(marked, None)

    def _note(self, hashed: int, count: int) -> None:
        """Record the digest of the first ``count`` items, of which the last ones have this hash."""
        self._value = value = hash((self._value, hashed))
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
    """Return whether all items are plain whole numbers, by the type of their sum, which is faster to check."""
    try:
        with np.errstate(over="ignore"):
            return type(sum(items)) in _NUMBERS
    except Exception:  # noqa: BLE001 - objects of the user's may raise anything where they are added
        return False


def _bytes_hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)
