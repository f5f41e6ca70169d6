"""What autopatch leaves alone: loaders used within ``unpatched()``, or named to ``leave_alone``."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from ddp_patch.errors import AlreadyPatchedError
from ddp_patch.loaders.recognition import require_loader, sharded_by
from ddp_patch.shares.epochs import EpochSampler

__all__ = ["is_left_alone", "is_off", "leave_alone", "spare", "unpatched"]

L = TypeVar("L", bound=DataLoader[Any])

_off: ContextVar[bool] = ContextVar("ddp_patch.unpatched", default=False)
_LEFT_ALONE = "_ddp_patch_left_alone"  # the loader's attribute; a copy of the loader has it, too


@contextmanager
def unpatched() -> Iterator[None]:
    """Have ``autopatch`` leave alone, in this thread, what is used or made while this is entered.

    A loader that is made here stays as it is when it is used later, too. A loader that was patched before stays
    patched. Where ``autopatch`` is not on, this does nothing. It is a decorator, too.

    Examples:
        >>> from ddp_patch import autopatch
        >>> loader = DataLoader(range(4))
        >>> with autopatch(rank=0, num_replicas=2), unpatched():
        ...     len(loader)
        4
    """
    before = _off.set(True)
    try:
        yield
    finally:
        _off.reset(before)


def is_off() -> bool:
    """Tell whether ``unpatched()`` is entered, or something asks on behalf of this package."""
    return _off.get()


def leave_alone(loader: L) -> L:
    """Have ``autopatch`` leave one loader alone for good, as for a validation that rank 0 makes alone.

    Args:
        loader: A loader that was not used yet.

    Returns:
        The same loader.

    Raises:
        NotALoaderError: ``loader`` is no DataLoader.
        AlreadyPatchedError: The loader was patched before.

    Examples:
        >>> from ddp_patch import autopatch
        >>> train, val = DataLoader(range(4)), leave_alone(DataLoader(range(4)))
        >>> with autopatch(rank=0, num_replicas=2):
        ...     len(train), len(val)
        (2, 4)
    """
    require_loader("leave_alone", loader, wrappers=False)
    if isinstance(found := sharded_by(loader), EpochSampler):
        raise AlreadyPatchedError(
            f"leave_alone was given a {type(loader).__name__} that gives rank {found.rank} of {found.num_replicas} its "
            "share already: it was patched when it was first used, or before. Call leave_alone(loader) right after it "
            "is made."
        )
    spare(loader)
    return loader


def spare(loader: DataLoader[Any]) -> None:
    """Mark a loader as one to leave alone."""
    vars(loader)[_LEFT_ALONE] = True


def is_left_alone(loader: DataLoader[Any]) -> bool:
    """Tell whether a loader is marked so."""
    return _LEFT_ALONE in vars(loader)
