"""Outputs as users make them: nests of tensors, rows, and how they are read."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from itertools import accumulate, chain
from typing import Any, TypeAlias

import numpy as np
import torch

__all__ = [
    "Form",
    "Leaf",
    "Misfit",
    "Node",
    "RankShare",
    "Reading",
    "RowKind",
    "Structure",
    "apart",
    "at",
    "cut",
    "filled",
    "form_of",
    "nest_text",
    "readings_of",
    "room_for",
    "wrong_leaf",
]


@dataclass(frozen=True, slots=True)
class Node:
    """A dict, a tuple or a dataclass without its leaves.

    Attributes:
        kind: The class to make.
        parts: What it holds, by key, place or field.
    """

    kind: type
    parts: Mapping[Any, "Structure"]


# What stands where: a node, the path of a leaf, or None where the user has None.
Structure: TypeAlias = Node | str | None


def at(path: str) -> str:
    """Return how a message says where a leaf stands; nothing where the outputs are that leaf."""
    return path and f" at {path}"


def apart(value: Any, path: str = "") -> tuple[Structure, list[tuple[str, Any]]]:
    """Return a nest with each leaf replaced by its path, and every leaf with its path; None is no leaf.

    Examples:
        >>> apart({"logits": ([1], None, [2])})[1]
        [("['logits'][0]", [1]), ("['logits'][2]", [2])]
    """
    if value is None:
        return None, []
    kind = type(value)
    parts: list[tuple[Any, str, Any]]
    if is_dataclass(value) and not isinstance(value, type):  # models' outputs of transformers are dicts, too
        parts = [(each.name, f".{each.name}", getattr(value, each.name)) for each in fields(value)]
    elif isinstance(value, dict):
        kind, parts = dict, [(key, f"[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [(name, f".{name}", getattr(value, name)) for name in value._fields]
    elif isinstance(value, tuple):
        kind, parts = tuple, [(place, f"[{place}]", part) for place, part in enumerate(value)]
    else:
        return path, [(path, value)]
    found = [(key, *apart(part, path + step)) for key, step, part in parts]
    return Node(kind, {key: nest for key, nest, _ in found}), [leaf for *_, leaves in found for leaf in leaves]


def filled(nest: Structure, leaves: Mapping[str, Any]) -> Any:
    """Return a nest with each path replaced by its leaf.

    Examples:
        >>> nest, leaves = apart({"logits": (1.5, None)})
        >>> filled(nest, dict(leaves))
        {'logits': (1.5, None)}
    """
    if nest is None:
        return None
    if isinstance(nest, str):
        return leaves[nest]
    parts = {key: filled(part, leaves) for key, part in nest.parts.items()}
    if nest.kind is dict:
        return parts
    if nest.kind is tuple:
        return tuple(parts.values())
    if not is_dataclass(nest.kind):  # a named tuple
        return nest.kind(**parts)
    made = nest.kind(**{each.name: parts[each.name] for each in fields(nest.kind) if each.init})
    for name in parts:
        object.__setattr__(made, name, parts[name])  # a __post_init__ may have changed it
    return made


def nest_text(nest: Structure) -> str:
    """Describe how a nest is built, alike for all that are built alike.

    Examples:
        >>> nest_text(apart({"b": 1, "a": (2, None)})[0])
        "{'a': tuple(rows, None), 'b': rows}"
    """
    if not isinstance(nest, Node):
        return "None" if nest is None else "rows"
    texts = {key: nest_text(part) for key, part in nest.parts.items()}
    if nest.kind is dict:
        return "{" + ", ".join(sorted(f"{key!r}: {text}" for key, text in texts.items())) + "}"
    if nest.kind is tuple:
        return f"tuple({', '.join(texts.values())})"
    return f"{nest.kind.__name__}({', '.join(f'{key}={text}' for key, text in texts.items())})"


Leaf: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | list[Any]

_STRINGS = {"U": "str", "S": "bytes"}


@dataclass(frozen=True, slots=True)
class Form:
    """What the rows of a tensor, an array or a list look like.

    Attributes:
        kind: "tensor", "array" or "list".
        dtype: The dtype of a tensor or an array.
        row: The shape of one row of a tensor or an array.
        device: The type of a tensor's device.

    Examples:
        >>> print(Form("tensor", torch.float32, row=(3, 5)))
        tensor torch.float32 (n, 3, 5)
    """

    kind: str
    dtype: Any = None
    row: tuple[int, ...] = ()
    device: str = "cpu"

    def __str__(self) -> str:
        if self.kind == "list":
            return "list"
        # An array of strings is as wide as its widest.
        dtype = _STRINGS.get(self.dtype.kind, self.dtype) if self.kind == "array" else self.dtype
        return f"{self.kind} {dtype} ({', '.join(['n', *map(str, self.row)])}{'' if self.row else ','})"

    @property
    def row_bytes(self) -> int:
        """How many bytes a row of a tensor or an array has."""
        return int(self.dtype.itemsize) * math.prod(self.row)

    @property
    def is_pickled(self) -> bool:
        """Whether rows are sent pickled, because they do not have a fixed number of bytes."""
        if self.kind != "array":
            return self.kind == "list"
        return self.dtype.hasobject or self.dtype.kind in _STRINGS


def form_of(leaf: Leaf) -> Form:
    """Return the form of a leaf that is none of the wrong ones."""
    if isinstance(leaf, torch.Tensor):
        return Form("tensor", leaf.dtype, tuple(leaf.shape[1:]), device=leaf.device.type)
    if isinstance(leaf, np.ndarray):
        return Form("array", leaf.dtype, leaf.shape[1:])
    return Form("list")


def room_for(form: Form, rows: int) -> Leaf:
    """Return room for rows of a form, on the CPU."""
    if form.kind == "list":
        return [None] * rows
    if form.kind == "array":
        return np.empty((rows, *form.row), form.dtype)
    return torch.empty((rows, *form.row), dtype=form.dtype, device="cpu")


def _joined(leaves: Sequence[Any]) -> Any:
    """Return the rows of several leaves of one form as one leaf, on the first one's device."""
    first = leaves[0]
    if len(leaves) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat([leaf.detach().to(first.device) for leaf in leaves])
    return np.concatenate(leaves) if isinstance(first, np.ndarray) else list(chain.from_iterable(leaves))


