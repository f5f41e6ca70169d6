"""The state of a loader that is saved: taken of its passes, and read. It fits any number of ranks."""

from dataclasses import replace
from typing import Any

from ddp_patch.errors import InvalidOptionError
from ddp_patch.plan import Batching
from ddp_patch.sharding.epochs import Passes
from ddp_patch.sharding.saved_position import Position, read_state, write_state

__all__ = ["position_in", "state_after", "state_now"]


def state_now(passes: Passes[Any]) -> dict[str, Any]:
    """Return the state for packages that save and resume by torch's Stateful protocol; the same on every rank."""
    return _state_at(passes, passes.position_now())


def state_after(passes: Passes[Any], batches: int, batching: Batching, *, on_this_rank: bool = False) -> dict[str, Any]:
    """Return the state after some batches of the latest pass; after its last one, draw what the samplers draw then.

    Args:
        passes: The passes over the loader.
        batches: How many.
        batching: How the loader makes them.
        on_this_rank: Say that the pass is over if this rank knows it, though others may not know it yet.

    Raises:
        InvalidOptionError: The pass has not yielded that many.
        StateError: The order depends on something that no state holds.
    """
    current = passes.current
    given = 0 if current is None else current.batches(batching)
    if passes.has_one_iterator and batches != given:
        raise InvalidOptionError(
            f"batches_done={batches}, and {given} batches of epoch {passes.epochs.current} were given: a loader with "
            "one iterator for all epochs continues after a break, so the loop's count may not be the epoch's. Pass "
            "how many batches of the epoch were given, or call set_epoch() before each loop, to begin an epoch "
            "there."
        )
    if batches > given:
        raise InvalidOptionError(
            f"batches_done={batches}, and the pass in progress has given {given}. Pass how many of its batches the "
            "training loop has finished, counted from the beginning of this pass."
        )
    if current is None:
        return state_now(passes)
    if current.draw_end_after(batches, batching, on_this_rank=on_this_rank):
        return _state_at(passes, current.position_at_end(passes.snapshot()).or_next_epoch())
    return _state_at(passes, current.position_after(batches, batching))


def _state_at(passes: Passes[Any], position: Position) -> dict[str, Any]:
    return write_state(replace(position, seed=passes.agreed.seed.value), passes.facts(passes.latest))


def position_in(passes: Passes[Any], state: Any) -> Position:
    """Return the position that a state describes; raise StateError unless this loader has it."""
    position = read_state(state, passes.facts(None), passes.agreed.seed, passes.sampler_states.holders)
    passes.require_fits(position)
    return position
