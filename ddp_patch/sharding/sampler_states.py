"""The states that an epoch's order follows from, besides its number: samplers' generators, counters and own states."""

import copy
import marshal
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_patch.compat.private_torch import times_written
from ddp_patch.errors import DDPPatchError, StateError
from ddp_patch.orders.random_states import (
    PrivateRNG,
    RandomGenerator,
    Seed,
    generator_state,
    generator_states,
    is_stateful,
    is_users,
    one_at_a_time,
    plain_attributes,
    random_generators,
    seeded_anew,
    set_generator_states,
)
from ddp_patch.sharding.saved_state import States
from ddp_patch.validation import shown
from ddp_patch.walks import stored

# How many epochs' beginnings are kept, for a script that goes back to one.
_MOST_BEGINNINGS = 32
# How many items are drawn, at most, to find what samplers have counted by the beginning of an epoch.
_MOST_DRAWN_AGAIN = 2**17
# How many elements of an array or a list are compared, to notice that the user has changed it.
_LOOKED_AT = 4096


# ---- generators ----


class _Base(NamedTuple):
    """The state from which a generator's epochs follow.

    Attributes:
        epoch: The epoch that draws from exactly this state. Another epoch's state is made of this state and its number.
        state: The state, as ``generator_state`` returns it.
    """

    epoch: int
    state: Any

    def of(self, generator: RandomGenerator, epoch: int) -> Any:
        """Return the state from which an epoch draws."""
        return self.state if epoch == self.epoch else seeded_anew(generator, self.state, epoch)


class _Generators:
    """The random generators that samplers hold, and the base of each.

    Args:
        holders: The samplers.
        name: The samplers' name in errors.
        loaders_before: How many loaders draw from a generator and were patched before this one.

    Attributes:
        given: How many generators the samplers held at the patch.
        bases: The base of each generator, in the order in which they were found.
        draws: How many draws are entered now. Meanwhile the generators have an epoch's states, and not the user's.
    """

    def __init__(self, holders: Sequence[Any], name: str, loaders_before: Mapping[RandomGenerator, int]) -> None:
        self._holders, self._name, self._loaders_before = holders, name, loaders_before
        self.bases: dict[RandomGenerator, _Base] = {}
        self.draws: int = 0
        self._seeds: dict[RandomGenerator, int] = {}  # the seeds of torch's generators
        self._to_come: list[
            _Base
        ] = []  # bases of generators that a state knows, and that this process has not made yet
        self.find(0)
        self.given: int = len(self.bases)

    def find(self, epoch: int) -> None:
        """Find generators that are new or were seeded anew; the epoch draws from their present states."""
        if self.draws:
            return
        with one_at_a_time(self._name):
            found = random_generators(self._holders)
            seeds: dict[RandomGenerator, int] = {
                each: each.initial_seed() for each in found if isinstance(each, torch.Generator)
            }
            known = {each for each in found if each in self.bases and seeds.get(each) == self._seeds.get(each)}
            new = [each for each in found if each not in known]
            come, self._to_come = self._to_come[: len(new)], self._to_come[len(new) :]
            of_new = dict(
                zip(new, [*come, *(_Base(epoch, self._own_state(each)) for each in new[len(come) :])], strict=True)
            )
            self.bases = {each: of_new[each] if each in of_new else self.bases[each] for each in found}
            self._seeds = seeds

    def _own_state(self, generator: RandomGenerator) -> Any:
        """Return a generator's state; of one from which other loaders draw, a state that these do not have.

        In one process they draw one after the other. With one base, they would have one order.
        """
        state, before = generator_state(generator), self._loaders_before.get(generator, 0)
        return seeded_anew(generator, state, 0, before) if before else state

    def restore(self, epoch: int, bases: Sequence[Any]) -> None:
        """Let epochs follow from the bases of a state. Bases are kept for generators that are made later."""
        self.find(epoch)
        known = [*map(_Base._make, bases)]
        self.bases |= zip(self.bases, known, strict=False)
        self._to_come = known[len(self.bases) :]


# ---- counters ----


# An attribute of a sampler: the sampler's place among the loader's samplers, and the attribute's name.
_Name = tuple[int, str]


