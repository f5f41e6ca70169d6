"""Refuse an epoch in which a rank would make no step: the others would wait for it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from ddp_patch.errors import NoStepsError
from ddp_patch.options import Uneven
from ddp_patch.plan import ONE_PER_STEP, Batching, Plan

__all__ = ["require_steps"]


def require_steps(plan: Plan, batching: Batching, name: str, lengths: Sequence[int], *, in_batches: bool) -> None:
    """Refuse an epoch if a rank would make no step in it. Every rank decides the same.

    Args:
        plan: A rank's share.
        batching: How the rank makes batches of it.
        name: What yields the items.
        lengths: How many items it yields, in each of the parts that are sharded.
        in_batches: Whether the loader's whole batches can be sharded instead.

    Raises:
        NoStepsError: One process makes at least one step of them.
    """
    if not batching.leaves_rank_without_step(plan, *lengths):
        return
    why = ""
    if batching.drop_last:
        why = f", and drop_last=True leaves out a batch of fewer than batch_size={batching.size}"
    parts = f" in {len(lengths)} parts, one for each worker" if len(lengths) > 1 else ""
    raise NoStepsError(
        f"A rank would make no step in an epoch: {name} has {_counted(sum(lengths), 'item')}{parts}, of which "
        f"{plan.num_replicas} ranks take {sum(map(plan.smallest_share, lengths))} each with "
        f"uneven={plan.uneven!r}{why}. One process makes {_counted(sum(map(batching.count, lengths)), 'step')} of "
        f"them. Use one of these: {', '.join(_remedies(plan, batching, lengths, in_batches))}."
    )


def _remedies(plan: Plan, batching: Batching, lengths: Sequence[int], in_batches: bool) -> Iterator[str]:
    """Yield each change that alone gives every rank a step, or loses nothing."""
    if batching.drop_last and (most := max(map(plan.smallest_share, lengths))):
        yield f"a batch_size of at most {most}"
    if batching.drop_last and not Batching(batching.size, drop_last=False).leaves_rank_without_step(plan, *lengths):
        yield "drop_last=False"
    for uneven in get_args(Uneven):
        if not batching.leaves_rank_without_step(replace(plan, uneven=uneven), *lengths):
            yield f"uneven={uneven!r}"
    if in_batches and not ONE_PER_STEP.leaves_rank_without_step(plan, *map(batching.count, lengths)):
        yield "share='batches'"
    fewer = (Plan(0, ranks, plan.uneven) for ranks in range(plan.num_replicas - 1, 0, -1))
    most = next(some.num_replicas for some in fewer if not batching.leaves_rank_without_step(some, *lengths))
    yield f"at most {_counted(most, 'rank')}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
