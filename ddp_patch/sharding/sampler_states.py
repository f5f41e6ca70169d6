"""What samplers hold that passes change, and wrappers that pass on what is not theirs."""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from types import MethodType
from typing import Any, ClassVar

from ddp_patch.errors import InvalidOptionError
from ddp_patch.orders.generators import (
    RandomGenerator,
    changed_attributes,
    generator_states,
    is_stateful,
    native_state,
    plain_attributes,
    random_generators,
    same_state,
    seeded_anew,
    set_generator_states,
    set_native_state,
    was_seeded,
)
from ddp_patch.orders.random_states import one_at_a_time
from ddp_patch.sharding.saved_position import States

__all__ = ["AttributeProxy", "SamplerStates"]


# How many epochs' beginnings are kept, for who goes back to one.
_MOST_BEGINNINGS = 32


@dataclass(slots=True)
class _Generator:
    """A generator of the samplers'.

    Attributes:
        generator: The generator.
        pass_state: The state in which the passes left it.
        outside_state: The state that code outside the passes sees. None while a pass draws and both states are the
            same.
    """

    generator: RandomGenerator
    pass_state: Any
    outside_state: Any

    @property
    def is_seeded(self) -> bool:
        """Whether somebody else has seeded it since a pass drew from it."""
        if self.outside_state is None or same_state(native_state(self.generator), self.outside_state):
            return False
        return was_seeded(self.generator, self.outside_state)

    def enter(self) -> None:
        """Let it draw on where the passes left it; but if it was seeded, as the seed says."""
        now = native_state(self.generator)
        if self.is_seeded:
            self.pass_state = now
        # As long as nobody else has drawn from it, everybody finds it where the passes left it, as in one process.
        self.outside_state = None if same_state(now, self.pass_state) else now
        if self.outside_state is not None:
            set_native_state(self.generator, self.pass_state)

    def set_pass_state(self, state: Any) -> None:
        """Let passes draw on from a state, even if it was seeded."""
        self.pass_state = state
        if self.is_seeded:
            self.outside_state = native_state(self.generator)

    def take_present_state(self) -> None:
        """Let passes draw on from where everybody finds it now."""
        self.pass_state = self.outside_state = native_state(self.generator)

    def leave(self) -> None:
        """Put it back to where everybody else finds it."""
        self.pass_state = native_state(self.generator)
        if self.outside_state is None:
            self.outside_state = self.pass_state
        else:
            set_native_state(self.generator, self.outside_state)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """What the samplers held when an epoch began: generators with their states, and counters by holder and name."""

    generators: Sequence[tuple[RandomGenerator, Any]]
    counters: Mapping[tuple[int, str], Any]


