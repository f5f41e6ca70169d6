"""What a rank sends of its outputs, and what all ranks' come to.

First a header says how many rows a rank has, and where they go. Then come, where there are any: keys that are no run, a
pickle of rows that have no fixed number of bytes, and all others, each row as its bytes in all tensors and arrays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, cast

import numpy as np
import torch

from ddp_patch.errors import message_of
from ddp_patch.evaluation.outputs import Leaf, Reading, joined, mapped, row_bytes, ways_to_read
from ddp_patch.evaluation.shares import Array, Misfit, RankShare, places_of, run_of
from ddp_patch.ranks.exchange import digest
from ddp_patch.ranks.packing import bytes_of, packed, unpacked

__all__ = ["OwnOutputs", "are_alike"]

# How many bytes of rows travel at once, all ranks' together, which are held in memory besides the result.
_LARGEST_MESSAGE = 2**26


def are_alike(headers: Array) -> bool:
    """Return whether all ranks call the same, and those that got something read alike."""
    calls, forms, *_ = headers.T
    return bool(calls.all()) and len({*calls.tolist()}) == 1 and len({*forms.tolist()} - {0}) <= 1


class OwnOutputs:
    """A rank's own outputs, and what it sends of them. Whatever is wrong is kept to be said, so that all ranks raise.

    Args:
        outputs: What the user passed.
        share_of: Returns what this rank got.
        dst: Which rank gets the result.

    Attributes:
        header: Numbers that all others learn first. Of the call: 0 if something is wrong. Of the form: 0 if this rank
            got nothing. How many rows there are; the first one's key, and the step from key to key, 0 if they are no
            run. How many bytes a row has, and how many are pickled.
    """

    def __init__(self, outputs: Any, share_of: Callable[[], RankShare], dst: Any) -> None:
        self.header: Array = np.zeros(7, np.int64)
        self._given, self._dst, self._problem = outputs, dst, ""
        self._ways: Mapping[str, Mapping[str, Reading]] = {}
        try:
            self._share = share_of()
            self._ways = ways_to_read(outputs, self._share)
            self.choose({path: next(iter(ways)) for path, ways in self._ways.items()})
        except Exception as error:  # noqa: BLE001 - of the user's objects, too; all ranks get the error
            self._problem = f"{error}" if type(error) is Misfit else f"met {type(error).__name__}: {message_of(error)}"

    def said(self) -> dict[str, Any]:
        """Return what the others may hear, as plain values: for each leaf the ways to read it, if there are rows."""
        ways = {path: [*ways] for path, ways in self._ways.items()}
        return {"at": "" if self._problem else self._share.at, "dst": self._dst, "problem": self._problem, "ways": ways}

    def choose(self, chosen: Mapping[str, str]) -> None:
        """Read each leaf in a way, and make ready what is sent."""
        self._readings = {path: ways[chosen[path]] for path, ways in self._ways.items()}
        (fixed, objects), keys = _columns(self._readings), self._share.keys
        nest = mapped(self._given, lambda _, leaf: leaf[:0]) if self._readings else None
        form = nest, {path: reading.without_rows() for path, reading in self._readings.items()}
        self._pickled: Array = np.frombuffer(bytearray(packed((form, objects))), np.uint8)
        matrices = map(_matrix, fixed.values())
        self._rows: Array = np.concatenate([np.empty((len(keys), 0), np.uint8), *matrices], axis=1)
        texts = [(path, reading.text) for path, reading in sorted(self._readings.items())]
        self.header[:2] = _number((self._share.at, self._dst)), _number(texts) if texts else 0
        self.header[2:] = len(keys), *run_of(keys), self._rows.shape[1], len(self._pickled)

    def parts(self, headers: Array) -> Iterator[tuple[Array, Array]]:
        """Yield what this rank sends, as bytes, and how many bytes each rank sends then."""
        _, _, rows, _, steps, widths, pickled = headers.T
        if not steps.all():
            yield self._share.keys.view(np.uint8), 8 * rows
        if self._are_pickled(headers):
            yield self._pickled, pickled
        at_once = _rows_at_once(headers)
        for begin in range(0, rows.max() if widths.any() else 0, at_once):
            yield self._rows[begin : begin + at_once].reshape(-1), np.clip(rows - begin, 0, at_once) * widths.max()

    def whole(self, headers: Array, came: Iterator[Sequence[Array]]) -> Any:
        """Return all ranks' rows, put together.

        Args:
            headers: All ranks'.
            came: All ranks' parts.
        """
        if not headers[:, 1].any():  # nobody got anything
            return self._given
        keys = [np.arange(first, first + rows * step, step) for rows, first, step in headers[:, 2:5].tolist() if step]
        if len(keys) < len(headers):
            keys = [block.view(np.int64) for block in next(came)]
        nest, readings, pickled = self._given, self._readings, list[Any]()
        if self._are_pickled(headers):
            pickled = [unpacked(block.data) for block in next(came)]
            nest, readings = (nest, readings) if readings else pickled[headers[:, 1].argmax()][0]
        (fixed, objects), places = _columns(readings), places_of(keys)
        rooms = [np.empty((sum(map(len, keys)), row_bytes(form) or 0), np.uint8) for form in fixed.values()]
        _put(rooms, places, came, headers)
        whole = dict(zip(fixed, map(_as_leaf, rooms, fixed.values()), strict=True))
        for name, form in objects.items():
            whole[name] = _in_order(form, [given.get(name, form[:0]) for _, given in pickled], places)
        sizes = partial(self._share.batch_sizes, np.concatenate(keys))
        return mapped(nest, lambda path, _: readings[path].leaf(whole, path, sizes))

    def _are_pickled(self, headers: Array) -> bool:
        """Return whether pickles are sent: of rows, or of the form for a rank that got nothing."""
        got = np.count_nonzero(headers[:, 1])
        return bool(0 < got < len(headers) or _columns(self._readings)[1])


def _number(value: object) -> int:
    """Return a positive number for a value, the same on every rank."""
    return int(digest(value), 16) >> 1 | 1


def _rows_at_once(headers: Array) -> int:
    return max(1, _LARGEST_MESSAGE // (len(headers) * max(1, int(headers[:, 5].max()))))


def _columns(readings: Mapping[str, Reading]) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
    """Return the columns whose rows have a fixed number of bytes, and the others, in an order that all ranks have."""
    columns = sorted((name, rows) for reading in readings.values() for name, rows in reading.columns.items())
    fixed = {name: rows for name, rows in columns if row_bytes(rows) is not None}
    return fixed, {name: rows for name, rows in columns if name not in fixed}


def _matrix(leaf: Leaf) -> Array:
    """Return the bytes of a tensor or an array, row by row: the same memory where it lies there in order."""
    data = bytes_of(leaf).numpy() if isinstance(leaf, torch.Tensor) else np.ascontiguousarray(leaf).reshape(-1)
    return cast(Array, data.view(np.uint8).reshape(len(leaf), cast(int, row_bytes(leaf))))


def _as_leaf(matrix: Array, form: Leaf) -> Leaf:
    """Return the tensor or array that has these bytes."""
    data, shape = matrix.reshape(-1), (len(matrix), *cast(Array, form).shape[1:])
    if isinstance(form, torch.Tensor):
        return torch.from_numpy(data).view(form.dtype).reshape(shape).to(form.device)
    return data.view(cast(Array, form).dtype).reshape(shape)


def _put(rooms: Sequence[Array], places: Sequence[Array], came: Iterator[Sequence[Array]], headers: Array) -> None:
    """Put all ranks' rows into their places, as they come."""
    at_once, ends = _rows_at_once(headers), np.cumsum([room.shape[1] for room in rooms])[:-1]
    for begin, blocks in zip(count(0, at_once), came, strict=False):
        where = np.concatenate([of_rank[begin : begin + at_once] for of_rank in places])
        parts = np.split(np.concatenate(blocks).reshape(len(where), -1), ends, axis=1)
        for room, part in zip(rooms, parts, strict=True):
            room[where] = part


def _in_order(form: Leaf, given: Sequence[Any], places: Sequence[Array]) -> Leaf:
    """Return all ranks' rows that were pickled, in order."""
    rows, order = joined([form[:0], *given]), np.argsort(np.concatenate(places))
    return [rows[place] for place in order.tolist()] if isinstance(rows, list) else cast(Array, rows[order])
