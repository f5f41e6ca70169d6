"""Check that loaders are sharded."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch.utils.data import DataLoader

from ddp_patch.compat.frameworks import held_loaders
from ddp_patch.errors import NotALoaderError, NotPatchedError
from ddp_patch.loaders.first_use import about_to_use
from ddp_patch.loaders.nests import is_empty, nested, place_of
from ddp_patch.loaders.recognition import is_loader, sharded_by

__all__ = ["assert_loaders_patched", "check_loaders_is_patched"]

Loaders: TypeAlias = "DataLoader[Any] | Mapping[str, Loaders] | Sequence[Loaders] | None"

_TOP = "loaders"  # what both functions call what they are given


def check_loaders_is_patched(loaders: Loaders) -> bool:
    """Return whether every loader is sharded: by this package, by another ``DistributedSampler``, or by itself.

    Args:
        loaders: A loader, or a list, tuple or dict of loaders, nested as you like. None means no loader.

    Raises:
        NotALoaderError: Something in it is not a loader, there is no loader at all, or a list or dict is empty.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10))
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> patched = patch_dataloader_to_ddp(loader, rank=0, num_replicas=2)
        >>> check_loaders_is_patched(patched), check_loaders_is_patched({"train": patched, "val": [loader]})
        (True, False)
    """
    return all(sharded_by(loader) is not None for _, loader in _loaders(loaders))


def assert_loaders_patched(loaders: Loaders) -> None:
    """Raise unless every loader is sharded; the error names those that are not.

    Args:
        loaders: A loader, or a list, tuple or dict of loaders, nested as you like. None means no loader.

    Raises:
        NotPatchedError: At least one loader is not sharded. It is also an ``AssertionError``.
        NotALoaderError: Something in it is not a loader, there is no loader at all, or a list or dict is empty.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> patched = patch_dataloader_to_ddp(DataLoader(range(10)), rank=0, num_replicas=2)
        >>> assert_loaders_patched({"train": patched, "val": [patched, DataLoader(range(3))]})
        Traceback (most recent call last):
        ...
        ddp_patch.errors.NotPatchedError: Every rank would get all data from 1 of 3 loaders: \
loaders['val'][1]. Pass each through patch_dataloader_to_ddp() on every rank.
        See "NotPatchedError" in docs/errors.md.
    """
    found = _loaders(loaders)
    offenders = [place for place, loader in found if sharded_by(loader) is None]
    if offenders:
        raise NotPatchedError(
            f"Every rank would get all data from {len(offenders)} of {len(found)} loaders: "
            f"{', '.join('the loader' if place == _TOP else place for place in offenders)}. "
            "Pass each through patch_dataloader_to_ddp() on every rank."
        )


def _loaders(given: Loaders) -> list[tuple[str, DataLoader[Any]]]:
    """Return every loader, after the code that gets it, such as ``loaders['val'][1]``."""
    leaves = list(_leaves(given, _TOP))
    found = [(place, leaf) for place, leaf in leaves if leaf is not None]
    if not found:
        raise _no_loader(*leaves[0])
    return found


def _leaves(given: object, root: str) -> Iterator[tuple[str, Any]]:
    """Yield all loaders and None, also those in wrappers, each after the code that gets it."""
    for path, leaf in nested(given):
        place = place_of(path, root)
        if is_empty(leaf):
            raise NotALoaderError(
                f"Found an empty {type(leaf).__name__} at {place}: there is nothing to check in it. Pass the loaders, "
                "or leave it out."
            )
        if leaf is None or is_loader(leaf):
            about_to_use(leaf)
            yield place, leaf
        elif (found := held_loaders(leaf)) is not None and found[1] is not None:
            name, held = found
            yield from _leaves(held, f"{place}.{name}")
        else:
            raise _no_loader(place, leaf)


def _no_loader(place: str, found: object) -> NotALoaderError:
    return NotALoaderError(
        f"Found {found!r} ({type(found).__name__}) at {place} where a DataLoader or a list, tuple or dict of them was "
        "expected. Leave it out, or pass the loader itself."
    )
