"""Put a rank's share into a copy of a loader."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from ddp_patch.compat.frameworks import ACCELERATE_PREPARED
from ddp_patch.compat.torch_loaders import MAKE_ITERATOR
from ddp_patch.errors import AlreadyPatchedError
from ddp_patch.loaders.copying import copy_loader
from ddp_patch.loaders.facts import Level, LoaderFacts
from ddp_patch.loaders.moving import Mover
from ddp_patch.loaders.on_device import ON_DEVICE, copies_ahead, device_for, device_of, require_movable
from ddp_patch.loaders.repeating import OneIterator
from ddp_patch.options import Options
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.ranks.histories import Pace
from ddp_patch.shares.epochs import EpochSampler
from ddp_patch.stateful import OwnMethods
from ddp_patch.streams.seeding import WorkerSeeding
from ddp_patch.wrappers import DDPBatchSamplerWrapper, DDPSamplerWrapper

__all__ = ["only_moved", "require_device", "shard"]

L = TypeVar("L", bound=DataLoader[Any])


def shard(facts: LoaderFacts[L], agreed: Agreed, place: Callable[..., L] = copy_loader) -> L:
    """Return a loader with its sampler or dataset sharded and its workers seeded by rank.

    Args:
        facts: The loader to shard.
        agreed: What the ranks agreed on.
        place: Places what shards into a copy of the loader (``copy_loader``) or into itself (``change_loader``).
    """
    agreed = replace(agreed, options=replace(agreed.options, device=device_for(facts, agreed.options)))
    share_of = _iterable_share if facts.level is Level.ITERABLE else _sampler_share
    sharded, new = share_of(facts, agreed)
    ahead = facts.batches_ahead + copies_ahead(facts, agreed.options)
    sharded.watch.set_pace(type(facts.loader).__name__, _pace(facts, ahead), sharded.least_share)
    if facts.num_workers > 0:
        init = new.get("worker_init_fn", facts.loader.worker_init_fn)
        new["worker_init_fn"] = WorkerSeeding(init, agreed.seed, agreed.world.rank, sharded.epochs)
    make_mover, device = _mover_of(facts, agreed.options)
    patched = place(facts.loader, **facts.placed(new), **{ACCELERATE_PREPARED: True}, **device)
    make_iterator = _iterators_of(patched, facts, sharded, new, make_mover)
    # A single iterator for all epochs moves its batches by itself.
    OwnMethods(patched, sharded, make_iterator, make_mover if facts.repeater is None else None)
    # accelerate's users and Hugging Face's Trainer call set_epoch. A subclass's own may not reach the sampler.
    own = getattr(patched, "set_epoch", None)
    vars(patched)["set_epoch"] = sharded.set_epoch if own is None else partial(_tell_both, own, sharded.set_epoch)
    return patched


def require_device(facts: LoaderFacts[Any], device: torch.device) -> None:
    """Refuse a loader whose batches cannot be moved to the device."""
    before = device_of(facts.loader)
    if before == device:
        return
    if MAKE_ITERATOR in vars(facts.loader):
        chosen = None if before is None else str(before)
        raise AlreadyPatchedError(
            f"The loader was patched with device={chosen!r} and cannot be patched again with device='{device}'. "
            "Pass device= when the original loader is patched."
        )
    require_movable(facts, device)


def only_moved(facts: LoaderFacts[L], device: torch.device | None, place: Callable[..., L] = copy_loader) -> L:
    """Return a copy of a loader that moves batches to the device; the loader itself if there is no ``device``.

    Args:
        facts: The loader.
        device: Which device; None if batches stay where they are.
        place: As in ``shard``.
    """
    if device is None or device_of(facts.loader) == device:
        return facts.loader
    require_device(facts, device)
    make_mover, on_device = _mover_of(facts, Options(device=device))
    moved = place(facts.loader, **on_device)
    OwnMethods(moved, None, make_mover=make_mover)
    if facts.repeater is not None:
        vars(moved).update(dict.fromkeys(facts.running, OneIterator(moved)))
    return moved


def _mover_of(facts: LoaderFacts[Any], options: Options) -> tuple[Callable[[], Mover] | None, dict[str, Any]]:
    """Return a function that makes movers of a loader's batches, and the attributes that name the device."""
    device = device_for(facts, options)
    if device is None:
        return None, {}
    return partial(Mover, device, copies_ahead=copies_ahead(facts, options)), {ON_DEVICE: device}