class _Seen:
    """The plain attributes of one sampler, which several loaders may draw from.

    Attributes:
        values: The attributes as the latest draw of any patched loader left them.
        changes: How often an attribute changed outside of draws, and its last such value, by name.
        counters: The names of the attributes that draws have changed.
    """

    # By id, because a sampler may be neither hashable nor comparable. An entry is removed with its sampler.
    _of: dict[int, tuple[object, "_Seen"]] = {}  # noqa: RUF012 - all of this process

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.changes: dict[str, tuple[int, Any]] = {}
        self.counters: set[str] = set()

    @classmethod
    def of(cls, holder: object, *, looks: bool = True) -> "_Seen":
        """Return the record of a sampler, and note the attributes that have changed outside of draws since."""
        key, of = id(holder), cls._of
        if key not in of:
            kept: object = holder
            with suppress(TypeError):  # a class with slots alone
                kept = weakref.ref(holder, lambda _: of.pop(key, None) and None)
            of[key] = kept, cls()
        seen = of[key][1]
        for name, now in plain_attributes(holder).items() if looks else ():
            if not _is_same(seen.values.setdefault(name, now), now):
                seen.changes[name] = seen.changes.get(name, (0, None))[0] + 1, now
                seen.values[name] = now
        return seen


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or one != one)


class _Counters:
    """The counters of samplers: the plain attributes that draws change, as one loader's draws left them.

    A sampler with ``set_epoch`` or ``state_dict`` counts by these methods instead. An attribute that changes outside of
    draws keeps the new value: the user has set it, or the sampler has learned it.

    Args:
        holders: The samplers.

    Attributes:
        values: The counters now.
        are_as_drawn: Whether no attribute of the samplers has changed outside of draws.
        beginnings: The counters at the beginning of an epoch, for each epoch whose beginning is known.
        counts_nothing: Whether a draw of a whole epoch changed no attribute. Then any epoch can be drawn at once.
    """

    def __init__(self, holders: Sequence[Any]) -> None:
        self._holders = holders
        self.values: dict[_Name, Any] = {}
        self.beginnings: dict[int, dict[_Name, Any]] = {0: {}}
        # The attributes with which this loader begins epoch 0, and the attributes that no draw has changed yet. A state
        # may hold other values.
        self._at_first = [*map(self._counting, range(len(holders)))]
        self._unmoved = [dict(attributes) for attributes in self._at_first]
        self._changes: dict[_Name, int] = {}
        self.note_changes()
        self.are_as_drawn: bool = True
        self.counts_nothing: bool = False

    @property
    def may_count(self) -> bool:
        """Whether a draw may change an attribute by which the samplers count."""
        return not self.counts_nothing and any(map(self._counting, range(len(self._holders))))

    def _counting(self, place: int) -> dict[str, Any]:
        """Return the attributes by which a sampler may count."""
        holder = self._holders[place]
        return {} if hasattr(holder, "set_epoch") else plain_attributes(holder)

    def note_changes(self) -> None:
        """Note the attributes that have changed since the latest draw."""
        for place, holder in enumerate(self._holders):
            seen = _Seen.of(holder)
            for name, (times, value) in seen.changes.items():
                if self._changes.get((place, name)) != times:
                    self._changes[place, name], self.are_as_drawn = times, False
                    if (place, name) in self.values:
                        self.values[place, name] = value
                    elif name in self._unmoved[place]:
                        self._unmoved[place][name] = self._at_first[place][name] = value
            self._note_counters(place, seen)

    def begin_draw(self) -> list[dict[str, Any]]:
        """Set the counters to where this loader's draws left them; return the attributes now, for ``end_draw``."""
        self.note_changes()
        self.put_back()
        return [*map(self._counting, range(len(self._holders)))]

    def put_back(self) -> None:
        """Set the counters to where this loader's draws left them: other loaders' draws may have moved them."""
        for (place, name), value in self.values.items():
            vars(self._holders[place])[name] = value
            _Seen.of(self._holders[place], looks=False).values[name] = value

    def end_draw(self, before: Sequence[Mapping[str, Any]]) -> None:
        """Note the attributes that a draw has changed since ``before``."""
        for place, was in enumerate(before):
            seen, now = _Seen.of(self._holders[place], looks=False), self._counting(place)
            seen.counters |= {name for name in now if name in was and not _is_same(was[name], now[name])}
            self._note_counters(place, seen)
            self.counts_nothing = self.counts_nothing and not seen.counters
            self.values |= {(place, name): now[name] for name in seen.counters & now.keys()}
            seen.values.update(plain_attributes(self._holders[place]))

    def _note_counters(self, place: int, seen: _Seen) -> None:
        """Note which attributes are counters. Until now, every epoch has begun with an attribute's first value."""
        for name in seen.counters & self._unmoved[place].keys():
            first = self._unmoved[place].pop(name)
            self.values[place, name] = first
            for epoch, beginning in self.beginnings.items():
                beginning.setdefault((place, name), first if epoch else self._at_first[place].get(name, first))

    def end_epoch(self, epoch: int) -> None:
        """Record that an epoch was drawn to its end: the next epoch begins with the present counters."""
        self.beginnings[epoch + 1], self.counts_nothing = dict(self.values), not self.values
        if len(self.beginnings) > _MOST_BEGINNINGS:
            del self.beginnings[min(known for known in self.beginnings if known)]

    def restore(self, epoch: int, attributes: Sequence[Mapping[str, Any]]) -> None:
        """Set the attributes with which the samplers begin an epoch."""
        for place, plain in enumerate(attributes):
            now = vars(self._holders[place]) if plain else {}
            # A generator that the sampler got since stays, because a state has its base.
            set_now = {name: each for name, each in plain.items() if not isinstance(now.get(name), RandomGenerator)}
            now.update(set_now)
            _Seen.of(self._holders[place], looks=False).values.update(set_now)
            self._unmoved[place] |= {name: plain[name] for name in self._unmoved[place].keys() & plain.keys()}
            self.values |= {key: plain[key[1]] for key in self.values if key[0] == place and key[1] in plain}
        self.note_changes()
        first = {(place, name): self._at_first[place].get(name, now) for (place, name), now in self.values.items()}
        self.are_as_drawn, self.beginnings = True, {0: first, epoch: dict(self.values)}