class SamplerStates:
    """The samplers of a stream, and other objects that may hold random generators or a state.

    Their generators and counters belong to the passes of one loader: they are put back to where these passes left them
    whenever one draws, whatever others drew or counted meanwhile. After ``set_epoch(n)``, epoch n starts from the same
    states as if no other pass had been broken off.

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
        self._own: list[_Generator] = []
        self._counter_keys = set(changing)
        self._counters: dict[tuple[int, str], Any] = {}
        self._attributes_before: Sequence[Mapping[str, Any]] | None = None  # the attributes when a pass began to draw
        self._find()
        self._note_changes()
        self._beginnings = {0: self._now()}
        # The states of generators that were seeded since an epoch was chosen or drawn to its end, by their ids.
        self._seeded: dict[int, Any] = {}

    @property
    def has_generators(self) -> bool:
        """Whether they hold random generators."""
        return bool(self._own)

    def holds(self, generator: object) -> bool:
        """Return whether this is one of their generators."""
        return any(one.generator is generator for one in self._own)

    # ---- while a pass draws ----

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """While entered, let the samplers draw from what the passes left."""
        if self._attributes_before is not None:
            yield
            return
        with one_at_a_time():
            self._note_seeded()
            for one in self._own:
                one.enter()
            self._put_back()
            self._attributes_before = [plain_attributes(holder) for holder in self.holders]
            try:
                yield
            finally:
                self._note_changes()
                self._attributes_before = None
                for one in self._own:
                    one.leave()

    def _note_seeded(self) -> None:
        """Note the states of the generators that somebody else has seeded."""
        self._seeded |= {id(one.generator): native_state(one.generator) for one in self._own if one.is_seeded}

    def _find(self) -> None:
        """Look for generators that samplers were given, or made, since."""
        known = {id(one.generator): one for one in self._own}
        found = random_generators(self.holders) if self.is_private else []
        self._own = [
            known.get(id(generator)) or _Generator(generator, state := native_state(generator), state)
            for generator in found
        ]

    def _note_changes(self) -> None:
        """Note which attributes a pass has changed, and what all those are that passes change."""
        for place, was in enumerate(self._attributes_before or ()):
            self._counter_keys.update((place, name) for name in changed_attributes(self.holders[place], was))
        held = [getattr(holder, "__dict__", {}) for holder in self.holders]
        self._counters = {key: held[key[0]][key[1]] for key in self._counter_keys if key[1] in held[key[0]]}

    def _put_back(self) -> None:
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
            if self._attributes_before is None:  # else a pass is drawing, and will note it
                self._put_back()
            try:
                yield
            finally:
                if self._attributes_before is None:
                    self._note_changes()

    # ---- between passes ----

    def begin(self, epoch: int | None = None) -> None:
        """Prepare a pass; if its epoch was chosen, put back what that epoch begins with."""
        self._find()
        if epoch is not None:
            beginning = self._beginning(epoch)
            # Whoever seeded a generator chose what comes next, even if somebody looked at that meanwhile.
            self._note_seeded()
            states = {id(generator): state for generator, state in beginning.generators} | self._seeded
            known = [(one, states[id(one.generator)]) for one in self._own if id(one.generator) in states]
            for one, state in known:
                self._set(one, state)
            self._counters |= beginning.counters
            if self._seeded:
                self._beginnings[epoch] = replace(
                    beginning, generators=[(one.generator, state) for one, state in known]
                )
                self._seeded = {}
        self._put_back()

    def _beginning(self, epoch: int) -> _Beginning:
        if epoch in self._beginnings:
            return self._beginnings[epoch]
        # Derive it from the earliest known epoch, because only that one is known to all ranks.
        first = min(self._beginnings)
        return _later(self._beginnings[first], epoch - first)

    def _set(self, generator: _Generator, state: Any) -> None:
        if self._attributes_before is None:
            generator.set_pass_state(state)
        else:
            set_native_state(generator.generator, state)

    def begin_from_here(self) -> None:
        """Let the latest epoch that is known to begin somewhere begin with what is held now."""
        self._beginnings[max(self._beginnings)] = self._now()

    def end(self, epoch: int) -> None:
        """Record that all of an epoch was drawn, so that the next one begins with what is held now."""
        self._beginnings[epoch + 1], self._seeded = self._now(), {}
        if len(self._beginnings) > _MOST_BEGINNINGS:
            del self._beginnings[min(known for known in self._beginnings if known)]

    def _now(self) -> _Beginning:
        if self._attributes_before is not None:
            self._note_changes()
            return _Beginning([(one.generator, native_state(one.generator)) for one in self._own], dict(self._counters))
        return _Beginning([(one.generator, one.pass_state) for one in self._own], dict(self._counters))

    # ---- states ----

    def snapshot(self) -> States:
        """Return what they hold now."""
        attributes = list(map(changed_attributes, self.holders, self._at_first))
        changed = attributes if any(attributes) else ()
        with self.drawing():
            states = generator_states(self.holders)
        try:
            return States(states, [copy.deepcopy(_told(holder)) for holder in self._stateful()], changed)
        except Exception as error:  # noqa: BLE001 - the user's code; it counts when a state is asked for
            why = f"when the epoch began, the state_dict() of a sampler in it raised {error!r}. Correct that method"
            return States(states, (), changed, unknown=why)

    def restore_states(self, snapshot: States) -> None:
        """Make them hold what they held before."""
        self.restore_generators(snapshot.generators)
        for holder, state in zip(self._stateful(), snapshot.samplers, strict=True):
            holder.load_state_dict(copy.deepcopy(state))
        attributes = snapshot.attributes or [{} for _ in self.holders]
        for holder, first, changed in zip(self.holders, self._at_first, attributes, strict=True):
            if plain := {**first, **changed}:
                attributes_now = vars(holder)
                # A generator that it was given since stays: its state was restored above.
                attributes_now.update(
                    {k: v for k, v in plain.items() if not isinstance(attributes_now.get(k), RandomGenerator)}
                )
        self._note_changes()

    def restore_generators(self, states: Sequence[Any]) -> None:
        """Put their random generators into the states of a snapshot."""
        set_generator_states(self.holders, states)
        self._find()
        if self._attributes_before is None:
            for one in self._own:
                one.take_present_state()

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


class AttributeProxy:
    """Base of a wrapper; its own are the attributes of its class, and those that it has when it is sealed.

    Subclasses of the user's may set attributes of their own at any time: these are never sealed.
    """

    # What is wrapped by the name that users know, where it is kept, and the names that are not handed on.
    _inner: ClassVar[str]
    _kept_as: ClassVar[str]
    _hidden: ClassVar[frozenset[str]] = frozenset()
    _is_sealed: bool = False

    def _seal(self) -> None:
        """Set on what is wrapped, from now on, whatever is not the wrapper's."""
        if type(self).__module__.partition(".")[0] == __name__.partition(".")[0]:
            self._is_sealed = True

    def _wrapped(self) -> Iterator[Any]:
        """Yield what may have an attribute that the wrapper lacks, from the outside in."""
        yield self.__dict__[self._kept_as]

    def _user_changes(self) -> AbstractContextManager[object] | None:
        """Return what to enter while the user may change what is wrapped; None if nobody needs to know."""
        return None

    def _holder(self, name: str) -> Any:
        """Return which of what is wrapped has an attribute; the innermost if none has it yet."""
        *before, last = self._wrapped()
        return next((one for one in before if hasattr(one, name)), last)

    def __getattr__(self, name: str) -> Any:
        # Only called for names that the wrapper lacks: all of them, while it is unpickled.
        if name.startswith("__") or name in self._hidden or self._kept_as not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        holder = self._holder(name)
        found = getattr(holder, name)
        is_method = isinstance(found, MethodType) and found.__self__ is holder
        return self._noted(found) if is_method and self._user_changes() is not None else found

    def _noted(self, method: MethodType) -> Any:
        @wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            with self._user_changes() or nullcontext():
                return method(*args, **options)

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._is_sealed or self._is_own(name):
            super().__setattr__(name, value)
        else:
            self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        """Set an attribute of what is wrapped."""
        with self._user_changes() or nullcontext():
            setattr(self._holder(name), name, value)

    def __delattr__(self, name: str) -> None:
        if not self._is_sealed or self._is_own(name):
            super().__delattr__(name)
        else:
            with self._user_changes() or nullcontext():
                delattr(self._holder(name), name)

    def _is_own(self, name: str) -> bool:
        """Return whether an attribute is the wrapper's; refuse one that follows from the share."""
        wrapper, inmost = type(self).__name__, [*self._wrapped()][-1]
        wrapped = type(inmost).__name__
        if name == self._inner:
            raise InvalidOptionError(
                f"{name} of a {wrapper} cannot be exchanged: the ranks have agreed on the {wrapped} and all within it. "
                "Set attributes of these, or build the loader anew and patch that."
            )
        if name in self.__dict__ or name.startswith("__"):
            return True
        own = next((vars(kind)[name] for kind in type(self).__mro__ if name in vars(kind)), None)
        if own is None:
            return False
        # Nobody reaches a sampler's attribute that is called as a method of the wrapper.
        is_hidden = not isinstance(own, property) and hasattr(inmost, name)
        if is_hidden or (isinstance(own, property) and own.fset is None):
            place = f"its attribute {self._inner!r}" if getattr(self, self._inner) is inmost else "the one you gave it"
            raise InvalidOptionError(
                f"{name} of a {wrapper} cannot be set: it follows from how the data are shared. The {wrapped} that is "
                f"wrapped is {place}. Set it there, if that has it, or build the loader anew and patch that."
            )
        return True
