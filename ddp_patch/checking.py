"""Check that loaders are sharded."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from torch.utils.data import DataLoader

from ddp_patch.compat import held_loaders
from ddp_patch.errors import NotALoaderError, NotPatchedError
from ddp_patch.loaders.recognition import is_loader, sharded_by

__all__ = ["assert_loaders_patched", "check_loaders_is_patched"]

Loaders: TypeAlias = "DataLoader[Any] | Mapping[str, Loaders] | Sequence[Loaders]"


def check_loaders_is_patched(loaders: Loaders) -> bool:
    """Return whether every loader is sharded: by this package, another ``DistributedSampler``, or itself.

    Args:
        loaders: A loader, or any nest of lists, tuples and dicts of loaders.

    Raises:
        NotALoaderError: The nest contains something that is no loader, or is empty somewhere.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10))
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> patched = patch_dataloader_to_ddp(loader, rank=0, num_replicas=2)
        >>> check_loaders_is_patched(patched), check_loaders_is_patched({"train": patched, "val": [loader]})
        (True, False)
    """
    leaves = list(_leaves(loaders, ""))
    return all(sharded_by(loader) is not None for _, loader in leaves)


def assert_loaders_patched(loaders: Loaders) -> None:
    """Raise unless every loader is sharded; the error lists where in the nest the others are.

    Args:
        loaders: A loader, or any nest of lists, tuples and dicts of loaders.

    Raises:
        NotPatchedError: At least one loader is not sharded. It is an ``AssertionError`` too.
        NotALoaderError: The nest contains something that is no loader, or is empty somewhere.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> patched = patch_dataloader_to_ddp(DataLoader(range(10)), rank=0, num_replicas=2)
        >>> assert_loaders_patched({"train": patched, "val": [patched, DataLoader(range(3))]})
        Traceback (most recent call last):
        ...
        ddp_patch.errors.NotPatchedError: Every rank would get all data from 1 of 3 loaders: val[1]. \
Pass each through patch_dataloader_to_ddp() on every rank.
    """
    leaves = list(_leaves(loaders, ""))
    offenders = [place or "the loader" for place, loader in leaves if sharded_by(loader) is None]
    if offenders:
        raise NotPatchedError(
            f"Every rank would get all data from {len(offenders)} of {len(leaves)} loaders: {', '.join(offenders)}. "
            "Pass each through patch_dataloader_to_ddp() on every rank."
        )


def _leaves(loaders: Loaders, place: str) -> Iterator[tuple[str, DataLoader[Any]]]:
    """Yield every loader of a nest, after its place there, such as ``val[1]``."""
    match loaders:
        case DataLoader():
            yield place, loaders
        case Mapping() | list() | tuple() if len(loaders) == 0:
            raise NotALoaderError(
                f"Found an empty {type(loaders).__name__} at {place or 'the top'}: nothing is known of no loader. Pass "
                "the loaders, or leave it out."
            )
        case Mapping():
            for key, nested in loaders.items():
                name = f"{place}.{key}" if place else str(key)
                yield from _leaves(nested, name)
        case list() | tuple():
            for index, nested in enumerate(loaders):
                yield from _leaves(nested, f"{place}[{index}]")
        case _ if is_loader(loaders):
            yield place, cast(DataLoader[Any], loaders)
        case _ if (found := held_loaders(loaders)) is not None:
            name, held = found
            yield from _leaves(cast(Any, held), f"{place}.{name}" if place else name)
        case _:
            raise NotALoaderError(
                f"Found {loaders!r} ({type(loaders).__name__}) at {place or 'the top'} where a DataLoader or a list, "
                "tuple or dict of them was expected. Leave it out, or pass the loader itself."
            )
