"""Log the passes over a loader that is sharded already: nothing of it is changed, and it is compared like any other."""

from collections.abc import Callable
from typing import Any

from ddp_patch.errors import DDPPatchError
from ddp_patch.ranks.log import MORE_THAN_A_LOOK, LoggedPass, Progress
from ddp_patch.ranks.pass_monitor import PassMonitor
from ddp_patch.ranks.records import State

__all__ = ["WatchedPasses"]


class _Given:
    """What the loop was given of one pass.

    Args:
        is_own: Whether the number of batches is this rank's own.
    """

    def __init__(self, *, is_own: bool) -> None:
        self._is_own = is_own
        self.batches: int = 0
        self.state: State = State.RUNNING

    def progress(self) -> Progress:
        """Return how far the pass has come."""
        return Progress(self.batches, self.batches, self.state, self._is_own)


class WatchedPasses:
    """Counts the batches that one iterator of a loader gives.

    Args:
        monitor: Compares the loader's passes with the other ranks'.
        is_open_ended: Whether nobody knows the end before it comes.
    """

    def __init__(self, monitor: PassMonitor, *, is_open_ended: bool) -> None:
        self._monitor, self._is_open_ended = monitor, is_open_ended and not monitor.has_own_lengths
        self.begin()

    def begin(self) -> None:
        """Record that a pass begins, as soon as a batch is asked for."""
        self._logged: LoggedPass | None = None
        self._given, self._next_comparison = _Given(is_own=self._monitor.has_own_lengths), 2

    def next(self, read: Callable[[], Any]) -> Any:
        """Return the iterator's next batch, and record it.

        Args:
            read: Reads it.
        """
        if self._logged is None:
            self._logged = self._monitor.begin(0, "0", self._given.progress, None)
        if (logged := self._logged) is None:  # the process group is gone
            return read()
        try:
            batch = read()
        except StopIteration:
            self._end(logged)
            raise
        except Exception as error:
            if not isinstance(error, DDPPatchError | Warning):
                self._given.state = State.FAILED
            raise
        self._count(logged, batch)
        return batch

    def _end(self, logged: LoggedPass) -> None:
        self._given.state = State.ENDED
        self._monitor.compare(at_end=True)
        if self._is_open_ended:
            self._monitor.end_steps(logged, self._given.batches)

    def _count(self, logged: LoggedPass, batch: Any) -> None:
        given = self._given
        given.batches += 1
        if logged.is_told:  # another pass has begun since
            logged.tell(given.progress())
        if given.batches <= MORE_THAN_A_LOOK:
            self._monitor.goes_on(logged)
        self._monitor.note_batch(batch, logged)
        if self._is_open_ended:
            self._monitor.give_step(logged, given.batches)
        if given.batches >= self._next_comparison:
            self._next_comparison = self._monitor.next_comparison(given.batches)
            self._monitor.compare()
