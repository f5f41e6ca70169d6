"""Make each rank's loader, a copy of the audited one or what the audited factory returns; and describe it."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ddp_patch.auditing.given import Units
from ddp_patch.errors import InvalidOptionError, message_of
from ddp_patch.loaders.copying import copy_loader
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit, look_at
from ddp_patch.loaders.recognition import require_loader
from ddp_patch.loaders.samples import length_of, nested_samplers
from ddp_patch.options import Share
from ddp_patch.orders.orders import is_torch_sampler
from ddp_patch.patching import patch_dataloader_to_ddp
from ddp_patch.sharding.refusals import ignored_index_text, unit_shared
from ddp_patch.sharding.sampler import EpochSampler

__all__ = ["Audited", "Factory", "Traits", "base_of", "indexed", "made_by", "name_of"]


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

    Raises:
        InvalidOptionError: The loader is one rank's shard already; or options are given, and nothing is patched.
    """

    make: LoaderFacts[Any] | Factory
    patch: bool
    options: Mapping[str, Any]
    set_epoch: bool
    max_items: int
    whole: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.make, LoaderFacts) and (found := self.make.sharded_by) is not None:
            rank, ranks = self.make.made_for or ("?", "?")
            raise InvalidOptionError(
                f"audit was given a loader that is one rank's share already ({type(found).__name__}, rank {rank} of "
                f"{ranks}), and other ranks' shares cannot be made of it. Pass a function make(rank, world_size) that "
                "builds each rank's loader, or the loader as it is before it is shared."
            )
        if self.options and not self.patches:
            raise InvalidOptionError(
                f"audit was given {', '.join(self.options)} for patch_dataloader_to_ddp(), which is not called: "
                f"{'a factory makes finished loaders' if self.is_made else 'patch=False'}. Leave them out, or pass an "
                "unpatched loader."
            )

    @property
    def is_made(self) -> bool:
        """Tell whether a factory makes each rank's loader."""
        return not isinstance(self.make, LoaderFacts)

    @property
    def patches(self) -> bool:
        """Tell whether ``patch_dataloader_to_ddp`` shards the loader."""
        return self.patch and not self.is_made

    @property
    def name(self) -> str:
        """Return the name to show in reports."""
        return type(self.make.loader).__name__ if isinstance(self.make, LoaderFacts) else name_of(self.make)

    def made_for(self, rank: int, world_size: int, is_real: bool) -> LoaderFacts[Any]:
        """Make a rank's loader, and look at it.

        Args:
            rank: The rank.
            world_size: The number of ranks.
            is_real: Whether this process is that rank, with a process group and its own copy of the subject.
        """
        if isinstance(self.make, LoaderFacts):
            given = _whole(self.make, self.options.get("share", "auto")) if self.whole else self.make
            made = given.loader if is_real else _copied(given)
            if self.patches:
                where: dict[str, Any] = {} if is_real else {"rank": rank, "num_replicas": world_size}
                made = patch_dataloader_to_ddp(made, **where, **self.options)
            return look_at(made)
        made = made_by(self.make, rank, world_size)
        require_loader(f"audit, from {self.name}(rank={rank}, world_size={world_size}),", made)
        return _whole(look_at(made), "auto") if self.whole else look_at(made)


def name_of(make: Callable[..., Any]) -> str:
    """Return a factory's name."""
    return getattr(make, "__name__", type(make).__name__)


def made_by(make: Factory, rank: int, world_size: int) -> Any:
    """Call a factory; note on any error for which rank it was called."""
    try:
        return make(rank, world_size)
    except Exception as error:
        error.add_note(
            f"It was raised by {name_of(make)}({rank}, {world_size}), which audit called as make(rank, world_size)."
        )
        raise


def _whole(facts: LoaderFacts[Any], share: Share) -> LoaderFacts[Any]:
    """Return a look at the loader as one that leaves nothing out; where whole batches are shared, no batch."""
    if not facts.drop_last or facts.unit in {ShardedUnit.BATCH, ShardedUnit.UNBATCHED}:
        return facts
    if facts.unit is ShardedUnit.ITERABLE:
        return look_at(copy_loader(facts.loader, drop_last=False))
    if unit_shared(facts, share).unit is ShardedUnit.BATCH:
        return facts
    batches = BatchSampler(facts.stream.source, cast(int, facts.batch_size), False)
    return look_at(copy_loader(facts.loader, **facts.placed({"drop_last": False, "batch_sampler": batches})))


