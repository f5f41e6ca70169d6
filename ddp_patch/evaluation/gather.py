"""Gather outputs in the order of the unpatched loader."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from numbers import Number
from typing import Any, TypeVar, cast, overload

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import DDPPatchError, UnsupportedLoaderError, message_of
from ddp_patch.evaluation.judging import (
    GATHERING,
    Agreement,
    ExpectedRows,
    LocalOutputs,
    RankRows,
    RemoteReport,
    judge_outputs,
    report,
    require_pad,
)
from ddp_patch.evaluation.outputs import Misfit, RankShare, RowKind, cut, filled, padded_lists
from ddp_patch.evaluation.row_order import Placed, RowKeys, array_of, joined, keys_of, placed, placed_samples
from ddp_patch.evaluation.send import Connection, Connections, Members, gathered, gathered_keys
from ddp_patch.evaluation.steps import is_alone, require_one_stream
from ddp_patch.loaders.facts import ShardedUnit
from ddp_patch.plan import BatchRecord, Part, Schedule
from ddp_patch.ranks.exchange import exchange
from ddp_patch.ranks.packing import packed, unpacked
from ddp_patch.ranks.records import State
from ddp_patch.sharding.batches import Batches, batches_delivered
from ddp_patch.sharding.passes import Pass

__all__ = [
    "expected_of_pass",
    "expected_of_step",
    "gather_in_order",
    "gather_step",
    "gather_this_step",
    "placed_by_kind",
]

Outputs = TypeVar("Outputs")


def expected_of_pass(batches: Batches) -> ExpectedRows:
    """Return what this rank got in the latest pass.

    Raises:
        Misfit: There is none, or it is not over.
    """
    sampler, current = batches.sampler, batches.sampler.latest
    if current is None:
        raise Misfit("made no pass over the loader")
    _require_one_pass(current)
    schedule = current.whole_schedule(batches)
    if schedule is None or sampler.batches_into_pass:
        raise Misfit(f"stopped in the middle of epoch {current.epoch}; gather_step() gathers a step")
    length = schedule.length if schedule.batch_plan is None else sum(_batch_sizes(schedule, [], 0))
    at = f"gather_in_order() of patched loader {sampler.agreed.number} after epoch {_pass_text(current)}"
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
    sampler, current = batches.sampler, batches.sampler.latest
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
    is_length_known = sampler.items_left(current.start) is not None
    knows_steps = len(schedule.parts) == 1 and is_length_known and ends.fewest_batches == ends.most_batches
    if schedule.plan.uneven == "keep" and schedule.plan.num_replicas > 1 and not knows_steps:
        raise Misfit(
            "cannot gather step by step with uneven='keep', by which some ranks may have a step less and would not "
            "come; use gather_in_order() after the loop, or uneven='pad'"
        )
    at = f"gather_step() of patched loader {sampler.agreed.number} in step {number + 1} of epoch {_pass_text(current)}"
    return _expected(at, batches, current, schedule, number, is_last=ends.count == number + 1)


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
    *,
    is_last: bool = True,
) -> ExpectedRows:
    """Return what this rank got.

    Args:
        at: What was called, and for which pass or step.
        batches: How the loader makes batches.
        current: The pass.
        schedule: Its batches.
        number: Which of them; None for all.
        is_last: Whether no step follows.
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

    keys = keys_of(schedule.keys(noted(schedule.records() if number is None else [schedule.record(number)])))
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
    is_array = any(isinstance(run, np.ndarray) for run in keys)
    sizes_sent = (real_sizes if has_sizes else [0] * count) if is_whole else None
    return ExpectedRows(at, share, keys, schedule, RankRows(count, count if is_array else keys, sizes_sent, is_last))


def _real_rows(sizes: Sequence[int], real: Sequence[int]) -> Sequence[int]:
    """Return which rows are not padding, of batches with so many rows, of which the first ones are real.

    Each part's padding comes at its own end, in the midst of what other workers give.
    """
    begins = (end - size for end, size in zip(accumulate(sizes), sizes, strict=True))
    runs = list(joined(range(begin, begin + own) for begin, own in zip(begins, real, strict=True))) or [range(0)]
    return runs[0] if len(runs) == 1 else list(chain.from_iterable(runs))


_CONNECTIONS = Connections()


