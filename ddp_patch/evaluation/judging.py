"""Judge whether the ranks' outputs fit together, from what each reports."""

import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch

from ddp_patch.errors import InvalidOptionError, OutputsError, message_of
from ddp_patch.evaluation.outputs import (
    Form,
    Misfit,
    RankShare,
    Reading,
    RowKind,
    Structure,
    apart,
    at,
    filled,
    nest_text,
    readings_of,
    widest,
)
from ddp_patch.evaluation.row_order import RowKeys
from ddp_patch.evaluation.send import Column, LocalColumn
from ddp_patch.plan import Schedule
from ddp_patch.ranks.exchange import by_value, ranks_text
from ddp_patch.ranks.packing import packed

__all__ = [
    "GATHERING",
    "Agreement",
    "ExpectedRows",
    "LeafRead",
    "LocalOutputs",
    "RankRows",
    "RemoteReport",
    "judge_outputs",
    "report",
    "require_pad",
]


@dataclass(frozen=True, slots=True)
class RankRows:
    """What a rank got in a pass or a step, without padding, as other ranks need to know it.

    A row is of a sample; where whole batches are shared, of a batch.

    Attributes:
        count: How many rows.
        keys: The runs of their keys, or how many there are, if they are sent as an array.
        sizes: How many samples each batch has, where whole batches are shared; else None.
        is_last: Whether no step follows.
    """

    count: int
    keys: RowKeys | int
    sizes: Sequence[int] | None
    is_last: bool


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """What a rank got in a pass or a step.

    Attributes:
        at: What was called, and for which pass or step.
        share: By which its outputs are read.
        keys: The keys of its rows; see ``RankRows``.
        schedule: The batches of its pass.
        sent: The same, as other ranks need to know it.
    """

    at: str
    share: RankShare
    keys: RowKeys
    schedule: Schedule
    sent: RankRows


@dataclass(frozen=True, slots=True)
class RemoteReport:
    """What a rank says of its outputs.

    Attributes:
        at: What was called, and which pass or step the outputs are of.
        dst: Which rank gets the result.
        pad: What fills up narrower rows; None if nothing does.
        problem: What is wrong with the outputs, or nothing.
        has_rows: Whether this rank got anything.
        rows: What it got.
        nest: How the outputs are built.
        readings: The ways to read each leaf, by path and by what it has one of, without the leaf.
        pickled: How many bytes the columns have that are sent pickled, by what their leaf has one of and by path.
        connection: The name of the connection that this rank has kept from the step before.
    """

    at: str
    dst: int | None
    pad: Any
    problem: str = ""
    has_rows: bool = False
    rows: RankRows | None = None
    nest: Structure = None
    readings: Mapping[str, Mapping[RowKind, Reading]] = field(default_factory=dict)
    pickled: Mapping[tuple[RowKind, str], int] = field(default_factory=dict)
    connection: str | None = None


@dataclass(frozen=True, slots=True)
class LocalOutputs:
    """This rank's outputs.

    Attributes:
        expected: What it got.
        readings: The ways to read each leaf, by path and by what it has one of.
        pickled: The columns that are sent pickled, by what their leaf has one of and by path.
    """

    expected: ExpectedRows
    readings: Mapping[str, Mapping[RowKind, Reading]]
    pickled: Mapping[tuple[RowKind, str], bytes]

    def given(self, leaf: str, kind: RowKind, column: str, pad: Any) -> LocalColumn:
        """Return this rank's rows of a column."""
        reading = self.readings.get(leaf, {}).get(kind)
        if reading is None:
            return LocalColumn()
        return LocalColumn(reading.column(column, self.expected.share, pad), self.pickled.get((kind, column), b""))


def report(
    outputs: Any, expect: Callable[[], ExpectedRows], dst: int | None, pad: Any, kept: str | None
) -> tuple[RemoteReport, LocalOutputs | None]:
    """Return what this rank says of its outputs, and what it has of them; None where something is wrong.

    Whatever is wrong is said, too, so that all ranks raise.

    Args:
        outputs: This rank's.
        expect: Returns what it got; raises ``Misfit`` where that is not known.
        dst: Which rank gets the result.
        pad: What fills up narrower rows.
        kept: The name of the connection that it has kept from the step before.
    """
    try:
        own, nest = _read_as(outputs, _known(expect), pad)
        sent = {
            path: {kind: replace(each, leaves={}) for kind, each in ways.items()} for path, ways in own.readings.items()
        }
        pickled = {column: len(data) for column, data in own.pickled.items()}
        expected, has_rows = own.expected, own.expected.share.batches > 0
        whole = RemoteReport(expected.at, dst, pad, "", has_rows, expected.sent, nest, sent, pickled, kept)
        pickle.dumps(whole)  # a class that another rank cannot find
    except Misfit as misfit:
        return RemoteReport("", dst, pad, problem=str(misfit)), None
    except Exception as error:  # noqa: BLE001 - of the user's objects; all ranks get the error
        return RemoteReport("", dst, pad, problem=f"passed what cannot be built again or pickled: {error!r}"), None
    return whole, own


