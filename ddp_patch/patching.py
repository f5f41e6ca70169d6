"""The one call that shards a finished DataLoader, and the guard that finds those that are not."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, SupportsIndex, TypeAlias, TypeVar, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler

from ddp_patch.errors import (
    AlreadyPatchedError,
    InvalidOptionError,
    NotALoaderError,
    NotDistributedWarning,
    NotPatchedError,
    UnsupportedLoaderError,
)
from ddp_patch.loaders.copying import (
    Level,
    batch_sampler_type,
    copy_loader,
    is_loader,
    is_split_by_node,
    level,
    nested_datasets,
    require_copyable,
    require_loader,
    samplers_in_use,
    sharding,
)
from ddp_patch.options import Agreement, IterableSharding, Layout, Options, Uneven
from ddp_patch.ranks.agreement import (
    Agreed,
    Proposal,
    agree,
    describe,
    length_of,
    refusals_told,
    require_length,
)
from ddp_patch.ranks.world import World, find_world
from ddp_patch.shares.epochs import EpochSampler
from ddp_patch.shares.iterables.dataset import IterableWorkerInit, ShardedIterable, StreamSampler
from ddp_patch.streams.orders import ScalableShuffle
from ddp_patch.streams.seeding import WorkerSeeding
from ddp_patch.wrappers import DDPBatchSamplerWrapper, DDPSamplerWrapper

__all__ = ["assert_loaders_patched", "check_loaders_is_patched", "patch_dataloader_to_ddp"]

L = TypeVar("L", bound=DataLoader[Any])
Loaders: TypeAlias = "DataLoader[Any] | Mapping[str, Loaders] | Sequence[Loaders]"


def patch_dataloader_to_ddp(
    loader: L,
    *,
    uneven: Uneven = "pad",
    layout: Layout = "interleaved",
    agreement: Agreement = "auto",
    seed: int | None = None,
    iterable_sharding: IterableSharding = "exact",
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    data_parallel_dimensions: Sequence[str] | None = None,
    rank: SupportsIndex | None = None,
    num_replicas: SupportsIndex | None = None,
    scalable_shuffle: bool = False,
    verify: bool = False,
    timeout: float = 300.0,
) -> L:
    """Return a copy of a finished loader that gives this rank its correct share of the data.

    Call it on every rank of the group, after ``torch.distributed.init_process_group()``. A sampler is shared
    item by item and torch's own ``BatchSampler`` then makes batches on each rank, so ``batch_size`` stays per rank;
    any other batch sampler is shared in whole batches, and an iterable dataset's items are shared as they come.
    Interleaving the ranks' shares gives one stream, which is the same for every number of ranks. Nothing
    communicates after this call, but with ``verify=True`` and under a leader.

    Args:
        loader: A finished loader. It is not changed.
        uneven: What happens to the last round when the stream's length is no multiple of the number of ranks:
            ``"pad"`` repeats the stream's first items (equal steps, nothing lost), ``"drop"`` leaves the round out
            (equal steps, nothing repeated), ``"keep"`` gives some ranks one item less (nothing lost or
            repeated, but steps may differ by one).
        layout: ``"interleaved"`` gives rank r the items r, r + num_replicas, ...; ``"contiguous"`` the r-th run of
            items, for which the sampler must know its length.
        agreement: Why every rank sees the same stream. ``"seeded"``: every epoch's order is derived from (seed, epoch),
            whatever the ranks' own seeds. ``"auto"``: the same; but the ranks compare the order of a copy's first
            items, here, and where these differ it is ``"leader"``. ``"leader"``: rank 0 draws each epoch and sends
            every rank its share. ``"ambient"``: samplers use the global random states as they are, for ranks that are
            seeded alike. A ``torch.Generator`` of the loader or its samplers is put into rank 0's state once, and
            then gives what it would give in one process.
        scalable_shuffle: Of a shuffled loader, ``DataLoader(shuffle=True)`` or a ``SubsetRandomSampler``: compute the
            order, of each rank only its share, instead of drawing a permutation. It takes constant time and
            memory until the first batch, for any number of samples. The order is another one than torch draws.
        seed: A whole number of at least 0; rank 0's is sent to all. Default: rank 0's ``torch.initial_seed()``,
            or 0 in an explicit world and in a ``process_group`` of some ranks.
        iterable_sharding: For iterable datasets. ``"exact"``: every rank reads the whole stream and keeps its share,
            which is right for any dataset. ``"by_worker"``: the dataset splits itself by ``get_worker_info()``, told
            that all ranks' workers are workers of one loader, so that nothing is read twice; whether ranks then make
            the same number of steps is up to the dataset, and ``uneven`` has no say.
        process_group: The group whose ranks share the data; default: all ranks.
        device_mesh: A mesh over whose data-parallel dimensions the data is shared: those named ``dp``,
            ``dp_replicate``, ``dp_shard``, ``fsdp`` and the like. Ranks that differ in its other dimensions only
            (tensor, context or pipeline parallelism) get the same batches.
        data_parallel_dimensions: The names of those dimensions, where they have others.
        rank: This rank, in ``range(num_replicas)``, for an explicit world: nothing communicates at all.
        num_replicas: The number of ranks of an explicit world.
        verify: Compare epoch, seed and position between the ranks at the beginning of each epoch, and what was drawn at
            its end.
        timeout: How many seconds the ranks wait for each other, here and wherever they meet later.

    Returns:
        A loader of the same class. The same loader where it is sharded already (by this function, or by any other
        ``DistributedSampler``), and where there is only one process: then with a ``NotDistributedWarning``.

    Raises:
        NotALoaderError: ``loader`` is no DataLoader.
        InvalidOptionError: An option has no meaning.
        WorldError: The environment announces several ranks and no process group exists, or this process is
            not in ``process_group``.
        AlreadyPatchedError: The loader was patched for another world.
        UnsupportedLoaderError: The loader cannot be copied correctly.
        RankMismatchError: The ranks' loaders or options differ; on every rank.
        MissingRanksError: A rank did not come here in time.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(10), batch_size=2)
        >>> for rank in range(2):
        ...     patched = patch_dataloader_to_ddp(loader, rank=rank, num_replicas=2)
        ...     print(len(patched), [batch.tolist() for batch in patched])
        3 [[0, 2], [4, 6], [8]]
        3 [[1, 3], [5, 7], [9]]
    """
    world = find_world(rank, num_replicas, process_group, device_mesh, data_parallel_dimensions)
    with refusals_told(world):
        require_loader("patch_dataloader_to_ddp", loader)
        options = Options(uneven, layout, agreement, seed, verify, timeout, iterable_sharding, scalable_shuffle)
        if options.scalable_shuffle:
            _require_shuffle(_stream(loader))
        proposal = None if world is None else _propose(loader, options, world)
    if world is None or proposal is None:
        warnings.warn(
            "patch_dataloader_to_ddp changed nothing: there is no process group and the environment announces no "
            "other rank, so this process takes all data. Call torch.distributed.init_process_group() first if there "
            "are to be several.",
            NotDistributedWarning,
            stacklevel=2,
        )
        return loader
    agreed = agree(world, options, proposal)
    return _shard(loader, agreed) if sharding(loader) is None else loader


def _propose(loader: DataLoader[Any], options: Options, world: World) -> Proposal:
    """Return what this rank has to say of its loader, after refusing what cannot hold."""
    _refuse_split_by_node(loader.dataset)
    if (found := _sharding_for(world, loader)) is not None:
        # Its ranks' lengths and generators may differ, rightly; that it is so on all of them is what counts.
        facts = {"loader": type(loader).__qualname__, "shared already by": type(found).__qualname__}
        return Proposal(facts, sampler=None, holders=[])
    require_copyable(loader)
    at = level(loader)
    if at is Level.ITERABLE:
        _check_iterable(loader, options)
    stream = _stream(loader)
    told = describe(stream)
    require_length(options, world, type(stream).__name__, told["stream length"])
    compared = {
        "loader": type(loader).__qualname__,
        "dataset": type(loader.dataset).__qualname__,
        "dataset length": length_of(loader.dataset),
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "shared by": at.value,
        "shared already by": "nothing",
        **told,
    }
    return Proposal(
        compared,
        sampler=stream,
        holders=[loader, *samplers_in_use(loader)],
        dataset=loader.dataset,
        ahead=loader.num_workers * (loader.prefetch_factor or 0),
    )


def _stream(loader: DataLoader[Any]) -> Any:
    """Return what the loader's stream comes from."""
    match level(loader):
        case Level.SAMPLE:
            return cast(Any, loader.batch_sampler).sampler
        case Level.BATCH:
            return loader.batch_sampler
        case Level.UNBATCHED:
            return loader.sampler
        case Level.ITERABLE:
            return loader.dataset


