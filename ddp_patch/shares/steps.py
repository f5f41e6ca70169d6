"""Refuse an epoch in which a rank would make no step, though one process makes some."""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from ddp_patch.errors import NoStepsError
from ddp_patch.options import Uneven
from ddp_patch.plan import ITEMS, Batching, Plan

__all__ = ["require_steps"]


def require_steps(plan: Plan, batching: Batching, name: str, n: int, *, in_batches: bool) -> None:
    """Refuse an epoch of n items if a rank would make no step in it. Every rank comes to the same conclusion.

    Args:
        plan: A rank's share.
        batching: How the rank makes batches of it.
        name: What yields the items.
        n: How many it yields.
        in_batches: Whether the loader's whole batches can be shared instead.

    Raises:
        NoStepsError: One process makes at least one step of them.
    """
    if not batching.loses_a_rank(plan, n):
        return
    why = (
        f", and drop_last=True leaves out a batch of fewer than batch_size={batching.size}"
        if batching.drop_last
        else ""
    )
    raise NoStepsError(
        f"A rank would make no step in an epoch: {name} has {_counted(n, 'item')}, of which {plan.num_replicas} ranks "
        f"take {plan.least(n)} each with uneven={plan.uneven!r}{why}. One process makes "
        f"{_counted(batching.count(n), 'step')} of them. Use one of these: "
        f"{', '.join(_remedies(plan, batching, n, in_batches))}."
    )


def _remedies(plan: Plan, batching: Batching, n: int, in_batches: bool) -> Iterator[str]:
    """Yield what, changed alone, gives every rank a step, or loses nothing."""
    if batching.drop_last and plan.least(n):
        yield f"a batch_size of at most {plan.least(n)}"
    if batching.drop_last and not Batching(batching.size, drop_last=False).loses_a_rank(plan, n):
        yield "drop_last=False"
    for uneven in get_args(Uneven):
        if not batching.loses_a_rank(replace(plan, uneven=uneven), n):
            yield f"uneven={uneven!r}"
    if in_batches and not ITEMS.loses_a_rank(plan, batching.count(n)):
        yield "share='batches'"
    fewer = (Plan(0, ranks, plan.uneven) for ranks in range(plan.num_replicas - 1, 0, -1))
    most = next(some.num_replicas for some in fewer if not batching.loses_a_rank(some, n))
    yield f"at most {_counted(most, 'rank')}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
