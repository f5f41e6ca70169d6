"""One iterator for all epochs, as timm's and Ultralytics' loaders keep one: one pass after the other."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from ddp_patch.compat.private_torch import RUNNING_ITERATOR
from ddp_patch.errors import StreamLengthError
from ddp_patch.loaders.copying import OWN_METHODS
from ddp_patch.loaders.samples import length_of
from ddp_patch.sharding.batches import CollateByValue, CountedIterator, with_notes
from ddp_patch.sharding.epochs import Passes

__all__ = ["RepeatedPasses"]


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
