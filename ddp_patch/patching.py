"""Shard a finished DataLoader in one call: look at it, agree with the other ranks, copy it with this rank's share."""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from ddp_patch.costs import Cost, CostOf
from ddp_patch.devices import Device, device_here
from ddp_patch.errors import NotDistributedWarning
from ddp_patch.loaders.copying import copy_loader
from ddp_patch.loaders.facts import LoaderFacts, look_at
from ddp_patch.loaders.nests import told_at
from ddp_patch.loaders.on_device import copies_ahead
from ddp_patch.loaders.recognition import require_loader, tell_if_assumed
from ddp_patch.options import COST_WINDOW, Agreement, IterableSharding, Layout, Options, Share, Uneven
from ddp_patch.patched import PatchedLoader
from ddp_patch.ranks.agreement import ONE, Subject, agree, refusals_told
from ddp_patch.ranks.world import World, find_world
from ddp_patch.sharding import only_moved, require_device, shard
from ddp_patch.shares.balance import costs_compared
from ddp_patch.shares.description import describe_share
from ddp_patch.shares.refusals import require_shareable, require_shuffle
from ddp_patch.shares.units import unit_shared

__all__ = ["log_patched", "patch_dataloader_to_ddp", "patch_each"]

logger: logging.Logger = logging.getLogger("ddp_patch")

T = TypeVar("T")
L = TypeVar("L", bound=DataLoader[Any])


