"""Read and restore what samplers hold besides (seed, epoch): generators, their own states, counters."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_patch.streams.generators import RandomGenerator, generator_states, set_generator_states

__all__ = ["Held", "Holders", "is_stateful"]

_PLAIN = {bool, int, float, str, type(None)}


@dataclass(frozen=True, slots=True)
class Held:
    """What the samplers' order follows from, besides (seed, epoch).

    Attributes:
        generators: The states of their random generators.
        samplers: The ``state_dict()`` of those that have one.
        attributes: Plain attributes of all others that have changed since they were wrapped: counters.
        unknown: Why that is not known, if it is not.
    """

    generators: Sequence[Any] = ()
    samplers: Sequence[Any] = ()
    attributes: Sequence[Mapping[str, Any]] = ()
    unknown: str = ""


class Holders:
    """The samplers of a stream, and other objects that may hold random generators or a state.

    Args:
        holders: Those objects. The attributes that they have now count as unchanged.
    """

    def __init__(self, holders: Sequence[Any]) -> None:
        self.holders = holders
        self._at_first = [_plain_attributes(holder) for holder in holders]

    def held(self) -> Held:
        """Return what they hold now."""
        attributes = [
            {name: value for name, value in _plain_attributes(holder).items() if first.get(name, _UNSET) != value}
            for holder, first in zip(self.holders, self._at_first, strict=True)
        ]
        changed = attributes if any(attributes) else ()
        states = self.generators()
        try:
            return Held(states, [copy.deepcopy(_told(holder)) for holder in self._stateful()], changed)
        except Exception as error:  # noqa: BLE001 - the user's code; it counts when a state is asked for
            why = f"when the epoch began, the state_dict() of a sampler in it raised {error!r}. Correct that method"
            return Held(states, (), changed, why)

    def generators(self) -> Sequence[Any]:
        """Return the states of their random generators."""
        return generator_states(self.holders)

    def reinstate(self, held: Held) -> None:
        """Make them hold what they held before."""
        self.reinstate_generators(held.generators)
        for holder, state in zip(self._stateful(), held.samplers, strict=True):
            holder.load_state_dict(copy.deepcopy(state))
        attributes = held.attributes or [{} for _ in self.holders]
        for holder, first, changed in zip(self.holders, self._at_first, attributes, strict=True):
            if plain := {**first, **changed}:
                held_now = vars(holder)
                # A generator that it was given since stays: its state was restored above.
                held_now.update({k: v for k, v in plain.items() if not isinstance(held_now.get(k), RandomGenerator)})

    def reinstate_generators(self, states: Sequence[Any]) -> None:
        """Put their random generators into states that ``generators`` returned."""
        set_generator_states(self.holders, states)

    def _stateful(self) -> Iterable[Any]:
        return [holder for holder in self.holders if is_stateful(holder)]


_UNSET = object()


def is_stateful(holder: object) -> bool:
    """Return whether a sampler has torch's Stateful protocol."""
    return hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")


def _plain_attributes(holder: object) -> dict[str, Any]:
    """Return the numbers and strings that are attributes of a sampler without a ``state_dict``."""
    if is_stateful(holder):
        return {}
    return {
        name: value
        for name, value in getattr(holder, "__dict__", {}).items()
        if type(value) in _PLAIN  # and no subclass, as numpy's numbers are
        and not (name == "epoch" and hasattr(holder, "set_epoch"))  # set_epoch() sets it
    }


def _told(holder: Any) -> Any:
    """Return everything that a sampler's next pass follows from, not only how far a stopped pass was."""
    return getattr(holder, "state_between_passes", holder.state_dict)()
