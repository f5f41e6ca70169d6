"""The one call that shards a finished DataLoader, and the guard that finds those that are not."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, SupportsIndex, TypeAlias, TypeVar, cast

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ddp_patch.agreement import agree
from ddp_patch.errors import (
    AlreadyPatchedError,
    InvalidOptionError,
    NotALoaderError,
    NotDistributedWarning,
    NotPatchedError,
)
from ddp_patch.iterable import ShardedIterable, StreamSampler
from ddp_patch.loader import (
    Level,
    copy_loader,
    generators,
    level,
    require_copyable,
    require_loader,
    samplers_in_use,
    sharding,
)
from ddp_patch.options import Agreement, IterableSharding, Layout, Options, Uneven, check_iterable_sharding
from ddp_patch.plan import Plan
from ddp_patch.seeding import WorkerSeeding
from ddp_patch.world import World, find_world
from ddp_patch.wrappers import DDPBatchSamplerWrapper, DDPSamplerWrapper, EpochSampler

__all__ = ["assert_loaders_patched", "check_loaders_is_patched", "patch_dataloader_to_ddp"]

T = TypeVar("T")
Wrapper = TypeVar("Wrapper", DDPSamplerWrapper[Any], DDPBatchSamplerWrapper[Any])
Loaders: TypeAlias = "DataLoader[Any] | Mapping[str, Loaders] | Sequence[Loaders]"


def patch_dataloader_to_ddp(
    loader: DataLoader[T],
    *,
    uneven: Uneven = "pad",
    layout: Layout = "interleaved",
    agreement: Agreement = "auto",
    seed: int | None = None,
    iterable_sharding: IterableSharding = "exact",
    process_group: dist.ProcessGroup | None = None,
    rank: SupportsIndex | None = None,
    num_replicas: SupportsIndex | None = None,
) -> DataLoader[T]:
    """Return a copy of a finished loader that gives this rank its correct share of the data.

    Call it on every rank of the group, after ``torch.distributed.init_process_group()``. A sampler is shared
    item by item and torch's own ``BatchSampler`` then makes batches on each rank, so ``batch_size`` stays per rank;
    any other batch sampler is shared in whole batches, and an iterable dataset's items are shared as they come.
    Interleaving the ranks' shares gives one stream, which is the same for every number of ranks. Nothing communicates
    after this call.

    Args:
        loader: A finished loader. It is not changed.
        uneven: What happens to the last round when the stream's length is no multiple of the number of ranks:
            ``"pad"`` repeats the stream's first items (equal steps, nothing lost), ``"drop"`` leaves the round out
            (equal steps, nothing repeated), ``"keep"`` gives some ranks one item less (nothing lost or
            repeated, but steps may differ by one).
        layout: ``"interleaved"`` gives rank r the items r, r + num_replicas, ...; ``"contiguous"`` the r-th run of
            items, for which the sampler must know its length.
        agreement: ``"auto"`` and ``"seeded"`` derive every epoch's order from (seed, epoch), whatever the
            ranks' own seeds; ``"ambient"`` lets samplers use the global random states as they are, for ranks that
            are seeded alike. A ``torch.Generator`` of the loader or its samplers is put into rank 0's state
            once, and then gives what it would give in one process.
        seed: A whole number of at least 0; rank 0's is sent to all. Default: rank 0's ``torch.initial_seed()``,
            or 0 in an explicit world.
        iterable_sharding: For iterable datasets. ``"exact"``: every rank reads the whole stream and keeps its share,
            which is right for any dataset. ``"by_worker"``: the dataset splits itself by ``get_worker_info()``, told
            that all ranks' workers are workers of one loader, so that nothing is read twice; whether ranks then make
            the same number of steps is up to the dataset, and ``uneven`` has no say.
        process_group: The group whose ranks share the data; default: all ranks.
        rank: This rank, in ``range(num_replicas)``, for an explicit world: nothing communicates at all.
        num_replicas: The number of ranks of an explicit world.

    Returns:
        A loader of the same class. The same loader where it is sharded already (by this function, or by any other
        ``DistributedSampler``), and where there is only one process: then with a ``NotDistributedWarning``.

    Raises:
        NotALoaderError: ``loader`` is no DataLoader.
        InvalidOptionError: An option has no meaning.
        WorldError: The environment announces several ranks and no process group exists, or this process is
            not in ``process_group``.
        AlreadyPatchedError: The loader was patched for another world.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10), batch_size=2)
        >>> for rank in range(2):
        ...     patched = patch_dataloader_to_ddp(loader, rank=rank, num_replicas=2)
        ...     print(len(patched), [batch.tolist() for batch in patched])
        3 [[0, 2], [4, 6], [8]]
        3 [[1, 3], [5, 7], [9]]
    """
    require_loader("patch_dataloader_to_ddp", loader)
    options = Options(uneven, layout, agreement, seed)
    check_iterable_sharding(iterable_sharding)
    world = find_world(rank, num_replicas, process_group)
    if world is None:
        warnings.warn(
            "patch_dataloader_to_ddp changed nothing: there is no process group and the environment announces no "
            "other rank, so this process takes all data. Call torch.distributed.init_process_group() first if there "
            "are to be several.",
            NotDistributedWarning,
            stacklevel=2,
        )
        return loader
    if _is_sharded_for(world, loader):
        return loader
    require_copyable(loader)
    if level(loader) is Level.ITERABLE:
        _check_iterable(loader, options, iterable_sharding)
    agreed_seed = agree(world, seed, generators([loader, *samplers_in_use(loader)]))
    return _shard(loader, world, replace(options, seed=agreed_seed), iterable_sharding)


def _is_sharded_for(world: World, loader: DataLoader[Any]) -> bool:
    """Tell whether the loader is sharded already; raise if that was done here, for another world."""
    found = sharding(loader)
    ours = found if isinstance(found, EpochSampler) else None
    if ours is not None and (ours.rank, ours.num_replicas) != (world.rank, world.num_replicas):
        raise AlreadyPatchedError(
            f"The loader was patched for rank {ours.rank} of {ours.num_replicas} and cannot be patched again for "
            f"rank {world.rank} of {world.num_replicas}: it would share a share. Patch the original loader instead."
        )
    return found is not None


def _check_iterable(loader: DataLoader[Any], options: Options, iterable_sharding: IterableSharding) -> None:
    """Refuse what cannot hold for a dataset whose items come without indices."""
    name = type(loader.dataset).__name__
    if options.layout == "contiguous" and iterable_sharding == "by_worker":
        raise InvalidOptionError(
            f"layout='contiguous' cannot hold with iterable_sharding='by_worker': {name} itself decides what each "
            "worker reads. Use one or the other."
        )
    if options.layout == "contiguous" and not hasattr(loader.dataset, "__len__"):
        raise InvalidOptionError(
            f"layout='contiguous' cuts a stream into one run for each rank, for which its length must be known, and "
            f"{name} has no len(). Give it a __len__, or use layout='interleaved', which needs none."
        )
    if options.agreement == "ambient" and loader.num_workers > 0:
        raise InvalidOptionError(
            f"agreement='ambient' cannot hold for {name} with num_workers={loader.num_workers}: the stream is made "
            "inside the workers, whose random states differ by rank so that augmentations do. Use agreement='seeded'."
        )


def _shard(loader: DataLoader[T], world: World, options: Options, iterable_sharding: IterableSharding) -> DataLoader[T]:
    """Copy the loader with what chooses its samples sharded, and its workers seeded by rank."""

    def wrapped(wrapper: type[Wrapper], sampler: Any) -> Wrapper:
        # All is agreed by now, so the wrapper is given an explicit world, in which it sends nothing.
        return wrapper(sampler, False, rank=world.rank, num_replicas=world.num_replicas, **asdict(options))

    new: dict[str, Any] = {}
    sharded: EpochSampler[Any]
    batches: Any = loader.batch_sampler
    match level(loader):
        case Level.SAMPLE:
            sharded = new["sampler"] = wrapped(DDPSamplerWrapper, batches.sampler)
            new["batch_size"], new["drop_last"] = batches.batch_size, batches.drop_last
            new["batch_sampler"] = type(batches)(sharded, batches.batch_size, batches.drop_last)
        case Level.BATCH:
            sharded = new["batch_sampler"] = wrapped(DDPBatchSamplerWrapper, batches)
        case Level.UNBATCHED:
            sharded = new["sampler"] = wrapped(DDPSamplerWrapper, loader.sampler)
        case Level.ITERABLE:
            new["dataset"] = ShardedIterable(
                cast(IterableDataset[T], loader.dataset),
                Plan(world.rank, world.num_replicas, options.uneven, options.layout),
                seed=cast(int, options.seed),
                agreement=options.agreement,
                sharding=iterable_sharding,
                batch_size=loader.batch_size or 1,
            )
            sharded = new["sampler"] = StreamSampler(new["dataset"])
            if batches is not None:
                new["batch_sampler"] = type(batches)(sharded, batches.batch_size, batches.drop_last)
    if loader.num_workers > 0:
        new["worker_init_fn"] = WorkerSeeding(loader.worker_init_fn, sharded.seed, world.rank, sharded.epochs)
    return copy_loader(loader, **new)


def check_loaders_is_patched(loaders: Loaders) -> bool:
    """Tell whether every loader is sharded: by this package or by any other ``DistributedSampler``.

    Args:
        loaders: A loader, or any nest of lists, tuples and dicts of loaders.

    Raises:
        NotALoaderError: Something in the nest is neither a nest nor a loader.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10))
        >>> patched = patch_dataloader_to_ddp(loader, rank=0, num_replicas=2)
        >>> check_loaders_is_patched(patched), check_loaders_is_patched({"train": patched, "val": [loader]})
        (True, False)
    """
    return all(sharding(loader) is not None for _, loader in _leaves(loaders, ""))


def assert_loaders_patched(loaders: Loaders) -> None:
    """Raise unless every loader is sharded, naming each that is not by its place.

    Args:
        loaders: A loader, or any nest of lists, tuples and dicts of loaders.

    Raises:
        NotPatchedError: At least one loader is not sharded; an ``AssertionError`` too.
        NotALoaderError: Something in the nest is neither a nest nor a loader.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> patched = patch_dataloader_to_ddp(DataLoader(range(10)), rank=0, num_replicas=2)
        >>> assert_loaders_patched({"train": patched, "val": [patched, DataLoader(range(3))]})
        Traceback (most recent call last):
        ...
        ddp_patch.errors.NotPatchedError: Every rank would get all data from 1 of 3 loaders: val[1]. \
Pass each through patch_dataloader_to_ddp() on every rank.
    """
    leaves = list(_leaves(loaders, ""))
    offenders = [place or "the loader" for place, loader in leaves if sharding(loader) is None]
    if offenders:
        raise NotPatchedError(
            f"Every rank would get all data from {len(offenders)} of {len(leaves)} loaders: {', '.join(offenders)}. "
            "Pass each through patch_dataloader_to_ddp() on every rank."
        )


def _leaves(loaders: Loaders, place: str) -> Iterator[tuple[str, DataLoader[Any]]]:
    """Yield every loader of a nest with its place in it, such as ``val[1]``."""
    match loaders:
        case DataLoader():
            yield place, loaders
        case Mapping():
            for key, nested in loaders.items():
                name = f"{place}.{key}" if place else str(key)
                yield from _leaves(nested, name)
        case list() | tuple():
            for index, nested in enumerate(loaders):
                yield from _leaves(nested, f"{place}[{index}]")
        case _:
            raise NotALoaderError(
                f"Found {loaders!r} ({type(loaders).__name__}) at {place or 'the top'} where a DataLoader or a list, "
                "tuple or dict of them was expected. Leave it out, or pass the loader itself."
            )
