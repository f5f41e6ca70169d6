"""What each rank says of its outputs before anything is sent."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ddp_patch.errors import message_of
from ddp_patch.evaluation.nests import Nest, filled, leaves_of, nest_of
from ddp_patch.evaluation.places import StepStand, WholeStand
from ddp_patch.evaluation.readings import Kind, Misfit, Reading, Share, readings_of
from ddp_patch.evaluation.rows import Form
from ddp_patch.evaluation.transfer import Given
from ddp_patch.ranks.packing import packed

__all__ = ["Got", "Own", "Said", "SaidReading", "report"]


@dataclass(frozen=True, slots=True)
class SaidReading:
    """One way to read a leaf, as other ranks need to know it.

    Attributes:
        nest: See ``Reading``.
        forms: What the rows of each column look like, by path.
        pickled: How many bytes the rows of a column have that are sent pickled, by path.
        text: The rows in words, but for how many there are.
    """

    nest: Nest
    forms: Mapping[str, Form]
    pickled: Mapping[str, int]
    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """What a rank says of its outputs.

    Attributes:
        at: What was called, and which pass or step the outputs are of.
        dst: Which rank gets the result.
        pad: What fills up narrower rows; None if nothing does.
        problem: What is wrong with the outputs, or nothing.
        has_rows: Whether this rank got anything.
        stand: What it got.
        nest: How the outputs are built.
        readings: The ways to read each leaf, by path and by what it has one of.
        connection: The name of the connection that this rank has kept from the step before.
    """

    at: str
    dst: int | None
    pad: Any
    problem: str = ""
    has_rows: bool = False
    stand: WholeStand | StepStand | None = None
    nest: Nest = None
    readings: Mapping[str, Mapping[Kind, SaidReading]] = field(default_factory=dict)
    connection: str | None = None


@dataclass(frozen=True, slots=True)
class Got:
    """What a rank got in a pass or a step.

    Attributes:
        at: What was called, and for which pass or step.
        share: By which its outputs are read.
        stand: The same, as the others need to know it.
    """

    at: str
    share: Share
    stand: WholeStand | StepStand


@dataclass(frozen=True, slots=True)
class Own:
    """This rank's outputs.

    Attributes:
        share: What it got; None where that is not known.
        stand: The same, as it was found here.
        readings: The ways to read each leaf, by path and by what it has one of.
        pickled: The columns that are sent pickled, by what their leaf has one of and by path.
    """

    share: Share | None = None
    stand: WholeStand | StepStand | None = None
    readings: Mapping[str, Mapping[Kind, Reading]] = field(default_factory=dict)
    pickled: Mapping[tuple[Kind, str], bytes] = field(default_factory=dict)

    def given(self, leaf: str, kind: Kind, column: str, pad: Any) -> Given:
        """Return this rank's rows of a column."""
        reading = self.readings.get(leaf, {}).get(kind)
        if reading is None or self.share is None:
            return Given()
        return Given(reading.column(column, self.share, pad), self.pickled.get((kind, column), b""))


def report(outputs: Any, got: Callable[[], Got], dst: int | None, pad: Any, kept: str | None) -> tuple[Said, Own]:
    """Return what this rank says of its outputs, and what it has of them.

    Whatever is wrong is said, too, so that all ranks raise.

    Args:
        outputs: This rank's.
        got: Returns what it got; raises ``Misfit`` where that is not known.
        dst: Which rank gets the result.
        pad: What fills up narrower rows.
        kept: The name of the connection that it has kept from the step before.
    """
    try:
        mine = got()
    except Misfit as misfit:
        return Said("", dst, pad, problem=str(misfit)), Own()
    except Exception as error:  # noqa: BLE001 - of the loader; all ranks get the error
        return Said("", dst, pad, problem=f"cannot know what it got: {message_of(error)}"), Own()
    try:
        readings = _read(outputs, mine.share, pad)
        own = Own(mine.share, mine.stand, readings, _pickled(readings, mine.share, pad))
        said = {
            path: {kind: _said(path, kind, reading, own) for kind, reading in ways.items()}
            for path, ways in readings.items()
        }
        has_rows = mine.share.batches > 0
        leaves = dict(leaves_of(outputs))
        nest = nest_of(outputs) if len(readings) == len(leaves) else None  # who got nothing may pass anything empty
        filled(nest, leaves)  # raises if it cannot be built again
        if has_rows and not readings:
            raise Misfit(f"passed {'None' if outputs is None else 'nothing'}; expected {mine.share.expected()}")
        whole = Said(mine.at, dst, pad, "", has_rows, mine.stand.sent, nest, said, kept)
        pickle.dumps(whole)  # a class that another rank cannot find
    except Misfit as misfit:
        return Said("", dst, pad, problem=str(misfit)), Own()
    except Exception as error:  # noqa: BLE001 - of the user's objects; all ranks get the error
        return Said("", dst, pad, problem=f"passed what cannot be built again or pickled: {error!r}"), Own()
    return whole, own


def _read(outputs: Any, share: Share, pad: Any) -> dict[str, dict[Kind, Reading]]:
    """Return the ways to read each leaf, the preferred one first."""
    leaves = list(leaves_of(outputs))
    if len({path for path, _ in leaves}) < len(leaves):
        raise Misfit("passed a dict whose keys look alike and are not equal")
    if not share.batches:
        return _read_nothing(leaves, share)
    found = {}
    misfits = []
    for path, leaf in leaves:
        try:
            ways = {reading.kind: reading for reading in readings_of(leaf, path, share)}
        except Misfit as misfit:
            misfits.append(str(misfit))
            continue
        if Kind.LIST in ways and (pad is not None or Kind.BATCHES not in ways):
            # Of these alone rows can be padded; and a rank whose batches have one sample each means batches, as others.
            ways = {Kind.LIST: ways[Kind.LIST]} | ways
        found[path] = ways
    if misfits:
        raise Misfit("; ".join(misfits))
    return found


def _read_nothing(leaves: list[tuple[str, Any]], share: Share) -> dict[str, dict[Kind, Reading]]:
    """Read the outputs of a rank that got nothing: anything that has no rows."""
    found = {}
    for path, leaf in leaves:
        try:
            ways = readings_of(leaf, path, share)
        except Misfit:
            if isinstance(leaf, list) or (isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim and len(leaf)):
                raise
            continue
        found[path] = {Kind.SAMPLES: replace(ways[0], kind=Kind.SAMPLES)}
    return found if len(found) == len(leaves) else {}


def _pickled(readings: Mapping[str, Mapping[Kind, Reading]], share: Share, pad: Any) -> dict[tuple[Kind, str], bytes]:
    return {
        (kind, path): packed(reading.column(path, share, pad))
        for ways in readings.values()
        for kind, reading in ways.items()
        for path, form in reading.forms.items()
        if form.is_pickled
    }


def _said(path: str, kind: Kind, reading: Reading, own: Own) -> SaidReading:
    pickled = {column: len(own.pickled.get((kind, column), b"")) for column in reading.forms}
    return SaidReading(reading.nest, reading.forms, pickled, reading.text(path))
