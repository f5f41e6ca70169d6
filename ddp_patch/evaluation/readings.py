"""How a rank's outputs can be read: one row for each sample, one for each batch, or a list of the batches' outputs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any

from ddp_patch.errors import InvalidOptionError
from ddp_patch.evaluation.nests import Nest, at, filled, leaves_of, nest_of, nest_text
from ddp_patch.evaluation.rows import Form, Leaf, form_of, joined_rows, rows_at, widest, wrong_leaf

__all__ = ["Kind", "Misfit", "Reading", "Share", "cut", "padded_lists", "readings_of"]


class Kind(StrEnum):
    """What a tensor, an array or a list of the outputs has one of."""

    SAMPLES = "one row per sample"
    BATCHES = "one row per batch"
    LIST = "a list of batches"


class Misfit(Exception):  # noqa: N818 - it says what the outputs do not fit, and is no error to users
    """Says why outputs cannot be those of a rank."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank got, by which its outputs are read.

    Attributes:
        samples: How many samples, padding included; None where that is not known.
        real_samples: Which of them are not padding.
        sizes: How many samples each of its batches has; None where a list of the batches' outputs is not taken.
        real_batches: Where one row for each batch is taken: which batches are not padding; else None.
        batches: How many batches it got.
        sample: What a sample is called.
    """

    samples: int | None
    real_samples: Sequence[int]
    batches: int
    sizes: Sequence[int] | None = None
    real_batches: Sequence[int] | None = None
    sample: str = "sample"

    def rows(self, kind: Kind) -> Sequence[int]:
        """Return which rows of a leaf are not padding."""
        return self.real_batches or range(0) if kind is Kind.BATCHES else self.real_samples

    def expected(self) -> str:
        """Say how many rows the outputs may have."""
        if not self.batches:
            return "none, since this rank got no batch"
        ways = [] if self.real_batches is None else [f"{self.batches}, one per batch"]
        if self.samples is not None:
            ways.append(f"{self.samples}, one per {self.sample}")
        if self.sizes is not None:
            ways.append("a list with one entry per batch")
        return ", or ".join(ways)


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read a leaf of the outputs.

    Attributes:
        kind: What it has one of.
        nest: What one entry of a list of batches looks like; else the leaf's path.
        forms: What the rows of each column look like, by path. A leaf is one column; a list of batches has one for each
            leaf of an entry.
        leaves: The columns' rows, padding included: of a list of batches, each batch's.
    """

    kind: Kind
    nest: Nest
    forms: Mapping[str, Form]
    leaves: Mapping[str, Sequence[Leaf]] = field(repr=False, default_factory=dict)

    def column(self, path: str, share: Share, pad: Any) -> Leaf:
        """Return the rows of a column that are not padding."""
        leaves = self.leaves[path]
        return rows_at(leaves[0] if len(leaves) == 1 else joined_rows(leaves, pad), share.rows(self.kind))

    def text(self, path: str) -> str:
        """Describe the rows, but for how many there are."""
        if self.kind is Kind.LIST:
            return f"a list of batches of {_entry_text(self.nest, self.forms)}{at(path)}"
        return f"{self.forms[path]}{at(path)}"


def _entry_text(nest: Nest, forms: Mapping[str, Form]) -> str:
    if len(forms) == 1 and isinstance(nest, str):
        return str(forms[nest])
    return f"{nest_text(nest)} with " + ", ".join(f"{path}: {form}" for path, form in sorted(forms.items()))


def readings_of(leaf: Any, path: str, share: Share) -> list[Reading]:
    """Return all ways to read a leaf.

    Raises:
        Misfit: There is none.
    """
    if wrong := wrong_leaf(leaf):
        raise Misfit(f"passed {wrong}{at(path)}")
    found = [Reading(kind, path, {path: form_of(leaf)}, {path: [leaf]}) for kind in _kinds(len(leaf), share)]
    why = ""
    if share.sizes and isinstance(leaf, list) and len(leaf) == len(share.sizes):
        try:
            found.append(_read_list(leaf, path, share.sizes))
        except Misfit as misfit:
            why = f"; read as one entry per batch, {misfit}"
    if not found:
        raise Misfit(f"passed {len(leaf)} rows{at(path)}; expected {share.expected()}{why}")
    return found


def _kinds(rows: int, share: Share) -> Iterator[Kind]:
    if share.real_batches is not None and rows == share.batches:
        yield Kind.BATCHES
    if rows == share.samples:
        yield Kind.SAMPLES


def _read_list(entries: Sequence[Any], path: str, sizes: Sequence[int]) -> Reading:
    """Read a list with the outputs of each batch."""
    base = f"{path}[i]"
    columns: dict[str, list[Leaf]] = {one: [] for one, _ in leaves_of(entries[0], base)}
    nest = nest_of(entries[0], base)
    for number, (entry, size) in enumerate(zip(entries, sizes, strict=True)):
        if nest_text(nest_of(entry, base)) != nest_text(nest):
            raise Misfit(f"entry {number} is built otherwise than entry 0")
        for one, leaf in leaves_of(entry, base):
            where = one.replace("[i]", f"[{number}]", 1)
            if wrong := wrong_leaf(leaf):
                raise Misfit(f"it has {wrong}, at {where}")
            if len(leaf) != size:
                raise Misfit(f"it has {len(leaf)} rows at {where} for a batch of {size}")
            columns[one].append(leaf)
    forms = {}
    for one, leaves in columns.items():
        each = [form_of(leaf) for leaf in leaves]
        if len({form.but_for_widths for form in each}) > 1:
            raise Misfit(f"its entries have different dtypes or dimensions at {one}")
        forms[one] = widest(each)
    if not forms:
        raise Misfit("its entries are empty")
    filled(nest, dict(leaves_of(entries[0], base)))  # raises if it cannot be built again
    return Reading(Kind.LIST, nest, forms, columns)


def cut(nest: Nest, columns: Mapping[str, Leaf], sizes: Sequence[int]) -> list[Any]:
    """Return a list of batches of which the columns have the rows, with so many rows each.

    Examples:
        >>> cut("x", {"x": [1, 2, 3]}, [2, 1])
        [[1, 2], [3]]
    """
    ends = list(accumulate(sizes))
    return [
        filled(nest, {path: rows[end - size : end] for path, rows in columns.items()})
        for size, end in zip(sizes, ends, strict=True)
    ]


def padded_lists(outputs: Any, pad: Any) -> Any:
    """Return outputs of one process whose lists of batches have rows of one width each.

    Examples:
        >>> [batch.tolist() for batch in padded_lists([torch.tensor([[1]]), torch.tensor([[2, 3]])], 0)]
        [[[1, 0]], [[2, 3]]]
    """
    return filled(nest_of(outputs), {path: _padded(leaf, pad) for path, leaf in leaves_of(outputs)})


def _padded(leaf: Any, pad: Any) -> Any:
    if not isinstance(leaf, list) or not leaf:
        return leaf
    try:
        sizes = [len(next(leaves_of(entry))[1]) for entry in leaf]
        reading = _read_list(leaf, "", sizes)
    except (Misfit, StopIteration, TypeError):  # no list of batches
        return leaf
    ragged = [form for form in reading.forms.values() if form.narrowest is not None]
    if not ragged:
        return leaf
    for form in ragged:
        if not form.holds(pad):
            raise InvalidOptionError(
                f"pad={pad!r} cannot fill up the rows, which are {form}: it is no value of that dtype. "
                "Pass another number, or make the rows equally wide."
            )
    return cut(reading.nest, {path: joined_rows(leaves, pad) for path, leaves in reading.leaves.items()}, sizes)
