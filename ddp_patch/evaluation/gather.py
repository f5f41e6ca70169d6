"""Gather outputs in the order of the unpatched loader."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from numbers import Number
from typing import Any, TypeVar, overload

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import DDPPatchError, WorldError, message_of
from ddp_patch.evaluation.judging import GATHERING, Agreement, ExpectedRows, LocalOutputs, judge, report, require_pad
from ddp_patch.evaluation.outputs import Kind, Misfit, Share, cut, filled, form_of, padded_lists, rows_at
from ddp_patch.evaluation.send import (
    Column,
    Connection,
    Kept,
    LocalColumn,
    Members,
    Placed,
    StepStand,
    WholeStand,
    connected,
    gathered,
    placed_in_step,
    placed_whole,
    reordered,
)
from ddp_patch.evaluation.steps import is_alone, require_one_stream
from ddp_patch.loaders.facts import Level
from ddp_patch.loaders.moving import device_of
from ddp_patch.plan import Plan
from ddp_patch.ranks.exchange import exchange
from ddp_patch.sharding.batches import Batches, batches_given
from ddp_patch.sharding.epochs import EpochSampler
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.schedule import BatchRecord, DividedBatches, Part, Schedule

__all__ = ["gather_in_order", "gather_step", "got_in_pass", "got_in_step"]

Outputs = TypeVar("Outputs")


def got_in_pass(batches: Batches) -> ExpectedRows:
    """Return what this rank got in the latest pass.

    Raises:
        Misfit: There is none, or it is not over.
    """
    sampler, current = batches.sampler, batches.sampler.latest
    if current is None:
        raise Misfit("made no pass over the loader")
    _require_one_pass(sampler, current)
    schedule = sampler.schedule_of_whole(current, batches)
    if schedule is None or sampler.batches_within:
        raise Misfit(f"stopped in the middle of epoch {current.epoch}; gather_step() gathers a step")
    divided = sampler.divided_batches(current, schedule)
    length = schedule.length if divided is None else divided.length
    number, epoch = sampler.agreed.number, _pass_text(current)
    at = f"gather_in_order() of patched loader {number} after epoch {epoch}, of {length} items"
    if divided is not None:
        return ExpectedRows(
            at, _share_of_divided(divided), WholeStand(schedule, divided.rows, [*divided.sizes], divided.plan)
        )
    if batches.level is Level.BATCH:
        return _got_batches(at, current, schedule)
    rows, samples = schedule.rows, schedule.samples
    # Each part's padding comes at its own end, in the midst of what other workers give.
    real = list(schedule.real_places()) if rows < samples and len(schedule.parts) > 1 else range(rows)
    if batches.level is Level.UNBATCHED:
        return ExpectedRows(at, Share(samples, real, samples, sample="item"), WholeStand(schedule, rows))
    sizes = [turn.items for turn in schedule.all()]
    return ExpectedRows(at, Share(samples, real, len(sizes), sizes), WholeStand(schedule, rows))


def _share_of_divided(divided: DividedBatches) -> Share:
    sizes = divided.own_sizes()
    samples, rows = sum(sizes), divided.rows
    return Share(samples, range(rows) if rows == samples else list(divided.real_places()), len(sizes), sizes)


def _got_batches(at: str, current: Pass[Any], schedule: Schedule) -> ExpectedRows:
    """Return what a rank got that takes whole batches, where padding comes last."""
    batches, real = schedule.samples, schedule.rows
    sizes = [] if current.sizes is None else [*current.sizes][:batches]
    if len(sizes) < batches:  # nobody noted them
        return ExpectedRows(at, Share(None, range(0), batches, None, range(real)), WholeStand(schedule, real))
    share = Share(sum(sizes), range(sum(sizes[:real])), batches, sizes, range(real))
    return ExpectedRows(at, share, WholeStand(schedule, real, sizes[:real]))


def _pass_text(current: Pass[Any]) -> str:
    return f"{current.epoch}" if current.begins_at == "0" else f"{current.epoch} from {current.begins_at} on"


def got_in_step(loader: DataLoader[Any], batches: Batches) -> ExpectedRows:
    """Return what this rank got in the step that its loop is in.

    Raises:
        Misfit: That is not known, or other ranks may make no such step.
    """
    sampler, current = batches.sampler, batches.sampler.latest
    try:
        number = batches_given(loader, sampler) - 1
    except DDPPatchError as error:
        raise Misfit(f"cannot know the step: {message_of(error)}") from error
    if current is None or number < 0:
        raise Misfit("got no batch of the loader yet")
    if current.is_exhausted:
        raise Misfit(f"called it after the loop: epoch {current.epoch} is over")
    _require_one_pass(sampler, current)
    schedule = ends = sampler.schedule(current, batches)
    if len(schedule.parts) == 1 and schedule.count is None:
        ends = replace(schedule, parts=[Part(current.skip, current.likely_length)])
    division = sampler.agreed.division
    if division is None:
        _require_equal_steps(ends, knows_length=len(schedule.parts) == 1 and sampler.left(current.start) is not None)
    turn, step = schedule.turn(number), sampler.samples_of_step(current, batches, number)
    is_batch, has_sizes = batches.level is Level.BATCH and division is None, current.sizes is not None
    keys = _keys(current, schedule, turn) if division is None else _keys_in_batch(current, division, turn, number)
    share = Share(step.items, range(step.real), 1, sample="item" if batches.level is Level.UNBATCHED else "sample")
    if is_batch:
        samples = step.items if has_sizes else None
        share = Share(samples, range(step.real), 1, None, range(turn.real))
    stand = StepStand(keys, step.items if is_batch else None, is_last=ends.count == number + 1)
    at = f"gather_step() of patched loader {sampler.agreed.number} in step {number + 1} of epoch {_pass_text(current)}"
    return ExpectedRows(at, share, stand)


def _require_one_pass(sampler: EpochSampler[Any], current: Pass[Any]) -> None:
    """Refuse a pass whose batches cannot be told from those of another one, or were counted elsewhere."""
    if current.is_interleaved:
        raise Misfit(
            "used two iterators of the loader at once, so it is unknown which of them the outputs belong to; finish "
            "one before the next begins"
        )
    if sampler.left_out(current):
        raise Misfit(
            f"resumed within epoch {current.epoch} by the loader's own load_state_dict(), so its first batches were "
            "counted elsewhere; take the state with loader_state(), and resume with restore_loader()"
        )


def _require_equal_steps(schedule: Schedule, *, knows_length: bool) -> None:
    """Refuse a pass in which some ranks may come to a step that others do not.

    Whether a rank has found the end already depends on chance, so only a length that was known before counts.
    """
    plan = schedule.plan
    if plan.uneven != "keep" or plan.num_replicas == 1:
        return
    fewest = replace(schedule, plan=replace(plan, rank=plan.num_replicas - 1)).count
    if not knows_length or fewest is None or fewest != schedule.most:
        raise Misfit(
            "cannot gather step by step with uneven='keep', by which some ranks may have a step less and would not "
            "come; use gather_in_order() after the loop, or uneven='pad'"
        )


def _keys(current: Pass[Any], schedule: Schedule, turn: BatchRecord) -> Sequence[Any]:
    """Return where the items of a step that are not padding lie in the stream."""
    plan, first, until = schedule.plan, turn.first, turn.first + turn.real
    if len(schedule.parts) > 1:
        return list(schedule.positions_in(turn))
    skip, length = schedule.parts[0].skip, schedule.parts[0].length
    if current.origins is not None:
        places: list[int] = current.origins[first - skip : until - skip].tolist()
        return places
    if length is not None:
        return plan.share(length)[first:until]
    return range(plan.rank + first * plan.num_replicas, plan.rank + until * plan.num_replicas, plan.num_replicas)


def _keys_in_batch(current: Pass[Any], division: Plan, turn: BatchRecord, number: int) -> Sequence[int]:
    """Return where this rank's samples of a divided batch lie in it."""
    if current.sizes is None:
        return division.divide(turn.items)[0]
    own = division.divide(current.sizes[number])[0]
    if current.origins is None:
        return own
    before = sum(len(division.divide(size)[0]) for size, _ in zip(current.sizes, range(number), strict=False))
    places: list[int] = current.origins[before : before + len(own)].tolist()
    return places