def _sharding_for(world: World, loader: DataLoader[Any]) -> object | None:
    """Return what shards the loader already, if anything does; raise if that was done here, for another world."""
    found = sharding(loader)
    ours = found if isinstance(found, EpochSampler) else None
    if ours is not None and (ours.rank, ours.num_replicas) != (world.rank, world.num_replicas):
        raise AlreadyPatchedError(
            f"The loader was patched for rank {ours.rank} of {ours.num_replicas} and cannot be patched again for "
            f"rank {world.rank} of {world.num_replicas}: it would share a share. Patch the original loader instead."
        )
    return found


def _require_shuffle(stream: object) -> None:
    """Refuse a scalable shuffle of what torch does not shuffle."""
    what = None
    if type(stream) not in {RandomSampler, SubsetRandomSampler}:
        what = "is not torch's RandomSampler or SubsetRandomSampler"
    elif type(stream) is RandomSampler and stream.replacement:
        what = "samples with replacement"
    elif type(stream) is RandomSampler and stream.num_samples > len(stream.data_source):
        what = f"takes {stream.num_samples} samples of {len(stream.data_source)}, some of them again"
    if what is not None:
        raise InvalidOptionError(
            "scalable_shuffle=True computes the order of a loader that torch shuffles, and this one's order comes from "
            f"{type(stream).__name__}, which {what}. Build the loader with shuffle=True, or leave scalable_shuffle "
            "out; a sampler of your own can have items_at(positions, epoch) instead."
        )


