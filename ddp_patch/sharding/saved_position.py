"""A position in an epoch, and how it is written to a state and read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeGuard

from ddp_patch.errors import StateError
from ddp_patch.orders.generators import is_stateful, random_generators, set_generator_state
from ddp_patch.orders.random_states import Seed, look
from ddp_patch.plan import Consumed
from ddp_patch.sharding.sampler_states import SamplerSnapshot

__all__ = [
    "BatchNote",
    "NotedBatch",
    "PartsConsumed",
    "Position",
    "StreamSnapshot",
    "StreamStart",
    "no_state",
    "read_state",
    "split_consumed",
    "write_state",
]


@dataclass(frozen=True, slots=True)
class PartsConsumed:
    """How much was taken of an iterable dataset that workers read in parts.

    Attributes:
        first: Whose turn is next.
        consumed: What was taken of each worker's part.
    """

    first: int
    consumed: Sequence[Consumed]


class StreamStart(NamedTuple):
    """Of which items a stream's first ones are, to recognise the stream after a restart.

    Attributes:
        seen: How many there are.
        value: The digest of their names; None if one has none.
        whole: A hash of all that is in them; None if they are all alike.
    """

    seen: int
    value: int | None
    whole: int | None

    def is_again(self, other: "StreamStart", is_drawn: bool) -> bool:
        """Return whether another stream begins with the same items, perhaps augmented differently.

        Args:
            other: How the other stream begins.
            is_drawn: Whether that one may have been read already. Then only exactly the same items will do.
        """
        return self.whole == other.whole is not None if is_drawn else self.value in {None, other.value}


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """What identifies an iterable dataset's stream, or one worker's part of it, besides how much was taken.

    Attributes:
        first: What its first items are; None if nobody looked.
        state: The dataset's own state, as the only element; empty if it has no state with a position.
        initial_state: That state when the stream began, likewise, if nobody had read the dataset before, or to its end.
    """

    first: StreamStart | None = None
    state: Sequence[Any] = ()
    initial_state: Sequence[Any] = ()

    def plain(self) -> list[Any]:
        """Return it as plain values, without ``initial_state``."""
        return [None if self.first is None else list(self.first), list(self.state)]

    @classmethod
    def of(cls, plain: Sequence[Any], before: Sequence[Any] = ()) -> "StreamSnapshot":
        """Return what ``plain`` made plain values of."""
        first, state = plain
        return cls(None if first is None else StreamStart(*first), tuple(state), tuple(before))


class BatchNote(NamedTuple):
    """What a worker notes of a batch that it made. It travels with the batch, and counts when that is delivered.

    Attributes:
        worker_index: Which worker it is.
        batches: How many batches its stream had with this one.
        first: What the first items that were read are; None if the note before has them.
        state: The dataset's own state, pickled; None if it has no state with a position.
        initial_state: That state when the stream began, likewise; None if the note before has it.
    """

    worker_index: int
    batches: int
    first: StreamStart | None
    state: bytes | None
    initial_state: bytes | None


class NotedBatch(NamedTuple):
    """A batch on its way out of a worker. torch pins both fields as those of any named tuple."""

    note: BatchNote
    batch: Any


@dataclass(frozen=True, slots=True)
class Position:
    """A position in the epochs: where a pass begins, or how far it is.

    Attributes:
        epoch: Which epoch it is over.
        consumed: What was taken of that epoch.
        sampler_snapshot: What the samplers held before it; after it, if it has ended.
        ended: Whether nothing of it is left, so that the next pass is empty.
        parts: What was taken of each part, if workers read parts of the stream.
        stream_snapshots: What identifies an iterable dataset's stream there, or each of its parts.
        seed: The seed of the state that it was read from, if any.
    """

    epoch: int
    consumed: Consumed = ()
    sampler_snapshot: SamplerSnapshot = field(default_factory=SamplerSnapshot)
    ended: bool = False
    parts: PartsConsumed | None = None
    stream_snapshots: Sequence[StreamSnapshot] = ()
    seed: int | None = None

    @property
    def is_within_pass(self) -> bool:
        """Whether it is within a pass, not where one begins."""
        return bool(self.consumed)

    @property
    def is_at_epoch_start(self) -> bool:
        """Whether nothing of the epoch was taken."""
        return not any(taken for _, taken in self.consumed)

    def or_next_epoch(self) -> "Position":
        """Return where the next epoch begins, if this one has ended; otherwise this position."""
        return replace(self, epoch=self.epoch + 1, consumed=(), ended=False, parts=None) if self.ended else self


def split_consumed(consumed: Consumed, num_replicas: int) -> tuple[Consumed, int]:
    """Return what other numbers of ranks took, and how many items each of this many took after that."""
    if consumed and consumed[-1][0] == num_replicas:
        return consumed[:-1], consumed[-1][1]
    return consumed, 0


_VERSION = 1

_FIELDS = ("version", "loader", "epoch", "done", "parts", "marks", "ended", "generators", "samplers", "attributes")


def write_state(position: Position, facts: Mapping[str, object], seed: int) -> dict[str, Any]:
    """Return a position as plain values, with the seed and the facts that identify the loader.

    Raises:
        StateError: The samplers' own states are not known.
    """
    if position.sampler_snapshot.unknown:
        raise StateError(f"The loader's state cannot be saved: {position.sampler_snapshot.unknown}.")
    parts, before = position.parts, {"before": [list(mark.initial_state) for mark in position.stream_snapshots]}
    return {
        "version": _VERSION,
        "loader": {**facts, "seed": seed},
        "epoch": position.epoch,
        "done": _listed(position.consumed),
        "parts": None if parts is None else [parts.first, [_listed(consumed) for consumed in parts.consumed]],
        "marks": [mark.plain() for mark in position.stream_snapshots],
        "ended": position.ended,
        "generators": list(position.sampler_snapshot.generators),
        "samplers": list(position.sampler_snapshot.samplers),
        # Pairs, because torch.distributed.checkpoint looks into dicts, and for what it finds when it loads.
        "attributes": [[list(pair) for pair in changed.items()] for changed in position.sampler_snapshot.attributes],
        **(before if any(before["before"]) else {}),
    }


# The only field of a placeholder: why there is no state.
_CANNOT_RESUME = "cannot_resume"


def no_state(why: str) -> dict[str, Any]:
    """Return a placeholder for a state that is not known: the checkpoint can be saved, but not restored."""
    return {_CANNOT_RESUME: why}


def read_state(state: Any, facts: Mapping[str, object], seed: Seed, holders: Sequence[Any]) -> Position:
    """Return the position that a state describes.

    Args:
        state: What ``write_state`` returned.
        facts: The facts that identify this loader.
        seed: This loader's; if the user chose it, the state must have the same.
        holders: The samplers and others whose generators, states and attributes the state holds.

    Raises:
        StateError: The state is damaged, newer than this package, of another loader, or none.
    """
    if not isinstance(state, Mapping):
        raise _damaged(f"it is {state!r}, a {type(state).__name__} and not a dict")
    if _CANNOT_RESUME in state:
        raise StateError(
            f"The state has no position, because it was not known when the state was taken: {state[_CANNOT_RESUME]} "
            "Resume from a state that was taken between two epochs, or restore none."
        )
    if "version" in state and not (_is_count(state["version"]) and state["version"] <= _VERSION):
        raise StateError(
            f"The state has version {state['version']!r}, and this version of ddp_patch reads versions up to "
            f"{_VERSION}, so it cannot read it. Restore it with the version of ddp_patch that wrote it."
        )
    if missing := [name for name in _FIELDS if name not in state]:
        raise _damaged(f"it has no {', '.join(missing)}")
    _require_same(state["loader"], facts, seed)
    if not _is_count(state["epoch"]):
        raise _damaged(f"its epoch is {state['epoch']!r}, not a whole number of at least 0")
    if not _is_consumed(state["done"]):
        raise _damaged(f"its field done is {state['done']!r}, not a list of pairs: ranks, and items that each took")
    if not isinstance(state["ended"], bool):
        raise _damaged(f"its field ended is {state['ended']!r}, neither True nor False")
    consumed = tuple((ranks, taken) for ranks, taken in state["done"])
    snapshot, parts = _read_sampler_snapshot(state, holders), _read_parts(state["parts"])
    # Where an epoch begins, nobody knows yet whether it has parts.
    number = len(parts.consumed) if parts else 1 if any(taken for _, taken in consumed) else None
    marks = _read_marks(state["marks"], state.get("before"), number)
    return Position(state["epoch"], consumed, snapshot, state["ended"], parts, marks, state["loader"]["seed"])


def _listed(consumed: Consumed) -> list[list[int]]:
    return [list(pair) for pair in consumed]


def _read_parts(parts: Any) -> PartsConsumed | None:
    if parts is None:
        return None
    is_pair = _is_list(parts, 2, 2) and isinstance(parts[1], list | tuple) and _is_count(parts[0])
    if not (is_pair and parts[0] < len(parts[1]) and all(map(_is_consumed, parts[1]))):
        raise _damaged(f"its field parts is {parts!r}, not a pair: whose turn is next, and what was taken of each part")
    return PartsConsumed(parts[0], tuple(tuple((ranks, taken) for ranks, taken in consumed) for consumed in parts[1]))


def _read_marks(marks: Any, before: Any, number: int | None) -> Sequence[StreamSnapshot]:
    if not (isinstance(marks, list | tuple) and all(map(_is_mark, marks))):
        raise _damaged(f"its field marks is {marks!r}, not a list of pairs: what a stream began with, and its state")
    if number is not None and len(marks) not in {0, number}:
        raise _damaged(f"its field marks has {len(marks)} elements, not one for each part")
    before = [()] * len(marks) if before is None else before
    if not (_is_list(before, len(marks), len(marks)) and all(_is_list(state, 0, 1) for state in before)):
        raise _damaged(
            f"its field before is {before!r}, not a list with the dataset's first state for each of its marks"
        )
    return tuple(map(StreamSnapshot.of, marks, before))


def _is_mark(mark: object) -> bool:
    return _is_list(mark, 2, 2) and (mark[0] is None or _is_first(mark[0])) and _is_list(mark[1], 0, 1)


def _is_first(first: object) -> bool:
    return _is_list(first, 3, 3) and _is_count(first[0]) and all(each is None or _is_count(each) for each in first[1:])


def _is_list(value: object, least: int, most: int) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple) and least <= len(value) <= most


def _read_sampler_snapshot(state: Mapping[str, Any], holders: Sequence[Any]) -> SamplerSnapshot:
    """Return what the holders held, after trying each generator's state on its generator."""
    generators = random_generators(holders)
    _require_number("generators", state["generators"], len(generators))
    with look(generators):
        for generator, kept in zip(generators, state["generators"], strict=True):
            try:
                set_generator_state(generator, kept)
            except Exception as error:
                raise _damaged(f"its field generators is not the state of a {type(generator).__name__}") from error
    _require_number("samplers", state["samplers"], sum(map(is_stateful, holders)))
    try:
        attributes = [{str(name): value for name, value in changed} for changed in state["attributes"]]
    except (TypeError, ValueError):
        raise _damaged(f"its field attributes is {state['attributes']!r}, not a list of lists of pairs") from None
    if attributes:
        _require_number("attributes", attributes, len(holders))
    return SamplerSnapshot(state["generators"], state["samplers"], attributes)


