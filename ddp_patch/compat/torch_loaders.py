"""How torch iterates a loader, and torchdata, whose classes are torch's in all but name.

Seen in torch 2.4.0, 2.13.0 and 2.15.0, and in torchdata 0.11.0.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import DataLoader

from ddp_patch.compat.missing import lacking, private
from ddp_patch.compat.names import full_name
from ddp_patch.errors import TorchVersionError

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _BaseDataLoaderIter
else:
    _BaseDataLoaderIter = private("torch.utils.data.dataloader._BaseDataLoaderIter", "Counting a loader's batches")

__all__ = [
    "MAKE_ITERATOR",
    "RUNNING_ITERATOR",
    "KeptIterator",
    "RunningLoader",
    "WrappedIterator",
    "count_batches",
    "forget_iterator",
    "has_own_iteration",
    "has_own_iterators",
    "is_torch_batch_sampler",
    "move_batches",
    "pinned_by",
    "show_loaders",
    "torchdata_batch_sampler",
]

# A loader that runs. A copy must not share one. torch has no public name for what `iter(loader)` returns.
RunningLoader: Final = _BaseDataLoaderIter

# Where a loader with persistent workers keeps it. There is no public way to start again.
RUNNING_ITERATOR: Final = "_iterator"

# The method by which a loader makes it, for `iter(loader)` and for Ultralytics' `reset()`. There is no public one.
MAKE_ITERATOR: Final = "_get_iterator"

# Both are called by torch. A torch that called others would make us miscount, so they are looked for at once.
private(f"torch.utils.data.dataloader.DataLoader.{MAKE_ITERATOR}", "Counting a loader's batches")
private("torch.utils.data.dataloader._BaseDataLoaderIter._reset", "Counting a loader's batches")


def has_own_iterators(loader_kind: type) -> bool:
    """Return whether a class makes other iterators than torch's."""
    return getattr(loader_kind, MAKE_ITERATOR, None) is not getattr(DataLoader, MAKE_ITERATOR)


class KeptIterator:
    """Base of what a loader keeps as its running iterator: with persistent workers, torch resets it for each pass."""

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        self.drop_pass()

    def drop_pass(self) -> None:
        """Leave the running pass."""
        raise NotImplementedError


