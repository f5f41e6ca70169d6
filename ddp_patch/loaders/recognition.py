"""Recognise a loader, and find what shards it already."""

import logging
import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from ddp_patch.compat.datasets import is_split_by_node
from ddp_patch.compat.frameworks import LISTED_LOADERS, held_loaders, is_fastai_loader, shards_in_accelerate
from ddp_patch.errors import AssumedShardedWarning, NotALoaderError
from ddp_patch.loaders.nesting import iterated_by, nested_samplers
from ddp_patch.loaders.worlds import held_parts, world_of

__all__ = [
    "is_loader",
    "line_for_inner",
    "nested_datasets",
    "require_loader",
    "samplers_in_use",
    "samplers_within",
    "sharded_by",
    "shards_itself",
    "tell_if_assumed",
]

logger: logging.Logger = logging.getLogger("ddp_patch")


def is_loader(value: object) -> bool:
    """Return whether it is a DataLoader, or a framework's wrapper around one that has the same attributes."""
    names = ("dataset", "sampler", "batch_sampler")
    return isinstance(value, DataLoader) or all(hasattr(value, name) for name in names)


def require_loader(operation: str, loader: object, wrappers: bool = True) -> None:
    """Raise NotALoaderError unless it is a loader, or, where ``wrappers`` will do, a framework's wrapper around one."""
    if is_loader(loader) if wrappers else isinstance(loader, DataLoader):
        return
    name = type(loader).__name__
    if is_fastai_loader(type(loader)):
        raise NotALoaderError(
            f"{operation} needs a torch.utils.data.DataLoader, and fastai's {name} is another class: it has no "
            "sampler, and draws indices in its own way. Use fastai's learn.distrib_ctx(), which shards it; or "
            "build torch's over the same data: torch.utils.data.DataLoader(loader.dataset, batch_size=loader.bs, "
            "shuffle=loader.shuffle, drop_last=loader.drop_last, collate_fn=loader.create_batch). That one skips "
            "fastai's after_item and after_batch."
        )
    if (line := line_for_inner(operation, loader)) is not None:
        raise NotALoaderError(
            f"{operation} needs a torch.utils.data.DataLoader and got a {name}, which wraps one: only the loader "
            f"inside knows its dataset, sampler and batches. Pass that one, where outer is the {name}: {line}."
        )
    raise NotALoaderError(
        f"{operation} needs a torch.utils.data.DataLoader and got {loader!r} ({name}): only a loader knows its "
        "dataset, sampler and batches. Pass the finished loader itself."
    )


def line_for_inner(operation: str, wrapper: object) -> str | None:
    """Return the line of code that passes the loader inside a wrapper to an operation; None if there is none."""
    inner: object = wrapper
    place = "outer"
    while (found := held_loaders(inner)) is not None:
        several = getattr(inner, LISTED_LOADERS, None)
        if isinstance(several, list) and several and all(map(is_loader, several)):
            place = f"{place}.{LISTED_LOADERS}"
            return f"{place} = [{operation}(loader) for loader in {place}]"
        place, inner = f"{place}.{found[0]}", found[1]
        if is_loader(inner):
            return f"{place} = {operation}({place})" if operation.startswith("patch_") else f"{operation}({place}, ...)"
    return None


def samplers_in_use(loader: DataLoader[Any]) -> Iterator[object]:
    """Yield the samplers that the loader draws from, from the outside in."""
    return nested_samplers(iterated_by(loader))


def sharded_by(loader: DataLoader[Any]) -> object | None:
    """Return what shards the loader already (one of its samplers, its dataset or itself), or None."""
    found = next(filter(shards_itself, _holders(loader)), None)
    # Numbers in a loader prove nothing: it draws from its sampler, which would have them too.
    return loader if found is None and _says(loader) else found


def _holders(loader: DataLoader[Any]) -> Iterator[object]:
    """Yield what may shard a loader: its samplers, its datasets, and the samplers that iterable datasets draw from."""
    yield from samplers_within(iterated_by(loader))
    for dataset in nested_datasets(loader.dataset):
        yield dataset
        if isinstance(dataset, IterableDataset):
            for part in held_parts(dataset):
                if isinstance(part, Sampler):
                    yield from samplers_within(part)


def shards_itself(holder: object) -> bool:
    """Return whether a sampler or dataset shards by itself.

    It does if it says ``is_ddp_aware = True``, and does not if it says False. If it says nothing, these do: a
    ``DistributedSampler``, what accelerate shards with, a Hugging Face stream that was split by node, and whatever was
    made for one rank of several.
    """
    said = _says(holder)
    return said if said is not None else (world_of(holder) or (0, 1))[1] > 1


def _says(holder: object) -> bool | None:
    """Return what it says itself, or True if its kind is known to shard; None if that leaves it open."""
    said = getattr(holder, "is_ddp_aware", None)
    if isinstance(said, bool):
        return said
    is_known = isinstance(holder, DistributedSampler) or shards_in_accelerate(type(holder))
    return is_known or (isinstance(holder, IterableDataset) and is_split_by_node(holder)) or None


def tell_if_assumed(holder: object, stacklevel: int = 3) -> None:
    """Report that it counts as sharded only because it stores a rank and a number of ranks.

    For a map-style dataset it is a warning: its sampler chooses what is read, so it may store them for another reason.
    """
    if _says(holder) is not None or (world := world_of(holder)) is None:
        return
    rank, size = world
    text = (
        f"{type(holder).__name__} stores that it is for rank {rank} of {size}, so it counts as sharded, and its loader "
        "is returned unchanged. Say is_ddp_aware = False in its class if it gives every rank the same, or True if it "
        "shards."
    )
    if isinstance(holder, Dataset) and not isinstance(holder, IterableDataset):
        warnings.warn(text, AssumedShardedWarning, stacklevel=stacklevel)
    else:
        logger.info(text)


def samplers_within(sampler: object) -> Iterator[object]:
    """Yield a sampler and all samplers in it, from the outside in, also those in lists."""
    waiting, seen = [sampler], set[int]()
    while waiting:
        for found in nested_samplers(waiting.pop(0)):
            if id(found) not in seen:
                seen.add(id(found))
                yield found
                waiting += [part for part in held_parts(found) if isinstance(part, Sampler)]


def nested_datasets(dataset: object) -> Iterator[object]:
    """Yield a dataset and those in it, also in lists, as in ``Subset`` and ``ConcatDataset``."""
    waiting, seen = [dataset], set[int]()
    while waiting:
        found = waiting.pop(0)
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            waiting += [part for part in held_parts(found) if isinstance(part, Dataset)]
