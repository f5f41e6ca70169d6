"""Outputs as rows: takes nests of tensors, arrays and lists apart, describes them, and puts them together again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

__all__ = ["Form", "Leaf", "Structure", "leaves_of", "rows_at", "structure_of"]

Leaf: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | list[Any]

_ALL = "the outputs"  # the path of outputs that are a single leaf

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
        >>> print(Form("tensor", torch.float32, row=(3,)))
        tensor torch.float32 (n, 3)
    """

    kind: str
    dtype: Any = None
    row: tuple[int, ...] = ()
    device: str = "cpu"

    def __str__(self) -> str:
        if self.kind == "list":
            return "list"
        dtype = _STRINGS[self.dtype.kind] if self.is_string else self.dtype  # ranks may differ in a string's width
        return f"{self.kind} {dtype} {('n', *self.row)}".replace("'", "")

    @property
    def is_string(self) -> bool:
        """Whether this is an array of strings, whose dtype is as wide as the widest string."""
        return self.kind == "array" and self.dtype.kind in _STRINGS

    @property
    def is_pickled(self) -> bool:
        """Whether rows are sent pickled, because they do not have a fixed number of bytes."""
        return self.kind == "list" or self.is_string or (self.kind == "array" and self.dtype.hasobject)


@dataclass(frozen=True, slots=True)
class Structure:
    """Outputs without their rows: a nest of paths, and what the leaf at each path looks like.

    Attributes:
        nest: Dicts and tuples with a path in place of each leaf; None if there is nothing to put together.
        forms: Each leaf's form, by path.
        rows: Each leaf's number of rows, by path.
        wrong: What the nest holds and must not hold, or nothing.

    Examples:
        >>> structure = structure_of({"logits": torch.zeros(2, 3), "names": ["a", "b"]})
        >>> structure.forms_text()
        "['logits']: tensor torch.float32 (n, 3); ['names']: list"
        >>> structure.rebuilt({"['logits']": [1], "['names']": [2]})
        {'logits': [1], 'names': [2]}
    """

    nest: Any
    forms: Mapping[str, Form]
    rows: Mapping[str, int]
    wrong: str = ""

    def problem(self, rows: int, unit: str) -> str:
        """Return why these cannot be the outputs for ``rows`` samples, or an empty string.

        Args:
            rows: How many rows each leaf must have.
            unit: What a row stands for, in plural.
        """
        if not rows and not any(self.rows.values()):
            return ""
        if self.wrong:
            return f"gives {self.wrong}"
        wrong = [f"{found} rows at {path}" for path, found in self.rows.items() if found != rows]
        if wrong or not self.rows:
            return f"gives {', '.join(wrong) or 'nothing'} for {rows} {unit}"
        return ""

    def forms_text(self) -> str:
        """Describe the leaves, without their numbers of rows."""
        return "; ".join(f"{path}: {form}" for path, form in sorted(self.forms.items()))

    def nest_text(self) -> str:
        """Describe how dicts and tuples are nested."""
        return _nest_text(self.nest)

    def widened(self, others: Sequence["Structure"]) -> "Structure":
        """Return this structure with strings wide enough for the others' strings too."""

        def widest(path: str) -> Any:
            return np.result_type(*(other.forms[path].dtype for other in others))

        forms = {
            path: replace(form, dtype=widest(path)) if form.is_string else form for path, form in self.forms.items()
        }
        return replace(self, forms=forms)

    def rebuilt(self, leaves: Mapping[str, Any]) -> Any:
        """Return the nest with these leaves, by path."""
        return _filled(self.nest, leaves)


def structure_of(outputs: Any) -> Structure:
    """Return the structure of outputs."""
    found = dict(leaves_of(outputs))
    for path, leaf in found.items():
        if wrong := _wrong(leaf, path):
            return Structure(None, {}, {}, wrong)
    forms = {path: _form(leaf) for path, leaf in found.items()}
    return Structure(_emptied(outputs, ""), forms, {path: len(leaf) for path, leaf in found.items()})


def leaves_of(outputs: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path.

    Examples:
        >>> list(leaves_of({"logits": ([1], [2])}))
        [("['logits'][0]", [1]), ("['logits'][1]", [2])]
    """
    match outputs:
        case dict():
            for key, value in outputs.items():
                yield from leaves_of(value, f"{path}[{key!r}]")
        case tuple():
            for place, value in enumerate(outputs):
                yield from leaves_of(value, f"{path}[{place}]")
        case _:
            yield path or _ALL, outputs


def rows_at(leaf: Leaf, places: Sequence[int]) -> Leaf:
    """Return the rows of a leaf at some places."""
    return [leaf[place] for place in places] if isinstance(leaf, list) else leaf[list(places)]


def _wrong(leaf: Any, path: str) -> str:
    """Return what a leaf is that has no rows to send, or an empty string."""
    match leaf:
        case torch.Tensor() if (
            leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized or hasattr(leaf, "full_tensor")
        ):
            return f"a sparse, nested, quantized or distributed tensor at {path}, which has no rows to send"
        case np.ma.MaskedArray():
            return f"a masked array at {path}, whose mask would be lost"
        case torch.Tensor() | np.ndarray() if leaf.ndim:
            return ""
        case list():
            return ""
        case torch.Tensor() | np.ndarray():
            return f"a {type(leaf).__name__} without dimensions at {path}, which has no rows"
        case None:
            return f"None at {path}, which is no tensor, array or list"
    return f"a {type(leaf).__name__} at {path}, which is no tensor, array or list"


def _form(leaf: Leaf) -> Form:
    if isinstance(leaf, torch.Tensor):
        return Form("tensor", leaf.dtype, tuple(leaf.shape[1:]), leaf.device.type)
    if isinstance(leaf, np.ndarray):
        return Form("array", leaf.dtype, leaf.shape[1:])
    return Form("list")


def _emptied(outputs: Any, path: str) -> Any:
    """Return the nest with each leaf replaced by its path."""
    match outputs:
        case dict():
            return {key: _emptied(value, f"{path}[{key!r}]") for key, value in outputs.items()}
        case tuple():
            return _tuple_like(outputs, [_emptied(value, f"{path}[{place}]") for place, value in enumerate(outputs)])
    return path or _ALL


def _filled(nest: Any, leaves: Mapping[str, Any]) -> Any:
    """Return the nest with each path replaced by its leaf."""
    match nest:
        case None:
            return None
        case dict():
            return {key: _filled(value, leaves) for key, value in nest.items()}
        case tuple():
            return _tuple_like(nest, [_filled(value, leaves) for value in nest])
    return leaves[nest]


def _nest_text(nest: Any) -> str:
    match nest:
        case dict():
            return "{" + ", ".join(sorted(f"{key!r}: {_nest_text(value)}" for key, value in nest.items())) + "}"
        case tuple():
            return f"{type(nest).__name__}(" + ", ".join(map(_nest_text, nest)) + ")"
    return "rows"


def _tuple_like(given: tuple[Any, ...], parts: Sequence[Any]) -> tuple[Any, ...]:
    """Return the parts as a tuple, or as a named tuple if ``given`` is one."""
    return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
