"""Shard several loaders in one call, in which the ranks meet once."""

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
    """Patch several finished loaders as ``patch_dataloader_to_ddp`` patches one, in one meeting of the ranks.

    Each loader gives what it would if they were patched in turn. If one of them cannot be patched, or differs between
    the ranks, every rank raises an error that says which one, and none is patched.

    Args:
        loaders: Any nest of lists, tuples (named ones too) and dicts of loaders, or one loader. It stays unchanged.
            A loader that stands in several places is patched once. None stands for no loader, and stays None.
        options: The keywords of ``patch_dataloader_to_ddp``. They hold for all of the loaders.

    Returns:
        A nest of the same classes, with a patched loader in the place of each; a loader that is sharded already stays
        itself. With a ``NotDistributedWarning``, ``loaders`` itself if there is only one process, and no ``device``.

    Raises:
        NotALoaderError: The nest holds something else than loaders, or is of classes that cannot be copied.
        RankMismatchError: The ranks' nests differ (other places, or another order of a dict's keys), or their loaders
            or options do.
        DDPPatchError: As in ``patch_dataloader_to_ddp``.

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
    """Return each loader once, by the first place where it stands."""
    paths = {id(leaf): path for path, leaf in reversed(leaves) if not _is_no_loader(leaf)}
    given = {place_of(path) if path else "": leaf for path, leaf in leaves if paths.get(id(leaf)) == path}
    if len(given) < len(paths):
        raise NotALoaderError(
            f"Several loaders stand at one of {', '.join(given)}, so errors could not tell them apart: keys look alike "
            "that are not equal. Use strings as keys."
        )
    return given


def _is_no_loader(leaf: object) -> bool:
    return leaf is None or is_empty(leaf)


def _in_words(leaves: Sequence[tuple[Keys, Any]], given: Mapping[str, Any]) -> str:
    """Return what stands where, for the ranks to compare."""
    if given.keys() == {""}:
        return ONE
    first = {id(loader): place for place, loader in given.items()}
    return ", ".join(_what_stands(place_of(path), leaf, first) for path, leaf in leaves)


def _what_stands(place: str, leaf: object, first: Mapping[int, str]) -> str:
    if _is_no_loader(leaf):
        return f"{place} ({'None' if leaf is None else 'empty'})"
    return place if first[id(leaf)] == place else f"{place} (the same as {first[id(leaf)]})"
