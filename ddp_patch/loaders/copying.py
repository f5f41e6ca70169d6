"""A DataLoader inspected and copied: what it is, what it was made from, which samplers it holds."""

import copy
import inspect
import random
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import partial
from itertools import chain, cycle, islice
from types import CellType, FunctionType, GeneratorType, MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ddp_patch.errors import NotALoaderError, UnsupportedLoaderError
from ddp_patch.loaders.nesting import nested_samplers
from ddp_patch.streams.seeding import RandomGenerator

__all__ = [
    "Level",
    "batch_sampler_type",
    "copy_loader",
    "extract_loader_parameters",
    "generators",
    "is_ddp_aware",
    "is_loader",
    "is_split_by_node",
    "level",
    "nested_datasets",
    "nested_samplers",
    "random_generators",
    "require_copyable",
    "require_loader",
    "samplers_in_use",
    "sharding",
]

L = TypeVar("L", bound=DataLoader[Any])

# torchdata's is torch's in all but name; it is named, not imported.
_TORCHDATAS = "torchdata.stateful_dataloader"
_TORCHS_BATCH_SAMPLERS = {"torch.utils.data.sampler.BatchSampler", f"{_TORCHDATAS}.sampler.BatchSampler"}
# What shares in accelerate, where nothing is a DistributedSampler.
_ACCELERATES_SHARING = {
    "accelerate.data_loader.BatchSamplerShard",
    "accelerate.data_loader.IterableDatasetShard",
    "accelerate.data_loader.DataLoaderDispatcher",
}
# The arguments that Lightning notes while its hooks make a loader, to make it anew: those of the unpatched one.
_LIGHTNINGS = {"__dataset", "__pl_saved_arg_names", "__pl_saved_args", "__pl_saved_kwargs"}
# Of a container's elements, these many are looked at for random generators.
_LOOKED_AT = 32

# What cannot be begun anew: a loader that keeps one goes on yielding what it began.
_RUNNING = (_BaseDataLoaderIter, GeneratorType, map, filter, zip, chain, islice, cycle)

_OWN = frozenset({"_iterator", "dataset", "sampler", "batch_sampler"})
_DATA_RELATED = frozenset({"dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"})


class Level(Enum):
    """What of a loader is wrapped."""

    SAMPLE = "sample"  # indices, which torch's own BatchSampler puts into batches on each rank
    BATCH = "batch"  # whole batches of any other batch sampler
    UNBATCHED = "unbatched"  # the sampler of a loader without automatic batching: batch_size=None
    ITERABLE = "iterable"  # an IterableDataset, which no sampler chooses from


def is_loader(value: object) -> bool:
    """Tell whether it is a DataLoader, or what a framework wraps one in, with the attributes that tell of sharing."""
    return isinstance(value, DataLoader) or all(hasattr(value, name) for name in _OWN - {"_iterator"})


def require_loader(operation: str, loader: object, wrappers: bool = True) -> None:
    """Raise NotALoaderError unless it is a loader, or a framework's wrapper around one where these will do."""
    if not (is_loader(loader) if wrappers else isinstance(loader, DataLoader)):
        raise NotALoaderError(
            f"{operation} needs a torch.utils.data.DataLoader and got {loader!r} ({type(loader).__name__}): only a "
            "loader knows its dataset, sampler and batches. Pass the finished loader itself."
        )


def level(loader: DataLoader[Any]) -> Level:
    """Decide what of the loader is wrapped."""
    if isinstance(loader.dataset, IterableDataset):
        return Level.ITERABLE
    if loader.batch_sampler is None:
        return Level.UNBATCHED
    # Exactly these classes: a subclass may form its batches in another way.
    batch_sampler = type(loader.batch_sampler)
    is_torchs = f"{batch_sampler.__module__}.{batch_sampler.__qualname__}" in _TORCHS_BATCH_SAMPLERS
    return Level.SAMPLE if is_torchs else Level.BATCH


def batch_sampler_type(loader: DataLoader[Any]) -> type[Any]:
    """Return what makes a patched loader's batches of samples: torch's class, or torchdata's where the loader is one.

    A ``StatefulDataLoader`` that was given torch's own batch sampler could not tell its place in an epoch.
    """
    modules = {base.__module__ for base in type(loader).__mro__}
    if f"{_TORCHDATAS}.stateful_dataloader" in modules:
        found: type[Any] = sys.modules[f"{_TORCHDATAS}.sampler"].BatchSampler
        return found
    return type(loader.batch_sampler)


