"""What the readers of a stream report of a pass, in memory that the processes of a rank share: ends, and digests.

No note can carry it: a worker finds its end after its last batch, and torch then sends nothing of ours; to look one
item ahead would hold each batch back until the next item is there. Nor do notes travel through iterators that are not
torch's. Ranks compare two digests of each pass: of its items' names, which are the same in every process; and of their
numbers, which harmless programs may make otherwise on each rank.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from itertools import islice
from time import sleep
from typing import TYPE_CHECKING, Any, Final, TypeVar
from zlib import crc32

import numpy as np
import torch

from ddp_patch.compat.private_packages import SAMPLE_KEY
from ddp_patch.loaders.columns import last_parts
from ddp_patch.orders.digest import END, Digest, few_numbers, mark_counts
from ddp_patch.sharding.saved_state import RECOGNISED_BY
from ddp_patch.sharding.state_text import from_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BEGUN",
    "COUNTS",
    "ENDED",
    "LARGEST",
    "PARTS",
    "STREAM",
    "ItemNames",
    "Report",
    "SharedWorkerState",
    "marked",
]

T = TypeVar("T")

# The latest passes are known: iterators may live side by side.
_PASSES_KEPT = 32
# A reader makes at most so many marks, at these counts: enough for 10**12 items.
COUNTS = list(islice(mark_counts(), 128))
_PLACES = {count: place for place, count in enumerate(COUNTS)}
# So many names are hashed at once, which takes less time than one by one.
_AT_ONCE = 64
# The largest state of a dataset, in bytes, that travels. A stream with larger ones is read again.
LARGEST = 64 * 1024

# How a reader reads: the one stream that all read, or a part of its own.
STREAM, PARTS = range(2)
# When the dataset's own state was taken: where nobody had read it in the pass, or somebody had to its end.
BEGUN, ENDED = range(2)

# What a reader reports of a pass. All numbers are -1 until they are known.
_REPORT = np.dtype(
    [
        ("number", np.int64),  # the pass
        ("way", np.int64),  # STREAM or PARTS
        ("part", np.int64),  # whose part it reads
        ("length", np.int64),  # how many items it found by its end
        ("spent_ms", np.int64),  # how long the dataset took to give these
        ("batches", np.int64),  # where the dataset splits itself: how many it made in all
        ("seen", np.int64),  # how many of its first items are described
        ("starts", np.int64, (RECOGNISED_BY, 2)),  # the first one, the first two, ...: the hashes of a StreamStart
        ("state_sizes", np.int64, (2, 2)),  # in bytes: of the dataset's own state when it began, and at the end; checks
        ("is_told", np.int64),  # 1 if something is told of one of the items, 2 if that told them apart
        ("marks", np.int64),  # how many marks it has made of them
        ("values", np.int64, (len(COUNTS),)),  # these: the digests of their names at the first counts
        ("numbers", np.int64, (len(COUNTS),)),  # and those of their numbers
        ("read", np.int64),  # how many items it has read in all
        ("end", np.int64),  # the digest of all their names
        ("numbers_end", np.int64),  # and of all their numbers
        ("check", np.int64),  # of all the others
    ]
)
# What the main process tells: its latest pass, and which epoch each pass is over, with a check.
_PASSES = np.dtype([("latest", np.int64), ("epochs", np.int64, (_PASSES_KEPT, 2))])

# A processor may let another process see what was written last before what was written first. So whoever reads counts
# nothing whose check is another: it reads again, so often, and goes without until next time.
_READS = 100


def _check(data: Any) -> int:
    """Return a check of some bytes, or of an array of numbers."""
    return crc32(data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes())


class Report:
    """What one reader reports of a pass, in its own place of the shared memory.

    Args:
        row: That place.
    """

    def __init__(self, row: "NDArray[np.void]") -> None:
        self._row = row

    def __getitem__(self, name: str) -> Any:
        return self._row[0][name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Write a value; what was written into others since counts from now on, too."""
        self._row[0][name] = value
        self._row[0]["check"] = _check(self._row.view(np.int64)[:-1])


