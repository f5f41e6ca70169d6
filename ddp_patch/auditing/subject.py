"""Make each rank's loader: a copy of the audited loader, or what the audited factory returns."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp_patch.errors import InvalidOptionError, NotALoaderError, message_of
from ddp_patch.loaders.copying import copy_loader
from ddp_patch.loaders.facts import Level, LoaderFacts, look_at
from ddp_patch.loaders.recognition import is_loader
from ddp_patch.loaders.samples import nested_samplers
from ddp_patch.orders.orders import is_torch_sampler
from ddp_patch.patching import patch_dataloader_to_ddp

__all__ = ["Audited", "Factory", "made_by", "name_of"]


Factory: TypeAlias = Callable[[int, int], DataLoader[Any]]


@dataclass(frozen=True, slots=True)
class Audited:
    """Describe what is audited and how: a loader, copied for every rank, or a factory of each rank's loader.

    Args:
        make: What a look at the loader told, or ``make(rank, world_size)``.
        patch: Whether ``patch_dataloader_to_ddp`` shards a loader first.
        options: Options for ``patch_dataloader_to_ddp``.
        set_epoch: Whether the training calls ``set_epoch(epoch)`` before each epoch.
        max_items: Draw this many items of each rank's epoch, rounded up to a whole batch.
        whole: Whether to keep a last, incomplete batch, so that everything there is to shard is drawn.
        by_one_worker: Whether one worker reads an iterable dataset, however many the loader has.
        by_contents: Whether to compare samples by their contents, because each rank holds data of its own in memory.
        balance: More options for ``patch_dataloader_to_ddp``, by which steps cost alike on all ranks.

    Raises:
        NotALoaderError: ``make`` is neither a loader nor a function.
        InvalidOptionError: The loader is one rank's shard already; the function does not take a rank and a world
            size; or options are given, and nothing is patched.
    """

    make: LoaderFacts[Any] | Factory
    patch: bool
    options: Mapping[str, Any]
    set_epoch: bool
    max_items: int
    whole: bool = False
    by_one_worker: bool = False
    by_contents: bool = False
    balance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.make, LoaderFacts):
            if not callable(self.make):
                raise NotALoaderError(
                    f"audit needs a DataLoader or a function make(rank, world_size) that returns one, and got "
                    f"{self.make!r} ({type(self.make).__name__}). Pass the finished loader itself."
                )
            _require_two_arguments(self.make)
        elif (found := self.make.sharded_by) is not None:
            rank, ranks = self.make.made_for or ("?", "?")
            raise InvalidOptionError(
                f"audit was given a loader that is one rank's share already ({type(found).__name__}, rank {rank} of "
                f"{ranks}), and other ranks' shares cannot be made of it. Pass a function make(rank, world_size) that "
                "builds each rank's loader, or the loader as it is before it is shared."
            )
        if self.options and not self.patches:
            raise InvalidOptionError(
                f"audit was given {', '.join(self.options)} for patch_dataloader_to_ddp(), which is not called: "
                f"{'patch=False' if isinstance(self.make, LoaderFacts) else 'a factory makes finished loaders'}. Leave "
                "them out, or pass an unpatched loader."
            )

    @property
    def patches(self) -> bool:
        """Tell whether ``patch_dataloader_to_ddp`` shards the loader."""
        return self.patch and isinstance(self.make, LoaderFacts)

    @property
    def is_made(self) -> bool:
        """Tell whether a factory makes each rank's loader."""
        return not isinstance(self.make, LoaderFacts)

    @property
    def name(self) -> str:
        """Return the name to show in reports."""
        if isinstance(self.make, LoaderFacts):
            return type(self.make.loader).__name__
        return name_of(self.make)

    def made_for(self, rank: int, world_size: int, is_real: bool = False) -> LoaderFacts[Any]:
        """Make a rank's loader, and look at it.

        Args:
            rank: The rank.
            world_size: The number of ranks.
            is_real: Whether this process is that rank, with a process group and its own copy of the subject.
        """
        if not isinstance(self.make, LoaderFacts):
            made = made_by(self.make, rank, world_size)
            if not is_loader(made):
                raise NotALoaderError(
                    f"The factory {self.name}(rank={rank}, world_size={world_size}) returned {made!r} "
                    f"({type(made).__name__}), not a DataLoader. Return the loader that this rank would iterate."
                )
        else:
            made = self.make.loader if is_real else _copied(self.make)
            if self.patches:
                where: dict[str, Any] = {} if is_real else {"rank": rank, "num_replicas": world_size}
                made = patch_dataloader_to_ddp(made, **where, **self.options, **self.balance)
        facts = look_at(made)
        if self.whole:
            facts = _whole(facts)
        return look_at(copy_loader(facts.loader, num_workers=1)) if self.by_one_worker else facts


