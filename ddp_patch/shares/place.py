"""Where a loader stands in its epochs, as plain values that outlive the process: written, read and checked."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_patch.errors import StateError
from ddp_patch.loaders.copying import random_generators
from ddp_patch.plan import Done
from ddp_patch.streams.seeding import generator_state, set_generator_state, unmoved

__all__ = ["Held", "Place", "plain_attributes", "read_state"]

_VERSION = 1
_PLAIN = {bool, int, float, str, type(None)}
_FIELDS = ("version", "loader", "epoch", "done", "ended", "generators", "samplers", "attributes", "drawn_from", "now")


@dataclass(frozen=True, slots=True)
class Held:
    """What samplers hold besides (seed, epoch), from which their order follows.

    Attributes:
        generators: The states of their random generators.
        samplers: What those with a ``state_dict`` say of themselves.
        attributes: Of all the others, the plain attributes that have changed since they were wrapped: counters.
        unknown: Why that cannot be told, if it cannot.
    """

    generators: Sequence[Any] = ()
    samplers: Sequence[Any] = ()
    attributes: Sequence[Mapping[str, Any]] = ()
    unknown: str = ""

    @classmethod
    def by(cls, samplers: Sequence[Any], at_first: Sequence[Mapping[str, Any]]) -> "Held":
        """Return what the samplers hold now.

        Args:
            samplers: The samplers.
            at_first: Their plain attributes when they were wrapped.
        """
        states = [generator_state(generator) for generator in random_generators(samplers)]
        attributes = [
            {name: value for name, value in now.items() if name not in first or first[name] != value}
            for now, first in zip(plain_attributes(samplers), at_first, strict=True)
        ]
        changed = attributes if any(attributes) else ()
        try:
            return cls(states, [copy.deepcopy(_told(sampler)) for sampler in _stateful(samplers)], changed)
        except Exception as error:  # noqa: BLE001 - the user's code; it counts when a state is asked for
            why = f"when the epoch began, the state_dict() of a sampler in it raised {error!r}. Correct that method"
            return cls(states, (), changed, why)

    def reinstate(self, samplers: Sequence[Any], at_first: Sequence[Mapping[str, Any]]) -> None:
        """Make the samplers hold this again.

        Args:
            samplers: The samplers.
            at_first: As for ``by``.
        """
        self.reinstate_generators(samplers)
        for sampler, state in zip(_stateful(samplers), self.samplers, strict=True):
            sampler.load_state_dict(copy.deepcopy(state))
        attributes = self.attributes or [{} for _ in samplers]
        for sampler, first, changed in zip(samplers, at_first, attributes, strict=True):
            if plain := {**first, **changed}:
                vars(sampler).update(plain)

    def reinstate_generators(self, samplers: Sequence[Any]) -> None:
        """Put the samplers' random generators into these states."""
        for generator, state in zip(random_generators(samplers), self.generators, strict=True):
            set_generator_state(generator, state)

    def __bool__(self) -> bool:
        return bool(self.generators or self.samplers or self.attributes or self.unknown)


def plain_attributes(samplers: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the numbers and strings that are attributes of each sampler without a ``state_dict``."""
    return [
        {
            name: value
            for name, value in getattr(sampler, "__dict__", {}).items()
            if type(value) in _PLAIN  # and no subclass, as numpy's numbers are
            and not (name == "epoch" and hasattr(sampler, "set_epoch"))  # which is told
        }
        if not _stateful([sampler])
        else {}
        for sampler in samplers
    ]


def _stateful(samplers: Iterable[Any]) -> list[Any]:
    return [sampler for sampler in samplers if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")]


def _told(sampler: Any) -> Any:
    """What a sampler's next pass follows from, which is more than where a pass stands that was left."""
    return getattr(sampler, "state_between_passes", sampler.state_dict)()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pass begins or stands.

    Attributes:
        epoch: Which epoch it is over.
        done: What was taken of that epoch.
        held: What the samplers held before it; or after it, where it has ended.
        ended: Whether nothing of it is left: the pass that comes next has nothing to give.
        drawn_from: What the generators' states were when the first item was drawn, if they were others by then.
        now: How many items of its share a rank had drawn, and what the generators' states were then. Others may have
            drawn from them since the epoch began: a ``DataLoader`` its workers' seed.
    """

    epoch: int
    done: Done = ()
    held: Held = field(default_factory=Held)
    ended: bool = False
    drawn_from: Held | None = None
    now: tuple[int, Held] | None = None

    @property
    def is_begun(self) -> bool:
        """Whether it is within a pass, not where one begins."""
        return bool(self.done)

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
        if self.held.unknown:
            raise StateError(f"The loader's state cannot be told: {self.held.unknown}.")
        return {
            "version": _VERSION,
            "loader": dict(facts),
            "epoch": self.epoch,
            "done": [list(stint) for stint in self.done],
            "ended": self.ended,
            "generators": list(self.held.generators),
            "samplers": list(self.held.samplers),
            # Pairs, because torch.distributed.checkpoint looks into dicts, and for what it finds when it loads.
            "attributes": [[list(pair) for pair in changed.items()] for changed in self.held.attributes],
            "drawn_from": None if self.drawn_from is None else list(self.drawn_from.generators),
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
    done = tuple((ranks, taken) for ranks, taken in state["done"])
    drawn_from = None
    if state["drawn_from"] is not None:
        drawn_from = Held(_read_generators("drawn_from", state["drawn_from"], samplers))
    held, now = _read_held(state, samplers), _read_now(state["now"], samplers)
    return Place(state["epoch"], done, held, state["ended"], drawn_from, now)


def _read_generators(name: str, states: Any, samplers: Sequence[Any]) -> Sequence[Any]:
    """Return the states of the samplers' generators, after trying each on its own."""
    found = random_generators(samplers)
    _require_number(name, states, len(found))
    with unmoved(found):
        for generator, state in zip(found, states, strict=True):
            try:
                set_generator_state(generator, state)
            except Exception as error:
                raise _damaged(f"its field {name} holds what is no state of a {type(generator).__name__}") from error
    return states  # type: ignore[no-any-return]  # a list, as was made sure of


def _read_held(state: Mapping[str, Any], samplers: Sequence[Any]) -> Held:
    _read_generators("generators", state["generators"], samplers)
    _require_number("samplers", state["samplers"], len(_stateful(samplers)))
    try:
        attributes = [{str(name): value for name, value in changed} for changed in state["attributes"]]
    except (TypeError, ValueError):
        raise _damaged(f"its field attributes is {state['attributes']!r}, not a list of lists of pairs") from None
    if attributes:
        _require_number("attributes", attributes, len(samplers))
    return Held(state["generators"], state["samplers"], attributes)


def _read_now(now: Any, samplers: Sequence[Any]) -> tuple[int, Held] | None:
    if now is None:
        return None
    if not (isinstance(now, list | tuple) and len(now) == 2 and _is_count(now[0])):
        raise _damaged(f"its field now is {now!r}, not a pair")
    return now[0], Held(_read_generators("now", now[1], samplers))


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