class WrappedIterator(KeptIterator):
    """Base of wrappers of the iterator that a loader's class makes.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        # Its class's, because the loader itself may have an attribute of that name.
        self.wrapped: Any = getattr(type(loader), MAKE_ITERATOR)(loader)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        super()._reset(loader)
        self.wrapped._reset(loader)


class _Counted:
    """Comes before the class of a running iterator, and reports to a tally what the iterator gives."""

    tally: Any

    def __next__(self) -> Any:
        try:
            batch = super().__next__()  # type: ignore[misc]  # of torch's class, which comes next
        except StopIteration:
            self.tally.end()
            raise
        except BaseException as error:
            self.tally.fail(error)
            raise
        self.tally.count()
        return batch

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)  # type: ignore[misc]  # as above
        self.tally.begin()


class _Moved:
    """Comes before the class of an iterator, and lets a mover put what it gives on a device."""

    mover: Any

    def __next__(self) -> Any:
        return self.mover.next(super().__next__)  # type: ignore[misc]  # of the class that comes next

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)  # type: ignore[misc]  # as above
        self.mover.begin()


@cache
def _before(kind: type, first: type) -> type:
    """Return a class that is what another one is, but for the methods of ``first``."""
    return type(kind.__name__, (first, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def move_batches(iterator: Any, mover: Any) -> None:
    """Let a mover put on a device what an iterator gives, and reset the mover when the iterator is reset.

    As in ``count_batches``, the iterator gets a derived class.

    Raises:
        TypeError: Its class cannot be subclassed, such as a generator's.
    """
    kind: Any = type(iterator)
    vars(iterator)["mover"] = mover
    iterator.__class__ = _before(kind, _Moved)


def count_batches(iterator: Any, tally: Any) -> None:
    """Report to a tally when an iterator gives a batch, fails to, is reset for another pass, or has no more.

    torch counts in the iterator itself, which is gone after a ``break``, and calls none of our code. So the iterator
    gets a class that is derived from its own; no wrapper has to refer to it. Iterators that are not torch's, nor around
    one of torch's, stay as they are.
    """
    if isinstance(iterator, RunningLoader | WrappedIterator) and not isinstance(iterator, _Counted):
        vars(iterator)["tally"] = tally
        kind: Any = type(iterator)
        iterator.__class__ = _before(kind, _Counted)


# The function that torch's class has for `repr()` before it gets one of ours: torch gives it none of its own.
_PLAIN_REPR: Final = DataLoader.__repr__


def show_loaders(text_of: Callable[[DataLoader[Any]], str | None]) -> None:
    """Make ``repr()`` of a loader show what ``text_of`` returns; if that is None, the usual text.

    Python looks the method up in the class, and a patched loader keeps its class. So torch's class gets one; a class
    derived from it that has its own keeps that.
    """

    def text(loader: DataLoader[Any]) -> str:
        found = text_of(loader)
        kind = type(loader)
        return _PLAIN_REPR(loader) if found is None else f"<{kind.__module__}.{kind.__qualname__}: {found}>"

    if DataLoader.__repr__ is _PLAIN_REPR:
        DataLoader.__repr__ = text  # type: ignore[assignment, method-assign]  # it takes loaders only


def pinned_by(iterator: Any, batch: Any) -> Any:
    """Return a batch in pinned memory if a loader's iterator gives its batches so.

    If this torch does not say so, the batch is not pinned: its copy to a device takes longer, and is the same.
    """
    if not getattr(iterator, "_pin_memory", False):
        return batch
    try:
        pin_memory = private("torch.utils.data._utils.pin_memory.pin_memory", "Pinning a batch")
    except TorchVersionError:
        return batch
    return pin_memory(batch, getattr(iterator, "_pin_memory_device", None))


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Make the next pass start new workers: persistent ones do not see what changed in the main process.

    Raises:
        TorchVersionError: This torch keeps them elsewhere.
    """
    if not hasattr(loader, RUNNING_ITERATOR):
        name = f"torch.utils.data.dataloader.DataLoader.{RUNNING_ITERATOR}"
        raise lacking(name, "Starting new workers", "Or use persistent_workers=False.")
    setattr(loader, RUNNING_ITERATOR, None)


_TORCHDATA: Final = "torchdata.stateful_dataloader"
_TORCH_BATCH_SAMPLERS: Final = {"torch.utils.data.sampler.BatchSampler", f"{_TORCHDATA}.sampler.BatchSampler"}


def is_torch_batch_sampler(kind: type) -> bool:
    """Return whether a class is torch's own ``BatchSampler``, and no subclass, which may make batches another way."""
    return full_name(kind) in _TORCH_BATCH_SAMPLERS


def torchdata_batch_sampler(loader_kind: type) -> type[Any] | None:
    """Return torchdata's ``BatchSampler`` if a loader's class is a ``StatefulDataLoader``, which needs that one.

    With torch's own it could not tell its position in an epoch. torchdata is looked up, not imported.
    """
    if f"{_TORCHDATA}.stateful_dataloader" not in {base.__module__ for base in loader_kind.__mro__}:
        return None
    found: type[Any] = sys.modules[f"{_TORCHDATA}.sampler"].BatchSampler
    return found


def has_own_iteration(loader_kind: type) -> bool:
    """Return whether a loader's class has its own iteration, other than torch's and torchdata's."""
    iterates: type = next((base for base in loader_kind.__mro__ if "__iter__" in vars(base)), DataLoader)
    return iterates is not DataLoader and not iterates.__module__.startswith(f"{_TORCHDATA}.")
