"""What the main process and the readers of a stream report to each other, in memory that the processes share.

A reader is a process that iterates the user's dataset: each of the loader's workers, or the main process if there are
no workers. A reader begins the pass that the main process has begun here, yields its part of this rank's items, and
reports its findings. The main process knows a pass by the readers' reports, and by the notes that travel with their
batches.

| call | caller, process | what it gives |
| --- | --- | --- |
| ``SharedReports.begin`` | ``StreamPasses``, main | nothing: a pass begins, over an epoch |
| ``SharedReports.begun`` | ``StreamReader``, reader; ``StreamPasses``, main | the number of a pass, and its epoch |
| ``SharedReports.report`` | ``StreamReader``, reader | the reader's ``Report`` of a pass, to write into |
| ``SharedReports.reported`` | ``StreamSource``, main; ``ReaderPass``, reader | all readers' reports: ``ReportedPass`` |
| ``StreamReader.collate`` | torch, reader | a batch; with a note, in a ``NotedBatch`` |
| ``StreamSource.keep`` | ``Delivery``, main | nothing: the note counts, because the loop is given its batch |

A worker is started with a copy of the main process's ``StreamReader``, which knows where a pass resumes. Ends and
digests do not travel with batches: a worker finds its end after its last batch, and torch then sends nothing of ours.
Looking one item ahead would delay each batch until the next item is there. Iterators that are not torch's carry no
notes either.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from time import sleep
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import numpy as np
import torch

from ddp_patch.orders.digest import END, mark_counts
from ddp_patch.positions_and_padding import Part, Schedule
from ddp_patch.sharding.saved_state import RECOGNISED_BY, NotedBatch, Position, StreamSnapshot, StreamStart
from ddp_patch.sharding.values_as_text import from_text
from ddp_patch.streams.error_texts import turns_differ

if TYPE_CHECKING:
    from numpy.typing import NDArray


# How a reader reads: the one stream that all read, or a part of its own.
STREAM, PARTS = range(2)
# When the dataset's own state was taken: where the pass began, or where it ended.
BEGUN, ENDED = range(2)
# Of which items a reader reports digests: the first 1, 2, 4, ... These counts are enough for 10**12 items.
COUNTS: Final = list(islice(mark_counts(), 128))
# The digests of names, and those of numbers.
NAMES, NUMBERS = "names", "numbers"

# What one reader reports of a pass. All numbers are -1 until they are known.
REPORT: Final = np.dtype(
    [
        ("number", np.int64),  # the pass
        ("way", np.int64),  # STREAM or PARTS; unknown if the dataset splits itself over all ranks
        ("part", np.int64),  # which part the reader reads
        ("length", np.int64),  # how many items the stream, or the part, has
        ("spent_ms", np.int64),  # how long the dataset took to give these
        ("batches", np.int64),  # how many batches the reader makes, if the dataset splits itself over all ranks
        ("seen", np.int64),  # how many of the first items are described
        ("starts", np.int64, (RECOGNISED_BY, 2)),  # the first one, the first two, ...: the hashes of a StreamStart
        ("state_sizes", np.int64, (2, 2)),  # of the dataset's own state, BEGUN and ENDED: its bytes, and their check
        ("identities", np.int64),  # how many identities the items have: none, one, or more than one, which is 2
        ("marks", np.int64),  # how many digests there are
        (NAMES, np.int64, (len(COUNTS) + 1,)),  # the digests of names at the first counts; in the end that of all
        (NUMBERS, np.int64, (len(COUNTS) + 1,)),  # the digests of numbers
        ("check", np.int64),  # of all numbers above
    ]
)


def check_of(data: "bytes | NDArray[np.int64]") -> int:
    """Return a check of some bytes, or of an array of numbers."""
    return crc32(data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes())


def blank_reports(readers: int) -> "NDArray[np.void]":
    """Return the reports of readers that have reported nothing."""
    return np.full((readers, REPORT.itemsize // 8), -1, np.int64).view(REPORT).reshape(readers)


@dataclass(frozen=True, slots=True, eq=False)
class ReportedPass:
    """The readers' reports of a pass at the moment when this value was made.

    Attributes:
        reports: A record for each reader, in the order of their turns.
        states: The memory of the dataset's own states, as text: of each reader, BEGUN and ENDED. A state counts only
            while its check is the reported one, because a later pass may store another state.

    Examples:
        >>> reports = blank_reports(2)
        >>> reports["way"], reports["part"], reports["length"] = PARTS, [1, 0], [7, -1]
        >>> reported = ReportedPass(reports)
        >>> reported.is_in_parts, reported.lengths, reported.turns
        (True, [7, None], [1, 0])
        >>> reported.parts(5, taken=[3, 2])
        [Part(taken=2, length=7, worker=1), Part(taken=3, length=None, worker=0)]
    """

    reports: "NDArray[np.void]"
    states: "NDArray[np.uint8] | None" = None

    def column(self, name: str) -> list[Any]:
        """Return one of the numbers that each reader reports; -1 where it is not known."""
        found: list[Any] = self.reports[name].tolist()
        return found

    # ---- how the stream is read, and how long it is ----

    @property
    def ways(self) -> set[int]:
        """How the readers read, as far as they have reported it: STREAM, PARTS or both."""
        return {*self.column("way")} - {-1}

    @property
    def is_in_parts(self) -> bool:
        """Whether several readers read a part each; False while that is unknown."""
        return len(self.reports) > 1 and self.ways == {PARTS}

    @property
    def lengths(self) -> list[int | None]:
        """How many items each reader found; None before it came to the end."""
        return [length if length >= 0 else None for length in self.column("length")]

    @property
    def lengths_found(self) -> Sequence[int | None]:
        """How many items the stream, or each reader's part, has; None if no reader came to the end."""
        return self.lengths if self.is_in_parts else [next((each for each in self.lengths if each is not None), None)]

    @property
    def spent_s(self) -> float:
        """How many seconds the dataset took, at most, to give a reader all of its items."""
        return float(max(self.column("spent_ms"))) / 1000

    @property
    def turns(self) -> list[int]:
        """The part of each reader: the next one after the part of the reader before."""
        readers = len(self.reports)
        known = ((part - reader) % readers for reader, part in enumerate(self.column("part")) if part >= 0)
        first = next(known, 0)
        return [(first + reader) % readers for reader in range(readers)]

    def parts(self, taken_of_all: int, taken: Sequence[int]) -> Sequence[Part]:
        """Return the parts of the pass: one stream, or the readers' parts, beginning with the part whose turn is first.

        Args:
            taken_of_all: How many items of the stream were taken before the pass.
            taken: How many items were taken of each part; a list of any other length if items were not counted by part.
        """
        if not self.is_in_parts:
            return [Part(taken_of_all, self.lengths_found[0])]
        of_each = taken if len(taken) == len(self.reports) else [0] * len(self.reports)
        return [Part(of_each[part], length, part) for part, length in zip(self.turns, self.lengths, strict=True)]

    # ---- which items were read ----

    @property
    def names_nothing(self) -> bool:
        """Whether items were read, and nothing names any of them."""
        return bool(max(self.column("marks")) > 0 and max(self.column("identities")) < 1)

    @property
    def names_all_alike(self) -> bool:
        """Whether the whole of a stream, or of a part, was read, and all of its items have one name."""
        return bool(max(self.column("length")) > 1 and max(self.column("identities")) == 1)

    def _digests(self, of: str) -> list[tuple[list[int], int | None]]:
        """Return each reader's digests at counts, and the digest of all that it read; None before its end."""
        return [
            (digests[: max(0, count)], digests[-1] if length >= 0 and digests[-1] != -1 else None)  # no hash is -1
            for digests, count, length in zip(*map(self.column, (of, "marks", "length")), strict=True)
        ]

    def digests(self, of: str = NAMES) -> dict[int, int]:
        """Return the digests of all readers' items, by their counts; none before the readers' way of reading is known.

        Readers of one stream have the same digests. Of parts, the digest at a count is the hash of all parts' digests.
        If a part ended before a count, the digest at its end counts; no longer part has this digest.
        """
        if len(self.ways) != 1:
            return {}
        digests = [
            marks if end is None else marks + [end] * (len(COUNTS) + 1 - len(marks)) for marks, end in self._digests(of)
        ]
        values = max(digests, key=len) if self.ways == {STREAM} else map(hash, zip(*digests, strict=False))
        return dict(zip((*COUNTS, END), values, strict=False))

    def readers_differ(self, of: str = NAMES) -> tuple[int, int] | None:
        """Return where readers of one stream differ: within how many items, and which reader differs from reader 0."""
        if self.ways != {STREAM}:
            return None
        (first, first_end), *others = self._digests(of)
        for reader, (marks, end) in enumerate(others, 1):
            differ = (count for count, one, other in zip(COUNTS, first, marks, strict=False) if one != other)
            if (count := next(differ, None)) is not None:
                return count, reader
            if None not in {first_end, end} and first_end != end:
                return int(self.column("length")[0]), reader
        return None

    def start_of(self, reader: int, read: int) -> StreamStart | None:
        """Return the description of a reader's first items, of which ``read`` were read; None if there is none."""
        if (seen := min(RECOGNISED_BY, read, self.column("seen")[reader])) < 1:
            return None
        value, whole = (None if part < 0 else part for part in self.column("starts")[reader][seen - 1])
        return StreamStart(seen, value, whole)

    def state_of(self, reader: int, when: int) -> Sequence[Any]:
        """Return the dataset's own state in a reader, BEGUN or ENDED, as the only element; empty if there is none."""
        size, check = self.column("state_sizes")[reader][when]
        if size < 0 or self.states is None:
            return ()
        state = self.states[reader, when, :size].tobytes()
        return (from_text(state.decode()),) if check_of(state) == check else ()


