"""Where a loader stands in its epochs, as plain values that outlive the process: written, read and checked."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_patch.errors import StateError
from ddp_patch.loader import random_generators
from ddp_patch.plan import Done
from ddp_patch.seeding import generator_state, set_generator_state

__all__ = ["Held", "Place", "read_state"]

_VERSION = 1
_FIELDS = ("version", "loader", "epoch", "done", "ended", "generators", "samplers", "now")


@dataclass(frozen=True, slots=True)
class Held:
    """What samplers hold besides (seed, epoch), from which their order follows.

    Attributes:
        generators: The states of their random generators.
        samplers: What those with a ``state_dict`` say of themselves.
        error: What one of these raised instead.
    """

    generators: Sequence[Any] = ()
    samplers: Sequence[Any] = ()
    error: Exception | None = None

    @classmethod
    def by(cls, samplers: Sequence[Any]) -> "Held":
        """Return what the samplers hold now."""
        states = [generator_state(generator) for generator in random_generators(samplers)]
        try:
            return cls(states, [copy.deepcopy(sampler.state_dict()) for sampler in _stateful(samplers)])
        except Exception as error:  # noqa: BLE001 - the user's code; it counts when a state is asked for
            return cls(states, error=error)

    def reinstate(self, samplers: Sequence[Any]) -> None:
        """Make the samplers hold this again."""
        self.reinstate_generators(samplers)
        for sampler, state in zip(_stateful(samplers), self.samplers, strict=True):
            sampler.load_state_dict(copy.deepcopy(state))

    def reinstate_generators(self, samplers: Sequence[Any]) -> None:
        """Put the samplers' random generators into these states."""
        for generator, state in zip(random_generators(samplers), self.generators, strict=True):
            set_generator_state(generator, state)

    def __bool__(self) -> bool:
        return bool(self.generators or self.samplers or self.error)


def _stateful(samplers: Iterable[Any]) -> list[Any]:
    return [sampler for sampler in samplers if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pass begins or stands.

    Attributes:
        epoch: Which epoch it is over.
        done: What was taken of that epoch.
        held: What the samplers held before it; or after it, where it has ended.
        ended: Whether nothing of it is left: the pass that comes next has nothing to give.
        now: How many items of its share a rank had drawn, and what the generators' states were then. Others may have
            drawn from them since the epoch began: a ``DataLoader`` its workers' seed.
    """

    epoch: int
    done: Done = ()
    held: Held = field(default_factory=Held)
    ended: bool = False
    now: tuple[int, Held] | None = None

    def split(self, num_replicas: int) -> tuple[Done, int]:
        """Return what other numbers of ranks took, and how many items each of so many took after that."""
        if self.done and self.done[-1][0] == num_replicas:
            return self.done[:-1], self.done[-1][1]
        return self.done, 0

    def following(self) -> "Place":
        """Return where the next epoch begins, if this one has ended; else this place."""
        return Place(self.epoch + 1, held=self.held) if self.ended else self

    def state(self, facts: Mapping[str, object]) -> dict[str, Any]:
        """Return the place as plain values, with what tells the loader that it is in."""
        if self.held.error is not None:
            raise StateError(
                "The loader's state cannot be told: when the epoch began, the state_dict() of a sampler in it raised "
                f"{self.held.error!r}. Correct that method, or leave it out where the order follows from the epoch "
                "alone."
            ) from self.held.error
        return {
            "version": _VERSION,
            "loader": dict(facts),
            "epoch": self.epoch,
            "done": [list(stint) for stint in self.done],
            "ended": self.ended,
            "generators": list(self.held.generators),
            "samplers": list(self.held.samplers),
            "now": None if self.now is None else [self.now[0], list(self.now[1].generators)],
        }


def read_state(state: Any, facts: Mapping[str, object], samplers: Sequence[Any]) -> Place:
    """Return the place that a state tells.

    Args:
        state: What ``Place.state`` gave.
        facts: What tells the loader here.
        samplers: The samplers that will hold again what the state says.

    Raises:
        StateError: It is damaged, newer than this package, or of another loader.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise _damaged(f"it is {type(state).__name__}, not a dict with a version")
    if not _is_count(state["version"]) or state["version"] > _VERSION:
        raise StateError(
            f"The state has version {state['version']!r} and this package reads versions up to {_VERSION}, so it may "
            "mean what is not known here. Restore it with the version of ddp_patch that wrote it."
        )
    if missing := [name for name in _FIELDS if name not in state]:
        raise _damaged(f"it has no {', '.join(missing)}")
    _require_same(state["loader"], facts)
    if not _is_count(state["epoch"]):
        raise _damaged(f"its epoch is {state['epoch']!r}, not a whole number of at least 0")
    if not _is_done(state["done"]):
        raise _damaged(f"its field done is {state['done']!r}, not a list of pairs: ranks, and items that each took")
    if not isinstance(state["ended"], bool):
        raise _damaged(f"its field ended is {state['ended']!r}, neither True nor False")
    found = len(random_generators(samplers))
    _require_number("generators", state["generators"], found)
    _require_number("samplers", state["samplers"], len(_stateful(samplers)))
    now = None
    if state["now"] is not None:
        try:
            given, generators = state["now"]
        except (TypeError, ValueError):
            raise _damaged(f"its field now is {state['now']!r}, not a pair") from None
        _require_number("now", generators, found)
        now = given, Held(generators)
    done = tuple((ranks, taken) for ranks, taken in state["done"])
    return Place(state["epoch"], done, Held(state["generators"], state["samplers"]), state["ended"], now)


def _require_number(name: str, states: Any, here: int) -> None:
    """Refuse another number of states than there are holders for them."""
    if not isinstance(states, list | tuple):
        raise _damaged(f"its field {name} is {states!r}, not a list")
    if len(states) != here:
        raise _other([f"  {name}: {len(states)} in the state; {here} here"])


def _require_same(said: Any, facts: Mapping[str, object]) -> None:
    if not isinstance(said, Mapping):
        raise _damaged(f"its field loader is {said!r}, not a dict")
    rows = [
        f"  {name}: {said.get(name, 'nothing')} in the state; {facts.get(name, 'nothing')} here"
        for name in dict.fromkeys([*facts, *said])
        if said.get(name, "nothing") != facts.get(name, "nothing")
    ]
    if rows:
        raise _other(rows)


def _other(rows: Sequence[str]) -> StateError:
    return StateError(
        "The state is of another loader, and going on from it would lose or repeat samples.\n"
        + "\n".join(rows)
        + "\nBuild and patch the loader as it was when the state was taken, with the same seed and options."
    )


def _damaged(why: str) -> StateError:
    return StateError(
        f"The state is damaged: {why}. Pass what loader_state(), or state_dict(), returned, as it was saved."
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_done(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(stint, list | tuple) and len(stint) == 2 and all(map(_is_count, stint)) and stint[0] > 0
        for stint in value
    )
