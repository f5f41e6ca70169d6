"""Outputs as users make them: nests of tensors, rows, and how they are read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch

from ddp_patch.errors import InvalidOptionError
from ddp_patch.evaluation.row_order import Place

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
    "empty_rows",
    "filled",
    "form_of",
    "joined_rows",
    "nest_text",
    "padded_lists",
    "put",
    "readings_of",
    "widest",
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
        row: The shape of one row of a tensor or an array; of several tensors, the widest.
        narrowest: The narrowest, where several tensors differ; else None.
        device: The type of a tensor's device.

    Examples:
        >>> print(Form("tensor", torch.float32, row=(3, 5), narrowest=(3, 4)))
        tensor torch.float32 (n, 3, 4..5)
    """

    kind: str
    dtype: Any = None
    row: tuple[int, ...] = ()
    narrowest: tuple[int, ...] | None = None
    device: str = "cpu"

    def __str__(self) -> str:
        if self.kind == "list":
            return "list"
        least = self.row if self.narrowest is None else self.narrowest
        dims = [str(most) if few == most else f"{few}..{most}" for few, most in zip(least, self.row, strict=True)]
        return f"{self.kind} {self.dtype_text} ({', '.join(['n', *dims])}{'' if dims else ','})"

    @property
    def dtype_text(self) -> str:
        """The dtype's name; ranks may differ in a string's width."""
        return _STRINGS[self.dtype.kind] if self.is_string else str(self.dtype)

    @property
    def but_for_widths(self) -> tuple[str, str, int]:
        """What padding cannot make alike: kind, dtype and number of dimensions."""
        return self.kind, "" if self.kind == "list" else self.dtype_text, len(self.row)

    @property
    def is_string(self) -> bool:
        """Whether this is an array of strings, whose dtype is as wide as the widest string."""
        return self.kind == "array" and self.dtype.kind in _STRINGS

    @property
    def is_pickled(self) -> bool:
        """Whether rows are sent pickled, because they do not have a fixed number of bytes."""
        return self.kind == "list" or self.is_string or (self.kind == "array" and self.dtype.hasobject)

    def require_holds(self, pad: Any, path: str = "") -> None:
        """Raise InvalidOptionError unless a number can stand in these rows of a leaf."""
        if not self.holds(pad):
            raise InvalidOptionError(
                f"pad={pad!r} cannot fill up the rows{at(path)}, which are {self}: it is no value of that dtype. "
                "Pass another number, or make the rows equally wide on every rank."
            )

    def holds(self, pad: Any) -> bool:
        """Tell whether a number can stand in these rows: as it is, or rounded where they are of floats.

        Examples:
            >>> [Form("tensor", torch.uint8).holds(pad) for pad in (0, -100, 0.5)]
            [True, False, False]
        """
        if self.is_string:
            return False
        try:
            found = torch.full((), pad, dtype=self.dtype) if self.kind == "tensor" else np.full((), pad, self.dtype)
            is_exact = self.dtype.is_floating_point if self.kind == "tensor" else self.dtype.kind in "fcO"
            return bool(np.isfinite(found.item()) == np.isfinite(pad)) if is_exact else bool(found.item() == pad)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return False


def widest(forms: Sequence[Form]) -> Form:
    """Return the form that rows of several forms fit into, which differ in widths alone."""
    first, rows = forms[0], [form.row for form in forms]
    least = [form.row if form.narrowest is None else form.narrowest for form in forms]
    row, few = tuple(map(max, zip(*rows, strict=True))), tuple(map(min, zip(*least, strict=True)))
    dtype = np.result_type(*(form.dtype for form in forms)) if first.is_string else first.dtype
    return replace(first, dtype=dtype, row=row, narrowest=None if few == row else few)


def form_of(leaf: Leaf) -> Form:
    """Return the form of a leaf that is none of the wrong ones."""
    if isinstance(leaf, torch.Tensor):
        return Form("tensor", leaf.dtype, tuple(leaf.shape[1:]), device=leaf.device.type)
    if isinstance(leaf, np.ndarray):
        return Form("array", leaf.dtype, leaf.shape[1:])
    return Form("list")


