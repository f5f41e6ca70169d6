"""Patch one or several loaders: read their facts, agree with the other ranks, return sharded copies."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol, SupportsIndex, TypeVar, Unpack, cast, overload

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ddp_patch.compat.private_packages import ACCELERATE_PREPARED, gather_in_accelerate, repeats_over_ranks
from ddp_patch.compat.private_torch import BatchesOf, has_own_iteration, has_own_iterators
from ddp_patch.costs import Cost, CostValues
from ddp_patch.errors import NotDistributedWarning, StreamLengthWarning, UnsupportedLoaderError
from ddp_patch.loader import OwnMethods, PatchedLoader
from ddp_patch.loaders.columns import Column, lists_in
from ddp_patch.loaders.copying import METHODS, copy_loader, notice_if_iterated, notice_if_never_drawn
from ddp_patch.loaders.facts import (
    NOTHING_TO_COMPARE,
    LoaderFacts,
    ShardedUnit,
    claimed_by,
    data_digest,
    data_of,
    has_nothing_to_compare,
    look_at,
)
from ddp_patch.loaders.hooks import script_line
from ddp_patch.loaders.nested_samplers import iterated_by, length_of
from ddp_patch.loaders.recognition import (
    error_context,
    require_loader,
    samplers_within,
    says_ranks_differ,
    sharded_by,
    streams_in,
    tell_if_assumed,
)
from ddp_patch.options import Fingerprint, Layout, Options, Share, Uneven
from ddp_patch.orders.random_states import seed_worker
from ddp_patch.ranks.agreement import ONE, Agreed, Subject, agree, failures_broadcast
from ddp_patch.ranks.parts import Parts
from ddp_patch.ranks.pass_monitor import PassMonitor, Rules
from ddp_patch.ranks.world import World, find_world
from ddp_patch.sharding.iterators import RepeatedPasses
from ddp_patch.sharding.loader_passes import LoaderUse, Passes
from ddp_patch.sharding.refusals import require_shareable, unit_shared
from ddp_patch.sharding.sampler import EpochSampler, describe_share
from ddp_patch.walks import Nest
from ddp_patch.wrappers import DDPBatchSamplerWrapper, DDPSamplerWrapper, SharingOptions, split_options

logger: logging.Logger = logging.getLogger("ddp_patch")

T = TypeVar("T")
L = TypeVar("L", bound=DataLoader[Any])
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
N = TypeVar("N", bound=list[Any] | tuple[Any, ...] | dict[Any, Any])


class _NamedTuple(Protocol):
    """A named tuple, for type checkers."""

    def _asdict(self) -> dict[str, Any]: ...


Named = TypeVar("Named", bound=_NamedTuple)


class PatchOptions(SharingOptions, total=False):
    """The keywords of ``patch_dataloader_to_ddp``, which describes them."""

    share: Share
    cost: Cost | CostValues | None
    fingerprint: Fingerprint


@overload
def patch_dataloader_to_ddp(loader: DataLoader[T], **options: Unpack[PatchOptions]) -> PatchedLoader[T]: ...
@overload
def patch_dataloader_to_ddp(loader: Named, **options: Unpack[PatchOptions]) -> Named: ...
@overload
def patch_dataloader_to_ddp(
    loader: tuple[DataLoader[T1], DataLoader[T2]], **options: Unpack[PatchOptions]
) -> tuple[PatchedLoader[T1], PatchedLoader[T2]]: ...
@overload
def patch_dataloader_to_ddp(
    loader: tuple[DataLoader[T1], DataLoader[T2], DataLoader[T3]], **options: Unpack[PatchOptions]
) -> tuple[PatchedLoader[T1], PatchedLoader[T2], PatchedLoader[T3]]: ...
# Lists and dicts keep their type: to a type checker, a list of patched loaders is no list of loaders.
@overload
def patch_dataloader_to_ddp(loader: N, **options: Unpack[PatchOptions]) -> N: ...
def patch_dataloader_to_ddp(
    loader: Any,
    *,
    share: Share = "auto",
    uneven: Uneven = "pad",
    seed: int | None = None,
    cost: Cost | CostValues | None = None,
    device_mesh: DeviceMesh | None = None,
    layout: Layout = "interleaved",
    fingerprint: Fingerprint = "auto",
    process_group: dist.ProcessGroup | None = None,
    rank: SupportsIndex | None = None,
    num_replicas: SupportsIndex | None = None,
    timeout: float | timedelta = 300.0,
    **unknown: Any,
) -> Any:
    """Shard a finished loader: return a copy that gives this rank its part, with your sampler intact.

    Call it on every rank, after ``torch.distributed.init_process_group()``. ``batch_size`` stays per rank. Together the
    ranks get the samples that the patched loader yields on one rank, in the same order, for any number of ranks.
    ``uneven`` says what the last round repeats or leaves out, and ``drop_last=True`` leaves out each rank's incomplete
    batch.

    A sampler is sharded sample by sample, and an iterable dataset item by item. A batch sampler of your own is sharded
    in whole batches. ``share`` changes that.

    After this call, ranks synchronise only in ``restore_loader``, in gathering, in weighing by ``weight_of``, and in
    steps with ``share="by_worker"``. Through the process group's store, the ranks also compare their passes over all
    loaders: epochs, numbers of batches, and drawn items. A rank waits for the comparison only at the end of a pass that
    other ranks have not begun, or of a stream of unknown length that they have not ended: 10 s each, until a wait for
    the loader was in vain.

    Args:
        loader: A finished loader, or a list, tuple (also named) or dict of loaders, nested as you like. The ranks
            synchronise once for all loaders. If one loader cannot be patched, none is. A loader that appears several
            times is patched once, and None stays None. The loader that you pass still yields all data. On several
            ranks, it warns once if it is iterated in place of the patched copy.
        share: What a rank takes at a time. With ``"samples"``, each rank makes its own batches of every num_replicas-th
            sample. With ``"batches"``, each rank takes whole batches as the unpatched loader makes them, so groups that
            a sampler puts into one batch stay together. ``"auto"`` takes whole batches of a batch sampler that is not
            torch's own, and of samplers that are known to arrange such groups (pytorch-metric-learning's
            ``MPerClassSampler``, trl's ``RepeatSampler``); otherwise samples. With ``batch_size=None``, items are
            sharded as they are. With ``"within_batches"``, each batch of one process is divided over the ranks: rank r
            takes the batch's items r, r + num_replicas, ..., and at least one. ``iter_with_weights`` says which of
            these items count. ``len(loader)`` is then the length in one process. Every rank reads the whole of an
            iterable dataset, as one process with the same workers does, and keeps its share of each worker's part. With
            ``"by_worker"``, the dataset splits itself by ``get_worker_info()``, which it must call before its first
            item. The info counts the workers of all ranks as the workers of one loader, so nothing is read twice. Ranks
            that have batches left give some to ranks that have none, so that all make the same number of steps.
            ``uneven`` says what happens to the last batches. Every pass then needs all ranks. In an explicit world,
            ``uneven`` must be ``"keep"``, and steps are unequal. A dataset that is not iterable is shared as with
            ``"auto"``.
        uneven: What to do with the last round if the ranks do not divide the samples evenly. ``"pad"`` repeats the
            first samples (equal steps, nothing lost). ``"drop"`` leaves the round out (equal steps, nothing repeated).
            ``"keep"`` gives some ranks one item less (nothing lost or repeated, but steps may differ by one; of a
            stream, by one for each worker).
        seed: A whole number of at least 0, the same on every rank. By default each loader gets its own seed, which is
            the same on every rank. The default follows from rank 0's ``torch.initial_seed()`` and from how many loaders
            like this one were patched before. In a ``process_group`` of only some ranks, 0 replaces
            ``torch.initial_seed()``. In an explicit world, the default is 0. Restoring a state replaces the default by
            the state's seed. Each epoch's order follows from (seed, epoch), whatever the ranks' own seeds. If the
            loader or a sampler has a random generator, all ranks use the state of rank 0's: the first epoch draws from
            exactly this state, as one process does, and a later epoch from this state and its number.
        cost: What items cost, in any unit, such as tokens. Each step then costs about the same on all ranks. Pass one
            number of at least 0 for each index of ``loader.dataset`` (a sequence, array or tensor), or a function of an
            index; or a ``Cost`` of either, which says how a batch's cost follows. Every rank calls the function for the
            samples of all ranks, so it should be quick. The function must return the same cost for an item on every
            rank, in every call and after a restart; otherwise samples are lost. The items of each window are balanced
            over ranks and steps, each exactly once, and the steps come in a random order. Which samples share a batch
            then depends on the number of ranks. Whole batches stay whole.
        device_mesh: A mesh whose data-parallel dimensions shard the data: dimensions named ``dp``, ``dp_replicate``,
            ``dp_shard``, ``fsdp`` and the like. Ranks that differ only in tensor, context or pipeline parallelism get
            the same batches. A dimension with an unusual name is an error; then pass the sub-mesh of all dimensions
            that shard, such as ``mesh["node", "part"]``.
        layout: ``"interleaved"`` gives rank r the items r, r + num_replicas, ...; ``"contiguous"`` gives rank r the
            r-th run of consecutive items, at most one item longer than another rank's run. Each rank then draws a whole
            epoch at its beginning.
        fingerprint: What identifies the data, so that ranks know that they have the same data. ``"auto"`` compares data
            in memory that have one element for each sample. For other data, pass a function of ``loader.dataset``, such
            as ``lambda dataset: dataset.version``, that returns texts, numbers, bytes, paths, arrays, or lists of
            these. Ranks compare its result at the patch, and whenever a pass begins, so the function should be quick.
            None compares no data.
        process_group: The group whose ranks shard the data. Default: all ranks.
        rank: This rank, in ``range(num_replicas)``. Passing it makes an explicit world, in which ranks never wait for
            each other.
        num_replicas: The number of ranks of an explicit world.
        timeout: How long the ranks wait for each other, now and later: seconds, or a ``timedelta``.
        unknown: No other keyword exists. A ``TypeError`` says which keyword was probably meant.

    Returns:
        A loader of the same class; for several loaders, the same lists, tuples and dicts with patched loaders in them.
        A log line at INFO (logger ``ddp_patch``) says what this rank gets: ``shard 1 of 8, samples, 782 steps of 8``.
        ``DDP_PATCH_LOG=1`` in the environment prints this line, and ``print(loader.sampler)`` prints much the same. A
        loader is not sharded again if another ``DistributedSampler`` shards it, or a sampler or dataset that stores a
        rank and a number of ranks or says ``is_ddp_aware = True``. If the ranks can compare the passes over such a
        loader, a copy that compares them is returned, otherwise ``loader`` itself. ``loader`` itself is also returned
        if this function has sharded it before, and, with a ``NotDistributedWarning``, if there is only one process.

    Raises:
        NotALoaderError: ``loader``, or one of several loaders, is not a DataLoader; or the lists or dicts of loaders
            cannot be copied.
        InvalidOptionError: An option has a value that it does not take, or does not work with this loader.
        NoStepsError: A rank would make no step in an epoch in which one process makes some. If the length is not known
            yet, iterating raises the error.
        WorldError: The environment announces several ranks but there is no process group; this process is not in
            ``process_group``; or ``num_replicas`` is larger than the process group.
        AlreadyPatchedError: The loader was sharded for another world.
        UnsupportedLoaderError: The loader cannot be sharded correctly.
        RankMismatchError: The ranks' loaders, options or datasets differ, or the keys of a dict, or their order; or the
            shards of a loader that is sharded already have samples in common. Every rank raises this error. While
            iterating: the ranks make different passes, draw different orders, or change their data differently. In an
            explicit world: too many ranks take the same share.
        MissingRanksError: A rank did not arrive in time.

    Examples:
        >>> from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
        >>> loader = DataLoader(range(10), batch_size=2)
        >>> for rank in range(2):
        ...     patched = patch_dataloader_to_ddp(loader, rank=rank, num_replicas=2)
        ...     print(len(patched), [batch.tolist() for batch in patched])
        3 [[0, 2], [4, 6], [8]]
        3 [[1, 3], [5, 7], [9]]
        >>> train, val = patch_dataloader_to_ddp((loader, DataLoader(range(4))), rank=1, num_replicas=2)
        >>> [batch.tolist() for batch in val]
        [[1], [3]]
        >>> patched = patch_dataloader_to_ddp(loader, rank=1, num_replicas=2, fingerprint=lambda dataset: dataset[-1])
    """
    given = {name: value for name, value in locals().items() if name not in {"loader", "unknown"}}
    where, chosen = split_options("patch_dataloader_to_ddp", given | unknown, PatchOptions)
    world = find_world(**where)
    with failures_broadcast(world):
        nest = Nest(loader)
    loaders = nest.loaders
    patched = patch_each("patch_dataloader_to_ddp", loaders, world, lambda: Options(**chosen), nest.described or ONE)
    if world is None:
        return loader
    _log_patched(loaders, patched)
    line = script_line(sys._getframe(1))
    for before, clone in zip(loaders.values(), patched, strict=True):
        if clone is not before and isinstance(by := sharded_by(clone), EpochSampler):
            notice_if_iterated(before, line, partial(_is_used, by.rank_passes))
            if by.num_replicas > 1:
                notice_if_never_drawn(clone, line, partial(getattr, by.rank_passes.epochs.counter, "passes"))
    return nest.with_replaced(patched)


def _is_used(passes: Passes[Any]) -> bool:
    """Return whether a patched loader was iterated, or its ``set_epoch`` called."""
    return passes.epochs.latest is not None or passes.epochs.counter.current > 0


def patch_each(
    operation: str,
    loaders: Mapping[str, L],
    world: World | None,
    choose: Callable[[], Options],
    nest: str = ONE,
    place_share: Callable[..., L] = copy_loader,
) -> list[L]:
    """Shard several loaders, or return the loaders unchanged if there is only one process.

    The ranks synchronise once for all loaders. If one loader cannot be patched, none is.

    Args:
        operation: What the user called, for errors.
        loaders: The loaders, by the names that errors use; a single loader has an empty name.
        world: The ranks; None if there is only one process.
        choose: Returns the options, checked; they are the same for all loaders.
        nest: The structure of the nested loaders, in words, the same on every rank.
        place_share: Puts a share into a copy of the loader, or with ``change_loader`` into the loader itself.
    """
    _print_log_if_asked()
    with failures_broadcast(world):
        for place, loader in loaders.items():
            with error_context(place):
                require_loader(operation, loader)
        options = choose()
        if world is None:
            return _unshared(operation, loaders)
        looked, subjects = {}, []
        for place, loader in loaders.items():
            with error_context(place):
                looked[place] = facts = unit_shared(look_at(loader), options.share)
                require_shareable(facts, options, world)
                subjects.append(_subject(place, facts, options, world))
    for facts in looked.values():
        tell_if_assumed(facts.sharded_by)
    agreed = agree(world, options, subjects, nest)
    line = script_line(sys._getframe(1))
    patched = []
    for (place, facts), mine in zip(looked.items(), agreed, strict=True):
        mine = replace(mine, place=f"patched at {line}" + (f" ({place})" if place else ""))
        with error_context(place):
            is_shared = facts.sharded_by is not None
            patched.append((_watched if is_shared else _shard)(facts, mine, place_share))
    return patched


def _print_log_if_asked() -> None:
    """Print the log's lines if ``DDP_PATCH_LOG`` is 1, also in a script that has not set up logging."""
    if os.environ.get("DDP_PATCH_LOG") == "1":
        logger.setLevel(logging.INFO)
        if not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("ddp_patch: %(message)s"))
            logger.addHandler(handler)


