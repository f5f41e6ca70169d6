"""What of a batch comes on a device, and in which stream it is copied there."""

import contextlib
import gc
import pickle
import weakref
from array import array
from collections import OrderedDict, UserDict, UserString, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from messages import raises
from moving import Streams, pretend_streams
from torch.nested import nested_tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data._utils.pin_memory import pin_memory

from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.loaders.to_device import Mover, moved

META = torch.device("meta")

Pair = namedtuple("Pair", ["x", "y"])


class Leaf:
    """Can be pinned, and moved."""

    def __init__(self, where: str = "") -> None:
        self.where = where

    def pin_memory(self) -> "Leaf":
        return Leaf("there")

    def to(self, device: object) -> "Leaf":
        return Leaf("there")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Leaf) and other.where == self.where

    __hash__ = None  # type: ignore[assignment]  # nobody hashes it


class Named(dict[str, Any]):
    name = "none"


class Numbered(list[Any]):
    name = "none"


class Items(OrderedDict[str, Any]):
    """As Hugging Face's ModelOutput: it takes one item, and not several at once."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("one after the other")


class Frozen(dict[str, Any]):
    """Takes nothing."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise AttributeError("frozen")


class FixedList(Sequence[Any]):
    """Is not made of its items."""

    def __init__(self, *, items: list[Any]) -> None:
        self.items = items

    def __getitem__(self, place: Any) -> Any:
        return self.items[place]

    def __len__(self) -> int:
        return len(self.items)


@dataclass
class Record:
    x: Any


def named(nest: Any) -> Any:
    nest.name = "mine"
    return nest


NESTS: dict[str, Callable[[], Any]] = {
    "leaf": Leaf,
    "list": lambda: [Leaf(), 1, "text", None],
    "tuple": lambda: (Leaf(), b"bytes"),
    "dict": lambda: {"x": Leaf(), "y": {"z": [Leaf()]}},
    "named tuple": lambda: Pair(Leaf(), (Leaf(), 2)),
    "ordered dict": lambda: OrderedDict(b=Leaf(), a=1),
    "default dict": lambda: defaultdict(list, x=Leaf()),
    "dict of a class": lambda: named(Named(x=Leaf())),
    "list of a class": lambda: named(Numbered([Leaf(), 1])),
    "mapping that stays": lambda: MappingProxyType({"x": Leaf()}),
    "mapping of a user's": lambda: UserDict({"x": Leaf()}),
    "deque": lambda: deque([Leaf(), 1]),
    "array": lambda: array("d", [1.0, 2.0]),
    "size": lambda: torch.Size([2, 3]),
    "nothing": lambda: None,
    "text": lambda: "text",
}
MAKES_LISTS = isinstance(pin_memory((1,)), list)  # type: ignore[no-untyped-call]  # of tuples, as torch 2.4's does
OF_TUPLES = {
    "tuple": (Leaf("there"), b"bytes"),
    "named tuple": Pair(Leaf("there"), (Leaf("there"), 2)),
    "size": torch.Size([2, 3]),
}


def there(value: Any) -> Any:
    return moved(value, lambda leaf: leaf.to(META))


@pytest.mark.parametrize("name", NESTS)
def test_nests_are_walked_as_pin_memory_walks_them(name: str) -> None:
    given = NESTS[name]()
    pinned, found = pin_memory(given), there(given)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    if MAKES_LISTS:
        pinned = OF_TUPLES.get(name, pinned)
    assert type(found) is type(pinned)
    assert found == pinned
    assert getattr(found, "name", None) == getattr(pinned, "name", None)
    assert given == NESTS[name]()  # and what was given is as it was


def test_a_mapping_takes_one_item_after_the_other() -> None:
    found = there(Items(x=Leaf(), n=1))
    assert (type(found), found) == (Items, Items(x=Leaf("there"), n=1))


@pytest.mark.parametrize("nest", [Frozen(x=Leaf()), FixedList(items=[Leaf()])], ids=["dict", "sequence"])
def test_a_nest_that_cannot_be_rebuilt_is_refused(nest: Any) -> None:
    remedy = (".to(device)", "collate_fn", "device=")
    with raises(UnsupportedLoaderError, ("device=", type(nest).__name__), remedy):
        there([nest])


class Unlike:
    """Is not equal to itself."""

    __hash__ = None  # type: ignore[assignment]  # nobody hashes it

    def __eq__(self, other: object) -> bool:
        raise ValueError("as an array that is compared")


UNTOUCHED: dict[str, Any] = {
    "range": range(3),
    "dict that takes nothing": Frozen(x=1),
    "sequence that is not made of its items": FixedList(items=[1, 2]),
    "list": [1, "text", Unlike()],
    "text of a class": UserString("text"),
}


