"""What samplers hold that passes change: random generators, counters, and states of their own."""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ddp_patch.errors import DDPPatchError, StateError
from ddp_patch.orders.random_states import (
    RandomGenerator,
    changed_attributes,
    generator_states,
    is_stateful,
    native_state,
    one_at_a_time,
    plain_attributes,
    random_generators,
    same_state,
    seeded_anew,
    set_generator_states,
    set_native_state,
    was_seeded,
)
from ddp_patch.sharding.saved_state import States
from ddp_patch.validation import shown

__all__ = ["SamplerStates"]


# How many epochs' beginnings are kept, for who goes back to one.
_MOST_BEGINNINGS = 32


@dataclass(frozen=True, slots=True)
class _Beginning:
    """What the samplers held when an epoch began: generators with their states, and counters by holder and name."""

    generators: Sequence[tuple[RandomGenerator, Any]]
    counters: Mapping[tuple[int, str], Any]


@dataclass(slots=True)
class _Generator:
    """A generator of the samplers'.

    Attributes:
        generator: The generator.
        state: Where the passes left it.
        outside: Where others found it then.
    """

    generator: RandomGenerator
    state: Any
    outside: Any

    @property
    def is_seeded(self) -> bool:
        """Whether somebody else has seeded it since."""
        is_same = same_state(native_state(self.generator), self.outside)
        return not is_same and was_seeded(self.generator, self.outside)