def patch_dataloader_to_ddp(
    loader: DataLoader[T],
    *,
    uneven: Uneven = "pad",
    layout: Layout = "interleaved",
    agreement: Agreement = "auto",
    seed: int | None = None,
    iterable_sharding: IterableSharding = "exact",
    share: Share = "auto",
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    data_parallel_dimensions: Sequence[str] | None = None,
    rank: SupportsIndex | None = None,
    num_replicas: SupportsIndex | None = None,
    scalable_shuffle: bool = False,
    cost: Cost | None = None,
    cost_of: CostOf = "sum",
    cost_window: int = COST_WINDOW,
    device: Device | None = None,
    verify: bool = False,
    timeout: float = 300.0,
) -> PatchedLoader[T]:
    """Return a copy of a finished loader that gives this rank its correct share of the data.

    Call it on every rank of the group, after ``torch.distributed.init_process_group()``. It shards a sampler item by
    item, and torch's own ``BatchSampler`` then makes batches on each rank, so ``batch_size`` stays per rank. It shards
    any other batch sampler in whole batches, and an iterable dataset item by item; ``share`` chooses otherwise.
    Interleave the ranks' shares and you get one stream, the same for any number of ranks. After this call, ranks wait
    for each other only with ``verify=True``, under a leader, or with ``iterable_sharding="by_worker"``. Without
    waiting, each leaves in the process group's store which passes it makes, and reads what others left.

    Args:
        loader: A finished loader. It stays unchanged.
        uneven: What to do with the last round when the number of ranks does not divide the stream's length.
            ``"pad"`` repeats the stream's first items (equal steps, nothing lost). ``"drop"`` leaves the round out
            (equal steps, nothing repeated). ``"keep"`` gives some ranks one item less (nothing lost or repeated, but
            steps may differ by one).
        layout: ``"interleaved"`` gives rank r the items r, r + num_replicas, ...; ``"contiguous"`` gives it the r-th
            run of items, and the sampler must know its length.
        agreement: How every rank comes to see the same stream. ``"seeded"`` derives each epoch's order from
            (seed, epoch), whatever the ranks' own seeds. ``"auto"`` does the same, but first compares the ranks' orders
            on a copy's first items, and uses ``"leader"`` if they differ. With ``"leader"``, rank 0 draws each epoch
            and sends every rank its share. ``"ambient"`` leaves samplers the global random states, for ranks that are
            seeded alike. A ``torch.Generator`` of the loader or its samplers gets rank 0's state once, and from then on
            draws what it would in one process.
        scalable_shuffle: Compute the order of a shuffled loader (``DataLoader(shuffle=True)`` or a
            ``SubsetRandomSampler``) instead of drawing a permutation; each rank computes only its share. The first
            batch then takes constant time and memory for any number of samples. The order differs from torch's.
        cost: What items cost, in any unit, such as how many tokens they have: then each step costs alike on all ranks.
            One number of at least 0 for each index of ``loader.dataset`` (a sequence, array or tensor), or a function
            of an item of the stream: of an index, or where whole batches are shared, of a batch. Every rank calls it
            for the items of all ranks, so let it be quick, and say the same of an item on every rank, in every call
            and after a restart: else samples are lost. The items of a window are dealt anew, each exactly once, in
            a random order of steps; which samples share a batch then depends on the number of ranks. Whole batches
            stay whole. With ``share="within_batches"``, each batch is divided so that the parts cost alike.
        cost_of: What a batch costs: the ``"sum"`` of its samples' costs, or where these are ``"padded"`` to the
            longest, the largest cost times their number.
        cost_window: How many steps a window has. A larger one balances better, and more is drawn before the first
            batch: ``cost_window * num_replicas`` batches.
        seed: A whole number of at least 0, the same on every rank. Default: a seed of this loader's own, the same on
            every rank, which follows from rank 0's ``torch.initial_seed()`` and how many such loaders were patched
            before; in a ``process_group`` of only some ranks it follows from 0 instead, and in an explicit world it
            is 0. A restored state's seed replaces the default.
        iterable_sharding: How to shard an iterable dataset. With ``"exact"``, every rank reads what one process with
            the same workers reads, and keeps its share of each worker's part. With ``"by_worker"``, the dataset splits
            itself by ``get_worker_info()``, which counts all ranks' workers as one loader's. Nothing is read twice.
            Ranks whose workers still have batches hand some to those that have none, so that all make the same number
            of steps, and ``uneven`` says what becomes of the last ones; every pass then needs all ranks. In an explicit
            world, it must be ``"keep"``, and steps are unequal.
        share: What a rank takes at a time. With ``"samples"``, each rank makes its own batches of every
            num_replicas-th sample. With ``"batches"``, it takes whole batches, as the unpatched loader makes them: so
            groups stay together that a sampler puts into one batch. ``"auto"`` takes whole batches of a batch sampler
            that is not torch's own, and of samplers that are known to arrange such groups (pytorch-metric-learning's
            ``MPerClassSampler``, trl's ``RepeatSampler``); else samples. With ``batch_size=None``, items are shared as
            they are. With ``"within_batches"``, every batch that one process makes is one step: rank r takes its items
            r, r + num_replicas, ... (``layout="contiguous"``: a run), and at least one, as ``iter_with_weights`` tells
            apart. ``len(loader)`` is then one process's.
        process_group: The group whose ranks share the data. Default: all ranks.
        device_mesh: A mesh whose data-parallel dimensions shard the data: those named ``dp``, ``dp_replicate``,
            ``dp_shard``, ``fsdp`` and the like. Ranks that differ only in other dimensions (tensor, context or
            pipeline parallelism) get the same batches.
        data_parallel_dimensions: The names of those dimensions, if yours are called otherwise.
        rank: This rank, in ``range(num_replicas)``, for an explicit world, where ranks never wait for each other.
        num_replicas: The number of ranks of an explicit world.
        device: Where batches come: ``"cuda:1"``, ``"cuda"`` (torch's current one), a ``torch.device``, or ``"auto"``,
            the accelerator whose number is ``LOCAL_RANK``, and the CPU where there is none. Tensors in the nests that
            ``pin_memory`` knows come there, and whatever has a ``.to()``; all else stays as it is. On CUDA, copies are
            made in a stream of their own and do not block, if the loader has ``pin_memory=True``. Where it has workers,
            one batch is copied while the loop works on the one before; states do not count it.
        verify: Compare epoch, seed and position between the ranks when an epoch begins, and what they drew when it
            ends.
        timeout: How many seconds the ranks wait for each other, here and whenever they meet later.

    Returns:
        A loader of the same class, of which ``repr()`` and a log line at INFO (logger ``ddp_patch``) say what this
        rank gets: ``shard 1 of 8, samples, 782 steps of 8``. Returns ``loader`` itself if it is already sharded (by
        this function, any other ``DistributedSampler``, or a sampler or dataset that holds the numbers of one rank of
        several or says ``is_ddp_aware = True``) or, with a ``NotDistributedWarning``, if there is only one process.
        With ``device``, it is a copy instead, in which nothing is changed but where batches come.

    Raises:
        NotALoaderError: ``loader`` is no DataLoader.
        InvalidOptionError: An option has no valid value, or cannot hold for this loader.
        NoStepsError: A rank would make no step in an epoch in which one process makes some. Where the length is not
            known here, iterating raises it.
        WorldError: The environment announces several ranks but there is no process group, this process is not in
            ``process_group``, or ``num_replicas`` is more than the process group has ranks.
        AlreadyPatchedError: The loader was sharded for another world, or patched with another ``device``.
        UnsupportedLoaderError: The loader cannot be copied correctly.
        RankMismatchError: The ranks' loaders or options differ; raised on every rank. Also while iterating: the ranks
            make different passes, or read an iterable dataset in different orders. Also in an explicit world: too many
            ranks take one share.
        MissingRanksError: A rank did not arrive in time.

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
    sharing = (uneven, layout, agreement, seed, verify, timeout, iterable_sharding, scalable_shuffle, share)
    more = (cost, cost_of, cost_window, device)
    (patched,) = patch_each("patch_dataloader_to_ddp", {"": loader}, world, lambda: Options(*sharing, *more))
    log_patched({"": loader}, [patched])
    return cast("PatchedLoader[T]", patched)  # it has what that type says, and the class of the given loader


def patch_each(
    operation: str,
    loaders: Mapping[str, L],
    world: World | None,
    choose: Callable[[], Options],
    nest: str = ONE,
    place_share: Callable[..., L] = copy_loader,
) -> list[L]:
    """Return a copy of each of several loaders that gives this rank its share, or the loaders if nothing is to share.

    The ranks meet once for all, and no loader is patched unless each can be.

    Args:
        operation: What the user called, for errors.
        loaders: The loaders, by the places that errors name; the place of one alone is empty.
        world: The ranks that share; None if there is only one process.
        choose: Checks the options, which hold for all.
        nest: Which loaders these are, in words: the same on every rank.
        place_share: Places a share into a copy of the loader, or with ``change_loader`` into the loader itself.
    """
    with refusals_told(world):
        for place, loader in loaders.items():
            with told_at(place):
                require_loader(operation, loader)
        options = choose()
        device = device_here(options.device, is_one_of_several=_has_others(world))
        options = replace(options, device=device)
        if world is None and not options.scalable_shuffle and device is None:
            return _unshared(operation, loaders, options)
        looked = {}
        for place, loader in loaders.items():
            with told_at(place):
                looked[place] = _shareable(loader, options, world)
        if world is None:
            as_they_are = {place: only_moved(facts, device, place_share) for place, facts in looked.items()}
            return _unshared(operation, as_they_are, options)
        subjects = []
        for place, facts in looked.items():
            with told_at(place):
                subjects.append(_subject(place, facts, options))
    for facts in looked.values():
        tell_if_assumed(facts.sharded_by, stacklevel=4)
    agreed = agree(world, options, subjects, nest)
    patched = []
    for (place, facts), mine in zip(looked.items(), agreed, strict=True):
        with told_at(place):
            is_shared = facts.sharded_by is not None
            patched.append(only_moved(facts, device, place_share) if is_shared else shard(facts, mine, place_share))
    return patched


def log_patched(given: Mapping[str, L], patched: Sequence[L]) -> None:
    """Log a line for each loader that was patched: what this rank gets of it."""
    if logger.isEnabledFor(logging.INFO):
        for (place, before), loader in zip(given.items(), patched, strict=True):
            if loader is not before and (share := describe_share(loader)) is not None:
                logger.info("%s was patched: %s", place or type(loader).__name__, share)


def _has_others(world: World | None) -> bool:
    return world is not None and max(world.num_replicas, len(world.members or ())) > 1


def _unshared(operation: str, loaders: Mapping[str, L], options: Options) -> list[L]:
    changed = "nothing" if options.device is None else f"nothing but that batches come on {options.device}"
    warnings.warn(
        f"{operation} changed {changed}: there is no process group and the environment announces no other rank, so "
        "this process takes all data. Call torch.distributed.init_process_group() first if there are to be several; "
        "with Lightning's Trainer, patch in train_dataloader(), which is called when the group exists.",
        NotDistributedWarning,
        stacklevel=4,
    )
    return list(loaders.values())


def _shareable(loader: L, options: Options, world: World | None) -> LoaderFacts[L]:
    """Look at a loader, and refuse what cannot be shared as the user says."""
    facts = look_at(loader)
    if isinstance(options.device, torch.device):
        require_device(facts, options.device)
    if options.scalable_shuffle and facts.sharded_by is None:
        require_shuffle(facts.stream)
    if world is not None:
        facts = unit_shared(facts, options.share)
        require_shareable(facts, options, world)
    return facts


def _subject(place: str, facts: LoaderFacts[Any], options: Options) -> Subject:
    ahead = facts.batches_ahead + copies_ahead(facts, options)
    if facts.sharded_by is not None:
        return Subject(facts.described, None, ahead, facts.made_for, place)
    compared = {**facts.described, **costs_compared(facts, options)}
    return Subject(compared, facts.stream, ahead, facts.made_for, place)