@pytest.mark.parametrize("nest", UNTOUCHED.values(), ids=UNTOUCHED)
def test_a_nest_without_tensors_passes_untouched(nest: Any) -> None:
    assert there({"x": nest, "y": Leaf()})["x"] is nest


def test_what_has_no_to_passes_untouched() -> None:
    record, text, raw = Record(torch.zeros(2)), "text", bytearray(b"raw")
    batch = there({"record": record, "text": text, "raw": raw})
    assert (batch["record"], batch["text"], batch["raw"]) == (record, text, raw)
    assert batch["record"] is record
    assert batch["raw"] is raw


def test_a_field_that_is_called_to_is_no_method() -> None:
    class Fields(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self[name]

    assert there(Fields(to=Leaf())) == {"to": Leaf("there")}


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return pretend_streams(monkeypatch)


class Read:
    """Gives what it is told to, and raises what is an error; notes each reading."""

    def __init__(self, streams: Streams | None, *outcomes: Any) -> None:
        self.outcomes, self.calls = iter(outcomes), [] if streams is None else streams.calls

    def __call__(self) -> Any:
        outcome = next(self.outcomes)
        self.calls.append(
            f"read {tuple(outcome.shape) if isinstance(outcome, torch.Tensor) else type(outcome).__name__}"
        )
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def test_a_batch_is_copied_beside_the_step_before_it(streams: Streams) -> None:
    read, mover = Read(streams, torch.zeros(1), torch.zeros(2)), Mover(META, copies_ahead=True)
    for _ in range(2):
        streams.calls.append(f"step with {tuple(mover.next(read).shape)}")
    with pytest.raises(StopIteration):
        mover.next(read)
    assert streams.calls == [
        "read (1,)",
        "side reaches copy 1",
        "read (2,)",
        "side reaches copy 2",
        "loop waits for copy 1",  # and for no more, or the step would wait for the next batch
        "(1,) recorded in loop",
        "step with (1,)",
        "loop waits for copy 2",
        "(2,) recorded in loop",
        "step with (2,)",
    ]
    assert streams.made == 1


def test_where_none_is_copied_ahead_each_is_copied_when_it_is_asked_for(streams: Streams) -> None:
    read, mover = Read(streams, torch.zeros(1), torch.zeros(2)), Mover(META)
    mover.next(read)
    assert streams.calls == ["read (1,)", "side reaches copy 1", "loop waits for copy 1", "(1,) recorded in loop"]


class There(torch.Tensor):
    """Is on every device."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self


def test_every_tensor_that_was_copied_is_recorded_and_no_other(streams: Streams) -> None:
    there_already = torch.zeros(5).as_subclass(There)
    batch = Mover(META).moved({"x": torch.zeros(1), "y": [torch.zeros(2), there_already], "n": 3})
    assert [call for call in streams.calls if "recorded" in call] == ["(1,) recorded in loop", "(2,) recorded in loop"]
    assert batch["y"][1] is there_already


class Thing:
    """Moves in a way of its own, and notes in which stream it was asked to."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.where = streams, "here"

    def to(self, device: torch.device) -> "Thing":
        self.where = self.streams.now.name
        return self


class Recorded(Thing):
    def to(self, device: torch.device, non_blocking: bool = False) -> "Thing":
        assert non_blocking
        return super().to(device)

    def record_stream(self, stream: Any) -> None:
        self.streams.calls.append(f"all recorded in {stream.name}")


def test_what_cannot_be_recorded_is_copied_in_the_stream_of_the_loop(streams: Streams) -> None:
    """Else its memory could be used again while the loop computes with it."""
    batch = Mover(META).moved([Thing(streams), torch.zeros(1)])
    assert (batch[0].where, batch[1].device) == ("loop", META)


def test_what_can_be_recorded_is_copied_beside(streams: Streams) -> None:
    batch = Mover(META).moved([Recorded(streams)])
    assert batch[0].where == "side"
    assert streams.calls[-1] == "all recorded in loop"


OF_PARTS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "nested": lambda: nested_tensor([torch.zeros(2), torch.zeros(1)]),
    "jagged": lambda: nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_channel(torch.eye(2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
}


@pytest.mark.parametrize("make", OF_PARTS.values(), ids=OF_PARTS)
@pytest.mark.filterwarnings("ignore")  # torch's, about tensors that it leaves behind
def test_tensors_of_parts_are_copied_in_the_stream_of_the_loop(
    make: Callable[[], torch.Tensor], streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved_in: list[str] = []
    given = make()
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **kwargs: moved_in.append(streams.now.name))
    Mover(META).moved([given])
    assert moved_in == ["loop"]


class Batch(UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: a mapping that has a to()."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def test_tensors_of_a_mapping_with_a_method_are_copied_beside(streams: Streams) -> None:
    batch = Mover(META).moved(Batch(x=torch.zeros(1)))
    assert type(batch) is Batch
    assert batch["x"].device == META
    assert streams.calls[-1] == "(1,) recorded in loop"


class Immutable(Mapping[str, Any]):
    """A mapping that has a to(), and is made in a way of its own."""

    def __init__(self, x: Any, name: str) -> None:
        self.x, self.name = x, name

    def __getitem__(self, key: str) -> Any:
        return {"x": self.x}[key]

    def __iter__(self) -> Any:
        return iter(["x"])

    def __len__(self) -> int:
        return 1

    def to(self, device: torch.device, non_blocking: bool = False) -> "Immutable":
        return Immutable(self.x.to(device), self.name)


class FrozenBatch(Frozen):
    def to(self, device: torch.device, non_blocking: bool = False) -> "FrozenBatch":
        return FrozenBatch({key: value.to(device) for key, value in self.items()})


MADE_BY_THEMSELVES: dict[str, Callable[[], Any]] = {
    "immutable": lambda: Immutable(torch.zeros(1), "mine"),
    "takes nothing": lambda: FrozenBatch(x=torch.zeros(1)),
}


@pytest.mark.parametrize("make", MADE_BY_THEMSELVES.values(), ids=MADE_BY_THEMSELVES)
def test_mappings_that_cannot_be_rebuilt_move_as_they_do_by_themselves(
    make: Callable[[], Any], streams: Streams
) -> None:
    batch = Mover(META).moved(make())
    assert (type(batch), batch["x"].device) == (type(make()), META)
    assert getattr(batch, "name", "mine") == "mine"
    assert streams.calls[:2] == ["side reaches copy 1", "loop waits for copy 1"]


def test_packed_sequences_move_as_they_do_by_themselves(streams: Streams) -> None:
    """Their sizes stay on the CPU, so they are no tuple of tensors."""
    packed = Mover(META).moved(pack_sequence([torch.zeros(2), torch.zeros(1)]))
    assert isinstance(packed, PackedSequence)
    assert (packed.data.device, packed.batch_sizes.device.type) == (META, "cpu")


def test_errors_and_the_end_come_in_their_turn(streams: Streams) -> None:
    read = Read(streams, torch.zeros(1), ValueError("bad"), torch.zeros(2), StopIteration())
    mover = Mover(META, copies_ahead=True)
    assert mover.next(read).shape == (1,)
    with pytest.raises(ValueError, match="bad"):
        mover.next(read)
    assert streams.calls.count("read (2,)") == 0  # nobody asked for more
    assert mover.next(read).shape == (2,)
    with pytest.raises(StopIteration):
        mover.next(read)


def test_an_interrupt_loses_no_batch(streams: Streams) -> None:
    read, mover = Read(streams, torch.zeros(1), KeyboardInterrupt(), torch.zeros(2)), Mover(META, copies_ahead=True)
    with pytest.raises(KeyboardInterrupt):
        mover.next(read)
    assert [mover.next(read).shape, mover.next(read).shape] == [(1,), (2,)]


def test_a_new_pass_forgets_what_was_ahead(streams: Streams) -> None:
    mover = Mover(META, copies_ahead=True)
    mover.next(Read(streams, torch.zeros(1), torch.zeros(2)))
    mover.begin()
    assert mover.next(Read(streams, torch.zeros(3), torch.zeros(4))).shape == (3,)


def test_an_error_that_was_raised_keeps_nothing_alive(streams: Streams) -> None:
    """A loader's iterator that is left to the garbage collector waits for its workers."""
    mover, held = Mover(META, copies_ahead=True), [Leaf()]
    kept = weakref.ref(held[0])

    def fails() -> Any:
        of_the_frame = held.pop()
        raise ValueError(repr(of_the_frame))

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            mover.next(fails)
        assert kept() is None
    finally:
        gc.enable()


def test_a_mover_can_be_pickled(streams: Streams) -> None:
    mover = Mover(META, copies_ahead=True)
    mover.next(Read(streams, torch.zeros(1), torch.zeros(2)))
    again = pickle.loads(pickle.dumps(mover))  # noqa: S301 - our own
    assert again.next(Read(streams, torch.zeros(3), torch.zeros(4))).shape == (3,)


def test_a_device_without_a_number_is_torchs_current_one(streams: Streams) -> None:
    asked: list[Any] = []

    class Asks(Recorded):
        def to(self, device: torch.device, non_blocking: bool = False) -> "Thing":
            asked.append(device)
            return self

    Mover(META).moved(Asks(streams))
    assert asked == [torch.device("meta", 0)]
