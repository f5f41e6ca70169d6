"""Sends the rows of every rank to all ranks or to one, through a gloo group made for the call."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_patch.compat.torch_groups import default_store, gloo_group
from ddp_patch.errors import MissingRanksError
from ddp_patch.evaluation.rows import Form, Leaf, Structure, leaves_of
from ddp_patch.ranks.packing import bytes_of, unpacked
from ddp_patch.ranks.packing import packed as to_pickle

__all__ = ["Arrangement", "Members", "Packed", "gathered", "packed"]

# How many bytes are sent at once, which are held in memory besides the result.
_LARGEST_MESSAGE = 2**26

# Rows that are objects, pickled, by their leaf's path.
Packed = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks that gather together.

    Attributes:
        ranks: Their global ranks, in the order of their shares.
        rank: This process's global rank.
        dst: The global rank that gets the result, which may be in another group of ranks; None if all get it.
        timeout: How long they wait for each other, in seconds.
        device: Where this rank's batches come, if that is known.
    """

    ranks: Sequence[int]
    rank: int
    dst: int | None
    timeout: float
    device: torch.device | None = None

    @property
    def receives(self) -> bool:
        """Whether this rank gets the result."""
        return self.dst is None or self.rank == self.dst


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where the rows of all ranks go.

    Attributes:
        structure: The structure of all ranks' outputs.
        rows: How many rows the result has.
        places: Where each share's rows go in the result, in order. Each may be iterated several times.
        pickled: How many bytes each share's pickled rows have, by path.
        name: A name that no other gathering has.
    """

    structure: Structure
    rows: int
    places: Sequence[Iterable[range]]
    pickled: Sequence[Mapping[str, int]]
    name: str


def packed(outputs: Any, structure: Structure, rows: int) -> dict[str, bytes]:
    """Pickle the first rows of the leaves that hold objects.

    Args:
        outputs: This rank's outputs.
        structure: Their structure.
        rows: How many rows of each leaf to pickle.

    Returns:
        The pickled rows, by path.
    """
    leaves = dict(leaves_of(outputs))
    return {path: to_pickle(leaves[path][:rows]) for path, form in structure.forms.items() if form.is_pickled}


def gathered(outputs: Any, own: Packed, members: Members, arrangement: Arrangement) -> Any:
    """Return all ranks' outputs as one, or None on a rank that does not get the result.

    Args:
        outputs: This rank's outputs. Rows beyond its places are padding and not sent; a rank without rows may give
            anything.
        own: What ``packed`` returned for them.
        members: The ranks that gather together.
        arrangement: Where all rows go, the same on every rank.

    Raises:
        MissingRanksError: The connection to another rank failed.
    """
    given = dict(leaves_of(outputs))
    leaves = {}
    with _channel(members, arrangement.name) as channel:
        for path, form in arrangement.structure.forms.items():
            result = _empty(form, given.get(path), arrangement.rows, members.device) if members.receives else None
            for share, source in enumerate(members.ranks):
                places = arrangement.places[share]
                leaf = given[path] if source == members.rank and any(places) else None
                if form.is_pickled:
                    size = arrangement.pickled[share].get(path, 0)
                    _move_objects(channel, source, leaf, own.get(path, b""), size, result, places)
                else:
                    _move_bytes(channel, source, leaf, form, result, places)
            leaves[path] = result
    return arrangement.structure.rebuilt(leaves) if members.receives else None


@dataclass(frozen=True, slots=True)
class _Channel:
    """Moves bytes from one member to those that receive.

    Attributes:
        members: The ranks that gather together.
        group: Their own gloo group; None if nothing is sent.
    """

    members: Members
    group: Any

    def move(self, source: int, size: int, data: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Move bytes, and return them on each rank that receives them from another.

        Args:
            source: The global rank that has them.
            size: How many bytes they are.
            data: Returns them; called on the source only.

        Returns:
            The bytes in the shape ``(size,)``; None on the source and on ranks that receive nothing.
        """
        rank, ranks, dst = self.members.rank, self.members.ranks, self.members.dst
        is_source = rank == source
        takes_part = dst is None or (source != dst and rank in {source, dst})
        if self.group is None or not size or not takes_part:
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
    """Connect the members by a gloo group of their own, and remove it afterwards.

    gloo sends from CPU to CPU, whatever the training's backend is. torch's ``new_group`` will not do: it needs all
    ranks, or names a group of some by how many groups a process is in, and that number may differ between the ranks.
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
        group.barrier().wait()  # a rank must not leave while others receive
    store.delete_key(f"0/{place}")  # gloo leaves every rank's address there


@contextmanager
def _connected(members: Members) -> Iterator[None]:
    """Raise MissingRanksError if the connection fails."""
    try:
        yield
    except RuntimeError as error:  # what gloo raises
        raise MissingRanksError(
            f"Gathering outputs: the connection between the ranks {list(members.ranks)} failed ({error}). Look for the "
            "error of a rank that ended. If none did, name the network interface by which they reach each other in "
            "GLOO_SOCKET_IFNAME, or pass a longer timeout=."
        ) from error


def _empty(form: Form, own: Any, rows: int, here: torch.device | None) -> Any:
    """Return room for the rows of a leaf; a tensor lies where this rank's own does, or else on its device of the kind.

    Args:
        form: What the rows look like.
        own: This rank's own, if it has one.
        rows: How many rows.
        here: This rank's device, if that is known.
    """
    if form.kind == "list":
        return [None] * rows
    if form.kind == "array":
        return np.empty((rows, *form.row), form.dtype)
    if isinstance(own, torch.Tensor):
        device = own.device
    else:
        device = here if here is not None and here.type == form.device else torch.device(form.device)
    return torch.empty((rows, *form.row), dtype=form.dtype, device=device)


def _move_bytes(
    channel: _Channel, source: int, leaf: Leaf | None, form: Form, result: Any, places: Iterable[range]
) -> None:
    """Move rows with a fixed number of bytes to their places in the result."""
    row_bytes = form.dtype.itemsize * int(np.prod(form.row, dtype=np.int64))
    done = 0
    for ranges in _messages(places, max(1, _LARGEST_MESSAGE // max(1, row_bytes))):
        rows = sum(map(len, ranges))
        given = None if leaf is None else leaf[done : done + rows]
        done += rows
        came = channel.move(source, rows * row_bytes, lambda given=given: _bytes_of(given))  # type: ignore[misc]
        if result is not None and row_bytes:
            _put(_rows_of(came, form, result) if given is None else _detached(given), result, ranges)


def _messages(places: Iterable[range], rows: int) -> Iterator[list[range]]:
    """Cut places into messages of so many rows, each one range or several."""
    message: list[range] = []
    room = rows
    for place in places:
        left = place
        while left:
            part, left = left[:room], left[room:]
            message.append(part)
            room -= len(part)
            if not room:
                yield message
                message, room = [], rows
    if message:
        yield message


def _put(rows: Any, result: Any, places: Iterable[range]) -> None:
    """Put rows into their places in the result."""
    done = 0
    for place in places:
        result[place.start : place.stop : place.step] = rows[done : done + len(place)]
        done += len(place)


def _detached(given: Any) -> Any:
    return given.detach() if isinstance(given, torch.Tensor) else given


def _bytes_of(given: Any) -> torch.Tensor:
    """Return the bytes of an array or a tensor."""
    if isinstance(given, np.ndarray):
        # Copy it, because it may be read-only or have gaps.
        return torch.from_numpy(np.array(given, order="C", copy=True).reshape(-1).view(np.uint8))
    return bytes_of(given)


def _rows_of(came: Any, form: Form, result: Any) -> Any:
    """Return the rows that these bytes are, on the result's device."""
    if form.kind == "array":
        return came.numpy().view(form.dtype).reshape(-1, *form.row)
    return came.view(form.dtype).reshape(-1, *form.row).to(result.device)


def _move_objects(
    channel: _Channel, source: int, leaf: Leaf | None, data: bytes, size: int, result: Any, places: Iterable[range]
) -> None:
    """Move rows that are objects to their places in the result."""
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
    _put(unpacked(came) if leaf is None and came else leaf, result, places)
