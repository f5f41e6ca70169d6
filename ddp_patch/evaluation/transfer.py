"""Rows sent from every rank to all, or to one; here is the only group that this package communicates through."""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_patch.compat import default_store, gloo_group
from ddp_patch.errors import MissingRanksError
from ddp_patch.evaluation.rows import Form, Leaf, Structure, leaves_of

__all__ = ["Arrangement", "Members", "Packed", "gathered", "packed"]

# How many bytes are sent at once: what is held besides the result.
_LARGEST_MESSAGE = 2**26

# Rows of objects, pickled, by their path.
Packed = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Members:
    """Who gathers.

    Attributes:
        ranks: The global ranks, by the share that they take.
        rank: This process's.
        dst: Which gets the result, one of them or one that others gather with; None where all do.
        timeout: How many seconds they wait for each other.
    """

    ranks: Sequence[int]
    rank: int
    dst: int | None
    timeout: float

    @property
    def receives(self) -> bool:
        """Whether this rank gets the result."""
        return self.dst is None or self.rank == self.dst


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where the rows of all ranks stand.

    Attributes:
        structure: What all give.
        rows: How many rows the result has.
        places: Of each share, where in the result its rows stand, in order.
        pickled: Of each share, how many bytes its rows of objects are when pickled, by their path.
        name: What tells this gathering from all others.
    """

    structure: Structure
    rows: int
    places: Sequence[Sequence[range]]
    pickled: Sequence[Mapping[str, int]]
    name: str


def packed(outputs: Any, structure: Structure, rows: int) -> dict[str, bytes]:
    """Return the first rows of those leaves that hold objects, pickled, by their path."""
    leaves = dict(leaves_of(outputs))
    return {path: _pickled(leaves[path][:rows]) for path, form in structure.forms.items() if form.is_pickled}


def gathered(outputs: Any, own: Packed, members: Members, arrangement: Arrangement) -> Any:
    """Return all ranks' outputs as one, or None on a rank that gets nothing.

    Args:
        outputs: This rank's, in the same structure; anything where it has no rows. What it has beyond its places is
            left out.
        own: What ``packed`` made of it.
        members: Who gives.
        arrangement: What all agreed on.
    """
    given = dict(leaves_of(outputs))
    leaves = {}
    with _channel(members, arrangement.name) as channel:
        for path, form in arrangement.structure.forms.items():
            result = _empty(form, given.get(path), arrangement.rows) if members.receives else None
            for share, source in enumerate(members.ranks):
                places = arrangement.places[share]
                leaf = given[path] if source == members.rank and places else None
                if form.is_pickled:
                    size = arrangement.pickled[share].get(path, 0)
                    _move_objects(channel, source, leaf, own.get(path, b""), size, result, places)
                else:
                    _move_bytes(channel, source, leaf, form, result, places)
            leaves[path] = result
    return arrangement.structure.rebuilt(leaves) if members.receives else None


@dataclass(frozen=True, slots=True)
class _Channel:
    """How bytes come from one member to those that receive.

    Attributes:
        members: Who gathers.
        group: Theirs alone; None where nothing is sent.
    """

    members: Members
    group: Any

    def move(self, source: int, size: int, data: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Return ``size`` bytes of the source's, on those that receive and are not the source.

        Args:
            source: Which rank has them.
            size: How many they are.
            data: Gives them, on the source.
        """
        rank, ranks, dst = self.members.rank, self.members.ranks, self.members.dst
        is_source = rank == source
        if self.group is None or not size or (dst is not None and (source == dst or rank not in {source, dst})):
            return None
        buffer = data() if is_source else torch.empty(size, dtype=torch.uint8)
        with _connected(self.members):
            if dst is None:
                self.group.broadcast(buffer, ranks.index(source)).wait()
            elif is_source:
                self.group.send([buffer], ranks.index(dst), 0).wait()
            else:
                self.group.recv([buffer], ranks.index(source), 0).wait()
        return None if is_source else buffer


@contextmanager
def _channel(members: Members, name: str) -> Iterator[_Channel]:
    """Connect the members by a group that nobody else uses and that is gone afterwards.

    It is gloo's, from one CPU to another, whatever the training's backend is. torch's ``new_group`` needs all ranks;
    or, for some of them, that each is in as many groups as the others, because it names the new one by their number.
    """
    if len(members.ranks) == 1 or not (members.dst is None or members.dst in members.ranks):
        yield _Channel(members, None)
        return
    place = members.ranks.index(members.rank)
    store = dist.PrefixStore(f"ddp_patch/gathering/{name}", default_store())  # type: ignore[attr-defined]  # in its __all__, not in its stubs
    with _connected(members):
        group = gloo_group(store, place, len(members.ranks), timedelta(seconds=members.timeout))
    yield _Channel(members, group)
    with _connected(members):
        group.barrier().wait()  # nobody goes before all have what they came for
    store.delete_key(f"0/{place}")  # gloo leaves every rank's address