def _require_two_arguments(make: Factory) -> None:
    """Refuse a function that cannot be called as ``make(rank, world_size)``."""
    try:
        inspect.signature(make).bind(0, 1)
    except TypeError as error:
        raise InvalidOptionError(
            f"audit calls a factory as make(rank, world_size) for every rank, and {name_of(make)} cannot be called so: "
            f"{error}. Give it these two arguments, or pass the finished loader itself."
        ) from None
    except ValueError:  # some functions in C do not tell their arguments
        pass


def name_of(make: Callable[..., Any]) -> str:
    """Return a factory's name."""
    return getattr(make, "__name__", type(make).__name__)


def made_by(make: Factory, rank: int, world_size: int) -> Any:
    """Call a factory; note on any error for which rank it was called.

    Args:
        make: ``make(rank, world_size)``.
        rank: The rank.
        world_size: The number of ranks.
    """
    try:
        return make(rank, world_size)
    except Exception as error:
        error.add_note(
            f"It was raised by {name_of(make)}({rank}, {world_size}), which audit called as make(rank, world_size)."
        )
        raise


def _whole(facts: LoaderFacts[Any]) -> LoaderFacts[Any]:
    """Return a look at the loader as one that leaves nothing out."""
    if facts.level is Level.SAMPLE and facts.drop_last:
        batches = facts.makes_batches(facts.stream.source, facts.batch_size, False)
        return look_at(copy_loader(facts.loader, **facts.placed({"drop_last": False, "batch_sampler": batches})))
    if facts.level is Level.ITERABLE:
        return look_at(copy_loader(facts.loader, drop_last=False))
    return facts


def _copied(facts: LoaderFacts[Any]) -> DataLoader[Any]:
    """Return a copy of the loader with its own samplers or iterable dataset, and its own random generators."""
    names = ["dataset"] if facts.level is Level.ITERABLE else []
    names += ["sampler", "batch_sampler", "generator"]
    memo, new = _shared(facts), {}
    for name in names:
        value = getattr(facts.loader, name)
        try:
            new[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise InvalidOptionError(
                f"audit copies a loader's {name} for every rank, and copying {type(value).__name__} raised "
                f"{type(error).__name__}: {message_of(error)}. Pass a function make(rank, world_size) that builds each "
                "rank's loader."
            ) from error
    return copy_loader(facts.loader, **new)


def _shared(facts: LoaderFacts[Any]) -> dict[int, Any]:
    """Return what copies share with the loader instead of copying it, as a memo for ``copy.deepcopy``."""
    is_iterable = facts.level is Level.ITERABLE
    memo: dict[int, Any] = {} if is_iterable else {id(facts.dataset): facts.dataset}
    holders = [*facts.samplers, *nested_samplers(facts.loader.sampler), *([facts.dataset] if is_iterable else [])]
    for holder in holders:
        data = _data_types(holder, is_iterable)
        for value in getattr(holder, "__dict__", {}).values():
            is_data = isinstance(value, Dataset | nn.Module) and not isinstance(value, IterableDataset)
            if is_data or isinstance(value, data):
                memo[id(value)] = value
            elif type(value) is list and set(map(type, value)) <= {int, float, str}:
                memo[id(value)] = value[:]  # the same copy that deepcopy makes, without a look at each element
    return memo


def _data_types(holder: object, is_iterable: bool) -> tuple[type, ...]:
    """Return the types of attributes that are large data, which the holder does not change."""
    if is_torch_sampler(holder):
        return (torch.Tensor, np.ndarray, list, range)
    return (torch.Tensor, np.ndarray) if is_iterable else ()