@overload
def gather_in_order(
    outputs: Outputs, loader: DataLoader[Any], *, dst: None = None, pad: float | None = None
) -> Outputs: ...
@overload
def gather_in_order(
    outputs: Outputs, loader: DataLoader[Any], *, dst: int | None, pad: float | None = None
) -> Outputs | None: ...
def gather_in_order(outputs: Any, loader: DataLoader[Any], *, dst: int | None = None, pad: float | None = None) -> Any:
    """Return all ranks' outputs in the unpatched loader's order, without padding.

    Call it on every rank after a whole pass over the loader. The result is what one process would have: metrics
    computed from it equal those of one process. Samples that ``uneven="drop"`` or ``drop_last=True`` left out are not
    in it. Besides the result, it needs up to 64 MiB of memory; lists and strings are pickled, which needs one rank's
    part once more; and a list of batches is put together first, which needs this rank's outputs once more.

    Args:
        outputs: This rank's outputs of the pass, in its own order, padding included. Each tensor, array or list has one
            row (a list: one element) per sample. It may also be a list with one entry per batch, as collected in the
            loop; the result is then such a list, too, with the batches of the unpatched loader. Where whole batches are
            shared, one row per batch will do as well. Dicts, tuples and dataclasses may hold these, and None. A rank
            that got nothing may pass None.
        loader: A loader from ``patch_dataloader_to_ddp``, or an unpatched one in a single process, where the outputs
            come back unchanged.
        dst: The global rank that gets the result; the others get None. Default: every rank gets it.
        pad: Fills up rows that are narrower than others, as generated texts are: all dimensions but the first become as
            large as the largest of any rank. Default: rows that differ in width are an error.

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
        InvalidOptionError: ``dst`` is not one of the ranks, or ``pad`` is no number that fits the rows.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(5), batch_size=2), rank=0, num_replicas=1)
        >>> outputs = [{"doubled": 2 * batch} for batch in loader]
        >>> torch.cat([batch["doubled"] for batch in gather_in_order(outputs, loader)])
        tensor([0, 2, 4, 6, 8])
    """
    return _gathered("gather_in_order", outputs, loader, dst, pad)


