"""What the main process and the readers of a stream report to each other, in memory that the processes share.

A reader is a process that iterates the user's dataset, each of the loader's workers or else the main process: it begins
the pass that the main process has begun here, gives its part of this rank's items, and reports what it found. What the
main process knows of a pass are the readers' reports, and the notes that travel with their batches.

| call | caller, process | what it gives |
| --- | --- | --- |
| ``SharedReports.begin`` | ``StreamPasses``, main | nothing: a pass begins, over an epoch |
| ``SharedReports.begun`` | ``StreamReader``, reader; ``StreamPasses``, main | the number of a pass, and its epoch |
| ``SharedReports.report`` | ``ReaderPass``, reader | the reader's ``Report`` of a pass, to write into |
| ``SharedReports.reported`` | ``StreamSource``, main; ``ReaderPass``, reader | all readers' reports: ``ReportedPass`` |
| ``StreamReader.collate`` | torch, reader | a batch; with a note, in a ``NotedBatch`` |
| ``StreamSource.keep`` | ``Delivery``, main | nothing: the note counts, because the loop is given its batch |

A worker is started with a copy of the main process's ``StreamReader``, which knows where a pass resumes. Ends and
digests do not travel with batches: a worker finds its end after its last batch, and torch then sends nothing of ours.
To look one item ahead would hold each batch back until the next item is there. Nor do notes travel through iterators
that are not torch's.
"""

from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ddp_patch.streams.reported_pass import REPORT, ReportedPass, blank_reports, check_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


# The reports of so many passes are kept: iterators may live side by side.
_PASSES_KEPT = 32
# The largest state of a dataset, in bytes, that is stored. A stream with larger ones is read again.
LARGEST = 64 * 1024

# What the main process writes: its latest pass, and which epoch each pass is over, with a check.
_PASSES = np.dtype([("latest", np.int64), ("epochs", np.int64, (_PASSES_KEPT, 2))])

# A processor may let another process see what was written last before what was written first. So a value counts only
# with its check. Until then it is read again, so many times, and is unknown after that.
_READS = 100


class Report:
    """What one reader reports of a pass, in its own place of the shared memory.

    Args:
        row: Where its numbers lie.
        states: Where the dataset's own states lie: BEGUN and ENDED.
    """

    def __init__(self, row: "NDArray[np.void]", states: "NDArray[np.uint8]") -> None:
        self._row, self._states = row, states

    def __getitem__(self, name: str) -> Any:
        return self._row[0][name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Write a value; what was written into its arrays before counts from now on, too."""
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
        """Lay records over the memory; that of a copy is not shared yet."""
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
        """Return the number of a pass, by default the latest one, and its epoch; None if it has not begun."""
        number = int(self._begun["latest"]) if number is None else number
        for _ in range(_READS):
            epoch, check = self._begun["epochs"][number % _PASSES_KEPT].tolist()
            if check == check_of(np.array([number, epoch])):
                return number, epoch
            if check < 0:  # none was written
                return None
            sleep(0)
        return None

    def report(self, number: int, reader: int) -> Report:
        """Return a reader's report of pass ``number``, to write into: a blank one at first."""
        row = self._reports[number % _PASSES_KEPT, reader : reader + 1]  # which the pass of 32 before it had
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
