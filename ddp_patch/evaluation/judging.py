"""Judge whether the ranks' outputs fit together, from what each reports."""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ddp_patch.errors import InvalidOptionError, OutputsError, message_of
from ddp_patch.evaluation.outputs import (
    Leaf,
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
)
from ddp_patch.evaluation.row_order import Keys
from ddp_patch.plan import Schedule
from ddp_patch.ranks.exchange import by_value, ranks_text
from ddp_patch.ranks.packing import packed

__all__ = ["GATHERING", "Agreement", "ExpectedRows", "LocalOutputs", "Report", "judge_outputs", "report", "said_by"]

GATHERING = "Gathering outputs"

_SAME = "Call it on every rank at the same point, with outputs that are built alike on each."
_WHEN = {"gather_in_order": "after the loop over the loader", "gather_step": "in the same step of the loop"}
_WIDTHS = "Where rows differ in width, pad them, or pass each as an element of a list, as outputs.extend(rows) does."


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """What a rank got in a pass or a step, without padding.

    A row is of a sample; where whole batches are shared, of a batch.

    Attributes:
        at: What was called, and for which pass or step.
        share: By which its outputs are read.
        keys: The keys of its rows.
        sizes: How many samples each batch has, where whole batches are shared; else None.
        schedule: The batches of its pass.
    """

    at: str
    share: RankShare
    keys: Keys
    sizes: Sequence[int] | None
    schedule: Schedule

    def count(self, kind: RowKind) -> int:
        """Return how many rows an output has of a kind."""
        return len(self.keys) if self.sizes is None or kind is RowKind.BATCHES else sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How all ranks read their outputs.

    Attributes:
        nest: How the outputs are built.
        leaves: How each leaf is read, by path, without the leaf.
    """

    nest: Structure
    leaves: Mapping[str, Reading]

    def digest(self, *beside: object) -> int:
        """Return a positive number that is the same on ranks which read alike."""
        texts = [(path, read.kind, nest_text(read.nest), read.text(path)) for path, read in self.leaves.items()]
        told = repr((nest_text(self.nest), texts, beside)).encode()
        return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest()) >> 1 | 1


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of its outputs.

    Attributes:
        at: What was called, and which pass or step the outputs are of.
        dst: Which rank gets the result.
        problem: What is wrong with the outputs, or nothing.
        has_rows: Whether this rank got anything.
        nest: How the outputs are built.
        readings: The ways to read each leaf, by path and by what it has one of, without the leaf.
    """

    at: str
    dst: Any
    problem: str = ""
    has_rows: bool = False
    nest: Structure = None
    readings: Mapping[str, Mapping[RowKind, Reading]] = field(default_factory=dict)

    def preferred(self, ranks: Sequence[int]) -> Agreement | None:
        """Return how this rank reads its outputs unless others cannot read theirs so; None where it needs to hear."""
        if not self.has_rows or not (self.dst is None or self.dst in ranks):
            return None
        return Agreement(self.nest, {path: next(iter(self.readings[path].values())) for path in sorted(self.readings)})


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

    def columns(self, agreement: Agreement) -> Iterator[tuple[str, Leaf | bytes]]:
        """Yield the rows of each column that this rank has, or what they are pickled."""
        for path, ways in self.readings.items():
            if (read := ways.get(agreement.leaves[path].kind)) is None:
                continue  # it got nothing
            for name in read.forms:
                pickled = self.pickled.get((read.kind, name))
                yield name, read.column(name, self.expected.share) if pickled is None else pickled


def report(outputs: Any, expect: Callable[[], ExpectedRows], dst: Any) -> tuple[Report, LocalOutputs | None]:
    """Return what this rank says of its outputs, and what it has of them; None where something is wrong.

    Whatever is wrong is said, too, so that all ranks raise.

    Args:
        outputs: This rank's.
        expect: Returns what it got; raises ``Misfit`` where that is not known.
        dst: Which rank gets the result.
    """
    try:
        expected = _known(expect)
        nest, leaves = apart(outputs)
        if len(dict(leaves)) < len(leaves):
            raise Misfit("passed a dict whose keys look alike and are not equal")
        readings = _read(leaves, expected.share)
        if len(readings) < len(leaves):  # who got nothing may pass anything empty
            nest = None
        filled(nest, dict(leaves))  # raises if it cannot be built again
        if expected.share.batches and not readings:
            raise Misfit(f"passed {'None' if outputs is None else 'nothing'}; expected {expected.share.expected()}")
        pickled = {
            (kind, name): packed(read.column(name, expected.share))
            for ways in readings.values()
            for kind, read in ways.items()
            for name, form in read.forms.items()
            if form.is_pickled
        }
        said = {
            path: {kind: replace(each, leaves={}) for kind, each in ways.items()} for path, ways in readings.items()
        }
    except Misfit as misfit:
        return Report("", dst, str(misfit)), None
    except Exception as error:  # noqa: BLE001 - of the user's objects; all ranks get the error
        return Report("", dst, f"passed what cannot be built again or pickled: {error!r}"), None
    return Report(expected.at, dst, "", expected.share.batches > 0, nest, said), LocalOutputs(
        expected, readings, pickled
    )


