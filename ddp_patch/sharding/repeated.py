"""The passes of a patched loader that has one iterator for all epochs."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from ddp_patch.compat.private_torch import RUNNING_ITERATOR, KeptIterator
from ddp_patch.errors import StreamLengthError, UnsupportedLoaderError
from ddp_patch.loaders.copying import OWN_METHODS
from ddp_patch.loaders.moving import Mover
from ddp_patch.loaders.samples import length_of
from ddp_patch.sharding.batches import Tally
from ddp_patch.sharding.epoch_sampler import EpochSampler

__all__ = ["RepeatedPasses"]


_NOTHING = object()


class RepeatedPasses(KeptIterator, Iterator[Any]):
    """One iterator for all epochs: one pass over a sharded sampler after the other, with the same workers.

    It replaces such an iterator of the given loader, and begins when its first batch is asked for. Workers
    fetch ahead within an epoch, not into the next: so ``set_epoch`` chooses the epoch of the very next batch, and a
    state is about the pass that the training loop is in.

    Args:
        loader: The patched loader. It is not kept alive, because it holds this iterator.
        sampler: What shards it.
        one_pass: The attributes with which a plain DataLoader makes one pass.
        make_mover: Makes what moves the batches to a device; None if they stay where they are.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: EpochSampler[Any],
        one_pass: Mapping[str, Any],
        make_mover: Callable[[], Mover] | None = None,
    ) -> None:
        self._mover = None if make_mover is None else make_mover()
        self._loader = weakref.ref(loader)
        self._sampler, self._one_pass = sampler, dict(one_pass)
        sampler.repeat()
        self._tally = Tally(sampler, begins_ahead=False)
        self._plain: DataLoader[Any] | None = None
        self._length: int | None = None
        self.drop_pass()

    def drop_pass(self) -> None:
        """Leave the running pass; the next batch is a new one's first."""
        self._running: Iterator[Any] = iter(())
        self._ahead: list[Any] = []
        self._given = 0
        self._tally.begin()

    def begin_anew(self, loader: DataLoader[Any]) -> Self:
        """Leave the running pass and its workers: what a loader wants when it makes itself an iterator."""
        self._plain = None
        self.drop_pass()
        return self

    def __next__(self) -> Any:
        if self._sampler.latest is None:  # nothing was drawn yet, or set_epoch() or a state chose what comes
            self._begin()
        if (batch := self._draw()) is _NOTHING:
            self._begin()
            batch = self._draw()
        if batch is _NOTHING:
            self._require_none()
            raise StopIteration
        self._given += 1
        batch = self._tally.count(batch)
        if self._given == self._length:
            # Find the end now: nobody will ask for it, and len() and states depend on whether the pass has ended.
            if (following := self._draw()) is _NOTHING:
                self._tally.end()
            else:
                self._ahead.append(following)
        return batch if self._mover is None else self._mover.moved(batch)

    def _draw(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._running, _NOTHING)

    def _begin(self) -> None:
        """Begin the upcoming pass."""
        if self._plain is None or self._sampler.position is not None or not self._plain.num_workers:
            # Workers know nothing of a state that was restored in the main process.
            self._plain = self._make_plain()
        self.drop_pass()
        self._length = length_of(self._plain, ())
        self._running = DataLoader.__iter__(self._plain)

    def _make_plain(self) -> DataLoader[Any]:
        """Return a DataLoader of torch's own that makes one pass after the other with the same workers."""
        loader = self._loader()
        if loader is None:
            raise UnsupportedLoaderError(
                "A copy of a patched loader cannot be iterated after the loader itself is gone: its one iterator for "
                "all epochs belonged to the loader. Keep what patch_dataloader_to_ddp() returned and pass that."
            )
        kept = {name: value for name, value in vars(loader).items() if name not in OWN_METHODS and value is not self}
        # The given loader drew its workers' seed once. Each pass would draw one, from a generator that samplers share.
        once = {"persistent_workers": loader.num_workers > 0, "generator": torch.Generator(), RUNNING_ITERATOR: None}
        plain: DataLoader[Any] = DataLoader.__new__(DataLoader)
        vars(plain).update(kept | self._one_pass | once)
        vars(plain)["collate_fn"] = self._sampler.noting(plain.collate_fn)
        return plain

    def _require_none(self) -> None:
        """Raise if len() promises batches and there is none: the given loader would ask forever."""
        if self._length:
            raise StreamLengthError(
                f"A pass gave no batch and its len() said {self._length}, so a loader with one iterator for all epochs "
                "would wait for a batch forever. Correct the sampler's __len__."
            )

    def __getstate__(self) -> dict[str, Any]:
        begun: dict[str, Any] = {"_plain": None, "_running": iter(()), "_ahead": []}
        return {**vars(self), **begun, "_loader": self._loader()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._loader = weakref.ref(state["_loader"])