def _require_number(name: str, states: Any, here: int) -> None:
    """Raise StateError unless there is one state for each of ``here`` holders."""
    if not isinstance(states, list | tuple):
        raise _damaged(f"its field {name} is {states!r}, not a list")
    if len(states) != here:
        raise _other([f"  {name}: {len(states)} in the state; {here} here"])


def _require_same(said: Any, facts: Mapping[str, object], seed: Seed) -> None:
    if not isinstance(said, Mapping):
        raise _damaged(f"its field loader is {said!r}, not a dict")
    if not _is_count(said.get("seed")):
        raise _damaged(f"its loader's seed is {said.get('seed')!r}, not a whole number of at least 0")
    # A seed that nobody chose differs at each start.
    facts = {**facts, "seed": seed.value if seed.is_chosen else said["seed"]}
    rows = [
        f"  {name}: {said.get(name, 'nothing')} in the state; {facts.get(name, 'nothing')} here"
        for name in dict.fromkeys([*facts, *said])
        if said.get(name, "nothing") != facts.get(name, "nothing")
    ]
    if rows:
        other_seed = facts["seed"] != said["seed"]
        raise _other(
            rows, f" Pass seed={said['seed']} to it, or no seed: then it gets the state's." if other_seed else ""
        )


def _other(rows: Sequence[str], remedy: str = "") -> StateError:
    return StateError(
        "The state is of another loader, and resuming from it would lose or repeat samples.\n"
        + "\n".join(rows)
        + "\nBuild and patch the loader as it was when the state was taken, with the same seed and options."
        + remedy
    )


def _damaged(why: str) -> StateError:
    return StateError(
        f"The state is damaged: {why}. Pass what loader_state(), or state_dict(), returned, as it was saved."
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_consumed(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(map(_is_count, pair)) and pair[0] > 0
        for pair in value
    )
