"""A position in an epoch, the state of a loader, and how a state is written and read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddp_patch.errors import InvalidOptionError, StateError
from ddp_patch.orders.random_states import Seed, is_stateful, look, random_generators, set_generator_state
from ddp_patch.positions_and_padding import Batching
from ddp_patch.sharding.values_as_text import as_text, from_text
from ddp_patch.validation import shown

if TYPE_CHECKING:
    from ddp_patch.sharding.loader_passes import Passes


# By how many of its first items a stream is recognised, at most.
RECOGNISED_BY: Final = 8


class StreamStart(NamedTuple):
    """How a stream begins, to recognise the stream after a restart.

    Attributes:
        seen: How many first items are described.
        value: The digest of the items' names; None if an item has no name.
        whole: A hash of the items' contents; None if all items are alike.
    """

    seen: int
    value: int | None
    whole: int | None

    def is_again(self, other: "StreamStart", is_drawn: bool) -> bool:
        """Return whether another stream begins with the same items, perhaps augmented differently.

        Args:
            other: How the other stream begins.
            is_drawn: Whether the other stream may have been read already. Then only exactly the same items count.
        """
        return self.whole == other.whole is not None if is_drawn else self.value in {None, other.value}


# The largest count of epochs, items or workers; memory that workers share holds no larger one.
_MOST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """What identifies an iterable dataset's stream, or one worker's part of the stream.

    Attributes:
        first: How the stream begins; None if its first items were not described.
        state: The dataset's own state, as the only element; empty if the dataset has no state with a position.
        initial_state: The dataset's own state when the stream began, as the only element; empty if the dataset was
            begun before, and not read to its end.
    """

    first: StreamStart | None = None
    state: Sequence[Any] = ()
    initial_state: Sequence[Any] = ()

    def plain(self) -> list[Any]:
        """Return the snapshot as plain values."""
        return [None if self.first is None else list(self.first), list(self.state), list(self.initial_state)]

    @classmethod
    def of(cls, plain: Any) -> "StreamSnapshot":
        """Return the snapshot of the values that ``plain`` returned; raise TypeError or ValueError for others."""
        first, state, initial_state = map(_sequence, [[] if part is None else part for part in _sequence(plain)])
        if len(state) > 1 or len(initial_state) > 1:
            raise ValueError
        if not first:
            return cls(None, tuple(state), tuple(initial_state))
        seen, *hashes = first
        value, whole = (None if part is None else _number(part) for part in hashes)
        return cls(StreamStart(_count(seen, RECOGNISED_BY), value, whole), tuple(state), tuple(initial_state))


class NotedBatch(NamedTuple):
    """A batch on its way out of a worker, with the worker's note. The note counts when the batch is delivered.

    torch pins the memory of all fields, as of any named tuple.

    Attributes:
        worker_index: The worker's index.
        batches: How many batches the worker has made of its stream, with this one.
        state: The dataset's own state, as text.
        batch: The batch; None in a note that is kept.
    """

    worker_index: int
    batches: int
    state: bytes
    batch: Any = None


@dataclass(frozen=True, slots=True)
class States:
    """The states from which an epoch's order follows, besides the seed and the epoch.

    Attributes:
        generators: For each random generator of the samplers, an epoch and the state from which this epoch draws; the
            states of all other epochs follow from both. For an iterable dataset's generators: epoch 0 and the state.
        samplers: The ``state_dict()`` of each sampler that has one.
        attributes: The plain attributes of the other samplers that have changed since the patch, such as counters.
        streams: The snapshot of an iterable dataset's stream, or of each part of the stream.
        unknown: Why the states are unknown; empty if they are known. Unknown states cannot be saved.
    """

    generators: Sequence[Any] = ()
    samplers: Sequence[Any] = ()
    attributes: Sequence[Mapping[str, Any]] = ()
    streams: Sequence[StreamSnapshot] = ()
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Position:
    """A position in the epochs: where a pass begins, or how far a pass has come.

    A sampler, or a stream that is not read in parts, is one part.

    Attributes:
        epoch: The epoch.
        taken: How many items of each part all ranks have taken; empty if the pass has not begun, or if no part has an
            item left.
        turn: Which part gives the next batch; None if no part has an item left, so that the next pass is empty.
        steps: How many steps the epoch has had.
        ranks: How many ranks began the epoch; balanced and contiguous orders follow from this number. 0 if nothing was
            taken.
        order: A digest of the epoch's order: of how many items, and the digest; or empty.
        states: The states of the samplers before the epoch; after the epoch if nothing is left.
        seed: The seed of the epochs' order, in a position that was read from a state; else None.
    """

    epoch: int
    taken: Sequence[int] = ()
    turn: int | None = 0
    steps: int = 0
    ranks: int = 0
    order: Sequence[int] = ()
    states: States = field(default_factory=States)
    seed: int | None = None

    @property
    def taken_of_all(self) -> int:
        """How many items were taken of all parts together; more than any epoch has if nothing is left."""
        return _MOST if self.is_ended else sum(self.taken)

    @property
    def is_ended(self) -> bool:
        """Whether nothing is left of the epoch."""
        return self.turn is None

    @property
    def is_within_pass(self) -> bool:
        """Whether the position is within a pass or at the pass's end, and not at its beginning."""
        return bool(self.taken) or self.is_ended

    @property
    def is_at_epoch_start(self) -> bool:
        """Whether no item of the epoch was taken."""
        return not self.is_ended and not any(self.taken)

    def or_next_epoch(self) -> "Position":
        """Return the beginning of the next epoch, if nothing is left of this epoch; otherwise this position."""
        return replace(self, epoch=self.epoch + 1, turn=0, steps=0, ranks=0) if self.is_ended else self


