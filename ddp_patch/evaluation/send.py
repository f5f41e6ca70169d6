"""Send rows to the ranks that want them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ddp_patch.errors import MissingRanksError
from ddp_patch.evaluation.outputs import Form, Leaf, empty_rows, put
from ddp_patch.evaluation.row_order import Place, Placed, RowKeys, placed
from ddp_patch.ranks.channel import gloo_between
from ddp_patch.ranks.packing import bytes_of, unpacked

__all__ = [
    "Column",
    "Connection",
    "Connections",
    "LocalColumn",
    "Members",
    "gathered",
    "gathered_keys",
]


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks that gather together.

    Attributes:
        ranks: Their global ranks, in the order of their shares.
        rank: This process's global rank.
        dst: The global rank that gets the result, which may be in another group of ranks; None if all get it.
        timeout: How long they wait for each other, in seconds.
    """

    ranks: list[int]
    rank: int
    dst: int | None
    timeout: float

    @property
    def receives(self) -> bool:
        """Whether this rank gets the result."""
        return self.dst is None or self.rank == self.dst


@dataclass(frozen=True, slots=True)
class Connection:
    """Moves bytes from one member to those that receive.

    Attributes:
        members: The ranks that gather together.
        group: Their own gloo group; None if nothing is sent.
        name: A name that no other group has.
    """

    members: Members
    group: Any
    name: str = ""

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
        takes_part = dst is None or (source != dst and dst in ranks and rank in {source, dst})
        if self.group is None or not size or not takes_part:
            return None
        buffer = data() if is_source else torch.empty(size, dtype=torch.uint8)
        with _failures_told(self.members):
            if dst is None:
                self.group.broadcast(buffer, ranks.index(source)).wait()
            elif is_source:
                self.group.send([buffer], ranks.index(dst), 0).wait()
            else:
                self.group.recv([buffer], ranks.index(source), 0).wait()
        return None if is_source else buffer

    def close(self) -> None:
        """Wait until every member has all it receives, and leave."""
        if self.group is not None:
            with _failures_told(self.members):
                self.group.barrier().wait()  # a rank must not leave while others receive


class Connections:
    """Connects ranks for the steps of a pass that are gathered one by one: the next uses that of the step before."""

    def __init__(self) -> None:
        self._of_passes: WeakKeyDictionary[Any, Connection] = WeakKeyDictionary()

    def name(self, current: Any) -> str | None:
        """Return the name of a pass's connection; None where there is none."""
        kept = None if current is None else self._of_passes.get(current)
        return None if kept is None else kept.name

    @contextmanager
    def connected(self, current: Any, members: Members, name: str, *, is_last: bool) -> Iterator[Connection]:
        """Connect the members for a call.

        Args:
            current: The pass.
            members: The ranks that gather together.
            name: The name of the pass's connection on every rank, or a new one.
            is_last: Whether no other call follows on any rank.

        Raises:
            MissingRanksError: The connection to another rank failed.
        """
        found = self._of_passes.pop(current, None)  # after an error, the next call begins anew
        if found is None or found.name != name:
            found = _opened(members, name)
        yield replace(found, members=members)
        if is_last:
            found.close()
        elif found.group is not None:
            self._of_passes[current] = found


def _opened(members: Members, name: str) -> Connection:
    """Connect the members, if there are several to which something is sent."""
    if len(members.ranks) == 1 or not (members.dst is None or members.dst in members.ranks):
        return Connection(members, None, name)
    place = members.ranks.index(members.rank)
    with _failures_told(members):
        return Connection(members, gloo_between(name, place, len(members.ranks), members.timeout), name)


@contextmanager
def _failures_told(members: Members) -> Iterator[None]:
    """Raise MissingRanksError if the connection fails."""
    try:
        yield
    except RuntimeError as error:  # what gloo raises
        raise MissingRanksError(
            f"Gathering outputs: the connection between the ranks {list(members.ranks)} failed ({error}). Look for the "
            "error of a rank that ended. If none did, name the network interface by which they reach each other in "
            "GLOO_SOCKET_IFNAME, or pass a longer timeout=."
        ) from error


# How many bytes are sent at once, which are held in memory besides the result.
_LARGEST_MESSAGE = 2**26

# The most rows at once: their places may be an array, which takes half as much memory.
_MOST_ROWS = 2**22


@dataclass(frozen=True, slots=True)
class Column:
    """What the ranks know of a tensor, an array or a list of which each has some rows.

    Attributes:
        form: What a row of the result looks like.
        shapes: The shape of each share's rows, which may be narrower.
        pickled: How many bytes each share's rows have, if they are pickled.
    """

    form: Form
    shapes: Sequence[tuple[int, ...]]
    pickled: Sequence[int]


@dataclass(frozen=True, slots=True)
class LocalColumn:
    """This rank's rows of a column.

    Attributes:
        leaf: The rows, without padding; None if there are none.
        data: The same, pickled, if they are sent so.
    """

    leaf: Leaf | None = None
    data: bytes = b""