def _known(expect: Callable[[], ExpectedRows]) -> ExpectedRows:
    try:
        return expect()
    except Misfit:
        raise
    except Exception as error:  # of the loader
        raise Misfit(f"cannot know what it got: {message_of(error)}") from error


def _read_as(outputs: Any, expected: ExpectedRows, pad: Any) -> tuple[LocalOutputs, Structure]:
    """Return what this rank has, and how it is built."""
    nest, leaves = apart(outputs)
    if len(dict(leaves)) < len(leaves):
        raise Misfit("passed a dict whose keys look alike and are not equal")
    share = expected.share
    readings = _read(leaves, share, pad)
    pickled = {
        (kind, path): packed(reading.column(path, share, pad))
        for ways in readings.values()
        for kind, reading in ways.items()
        for path, form in reading.forms.items()
        if form.is_pickled
    }
    if len(readings) < len(leaves):  # who got nothing may pass anything empty
        nest = None
    filled(nest, dict(leaves))  # raises if it cannot be built again
    if share.batches and not readings:
        raise Misfit(f"passed {'None' if outputs is None else 'nothing'}; expected {share.expected()}")
    return LocalOutputs(expected, readings, pickled), nest


def _read(leaves: list[tuple[str, Any]], share: RankShare, pad: Any) -> dict[str, dict[RowKind, Reading]]:
    """Return the ways to read each leaf, the preferred one first; none where a rank that got nothing passes no rows."""
    found = {}
    misfits = []
    for path, leaf in leaves:
        try:
            ways = {reading.kind: reading for reading in readings_of(leaf, path, share)}
        except Misfit as misfit:
            has_rows = isinstance(leaf, list | torch.Tensor | np.ndarray) and getattr(leaf, "ndim", True) and len(leaf)
            if share.batches or has_rows:
                misfits.append(str(misfit))
            continue
        if RowKind.LIST in ways and (pad is not None or RowKind.BATCHES not in ways):
            # Of these alone rows can be padded; and a rank whose batches have one sample each means batches, as others.
            ways = {RowKind.LIST: ways[RowKind.LIST]} | ways
        found[path] = ways
    if misfits:
        raise Misfit("; ".join(misfits))
    return found if share.batches or len(found) == len(leaves) else {}


GATHERING = "Gathering outputs"

_SAME = "Call it on every rank at the same point, with outputs that are built alike on each."
_WHEN = {"gather_in_order": "after the loop over the loader", "gather_step": "in the same step of the loop"}

_WIDTHS = "Pass pad= with the number that fills up narrower rows, such as pad=0."