class SharedWorkerState:
    """What the main process and its workers tell each other, in one piece of shared memory.

    Args:
        readers: How many workers read the dataset; 1 where the main process does.

    Examples:
        >>> shared = SharedWorkerState(readers=2)
        >>> shared.begin(1, epoch=0)
        >>> shared.report(1, worker=0)["length"] = 7
        >>> shared.lengths(1), shared.lengths(2)
        ([7, None], [None, None])
    """

    def __init__(self, readers: int) -> None:
        self.readers: int = readers
        size = _PASSES.itemsize + _PASSES_KEPT * readers * _REPORT.itemsize + readers * 2 * LARGEST
        self._memory = torch.full((size,), 255, dtype=torch.uint8, device="cpu")  # every number is -1
        self._map()

    def _map(self) -> None:
        """Lay records over the memory; that of a copy is not shared yet."""
        self._memory.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        memory, begun = self._memory.numpy(), _PASSES.itemsize
        reported = begun + _PASSES_KEPT * self.readers * _REPORT.itemsize
        (self._begun,) = memory[:begun].view(_PASSES)
        self._reports = memory[begun:reported].view(_REPORT).reshape(_PASSES_KEPT, self.readers)
        # The dataset's own states, as text, of the latest pass.
        self._states = memory[reported:].reshape(self.readers, 2, LARGEST)

    def __getstate__(self) -> dict[str, Any]:
        return {"readers": self.readers, "_memory": self._memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map()

    @property
    def latest_pass(self) -> int:
        """The number of the latest pass that was begun; -1 before the first."""
        return int(self._begun["latest"])

    def begin(self, number: int, epoch: int) -> None:
        """Write which epoch pass ``number`` is over."""
        self._begun["epochs"][number % _PASSES_KEPT] = epoch, _check(np.array([number, epoch]))
        self._begun["latest"] = number

    def epoch_of(self, number: int) -> int | None:
        """Return which epoch pass ``number`` is over; None if no pass was begun."""
        for _ in range(_READS):
            epoch, check = self._begun["epochs"][number % _PASSES_KEPT].tolist()
            if check == _check(np.array([number, epoch])):
                return int(epoch)
            if check < 0:  # none was written
                return None
            sleep(0)
        return None

    def report(self, number: int, worker: int) -> Report:
        """Return what a reader reports of pass ``number``, to write into it: a blank one at first.

        A worker may begin it before the pass has begun.
        """
        row = self._reports[number % _PASSES_KEPT, worker : worker + 1]  # shared with those of 32 passes before it
        report = Report(row)
        if report["number"] != number:
            row.view(np.int64)[:] = -1
            report["number"] = number
        return report

    def keep_state(self, report: Report, worker: int, when: int, state: bytes) -> None:
        """Write the dataset's own state, as text, when the pass that a reader reports was BEGUN, or had ENDED."""
        self._states[worker, when, : len(state)] = np.frombuffer(state, np.uint8)
        kept = report["state_sizes"].copy()
        kept[when] = len(state), _check(state)
        report["state_sizes"] = kept

    # ---- what the readers of a pass have reported of it so far, in the order of their turns ----

    def reported(self, number: int, what: str) -> list[Any]:
        """Return one of the values that each reader reports of pass ``number``; -1 where it is not known."""
        slot = self._reports[number % _PASSES_KEPT]
        for _ in range(_READS):
            rows = slot.copy()
            numbers = rows.view(np.int64).reshape(self.readers, -1)
            checked = np.array([_check(row[:-1]) == row[-1] for row in numbers])
            if (checked | (rows["number"] != number)).all():
                break
            sleep(0)
        is_known = checked & (rows["number"] == number)
        found: list[Any] = np.where(is_known.reshape(-1, *[1] * (rows[what].ndim - 1)), rows[what], -1).tolist()
        return found

    def ways(self, number: int) -> set[int]:
        """Return how the readers read in a pass, as far as they know it: STREAM, PARTS or both."""
        return {*self.reported(number, "way")} - {-1}

    def lengths(self, number: int) -> list[int | None]:
        """Return how many items each reader found in a pass; None before it came to the end."""
        return [length if length >= 0 else None for length in self.reported(number, "length")]

    def states(self, number: int, when: int) -> list[Sequence[Any]]:
        """Return each dataset's own state in the latest pass, when it was BEGUN or had ENDED, as the only element."""
        sizes = [each[when] for each in self.reported(number, "state_sizes")]
        kept = [
            (self._states[at, when, :size].tobytes() if size >= 0 else b"", check)
            for at, (size, check) in enumerate(sizes)
        ]
        return [(from_text(state.decode()),) if state and _check(state) == check else () for state, check in kept]


def marked(items: Iterator[T], report: Report) -> Iterator[T]:
    """Pass on what a reader reads from its first item on, and mark in its report what comes: names, and numbers apart.

    Examples:
        >>> shared = SharedWorkerState(readers=1)
        >>> report = shared.report(1, worker=0)
        >>> list(marked(iter("ab"), report)), int(report["read"])
        (['a', 'b'], 2)
    """
    number, wanted = report["number"], 1
    of_names, of_numbers, names, numbers = Digest(), Digest(), list[bytes](), list[bytes]()
    first, is_told, are_apart = None, False, False
    identity_of = ItemNames().identity_of
    report["marks"] = 0
    for item in items:
        identity = identity_of(item)
        names.append(identity[0])
        numbers.append(identity[1])
        if not are_apart:
            first = first or identity
            is_told, are_apart = is_told or identity != NOTHING, identity != first
        if len(names) == wanted:
            _add(of_names, names)
            _add(of_numbers, numbers)
            place = _PLACES.get(of_names.count)
            if place is not None and report["number"] == number:  # else a later pass has the memory
                report["values"][place], report["numbers"][place] = of_names.value, of_numbers.value
                report["is_told"] = is_told + are_apart
                report["marks"] = place + 1
            wanted = min(_AT_ONCE, of_names.until_mark)
        yield item
    for digest, rest in ((of_names, names), (of_numbers, numbers)):
        _add(digest, rest)
        digest.end()
    if report["number"] == number:
        report["end"], report["numbers_end"] = of_names.marks[END], of_numbers.marks[END]
        report["is_told"] = is_told + are_apart
        report["read"] = of_names.count


def _add(digest: Digest, parts: list[bytes]) -> None:
    """Add what is told of some items to a digest, and forget it."""
    if parts:
        digest.add_names(parts)
        parts.clear()


# ---- identity ----

# What says nothing of an item.
NOTHING: Final = (b"", b"")
# A list that is longer counts by its length and so many of its elements, a text by its length and pieces of this size.
_ELEMENTS, _PIECE = 64, 512
_EMPTY: Final = {dict, list, tuple}
_WHOLE: Final = (int, np.integer, np.bool_)
_TIMES: Final = (date, time, timedelta, np.datetime64, np.timedelta64)
# By so many last parts a path counts, of ranks that may keep copies of the files in folders of their own.
_PATH_PARTS: Final = 2
_SCHEME: Final = 12  # A URL has its colon by then.


class _Found:
    """What was found in an item: its names, its numbers, and what else may tell it from others."""

    __slots__ = ("names", "numbers", "others")

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.numbers: list[bytes] = []
        self.others: list[Any] = []


class ItemNames:
    """Names the items of one stream: says which sample an item is, by what is the same in every process.

    Its names are all texts, bytes and paths in it: in mappings, lists, tuples and dataclasses, too. They count apart
    from its whole numbers, which augmentation makes, too: it may tell where it cut an image. A mapping with the key
    ``__key__`` counts by that key alone.

    Args:
        may_move: Whether the files may lie elsewhere another time, as in the folder of a job: paths from the root on
            then count as they are seen from the folder of the first one. Of two ranks, each may have files of its own:
            without this, a path counts by its last two parts.

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
        """Return an item's names, and its whole numbers; where it has neither, what its tensors and floats hold.

        Of lists of whole numbers, and of tensors, 64 elements count.
        """
        kind = type(item)
        if kind is int:
            return b"", b"%d" % item
        if kind is str and len(item) < _PIECE:
            return self._path(item).encode("utf-8", "surrogatepass"), b""
        if (found := self._found_in(item)) is None:
            return NOTHING
        if found.names or found.numbers or not found.others:
            return b"\0".join(found.names), b"\0".join(found.numbers)
        return b"", b"\0".join(map(_bytes_of, found.others))

    def name_of(self, item: Any) -> bytes | None:
        """Return an item's names, or its whole numbers if it has none; None if it has neither, as tensors of floats."""
        if item is None or (type(item) in _EMPTY and not item):
            return b""
        if (found := self._found_in(item)) is None:
            return None
        parts = found.names or found.numbers
        return b"\0".join(parts) if parts else None

    def _found_in(self, item: Any) -> _Found | None:
        found = _Found()
        try:
            self._find(item, found)
        except Exception:  # noqa: BLE001 - an object of the user's, which nothing else may ever look into
            return None
        return found

    def _find(self, value: Any, found: _Found) -> None:  # noqa: C901 - one flat table of types
        """Add what is in a value, in an order that is the same in every process: frequent types first."""
        kind = type(value)
        if value is None:
            return
        if kind is str and len(value) < _PIECE:
            found.names.append(self._path(value).encode("utf-8", "surrogatepass"))
        elif kind is int:
            found.numbers.append(b"%d" % value)
        elif kind is float:
            found.others.append(value)
        elif kind is torch.Tensor or kind is np.ndarray:
            self._find_in_array(value, found)
        elif kind is dict or isinstance(value, Mapping):
            # In an order of their own: a mapping's may depend on the process, as that of a set does.
            for key in [SAMPLE_KEY] if SAMPLE_KEY in value else sorted(value, key=str):
                self._find(value[key], found)
        elif kind is tuple or isinstance(value, list | tuple):
            self._find_in_list(value, found)
        elif isinstance(value, torch.Tensor | np.ndarray):
            self._find_in_array(value, found)
        elif isinstance(value, float | complex | np.inexact):
            found.others.append(value)
        elif isinstance(value, str):
            found.names.append(_pieces(str.__str__(value)).encode("utf-8", "surrogatepass"))
        elif isinstance(value, bytes | bytearray):
            found.names.append(bytes(_pieces(value)))
        elif isinstance(value, os.PathLike):
            found.names.append(os.fsencode(self._path(os.fsdecode(value), is_path=True)))
        elif isinstance(value, _WHOLE):
            found.numbers.append(b"%d" % int(value))
        elif isinstance(value, _TIMES):
            found.numbers.append(str(value).encode())
        elif is_dataclass(value) and not isinstance(value, type):
            for field in fields(value):
                self._find(getattr(value, field.name), found)

    def _find_in_array(self, value: Any, found: _Found) -> None:
        """Add a tensor or array: one of whole numbers by its numbers, a single one as a plain one."""
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
            found.others.append(value)
        elif not self._may_move or not value.ndim:  # a state is not refused for what was masked
            found.numbers.append(few_numbers(value) if value.ndim else b"%d" % int(value))

    def _find_in_list(self, value: Sequence[Any], found: _Found) -> None:
        """Add what is in a list; only evenly spread elements of a long one, which counts by its length then, too."""
        length = len(value)
        some = value[:: -(-length // _ELEMENTS)] if length > _ELEMENTS else value
        if length and {int}.issuperset(map(type, some)):  # as tokens are
            found.numbers.append(repr((length, *some)).encode())
            return
        if length > _ELEMENTS and type(some[0]) is str:
            found.names.append(b"%d" % length)
        for each in some:
            self._find(each, found)

    def _path(self, text: str, *, is_path: bool = False) -> str:
        """Return what counts of a path: from the root on, of a URL, or of what is no text; any other text as it is."""
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
    """Return a text, or bytes; of long ones the beginning, the middle and the end, and how long they are."""
    if len(text) <= 4 * _PIECE:
        return text
    middle, length = len(text) // 2, str(len(text))
    pieces = text[:_PIECE] + text[middle : middle + _PIECE] + text[-_PIECE:]
    return pieces + (length if isinstance(text, str) else length.encode())