def _known(expect: Callable[[], ExpectedRows]) -> ExpectedRows:
    try:
        return expect()
    except Misfit:
        raise
    except Exception as error:  # of the loader
        raise Misfit(f"cannot know what it got: {message_of(error)}") from error


def _read(leaves: list[tuple[str, Any]], share: RankShare) -> dict[str, dict[RowKind, Reading]]:
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
        if RowKind.LIST in ways and RowKind.BATCHES not in ways:
            # A rank whose batches have one sample each means batches, as others.
            ways = {RowKind.LIST: ways[RowKind.LIST]} | ways
        found[path] = ways
    if misfits:
        raise Misfit("; ".join(misfits))
    return found if share.batches or len(found) == len(leaves) else {}


def said_by(own: Report) -> bytes:
    """Return a report to send to others: what of it cannot be pickled is a problem, too."""
    try:
        return packed(own)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # a class that another rank cannot find
        return packed(Report("", own.dst, f"passed what cannot be built again or pickled: {error!r}"))


def judge_outputs(operation: str, records: Mapping[int, Report]) -> Agreement:
    """Return how the ranks read their outputs.

    Args:
        operation: What the user called.
        records: What each rank that gathers says, in the order of their shares.

    Raises:
        OutputsError: The outputs are not those of the same pass or step, or differ in form.
        InvalidOptionError: ``dst`` is none of the ranks.
    """
    for said in records.values():
        if said.dst is not None and said.dst not in records:
            raise InvalidOptionError(
                f"dst={said.dst!r} is none of the ranks {list(records)} that share the loader with this one. Pass one "
                "of these, or leave it out."
            )
    if problems := {rank: said.problem for rank, said in records.items() if said.problem}:
        raise _refusal(
            problems,
            f"Call {operation}() on every rank {_WHEN[operation]}, with one row per sample that the rank got, padding "
            "included, and outputs that are built alike on each.",
        )
    _require_same({rank: f"calls {said.at}" for rank, said in records.items()})
    _require_same({rank: f"passed dst={said.dst}" for rank, said in records.items()})
    with_rows = {rank: said for rank, said in records.items() if said.has_rows}
    _require_same({rank: f"passed {nest_text(said.nest)}" for rank, said in with_rows.items()})
    # If no rank has a row, whatever one of them passes will do.
    most = max(records, key=lambda rank: len(records[rank].readings))
    sources = with_rows or {most: records[most]}
    first = next(iter(sources.values()))
    return Agreement(first.nest, {path: _leaf(path, sources) for path in sorted(first.readings)})


def _leaf(path: str, records: Mapping[int, Report]) -> Reading:
    """Choose how to read a leaf."""
    ways = {rank: said.readings[path] for rank, said in records.items()}
    kinds = next(iter(ways.values()))
    kind = next((kind for kind in kinds if all(kind in of_rank for of_rank in ways.values())), None)
    if kind is None:
        raise _refusal({rank: f"passed {' or '.join(of_rank)}{at(path)}" for rank, of_rank in ways.items()}, _SAME)
    chosen = {rank: of_rank[kind] for rank, of_rank in ways.items()}
    _require_same({rank: f"passed {read.text(path)}" for rank, read in chosen.items()}, f"{_SAME} {_WIDTHS}")
    return next(iter(chosen.values()))


def _require_same(problems: Mapping[int, str], remedy: str = _SAME) -> None:
    if len(by_value(problems)) > 1:
        raise _refusal(problems, remedy)


def _refusal(problems: Mapping[int, str], remedy: str) -> OutputsError:
    """Return an error with a line for each thing that is told of some ranks."""
    listed = "\n".join(f"  {ranks_text(ranks)} {what}" for what, ranks in by_value(problems).items())
    return OutputsError(f"{GATHERING}: the ranks' outputs do not fit.\n{listed}\n{remedy}")