def gathered(connection: Connection, column: Column, rows: Placed, given: LocalColumn, pad: Any) -> Any:
    """Return all ranks' rows of a column, or None on a rank that does not get the result.

    Args:
        connection: Between the ranks.
        column: What the ranks know of the column.
        rows: How many rows each share has, and where they go.
        given: This rank's rows.
        pad: What fills rows up that are narrower than others.

    Raises:
        MissingRanksError: The connection to another rank failed.
    """
    members, form = connection.members, column.form
    result = None
    if members.receives:
        result = empty_rows(form, rows.rows, _device_for(form, given.leaf), pad)
    for share, source in enumerate(members.ranks):
        places = iter(()) if result is None else rows.places(share)
        leaf = given.leaf if source == members.rank and rows.counts[share] else None
        if not form.is_pickled:
            _move(connection, source, leaf, form, column.shapes[share], rows.counts[share], result, places)
        elif (found := _moved_objects(connection, source, leaf, given.data, column.pickled[share])) is not None:
            _put_all(found, result, places)
    return result


def gathered_keys(connection: Connection, sent: Sequence[RowKeys | int], own: RowKeys) -> Sequence[RowKeys] | None:
    """Return the keys of each share's rows, or None on a rank that does not get the result.

    Args:
        connection: Between the ranks.
        sent: What every rank knows of each share's keys: the runs that they come in, or how long an array of them is.
        own: This rank's keys.
    """
    lengths = [keys if isinstance(keys, int) else 0 for keys in sent]
    ends = list(accumulate(lengths))
    arrays = placed([[range(end - length, end)] for length, end in zip(lengths, ends, strict=True)])
    column = Column(Form("array", np.dtype(np.int64)), [()] * len(sent), [0] * len(sent))
    array = next((run for run in own if isinstance(run, np.ndarray)), None)
    found = gathered(connection, column, arrays, LocalColumn(array), None)
    if found is None:
        return None
    return [[found[end - keys : end]] if isinstance(keys, int) else keys for keys, end in zip(sent, ends, strict=True)]


def _device_for(form: Form, own: Any) -> torch.device | None:
    """Return where a result lies: where this rank's own rows do, or else on its current device of the rows' kind."""
    if form.kind != "tensor":
        return None
    return own.device if isinstance(own, torch.Tensor) else torch.device(form.device)


def _move(
    connection: Connection,
    source: int,
    leaf: Leaf | None,
    form: Form,
    shape: tuple[int, ...],
    rows: int,
    result: Any,
    places: Iterator[Place],
) -> None:
    """Move rows with a fixed number of bytes to their places in the result."""
    row_bytes = form.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    most = min(_MOST_ROWS, max(1, _LARGEST_MESSAGE // max(1, row_bytes)))
    messages = _messages(places, most)
    for start in range(0, rows, most):
        size = min(most, rows - start)
        part = None if leaf is None else leaf[start : start + size]
        came = connection.move(source, size * row_bytes, lambda part=part: _bytes_of(part))  # type: ignore[misc]
        if result is not None and row_bytes:
            _put_all(_rows_of(came, form, shape, result) if part is None else part, result, next(messages))


def _moved_objects(connection: Connection, source: int, leaf: Leaf | None, data: bytes, size: int) -> Leaf | None:
    """Return a rank's rows that are objects; None on a rank that does not get them."""
    form, is_own = Form("array", np.dtype(np.uint8)), source == connection.members.rank
    came = None if is_own or not connection.members.receives else np.empty(size, np.uint8)
    _move(
        connection, source, np.frombuffer(data, np.uint8) if is_own else None, form, (), size, came, iter([range(size)])
    )
    return leaf if came is None or not size else unpacked(came.data)


def _messages(places: Iterator[Place], rows: int) -> Iterator[list[Place]]:
    """Cut places into messages of so many rows."""
    message: list[Place] = []
    room = rows
    for place in places:
        left = place
        while len(left):
            part, left = left[:room], left[room:]
            message.append(part)
            room -= len(part)
            if not room:
                yield message
                message, room = [], rows
    if message:
        yield message


def _put_all(rows: Any, result: Any, places: Iterable[Place]) -> None:
    done = 0
    for place in places:
        put(rows[done : done + len(place)], result, place)
        done += len(place)


def _bytes_of(given: Any) -> torch.Tensor:
    """Return the bytes of an array or a tensor."""
    if isinstance(given, np.ndarray):
        # Copy it, because it may be read-only or have gaps.
        return torch.from_numpy(np.array(given, order="C", copy=True).reshape(-1).view(np.uint8))
    return bytes_of(given)


def _rows_of(came: Any, form: Form, shape: tuple[int, ...], result: Any) -> Any:
    """Return the rows that these bytes are, on the result's device."""
    if form.kind == "array":
        return came.numpy().view(form.dtype).reshape(-1, *shape)
    return came.view(form.dtype).reshape(-1, *shape).to(result.device)
