"""The one call that shards a finished DataLoader: look at it, agree with the other ranks, copy it with its share."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, SupportsIndex, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from ddp_patch.compat import ACCELERATE_PREPARED
from ddp_patch.errors import NotDistributedWarning
from ddp_patch.loaders.copying import copy_loader
from ddp_patch.loaders.facts import Level, LoaderFacts, look_at
from ddp_patch.loaders.recognition import require_loader
from ddp_patch.options import Agreement, IterableSharding, Layout, Options, Uneven
from ddp_patch.ranks.agreement import Agreed, agree, refusals_told
from ddp_patch.ranks.world import find_world
from ddp_patch.shares.epochs import EpochSampler
from ddp_patch.shares.refusals import require_shareable, require_shuffle
from ddp_patch.streams.seeding import WorkerSeeding
from ddp_patch.wrappers import DDPBatchSamplerWrapper, DDPSamplerWrapper

__all__ = ["patch_dataloader_to_ddp"]

L = TypeVar("L", bound=DataLoader[Any])


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
        facts = look_at(loader)
        if options.scalable_shuffle:
            require_shuffle(facts.stream)
        if world is None:
            warnings.warn(
                "patch_dataloader_to_ddp changed nothing: there is no process group and the environment announces no "
                "other rank, so this process takes all data. Call torch.distributed.init_process_group() first if "
                "there are to be several.",
                NotDistributedWarning,
                stacklevel=2,
            )
            return loader
        require_shareable(facts, options, world)
    stream = facts.stream if facts.sharded_by is None else None
    agreed = agree(world, options, facts.described, stream, batches_ahead=facts.batches_ahead)
    return loader if facts.sharded_by is not None else _shard(facts, agreed)


def _shard(facts: LoaderFacts[L], agreed: Agreed) -> L:
    """Copy the loader with what chooses its samples sharded, and its workers seeded by rank."""
    share_of = _iterable_share if facts.level is Level.ITERABLE else _sampler_share
    sharded, new = share_of(facts, agreed)
    if facts.num_workers > 0:
        init = new.get("worker_init_fn", facts.loader.worker_init_fn)
        new["worker_init_fn"] = WorkerSeeding(init, agreed.seed, agreed.world.rank, sharded.epochs)
    patched = copy_loader(facts.loader, **new, **{ACCELERATE_PREPARED: True})
    # accelerate's users and Hugging Face's Trainer call it. A subclass may have one, which need not reach the sampler.
    own = getattr(patched, "set_epoch", None)
    vars(patched)["set_epoch"] = sharded.set_epoch if own is None else partial(_tell_both, own, sharded.set_epoch)
    return patched


def _sampler_share(facts: LoaderFacts[Any], agreed: Agreed) -> tuple[EpochSampler[Any], dict[str, Any]]:
    """Return this rank's share of what samplers choose, and the loader's attributes that hold it."""
    if facts.level is Level.BATCH:
        batches: DDPBatchSamplerWrapper[Any] = DDPBatchSamplerWrapper.of(facts.stream, agreed)
        # Nothing is drawn from the sampler; but frameworks look for a DistributedSampler there, and users for its
        # set_epoch.
        return batches, {"sampler": batches, "batch_sampler": batches}
    sharded: DDPSamplerWrapper[Any] = DDPSamplerWrapper.of(facts.stream, agreed)
    if facts.level is Level.UNBATCHED:
        return sharded, {"sampler": sharded}
    batch_sampler: Any = facts.makes_batches(sharded, facts.batch_size, facts.drop_last)
    # It alone is left to be told epochs where accelerate's skip_first_batches wraps it.
    batch_sampler.set_epoch = sharded.set_epoch
    new = {"sampler": sharded, "batch_sampler": batch_sampler}
    return sharded, new | {"batch_size": facts.batch_size, "drop_last": facts.drop_last}


def _iterable_share(facts: LoaderFacts[Any], agreed: Agreed) -> tuple[EpochSampler[Any], dict[str, Any]]:
    """Return what begins the epochs of this rank's share of an iterable dataset, and the attributes that hold both."""
    # Imported here, because most loaders do without.
    from ddp_patch.shares.iterables.dataset import ShardedIterable
    from ddp_patch.shares.iterables.sampler import StreamSampler
    from ddp_patch.shares.iterables.workers import IterableWorkerInit

    plan = agreed.plan(agreed.world.rank)
    dataset = ShardedIterable(facts.dataset, plan, agreed.options, facts.batch_size or 1, facts.drop_last)
    sampler = StreamSampler(dataset, facts, agreed)
    new: dict[str, Any] = {"dataset": dataset, "sampler": sampler}
    if facts.num_workers > 0:
        new["worker_init_fn"] = IterableWorkerInit(facts.loader.worker_init_fn, sampler.epochs)
    if facts.batch_size is not None:
        new["batch_sampler"] = facts.makes_batches(sampler, facts.batch_size, facts.drop_last)
    return sampler, new


def _tell_both(first: Callable[[int], object], second: Callable[[int], object], epoch: int) -> None:
    first(epoch)
    second(epoch)