# ---- what fields look like in a state ----


def _count(value: Any, most: int = _MOST) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most:
        return int(value)
    raise ValueError


def _number(value: Any) -> int:
    return _count(value, 10**4000)  # Python writes no number of more than 4,300 digits


def _sequence(value: Any) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    raise ValueError


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise ValueError


def _counts(value: Any) -> Sequence[int]:
    return tuple(map(_count, _sequence(value)))


def _digest(value: Any) -> Sequence[int]:
    found = _sequence(value)
    if len(found) not in {0, 2} or not all(type(each) is int and -_MOST <= each <= _MOST for each in found):
        raise ValueError
    return tuple(found)


def _bases(value: Any) -> Sequence[Any]:
    bases = [_sequence(base) for base in _sequence(value)]
    return [(_count(epoch), state) for epoch, state in bases]


def _text_of_mapping(value: Any) -> Mapping[str, Any]:
    return _mapping(from_text(value))


# The functions that read a state's fields; TypeError or ValueError says that a field has another value.
_STATES: Mapping[str, Callable[[Any], Any]] = {
    "generators": _bases,
    "samplers": _sequence,
    "attributes": lambda value: [*map(_mapping, _sequence(value))],
    "streams": lambda value: tuple(map(StreamSnapshot.of, _sequence(value))),
}
_POSITION: Mapping[str, Callable[[Any], Any]] = {
    "epoch": _count,
    "seed": _number,
    "taken": _counts,
    "turn": lambda value: None if value is None else _count(value),
    "steps": _count,
    "ranks": _count,
    "order": _digest,
    "states": _text_of_mapping,
}


