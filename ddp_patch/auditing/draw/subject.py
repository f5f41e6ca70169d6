"""What is audited: a loader, which is copied for every rank, or a factory of one loader for each."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddp_patch.errors import InvalidOptionError, NotALoaderError
from ddp_patch.loaders.copying import Level, copy_loader, is_loader, level, nested_samplers, samplers_in_use, sharding
from ddp_patch.patching import patch_dataloader_to_ddp

__all__ = ["Factory", "Subject", "made_by", "name_of"]

Factory: TypeAlias = Callable[[int, int], DataLoader[Any]]

# Where torch's own samplers keep what they never change, which copies may share.
_READ_ONLY = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is audited: a loader, which is copied for every rank, or a factory of one loader for each.

    Args:
        make: The loader, or ``make(rank, world_size)``.
        patch: Whether a loader is shared by ``patch_dataloader_to_ddp`` first.
        options: Passed on to it.
        set_epoch: Whether the training calls ``set_epoch(epoch)`` before each epoch.
        max_items: How many items of each rank's epoch are drawn at most.
        whole: Whether a last, incomplete batch is left in and one worker reads, so that all is drawn that there is to
            share, and once.
        in_base: Whether indices are drawn as those of the dataset below torch's ``Subset`` layers.

    Raises:
        NotALoaderError: It is neither.
        InvalidOptionError: It is one rank's share already; or options were given that nothing would take.
    """

    make: DataLoader[Any] | Factory
    patch: bool
    options: Mapping[str, Any]
    set_epoch: bool
    max_items: int
    whole: bool = False
    in_base: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.make, DataLoader):
            if not callable(self.make):
                raise NotALoaderError(
                    f"audit needs a DataLoader or a function make(rank, world_size) that returns one, and got "
                    f"{self.make!r} ({type(self.make).__name__}). Pass the finished loader itself."
                )
        elif (found := sharding(self.make)) is not None:
            rank, ranks = (getattr(found, name, "?") for name in ("rank", "num_replicas"))
            raise InvalidOptionError(
                f"audit was given a loader that is one rank's share already ({type(found).__name__}, rank {rank} of "
                f"{ranks}), and other ranks' shares cannot be made of it. Pass a function make(rank, world_size) that "
                "builds each rank's loader, or the loader as it is before it is shared."
            )
        if self.options and not self.patches:
            raise InvalidOptionError(
                f"audit was given {', '.join(self.options)} for patch_dataloader_to_ddp(), which is not called: "
                f"{'patch=False' if isinstance(self.make, DataLoader) else 'a factory makes finished loaders'}. Leave "
                "them out, or pass an unpatched loader."
            )

    @property
    def patches(self) -> bool:
        """Whether ``patch_dataloader_to_ddp`` shares it."""
        return self.patch and isinstance(self.make, DataLoader)

    @property
    def name(self) -> str:
        """What people call it."""
        if isinstance(self.make, DataLoader):
            return type(self.make).__name__
        return name_of(self.make)

    def loader(self, rank: int, world_size: int, is_real: bool = False) -> DataLoader[Any]:
        """Return a rank's loader.

        Args:
            rank: Which rank.
            world_size: Of how many.
            is_real: Whether this process is that rank, with a process group and a copy of all that is audited.
        """
        if not isinstance(self.make, DataLoader):
            made = made_by(self.make, rank, world_size)
            if not is_loader(made):
                raise NotALoaderError(
                    f"The factory {self.name}(rank={rank}, world_size={world_size}) returned {made!r} "
                    f"({type(made).__name__}), not a DataLoader. Return the loader that this rank would iterate."
                )
        else:
            made = self.make if is_real else _copied(self.make)
            if self.patches:
                where: dict[str, Any] = {} if is_real else {"rank": rank, "num_replicas": world_size}
                made = patch_dataloader_to_ddp(made, **where, **self.options)
        return _stream_of(made) if self.whole else made


def name_of(make: Callable[..., Any]) -> str:
    """Return what people call a factory."""
    return getattr(make, "__name__", type(make).__name__)


def made_by(make: Factory, rank: int, world_size: int) -> Any:
    """Return what a factory makes; an error of its own says what it was asked for.

    Args:
        make: ``make(rank, world_size)``.
        rank: Which rank.
        world_size: Of how many.
    """
    try:
        return make(rank, world_size)
    except Exception as error:
        error.add_note(
            f"It was raised by {name_of(make)}({rank}, {world_size}), which audit called as make(rank, world_size)."
        )
        raise


def _stream_of(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader whose items are those that there are to share: none left out, none read by several workers."""
    batches: Any = loader.batch_sampler
    if level(loader) is Level.SAMPLE and batches.drop_last:
        return copy_loader(
            loader, drop_last=False, batch_sampler=BatchSampler(batches.sampler, batches.batch_size, False)
        )
    if level(loader) is Level.ITERABLE:
        # One worker, where there are some: the dataset, or worker_init_fn, may ask which one it is.
        return copy_loader(loader, drop_last=False, num_workers=min(1, loader.num_workers))
    return loader


def _copied(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of the loader whose samplers, or iterable dataset, are its own, with random generators."""
    names = ["dataset"] if level(loader) is Level.ITERABLE else []
    names += ["sampler", "batch_sampler", "generator"]
    memo, new = _shared(loader), {}
    for name in names:
        value = getattr(loader, name)
        try:
            new[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise InvalidOptionError(
                f"audit copies a loader's {name} for every rank, and copying {type(value).__name__} raised "
                f"{type(error).__name__}: {error}. Pass a function make(rank, world_size) that builds each rank's "
                "loader."
            ) from error
    return copy_loader(loader, **new)


def _shared(loader: DataLoader[Any]) -> dict[int, Any]:
    """What copies of samplers share with them, as ``copy.deepcopy`` wants it."""
    is_iterable = level(loader) is Level.ITERABLE
    memo: dict[int, Any] = {} if is_iterable else {id(loader.dataset): loader.dataset}
    holders = [*samplers_in_use(loader), *nested_samplers(loader.sampler), *([loader.dataset] if is_iterable else [])]
    for holder in holders:
        data: Any = torch.Tensor | np.ndarray
        data = data | list | range if type(holder) in _READ_ONLY else data if is_iterable else ()
        for value in getattr(holder, "__dict__", {}).values():
            is_data = isinstance(value, Dataset | nn.Module) and not isinstance(value, IterableDataset)
            if is_data or isinstance(value, data):
                memo[id(value)] = value
            elif type(value) is list and set(map(type, value)) <= {int, float, str}:
                memo[id(value)] = value[:]  # as deepcopy would, without a look at each
    return memo