def _log_patched(given: Mapping[str, L], patched: Sequence[L]) -> None:
    """Log what this rank gets of each patched loader."""
    if logger.isEnabledFor(logging.INFO):
        for (place, before), loader in zip(given.items(), patched, strict=True):
            if loader is not before and (share := describe_share(loader)) is not None:
                sampler, nothing = cast(EpochSampler[Any], loader.sampler), ""
                is_compared = sampler.agreed.members and not isinstance(loader.dataset, IterableDataset)
                if is_compared and has_nothing_to_compare(loader.dataset, sampler.agreed.options.fingerprint):
                    nothing = f", {NOTHING_TO_COMPARE}"
                logger.info("%s was patched: %s%s", place or type(loader).__name__, share, nothing)


def _unshared(operation: str, loaders: Mapping[str, L]) -> list[L]:
    warnings.warn(
        f"{operation} changed nothing: there is no process group and the environment announces no other rank, so "
        "this process takes all data. Call torch.distributed.init_process_group() first to train on several; with "
        "Lightning's Trainer, patch in train_dataloader(), which is called when the group exists.",
        NotDistributedWarning,
        stacklevel=4,
    )
    return list(loaders.values())


def _subject(place: str, facts: LoaderFacts[Any], options: Options, world: World) -> Subject:
    is_sharded, can_compare = facts.sharded_by is not None, world.share_of_rank is not None
    # A patched loader was compared when it was patched.
    is_new = not isinstance(facts.sharded_by, EpochSampler)
    data, columns = _data_compared(facts, options) if can_compare and is_new and facts.has_all_data else ({}, ())
    known: Mapping[str, object] = {}
    if can_compare and is_new and is_sharded:
        known = claimed_by(facts, even=options.uneven != "keep")
    elif can_compare and not is_sharded and facts.unit is ShardedUnit.ITERABLE and options.by_worker:
        known = {} if says_ranks_differ(facts.dataset) else lists_in(facts.dataset)
    costs = {} if is_sharded else {"cost": "none"} if options.costs is None else options.costs.described
    stream = None if is_sharded else facts.stream
    return Subject({**facts.described, **costs, **data}, stream, facts.made_for, place, known, columns)