def _read(plain: Mapping[str, Any], fields: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Return the values of a state's fields."""
    if missing := [name for name in fields if name not in plain]:
        raise _damaged(f"it has no {', '.join(missing)}")
    found = {}
    for name, read in fields.items():
        try:
            found[name] = read(plain[name])
        except (TypeError, ValueError, RecursionError):
            raise _damaged(f"its field {name} is {shown(plain[name])}, which no state has there") from None
    return found


# Versions 1 and 3 had other fields. Formats that flatten dicts lost fields of version 2.
_VERSION = 4

# The field that says why there is no state; empty in a state.
_CANNOT_RESUME = "cannot_resume"


def no_state(why: str) -> dict[str, Any]:
    """Return a placeholder for an unknown state. A checkpoint with the placeholder can be saved, but not restored.

    The placeholder has all fields of a state, because ``torch.distributed.checkpoint`` loads only the fields that the
    loader's state has now.
    """
    return _fields("{}", Position(0), 0, "{}", why)


def _fields(loader: str, position: Position, seed: int, states: str, why: str = "") -> dict[str, Any]:
    """Return a state: numbers, texts, and lists of numbers, which every format saves and loads unchanged."""
    return {
        "version": _VERSION,
        "loader": loader,
        "epoch": position.epoch,
        "seed": seed,
        "taken": list(position.taken),
        "turn": position.turn,
        "steps": position.steps,
        "ranks": position.ranks,
        "order": list(position.order),
        "states": states,
        _CANNOT_RESUME: why,
    }


def epoch_after(state: Mapping[str, Any]) -> int:
    """Return the epoch of the first batch after a state: the next epoch, if nothing is left of the state's own."""
    return int(state["epoch"]) + (state["turn"] is None)


def begin_next_epoch(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the next epoch's beginning, if nothing is left of the state's own epoch; else the state."""
    is_ended = state["turn"] is None
    return {**state, "epoch": epoch_after(state), "turn": 0, "steps": 0, "ranks": 0} if is_ended else state


def _require_one_for_each(position: Position, holders: Sequence[Any], given: int) -> None:
    """Raise StateError unless there is a state for each part, generator and sampler; load each generator's on trial."""
    states, parts = position.states, max(1, len(position.taken))
    if position.turn is not None and position.turn >= parts:
        raise _damaged(f"its field turn is {position.turn}, and it has {parts} parts, counted from 0")
    # At an epoch's beginning or end, it is not known yet whether the next pass has parts.
    is_between = position.is_at_epoch_start or position.is_ended
    if len(states.streams) not in {0, parts} and not (parts == 1 and is_between):
        raise _damaged(f"its field streams has {len(states.streams)} elements, not one for each part")
    if len(states.generators) < given:
        raise _other({"generators": f"{len(states.generators)} in the state; {given} here"})
    generators = random_generators(holders)
    with look(generators):
        for generator, (_, kept) in zip(generators, states.generators, strict=False):
            try:
                set_generator_state(generator, kept)
            except Exception as error:
                raise _damaged(f"its field generators is not the state of a {type(generator).__name__}") from error
    _require_number("samplers", states.samplers, sum(map(is_stateful, holders)))
    if states.attributes:
        _require_number("attributes", states.attributes, len(holders))


def _require_number(name: str, states: Sequence[Any], here: int) -> None:
    if len(states) != here:
        raise _other({name: f"{len(states)} in the state; {here} here"})


def _require_same(said: Mapping[str, Any], said_seed: int, facts: Mapping[str, object], seed: Seed) -> None:
    """Raise StateError unless a state is of this loader. A seed that the user did not choose may differ."""
    said, facts = {**said, "seed": said_seed}, {**facts, "seed": seed.value if seed.is_chosen else said_seed}
    rows = {
        name: f"{_told(said.get(name, 'nothing'))} in the state; {facts.get(name, 'nothing')} here"
        for name in dict.fromkeys([*facts, *said])
        if not _is_same(said.get(name, "nothing"), facts.get(name, "nothing"))
    }
    if rows:
        remedy = f" Pass seed={said_seed} to it, or no seed: then it gets the state's." if "seed" in rows else ""
        raise _other(rows, remedy)


# How many lines of an error say how two loaders differ: a damaged state may have any number of fields.
_MOST_ROWS = 3


def _is_same(said: Any, here: object) -> bool:
    """Return whether a value of a state, which may be any object, equals a plain value."""
    try:
        return bool(said == here)
    except Exception:  # noqa: BLE001 - what arrays and deep nests raise, or somebody's __eq__
        return False


def _told(said: object) -> str:
    return said if isinstance(said, str) and len(said) < 500 else shown(said)


def _other(rows: Mapping[str, str], remedy: str = "") -> StateError:
    told = [f"  {_told(name)}: {row}" for name, row in islice(rows.items(), _MOST_ROWS)]
    return StateError(
        "The state is of another loader, and resuming from it would lose or repeat samples.\n"
        + "\n".join(told)
        + "\nBuild and patch the loader as it was when the state was taken, with the same seed and options."
        + remedy
    )


def _damaged(why: str) -> StateError:
    return StateError(
        f"The state is damaged: {why}. Pass what loader_state(), or state_dict(), returned, as it was saved."
    )


# ---- the state of a loader ----


def state_now(passes: "Passes[Any]") -> dict[str, Any]:
    """Return the state for packages that save and resume by torch's Stateful protocol; the same on every rank."""
    return _state_at(passes, passes.position_now())


def state_after(
    passes: "Passes[Any]", batches: int, batching: Batching, *, on_this_rank: bool = False
) -> dict[str, Any]:
    """Return the state after some batches of the latest pass; after its last batch, let the samplers draw to their end.

    A loader with one iterator for all epochs has no pass without batches: its state after the last batch is the next
    epoch's.

    Args:
        passes: The passes over the loader.
        batches: How many batches.
        batching: How the loader makes batches.
        on_this_rank: Whether the end counts if this rank knows it, even if other ranks may not know it yet.

    Raises:
        InvalidOptionError: The pass has not yielded this many batches.
        StateError: The order depends on something that no state holds.
    """
    current = passes.epochs.running
    given, epoch = 0 if current is None else current.batches(batching), passes.epochs.counter.current
    if batches > given or (passes.loader.has_one_iterator and batches != given):
        goes_on = (
            ", and the loader's one iterator goes on with it after a break" if passes.loader.has_one_iterator else ""
        )
        raise InvalidOptionError(
            f"batches_done={batches}, and the pass over epoch {epoch} has given {given}{goes_on}. Pass "
            "how many of its batches the training loop has finished, counted from the beginning of this pass; or call "
            "set_epoch() before each loop, to begin a pass there."
        )
    if current is None:
        return state_now(passes)
    if current.draw_end_after(batches, batching, on_this_rank=on_this_rank):
        end = current.position_at_end(passes.snapshot(current.epoch + 1))
        return _state_at(passes, end.or_next_epoch() if passes.loader.has_one_iterator else end)
    return _state_at(passes, current.position_after(batches, batching))


def _state_at(passes: "Passes[Any]", position: Position) -> dict[str, Any]:
    """Return a position as plain values, with the facts that identify the loader."""
    states = position.states
    if states.unknown:
        raise StateError(f"The loader's state cannot be saved: {states.unknown}.")
    held = {
        "generators": [list(base) for base in states.generators],
        "samplers": list(states.samplers),
        "attributes": [dict(changed) for changed in states.attributes],
        "streams": [stream.plain() for stream in states.streams],
    }
    try:
        text = as_text(held)
    except (TypeError, RecursionError) as error:
        raise StateError(
            f"The loader's state cannot be saved: the state_dict() of a sampler in it has {error}. Let that method "
            "return numbers, strings, bytes, tensors and arrays, in lists, tuples, sets and dicts."
        ) from error
    facts = as_text(dict(passes.facts(passes.epochs.latest)))
    return _fields(facts, position, passes.agreed.seed.value, text)


def position_in(passes: "Passes[Any]", state: Any) -> Position:
    """Return the position that a state describes.

    Raises:
        StateError: The state is damaged, of another version of this package, or of another loader; or is no state.
    """
    if not isinstance(state, Mapping):
        raise _damaged(f"it is {shown(state)}, a {type(state).__name__} and not a dict")
    if not _is_same(state.get(_CANNOT_RESUME, ""), ""):
        raise StateError(
            "The state has no position, because it was not known when the state was taken: "
            f"{_told(state[_CANNOT_RESUME])} Resume from a state that was taken between two epochs, or restore none."
        )
    if not _is_same(state.get("version", _VERSION), _VERSION):
        raise StateError(
            f"The state has version {shown(state['version'])}, and this version of ddp_patch reads version {_VERSION} "
            "alone. Restore it with the version of ddp_patch that wrote it."
        )
    found = _read(state, {"version": _count, "loader": _text_of_mapping, **_POSITION})
    _require_same(found["loader"], found["seed"], passes.facts(None), passes.agreed.seed)
    states = States(**_read(found["states"], _STATES))
    position = Position(**{name: found[name] for name in _POSITION} | {"states": states})
    _require_one_for_each(position, passes.sampler_states.holders, passes.sampler_states.given_generators)
    passes.require_fits(position)
    return position
