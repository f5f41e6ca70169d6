"""What this rank got of a patched loader: in a whole pass, or in the step that the loop is in."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from ddp_patch.errors import DDPPatchError, message_of
from ddp_patch.evaluation.places import StepStand, WholeStand
from ddp_patch.evaluation.readings import Misfit, Share
from ddp_patch.evaluation.report import Got
from ddp_patch.loaders.facts import Level
from ddp_patch.plan import Plan
from ddp_patch.shares.batches import Batches
from ddp_patch.shares.epochs import EpochSampler
from ddp_patch.shares.passes import Pass
from ddp_patch.shares.step_samples import DividedBatches
from ddp_patch.shares.turns import Part, Turn, Turns

__all__ = ["got_in_pass", "got_in_step"]


def got_in_pass(batches: Batches) -> Got:
    """Return what this rank got in the latest pass.

    Raises:
        Misfit: There is none, or it is not over.
    """
    sampler, one = batches.sampler, batches.sampler.latest
    if one is None:
        raise Misfit("made no pass over the loader")
    _require_one_pass(sampler, one)
    turns = sampler.turns_of_whole(one, batches)
    if turns is None or (sampler.given is not None and sampler.given.is_within):
        raise Misfit(f"stopped in the middle of epoch {one.epoch}; gather_step() gathers a step")
    divided = sampler.divided_batches(one, turns)
    length = turns.length if divided is None else divided.length
    at = f"gather_in_order() of patched loader {sampler.agreed.number} after epoch {_pass_text(one)}, of {length} items"
    if divided is not None:
        return Got(at, _share_of_divided(divided), WholeStand(turns, divided.rows, [*divided.sizes], divided.plan))
    if batches.level is Level.BATCH:
        return _got_batches(at, one, turns)
    rows, samples = turns.rows, turns.samples
    # Each part's padding comes at its own end, in the midst of what other workers give.
    real = list(turns.real_places()) if rows < samples and len(turns.parts) > 1 else range(rows)
    if batches.level is Level.UNBATCHED:
        return Got(at, Share(samples, real, samples, sample="item"), WholeStand(turns, rows))
    sizes = [turn.items for turn in turns.all()]
    return Got(at, Share(samples, real, len(sizes), sizes), WholeStand(turns, rows))


def _share_of_divided(divided: DividedBatches) -> Share:
    sizes = divided.own_sizes()
    samples, rows = sum(sizes), divided.rows
    return Share(samples, range(rows) if rows == samples else list(divided.real_places()), len(sizes), sizes)


def _got_batches(at: str, one: Pass[Any], turns: Turns) -> Got:
    """Return what a rank got that takes whole batches, where padding comes last."""
    batches, real = turns.samples, turns.rows
    sizes = [] if one.sizes is None else [*one.sizes][:batches]
    if len(sizes) < batches:  # nobody noted them
        return Got(at, Share(None, range(0), batches, None, range(real)), WholeStand(turns, real))
    share = Share(sum(sizes), range(sum(sizes[:real])), batches, sizes, range(real))
    return Got(at, share, WholeStand(turns, real, sizes[:real]))


def _pass_text(one: Pass[Any]) -> str:
    return f"{one.epoch}" if one.begins_at == "0" else f"{one.epoch} from {one.begins_at} on"


def got_in_step(loader: DataLoader[Any], batches: Batches) -> Got:
    """Return what this rank got in the step that its loop is in.

    Raises:
        Misfit: That is not known, or other ranks may make no such step.
    """
    sampler, one = batches.sampler, batches.sampler.latest
    try:
        number = batches.handed_out(loader) - 1
    except DDPPatchError as error:
        raise Misfit(f"cannot know the step: {message_of(error)}") from error
    if one is None or number < 0:
        raise Misfit("got no batch of the loader yet")
    if one.is_exhausted:
        raise Misfit(f"called it after the loop: epoch {one.epoch} is over")
    _require_one_pass(sampler, one)
    turns = ends = sampler.turns(one, batches)
    if len(turns.parts) == 1 and turns.count is None:
        ends = replace(turns, parts=[Part(one.skip, sampler.pass_length(one))])
    division = sampler.agreed.division
    if division is None:
        _require_equal_steps(ends, knows_length=len(turns.parts) == 1 and sampler.left(one.start) is not None)
    turn, step = turns.turn(number), sampler.samples_of_step(one, batches, number)
    is_batch, has_sizes = batches.level is Level.BATCH and division is None, one.sizes is not None
    keys = _keys(one, turns, turn) if division is None else _keys_in_batch(one, division, turn, number)
    share = Share(step.items, range(step.real), 1, sample="item" if batches.level is Level.UNBATCHED else "sample")
    if is_batch:
        samples = step.items if has_sizes else None
        share = Share(samples, range(step.real), 1, None, range(turn.real))
    stand = StepStand(keys, step.items if is_batch else None, is_last=ends.count == number + 1)
    at = f"gather_step() of patched loader {sampler.agreed.number} in step {number + 1} of epoch {_pass_text(one)}"
    return Got(at, share, stand)


def _require_one_pass(sampler: EpochSampler[Any], one: Pass[Any]) -> None:
    """Refuse a pass whose batches cannot be told from those of another one, or were counted elsewhere."""
    if one.is_interleaved:
        raise Misfit(
            "used two iterators of the loader at once, so it is unknown which of them the outputs belong to; finish "
            "one before the next begins"
        )
    if sampler.left_out(one):
        raise Misfit(
            f"resumed within epoch {one.epoch} by the loader's own load_state_dict(), so its first batches were "
            "counted elsewhere; take the state with loader_state(), and resume with restore_loader()"
        )


def _require_equal_steps(turns: Turns, *, knows_length: bool) -> None:
    """Refuse a pass in which some ranks may come to a step that others do not.

    Whether a rank has found the end already depends on chance, so only a length that was known before counts.
    """
    plan = turns.plan
    if plan.uneven != "keep" or plan.num_replicas == 1:
        return
    fewest = replace(turns, plan=replace(plan, rank=plan.num_replicas - 1)).count
    if not knows_length or fewest is None or fewest != turns.most:
        raise Misfit(
            "cannot gather step by step with uneven='keep', by which some ranks may have a step less and would not "
            "come; use gather_in_order() after the loop, or uneven='pad'"
        )


def _keys(one: Pass[Any], turns: Turns, turn: Turn) -> Sequence[Any]:
    """Return where the items of a step that are not padding lie in the stream."""
    plan, first, until = turns.plan, turn.first, turn.first + turn.real
    if len(turns.parts) > 1:
        return list(turns.positions_in(turn))
    skip, length = turns.parts[0].skip, turns.parts[0].length
    if one.origins is not None:
        places: list[int] = one.origins[first - skip : until - skip].tolist()
        return places
    if length is not None:
        return plan.share(length)[first:until]
    return range(plan.rank + first * plan.num_replicas, plan.rank + until * plan.num_replicas, plan.num_replicas)


def _keys_in_batch(one: Pass[Any], division: Plan, turn: Turn, number: int) -> Sequence[int]:
    """Return where this rank's samples of a divided batch lie in it."""
    if one.sizes is None:
        return division.divide(turn.items)[0]
    own = division.divide(one.sizes[number])[0]
    if one.origins is None:
        return own
    before = sum(len(division.divide(size)[0]) for size, _ in zip(one.sizes, range(number), strict=False))
    places: list[int] = one.origins[before : before + len(own)].tolist()
    return places
