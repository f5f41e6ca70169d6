"""The rows that ranks send each other, as bytes: in pieces, and each put into its place."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from ddp_patch.evaluation.outputs import Leaf
from ddp_patch.ranks.packing import bytes_of

__all__ = ["Column", "Transport", "bytes_of_rows", "kept", "put", "sent"]

Array: TypeAlias = "np.ndarray[Any, Any]"

# Returns every share's bytes, of this rank's and how many each share has; None on a rank that does not get them.
Transport: TypeAlias = Callable[[torch.Tensor, Sequence[int]], "Sequence[torch.Tensor] | None"]

# How many bytes travel at once, all ranks' together, which are held in memory besides the result.
_LARGEST_MESSAGE = 2**26


@dataclass(frozen=True, slots=True)
class Column:
    """Rows of one form, of which each share has some.

    Attributes:
        row_bytes: How many bytes a row has.
        counts: How many rows each share has.
        own: Those of this rank, as bytes.
        take: Called with each share's rows, as arrays of opaque elements, from one row on up to another; in order.
    """

    row_bytes: int
    counts: Array
    own: Array
    take: Callable[[Sequence[Array], int, int], object]


def sent(columns: Sequence[Column], transport: Transport) -> None:
    """Send this rank's rows of all columns, and take all ranks': together, if they are not too many bytes."""
    for segments in _messages(columns):
        parts = [column.own[begin * column.row_bytes : end * column.row_bytes] for column, begin, end in segments]
        sizes = np.sum(
            [column.row_bytes * _within(column.counts, begin, end) for column, begin, end in segments], axis=0
        )
        came = transport(torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts)), sizes.tolist())
        if came is None:
            continue
        blocks = [block.numpy() for block in came]
        done = np.zeros(len(blocks), np.int64)
        for column, begin, end in segments:
            after = done + column.row_bytes * _within(column.counts, begin, end)
            row = np.dtype((np.void, column.row_bytes))
            bounds = zip(blocks, done.tolist(), after.tolist(), strict=True)
            column.take([block[first:last].view(row) for block, first, last in bounds], begin, end)
            done = after


def _messages(columns: Sequence[Column]) -> Iterator[list[tuple[Column, int, int]]]:
    """Yield what to send at once: of some columns, the rows from one up to another."""
    message: list[tuple[Column, int, int]] = []
    size = 0
    for column in columns:
        rows, limit = int(column.counts.max()), _LARGEST_MESSAGE // len(column.counts)
        step = max(1, limit // max(1, column.row_bytes))
        for begin in range(0, rows if column.row_bytes else 0, step):
            end = min(begin + step, rows)
            more = (end - begin) * column.row_bytes
            if message and size + more > limit:
                yield message
                message, size = [], 0
            message.append((column, begin, end))
            size += more
    if message:
        yield message


def _within(counts: Array, begin: int, end: int) -> Array:
    """Return how many of these rows each share has."""
    return np.minimum(counts, end) - np.minimum(counts, begin)


def kept(counts: Array, own: Array) -> tuple[Column, list[Array]]:
    """Return a column of numbers or bytes, and where each share's come."""
    came = [np.empty(count, own.dtype) for count in counts.tolist()]

    def take(rows: Sequence[Array], begin: int, end: int) -> None:
        for into, part in zip(came, rows, strict=True):
            into[begin:end] = part.view(own.dtype)

    return Column(own.itemsize, counts, _flat(own), take), came


def bytes_of_rows(leaf: Leaf | None) -> Array:
    """Return the bytes of a tensor's or an array's rows."""
    if isinstance(leaf, torch.Tensor):
        data: Array = bytes_of(leaf).numpy()
        return data
    return _flat(np.empty(0, np.uint8) if leaf is None else np.asarray(leaf))


def _flat(array: Array) -> Array:
    """Return the bytes of an array: the same memory where it lies there in order and may be written to."""
    return np.require(array, requirements=["C", "W"]).reshape(-1).view(np.uint8)


def put(leaf: Leaf, places: Callable[[int, int], Sequence[Array]]) -> Callable[[Sequence[Array], int, int], None]:
    """Return what puts rows into their places in a leaf, which lies on the CPU."""
    data = bytes_of_rows(leaf)

    def take(rows: Sequence[Array], begin: int, end: int) -> None:
        data.view(rows[0].dtype)[np.concatenate(places(begin, end))] = np.concatenate(rows)

    return take