def _data_compared(facts: LoaderFacts[Any], options: Options) -> tuple[Mapping[str, object], Sequence[Column]]:
    """Return what ranks compare of their data at the patch: the user's fingerprint, or columns."""
    if callable(options.fingerprint):
        return {"fingerprint of its data": data_digest(facts.dataset, options.fingerprint, ())}, ()
    return {}, facts.stream.columns if options.fingerprint == "auto" else ()


def _shard(facts: LoaderFacts[L], agreed: Agreed, place_share: Callable[..., L]) -> L:
    """Return a loader with its sampler or dataset sharded and its workers seeded by rank.

    Args:
        facts: The loader to shard.
        agreed: What the ranks agreed on.
        place_share: Puts a share into a copy of the loader (``copy_loader``), or into the loader itself
            (``change_loader``).
    """
    share_of = _iterable_share if facts.unit is ShardedUnit.ITERABLE else _sampler_share
    # Divided batches are not compared: any batch may have padding, which repeats another rank's samples.
    has_indices = facts.unit is not ShardedUnit.ITERABLE and not agreed.options.divides_batches
    if has_indices and (held := next(streams_in(facts.dataset), None)) is not None:
        agreed = replace(agreed, why_in_common=partial(_why_samples_are_the_same, *held))
    sharded, new = share_of(facts, agreed)
    if facts.num_workers > 0:
        init = new.get("worker_init_fn", facts.loader.worker_init_fn)
        epochs = sharded.rank_passes.epochs.counter
        new["worker_init_fn"] = partial(seed_worker, init, agreed.seed, agreed.world.rank, epochs)
    patched = place_share(facts.loader, **facts.placed(new), **{ACCELERATE_PREPARED: True})
    gather_in_accelerate(_gathered_for_metrics)
    if facts.repeater is None:
        OwnMethods(patched, sharded.rank_passes, batches_of=_even_steps(facts, sharded))
    else:
        # A loader with one iterator for all epochs gets another one, which goes through the sharded epochs.
        repeated = RepeatedPasses(patched, sharded.rank_passes, new)
        vars(patched).update(dict.fromkeys(facts.running, repeated))
        OwnMethods(patched, sharded.rank_passes, repeated=repeated)
    # accelerate's users and Hugging Face's Trainer call set_epoch. A subclass's own method may not reach the sampler.
    own = getattr(patched, "set_epoch", None)
    vars(patched)["set_epoch"] = sharded.set_epoch if own is None else partial(_tell_both, own, sharded.set_epoch)
    if facts.unit is not ShardedUnit.ITERABLE:
        _warn_of_own_length(patched)
    return patched