def extract_loader_parameters(loader: DataLoader[Any], ignore_data_related_parameters: bool = False) -> dict[str, Any]:
    """Return every argument of the loader's own signature that the loader still knows.

    The signature is read, not listed here, so an argument that a newer torch or a subclass adds comes along by
    itself. ``shuffle`` is not kept by a DataLoader (it became a sampler) and so is not among them.

    Args:
        loader: Any DataLoader or subclass.
        ignore_data_related_parameters: Leave out ``dataset``, ``batch_size``, ``shuffle``, ``sampler``,
            ``batch_sampler`` and ``drop_last``: what is left can be passed on to a loader of other data.

    Returns:
        Names and values, in the order of the signature.

    Raises:
        NotALoaderError: ``loader`` is no DataLoader.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10), batch_size=4, timeout=0, pin_memory=True)
        >>> parameters = extract_loader_parameters(loader, ignore_data_related_parameters=True)
        >>> parameters["pin_memory"], "batch_size" in parameters
        (True, False)
        >>> other = DataLoader(range(20), batch_size=2, **parameters)
    """
    require_loader("extract_loader_parameters", loader, wrappers=False)
    left_out = _DATA_RELATED if ignore_data_related_parameters else frozenset()
    names = [name for name in _signature(loader.__class__) if name not in left_out]
    return {name: getattr(loader, name) for name in names if hasattr(loader, name)}


def _signature(loader_type: type) -> list[str]:
    """The names of the constructor's arguments, with those that ``*args`` or ``**kwargs`` hand on."""
    names: dict[str, None] = {}
    for base in loader_type.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        variadic = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names |= dict.fromkeys(p.name for p in parameters if p not in variadic)
        if not variadic:
            break
    return list(names)


def require_copyable(loader: DataLoader[Any]) -> None:
    """Raise UnsupportedLoaderError for a wrapper, and a loader whose own running iterator a copy would share."""
    # isinstance() believes accelerate's, which say that they are one.
    if not issubclass(type(loader), DataLoader):
        raise UnsupportedLoaderError(
            f"{type(loader).__name__} cannot be patched: it is a framework's wrapper around a DataLoader. Patch the "
            "loader first, and hand the patched one to the framework."
        )
    if (attribute := _other_loader_iterated(loader)) is not None:
        raise UnsupportedLoaderError(
            f"{type(loader).__name__} cannot be patched: its __iter__ may draw from another loader (attribute "
            f"{attribute!r}), which would go on giving every rank all of its data. Patch that loader first, and hand "
            f"the patched one to {type(loader).__name__}."
        )
    # torch's own `_iterator`, kept by persistent workers, is begun anew for each epoch; what samplers and datasets
    # are is looked at elsewhere.
    kept = {name: value for name, value in vars(loader).items() if name not in _OWN}
    for name, value in kept.items():
        if any(isinstance(part, _RUNNING) for part in _parts(value)):
            raise UnsupportedLoaderError(
                f"{type(loader).__name__} cannot be patched: it started an iterator in its constructor (attribute "
                f"{name!r}), which would go on yielding unsharded data. Build it with a sampler that is sharded "
                f"already, {type(loader).__name__}(dataset, sampler=DDPSamplerWrapper(sampler, False), ...), or use a "
                "DataLoader with persistent_workers=True."
            )


def _other_loader_iterated(loader: DataLoader[Any]) -> str | None:
    """Return the attribute with another loader, if its class iterates in a way of its own: as Ray's wrapper does."""
    iterates = next(base for base in type(loader).__mro__ if "__iter__" in vars(base))
    if iterates is DataLoader or iterates.__module__.startswith(f"{_TORCHDATAS}."):
        return None
    for name, value in vars(loader).items():
        if any(part is not loader and isinstance(part, DataLoader) for part in _parts(value)):
            return name
    return None