def _pace(facts: LoaderFacts[Any], ahead: int) -> Pace:
    """Return how a loader takes the items of its share, with this many batches ahead of the loop."""
    if facts.level in {Level.BATCH, Level.UNBATCHED}:
        return Pace(1, ahead)
    size = facts.batch_size or 1
    readers = max(1, facts.num_workers) if facts.level is Level.ITERABLE else 1
    return Pace(size, ahead * size, facts.drop_last and facts.level is Level.SAMPLE, readers)


def _sampler_share(facts: LoaderFacts[Any], agreed: Agreed) -> tuple[EpochSampler[Any], dict[str, Any]]:
    """Return the sampler of this rank's share, and the loader's attributes that hold it."""
    if facts.level is Level.BATCH:
        batches: DDPBatchSamplerWrapper[Any] = DDPBatchSamplerWrapper.of(facts.stream, agreed)
        # Nothing draws from loader.sampler, but frameworks look for a DistributedSampler there, users for set_epoch.
        return batches, {"sampler": batches, "batch_sampler": batches}
    sharded: DDPSamplerWrapper[Any] = DDPSamplerWrapper.of(facts.stream, agreed, facts.batching)
    if facts.level is Level.UNBATCHED:
        return sharded, {"sampler": sharded}
    batch_sampler: Any = facts.makes_batches(sharded, facts.batch_size, facts.drop_last)
    # accelerate's skip_first_batches keeps only the batch sampler, so that must take epochs too.
    batch_sampler.set_epoch = sharded.set_epoch
    new = {"sampler": sharded, "batch_sampler": batch_sampler}
    return sharded, new | {"batch_size": facts.batch_size, "drop_last": facts.drop_last}


def _iterators_of(
    patched: DataLoader[Any],
    facts: LoaderFacts[Any],
    sharded: Any,
    new: Mapping[str, Any],
    make_mover: Callable[[], Mover] | None,
) -> Callable[[DataLoader[Any]], Any] | None:
    """Return what makes a loader's iterators; None if its class does."""
    world, options = sharded.agreed.world, sharded.agreed.options
    if facts.repeater is not None:
        from ddp_patch.shares.repeated import RepeatedPasses  # most loaders do not need it

        # A loader with one iterator for all epochs draws from another, which goes through the sharded epochs.
        passes = RepeatedPasses(patched, sharded, new, make_mover)
        vars(patched).update(dict.fromkeys(facts.running, passes))
        return passes.begin_anew
    is_split = facts.level is Level.ITERABLE and options.iterable_sharding == "by_worker"
    if is_split and world.members is not None and world.num_replicas > 1:
        from ddp_patch.shares.iterables.even_steps import EvenIterators  # most loaders do not need it

        # Ranks make equally many steps that read unequally much.
        return EvenIterators(sharded, facts.num_workers, type(patched).__name__)
    return None


def _iterable_share(facts: LoaderFacts[Any], agreed: Agreed) -> tuple[EpochSampler[Any], dict[str, Any]]:
    """Return the sampler that begins a sharded iterable dataset's epochs, and the attributes that hold both."""
    # Imported here, because most loaders do not need it.
    from ddp_patch.shares.iterables.dataset import IterableWorkerInit, ShardedIterable
    from ddp_patch.shares.iterables.sampler import StreamSampler

    plan = agreed.plan(agreed.world.rank)
    readers, ahead = max(1, facts.num_workers), getattr(facts.loader, "prefetch_factor", None) or 2
    ahead += copies_ahead(facts, agreed.options)
    dataset = ShardedIterable(
        facts.dataset, plan, agreed.options, agreed.seed, facts.batching, readers, ahead, division=agreed.division
    )
    sampler = StreamSampler(dataset, facts, agreed)
    new: dict[str, Any] = {"dataset": dataset, "sampler": sampler}
    if facts.num_workers > 0:
        new["worker_init_fn"] = IterableWorkerInit(facts.loader.worker_init_fn, sampler.epochs)
    if facts.batch_size is not None:
        new["batch_sampler"] = facts.makes_batches(sampler, sampler.indices_per_batch, facts.drop_last)
    return sampler, new


def _tell_both(first: Callable[[int], object], second: Callable[[int], object], epoch: int) -> None:
    first(epoch)
    second(epoch)