def _warn_of_own_length(loader: DataLoader[Any]) -> None:
    """Warn if a loader's class computes a length of its own that differs from the length of its share."""
    says, has = length_of(loader, ()), length_of(iterated_by(loader), ())
    if None not in {says, has} and says != has:
        name = type(loader).__name__
        warnings.warn(
            f"len() of the {name} says {says} after the patch, and each rank gets {has} batches: its class computes a "
            "length of its own. All batches come, but schedules and progress bars that use len() are wrong. Leave "
            f"__len__ out of {name}, or compute it from len(self.batch_sampler).",
            StreamLengthWarning,
            stacklevel=5,
        )


def _gathered_for_metrics(loaders: Sequence[DataLoader[Any]], outputs: Any, usual: Callable[[], Any]) -> Any:
    """Gather as accelerate does; for a patched loader by ``gather_step``, which knows the padding."""
    # Imported late, because the first patch does not need it.
    from ddp_patch.evaluation.gather import gather_step, is_in_a_step

    iterated = [loader for loader in loaders if is_in_a_step(loader)]
    if not iterated:
        return usual()
    if len(iterated) > 1:
        raise UnsupportedLoaderError(
            f"gather_for_metrics cannot know which of {len(iterated)} patched loaders, whose loops have not ended, the "
            "outputs are of. Call gather_step(outputs, loader), or prepare loaders with prepare_patched()."
        )
    return gather_step(outputs, iterated[0])