def _parts(value: Any) -> list[Any]:
    """Return an attribute's value, with the first elements that it has if it is a container."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [value, *islice(held, _LOOKED_AT)]


def copy_loader(loader: L, **replaced: Any) -> L:
    """Return a copy of the loader, of the same class and with every attribute, but for those replaced.

    A shallow copy: dataset, samplers and functions are the given loader's own. A running iterator (that of
    ``persistent_workers``) stays with the given loader.

    Raises:
        UnsupportedLoaderError: The loader's class forbids copying, or does not let an attribute be replaced.
    """
    name = type(loader).__name__
    try:
        clone = copy.copy(loader)
    except Exception as error:
        raise UnsupportedLoaderError(
            f"{name} cannot be patched: copying it raised {type(error).__name__}: {error}. Let its __copy__ or "
            "__reduce_ex__ make a shallow copy, or build the loader with a DDPSamplerWrapper as its sampler."
        ) from error
    # Past DataLoader.__setattr__, which refuses to change a sampler after construction.
    vars(clone).update(replaced, _iterator=None)
    for attribute in _LIGHTNINGS & vars(clone).keys():
        del vars(clone)[attribute]
    for attribute, value in replaced.items():
        if getattr(clone, attribute) is not value:
            raise UnsupportedLoaderError(
                f"{name} cannot be patched: its attribute {attribute!r} is computed by the class, so a sharded one "
                "cannot take its place. Store it as DataLoader does, or build the loader with a DDPSamplerWrapper as "
                "its sampler."
            )
    return clone


def samplers_in_use(loader: DataLoader[Any]) -> Iterator[object]:
    """Yield the samplers that the loader draws from, from the outside in."""
    # With a batch sampler of the user's, `loader.sampler` is a default that torch never draws from.
    return nested_samplers(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def sharding(loader: DataLoader[Any]) -> object | None:
    """Return what shards the loader already, or None.

    That is a ``DistributedSampler``, what accelerate shares with, whatever says ``is_ddp_aware``, or a stream that was
    split by node.
    """
    holders = [*samplers_in_use(loader), *nested_datasets(loader.dataset), loader]
    return next((holder for holder in holders if is_ddp_aware(holder) or is_split_by_node(holder)), None)


def nested_datasets(dataset: object) -> Iterator[object]:
    """Yield a dataset and those that it is made of: of torch's ``ChainDataset``, ``ConcatDataset`` or ``Subset``."""
    yield dataset
    for name in ("dataset", "datasets"):
        inner = getattr(dataset, "__dict__", {}).get(name)
        for one in inner if isinstance(inner, list | tuple) else [inner]:
            if isinstance(one, Dataset):
                yield from nested_datasets(one)


def is_split_by_node(dataset: object) -> bool:
    """Tell whether a Hugging Face iterable dataset went through ``split_dataset_by_node()``."""
    # It has no public name.
    return isinstance(dataset, IterableDataset) and getattr(dataset, "_distributed", None) is not None


def is_ddp_aware(holder: object) -> bool:
    """Tell whether a sampler, dataset or loader shards by itself."""
    if isinstance(holder, DistributedSampler) or getattr(holder, "is_ddp_aware", False) is True:
        return True
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(holder).__mro__}
    return not names.isdisjoint(_ACCELERATES_SHARING)


def generators(holders: Iterable[object]) -> list[torch.Generator]:
    """Return the ``torch.Generator`` objects that the holders draw from, each once."""
    return [rng for rng in random_generators(holders) if isinstance(rng, torch.Generator)]


def random_generators(holders: Iterable[object]) -> list[RandomGenerator]:
    """Return the random generators that are attributes of the holders, each once.

    Those in containers and in the functions that attributes are (their arguments, closures and globals) count too.
    """
    found: dict[int, RandomGenerator] = {}
    for holder in holders:
        for value in getattr(holder, "__dict__", {}).values():
            found |= {id(rng): rng for rng in _within(value, depth=3)}
    return list(found.values())


def _within(value: Any, depth: int) -> Iterator[RandomGenerator]:
    """Yield the random generators that a value is, holds, or is a function of."""
    parts: Iterable[Any] = ()
    match value:
        case random.SystemRandom():
            pass  # which has no state
        case torch.Generator() | np.random.Generator() | np.random.RandomState() | random.Random():
            yield value
        case partial():
            parts = (value.func, *value.args, *value.keywords.values())
        case MethodType():
            parts = (value.__self__,)
        case FunctionType():
            names = set(value.__code__.co_names) & value.__globals__.keys()
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            parts = (*cells, *(value.__defaults__ or ()), *(value.__globals__[name] for name in names))
        case dict():
            parts = islice(value.values(), _LOOKED_AT)
        case list() | tuple() | set():
            parts = islice(value, _LOOKED_AT)
    for part in parts if depth else ():
        yield from _within(part, depth - 1)
