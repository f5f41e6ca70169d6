"""Sends the rows of every rank to all ranks or to one, column by column."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ddp_patch.evaluation.connection import Connection
from ddp_patch.evaluation.places import Placed
from ddp_patch.evaluation.rows import Form, Leaf
from ddp_patch.ranks.packing import bytes_of, unpacked

__all__ = ["Column", "Given", "gathered"]

# How many bytes are sent at once, which are held in memory besides the result.
_LARGEST_MESSAGE = 2**26


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
class Given:
    """This rank's rows of a column.

    Attributes:
        leaf: The rows, without padding; None if there are none.
        data: The same, pickled, if they are sent so.
    """

    leaf: Leaf | None = None
    data: bytes = b""


def gathered(connection: Connection, column: Column, placed: Placed, given: Given, pad: Any) -> Any:
    """Return all ranks' rows of a column, or None on a rank that does not get the result.

    Args:
        connection: Between the ranks.
        column: What the ranks know of the column.
        placed: Where all rows go.
        given: This rank's rows.
        pad: What fills rows up that are narrower than others.

    Raises:
        MissingRanksError: The connection to another rank failed.
    """
    members, form = connection.members, column.form
    result = _empty(form, given.leaf, placed.rows, members.device) if members.receives else None
    if result is not None and any(shape != form.row for shape in column.shapes):
        result[...] = pad
    for share, source in enumerate(members.ranks):
        places = placed.places[share]
        leaf = given.leaf if source == members.rank and any(places) else None
        if form.is_pickled:
            _move_objects(connection, source, leaf, given.data, column.pickled[share], result, places)
        else:
            _move_bytes(connection, source, leaf, form, column.shapes[share], result, places)
    return result


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
    connection: Connection,
    source: int,
    leaf: Leaf | None,
    form: Form,
    shape: tuple[int, ...],
    result: Any,
    places: Iterable[range],
) -> None:
    """Move rows with a fixed number of bytes to their places in the result."""
    row_bytes = form.dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    done = 0
    for ranges in _messages(places, max(1, _LARGEST_MESSAGE // max(1, row_bytes))):
        rows = sum(map(len, ranges))
        given = None if leaf is None else leaf[done : done + rows]
        done += rows
        came = connection.move(source, rows * row_bytes, lambda given=given: _bytes_of(given))  # type: ignore[misc]
        if result is not None and row_bytes:
            _put(_rows_of(came, form, shape, result) if given is None else _detached(given), result, ranges)


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
    """Put rows into their places in the result, whose rows may be wider."""
    done = 0
    within = () if isinstance(result, list) else tuple(map(slice, rows.shape[1:]))
    for place in places:
        at = slice(place.start, place.stop, place.step)
        result[(at, *within) if within else at] = rows[done : done + len(place)]
        done += len(place)


def _detached(given: Any) -> Any:
    return given.detach() if isinstance(given, torch.Tensor) else given


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


def _move_objects(
    connection: Connection,
    source: int,
    leaf: Leaf | None,
    data: bytes,
    size: int,
    result: Any,
    places: Iterable[range],
) -> None:
    """Move rows that are objects to their places in the result."""
    came = bytearray()
    for start in range(0, size, _LARGEST_MESSAGE):
        part = slice(start, min(size, start + _LARGEST_MESSAGE))
        piece = connection.move(
            source,
            part.stop - part.start,
            lambda part=part: torch.frombuffer(bytearray(data[part]), dtype=torch.uint8),  # type: ignore[misc]
        )
        if piece is not None:
            came += piece.numpy().data
    if result is None:
        return
    rows = unpacked(came) if leaf is None and came else leaf
    if rows is not None:
        _put(rows, result, places)