# ---- both ----


class SamplerStates:
    """The samplers of a loader. An epoch's order follows from their generators, counters and states.

    A generator of a sampler draws each epoch from a state that is made of the generator's base and the epoch. The base
    is the generator's state at the patch, or when the generator came later or was seeded anew.

    A sampler with neither ``set_epoch`` nor ``state_dict`` may count its epochs in plain attributes. The changes of a
    draw to these attributes are kept for the loader's next pass, whatever other loaders draw meanwhile.

    Args:
        holders: The samplers. Their present attributes count as unchanged.
        seed: The seed of every epoch's order.
        name: The sampler's name in errors.
        loaders_before: How many loaders draw from a generator and were patched before this one.

    Attributes:
        holders: As given.
    """

    def __init__(
        self, holders: Sequence[Any], seed: Seed, name: str, loaders_before: Mapping[RandomGenerator, int]
    ) -> None:
        self.holders: Sequence[Any] = holders
        self._seed, self._name = seed, name
        self._at_first = [plain_attributes(holder) for holder in holders]
        self._generators = _Generators(holders, name, loaders_before)
        self._counters = _Counters(holders)

    @property
    def given_generators(self) -> int:
        """How many random generators the samplers held at the patch."""
        return self._generators.given

    @property
    def has_generators(self) -> bool:
        """Whether the samplers hold random generators."""
        return bool(self._generators.bases)

    def holds(self, generator: object) -> bool:
        """Return whether an object is one of the samplers' generators."""
        return any(known is generator for known in self._generators.bases)

    # ---- passes ----

    def begin(
        self, epoch: int, *, is_chosen: bool, is_next: bool, begin_iterating: Callable[[], Iterator[Any]]
    ) -> None:
        """Prepare a pass over an epoch.

        Args:
            epoch: The epoch.
            is_chosen: Whether the user chose the epoch. Else the samplers count on from where the latest pass ended.
            is_next: Whether the epoch follows the latest one.
            begin_iterating: Begins the samplers, to find what they count.

        Raises:
            StateError: The samplers' counters at the epoch's beginning cannot be found.
        """
        counters = self._counters
        counters.note_changes()
        if not is_chosen or not counters.may_count or (is_next and not counters.are_as_drawn):
            return
        if epoch not in counters.beginnings:
            self._draw_up_to(epoch, begin_iterating)
        counters.values |= counters.beginnings.get(epoch, {})

    def _draw_up_to(self, epoch: int, begin_iterating: Callable[[], Iterator[Any]]) -> None:
        """Draw the epochs before an epoch to their ends, without reading data: the samplers may count by them."""
        counters, left = self._counters, _MOST_DRAWN_AGAIN
        latest = max(known for known in counters.beginnings if known < epoch) if epoch else 0
        if counters.are_as_drawn or not counters.values:
            counters.values |= counters.beginnings[latest]
            kept = self.snapshot(epoch)
            for before in range(latest, epoch):
                with self.draw(before):
                    left -= sum(1 for _ in islice(begin_iterating(), left))
                counters.counts_nothing = not counters.values
                if counters.counts_nothing or not left:
                    break
                counters.end_epoch(before)
            if not kept.unknown:  # puts samplers with a state_dict() back
                self.load(kept)
        if epoch in counters.beginnings or not counters.values:
            return
        why = "they are others than the loader's latest draw left, so it would not draw the same again"
        if counters.are_as_drawn:
            why = f"to draw the epochs before would take more than {_MOST_DRAWN_AGAIN:,} items"
        names = ", ".join(sorted({repr(name) for _, name in counters.values}))
        raise StateError(
            f"Beginning epoch {epoch} of {self._name}: the sampler counts what it has drawn, in its attributes "
            f"{names}, and {why}. Give it a set_epoch(epoch) that sets what it counts: then every epoch can be begun "
            "by its number."
        )

    def end(self, epoch: int) -> None:
        """Record that an epoch was drawn to its end."""
        self._counters.end_epoch(epoch)

    def draw(
        self,
        epoch: int,
        *,
        has_global: bool = True,
        first_from: torch.Generator | None = None,
        is_watched: bool = False,
        on_exit: Callable[[], object] = lambda: None,
    ) -> "EpochDraw":
        """Return a context to enter while an epoch is drawn.

        Args:
            epoch: The epoch.
            has_global: Whether the samplers may draw from the global generators.
            first_from: The loader's generator, if the loader draws its workers' seed from it before the samplers draw.
            is_watched: Whether ``adapts`` will be called.
            on_exit: Called whenever the samplers have drawn.
        """
        self._generators.find(epoch)
        states = {generator: base.of(generator, epoch) for generator, base in self._generators.bases.items()}
        rng = PrivateRNG(self._seed.value, epoch, states, name=self._name, has_global=has_global)
        if first_from is not None:
            with rng:
                torch.empty((), dtype=torch.int64).random_(generator=first_from)
        return EpochDraw(self.holders, self._generators, self._counters, rng, is_watched, on_exit)

    # ---- states ----

    def snapshot(self, epoch: int) -> States:
        """Return the present states, from which the next epoch follows."""
        self._generators.find(epoch)
        self._counters.note_changes()
        self._counters.put_back()
        attributes = [
            {name: value for name, value in plain_attributes(holder).items() if name not in was or was[name] != value}
            for holder, was in zip(self.holders, self._at_first, strict=True)
        ]
        changed = attributes if any(attributes) else ()
        bases = [list(base) for base in self._generators.bases.values()]
        try:
            return States(bases, [copy.deepcopy(holder.state_dict()) for holder in self._stateful()], changed)
        except Exception as error:  # noqa: BLE001 - the user's code; it counts when a state is asked for
            why = f"when the epoch began, the state_dict() of a sampler in it raised {error!r}. Correct that method"
            return States(bases, (), changed, unknown=why)

    def restore(self, epoch: int, snapshot: States) -> None:
        """Let an epoch begin with the states of a snapshot."""
        self.load(snapshot)
        changed = snapshot.attributes or [{} for _ in self.holders]
        attributes = [{**first, **then} for first, then in zip(self._at_first, changed, strict=True)]
        self._counters.restore(epoch, attributes)
        self._generators.restore(epoch, snapshot.generators)

    def require_loadable(self, snapshot: States) -> None:
        """Raise StateError if a sampler does not load its state. The samplers are put back as they were."""
        try:
            kept = States(samplers=[copy.deepcopy(holder.state_dict()) for holder in self._stateful()])
        except Exception:  # noqa: BLE001 - the user's code; such samplers cannot be put back, so they are not tried
            return
        try:
            self.load(snapshot)
        finally:
            self.load(kept)

    def load(self, snapshot: States) -> None:
        """Load the states of a snapshot into the samplers that have a ``load_state_dict``."""
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

    def _stateful(self) -> list[Any]:
        return [holder for holder in self.holders if is_stateful(holder)]


