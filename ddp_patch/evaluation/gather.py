"""Gather outputs in the order of the unpatched loader."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from numbers import Number
from typing import Any, TypeVar, overload

import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import DDPPatchError, UnsupportedLoaderError, message_of
from ddp_patch.evaluation.judging import GATHERING, Agreement, ExpectedRows, Report, judge_outputs, report, said_by
from ddp_patch.evaluation.members import Members
from ddp_patch.evaluation.outputs import Misfit, RankShare
from ddp_patch.evaluation.row_order import Keys, joined, keys_of
from ddp_patch.evaluation.sending import Sending, batch_sizes, result_of
from ddp_patch.evaluation.steps import is_alone, require_one_stream
from ddp_patch.loaders.facts import ShardedUnit
from ddp_patch.loaders.recognition import sharded_by
from ddp_patch.plan import BatchRecord, Part, Schedule
from ddp_patch.ranks.exchange import exchange
from ddp_patch.ranks.packing import packed, unpacked
from ddp_patch.ranks.records import State
from ddp_patch.sharding.batches import Batches, batches_delivered
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.sampler import EpochSampler

__all__ = ["expected_of_pass", "expected_of_step", "gather_in_order", "gather_step", "gather_this_step", "is_in_a_step"]

Outputs = TypeVar("Outputs")


def expected_of_pass(batches: Batches) -> ExpectedRows:
    """Return what this rank got in the latest pass.

    Raises:
        Misfit: There is none, or it is not over.
    """
    passes, current = batches.passes, batches.passes.latest
    if current is None:
        raise Misfit("made no pass over the loader")
    _require_one_pass(current)
    schedule = current.whole_schedule(batches)
    if schedule is None or passes.batches_into_pass:
        raise Misfit(f"stopped in the middle of epoch {current.epoch}; gather_step() gathers a step")
    length = schedule.length if schedule.batch_plan is None else sum(batch_sizes(schedule, [], 0))
    at = f"gather_in_order() of patched loader {passes.agreed.number} after epoch {_pass_text(current)}"
    return _expected(f"{at}, of {length} items", batches, current, schedule)


def expected_of_step(loader: DataLoader[Any], batches: Batches, step: int | None = None) -> ExpectedRows:
    """Return what this rank got in the step that its loop is in.

    Args:
        loader: The loader.
        batches: How the loader makes batches.
        step: Which step of the pass that is, from 0; None for the latest that the loader has given.

    Raises:
        Misfit: That is not known, or other ranks may make no such step.
    """
    passes, current = batches.passes, batches.passes.latest
    try:
        number = batches_delivered(loader, batches) - 1 if step is None else step
    except DDPPatchError as error:
        raise Misfit(f"cannot know the step: {message_of(error)}") from error
    if current is None or number < 0:
        raise Misfit("got no batch of the loader yet")
    if current.state is State.ENDED and step is None:
        raise Misfit(f"called it after the loop: epoch {current.epoch} is over")
    _require_one_pass(current)
    schedule = ends = current.schedule(batches)
    if len(schedule.parts) == 1 and schedule.count is None:
        ends = replace(schedule, parts=[Part(current.skip, current.likely_length)])
    # Whether a rank has found the end already depends on chance, so only a length that was known before counts.
    is_length_known = passes.items_left(current.start) is not None
    knows_steps = len(schedule.parts) == 1 and is_length_known and ends.fewest_batches == ends.most_batches
    if schedule.plan.uneven == "keep" and schedule.plan.num_replicas > 1 and not knows_steps:
        raise Misfit(
            "cannot gather step by step with uneven='keep', by which some ranks may have a step less and would not "
            "come; use gather_in_order() after the loop, or uneven='pad'"
        )
    at = f"gather_step() of patched loader {passes.agreed.number} in step {number + 1} of epoch {_pass_text(current)}"
    return _expected(at, batches, current, schedule, number)


def _require_one_pass(current: Pass[Any]) -> None:
    """Refuse a pass whose batches cannot be told from those of another one, or were counted elsewhere."""
    if current.is_interleaved:
        raise Misfit(
            "used two iterators of the loader at once, so it is unknown which of them the outputs belong to; finish "
            "one before the next begins"
        )
    if current.resumed_elsewhere:
        raise Misfit(
            f"resumed within epoch {current.epoch} by the loader's own load_state_dict(), so its first batches were "
            "counted elsewhere; take the state with loader_state(), and resume with restore_loader()"
        )


def _pass_text(current: Pass[Any]) -> str:
    return f"{current.epoch}" if current.begins_at == "0" else f"{current.epoch} from {current.begins_at} on"


def _expected(
    at: str,
    batches: Batches,
    current: Pass[Any],
    schedule: Schedule,
    number: int | None = None,
) -> ExpectedRows:
    """Return what this rank got.

    Args:
        at: What was called, and for which pass or step.
        batches: How the loader makes batches.
        current: The pass.
        schedule: Its batches.
        number: Which of them; None for all.
    """
    sizes: list[int] = []  # how many samples each batch has,
    real: list[int] = []  # how many of them are not padding,
    real_sizes: list[int] = []  # and the same of batches that are not padding

    def noted(records: Iterable[BatchRecord]) -> Iterator[BatchRecord]:
        for record in records:
            sizes.append(record.samples)
            real.append(record.real_samples)
            if record.real_items:
                real_sizes.append(record.real_samples)
            yield record

    keys: Keys = keys_of(schedule.keys(noted(schedule.records() if number is None else [schedule.record(number)])))
    is_whole = batches.unit is ShardedUnit.BATCH and schedule.batch_plan is None
    has_sizes = not is_whole or schedule.sizes is not None
    share = RankShare(
        sum(sizes) if has_sizes else None,
        _real_rows(sizes, real),
        len(sizes),
        sizes if number is None and has_sizes and batches.unit is not ShardedUnit.UNBATCHED else None,
        range(len(real_sizes)) if is_whole else None,
        "item" if batches.unit is ShardedUnit.UNBATCHED else "sample",
    )
    count = len(real_sizes) if is_whole else len(share.real_samples)
    sizes_known = (real_sizes if has_sizes else [0] * count) if is_whole else None
    return ExpectedRows(at, share, keys, sizes_known, schedule)


def _real_rows(sizes: Sequence[int], real: Sequence[int]) -> Sequence[int]:
    """Return which rows are not padding, of batches with so many rows, of which the first ones are real.

    Each part's padding comes at its own end, in the midst of what other workers give.
    """
    begins = (end - size for end, size in zip(accumulate(sizes), sizes, strict=True))
    runs = list(joined(range(begin, begin + own) for begin, own in zip(begins, real, strict=True))) or [range(0)]
    return runs[0] if len(runs) == 1 else list(chain.from_iterable(runs))


@overload
def gather_in_order(outputs: Outputs, loader: DataLoader[Any], *, dst: None = None) -> Outputs: ...
@overload
def gather_in_order(outputs: Outputs, loader: DataLoader[Any], *, dst: int | None) -> Outputs | None: ...
def gather_in_order(outputs: Any, loader: DataLoader[Any], *, dst: int | None = None) -> Any:
    """Return all ranks' outputs in the unpatched loader's order, without padding.

    Call it on every rank after a whole pass over the loader. The result is what one process would have: metrics
    computed from it equal those of one process. Samples that ``uneven="drop"`` or ``drop_last=True`` left out are not
    in it. Besides the result, it needs up to 64 MiB of memory; lists and strings are pickled, which needs all ranks'
    once more; and a list of batches is put together first, which needs this rank's outputs once more.

    Args:
        outputs: This rank's outputs of the pass, in its own order, padding included. Each tensor, array or list has one
            row (a list: one element) per sample. It may also be a list with one entry per batch, as collected in the
            loop; the result is then such a list, too, with the batches of the unpatched loader. Where whole batches are
            shared, one row per batch will do as well. Dicts, tuples and dataclasses may hold these, and None. A rank
            that got nothing may pass None.
        loader: A loader from ``patch_dataloader_to_ddp``, or an unpatched one in a single process, where the outputs
            come back unchanged.
        dst: The global rank that gets the result; the others get None. Default: every rank gets it.

    Returns:
        The same structure, with tensors on the device of this rank's own; where it has none, on its current one of the
        other ranks' kind.

    Raises:
        OutputsError: A rank is in the middle of a pass, passes another number of rows than it got samples, or another
            structure than the others; raised on every rank.
        MissingRanksError: A rank did not arrive in time.
        NotPatchedError: The loader was not patched, and there are several ranks.
        WorldError: The world was given by ``rank=`` and ``num_replicas=``, so the other processes are unknown.
        UnsupportedLoaderError: It is unknown which samples each rank got, or ``cost=`` has changed their order.
        InvalidOptionError: ``dst`` is not one of the ranks.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(5), batch_size=2), rank=0, num_replicas=1)
        >>> outputs = [{"doubled": 2 * batch} for batch in loader]
        >>> torch.cat([batch["doubled"] for batch in gather_in_order(outputs, loader)])
        tensor([0, 2, 4, 6, 8])
    """
    return _gathered("gather_in_order", outputs, loader, dst)


@overload
def gather_step(outputs: Outputs, loader: DataLoader[Any], *, dst: None = None) -> Outputs: ...
@overload
def gather_step(outputs: Outputs, loader: DataLoader[Any], *, dst: int | None) -> Outputs | None: ...
def gather_step(outputs: Any, loader: DataLoader[Any], *, dst: int | None = None) -> Any:
    """Return all ranks' outputs of the step that the loop is in, in the stream's order and without padding.

    Call it on every rank in every step that is gathered, inside the loop over the loader, as accelerate's
    ``gather_for_metrics``. What all steps return together is each sample once. The ranks communicate in each step:
    where the outputs fit into memory, ``gather_in_order`` after the loop is faster, and its order is that of one
    process. With ``cost=``, the rows of a step are in an order of its own.

    Args:
        outputs: This rank's outputs for the batch that the loop has, with one row per sample, padding included; where
            whole batches are shared, one row for the batch will do as well. Otherwise as in ``gather_in_order``.
        loader: The loader that is iterated, or an unpatched one in a single process, where the outputs come back
            unchanged.
        dst: As in ``gather_in_order``.

    Returns:
        The same structure, as in ``gather_in_order``.

    Raises:
        OutputsError: The ranks are in different steps, a rank passes another number of rows than its batch has samples
            or another structure than the others, or some ranks may have a step less (``uneven="keep"``); raised on
            every rank.
        MissingRanksError: A rank did not arrive in time, such as one that has left the loop.
        NotPatchedError: The loader was not patched, and there are several ranks.
        WorldError: The world was given by ``rank=`` and ``num_replicas=``, so the other processes are unknown.
        UnsupportedLoaderError: It is unknown which samples a batch holds.
        InvalidOptionError: ``dst`` is not one of the ranks.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(5), batch_size=2), rank=0, num_replicas=1)
        >>> [gather_step(2 * batch, loader).tolist() for batch in loader]
        [[0, 2], [4, 6], [8]]
    """
    return _gathered("gather_step", outputs, loader, dst)


def is_in_a_step(loader: DataLoader[Any]) -> bool:
    """Return whether a loader is patched, and a loop over it has begun and not ended."""
    sampler = sharded_by(loader)
    current = sampler.rank_passes.latest if isinstance(sampler, EpochSampler) else None
    return current is not None and bool(current.batches_delivered) and current.state is not State.ENDED


def gather_this_step(outputs: Outputs, loader: DataLoader[Any], step: int) -> Outputs:
    """Return all ranks' outputs of a step, from 0, where something between the loader and the loop fetches ahead.

    See ``gather_step``.
    """
    gathered: Outputs = _gathered("gather_step", outputs, loader, None, step)
    return gathered


def _gathered(operation: str, outputs: Any, loader: DataLoader[Any], dst: Any, step: int | None = None) -> Any:
    """Compare the outputs with the other ranks', and return all ranks'; see ``gather_in_order``."""
    if is_alone(operation, loader):
        return outputs
    batches = require_one_stream(operation, loader)
    if operation == "gather_in_order" and batches.passes.agreed.options.costs is not None:
        raise UnsupportedLoaderError(
            "gather_in_order was given a loader with cost=, which changes the order of the samples, so the outputs "
            "would not be in the sampler's. Leave cost= out of loaders that evaluate, or use gather_step() in the loop."
        )
    world, timeout = batches.passes.agreed.world, batches.passes.agreed.options.timeout
    plain = dst if dst is None or isinstance(dst, Number | str) else repr(dst)
    expect = partial(expected_of_step, loader, step=step) if operation == "gather_step" else expected_of_pass
    said, own = report(outputs, partial(expect, batches), plain)
    judge = partial(judge_outputs, operation)
    if world.num_replicas == 1:
        rank = 0 if world.share_of_rank is None else dist.get_rank()
        sending = Sending.of(judge({rank: said}), own)
        return result_of(sending, sending.header[None], lambda data, _: [data])
    members = Members(world.peer_ranks(operation), timeout)
    with members.talking():
        sending = Sending.of(said.preferred(members.ranks), own, said.at, plain)
        headers = members.headers(sending.header)
        if len(set(headers[:, 0].tolist())) > 1 or not headers[0, 0]:
            # Pickled, because outputs are built of the user's classes.
            judge_pickled = partial(_judged_pickled, judge)
            answer = exchange(members.ranks, GATHERING, said_by(said), judge_pickled, timeout)
            sending = Sending.of(unpacked(answer), own)
            headers = members.headers(sending.header)
        receives = dst is None or dst == dist.get_rank()
        return result_of(sending, headers, members.transport(dst), receives=receives)


def _judged_pickled(judge: Callable[[Mapping[int, Report]], Agreement], records: Mapping[int, bytes]) -> bytes:
    return packed(judge({rank: unpacked(record) for rank, record in records.items()}))