def empty_rows(form: Form, rows: int, device: torch.device | None, pad: Any) -> Any:
    """Return room for rows of a form, filled up with ``pad`` where some are narrower; tensors are on the device."""
    if form.kind == "list":
        return [None] * rows
    result: Any
    if form.kind == "array":
        result = np.empty((rows, *form.row), form.dtype)
    else:
        result = torch.empty((rows, *form.row), dtype=form.dtype, device=device)
    if form.narrowest is not None:
        result[...] = pad
    return result


# torch cannot put values of every dtype at indices.
_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _indexable(tensor: torch.Tensor) -> torch.Tensor:
    dtype = _OF_SIZE.get(tensor.dtype.itemsize)
    return tensor if dtype is None else tensor.resolve_conj().resolve_neg().view(dtype)


def put(rows: Any, result: Any, place: Place) -> None:
    """Put rows into their places in the result, whose rows may be wider."""
    if isinstance(rows, torch.Tensor):
        rows = rows.detach()
    where: Any = place
    if isinstance(place, range):
        where = slice(place.start, place.stop, place.step)
    elif isinstance(result, list):
        for each, row in zip(place.tolist(), rows, strict=True):
            result[each] = row
        return
    elif isinstance(result, torch.Tensor):
        where, rows, result = torch.from_numpy(place), _indexable(rows), _indexable(result)
    within = () if isinstance(result, list) else tuple(map(slice, rows.shape[1:]))
    result[(where, *within) if within else where] = rows


def joined_rows(leaves: Sequence[Leaf], pad: Any = 0) -> Any:
    """Return the rows of several leaves as one leaf on the first one's device, as wide as the widest.

    Examples:
        >>> joined_rows([torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5]])], pad=-1).tolist()
        [[1, 2, -1], [3, 4, 5]]
    """
    first, ends = leaves[0], accumulate(map(len, leaves))
    device = first.device if isinstance(first, torch.Tensor) else None
    result = empty_rows(widest(list(map(form_of, leaves))), sum(map(len, leaves)), device, pad)
    for leaf, end in zip(leaves, ends, strict=True):
        put(leaf, result, range(end - len(leaf), end))
    return result


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

    def column(self, path: str, share: RankShare, pad: Any) -> Leaf:
        """Return the rows of a column that are not padding."""
        leaves, rows = self.leaves[path], share.rows(self.kind)
        leaf: Any = leaves[0] if len(leaves) == 1 else joined_rows(leaves, pad)
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
        each = list(map(form_of, of_entries))
        if len({form.but_for_widths for form in each}) > 1:
            raise Misfit(f"its entries have different dtypes or dimensions at {column}")
        forms[column] = widest(each)
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


def padded_lists(outputs: Any, pad: Any) -> Any:
    """Return outputs of one process whose lists of batches have rows of one width each.

    Examples:
        >>> [batch.tolist() for batch in padded_lists([torch.tensor([[1]]), torch.tensor([[2, 3]])], 0)]
        [[[1, 0]], [[2, 3]]]
    """
    nest, leaves = apart(outputs)
    return filled(nest, {path: _padded(leaf, pad) for path, leaf in leaves})


def _padded(leaf: Any, pad: Any) -> Any:
    if not isinstance(leaf, list) or not leaf:
        return leaf
    try:
        sizes = [len(apart(entry)[1][0][1]) for entry in leaf]
        reading = _read_list(leaf, "", sizes)
    except (Misfit, IndexError, TypeError):  # no list of batches
        return leaf
    ragged = [form for form in reading.forms.values() if form.narrowest is not None]
    if not ragged:
        return leaf
    for form in ragged:
        form.require_holds(pad)
    return cut(reading.nest, {path: joined_rows(leaves, pad) for path, leaves in reading.leaves.items()}, sizes)