class EpochDraw(AbstractContextManager[None]):
    """A context in which samplers draw an epoch: from the epoch's random states, and with one loader's counters.

    Args:
        holders: The samplers.
        generators: The samplers' generators.
        counters: The samplers' counters.
        rng: The epoch's random states.
        is_watched: Whether ``adapts`` will be called.
        on_exit: Called whenever the context is left.

    Attributes:
        has_adapted: Whether the samplers have changed while no draw was entered.
    """

    def __init__(
        self,
        holders: Sequence[Any],
        generators: _Generators,
        counters: _Counters,
        rng: PrivateRNG,
        is_watched: bool,
        on_exit: Callable[[], object],
    ) -> None:
        self._holders, self._generators, self._counters = holders, generators, counters
        self._rng, self._is_watched, self._on_exit = rng, is_watched, on_exit
        self._left: Any = None  # the samplers' attributes when the draw was left
        self.has_adapted: bool = False

    def __enter__(self) -> None:
        self._rng.__enter__()
        self._generators.draws += 1
        self._before = self._counters.begin_draw()

    def __exit__(self, *exc: object) -> None:
        self._counters.end_draw(self._before)
        if self._is_watched:
            self._left = _looked_at(self._holders)
        self._on_exit()
        self._generators.draws -= 1
        self._rng.__exit__(*exc)

    def adapts(self) -> bool:
        """Return whether the samplers have changed outside of draws, as samplers that learn do."""
        self.has_adapted = self.has_adapted or (self._left is not None and self._left != _looked_at(self._holders))
        return self.has_adapted


