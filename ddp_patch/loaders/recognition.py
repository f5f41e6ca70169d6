"""Recognise a loader, and what shards it already."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_patch.compat import LISTED_LOADERS, held_loaders, is_fastai_loader, is_split_by_node, shards_in_accelerate
from ddp_patch.errors import NotALoaderError
from ddp_patch.loaders.nesting import nested_samplers

__all__ = [
    "is_loader",
    "line_for_inner",
    "nested_datasets",
    "require_loader",
    "samplers_in_use",
    "sharded_by",
    "shards_itself",
]


def is_loader(value: object) -> bool:
    """Tell whether it is a DataLoader, or a framework's wrapper around one that has the same attributes."""
    names = ("dataset", "sampler", "batch_sampler")
    return isinstance(value, DataLoader) or all(hasattr(value, name) for name in names)


def require_loader(operation: str, loader: object, wrappers: bool = True) -> None:
    """Raise NotALoaderError unless it is a loader, or, where ``wrappers`` will do, a framework's wrapper around one."""
    if is_loader(loader) if wrappers else isinstance(loader, DataLoader):
        return
    name = type(loader).__name__
    if is_fastai_loader(type(loader)):
        raise NotALoaderError(
            f"{operation} needs a torch.utils.data.DataLoader, and fastai's {name} is none, though it is called so: it "
            "has no sampler, and draws indices in a way of its own. Use fastai's learn.distrib_ctx(), which shards it; "
            "or build torch's over the same data: torch.utils.data.DataLoader(loader.dataset, batch_size=loader.bs, "
            "shuffle=loader.shuffle, drop_last=loader.drop_last, collate_fn=loader.create_batch). That one does "
            "without fastai's after_item and after_batch."
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
    """Return the line of code that hands the loader inside a wrapper to an operation; None if there is none."""
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
    # Beside a batch sampler of the user's, `loader.sampler` is a default that torch never draws from.
    return nested_samplers(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def sharded_by(loader: DataLoader[Any]) -> object | None:
    """Return what shards the loader already (one of its samplers, its dataset or itself), or None."""
    holders = [*samplers_in_use(loader), *nested_datasets(loader.dataset), loader]
    return next((holder for holder in holders if shards_itself(holder)), None)


def shards_itself(holder: object) -> bool:
    """Tell whether a sampler, dataset or loader shards by itself.

    That is a ``DistributedSampler``, whatever says ``is_ddp_aware = True``, what accelerate shards with, or a Hugging
    Face stream that was split by node.
    """
    is_marked = isinstance(holder, DistributedSampler) or getattr(holder, "is_ddp_aware", False) is True
    return is_marked or shards_in_accelerate(type(holder)) or is_split_by_node(holder)


def nested_datasets(dataset: object) -> Iterator[object]:
    """Yield a dataset and those inside it: torch's ``ChainDataset``, ``ConcatDataset`` and ``Subset`` hold some."""
    yield dataset
    for name in ("dataset", "datasets"):
        inner = getattr(dataset, "__dict__", {}).get(name)
        for one in inner if isinstance(inner, list | tuple) else [inner]:
            if isinstance(one, Dataset):
                yield from nested_datasets(one)
