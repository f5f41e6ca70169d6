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
    """Shard a finished loader: return a copy that gives this rank its part, with your sampler intact.

    Call it on every rank, after ``torch.distributed.init_process_group()``. ``batch_size`` stays per rank. Together the
    ranks see what one process would see, in the same order, whatever the number of ranks.

    A sampler is sharded sample by sample, and an iterable dataset item by item. A batch sampler of your own is sharded
    in whole batches. ``share`` changes that.

    After this call, ranks wait for each other only with ``verify=True``, ``agreement="leader"`` or
    ``iterable_sharding="by_worker"``. They still compare their passes through the process group's store, without
    waiting.

    Args:
        loader: A finished loader. It stays unchanged.
        uneven: What to do with the last round if the ranks do not divide the samples evenly. ``"pad"`` repeats the
            first samples (equal steps, nothing lost). ``"drop"`` leaves the round out (equal steps, nothing repeated).
            ``"keep"`` gives some ranks one item less (nothing lost or repeated, but steps may differ by one).
        layout: ``"interleaved"`` gives rank r the items r, r + num_replicas, ...; ``"contiguous"`` gives it the r-th
            run of items. Then the sampler must know its length.
        agreement: How all ranks get the same order. ``"seeded"`` derives each epoch's order from (seed, epoch),
            whatever the ranks' own seeds. ``"auto"`` does the same, but first compares the ranks' orders on a copy's
            first items, and uses ``"leader"`` if they differ. With ``"leader"``, rank 0 draws each epoch and sends
            every rank its share. ``"ambient"`` lets samplers use the global random states, for ranks that are seeded
            alike. A ``torch.Generator`` of the loader or its samplers gets rank 0's state once. From then on it draws
            what it would in one process.
        scalable_shuffle: Compute the order of a shuffled loader (``DataLoader(shuffle=True)`` or a
            ``SubsetRandomSampler``) instead of drawing a permutation; each rank computes only its share. The first
            batch then takes constant time and memory for any number of samples. The order differs from torch's.
        cost: What items cost, in any unit, such as tokens. Each step then costs about the same on all ranks. Pass one
            number of at least 0 for each index of ``loader.dataset`` (a sequence, array or tensor), or a function of
            an index (of a batch, where whole batches are sharded). Every rank calls the function for the items of all
            ranks, so it should be quick. It must return the same for an item on every rank, in every call and after a
            restart; otherwise samples are lost. The items of each window are balanced over ranks and steps, each
            exactly once, and the steps come in a random order. Which samples share a batch then depends on the number
            of ranks. Whole batches stay whole. With ``share="within_batches"``, each batch is divided into parts of
            equal cost.
        cost_of: What a batch costs: the ``"sum"`` of its samples' costs; or, if samples are ``"padded"`` to the
            longest, the largest cost times their number.
        cost_window: How many steps a window has. A larger one balances better, but draws more before the first batch:
            ``cost_window * num_replicas`` batches.
        seed: A whole number of at least 0, the same on every rank. By default each loader gets its own seed, which is
            the same on every rank. It follows from rank 0's ``torch.initial_seed()`` and from how many such loaders
            were patched before. In a ``process_group`` of only some ranks it follows from 0 instead, and in an
            explicit world it is 0. Restoring a state replaces the default by the state's seed.
        iterable_sharding: How to shard an iterable dataset. With ``"exact"``, every rank reads what one process with
            the same workers reads, and keeps its share of each worker's part. With ``"by_worker"``, the dataset splits
            itself by ``get_worker_info()``, which counts all ranks' workers as one loader's, so nothing is read twice.
            Ranks that have batches left give some to those that have none, so that all make the same number of steps.
            ``uneven`` says what happens to the last batches. Every pass then needs all ranks. In an explicit world,
            ``uneven`` must be ``"keep"``, and steps are unequal.
        share: What a rank takes at a time. With ``"samples"``, each rank makes its own batches of every
            num_replicas-th sample. With ``"batches"``, it takes whole batches as the unpatched loader makes them, so
            groups that a sampler puts into one batch stay together. ``"auto"`` takes whole batches of a batch sampler
            that is not torch's own, and of samplers that are known to arrange such groups (pytorch-metric-learning's
            ``MPerClassSampler``, trl's ``RepeatSampler``); otherwise samples. With ``batch_size=None``, items are
            sharded as they are. With ``"within_batches"``, each batch of one process is divided over the ranks: rank r
            takes its items r, r + num_replicas, ... (``layout="contiguous"``: a run), and at least one.
            ``iter_with_weights`` says which of them count. ``len(loader)`` is then that of one process.
        process_group: The group whose ranks shard the data. Default: all ranks.
        device_mesh: A mesh whose data-parallel dimensions shard the data: those named ``dp``, ``dp_replicate``,
            ``dp_shard``, ``fsdp`` and the like. Ranks that differ only in other dimensions (tensor, context or
            pipeline parallelism) get the same batches.
        data_parallel_dimensions: The names of those dimensions, if yours have other names.
        rank: This rank, in ``range(num_replicas)``. It makes an explicit world, in which ranks never wait for each
            other.
        num_replicas: The number of ranks of an explicit world.
        device: Moves batches to a device: ``"cuda:1"``, ``"cuda"`` (torch's current one), a ``torch.device``, or
            ``"auto"``: the accelerator with the number ``LOCAL_RANK``, or the CPU if there is none. It moves tensors
            wherever ``pin_memory`` finds them (in lists, dicts, ...), and whatever has a ``.to()``; all else stays as
            it is. On CUDA, copies have a stream of their own and do not block if the loader has ``pin_memory=True``. If
            the loader has workers, the next batch is copied while the loop works; states do not count it.
        verify: Compare epoch, seed and position between the ranks when an epoch begins, and what they drew when it
            ends.
        timeout: How many seconds the ranks wait for each other, now and later.

    Returns:
        A loader of the same class. Its ``repr()`` and a log line at INFO (logger ``ddp_patch``) say what this rank
        gets: ``shard 1 of 8, samples, 782 steps of 8``. Returns ``loader`` itself if it is already sharded: by this
        function, by any other ``DistributedSampler``, or by a sampler or dataset that stores a rank and a number of
        ranks or says ``is_ddp_aware = True``. Also returns ``loader`` itself, with a ``NotDistributedWarning``, if
        there is only one process. In these cases ``device`` makes a copy that only moves batches.

    Raises:
        NotALoaderError: ``loader`` is not a DataLoader.
        InvalidOptionError: An option has a value that it does not take, or does not work with this loader.
        NoStepsError: A rank would make no step in an epoch, and one process would make some. If the length is not
            known yet, iterating raises it.
        WorldError: The environment announces several ranks but there is no process group; this process is not in
            ``process_group``; or ``num_replicas`` is larger than the process group.
        AlreadyPatchedError: The loader was sharded for another world, or patched with another ``device``.
        UnsupportedLoaderError: The loader cannot be sharded correctly.
        RankMismatchError: The ranks' loaders or options differ; every rank raises it. Also while iterating: the ranks
            make different passes, or read an iterable dataset in different orders. Also in an explicit world: too many
            ranks take the same share.
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
    """Shard several loaders, or return them as they are if there is only one process.

    The ranks synchronise once for all loaders. Unless each can be patched, none is.

    Args:
        operation: What the user called, for errors.
        loaders: The loaders, by the names that errors use; a single loader has an empty name.
        world: The ranks; None if there is only one process.
        choose: Checks the options, which are the same for all.
        nest: A description of the loaders, the same on every rank.
        place_share: Puts a share into a copy of the loader, or with ``change_loader`` into the loader itself.
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
    """Log what this rank gets of each patched loader."""
    if logger.isEnabledFor(logging.INFO):
        for (place, before), loader in zip(given.items(), patched, strict=True):
            if loader is not before and (share := describe_share(loader)) is not None:
                logger.info("%s was patched: %s", place or type(loader).__name__, share)


def _has_others(world: World | None) -> bool:
    return world is not None and max(world.num_replicas, len(world.members or ())) > 1


def _unshared(operation: str, loaders: Mapping[str, L], options: Options) -> list[L]:
    changed = "nothing" if options.device is None else f"only the device of batches ({options.device})"
    warnings.warn(
        f"{operation} changed {changed}: there is no process group and the environment announces no other rank, so "
        "this process takes all data. Call torch.distributed.init_process_group() first to train on several; with "
        "Lightning's Trainer, patch in train_dataloader(), which is called when the group exists.",
        NotDistributedWarning,
        stacklevel=4,
    )
    return list(loaders.values())


def _shareable(loader: L, options: Options, world: World | None) -> LoaderFacts[L]:
    """Look at a loader, and refuse it if it cannot be sharded with these options."""
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
