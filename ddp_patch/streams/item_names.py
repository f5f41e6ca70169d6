"""The names of a stream's items, alike in every process, and the digests of names by which readers are compared.

Each pass has two digests: of its items' names, which are the same in every process; and of their numbers, which may
differ between the ranks of a harmless program.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import torch

from ddp_patch.compat.private_packages import SAMPLE_KEY
from ddp_patch.loaders.columns import last_parts
from ddp_patch.orders.digest import END, Digest, few_numbers
from ddp_patch.streams.reports import COUNTS, NAMES, NUMBERS, Report

T = TypeVar("T")

# The places of the counts at which digests are reported.
_PLACES: Final = {count: place for place, count in enumerate(COUNTS)}
# How many names are hashed at once, which takes less time than one by one.
_AT_ONCE: Final = 64
# The identity of an item that has none.
NOTHING: Final = (b"", b"")
# A longer list counts by its length and this many elements; a longer text, by its length and pieces of this size.
_ELEMENTS, _PIECE = 64, 512
_EMPTY: Final = {dict, list, tuple}
_WHOLE: Final = (int, np.integer, np.bool_)
_TIMES: Final = (date, time, timedelta, np.datetime64, np.timedelta64)
# A path counts by this many last parts, because each rank may keep copies of the files in a folder of its own.
_PATH_PARTS: Final = 2
_SCHEME: Final = 12  # A URL has its colon by then.


# What was found in an item: its names, its numbers, and other values that may tell it apart.
_Found: TypeAlias = tuple[list[bytes], list[bytes], list[Any]]


class ItemNames:
    """The identity of each item of one stream: values in it that are the same in every process.

    An item's names are all texts, bytes and paths in it: in mappings, lists, tuples and dataclasses, too. Whole numbers
    count apart from names, because augmentation makes numbers, too, such as the place where an image was cut. A mapping
    with the key ``__key__`` counts by that key alone.

    Args:
        may_move: Whether the files may lie elsewhere another time, as in the folder of a job. Then an absolute path
            counts relative to the folder of the stream's first path; else by its last two parts, because ranks may have
            files of their own.

    Examples:
        >>> names = ItemNames()
        >>> names.identity_of({"x": torch.rand(3), "file": "/data/cats/7.png", "cut at": 3})
        (b'cats/7.png', b'3')
        >>> names.identity_of({"__key__": "7", "label": 3}), names.identity_of(7), names.identity_of(None)
        ((b'7', b''), (b'', b'7'), (b'', b''))
        >>> moved = ItemNames(may_move=True)
        >>> moved.name_of("/job-1/cats/1.png"), moved.name_of("/job-1/dogs/1.png"), moved.name_of(7)
        (b'1.png', b'../dogs/1.png', b'7')
        >>> moved.name_of(torch.rand(3)), moved.name_of([])
        (None, b'')
    """

    def __init__(self, *, may_move: bool = False) -> None:
        self._may_move = may_move
        self._folder = ""  # of the first path

    def identity_of(self, item: Any) -> tuple[bytes, bytes]:
        """Return an item's names, and its whole numbers; if it has neither, the values of its tensors and floats.

        Of lists of whole numbers, and of tensors, 64 elements count.
        """
        kind = type(item)
        if kind is int:
            return b"", b"%d" % item
        if kind is str and len(item) < _PIECE:
            return self._path(item).encode("utf-8", "surrogatepass"), b""
        if (found := self._found_in(item)) is None:
            return NOTHING
        names, numbers, others = found
        if names or numbers or not others:
            return b"\0".join(names), b"\0".join(numbers)
        return b"", b"\0".join(map(_bytes_of, others))

    def name_of(self, item: Any) -> bytes | None:
        """Return an item's names, or else its whole numbers; None if it has neither, like a tensor of floats."""
        if item is None or (type(item) in _EMPTY and not item):
            return b""
        if (found := self._found_in(item)) is None:
            return None
        parts = found[0] or found[1]
        return b"\0".join(parts) if parts else None

    def _found_in(self, item: Any) -> _Found | None:
        found: _Found = [], [], []
        try:
            self._find(item, found)
        except Exception:  # noqa: BLE001 - an object of the user's may refuse to be looked into
            return None
        return found

    def _find(self, value: Any, found: _Found) -> None:  # noqa: C901 - one flat table of types
        """Add the names and numbers in a value. The code checks frequent types first."""
        kind, (names, numbers, others) = type(value), found
        if value is None:
            return
        if kind is str and len(value) < _PIECE:
            names.append(self._path(value).encode("utf-8", "surrogatepass"))
        elif kind is int:
            numbers.append(b"%d" % value)
        elif kind is float:
            others.append(value)
        elif kind is torch.Tensor or kind is np.ndarray:
            self._find_in_array(value, found)
        elif kind is dict or isinstance(value, Mapping):
            # Sorted, because the order of a mapping may depend on the process, as the order of a set does.
            for key in [SAMPLE_KEY] if SAMPLE_KEY in value else sorted(value, key=str):
                self._find(value[key], found)
        elif kind is tuple or isinstance(value, list | tuple):
            self._find_in_list(value, found)
        elif isinstance(value, torch.Tensor | np.ndarray):
            self._find_in_array(value, found)
        elif isinstance(value, float | complex | np.inexact):
            others.append(value)
        elif isinstance(value, str):
            names.append(_pieces(str.__str__(value)).encode("utf-8", "surrogatepass"))
        elif isinstance(value, bytes | bytearray):
            names.append(bytes(_pieces(value)))
        elif isinstance(value, os.PathLike):
            names.append(os.fsencode(self._path(os.fsdecode(value), is_path=True)))
        elif isinstance(value, _WHOLE):
            numbers.append(b"%d" % int(value))
        elif isinstance(value, _TIMES):
            numbers.append(str(value).encode())
        elif is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                self._find(getattr(value, field.name), found)

    def _find_in_array(self, value: Any, found: _Found) -> None:
        """Add a tensor or array: of whole numbers its numbers, and a single whole number as a plain one."""
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or value.layout != torch.strided or value.is_nested:
                return
            is_whole = not (value.is_floating_point() or value.is_complex())
        else:
            if value.dtype.hasobject or value.dtype.kind in "USVmM":
                self._find_in_list(value.tolist() if value.ndim else [value.item()], found)
                return
            is_whole = value.dtype.kind in "iub"
        if not is_whole:
            found[2].append(value)
        elif not self._may_move or not value.ndim:  # masking items anew invalidates no state
            found[1].append(few_numbers(value) if value.ndim else b"%d" % int(value))

    def _find_in_list(self, value: Sequence[Any], found: _Found) -> None:
        """Add the elements of a list; of a long list its length, and evenly spread elements."""
        length = len(value)
        some = value[:: -(-length // _ELEMENTS)] if length > _ELEMENTS else value
        if length and {int}.issuperset(map(type, some)):  # as tokens are
            found[1].append(repr((length, *some)).encode())
            return
        if length > _ELEMENTS and type(some[0]) is str:
            found[0].append(b"%d" % length)
        for each in some:
            self._find(each, found)

    def _path(self, text: str, *, is_path: bool = False) -> str:
        """Return the parts of an absolute path, a URL or a path object that count; any other text as it is."""
        is_absolute = text.startswith(os.sep)
        if not self._may_move:
            return last_parts(text, _PATH_PARTS) if is_absolute or is_path or "://" in text[:_SCHEME] else text
        if not is_absolute:
            return text
        folder = self._folder = self._folder or text[: text.rfind(os.sep) + 1]
        ups = 0
        while not text.startswith(folder):
            folder, ups = folder[: folder.rfind(os.sep, 0, -1) + 1], ups + 1
        return "../" * ups + text[len(folder) :]


def _bytes_of(value: Any) -> bytes:
    return few_numbers(value) if isinstance(value, torch.Tensor | np.ndarray) else repr(value).encode()


def _pieces(text: Any) -> Any:
    """Return a text or bytes; of a long value, the beginning, the middle, the end and the length."""
    if len(text) <= 4 * _PIECE:
        return text
    middle, length = len(text) // 2, str(len(text))
    pieces = text[:_PIECE] + text[middle : middle + _PIECE] + text[-_PIECE:]
    return pieces + (length if isinstance(text, str) else length.encode())


def marked(items: Iterator[T], report: Report) -> Iterator[T]:
    """Yield what a reader reads from its first item on, and report the digests of names and numbers at some counts.

    Examples:
        >>> from ddp_patch.streams.reports import SharedReports
        >>> report = SharedReports(readers=1).report(1, reader=0)
        >>> list(marked(iter("ab"), report)), int(report["marks"])
        (['a', 'b'], 2)
    """
    number, wanted, identity_of = report["number"], 1, ItemNames().identity_of
    digests, waiting = (Digest(), Digest()), list[tuple[bytes, bytes]]()
    first, is_named, are_apart = None, False, False
    report["marks"] = 0

    def add() -> None:
        for digest, names in zip(digests, zip(*waiting, strict=True), strict=False):
            digest.add(names)
        waiting.clear()

    for item in items:
        identity = identity_of(item)
        waiting.append(identity)
        if not are_apart:
            first = first or identity
            is_named, are_apart = is_named or identity != NOTHING, identity != first
        if len(waiting) == wanted:
            add()
            place = _PLACES.get(digests[0].count)
            if place is not None and report["number"] == number:  # otherwise, a later pass uses the memory
                report[NAMES][place], report[NUMBERS][place] = (digest.value for digest in digests)
                report["identities"] = is_named + are_apart
                report["marks"] = place + 1
            wanted = min(_AT_ONCE, digests[0].until_mark)
        yield item
    add()
    if report["number"] == number:
        for kind, digest in zip((NAMES, NUMBERS), digests, strict=True):
            digest.end()
            report[kind][-1] = digest.marks[END]
        report["identities"] = is_named + are_apart