class LeafRead(NamedTuple):
    """How all ranks read one leaf.

    Attributes:
        kind: What it has one of.
        nest: What an entry of a list of batches looks like; else the leaf's path.
        columns: The rows, by path.
    """

    kind: RowKind
    nest: Structure
    columns: Mapping[str, Column]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How all ranks read their outputs.

    Attributes:
        nest: How the outputs are built.
        leaves: How each leaf is read, by path.
        rows: What each share's rank got.
        name: The name of the connection, new or kept by all.
    """

    nest: Structure
    leaves: Mapping[str, LeafRead]
    rows: Sequence[RankRows]
    name: str


def judge_outputs(operation: str, ranks: Collection[int], records: Mapping[int, RemoteReport]) -> Agreement:
    """Return how the ranks read their outputs.

    Args:
        operation: What the user called.
        ranks: All ranks that share the loader, of which ``dst`` must be one.
        records: What each rank that gathers together says, in the order of their shares.

    Raises:
        OutputsError: The outputs are not those of the same pass or step, or differ in form.
        InvalidOptionError: ``dst`` or ``pad`` cannot be used.
    """
    _require_options(ranks, records)
    if problems := {rank: said.problem for rank, said in records.items() if said.problem}:
        raise _refusal(
            problems,
            f"Call {operation}() on every rank {_WHEN[operation]}, with one row per sample that the rank got, padding "
            "included, and outputs that are built alike on each.",
        )
    _require_same({rank: f"calls {said.at}" for rank, said in records.items()})
    _require_same({rank: f"passed dst={said.dst}" for rank, said in records.items()})
    _require_same({rank: f"passed pad={said.pad}" for rank, said in records.items()})
    with_rows = {rank: said for rank, said in records.items() if said.has_rows}
    _require_same({rank: f"passed {nest_text(said.nest)}" for rank, said in with_rows.items()})
    # If no rank has a row, whatever one of them passes will do.
    most = max(records, key=lambda rank: len(records[rank].readings))
    sources = with_rows or {most: records[most]}
    said = next(iter(sources.values()))
    leaves = {path: _leaf(path, sources, list(records)) for path in said.readings}
    names = {record.connection for record in records.values()}
    name = names.pop() if len(names) == 1 else None
    rows = [record.rows for record in records.values() if record.rows is not None]
    return Agreement(said.nest, leaves, rows, name or uuid4().hex)


def require_pad(pad: Any) -> None:
    """Raise InvalidOptionError unless a value is a number to pad with, or None."""
    if pad is not None and not isinstance(pad, Number):
        raise InvalidOptionError(
            f"pad={pad!r} is no number to fill up narrower rows with. Pass one such as pad=0 or pad=-100, or leave it "
            "out where all rows have the same shape."
        )


def _require_options(ranks: Collection[int], records: Mapping[int, RemoteReport]) -> None:
    for said in records.values():
        require_pad(said.pad)
        if said.dst is not None and said.dst not in ranks:
            raise InvalidOptionError(
                f"dst={said.dst!r} is none of the ranks {list(ranks)} that share the loader. Pass one of these, or "
                "leave it out."
            )


def _leaf(path: str, records: Mapping[int, RemoteReport], ranks: Sequence[int]) -> LeafRead:
    """Choose how to read a leaf, whose rows may differ in widths alone."""
    ways = {rank: said.readings[path] for rank, said in records.items()}
    kinds = next(iter(ways.values()))
    kind = next((kind for kind in kinds if all(kind in of_rank for of_rank in ways.values())), None)
    if kind is None:
        raise _refusal({rank: f"passed {' or '.join(of_rank)}{at(path)}" for rank, of_rank in ways.items()}, _SAME)
    chosen = {rank: of_rank[kind] for rank, of_rank in ways.items()}
    but_for_widths = {
        rank: (nest_text(read.nest), *((column, form.but_for_widths) for column, form in sorted(read.forms.items())))
        for rank, read in chosen.items()
    }
    if len(by_value(but_for_widths)) > 1:
        raise _refusal({rank: f"passed {read.text(path)}" for rank, read in chosen.items()}, _SAME)
    first, pad = next(iter(chosen.values())), next(iter(records.values())).pad
    columns = {}
    for column in first.forms:
        form = _form(column, {rank: read.forms[column] for rank, read in chosen.items()}, pad)
        shapes = [chosen[rank].forms[column].row if rank in chosen else form.row for rank in ranks]
        sizes = [records[rank].pickled.get((kind, column), 0) if rank in records else 0 for rank in ranks]
        columns[column] = Column(form, shapes, sizes)
    return LeafRead(kind, first.nest, columns)


def _form(path: str, forms: Mapping[int, Form], pad: Any) -> Form:
    """Return the form of all ranks' rows of a column, as wide as the widest."""
    form = widest(list(forms.values()))
    if form.narrowest is not None:
        if pad is None:
            problems = {rank: f"passed {own}{at(path)}" for rank, own in forms.items()}
            raise _refusal(problems, _WIDTHS, "rows differ in width")
        form.require_holds(pad, path)
    return form


def _require_same(problems: Mapping[int, str]) -> None:
    if len(by_value(problems)) > 1:
        raise _refusal(problems, _SAME)


def _refusal(problems: Mapping[int, str], remedy: str, why: str = "the ranks' outputs do not fit") -> OutputsError:
    """Return an error with a line for each thing that is told of some ranks."""
    listed = "\n".join(f"  {ranks_text(ranks)} {what}" for what, ranks in by_value(problems).items())
    return OutputsError(f"{GATHERING}: {why}.\n{listed}\n{remedy}")