def _watched(facts: LoaderFacts[L], agreed: Agreed, place_share: Callable[..., L]) -> L:
    """Return a copy of a loader that is sharded already; the copy compares its passes with the other ranks'.

    Return the loader itself if there is no other rank, or if its iterators are not torch's. The copy differs from the
    loader only in the method that makes iterators.

    Args:
        facts: The loader.
        agreed: What the ranks agreed on.
        place_share: As in ``_shard``.
    """
    loader, kind, by = facts.loader, type(facts.loader), facts.sharded_by
    is_compared = isinstance(by, EpochSampler) or METHODS in vars(loader)
    is_torchs = not has_own_iteration(kind) and not has_own_iterators(kind)
    if (claims := agreed.claims) is None or is_compared or not is_torchs:
        return loader
    name, by_name = f"{kind.__name__} {agreed.place}", type(by).__name__
    lengths: Literal["alike", "warned", "any"] = "warned" if getattr(by, "is_ddp_aware", None) is True else "alike"
    if agreed.options.uneven == "keep":
        lengths = "any"
    knows_all, parts = any(sampler is by for sampler in samplers_within(facts.iterated)), None
    if claims.read_one_stream and not any(repeats_over_ranks(type(sampler)) for sampler in facts.samplers):
        parts = Parts(
            lambda: name,
            partial(_why_parts_overlap, by_name),
            replicas=agreed.world.replicas,
            sampler=by if knows_all else None,
            workers=max(1, facts.num_workers) if facts.unit is ShardedUnit.ITERABLE else 1,
        )
    rules = Rules(
        name=lambda: name,
        forgets_looks=True,
        lengths=lengths,
        why={"order": partial(_why_parts_are_uneven, by_name), "data": lambda: agreed.data_named},
        data_digest=partial(agreed.data_digest, facts.dataset) if facts.has_all_data else str,
        is_begun_by_all=agreed.world.share_of_rank is not None and agreed.world.num_replicas > 1,
        parts=parts,
    )
    clone = place_share(loader)
    data = data_of(facts.dataset) if knows_all else ""
    OwnMethods(clone, None, monitor=PassMonitor(claims, rules), data=data)
    return clone


