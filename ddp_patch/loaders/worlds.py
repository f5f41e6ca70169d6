"""Find for which rank of how many a sampler or dataset was made, by the numbers that it stores."""

from collections.abc import Iterator, Mapping
from itertools import islice
from types import MemberDescriptorType
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from torch.utils.data import Dataset, DistributedSampler, Sampler

from ddp_patch.compat.worlds import READERS, WORLD_NAMES, WORLD_WORDS, splits_by_node, webdataset_world
from ddp_patch.streams.generators import LOOKED_AT

__all__ = ["HeldWorld", "held_parts", "stored", "world_of"]

# A rank and the number of ranks.
HeldWorld: TypeAlias = tuple[int, int]


def stored(holder: object) -> dict[str, Any]:
    """Return the attributes that an object stores, in its ``__dict__`` or in slots.

    No property is asked: it runs the user's code, which may cost, raise or change something.
    """
    kept = dict(getattr(holder, "__dict__", {}))
    for kind in type(holder).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType) and kind.__module__ != "builtins":
                try:
                    kept[name] = slot.__get__(holder)
                except AttributeError:
                    continue  # an empty slot
    return kept


def held_parts(holder: object) -> Iterator[Any]:
    """Yield what an object stores, and the datasets and samplers that lists, tuples and dicts among it hold.

    A container may hold as many samples as a dataset has, so only one that begins with a dataset or sampler is read.
    """
    for value in stored(holder).values():
        yield value
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if any(isinstance(part, Dataset | Sampler) for part in islice(held, LOOKED_AT)):
            yield from held


def world_of(holder: object) -> HeldWorld | None:
    """Return the rank and the number of ranks that a sampler or dataset was made for, or None if it holds no such.

    It holds them itself, or in an object that holds such numbers alone, as mosaicml's ``World`` does. A smaller world
    counts before a larger one, because ranks that replicate each other share the data as one.

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
    if isinstance(holder, DistributedSampler):  # torch documents these, and ours compute them
        kept |= {name: getattr(holder, name, None) for name in WORLD_NAMES[0]}
    found = [*_worlds(kept)]
    for name, value in kept.items():
        inner = stored(value)
        if inner and (name in READERS or _is_world(value, inner)):
            found += _worlds(inner)
    return min(found, key=lambda world: (world[1] == 1, world[1]), default=None)


def _worlds(attributes: Mapping[str, Any]) -> Iterator[HeldWorld]:
    for underscore in ("", "_"):
        for names in WORLD_NAMES:
            rank, ranks = (attributes.get(underscore + name) for name in names)
            if _is_whole(rank) and _is_whole(ranks) and 0 <= rank < ranks:
                yield int(rank), int(ranks)


def _is_world(value: object, inner: Mapping[str, Any]) -> bool:
    """Return whether it holds numbers of a world alone, and is neither a dataset nor a sampler: those are asked."""
    if not all(any(word in name for word in WORLD_WORDS) for name in inner):
        return False
    gives = any(hasattr(type(value), name) for name in ("__iter__", "__getitem__", "__len__"))
    return not gives and all(isinstance(number, int) for number in inner.values())


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