# The connections of passes whose steps are gathered.
_KEPT = Kept()


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
        The same structure, with tensors on the device of this rank's own; where it has none, on the loader's if the
        other ranks' are on one of that kind.

    Raises:
        OutputsError: A rank is in the middle of a pass, passes another number of rows than it got samples, or another
            structure than the others; raised on every rank.
        MissingRanksError: A rank did not arrive in time.
        NotPatchedError: The loader was not patched, and there are several ranks.
        WorldError: The world was given by ``rank=`` and ``num_replicas=``, so the other processes are unknown.
        UnsupportedLoaderError: It is unknown which samples each rank got.
        InvalidOptionError: ``dst`` is not one of the ranks, or ``pad`` is no number that fits the rows.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import patch_dataloader_to_ddp
        >>> loader = patch_dataloader_to_ddp(DataLoader(range(5), batch_size=2), rank=0, num_replicas=1)
        >>> outputs = [{"doubled": 2 * batch} for batch in loader]
        >>> torch.cat([batch["doubled"] for batch in gather_in_order(outputs, loader)])
        tensor([0, 2, 4, 6, 8])
    """
    if is_alone("gather_in_order", loader):
        return _alone(outputs, pad)
    batches = require_one_stream("gather_in_order", loader)
    members = _members("gather_in_order", batches, _plain(dst), device_of(loader))
    agreement, own = _agreed("gather_in_order", outputs, partial(got_in_pass, batches), batches, members, pad)
    stands = [stand for stand in (*agreement.stands, own.stand) if isinstance(stand, WholeStand)]
    placed = placed_whole(stands[:-1], stands[-1])
    return _result(agreement, own, placed, connected(members, agreement.name), pad, _origins(batches))


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
    process.

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
    if is_alone("gather_step", loader):
        return _alone(outputs, pad)
    batches = require_one_stream("gather_step", loader)
    members = _members("gather_step", batches, _plain(dst), device_of(loader))
    current = batches.sampler.latest
    got = partial(got_in_step, loader, batches)
    agreement, own = _agreed("gather_step", outputs, got, batches, members, pad, current)
    stands = [stand for stand in agreement.stands if isinstance(stand, StepStand)]
    connection = _KEPT.connected(current, members, agreement.name, is_last=all(stand.is_last for stand in stands))
    return _result(agreement, own, placed_in_step(stands), connection, pad)


def _alone(outputs: Any, pad: Any) -> Any:
    """Return the outputs of a single process."""
    require_pad(pad)
    return outputs if pad is None else padded_lists(outputs, pad)


def _plain(value: Any) -> Any:
    """Return an option that is to be compared between the ranks, as something that surely can be sent."""
    return value if value is None or isinstance(value, Number | str) else repr(value)


def _members(operation: str, batches: Batches, dst: int | None, device: torch.device | None) -> Members:
    """Return the ranks that gather with this one: one rank for each share."""
    agreed = batches.sampler.agreed
    world, timeout = agreed.world, agreed.options.timeout
    if world.members is None:
        if world.num_replicas > 1:
            raise WorldError(
                f"{operation} cannot gather from {world.num_replicas} ranks: the loader's world was given by rank= "
                "and num_replicas=, and nothing says which processes these are. Patch it with a process group."
            )
        return Members([0], 0, dst, timeout, device)
    return Members(world.peer_ranks(), dist.get_rank(), dst, timeout, device)


def _agreed(
    operation: str,
    outputs: Any,
    got: Callable[[], ExpectedRows],
    batches: Batches,
    members: Members,
    pad: Any,
    current: Any = None,
) -> tuple[Agreement, LocalOutputs]:
    """Compare the outputs with the other ranks', and return how to read them and what this rank has of them."""
    kept = None if current is None else _KEPT.name(current)
    said, own = report(outputs, got, members.dst, _plain(pad), kept)
    judged = partial(judge, operation, batches.sampler.agreed.world.members or [0])
    if len(members.ranks) == 1:
        return judged({members.rank: said})[members.rank], own
    return exchange(members.ranks, GATHERING, said, judged, members.timeout), own


