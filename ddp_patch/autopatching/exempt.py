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
    """Keep ``autopatch`` from patching loaders that are used or made inside: a context manager and decorator.

    A loader that is made inside is not patched later either. A loader that was patched before stays patched. It applies
    to this thread. Without ``autopatch``, it does nothing.

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
    """Return whether this runs within ``unpatched()``, or within this package's own calls."""
    return _off.get()


def leave_alone(loader: L) -> L:
    """Keep ``autopatch`` from ever patching one loader, such as that of a validation on rank 0 only.

    Args:
        loader: A loader that was not used yet.

    Returns:
        The same loader.

    Raises:
        NotALoaderError: ``loader`` is not a DataLoader.
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
    """Return whether a loader is marked so."""
    return _LEFT_ALONE in vars(loader)
