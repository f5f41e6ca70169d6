"""The iterators of patched loaders: they stand around torch's, and count what the training loop is given."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from ddp_patch.compat.private_torch import RUNNING_ITERATOR, AroundIterator, BatchesOf, is_end
from ddp_patch.errors import DDPPatchError, StreamLengthError
from ddp_patch.loaders.copying import OWN_METHODS
from ddp_patch.loaders.samples import length_of
from ddp_patch.ranks.log import MORE_THAN_A_LOOK, LoggedPass, Progress, State
from ddp_patch.ranks.pass_monitor import PassMonitor
from ddp_patch.sharding.batches import CollateByValue, with_notes
from ddp_patch.sharding.epochs import Passes
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.saved_position import NotedBatch

__all__ = ["CountedIterator", "RepeatedPasses", "WatchedIterator"]


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

    def look_for_end(self) -> None:
        """Find the end if it comes next, though the loop has not asked for it."""
        try:
            self._batches = chain([next(self._batches)], self._batches)
        except StopIteration as end:
            self.stop(end)

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


_NOTHING = object()


class RepeatedPasses(Iterator[Any]):
    """One iterator for all epochs: one pass over a sharded sampler after the other, with the same workers.

    It replaces such an iterator of the given loader, and begins when its first batch is asked for. Workers
    fetch ahead within an epoch, not into the next: so ``set_epoch`` chooses the epoch of the very next batch, and a
    state is about the pass that the training loop is in.

    Args:
        loader: The patched loader, before it has this iterator.
        passes: The passes over it.
        one_pass: The attributes with which a plain DataLoader makes one pass.
    """

    def __init__(self, loader: DataLoader[Any], passes: Passes[Any], one_pass: Mapping[str, Any]) -> None:
        self._passes, self._one_pass = passes, dict(one_pass)
        passes.has_one_iterator = True
        self.begin_anew(loader)

    def begin_anew(self, loader: DataLoader[Any]) -> Self:
        """Leave the running pass and its workers, and make passes of the loader as it is now; return this iterator."""
        kept = {name: value for name, value in vars(loader).items() if name not in OWN_METHODS and value is not self}
        once = {"persistent_workers": loader.num_workers > 0, RUNNING_ITERATOR: None}
        self._attributes = kept | self._one_pass | once
        self._plain: DataLoader[Any] | None = None
        self._running: CountedIterator | None = None
        return self

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Leave the running pass; with persistent workers, torch asks for it."""
        self._running = None

    def __next__(self) -> Any:
        if self._passes.latest is None:  # nothing was drawn yet, or set_epoch() or a state chose what comes
            self._begin()
        if (batch := self._next()) is _NOTHING:
            self._begin()
            batch = self._next()
        if batch is _NOTHING:
            self._require_none()
            raise StopIteration
        self._given += 1
        if self._given == self._length and self._running is not None:
            self._running.look_for_end()  # nobody will ask for it, and len() and states depend on it
        return batch

    def _next(self) -> Any:
        return _NOTHING if self._running is None else next(self._running, _NOTHING)

    def _begin(self) -> None:
        """Begin the upcoming pass."""
        if self._plain is None or self._passes.position is not None or not self._plain.num_workers:
            # Workers know nothing of a state that was restored in the main process.
            self._plain = self._make_plain()
        self._running, self._given, self._length = None, 0, length_of(self._plain, ())
        plain = DataLoader.__iter__(self._plain)
        self._running = CountedIterator(plain, self._passes, begins_ahead=self._plain.num_workers > 0)

    def _make_plain(self) -> DataLoader[Any]:
        """Return a DataLoader of torch's own that makes one pass after the other with the same workers."""
        plain: DataLoader[Any] = DataLoader.__new__(DataLoader)
        vars(plain).update(self._attributes)
        plain.collate_fn = CollateByValue(with_notes(plain))
        # The given loader drew its workers' seed once. Each pass would draw one, from a generator that samplers share.
        plain.generator = torch.Generator()
        return plain

    def _require_none(self) -> None:
        """Raise if len() promises batches and there is none: the given loader would ask forever."""
        if self._length:
            raise StreamLengthError(
                f"A pass gave no batch and its len() said {self._length}, so a loader with one iterator for all epochs "
                "would wait for a batch forever. Correct the sampler's __len__."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_plain": None, "_running": None}