def _origins(batches: Batches) -> np.ndarray[Any, Any] | None:
    """Return where this rank's rows come from in the unpatched loader's order; None where they lie in that order."""
    return None if batches.sampler.latest is None else batches.sampler.latest.origins


def _result(
    agreement: Agreement,
    own: LocalOutputs,
    placed: Mapping[Kind, Placed],
    connection: AbstractContextManager[Connection],
    pad: Any,
    origins: np.ndarray[Any, Any] | None = None,
) -> Any:
    """Send and receive all rows, and put them together.

    Args:
        agreement: How to read the outputs.
        own: This rank's.
        placed: Where all rows go, by what they stand for.
        connection: Connects the ranks.
        pad: What fills up narrower rows.
        origins: Where this rank's rows come from, if they must be put into another order.
    """
    all_origins = None
    found: dict[str, dict[str, Any]] = {}
    with connection as connected_ranks:
        for path, (kind, _, columns) in agreement.leaves.items():
            found[path] = {
                name: gathered(connected_ranks, column, placed[kind], own.given(path, kind, name, pad), pad)
                for name, column in columns.items()
            }
        if origins is not None:
            ranks, units = len(agreement.stands), placed.get(Kind.BATCHES, placed[Kind.SAMPLES])
            column = Column(form_of(origins), [()] * ranks, [0] * ranks)
            all_origins = gathered(connected_ranks, column, units, LocalColumn(origins), None)
        if not connected_ranks.members.receives:
            return None
    leaves = {}
    for path, (kind, nest, _) in agreement.leaves.items():
        rows, cuts = found[path], placed[kind].cuts
        if all_origins is not None:
            of_batches = Kind.BATCHES in placed and kind is not Kind.BATCHES
            order, cuts = reordered(placed[kind], all_origins, of_batches=of_batches)
            rows = {name: rows_at(column, order.tolist()) for name, column in rows.items()}
        leaves[path] = cut(nest, rows, cuts) if kind is Kind.LIST else rows[path]
    return filled(agreement.nest, leaves)
