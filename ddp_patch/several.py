"""Shard several loaders in one call, in which the ranks synchronise once."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, Unpack, overload

from torch.utils.data import DataLoader

from ddp_patch.costs import Cost, CostOf
from ddp_patch.devices import Device
from ddp_patch.errors import NotALoaderError
from ddp_patch.loaders.nests import Keys, copied, is_empty, nested, place_of
from ddp_patch.options import IterableSharding, Options, Share
from ddp_patch.patched import PatchedLoader
from ddp_patch.patching import log_patched, patch_each
from ddp_patch.ranks.agreement import ONE, refusals_told
from ddp_patch.ranks.world import find_world
from ddp_patch.wrappers import SharingOptions, split_options

__all__ = ["PatchOptions", "patch_dataloaders_to_ddp"]

T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
N = TypeVar("N")


class _NamedTuple(Protocol):
    """A named tuple, which keeps its names."""

    def _asdict(self) -> dict[str, Any]: ...


Named = TypeVar("Named", bound=_NamedTuple)


class PatchOptions(SharingOptions, total=False):
    """The keywords of ``patch_dataloader_to_ddp``, which describes them."""

    iterable_sharding: IterableSharding
    share: Share
    scalable_shuffle: bool
    cost: Cost | None
    cost_of: CostOf
    cost_window: int
    device: Device | None


@overload
def patch_dataloaders_to_ddp(loaders: DataLoader[T], **options: Unpack[PatchOptions]) -> PatchedLoader[T]: ...
@overload
def patch_dataloaders_to_ddp(loaders: Named, **options: Unpack[PatchOptions]) -> Named: ...
@overload
def patch_dataloaders_to_ddp(
    loaders: tuple[DataLoader[T1], DataLoader[T2]], **options: Unpack[PatchOptions]
) -> tuple[PatchedLoader[T1], PatchedLoader[T2]]: ...
@overload
def patch_dataloaders_to_ddp(
    loaders: tuple[DataLoader[T1], DataLoader[T2], DataLoader[T3]], **options: Unpack[PatchOptions]
) -> tuple[PatchedLoader[T1], PatchedLoader[T2], PatchedLoader[T3]]: ...
# Lists and dicts keep their type: to a type checker, a list of patched loaders is no list of loaders.
@overload
def patch_dataloaders_to_ddp(loaders: N, **options: Unpack[PatchOptions]) -> N: ...
def patch_dataloaders_to_ddp(loaders: Any, **options: Unpack[PatchOptions]) -> Any:
    """Shard several finished loaders as ``patch_dataloader_to_ddp`` shards one; the ranks synchronise only once.

    The result is the same as if you patched them one by one. If one cannot be patched, or differs between the ranks,
    every rank raises an error that names it, and none is patched.

    Args:
        loaders: A list, tuple (also named) or dict of loaders, nested as you like; or one loader. It stays unchanged.
            A loader that appears several times is patched once. None means no loader, and stays None.
        options: The keywords of ``patch_dataloader_to_ddp``, for all of the loaders.

    Returns:
        The same lists, tuples and dicts with patched loaders in them. A loader that is already sharded is not sharded
        again. If there is only one process and no ``device``, ``loaders`` itself, with a ``NotDistributedWarning``.

    Raises:
        NotALoaderError: Something in ``loaders`` is not a loader, or its lists or dicts cannot be copied.
        RankMismatchError: The ranks' loaders or options differ, or the keys of a dict, or their order.
        DDPPatchError: Whatever ``patch_dataloader_to_ddp`` raises.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> train, val = DataLoader(range(8), batch_size=2), DataLoader(range(4))
        >>> train, val = patch_dataloaders_to_ddp((train, val), rank=1, num_replicas=2)
        >>> [batch.tolist() for batch in train], [batch.tolist() for batch in val]
        ([[1, 3], [5, 7]], [[1], [3]])
        >>> nest = patch_dataloaders_to_ddp({"train": train, "val": [val], "test": None}, rank=1, num_replicas=2)
        >>> nest["train"] is train, nest["test"]
        (True, None)
    """
    where, chosen = split_options("patch_dataloaders_to_ddp", options, PatchOptions)
    world = find_world(**where)
    with refusals_told(world):
        leaves = list(nested(loaders))
        given = _by_place(leaves)
        copied(loaders, leaves, {id(loader): loader for loader in given.values()})  # raises here if it cannot be
    nest = _in_words(leaves, given)
    patched = patch_each("patch_dataloaders_to_ddp", given, world, lambda: Options(**chosen), nest)
    if world is None and chosen.get("device") is None:
        return loaders
    log_patched(given, patched)
    return copied(loaders, leaves, {id(old): new for old, new in zip(given.values(), patched, strict=True)})


def _by_place(leaves: Sequence[tuple[Keys, Any]]) -> dict[str, Any]:
    """Return each loader once, by the name of its first appearance."""
    paths = {id(leaf): path for path, leaf in reversed(leaves) if not _is_no_loader(leaf)}
    given = {place_of(path) if path else "": leaf for path, leaf in leaves if paths.get(id(leaf)) == path}
    if len(given) < len(paths):
        raise NotALoaderError(
            f"Several loaders would be called the same in errors ({', '.join(given)}), because different keys have the "
            "same repr(). Use strings as keys."
        )
    return given


def _is_no_loader(leaf: object) -> bool:
    return leaf is None or is_empty(leaf)


def _in_words(leaves: Sequence[tuple[Keys, Any]], given: Mapping[str, Any]) -> str:
    """Describe all loaders and their keys, for the ranks to compare."""
    if given.keys() == {""}:
        return ONE
    first = {id(loader): place for place, loader in given.items()}
    return ", ".join(_what_stands(place_of(path), leaf, first) for path, leaf in leaves)


def _what_stands(place: str, leaf: object, first: Mapping[int, str]) -> str:
    if _is_no_loader(leaf):
        return f"{place} ({'None' if leaf is None else 'empty'})"
    return place if first[id(leaf)] == place else f"{place} (the same as {first[id(leaf)]})"