def _why_parts_are_uneven(name: str) -> str:
    return (
        f"The loader counts as sharded already by {name}. Ranks that synchronise in each step would wait for each "
        "other forever. Give every rank equally many batches; or pass uneven='keep', if ranks may make unequal steps."
    )


def _why_samples_are_the_same(part: object, attribute: str) -> str:
    name, source = type(part).__name__, getattr(part, attribute)
    remedy = "Make it an IterableDataset that yields these items"
    if isinstance(source, IterableDataset):
        remedy = f"Give the loader the iterable dataset itself, DataLoader(dataset.{attribute}, ...) without a sampler"
    return (
        f"{name}.__getitem__ may take what comes next from a {type(source).__name__} (attribute {attribute!r}), "
        f"whatever its index, so all ranks get the same. {remedy}; or let __getitem__ return the item of its index."
    )


def _why_parts_overlap(name: str) -> str:
    return (
        f"The loader counts as sharded already by {name}. Give it this rank, the number of ranks, and the same seed "
        f"and epoch on every rank. If {name} gives every rank the same, say is_ddp_aware = False in its class, and "
        "this package shards it."
    )


def _sampler_share(facts: LoaderFacts[Any], agreed: Agreed) -> tuple[EpochSampler[Any], dict[str, Any]]:
    """Return the sampler of this rank's share, and the loader's new attributes."""
    if facts.unit is ShardedUnit.BATCH:
        batches: DDPBatchSamplerWrapper[Any] = DDPBatchSamplerWrapper.of(facts.stream, agreed, LoaderUse.of(facts))
        # Nothing draws from loader.sampler, but frameworks expect a DistributedSampler there, and users a set_epoch.
        return batches, {"sampler": batches, "batch_sampler": batches}
    sharded: DDPSamplerWrapper[Any] = DDPSamplerWrapper.of(facts.stream, agreed, LoaderUse.of(facts), facts.batching)
    if facts.unit is ShardedUnit.UNBATCHED:
        return sharded, {"sampler": sharded}
    batch_sampler: Any = BatchSampler(sharded, cast(int, facts.batch_size), facts.drop_last)
    # accelerate's skip_first_batches keeps only the batch sampler, so the batch sampler needs set_epoch, too.
    batch_sampler.set_epoch = sharded.set_epoch
    new = {"sampler": sharded, "batch_sampler": batch_sampler}
    return sharded, new | {"batch_size": facts.batch_size, "drop_last": facts.drop_last}