@overload
def gather_step(
    outputs: Outputs, loader: DataLoader[Any], *, dst: None = None, pad: float | None = None
) -> Outputs: ...
@overload
def gather_step(
    outputs: Outputs, loader: DataLoader[Any], *, dst: int | None, pad: float | None = None
) -> Outputs | None: ...
def gather_step(outputs: Any, loader: DataLoader[Any], *, dst: int | None = None, pad: float | None = None) -> Any:
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
        pad: As in ``gather_in_order``: rows are as wide as the widest of this step.

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
        InvalidOptionError: ``dst`` is not one of the ranks, or ``pad`` is no number that fits the rows.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(5), batch_size=2), rank=0, num_replicas=1)
        >>> [gather_step(2 * batch, loader).tolist() for batch in loader]
        [[0, 2], [4, 6], [8]]
    """
    return _gathered("gather_step", outputs, loader, dst, pad)


def gather_this_step(outputs: Outputs, loader: DataLoader[Any], step: int) -> Outputs:
    """Return all ranks' outputs of a step, from 0, where something between the loader and the loop fetches ahead.

    See ``gather_step``.
    """
    gathered: Outputs = _gathered("gather_step", outputs, loader, None, None, step)
    return gathered


def _gathered(
    operation: str, outputs: Any, loader: DataLoader[Any], dst: Any, pad: Any, step: int | None = None
) -> Any:
    """Compare the outputs with the other ranks', and return all ranks'; see ``gather_in_order``."""
    if is_alone(operation, loader):
        require_pad(pad)
        return outputs if pad is None else padded_lists(outputs, pad)
    batches = require_one_stream(operation, loader)
    if operation == "gather_in_order" and batches.sampler.agreed.options.costs is not None:
        raise UnsupportedLoaderError(
            "gather_in_order was given a loader with cost=, which changes the order of the samples, so the outputs "
            "would not be in the sampler's. Leave cost= out of loaders that evaluate, or use gather_step() in the loop."
        )
    members = _members(operation, batches, _plain(dst))
    agreed, current = batches.sampler.agreed, batches.sampler.latest
    expect = partial(expected_of_step, loader, step=step) if operation == "gather_step" else expected_of_pass
    said, own = report(outputs, partial(expect, batches), members.dst, _plain(pad), _CONNECTIONS.name(current))
    judged = partial(judge_outputs, operation, agreed.world.share_of_rank or [0])
    if len(members.ranks) == 1:
        agreement = judged({members.rank: said})
    else:
        # Pickled, because outputs are built of the user's classes.
        judge = partial(_judged_pickled, judged)
        agreement = unpacked(exchange(members.ranks, GATHERING, packed(said), judge, members.timeout))
    is_last = all(rows.is_last for rows in agreement.rows)
    with _CONNECTIONS.connected(current, members, agreement.name, is_last=is_last) as connection:
        return _received(agreement, cast(LocalOutputs, own), connection, pad)  # where it has none, all ranks raised


def _judged_pickled(judged: Callable[[Mapping[int, RemoteReport]], Agreement], records: Mapping[int, bytes]) -> bytes:
    return packed(judged({rank: unpacked(record) for rank, record in records.items()}))


def _plain(value: Any) -> Any:
    """Return an option that is to be compared between the ranks, as something that surely can be sent."""
    return value if value is None or isinstance(value, Number | str) else repr(value)


def _members(operation: str, batches: Batches, dst: int | None) -> Members:
    """Return the ranks that gather with this one: one rank for each share."""
    agreed = batches.sampler.agreed
    world, timeout = agreed.world, agreed.options.timeout
    if world.share_of_rank is None and world.num_replicas == 1:
        return Members([0], 0, dst, timeout)
    return Members(world.peer_ranks(operation), dist.get_rank(), dst, timeout)


def _received(agreement: Agreement, own: LocalOutputs, connection: Connection, pad: Any) -> Any:
    """Send and receive all rows, and put them together.

    Args:
        agreement: How to read the outputs.
        own: This rank's.
        connection: Connects the ranks.
        pad: What fills up narrower rows.
    """
    keys = gathered_keys(connection, [rows.keys for rows in agreement.rows], own.expected.keys)
    placed_as, sizes = placed_by_kind(agreement.rows, keys, own.expected.schedule)
    leaves = {}
    for path, (kind, nest, columns) in agreement.leaves.items():
        rows = {
            name: gathered(connection, column, placed_as[kind], own.given(path, kind, name, pad), pad)
            for name, column in columns.items()
        }
        if connection.members.receives:
            leaves[path] = cut(nest, rows, sizes()) if kind is RowKind.LIST else rows[path]
    return filled(agreement.nest, leaves) if connection.members.receives else None


def placed_by_kind(
    rows: Sequence[RankRows], keys: Sequence[RowKeys] | None, schedule: Schedule
) -> tuple[Mapping[RowKind, Placed], Callable[[], Sequence[int]]]:
    """Return where rows go, by what they stand for, and what tells how many each batch of the unpatched loader has.

    Args:
        rows: What each share's rank got.
        keys: The keys of each share's rows; None on a rank that does not get the result.
        schedule: This rank's batches.
    """
    units = Placed([of_share.count for of_share in rows]) if keys is None else placed(keys)
    if rows[0].sizes is None:
        return {RowKind.SAMPLES: units, RowKind.LIST: units}, partial(_batch_sizes, schedule, keys or [], units.rows)
    sizes = [of_share.sizes or () for of_share in rows]
    samples, in_order = (Placed(list(map(sum, sizes))), ()) if keys is None else placed_samples(units, sizes)
    return {RowKind.BATCHES: units, RowKind.SAMPLES: samples, RowKind.LIST: samples}, lambda: in_order


def _batch_sizes(schedule: Schedule, keys: Sequence[RowKeys], rows: int) -> Sequence[int]:
    """Return how many samples that are not padding each batch of the unpatched loader has."""
    size = schedule.batching.size
    if schedule.batch_plan is not None:
        return [record.samples_of_all or 0 for record in schedule.records()]
    if len(schedule.parts) > 1:
        of_batches = [array_of(run) // size for of_share in keys for run in of_share]
        counts: list[int] = np.unique(np.concatenate(of_batches), return_counts=True)[1].tolist()
        return counts
    return [min(size, rows - at) for at in range(0, rows, size)]