class DatasetStates:
    """The random generators of an iterable dataset, which draws from them while it is read, in any process.

    Args:
        holder: An object that holds only the generators, because the dataset's own state is a position.

    Attributes:
        holders: That alone.
    """

    def __init__(self, holder: object) -> None:
        self.holders: Sequence[Any] = [holder]

    def holds(self, generator: object) -> bool:
        """Return whether an object is one of the generators."""
        return any(known is generator for known in random_generators(self.holders))

    def snapshot(self, epoch: int) -> States:
        """Return the generators' present states."""
        return States([(0, state) for state in generator_states(self.holders)])

    def require_loadable(self, snapshot: States) -> None:
        """Do nothing: generators' states were tried when they were read."""

    def restore(self, epoch: int, snapshot: States) -> None:
        """Put the generators into the states of a snapshot."""
        set_generator_states(self.holders, [state for _, state in snapshot.generators])

    @property
    def given_generators(self) -> int:
        """How many generators there are."""
        return len(random_generators(self.holders))

    def end(self, epoch: int) -> None:
        """Do nothing: the generators stay where the dataset has left them."""


def _looked_at(holders: Sequence[Any]) -> list[Any]:
    """Return the attributes of samplers, and of the user's objects in them, as far as a comparison is cheap."""
    values = [*chain.from_iterable(stored(holder).values() for holder in holders)]
    values = [value for value in values if not isinstance(value, RandomGenerator)]
    nested = [value for value in values if is_users(value) and not hasattr(value, "__getitem__")]  # as a dataset has
    values += chain.from_iterable(getattr(value, "__dict__", {}).values() for value in nested)
    return [(id(value), _mark_of(value)) for value in values]


def _mark_of(value: Any) -> Any:
    """Return a mark that differs after a value was changed in place; of a large value, some elements count."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return times_written(value)
        return times_written(value), value.detach().reshape(-1)[:: max(1, value.numel() // _LOOKED_AT)].tolist()
    if isinstance(value, np.ndarray):
        return value.shape, value.reshape(-1)[:: max(1, value.size // _LOOKED_AT)].tobytes()
    if isinstance(value, list | tuple):
        value = len(value), value[:: max(1, len(value) // _LOOKED_AT)]
    elif isinstance(value, dict | set):
        value = len(value), [*islice(value.values() if isinstance(value, dict) else value, _LOOKED_AT)]
    try:
        return marshal.dumps(value, 0)
    except ValueError:  # the value is not plain
        return None