def _refuse_split_by_node(dataset: object) -> None:
    """Refuse a share whose number of steps nobody has made equal to the other ranks'."""
    if any(map(is_split_by_node, nested_datasets(dataset))):
        raise UnsupportedLoaderError(
            f"{type(dataset).__name__} was split by split_dataset_by_node() already, and sharing a share again would "
            "lose the rest of it. Patch a loader of the whole dataset, without that call."
        )


def _check_iterable(loader: DataLoader[Any], options: Options) -> None:
    """Refuse what cannot hold for a dataset whose items come without indices."""
    name = type(loader.dataset).__name__
    if options.layout == "contiguous" and options.iterable_sharding == "by_worker":
        raise InvalidOptionError(
            f"layout='contiguous' cannot hold with iterable_sharding='by_worker': {name} itself decides what each "
            "worker reads. Use one or the other."
        )
    if options.agreement == "leader":
        raise InvalidOptionError(
            f"agreement='leader' cannot hold for {name}: rank 0 sends indices, and an iterable dataset has none. Use "
            "agreement='seeded'."
        )
    if options.agreement == "ambient" and loader.num_workers > 0:
        raise InvalidOptionError(
            f"agreement='ambient' cannot hold for {name} with num_workers={loader.num_workers}: the stream is made "
            "inside the workers, whose random states differ by rank so that augmentations do. Use agreement='seeded'."
        )


def _shard(loader: L, agreed: Agreed) -> L:
    """Copy the loader with what chooses its samples sharded, and its workers seeded by rank."""
    # accelerate's own mark on a loader that its `prepare` is not to share.
    new: dict[str, Any] = {"_is_accelerate_prepared": True}
    sharded: EpochSampler[Any]
    batches: Any = loader.batch_sampler
    match level(loader):
        case Level.SAMPLE:
            sharded = new["sampler"] = DDPSamplerWrapper.of(_ordered(batches.sampler, agreed), agreed)
            new["batch_size"], new["drop_last"] = batches.batch_size, batches.drop_last
            new["batch_sampler"] = batch_sampler_type(loader)(sharded, batches.batch_size, batches.drop_last)
            # Of a loader that resumes with accelerate's skip_first_batches, this alone is left to be told epochs.
            new["batch_sampler"].set_epoch = sharded.set_epoch
        case Level.BATCH:
            sharded = new["batch_sampler"] = DDPBatchSamplerWrapper.of(batches, agreed)
            # Nothing is drawn from it; but here frameworks look for a DistributedSampler, and users for its set_epoch.
            new["sampler"] = sharded
        case Level.UNBATCHED:
            sharded = new["sampler"] = DDPSamplerWrapper.of(_ordered(loader.sampler, agreed), agreed)
        case Level.ITERABLE:
            dataset = cast(IterableDataset[Any], loader.dataset)
            plan = agreed.plan(agreed.world.rank)
            new["dataset"] = ShardedIterable(dataset, plan, agreed.options, loader.batch_size or 1, loader.drop_last)
            sharded = new["sampler"] = StreamSampler(new["dataset"], agreed, loader.num_workers, loader.batch_size or 1)
            if batches is not None:
                new["batch_sampler"] = type(batches)(sharded, batches.batch_size, batches.drop_last)
    if loader.num_workers > 0:
        init = loader.worker_init_fn
        if "dataset" in new:
            init = IterableWorkerInit(init, sharded.epochs)
        new["worker_init_fn"] = WorkerSeeding(init, agreed.seed, agreed.world.rank, sharded.epochs)
    patched = copy_loader(loader, **new)
    # accelerate's users and Hugging Face's Trainer call it. A subclass may have one, which need not reach the sampler.
    own = getattr(patched, "set_epoch", None)
    vars(patched)["set_epoch"] = sharded.set_epoch if own is None else partial(_tell_both, own, sharded.set_epoch)
    return patched


def _tell_both(first: Callable[[int], object], second: Callable[[int], object], epoch: int) -> None:
    first(epoch)
    second(epoch)


def _ordered(sampler: Any, agreed: Agreed) -> Any:
    """Return the sampler, or what computes its order where the user wants that."""
    return ScalableShuffle(sampler, agreed.seed) if agreed.options.scalable_shuffle else sampler


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


def _held_in(value: object) -> str | None:
    """Return the attribute in which what is no loader holds some: Lightning's CombinedLoader, PyG's PrefetchLoader."""
    return next((name for name in ("iterables", "loader") if hasattr(value, name)), None)


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
        case _ if is_loader(loaders):
            yield place, cast(DataLoader[Any], loaders)
        case _ if (held := _held_in(loaders)) is not None:
            yield from _leaves(getattr(loaders, held), f"{place}.{held}" if place else held)
        case _:
            raise NotALoaderError(
                f"Found {loaders!r} ({type(loaders).__name__}) at {place or 'the top'} where a DataLoader or a list, "
                "tuple or dict of them was expected. Leave it out, or pass the loader itself."
            )
