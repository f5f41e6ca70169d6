"""The iterators around torch's iterators: each records the batches, the end and the errors that the loop gets."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Self
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader

from ddp_patch.compat.private_torch import (
    MAKE_ITERATOR,
    RUNNING_ITERATOR,
    AroundIterator,
    BatchesOf,
    forget_iterator,
    is_end,
)
from ddp_patch.errors import DDPPatchError
from ddp_patch.loaders.copying import OWN_METHODS
from ddp_patch.loaders.nested_samplers import length_of
from ddp_patch.loaders.overlap import NotedIndices
from ddp_patch.ranks.pass_monitor import PassMonitor
from ddp_patch.sharding.batches_by_value import by_value
from ddp_patch.sharding.item_sources import Foreign, ItemSource
from ddp_patch.sharding.loader_passes import Passes
from ddp_patch.sharding.passes import Delivery, Items, Pass
from ddp_patch.sharding.saved_state import NotedBatch


def _is_failure(error: BaseException) -> bool:
    """Return whether an error may lose samples. An error of this package loses none."""
    return isinstance(error, Exception) and not (is_end(error) or isinstance(error, DDPPatchError | Warning))


class CountedIterator(AroundIterator):
    """Counts the batches of each pass that the loop gets. The pass keeps the count, and outlives this iterator.

    Args:
        wrapped: The iterator that the loader's class made.
        passes: The passes over the loader.
        batches_of: As in ``AroundIterator``.
        begins_ahead: Whether workers begin a pass before its first batch is requested; otherwise, the first batch
            begins the pass.
        reaches_loop: Whether each batch goes to the loop at once. A loader with its own iteration may prefetch.
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
        """Begin a pass that ``wrapped`` has begun."""
        super().begin()
        self._pass: Pass[Any] | None = None
        self._has_pass = self._has_failed = False
        # If ranks send each other batches, each rank notes the samples of its own batches.
        self._notes_samples = self._batches_of is None and self._passes.monitor.rules.parts is not None
        if self._begins_ahead:
            self._find_pass()

    def __next__(self) -> Any:
        if self._has_pass:
            return super().__next__()
        with self._passes.epochs.counting(self._reaches_loop):
            return super().__next__()

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin the next pass with the same, persistent workers; torch calls this method."""
        with self._passes.epochs.counting(self._reaches_loop):
            super()._reset(loader, first_iter)

    def count(self, given: Any) -> Any:
        """Record that the loop gets a batch, and return it without its note. This method is called in each step."""
        if not self._has_pass:
            self._find_pass()
        note, batch = (given, given.batch) if type(given) is NotedBatch else (None, given)
        if (current := self._pass) is None:
            return batch
        if self._has_failed:  # if the loader went on, some batch was skipped, so the position is unknown
            current.delivery.lose_count()
        if self._notes_samples:
            current.delivery.note_samples(batch)
        current.delivery.add(note)
        if (latest := self._passes.epochs.latest) is None:
            self._passes.epochs.go_on(current)
        elif latest is not current:
            latest.delivery.interleave()
        return batch

    def stop(self, reason: BaseException) -> None:
        """Record that the loop sees the end, or an error instead of a batch."""
        self._find_pass()
        has_ended = is_end(reason)
        self._has_failed = self._has_failed or not has_ended
        if self._pass is None:
            return
        if has_ended and self._reaches_loop and not self._has_failed:
            self._pass.delivery.end()
        elif _is_failure(reason):
            self._pass.delivery.fail()

    def look_for_end(self) -> None:
        """Record the end of the pass if no batch is left, before the loop asks for another batch."""
        try:
            self._batches = chain([next(self._batches)], self._batches)
        except StopIteration as end:
            self.stop(end)

    def _find_pass(self) -> None:
        """Store the latest pass, once, because another iterator may begin another pass later."""
        if self._has_pass:
            return
        self._has_pass, self._pass = True, self._passes.epochs.latest
        if self._pass is not None and self._reaches_loop:
            self._pass.delivery.begin_loop()


class EmptyIterator(CountedIterator):
    """The iterator of a pass that resumes after the last batch of its epoch. The next pass starts the workers.

    Args:
        loader: The loader.
        passes: The passes over the loader.
        reaches_loop: As in ``CountedIterator``.
    """

    def __init__(self, loader: DataLoader[Any], passes: Passes[Any], *, reaches_loop: bool) -> None:
        self._loader = loader
        with patch.multiple(loader, num_workers=0, timeout=0):
            made = getattr(DataLoader, MAKE_ITERATOR)(loader)
        super().__init__(made, passes, begins_ahead=False, reaches_loop=reaches_loop)

    def stop(self, reason: BaseException) -> None:
        """Record that the loop sees the end. A loader with persistent workers then makes another iterator."""
        forget_iterator(self._loader)
        super().stop(reason)


class WatchedIterator(AroundIterator):
    """Counts the batches of a loader that was sharded already, and compares its passes with the other ranks' passes.

    Nothing else of the loader changes.

    Args:
        wrapped: The iterator that the loader's class made.
        monitor: Compares the loader's passes.
        noted: The sampler that notes the loader's indices; None if there is none.
        is_open_ended: Whether the number of batches is unknown before the end.
    """

    def __init__(
        self, wrapped: Any, monitor: PassMonitor, noted: NotedIndices | None = None, *, is_open_ended: bool
    ) -> None:
        self._monitor, self._noted = monitor, noted
        has_own_length = monitor.rules.lengths == "any"
        self._source: ItemSource[Any] = Foreign(is_open_ended=is_open_ended, has_own_length=has_own_length)
        super().__init__(wrapped)

    def begin(self) -> None:
        """Begin a pass, which counts as soon as a batch is requested."""
        super().begin()
        self._delivery: Delivery | None = None

    def __next__(self) -> Any:
        if self._delivery is None:
            self._delivery = Delivery(self._monitor, Items(self._source))
            if self._noted is None:
                self._delivery.begin_pass(0)
            else:
                self._delivery.begin_pass(self._noted.epoch, sketch=self._noted.sketch)
            self._delivery.begin_loop()
        return super().__next__()

    def count(self, given: Any) -> Any:
        """Record that the loop gets a batch, and return the batch."""
        if self._delivery is not None:
            if self._noted is None:
                self._delivery.note_samples(given)
            self._delivery.add()
        return given

    def stop(self, reason: BaseException) -> None:
        """Record that the loop sees the end, or an error instead of a batch."""
        if self._delivery is not None and is_end(reason):
            self._delivery.end()
        elif self._delivery is not None and _is_failure(reason):
            self._delivery.fail()


_NOTHING = object()


class RepeatedPasses(Iterator[Any]):
    """One iterator for all epochs: one pass over a sharded sampler after the other, with the same workers.

    This iterator replaces the given loader's iterator for all epochs, and begins when its first batch is requested.
    Workers fetch ahead within an epoch, not into the next one. So ``set_epoch`` chooses the epoch of the very next
    batch, and a state is about the pass that the training loop is in.

    Args:
        loader: The patched loader, before it has this iterator.
        passes: The passes over the loader.
        one_pass: The attributes with which a plain DataLoader makes one pass.
    """

    def __init__(self, loader: DataLoader[Any], passes: Passes[Any], one_pass: Mapping[str, Any]) -> None:
        self._passes, self._one_pass = passes, dict(one_pass)
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
        """Leave the running pass; torch calls this method if workers are persistent."""
        self._running = None

    def __next__(self) -> Any:
        if self._passes.epochs.latest is None:  # nothing was drawn yet, or set_epoch() or a state has chosen what comes
            self._begin()
        if (batch := self._next()) is _NOTHING:
            self._begin()
            batch = self._next()
        if batch is _NOTHING:
            raise StopIteration
        current = self._passes.epochs.latest
        if current is not None and current.delivery.batches == self._length and self._running is not None:
            self._running.look_for_end()  # no loop will ask for the end, on which len() and states depend
        return batch

    def _next(self) -> Any:
        return _NOTHING if self._running is None else next(self._running, _NOTHING)

    def _begin(self) -> None:
        """Begin the upcoming pass."""
        if self._plain is None or self._passes.epochs.position is not None or not self._plain.num_workers:
            # Workers know nothing of a state that was restored in the main process.
            self._plain = self._make_plain()
        self._running, self._length = None, length_of(self._plain, ())
        with self._passes.epochs.counting():
            plain = DataLoader.__iter__(self._plain)
        self._running = CountedIterator(plain, self._passes, begins_ahead=self._plain.num_workers > 0)

    def _make_plain(self) -> DataLoader[Any]:
        """Return a DataLoader of torch's own that makes one pass after the other with the same workers."""
        plain: DataLoader[Any] = DataLoader.__new__(DataLoader)
        vars(plain).update(self._attributes)
        plain.collate_fn = by_value(self._passes.noting(plain.collate_fn))
        # The given loader drew its workers' seed once. Here each pass would draw one, from a generator that samplers
        # may share.
        plain.generator = torch.Generator()
        return plain

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_plain": None, "_running": None}
