"""What all ranks' reports come to: one way to read the outputs, or an error on every rank."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, NamedTuple
from uuid import uuid4

from ddp_patch.errors import InvalidOptionError, OutputsError
from ddp_patch.evaluation.nests import Nest, at, nest_text
from ddp_patch.evaluation.places import StepStand, WholeStand
from ddp_patch.evaluation.readings import Kind
from ddp_patch.evaluation.report import Said, SaidReading
from ddp_patch.evaluation.rows import Form, widest
from ddp_patch.evaluation.transfer import Column
from ddp_patch.ranks.comparison import by_value, ranks_text

__all__ = ["GATHERING", "Agreement", "LeafRead", "judge", "require_pad"]

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

    kind: Kind
    nest: Nest
    columns: Mapping[str, Column]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How all ranks read their outputs.

    Attributes:
        nest: How the outputs are built.
        leaves: How each leaf is read, by path.
        stands: What each share's rank got.
        name: The name of the connection, new or kept by all.
    """

    nest: Nest
    leaves: Mapping[str, LeafRead]
    stands: Sequence[WholeStand | StepStand]
    name: str


def judge(operation: str, ranks: Collection[int], records: Mapping[int, Said]) -> dict[int, Agreement]:
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
    said = next(iter(with_rows.values()), None) or max(records.values(), key=lambda one: len(one.readings))
    sources = with_rows or {rank: one for rank, one in records.items() if one is said}
    leaves = {path: _leaf(path, sources, list(records)) for path in said.readings}
    names = {one.connection for one in records.values()}
    kept = next(iter(names)) if len(names) == 1 else None
    stands = [one.stand for one in records.values() if one.stand is not None]
    return dict.fromkeys(records, Agreement(said.nest, leaves, stands, kept or uuid4().hex))


def require_pad(pad: Any) -> None:
    """Raise InvalidOptionError unless a value is a number to pad with, or None."""
    if pad is not None and not isinstance(pad, Number):
        raise InvalidOptionError(
            f"pad={pad!r} is no number to fill up narrower rows with. Pass one such as pad=0 or pad=-100, or leave it "
            "out where all rows have the same shape."
        )


def _require_options(ranks: Collection[int], records: Mapping[int, Said]) -> None:
    for said in records.values():
        require_pad(said.pad)
        if said.dst is not None and said.dst not in ranks:
            raise InvalidOptionError(
                f"dst={said.dst!r} is none of the ranks {list(ranks)} that share the loader. Pass one of these, or "
                "leave it out."
            )


def _leaf(path: str, records: Mapping[int, Said], ranks: Sequence[int]) -> LeafRead:
    """Choose how to read a leaf."""
    ways = {rank: said.readings[path] for rank, said in records.items()}
    first = next(iter(ways.values()))
    kind = next((kind for kind in first if all(kind in of_rank for of_rank in ways.values())), None)
    if kind is None:
        told = {rank: f"passed {' or '.join(of_rank)}{at(path)}" for rank, of_rank in ways.items()}
        raise _refusal(told, _SAME)
    chosen = {rank: of_rank[kind] for rank, of_rank in ways.items()}
    _require_alike(chosen)
    pad = next(iter(records.values())).pad
    one = next(iter(chosen.values()))
    columns = {column: _column(column, chosen, ranks, pad) for column in one.forms}
    return LeafRead(kind, one.nest, columns)


def _require_alike(chosen: Mapping[int, SaidReading]) -> None:
    """Raise OutputsError unless a leaf's rows differ in widths alone."""
    what = {
        rank: (nest_text(said.nest), *((path, form.but_for_widths) for path, form in sorted(said.forms.items())))
        for rank, said in chosen.items()
    }
    if len(by_value(what)) > 1:
        raise _refusal({rank: f"passed {said.text}" for rank, said in chosen.items()}, _SAME)


def _column(path: str, chosen: Mapping[int, SaidReading], ranks: Sequence[int], pad: Any) -> Column:
    """Return what the ranks know of a column, as wide as the widest."""
    forms = {rank: said.forms[path] for rank, said in chosen.items()}
    form = widest(list(forms.values()))
    if form.narrowest is not None:
        _require_padding(path, forms, form, pad)
    shapes = [forms[rank].row if rank in forms else form.row for rank in ranks]
    return Column(form, shapes, [chosen[rank].pickled[path] if rank in chosen else 0 for rank in ranks])


def _require_padding(path: str, forms: Mapping[int, Form], form: Form, pad: Any) -> None:
    if pad is None:
        told = {rank: f"passed {one}{at(path)}" for rank, one in forms.items()}
        raise _refusal(told, _WIDTHS, "rows differ in width")
    if not form.holds(pad):
        raise InvalidOptionError(
            f"pad={pad!r} cannot fill up the rows{at(path)}, which are {form}: it is no value of that dtype. "
            "Pass another number, or make the rows equally wide on every rank."
        )


def _require_same(told: Mapping[int, str]) -> None:
    if len(by_value(told)) > 1:
        raise _refusal(told, _SAME)


def _refusal(told: Mapping[int, str], remedy: str, why: str = "the ranks' outputs do not fit") -> OutputsError:
    """Return an error with a line for each thing that is told of some ranks."""
    listed = "\n".join(f"  {ranks_text(ranks)} {what}" for what, ranks in by_value(told).items())
    return OutputsError(f"{GATHERING}: {why}.\n{listed}\n{remedy}")
