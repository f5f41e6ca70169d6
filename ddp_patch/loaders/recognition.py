"""Recognise what shards a loader already, and for which rank and number of ranks."""

import logging
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, product
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from ddp_patch.compat.private_packages import (
    LISTED_LOADERS,
    READERS,
    WORLD_NAMES,
    WORLD_WORDS,
    held_loaders,
    is_split_by_node,
    shards_in_accelerate,
    splits_by_node,
    webdataset_world,
)
from ddp_patch.errors import AssumedShardedWarning, DDPPatchError, NotALoaderError, message_of
from ddp_patch.loaders.nested_samplers import inner_samplers, iterated_by, nested_samplers
from ddp_patch.walks import first_parts, held, stored, walk

# A rank and the number of ranks.
HeldWorld: TypeAlias = tuple[int, int]


def world_of(holder: object) -> HeldWorld | None:
    """Return the rank and the number of ranks that a sampler or dataset was made for, or None if it stores none.

    The numbers are its attributes, or attributes of an object that has only such numbers, as mosaicml's ``World``. Of
    several worlds, the smallest counts, because ranks that replicate each other share the data as one.

    Examples:
        >>> from torch.utils.data import DistributedSampler
        >>> world_of(DistributedSampler(range(8), num_replicas=4, rank=1))
        (1, 4)
        >>> world_of(range(8)) is None
        True
    """
    kept = stored(holder)
    if splits_by_node(kept):
        return webdataset_world()
    if isinstance(holder, DistributedSampler):  # documented; this package's samplers compute them
        kept |= {name: getattr(holder, name, None) for name in WORLD_NAMES[0]}
    inner = [stored(value) for name, value in kept.items() if name in READERS or _is_world(value)]
    places = product((kept, *inner), ("", "_"), WORLD_NAMES)
    numbers: list[list[Any]] = [[found.get(prefix + name) for name in names] for found, prefix, names in places]
    worlds = [(int(rank), int(ranks)) for rank, ranks in numbers if _is_whole(rank, ranks) and 0 <= rank < ranks]
    return min(worlds, key=lambda world: (world[1] == 1, world[1]), default=None)


def _is_world(value: object) -> bool:
    """Return whether an object has only the numbers of a world; datasets and samplers are checked by themselves."""
    inner = stored(value)
    gives = any(hasattr(type(value), name) for name in ("__iter__", "__getitem__", "__len__"))
    is_named = inner and all(any(word in name for word in WORLD_WORDS) for name in inner)
    return bool(is_named) and not gives and all(isinstance(number, int) for number in inner.values())


def _is_whole(*values: object) -> bool:
    return all(isinstance(value, int | np.integer) and not isinstance(value, bool) for value in values)


logger: logging.Logger = logging.getLogger("ddp_patch")


def is_loader(value: object) -> bool:
    """Return whether a value is a DataLoader, or a framework's wrapper around a loader with the same attributes."""
    return isinstance(value, DataLoader) or all(
        hasattr(value, name) for name in ("dataset", "sampler", "batch_sampler")
    )


def require_loader(operation: str, loader: object, wrappers: bool = True) -> None:
    """Raise NotALoaderError unless ``loader`` is a loader, or, if ``wrappers``, a framework's wrapper around one."""
    if is_loader(loader) if wrappers else isinstance(loader, DataLoader):
        return
    name = type(loader).__name__
    if (line := line_for_inner(operation, loader)) is not None:
        remedy = f"Pass that one, where outer is the {name}: {line}."
        if operation.startswith("patch_"):
            remedy = f"Patch it before the {name} is made of it: {name}({operation}(loader), ...). {or_inside(loader)}"
        raise NotALoaderError(
            f"{operation} needs a torch.utils.data.DataLoader and got a {name}, which wraps one: only the loader "
            f"inside knows its dataset, sampler and batches. {remedy.rstrip()}"
        )
    raise NotALoaderError(
        f"{operation} needs a torch.utils.data.DataLoader and got {loader!r} ({name}): only a loader knows its "
        "dataset, sampler and batches. Pass the finished loader itself. For a loader of another package, build torch's "
        "over the same dataset, or DataLoader(dataset, batch_size=None) over an IterableDataset whose __iter__ returns "
        "iter(loader)."
    )


def or_inside(wrapper: object) -> str:
    """Return how to patch the loader inside a wrapper, or that the wrapper's running iterator would stay unsharded."""
    line, name = line_for_inner("patch_dataloader_to_ddp", wrapper), type(wrapper).__name__
    running = next(
        (place for place, value in stored(wrapper).items() if any(map(_has_begun, first_parts(value)))), None
    )
    if running is not None:
        return f"This one keeps an iterator (attribute {running!r}), which would go on with unsharded data."
    return "" if line is None else f"Or, where outer is a {name} that was not iterated yet: {line}."


def _has_begun(part: object) -> bool:
    """Return whether an object is an iterator, or stores an iterator, as a prefetcher does."""
    kept = () if is_loader(part) or isinstance(part, Dataset) else stored(part).values()
    return any(isinstance(value, Iterator) for value in (part, *kept))


def line_for_inner(operation: str, wrapper: object) -> str | None:
    """Return the line of code that passes the loader inside a wrapper to an operation; None if there is no loader."""
    inner, place = wrapper, "outer"
    while (found := held_loaders(inner)) is not None:
        several = getattr(inner, LISTED_LOADERS, None)
        if isinstance(several, list) and several and all(map(is_loader, several)):
            return f"{place}.{LISTED_LOADERS} = [{operation}(loader) for loader in {place}.{LISTED_LOADERS}]"
        place, inner = f"{place}.{found[0]}", found[1]
        if is_loader(inner):
            return f"{place} = {operation}({place})" if operation.startswith("patch_") else f"{operation}({place}, ...)"
    return None


