"""The iterators of patched loaders: they stand around torch's, and count what the training loop is given."""

from typing import Any

from ddp_patch.compat.private_torch import AroundIterator, BatchesOf, is_end
from ddp_patch.errors import DDPPatchError
from ddp_patch.ranks.log import MORE_THAN_A_LOOK, LoggedPass, Progress
from ddp_patch.ranks.pass_monitor import PassMonitor
from ddp_patch.ranks.records import State
from ddp_patch.sharding.epochs import Passes
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.saved_position import NotedBatch

__all__ = ["CountedIterator", "WatchedIterator"]


def _is_failure(error: BaseException) -> bool:
    """Return whether an error leaves doubt about what is lost, as one of this package's does not."""
    return isinstance(error, Exception) and not (is_end(error) or isinstance(error, DDPPatchError | Warning))


class CountedIterator(AroundIterator):
    """Counts the batches that the loop is given of each pass, in the pass itself, which outlives it.

    Args:
        wrapped: The iterator that the loader's class made.
        passes: The passes over the loader.
        batches_of: As in ``AroundIterator``.
        begins_ahead: Whether a pass has begun before its first batch is asked for, as workers begin it; else the first
            batch begins it.
        reaches_loop: Whether the loop is given what this gives. A loader with its own iteration may fetch ahead.
    """

    def __init__(
        self,
        wrapped: Any,
        passes: Passes[Any],
        batches_of: BatchesOf | None = None,
        *,
        begins_ahead: bool,
        reaches_loop: bool = True,
    ) -> None:
        self._passes, self._begins_ahead, self._reaches_loop = passes, begins_ahead, reaches_loop
        super().__init__(wrapped, batches_of)

    def begin(self) -> None:
        """Begin a pass, which ``wrapped`` has begun."""
        super().begin()
        self._pass: Pass[Any] | None = None
        self._has_pass = self._has_failed = False
        # What makes other batches of its own notes these.
        self._notes_samples = self._batches_of is None and self._passes.monitor.compares_samples
        if self._begins_ahead:
            self._find_pass()

    def count(self, given: Any) -> Any:
        """Record that a batch is given, and return it alone. It is called for each, so it calls little itself."""
        if not self._has_pass:
            self._find_pass()
        note, batch = given if type(given) is NotedBatch else (None, given)
        if (current := self._pass) is None:
            return batch
        if self._has_failed:  # if the loader went on, some batch was skipped: nobody knows the position
            current.lose_count()
        if self._notes_samples:
            current.note_samples(batch)
        current.deliver(note)
        if (latest := self._passes.latest) is None:
            self._passes.note_running(current)
        elif latest is not current:
            latest.note_interleaved()
        return batch

    def stop(self, reason: BaseException) -> None:
        """Record that the loop sees the end, or an error instead of a batch."""
        self._find_pass()
        has_ended = is_end(reason)
        self._has_failed = self._has_failed or not has_ended
        if self._pass is None:
            return
        if has_ended and self._reaches_loop and not self._has_failed:
            self._pass.note_stopped()
        elif _is_failure(reason):
            self._pass.note_failed()

    def _find_pass(self) -> None:
        """Remember the pass, once: it is the latest one now, and another iterator may begin another."""
        if self._has_pass:
            return
        self._has_pass, self._pass = True, self._passes.latest
        if self._pass is not None and self._reaches_loop:
            self._pass.note_loop()


class _WatchedPass:
    """A pass over a loader that is sharded already, which is compared with the other ranks' like any other.

    Args:
        monitor: Compares the loader's passes.
        is_open_ended: Whether nobody knows the end before it comes.
    """

    def __init__(self, monitor: PassMonitor, *, is_open_ended: bool) -> None:
        self._monitor, self._is_open_ended = monitor, is_open_ended and not monitor.has_own_lengths
        self._batches, self._next_comparison = 0, 2
        self._state = State.RUNNING
        self._logged: LoggedPass | None = monitor.begin(0, "0", self._progress, None)

    def _progress(self) -> Progress:
        return Progress(self._batches, self._batches, self._state, self._monitor.has_own_lengths)

    def deliver(self, batch: Any) -> None:
        """Record that the loop is given a batch."""
        if (logged := self._logged) is None:  # the process group is gone
            return
        self._batches += 1
        if logged.is_told:  # another pass has begun since
            logged.tell(self._progress())
        if self._batches <= MORE_THAN_A_LOOK:
            self._monitor.goes_on(logged)
        self._monitor.note_batch(batch, logged)
        if self._is_open_ended:
            self._monitor.give_step(logged, self._batches)
        if self._batches >= self._next_comparison:
            self._next_comparison = self._monitor.next_comparison(self._batches)
            self._monitor.compare()

    def note_failed(self) -> None:
        """Record that the loop was given an error of the loader's."""
        self._state = State.FAILED

    def note_end_seen(self) -> None:
        """Record that the loop has seen the end."""
        if self._logged is not None:
            self._state = State.ENDED
            self._monitor.compare(at_end=True)
            if self._is_open_ended:
                self._monitor.end_steps(self._logged, self._batches)


class WatchedIterator(AroundIterator):
    """Counts the batches of a loader that is sharded already: nothing else of it is changed.

    Args:
        wrapped: The iterator that the loader's class made.
        monitor: Compares the loader's passes with the other ranks'.
        is_open_ended: Whether nobody knows the end before it comes.
    """

    _pass: _WatchedPass

    def __init__(self, wrapped: Any, monitor: PassMonitor, *, is_open_ended: bool) -> None:
        self._monitor, self._is_open_ended = monitor, is_open_ended
        super().__init__(wrapped)

    def begin(self) -> None:
        """Begin a pass, which counts as soon as a batch is asked for."""
        super().begin()
        self._has_pass = False

    def __next__(self) -> Any:
        if not self._has_pass:
            self._has_pass = True
            self._pass = _WatchedPass(self._monitor, is_open_ended=self._is_open_ended)
        return super().__next__()

    def count(self, given: Any) -> Any:
        """Record that a batch is given, and return it."""
        self._pass.deliver(given)
        return given

    def stop(self, reason: BaseException) -> None:
        """Record that the loop sees the end, or an error instead of a batch."""
        if is_end(reason):
            self._pass.note_end_seen()
        elif _is_failure(reason):
            self._pass.note_failed()