def wrong_leaf(leaf: Any) -> str:
    """Return what a leaf is that has no rows to send, or an empty string."""
    match leaf:
        case torch.Tensor() if (
            leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized or hasattr(leaf, "full_tensor")
        ):
            return "a sparse, nested, quantized or distributed tensor, which has no rows to send"
        case np.ma.MaskedArray():
            return "a masked array, whose mask would be lost"
        case torch.Tensor() | np.ndarray() if leaf.ndim:
            return ""
        case list():
            return ""
        case torch.Tensor() | np.ndarray():
            return f"a {type(leaf).__name__} without dimensions, which has no rows"
    return f"a {type(leaf).__name__}, which is no tensor, array or list"


class RowKind(StrEnum):
    """What a tensor, an array or a list of the outputs has one of."""

    SAMPLES = "one row per sample"
    BATCHES = "one row per batch"
    LIST = "a list of batches"


class Misfit(Exception):  # noqa: N818 - it says what the outputs do not fit, and is no error to users
    """Says why outputs cannot be those of a rank."""


@dataclass(frozen=True, slots=True)
class RankShare:
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

    def rows(self, kind: RowKind) -> Sequence[int]:
        """Return which rows of a leaf are not padding."""
        return self.real_batches or range(0) if kind is RowKind.BATCHES else self.real_samples

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

    kind: RowKind
    nest: Structure
    forms: Mapping[str, Form]
    leaves: Mapping[str, Sequence[Leaf]] = field(repr=False, default_factory=dict)

    def column(self, path: str, share: RankShare) -> Leaf:
        """Return the rows of a column that are not padding."""
        leaf, rows = _joined(self.leaves[path]), share.rows(self.kind)
        if isinstance(rows, range) and rows == range(len(rows)):
            return leaf[: len(rows)]  # type: ignore[no-any-return]  # a view
        return [leaf[row] for row in rows] if isinstance(leaf, list) else leaf[list(rows)]

    def text(self, path: str) -> str:
        """Describe the rows, but for how many there are."""
        if self.kind is RowKind.LIST:
            return f"a list of batches of {_entry_text(self.nest, self.forms)}{at(path)}"
        return f"{self.forms[path]}{at(path)}"


def _entry_text(nest: Structure, forms: Mapping[str, Form]) -> str:
    if len(forms) == 1 and isinstance(nest, str):
        return str(forms[nest])
    return f"{nest_text(nest)} with " + ", ".join(f"{path}: {form}" for path, form in sorted(forms.items()))


def readings_of(leaf: Any, path: str, share: RankShare) -> list[Reading]:
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


def _kinds(rows: int, share: RankShare) -> Iterator[RowKind]:
    if share.real_batches is not None and rows == share.batches:
        yield RowKind.BATCHES
    if rows == share.samples:
        yield RowKind.SAMPLES


def _read_list(entries: Sequence[Any], path: str, sizes: Sequence[int]) -> Reading:
    """Read a list with the outputs of each batch."""
    base = f"{path}[i]"
    nest, first = apart(entries[0], base)
    columns: dict[str, list[Leaf]] = {column: [] for column, _ in first}
    for number, (entry, size) in enumerate(zip(entries, sizes, strict=True)):
        built, leaves = apart(entry, base)
        if nest_text(built) != nest_text(nest):
            raise Misfit(f"entry {number} is built otherwise than entry 0")
        for column, leaf in leaves:
            where = column.replace("[i]", f"[{number}]", 1)
            if wrong := wrong_leaf(leaf):
                raise Misfit(f"it has {wrong}, at {where}")
            if len(leaf) != size:
                raise Misfit(f"it has {len(leaf)} rows at {where} for a batch of {size}")
            columns[column].append(leaf)
    forms = {}
    for column, of_entries in columns.items():
        each = {f"{form}": form for form in map(form_of, of_entries)}
        if len(each) > 1:
            found = " and ".join(sorted(each)[:2])
            raise Misfit(f"its entries have different dtypes or dimensions, {found}, at {column}")
        forms[column] = form_of(of_entries[0])
    if not forms:
        raise Misfit("its entries are empty")
    filled(nest, dict(first))  # raises if it cannot be built again
    return Reading(RowKind.LIST, nest, forms, columns)


def cut(nest: Structure, columns: Mapping[str, Leaf], sizes: Sequence[int]) -> list[Any]:
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