@contextmanager
def _connected(members: Members) -> Iterator[None]:
    """Raise MissingRanksError where the connection fails."""
    try:
        yield
    except RuntimeError as error:  # what gloo raises
        raise MissingRanksError(
            f"Gathering outputs: the connection between the ranks {list(members.ranks)} failed ({error}). Look for the "
            "error of a rank that ended. If none did, name the network interface by which they reach each other in "
            "GLOO_SOCKET_IFNAME, or pass a longer timeout=."
        ) from error


def _empty(form: Form, own: Any, rows: int) -> Any:
    if form.kind == "list":
        return [None] * rows
    if form.kind == "array":
        return np.empty((rows, *form.row), form.dtype)
    device = own.device if isinstance(own, torch.Tensor) else torch.device(form.device)
    return torch.empty((rows, *form.row), dtype=form.dtype, device=device)


def _move_bytes(
    channel: _Channel, source: int, leaf: Leaf | None, form: Form, result: Any, places: Sequence[range]
) -> None:
    """Move rows that are so many bytes each to where they stand in the result."""
    row_bytes = form.dtype.itemsize * int(np.prod(form.row, dtype=np.int64))
    step = max(1, _LARGEST_MESSAGE // max(1, row_bytes))
    done = 0
    for place in places:
        for start in range(0, len(place), step):
            into = place[start : start + step]
            given = None if leaf is None else leaf[done : done + len(into)]
            done += len(into)
            came = channel.move(source, len(into) * row_bytes, lambda given=given: _bytes_of(given))  # type: ignore[misc]
            if result is not None and row_bytes:
                result[_slice(into)] = _rows_of(came, form, result) if given is None else _plain(given)


def _slice(place: range) -> slice:
    return slice(place.start, place.stop, place.step)


def _plain(given: Any) -> Any:
    return given.detach() if isinstance(given, torch.Tensor) else given


def _bytes_of(given: Any) -> torch.Tensor:
    if isinstance(given, np.ndarray):
        # A copy, as the array may be read-only or have gaps.
        return torch.from_numpy(np.array(given, order="C", copy=True).reshape(-1).view(np.uint8))
    plain: torch.Tensor = given.detach().resolve_conj().resolve_neg().cpu()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _rows_of(came: Any, form: Form, result: Any) -> Any:
    if form.kind == "array":
        return came.numpy().view(form.dtype).reshape(-1, *form.row)
    return came.view(form.dtype).reshape(-1, *form.row).to(result.device)


def _move_objects(
    channel: _Channel, source: int, leaf: Leaf | None, data: bytes, size: int, result: Any, places: Sequence[range]
) -> None:
    """Move rows that are objects to where they stand in the result."""
    came = bytearray()
    for start in range(0, size, _LARGEST_MESSAGE):
        part = slice(start, min(size, start + _LARGEST_MESSAGE))
        piece = channel.move(
            source,
            part.stop - part.start,
            lambda part=part: torch.frombuffer(bytearray(data[part]), dtype=torch.uint8),  # type: ignore[misc]
        )
        if piece is not None:
            came += piece.numpy().data
    if result is None:
        return
    given: Any = pickle.loads(came) if leaf is None and came else leaf  # noqa: S301 - our own ranks'
    done = 0
    for place in places:
        result[_slice(place)] = given[done : done + len(place)]
        done += len(place)


def _pickled(given: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(given)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles tensors by their own values: by torch's way a view brings along all of what it is a view of."""

    def reducer_override(self, value: Any) -> Any:
        """Return how a value is made again, or NotImplemented for the usual way."""
        is_plain = type(value) is torch.Tensor and value.layout == torch.strided and not value.is_quantized
        if not is_plain or value.is_meta:
            return NotImplemented
        data = _bytes_of(value).numpy() if value.numel() else np.empty(0, np.uint8)
        return _tensor, (data, value.dtype, tuple(value.shape), value.device.type)


def _tensor(data: Any, dtype: torch.dtype, shape: Sequence[int], device: str) -> torch.Tensor:
    """Return a tensor of these bytes."""
    return torch.from_numpy(data).view(dtype).reshape(shape).to(device)