def _copied(facts: LoaderFacts[Any]) -> DataLoader[Any]:
    """Return a copy of the loader with its own samplers or iterable dataset, and its own random generators."""
    names = ["dataset"] if facts.unit is ShardedUnit.ITERABLE else []
    memo, new = _shared(facts), {}
    for name in (*names, "sampler", "batch_sampler", "generator"):
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
    """Return large data that copies share with the loader, as a memo for ``copy.deepcopy``."""
    is_iterable = facts.unit is ShardedUnit.ITERABLE
    memo: dict[int, Any] = {} if is_iterable else {id(facts.dataset): facts.dataset}
    for holder in (*facts.samplers, *nested_samplers(facts.loader.sampler), *([facts.dataset] if is_iterable else [])):
        kinds: tuple[type, ...] = (Dataset, nn.Module)
        if is_iterable or is_torch_sampler(holder):
            kinds += (torch.Tensor, np.ndarray)
        if is_torch_sampler(holder):
            kinds += (list, range)
        values = getattr(holder, "__dict__", {}).values()
        memo |= {id(each): each for each in values if isinstance(each, kinds) and not isinstance(each, IterableDataset)}
    return memo


class _Index(Dataset[Any]):
    """Stands for a dataset, and gives an index itself where that gives a sample."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return index

    def __getitems__(self, indices: Any) -> list[Any]:
        """Return all indices of a batch, as torch asks for them at once."""
        return list(indices)


def indexed(dataset: Any) -> Dataset[Any]:
    """Return a dataset that gives for an index that of the sample below the dataset's ``Subset`` layers.

    Examples:
        >>> indexed(Subset(Subset("abcdef", [1, 3, 5]), [2, 0])).__getitems__([0, 1])
        [5, 1]
    """
    return Subset(indexed(dataset.dataset), dataset.indices) if isinstance(dataset, Subset) else _Index(dataset)


def base_of(dataset: Any) -> Any:
    """Return the dataset below all ``Subset`` layers, or the dataset itself where it has none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _is_in_memory(dataset: Any) -> bool:
    """Tell whether a dataset holds its samples, and gives them by looking them up."""
    if isinstance(dataset, ConcatDataset):
        return all(map(_is_in_memory, dataset.datasets))
    return isinstance(base_of(dataset), list | tuple | range | np.ndarray | torch.Tensor | TensorDataset)


@dataclass(frozen=True, slots=True)
class Traits:
    """Describe a rank's loader.

    Attributes:
        units: Whether ranks shard samples or whole batches.
        is_iterable: Whether the dataset is iterable, so that it is read and has no indices.
        readers: How many workers read it; 1 of any other dataset.
        divides_batches: Whether each rank takes a part of every batch of one process.
        drops_batch: Whether the loader leaves out a last, incomplete batch.
        drops_round: Whether a sampler leaves out the last, incomplete round of ranks.
        base_length: Samples in the dataset below torch's ``Subset`` layers; None where it is iterable or has no length.
        is_in_memory: Whether it holds its samples.
        ignores_index: Why indices choose nothing of the dataset, and what to do; empty if they may choose.
    """

    units: Units
    is_iterable: bool
    readers: int
    divides_batches: bool
    drops_batch: bool
    drops_round: bool
    base_length: int | None
    is_in_memory: bool
    ignores_index: tuple[str, str]

    @classmethod
    def of(cls, facts: LoaderFacts[Any]) -> "Traits":
        """Describe a loader that was looked at."""
        batches = None if facts.unit is ShardedUnit.UNBATCHED else facts.iterated
        dataset, is_iterable = facts.dataset, facts.unit is ShardedUnit.ITERABLE
        by = facts.sharded_by if isinstance(facts.sharded_by, EpochSampler) else None
        divides = by is not None and by.agreed.options.divides_batches
        gives_batches = any(isinstance(sampler, BatchSampler) for sampler in facts.stream.samplers)
        are_batches = facts.unit is ShardedUnit.BATCH or (facts.unit is ShardedUnit.UNBATCHED and gives_batches)
        return cls(
            units="batches" if are_batches and not divides else "samples",
            is_iterable=is_iterable,
            readers=max(1, facts.num_workers) if is_iterable else 1,
            divides_batches=divides,
            drops_batch=facts.drop_last or getattr(batches, "drop_last", False) is True,
            drops_round=any(getattr(sampler, "drop_last", False) is True for sampler in facts.samplers),
            base_length=None if is_iterable else length_of(base_of(dataset), ()),
            is_in_memory=_is_in_memory(dataset),
            ignores_index=("", "") if is_iterable else ignored_index_text(dataset),
        )
