"""The states of samplers: plain values that name their sampler, and the checks before one is loaded."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from ddp_patch.errors import SamplerError

__all__ = ["Stateful", "check_names", "check_number", "named_state"]

# Raise this number when states get other contents, or when an epoch's order changes.
_VERSION = 1


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and loaded, by torch's protocol."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state."""


def named_state(sampler: object, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the sampler's kind and the version in it.

    Examples:
        >>> named_state(range(3), {"taken": 2})
        {'kind': 'range', 'version': 1, 'taken': 2}
    """
    return {"kind": type(sampler).__name__, "version": _VERSION, **values}


def check_names(sampler: object, state: Mapping[str, Any], names: set[str]) -> None:
    """Raise SamplerError unless a state has this sampler's kind and version, and exactly these names."""
    name = type(sampler).__name__
    if not isinstance(state, Mapping) or state.get("kind") != name:
        kind = state.get("kind", "nothing named") if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise SamplerError(
            f"{name}.load_state_dict() was given the state of {kind}, which another kind of sampler saved. Pass what "
            f"the state_dict() of a {name} returned."
        )
    if state.get("version") != _VERSION:
        raise SamplerError(
            f"{name}.load_state_dict() was given version {state.get('version')!r} and reads {_VERSION}: the order of "
            "an epoch may differ. Use the version of ddp_patch that saved it, or begin the epoch again."
        )
    if differing := sorted(names ^ state.keys()):
        raise SamplerError(
            f"{name}.load_state_dict() was given {sorted(state)} and needs {sorted(names)}: "
            f"{', '.join(differing)} is in only one of them, as when one sampler was given generator= and the other "
            "was not. Make the sampler with the arguments of the one that was saved."
        )


def check_number(sampler: object, name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise SamplerError unless a number in a state lies in the range that the sampler can have saved."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not (is_whole and least <= value and (most is None or value <= most)):  # type: ignore[operator]  # a whole one
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise SamplerError(
            f"{type(sampler).__name__} cannot resume from a state with {name}={value!r}: it must be a whole number, "
            f"{bounds}. Pass what the state_dict() of a sampler with the same arguments returned."
        )
