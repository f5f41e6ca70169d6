"""What a rank sends of its outputs, and what all ranks' come to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from ddp_patch.evaluation.judging import Agreement, ExpectedRows, LocalOutputs
from ddp_patch.evaluation.outputs import Form, Leaf, RowKind, cut, filled, room_for
from ddp_patch.evaluation.row_order import Keys, RowOrder, SampleOrder, array_of
from ddp_patch.evaluation.rows import Column, Transport, bytes_of_rows, kept, put, sent
from ddp_patch.plan import Schedule
from ddp_patch.ranks.packing import packed, unpacked

__all__ = ["Sending", "batch_sizes", "result_of"]

Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class Sending:
    """What a rank sends of its outputs.

    Attributes:
        agreement: How all ranks read theirs; None where that is not known yet.
        own: This rank's; None where something is wrong with them.
        columns: Its rows of each column, without padding, or what they are pickled.
        pickled: Those that are pickled, together.
        header: What all others learn first: a digest of what must be the same; how many rows there are, of batches
            where whole ones are shared, and of samples; where their keys begin, and their step, which is 0 if the keys
            are sent, too; and how many bytes are pickled.
    """

    agreement: Agreement | None
    own: LocalOutputs | None
    columns: Mapping[str, Leaf | bytes]
    pickled: Array
    header: Array

    @classmethod
    def of(cls, agreement: Agreement | None, own: LocalOutputs | None, *beside: object) -> "Sending":
        """Return what this rank sends if all read so; ``beside`` must be the same on all, too."""
        if agreement is None or own is None:
            return cls(None, own, {}, np.empty(0, np.uint8), np.zeros(6, np.int64))
        columns, keys = dict(own.columns(agreement)), own.expected.keys
        objects = {name: rows for name, rows in columns.items() if isinstance(rows, bytes)}
        pickled = np.frombuffer(bytearray(packed(objects) if objects else b""), np.uint8)
        run = (keys.start, keys.step) if isinstance(keys, range) else (0, 0)
        counts = map(own.expected.count, (RowKind.BATCHES, RowKind.SAMPLES))
        header = np.array([agreement.digest(*beside), *counts, *run, len(pickled)], np.int64)
        return cls(agreement, own, columns, pickled, header)


class _Layout:
    """Where the rows of all shares go. It is known when its columns have come.

    Args:
        expected: What this rank got.
        headers: All shares' headers.

    Attributes:
        columns: What is to be sent for it: keys that are no run, and sizes of whole batches.
    """

    def __init__(self, expected: ExpectedRows, headers: Array) -> None:
        _, batches, samples, *_ = headers.T
        self.columns: list[Column] = []
        self._schedule = expected.schedule
        self._counts = {RowKind.BATCHES: batches, RowKind.SAMPLES: samples, RowKind.LIST: samples}
        self._orders: dict[RowKind, RowOrder | SampleOrder] = {}
        self._sizes: Sequence[Array] | None = None
        if headers[:, 4].all():
            self._keys: Sequence[Keys] = [
                range(first, first + count * step, step) for _, count, _, first, step, _ in headers.tolist()
            ]
        else:
            column, self._keys = kept(batches, array_of(expected.keys))
            self.columns.append(column)
        if expected.sizes is not None:
            column, self._sizes = kept(batches, np.array(expected.sizes, np.int64))
            self.columns.append(column)

    def counts(self, kind: RowKind) -> Array:
        """Return how many rows of a kind each share has."""
        of_shares: Array = self._counts[kind]
        return of_shares

    def order(self, kind: RowKind) -> RowOrder | SampleOrder:
        """Return the order of rows of a kind."""
        if kind not in self._orders:
            order = RowOrder(self._keys)
            is_of_units = self._sizes is None or kind is RowKind.BATCHES
            self._orders[kind] = order if is_of_units else SampleOrder(order, self._sizes or ())
        return self._orders[kind]

    def places(self, kind: RowKind, begin: int, end: int) -> Sequence[Array]:
        """Return where these rows of each share go."""
        return self.order(kind).places(begin, end)

    def batch_sizes(self) -> Sequence[int]:
        """Return how many samples that are not padding each batch of the unpatched loader has."""
        order = self.order(RowKind.LIST)
        if isinstance(order, SampleOrder):
            sizes: list[int] = order.sizes.tolist()
            return sizes
        return batch_sizes(self._schedule, self._keys, order.rows)


def result_of(sending: Sending, headers: Array, transport: Transport, *, receives: bool = True) -> Any:
    """Send and receive all rows, and return them put together; None on a rank that does not receive them.

    Args:
        sending: What this rank sends.
        headers: All shares' headers.
        transport: Moves bytes.
        receives: Whether this rank gets the result.
    """
    agreement, own = cast(Agreement, sending.agreement), cast(LocalOutputs, sending.own)
    layout = _Layout(own.expected, headers)
    columns, rows = layout.columns, dict[str, Any]()
    for read in agreement.leaves.values():
        counts = layout.counts(read.kind)
        for name, form in read.forms.items():
            if not form.is_pickled:
                rows[name] = room_for(form, int(counts.sum()) if receives else 0)
                own_rows = bytes_of_rows(cast("Leaf | None", sending.columns.get(name)))
                columns.append(
                    Column(form.row_bytes, counts, own_rows, put(rows[name], partial(layout.places, read.kind)))
                )
    objects, came = kept(headers[:, 5], sending.pickled)
    sent([*columns, objects], transport)
    if not receives:
        return None
    of_shares = [unpacked(data.data) if len(data) else {} for data in came]
    leaves = {}
    for path, read in agreement.leaves.items():
        for name, form in read.forms.items():
            if form.is_pickled:
                given = [unpacked(share[name]) if name in share else None for share in of_shares]
                rows[name] = _objects(form, layout.order(read.kind), given)
            elif form.kind == "tensor":
                rows[name] = rows[name].to(_device_of(form, sending.columns.get(name)))
        is_list = read.kind is RowKind.LIST
        leaves[path] = (
            cut(read.nest, {name: rows[name] for name in read.forms}, layout.batch_sizes()) if is_list else rows[path]
        )
    return filled(agreement.nest, leaves)


def _objects(form: Form, order: RowOrder | SampleOrder, of_shares: Sequence[Any]) -> Leaf:
    """Return rows that are objects, in order."""
    given = [rows for rows in of_shares if rows is not None and len(rows)]
    if form.kind == "array" and not form.dtype.hasobject and given:  # as wide as the widest string
        form = replace(form, dtype=np.result_type(*(rows.dtype for rows in given)))
    whole: Any = room_for(form, order.rows)
    for places, rows in zip(order.places(), of_shares, strict=True):
        if isinstance(whole, np.ndarray) and rows is not None:
            whole[places] = rows
        else:
            for place, row in zip(places.tolist(), rows or (), strict=True):
                whole[place] = row
    return cast(Leaf, whole)


def _device_of(form: Form, own: object) -> torch.device:
    """Return where a result lies: where this rank's own rows do, or else on its current device of the rows' kind."""
    return own.device if isinstance(own, torch.Tensor) else torch.device(form.device)


def batch_sizes(schedule: Schedule, keys: Sequence[Keys], rows: int) -> Sequence[int]:
    """Return how many samples that are not padding each batch of the unpatched loader has.

    Args:
        schedule: The batches of this rank.
        keys: The keys of each share's rows.
        rows: How many rows there are.
    """
    size = schedule.batching.size
    if schedule.batch_plan is not None:
        return [record.samples_of_all or 0 for record in schedule.records()]
    if len(schedule.parts) > 1:
        of_batches = np.concatenate([array_of(run) // size for run in keys])
        counts: list[int] = np.unique(of_batches, return_counts=True)[1].tolist()
        return counts
    return [min(size, rows - at) for at in range(0, rows, size)]
