"""What samplers hold that passes change: random generators, counters, and states of their own."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ddp_patch.errors import DDPPatchError, StateError
from ddp_patch.orders.random_states import (
    RandomGenerator,
    changed_attributes,
    generator_state,
    generator_states,
    is_stateful,
    one_at_a_time,
    plain_attributes,
    random_generators,
    seeded_anew,
    set_by_iterating,
    set_generator_state,
    set_generator_states,
    was_seeded,
)
from ddp_patch.sharding.saved_state import States
from ddp_patch.validation import shown

__all__ = ["SamplerStates"]


# How many epochs' beginnings are kept, for who goes back to one.
_MOST_BEGINNINGS = 32


class SamplerStates:
    """The samplers of a stream, and other objects that may hold random generators or a state.

    Their generators and counters belong to the passes of one loader: they are put back to where these passes left them
    whenever one draws, whatever others drew or counted meanwhile. After ``set_epoch(n)``, epoch n starts from the same
    states as if no other pass had been broken off. A ``torch.Generator`` that the user seeds goes on from that seed.

    Args:
        holders: Those objects. The attributes that they have now count as unchanged.
        is_private: Whether the passes draw from them by this object alone. A dataset draws from its own while it is
            read, by workers or in the main process.
    """

    def __init__(self, holders: Sequence[Any], *, is_private: bool = True) -> None:
        self.holders: Sequence[Any] = holders
        self.is_private = is_private
        self._at_first = [plain_attributes(holder) for holder in holders]
        # Where the passes left the generators, and the counters, which are attributes: by the holder's place and name.
        self._generators: dict[RandomGenerator, Any] = {}
        self._counters: dict[tuple[int, str], Any] = {}
        # Where others found the generators then, and where those were that somebody seeded since an epoch was chosen or
        # drawn to its end.
        self._outside: dict[RandomGenerator, Any] = {}
        self._seeded: dict[RandomGenerator, Any] = {}
        self._is_drawing = False
        self._find()
        self._note_counters()
        # What epochs begin with: generators and counters, as above.
        self._beginnings: dict[int, dict[Any, Any]] = {0: self._now()}

    @property
    def has_generators(self) -> bool:
        """Whether they hold random generators."""
        return bool(self._generators)

    def holds(self, generator: object) -> bool:
        """Return whether this is one of their generators."""
        return any(known is generator for known in self._generators)

    # ---- while a pass draws ----

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """While entered, let the samplers draw and count from where the passes left them."""
        if self._is_drawing:
            yield
            return
        with self.generators_in_place():
            self._put_counters_back()
            try:
                yield
            finally:
                self._note_counters()

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
            found = {generator: generator_state(generator) for generator in self._generators}
            moved = {each: state for each, state in found.items() if state != self._generators[each]}
            for generator in moved:
                set_generator_state(generator, self._generators[generator])
            self._is_drawing = True
            try:
                yield
            finally:
                self._is_drawing = False
                self._note_generators()
                for generator, state in moved.items():
                    self._outside[generator] = state
                    set_generator_state(generator, state)

    def _note_generators(self) -> None:
        """Note the states of the generators, which everybody finds so."""
        self._generators = {generator: generator_state(generator) for generator in self._generators}
        self._outside = dict(self._generators)

    def _note_seeded(self) -> None:
        """Let the generators that somebody else has seeded go on from there."""
        for generator in () if self._is_drawing else self._generators:
            now, before = generator_state(generator), self._outside[generator]
            if now != before and was_seeded(generator, before):
                self._generators[generator] = self._outside[generator] = self._seeded[generator] = now

    def _find(self) -> None:
        """Look for generators that samplers were given, or made, since."""
        found = random_generators(self.holders) if self.is_private else []
        now = {generator: generator_state(generator) for generator in found}
        self._generators, self._outside = (
            {generator: known.get(generator, state) for generator, state in now.items()}
            for known in (self._generators, self._outside)
        )

    def _note_counters(self) -> None:
        """Note what the attributes are that passes change."""
        self._counters = {
            (place, name): value
            for place, holder in enumerate(self.holders)
            for name, value in plain_attributes(holder).items()
            if name in set_by_iterating(holder.__class__)
        }

    def _put_counters_back(self) -> None:
        for (place, name), value in self._counters.items():
            vars(self.holders[place])[name] = value

    @property
    def has_counters(self) -> bool:
        """Whether passes change attributes."""
        return bool(self._counters)

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
            beginning = {**self._beginning(epoch), **self._seeded}
            for generator in self._generators:
                if generator in beginning:
                    self._generators[generator] = beginning[generator]
                    if self._is_drawing:
                        set_generator_state(generator, beginning[generator])
            self._counters |= {moved: value for moved, value in beginning.items() if isinstance(moved, tuple)}
            if self._seeded:
                self._beginnings[epoch], self._seeded = beginning, {}
        self._put_counters_back()

    def _beginning(self, epoch: int) -> dict[Any, Any]:
        """Return what an epoch begins with. If nobody knows, it follows from the earliest known, as on all ranks."""
        if epoch in self._beginnings:
            return self._beginnings[epoch]
        first = min(self._beginnings)
        later = epoch - first

        def moved_on(moved: Any, value: Any) -> Any:
            if isinstance(moved, RandomGenerator):
                return seeded_anew(moved, value, later % 2**32)
            return value + later if type(value) is int else value

        return {moved: moved_on(moved, value) for moved, value in self._beginnings[first].items()}

    def end(self, epoch: int) -> None:
        """Record that all of an epoch was drawn, so that the next one begins with what is held now."""
        self._beginnings[epoch + 1], self._seeded = self._now(), {}
        if len(self._beginnings) > _MOST_BEGINNINGS:
            del self._beginnings[min(known for known in self._beginnings if known)]

    def _now(self) -> dict[Any, Any]:
        """Return what an epoch begins with that begins here."""
        if self._is_drawing:
            self._note_counters()
            self._note_generators()
        return {**self._generators, **self._counters}

    # ---- states ----

    def snapshot(self) -> States:
        """Return what they hold now."""
        attributes = list(map(changed_attributes, self.holders, self._at_first))
        changed = attributes if any(attributes) else ()
        with self.generators_in_place():
            states = generator_states(self.holders)
            try:
                return States(states, [copy.deepcopy(holder.state_dict()) for holder in self._stateful()], changed)
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
        self._note_generators()

    def restore_epoch(self, epoch: int, snapshot: States) -> None:
        """Make them hold what they held before an epoch, because a state is restored."""
        self.restore_states(snapshot)
        self._beginnings = {epoch: self._now()}

    def _stateful(self) -> list[Any]:
        return [holder for holder in self.holders if is_stateful(holder)]