def samplers_in_use(loader: DataLoader[Any]) -> Iterator[object]:
    """Yield the samplers that the loader draws from, from the outside in."""
    return nested_samplers(iterated_by(loader))


def sharded_by(loader: DataLoader[Any]) -> object | None:
    """Return the object that shards the loader already (a sampler, a dataset or the loader itself), or None."""
    holders = chain(samplers_within(iterated_by(loader)), _in_dataset(loader.dataset))
    found = next(filter(shards_itself, holders), None)
    # A rank in a loader proves nothing: the loader draws from its sampler, which would have the rank, too.
    counts = _says(loader) or (_says(loader) is None and shards_in_accelerate(type(loader)))
    return loader if found is None and counts else found


def _in_dataset(dataset: object) -> Iterator[object]:
    """Yield the objects that may shard a dataset: itself, the datasets in it, and the samplers of iterable datasets."""
    for nested in nested_datasets(dataset):
        yield nested
        if isinstance(nested, IterableDataset):
            for part in held(nested, _is_sampler):
                yield from samplers_within(part)


def shards_itself(holder: object) -> bool:
    """Return whether a sampler or dataset shards by itself.

    The attribute ``is_ddp_aware`` decides, if it is True or False. Otherwise the object shards if it stores a rank and
    a number of ranks of at least 2. If it stores none, a ``DistributedSampler``, accelerate's sharding classes, and a
    Hugging Face stream that was split by node count as sharding.
    """
    if (said := _says(holder)) is not None:
        return said
    world = world_of(holder)
    return _is_known(holder) if world is None else world[1] > 1


def _says(holder: object) -> bool | None:
    """Return the attribute ``is_ddp_aware`` of an object; None if it is not set."""
    said = getattr(holder, "is_ddp_aware", None)
    return said if isinstance(said, bool) else None


def _is_known(holder: object) -> bool:
    """Return whether an object is of a type that shards if there are several ranks."""
    return isinstance(holder, DistributedSampler) or shards_in_accelerate(type(holder)) or is_split_by_node(holder)


def says_ranks_differ(dataset: object) -> bool:
    """Return whether a dataset says, by ``is_ddp_aware = False``, that ranks may differ without sharding."""
    return any(_says(part) is False for part in nested_datasets(dataset))


def may_ask_rank(dataset: object) -> bool:
    """Return whether a dataset may read its rank without sharding by it, as webdataset does to find its worker."""
    is_webs = any(type(part).__module__.startswith("webdataset.") for part in nested_datasets(dataset))
    return is_webs or says_ranks_differ(dataset)


def tell_if_assumed(holder: object) -> None:
    """Report an object that counts as sharded only because it stores a rank and a number of ranks.

    For a map-style dataset the report is a warning: the sampler chooses what is read, so the dataset may store a rank
    for another reason.

    Args:
        holder: The sampler or dataset that counts as sharded.
    """
    if _says(holder) is not None or _is_known(holder) or (world := world_of(holder)) is None:
        return
    text = (
        f"{type(holder).__name__} stores that it is for rank {world[0]} of {world[1]}, so it counts as sharded, and "
        "its loader is left as it is. Say is_ddp_aware = False in its class if it gives every rank the same, or True "
        "if it shards."
    )
    if isinstance(holder, Dataset) and not isinstance(holder, IterableDataset):
        warnings.warn(text, AssumedShardedWarning, stacklevel=4)  # the line that calls the patch
    else:
        logger.info(text)


def samplers_within(sampler: object) -> Iterator[object]:
    """Yield a sampler and all samplers in it, from the outside in, also in lists."""
    return walk(sampler, lambda found: [*inner_samplers(found), *held(found, _is_sampler)])


def nested_datasets(dataset: object) -> Iterator[object]:
    """Yield a dataset and the datasets in it, also in lists, as in ``Subset`` and ``ConcatDataset``."""
    return walk(dataset, partial(held, is_wanted=lambda part: isinstance(part, Dataset)))


def streams_in(dataset: object) -> Iterator[tuple[object, str]]:
    """Yield each map-style dataset that may return items in its own order, and the attribute that may yield them.

    The attribute is an iterable dataset, a loader, an iterator or a queue. Nothing is yielded if the dataset shards
    itself.

    Examples:
        >>> class Limited(Dataset):
        ...     def __init__(self, stream):
        ...         self.iterator = iter(stream)
        ...     def __getitem__(self, index):
        ...         return next(self.iterator)
        >>> [name for _, name in streams_in(Limited([1, 2]))]
        ['iterator']
    """
    parts = [] if any(map(shards_itself, _in_dataset(dataset))) else [*nested_datasets(dataset)]
    for part in parts:
        # An iterable dataset first: the remedy is a loader over it.
        for kind in () if isinstance(part, IterableDataset) else (IterableDataset, DataLoader, Iterator | deque):
            yield from ((part, name) for name, value in stored(part).items() if isinstance(value, kind))


def _is_sampler(value: object) -> bool:
    return isinstance(value, Sampler)


@contextmanager
def error_context(place: str) -> Iterator[None]:
    """While entered, put the loader's place before the text of errors; ``place`` is empty for a single loader."""
    try:
        yield
    except DDPPatchError as error:
        if place:
            error.args = (f"{place}: {message_of(error)}",)
        raise