class SamplerStates:
    """The samplers of a stream, and other objects that may hold random generators or a state.

    Their generators and counters belong to the passes of one loader: they are put back to where these passes left them
    whenever one draws, whatever others drew or counted meanwhile. After ``set_epoch(n)``, epoch n starts from the same
    states as if no other pass had been broken off. A ``torch.Generator`` that the user seeds goes on from that seed.

    Args:
        holders: Those objects. The attributes that they have now count as unchanged.
        changing: The attributes that a pass is known to change, by the position of their holder, and name.
        is_private: Whether the passes draw from them by this object alone. A dataset draws from its own while it is
            read, by workers or in the main process.
    """

    def __init__(
        self, holders: Sequence[Any], changing: Collection[tuple[int, str]] = (), *, is_private: bool = True
    ) -> None:
        self.holders: Sequence[Any] = holders
        self.is_private = is_private
        self._at_first = [plain_attributes(holder) for holder in holders]
        self._generators: list[_Generator] = []
        # Those that were seeded since an epoch was chosen or drawn to its end, with their states then.
        self._seeded: Sequence[tuple[RandomGenerator, Any]] = ()
        self._is_drawing = False
        self._attributes_before: Sequence[Mapping[str, Any]] = ()  # what a pass draws
        self._counter_keys = set(changing)
        self._counters: dict[tuple[int, str], Any] = {}
        self._find()
        self._note_counters()
        self._beginnings = {0: self._now()}

    @property
    def has_generators(self) -> bool:
        """Whether they hold random generators."""
        return bool(self._generators)

    def holds(self, generator: object) -> bool:
        """Return whether this is one of their generators."""
        return any(one.generator is generator for one in self._generators)

    # ---- while a pass draws ----

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """While entered, let the samplers draw and count from where the passes left them."""
        if self._is_drawing:
            yield
            return
        with self.generators_in_place():
            self._put_counters_back()
            self._attributes_before = list(map(plain_attributes, self.holders))
            try:
                yield
            finally:
                self._note_counters()
                self._attributes_before = ()

    @contextmanager
    def generators_in_place(self) -> Iterator[None]:
        """While entered, let the generators draw from where the passes left them. What others find is put back.

        As long as nobody else draws from a generator, everybody finds it where the passes left it, as in one process.
        """
        if self._is_drawing:
            yield
            return
        with one_at_a_time():
            self._note_seeded()
            moved = []
            for one in self._generators:
                if not same_state(now := native_state(one.generator), one.state):
                    moved.append((one, now))
                    set_native_state(one.generator, one.state)
            self._is_drawing = True
            try:
                yield
            finally:
                self._is_drawing = False
                for one in self._generators:
                    one.state = one.outside = native_state(one.generator)
                for one, found in moved:
                    one.outside = found
                    set_native_state(one.generator, found)

    def _note_seeded(self) -> None:
        """Let the generators that somebody else has seeded go on from there."""
        for one in () if self._is_drawing else self._generators:
            if one.is_seeded:
                one.state = one.outside = native_state(one.generator)
                self._seeded = [*self._seeded, (one.generator, one.state)]

    def _find(self) -> None:
        """Look for generators that samplers were given, or made, since."""
        known = {id(one.generator): one for one in self._generators}
        found = random_generators(self.holders) if self.is_private else []
        self._generators = [
            known.get(id(generator)) or _Generator(generator, state := native_state(generator), state)
            for generator in found
        ]

    def _note_counters(self) -> None:
        """Note which attributes a pass has changed, and what all those are that passes change."""
        for place, was in enumerate(self._attributes_before):
            self._counter_keys.update((place, name) for name in changed_attributes(self.holders[place], was))
        held = [getattr(holder, "__dict__", {}) for holder in self.holders]
        self._counters = {key: held[key[0]][key[1]] for key in self._counter_keys if key[1] in held[key[0]]}

    def _put_counters_back(self) -> None:
        for (place, name), value in self._counters.items():
            vars(self.holders[place])[name] = value

    @property
    def has_counters(self) -> bool:
        """Whether passes are known to change attributes."""
        return bool(self._counter_keys)

    @contextmanager
    def changed_by_user(self) -> Iterator[None]:
        """While entered, the user may change what passes count: they continue from there."""
        with one_at_a_time():
            if self._is_drawing:  # a pass will note it
                yield
                return
            self._put_counters_back()
            try:
                yield
            finally:
                self._note_counters()

    # ---- between passes ----

    def begin(self, epoch: int | None = None) -> None:
        """Prepare a pass; if its epoch was chosen, put back what that epoch begins with."""
        self._find()
        if epoch is not None:
            # Whoever seeded a generator chose what comes next, even if somebody looked at that meanwhile.
            self._note_seeded()
            beginning = self._beginning(epoch)
            states = {id(generator): state for generator, state in (*beginning.generators, *self._seeded)}
            known = [one for one in self._generators if id(one.generator) in states]
            for one in known:
                one.state = states[id(one.generator)]
                if self._is_drawing:
                    set_native_state(one.generator, one.state)
            self._counters |= beginning.counters
            if self._seeded:
                generators = [(one.generator, one.state) for one in known]
                self._beginnings[epoch], self._seeded = replace(beginning, generators=generators), ()
        self._put_counters_back()

    def _beginning(self, epoch: int) -> _Beginning:
        if epoch in self._beginnings:
            return self._beginnings[epoch]
        # Derive it from the earliest known epoch, because only that one is known to all ranks.
        first = min(self._beginnings)
        return _later(self._beginnings[first], epoch - first)

    def begin_from_here(self) -> None:
        """Let the latest epoch that is known to begin somewhere begin with what is held now."""
        self._beginnings[max(self._beginnings)] = self._now()

    def end(self, epoch: int) -> None:
        """Record that all of an epoch was drawn, so that the next one begins with what is held now."""
        self._beginnings[epoch + 1], self._seeded = self._now(), ()
        if len(self._beginnings) > _MOST_BEGINNINGS:
            del self._beginnings[min(known for known in self._beginnings if known)]

    def _now(self) -> _Beginning:
        if self._is_drawing:
            self._note_counters()
            for one in self._generators:
                one.state = native_state(one.generator)
        return _Beginning([(one.generator, one.state) for one in self._generators], dict(self._counters))

    # ---- states ----

    def snapshot(self) -> States:
        """Return what they hold now."""
        attributes = list(map(changed_attributes, self.holders, self._at_first))
        changed = attributes if any(attributes) else ()
        with self.generators_in_place():
            states = generator_states(self.holders)
            try:
                return States(states, [copy.deepcopy(_told(holder)) for holder in self._stateful()], changed)
            except Exception as error:  # noqa: BLE001 - the user's code; it counts when a state is asked for
                why = f"when the epoch began, the state_dict() of a sampler in it raised {error!r}. Correct that method"
                return States(states, (), changed, unknown=why)

    def restore_states(self, snapshot: States) -> None:
        """Make them hold what they held before."""
        self.restore_generators(snapshot.generators)
        with self.generators_in_place():  # a state may hold a generator's
            for holder, state in zip(self._stateful(), snapshot.samplers, strict=True):
                try:
                    holder.load_state_dict(copy.deepcopy(state))
                except DDPPatchError:
                    raise
                except Exception as error:
                    raise StateError(
                        f"{type(holder).__name__} cannot resume from the state: its load_state_dict() raised "
                        f"{type(error).__name__}: {shown(str(error))}. Pass what loader_state(), or state_dict(), "
                        "returned, as it was saved; or correct that method."
                    ) from error
        attributes = snapshot.attributes or [{} for _ in self.holders]
        for holder, first, changed in zip(self.holders, self._at_first, attributes, strict=True):
            if plain := {**first, **changed}:
                attributes_now = vars(holder)
                # A generator that it was given since stays: its state was restored above.
                attributes_now.update(
                    {k: v for k, v in plain.items() if not isinstance(attributes_now.get(k), RandomGenerator)}
                )
        self._note_counters()

    def restore_generators(self, states: Sequence[Any]) -> None:
        """Put their random generators into the states of a snapshot."""
        set_generator_states(self.holders, states)
        self._find()
        for one in self._generators:
            one.state = one.outside = native_state(one.generator)

    def restore_epoch(self, epoch: int, snapshot: States) -> None:
        """Make them hold what they held before an epoch, because a state is restored."""
        self.restore_states(snapshot)
        self._beginnings = {epoch: self._now()}

    def _stateful(self) -> Iterable[Any]:
        return [holder for holder in self.holders if is_stateful(holder)]


def _later(beginning: _Beginning, epochs: int) -> _Beginning:
    """Return what an epoch begins with that many epochs later, if nobody knows what these would draw.

    It follows from what all ranks have in common alone, and differs between epochs.
    """
    return _Beginning(
        [(generator, seeded_anew(generator, state, epochs % 2**32)) for generator, state in beginning.generators],
        {key: value + epochs if type(value) is int else value for key, value in beginning.counters.items()},
    )


def _told(holder: Any) -> Any:
    """Return everything that a sampler's next pass follows from, not only how far a stopped pass was."""
    return getattr(holder, "state_between_passes", holder.state_dict)()