def _even_steps(facts: LoaderFacts[Any], sharded: Any) -> BatchesOf | None:
    """Return a function that gives all ranks equally many steps; None if all ranks read equally much."""
    if facts.unit is not ShardedUnit.ITERABLE or not sharded.rank_passes.sends_batches:
        return None
    from ddp_patch.streams.even_steps import even_batches  # few loaders need this function

    passes, workers = sharded.rank_passes, facts.num_workers
    return partial(even_batches, passes, workers, workers * passes.ahead, type(facts.loader).__name__)


def _iterable_share(facts: LoaderFacts[Any], agreed: Agreed) -> tuple[EpochSampler[Any], dict[str, Any]]:
    """Return the sampler that begins the epochs of a sharded iterable dataset, and the loader's new attributes."""
    # Imported here, because most loaders do not need it.
    from ddp_patch.streams.dataset import begin_worker
    from ddp_patch.streams.stream_passes import StreamSampler

    sampler = StreamSampler(facts, agreed)
    new: dict[str, Any] = {"dataset": sampler.dataset, "sampler": sampler}
    if facts.num_workers > 0:
        new["worker_init_fn"] = partial(begin_worker, facts.loader.worker_init_fn, sampler.rank_passes.epochs.counter)
    if facts.batch_size is not None:
        new["batch_sampler"] = BatchSampler(cast(Any, sampler), sampler.rank_passes.indices_per_batch, facts.drop_last)
    return sampler, new


def _tell_both(first: Callable[[int], object], second: Callable[[int], object], epoch: int) -> None:
    first(epoch)
    second(epoch)