# ---- the memory ----


# The reports of this many passes are kept, because several iterators may live at once.
_PASSES_KEPT = 32
# The largest state of a dataset, in bytes, that is stored. A stream with a larger state is read again.
LARGEST = 64 * 1024

# What the main process writes: its latest pass, and which epoch each pass is over, with a check.
_PASSES = np.dtype([("latest", np.int64), ("epochs", np.int64, (_PASSES_KEPT, 2))])

# Another process may see a later write before an earlier one. So a value counts only if its check fits. Otherwise, the
# value is read again, at most this many times, and then counts as unknown.
_READS = 100


class Report:
    """One reader's report of a pass, in the reader's place of the shared memory.

    Args:
        row: The memory of the report's numbers.
        states: The memory of the dataset's own states: BEGUN and ENDED.
    """

    def __init__(self, row: "NDArray[np.void]", states: "NDArray[np.uint8]") -> None:
        self._row, self._states = row, states

    def __getitem__(self, name: str) -> Any:
        return self._row[0][name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Write a value. Earlier writes into the report's arrays count from now on, too."""
        self._row[0][name] = value
        self._row[0]["check"] = check_of(self._row.view(np.int64)[:-1])

    def store_state(self, when: int, state: bytes) -> None:
        """Write the dataset's own state, as text, BEGUN or ENDED."""
        self._states[when, : len(state)] = np.frombuffer(state, np.uint8)
        sizes = self["state_sizes"].copy()
        sizes[when] = len(state), check_of(state)
        self["state_sizes"] = sizes


class SharedReports:
    """The memory in which the main process begins passes, and readers report of them.

    Args:
        readers: How many processes read the dataset.

    Examples:
        >>> shared = SharedReports(readers=2)
        >>> shared.begin(1, epoch=0)
        >>> shared.begun(), shared.begun(2)
        ((1, 0), None)
        >>> shared.report(1, reader=0)["length"] = 7
        >>> shared.reported(1).lengths, shared.reported(2).lengths
        ([7, None], [None, None])
    """

    def __init__(self, readers: int) -> None:
        self.readers: int = readers
        size = _PASSES.itemsize + _PASSES_KEPT * readers * REPORT.itemsize + readers * 2 * LARGEST
        self._memory = torch.full((size,), 255, dtype=torch.uint8, device="cpu")  # every number is -1
        self._map()

    def _map(self) -> None:
        """Lay records over the memory, which a copy does not share yet."""
        self._memory.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        memory, begun = self._memory.numpy(), _PASSES.itemsize
        reported = begun + _PASSES_KEPT * self.readers * REPORT.itemsize
        (self._begun,) = memory[:begun].view(_PASSES)
        self._reports = memory[begun:reported].view(REPORT).reshape(_PASSES_KEPT, self.readers)
        # The dataset's own states, as text, of the latest pass.
        self._states = memory[reported:].reshape(self.readers, 2, LARGEST)

    def __getstate__(self) -> dict[str, Any]:
        return {"readers": self.readers, "_memory": self._memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._map()

    def begin(self, number: int, epoch: int) -> None:
        """Begin pass ``number``, over an epoch."""
        self._begun["epochs"][number % _PASSES_KEPT] = epoch, check_of(np.array([number, epoch]))
        self._begun["latest"] = number

    def begun(self, number: int | None = None) -> tuple[int, int] | None:
        """Return the number and the epoch of a pass, by default of the latest one; None if the pass has not begun."""
        number = int(self._begun["latest"]) if number is None else number
        for _ in range(_READS):
            epoch, check = self._begun["epochs"][number % _PASSES_KEPT].tolist()
            if check == check_of(np.array([number, epoch])):
                return number, epoch
            if check < 0:  # no pass was written
                return None
            sleep(0)
        return None

    def report(self, number: int, reader: int) -> Report:
        """Return a reader's report of pass ``number``, to write into: a blank one at first."""
        row = self._reports[number % _PASSES_KEPT, reader : reader + 1]  # which the pass 32 passes before had
        report = Report(row, self._states[reader])
        if report["number"] != number:
            row.view(np.int64)[:] = -1
            report["number"] = number
        return report

    def reported(self, number: int) -> ReportedPass:
        """Return what readers have reported of pass ``number`` by now."""
        shared, reports = self._reports[number % _PASSES_KEPT], blank_reports(self.readers)
        for _ in range(_READS):
            found = shared.copy()
            checked = np.array(
                [check_of(row[:-1]) == row[-1] for row in found.view(np.int64).reshape(self.readers, -1)]
            )
            are_of_pass = found["number"] == number
            if (checked | ~are_of_pass).all():
                break
            sleep(0)
        is_known = checked & are_of_pass
        reports[is_known] = found[is_known]
        return ReportedPass(reports, self._states)


# ---- positions ----


def position_of_parts(
    position: Position,
    start: Position,
    batches: int,
    schedule: Schedule,
    reported: ReportedPass,
    notes: Mapping[int, Iterable[NotedBatch]],
    name: str,
) -> Position:
    """Return the position after some batches of one stream, which is one part, or of parts that readers read.

    Args:
        position: The position by the number of batches alone.
        start: Where the pass began.
        batches: How many batches; at least one.
        schedule: The batches of the pass.
        reported: The readers' reports of the pass.
        notes: The latest notes of each reader.
        name: The class of the dataset.

    Raises:
        StateError: Ranks have taken different numbers of batches of a part, so no state can describe the position.
    """
    in_parts, readers = reported.is_in_parts, len(reported.reports)
    if in_parts and not schedule.are_alike(batches):
        raise turns_differ(name, batches)
    turns = reported.turns if in_parts else [0]
    now, made = schedule.taken(batches), schedule.made(batches)
    began, taken, known = start.states.streams or [StreamSnapshot()], list[int](), list[StreamSnapshot]()
    for part in range(len(turns)):
        turn = turns.index(part)
        reader = turn if in_parts else (batches - 1) % readers  # of one stream, readers give the batches in turn
        snapshot = began[part % len(began)]
        if made[turn]:
            states = [note.state for note in notes.get(reader, ()) if note.batches == made[turn]]
            snapshot = StreamSnapshot(
                reported.start_of(reader, now[turn]) or snapshot.first,
                tuple(from_text(state.decode()) for state in states),
                reported.state_of(reader, BEGUN) or snapshot.initial_state,
            )
        taken.append(now[turn])
        known.append(snapshot)
    # The reader after the latest one. Every rank knows this reader, even if its end is still unknown.
    upcoming = turns[(schedule.record(batches - 1).part + 1) % len(turns)]
    return replace(position, taken=taken, turn=upcoming, states=replace(position.states, streams=known))
