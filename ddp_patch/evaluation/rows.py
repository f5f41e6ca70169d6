"""Outputs as rows: nests of tensors, arrays and lists taken apart, told of in short, and put together again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

__all__ = ["Form", "Leaf", "Structure", "leaves_of", "structure_of"]

Leaf: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | list[Any]

_ALL = "the outputs"  # the path of outputs that are no nest

_STRINGS = {"U": "str", "S": "bytes"}


@dataclass(frozen=True, slots=True)
class Form:
    """What the rows of a tensor, an array or a list are.

    Attributes:
        kind: "tensor", "array" or "list".
        dtype: Of a tensor or an array.
        row: The shape of a row of these.
        device: The type of the device that a tensor lies on.
    """

    kind: str
    dtype: Any = None
    row: tuple[int, ...] = ()
    device: str = "cpu"

    def __str__(self) -> str:
        if self.kind == "list":
            return "list"
        dtype = _STRINGS[self.dtype.kind] if self.is_string else self.dtype  # of any width
        return f"{self.kind} {dtype} {('n', *self.row)}".replace("'", "")

    @property
    def is_string(self) -> bool:
        """Whether it is an array of strings, which are as wide as the widest of them."""
        return self.kind == "array" and self.dtype.kind in _STRINGS

    @property
    def is_pickled(self) -> bool:
        """Whether rows are objects, or of various widths; else they are so many bytes each."""
        return self.kind == "list" or self.is_string or (self.kind == "array" and self.dtype.hasobject)


@dataclass(frozen=True, slots=True)
class Structure:
    """A nest with its leaves replaced by their paths, and what these are.

    Attributes:
        nest: Dicts and tuples, with a path in the place of each leaf; None where there is nothing to put together.
        forms: What each leaf is, by its path.
        rows: How many rows each has, by its path.
        wrong: What is in the nest and should not be.
    """

    nest: Any
    forms: Mapping[str, Form]
    rows: Mapping[str, int]
    wrong: str = ""

    def problem(self, rows: int, unit: str) -> str:
        """Return why this cannot be the output for so many samples, or nothing."""
        if not rows and not any(self.rows.values()):
            return ""
        if self.wrong:
            return f"gives {self.wrong}"
        wrong = [f"{found} rows at {path}" for path, found in self.rows.items() if found != rows]
        if wrong or not self.rows:
            return f"gives {', '.join(wrong) or 'nothing'} for {rows} {unit}"
        return ""

    def forms_text(self) -> str:
        """Return what the leaves are."""
        return "; ".join(f"{path}: {form}" for path, form in sorted(self.forms.items()))

    def nest_text(self) -> str:
        """Return how dicts and tuples lie in one another."""
        return _nest_text(self.nest)

    def widened(self, others: Sequence["Structure"]) -> "Structure":
        """Return the structure with strings as wide as the others' too."""
        forms = {
            path: replace(form, dtype=np.result_type(*(other.forms[path].dtype for other in others)))
            if form.is_string
            else form
            for path, form in self.forms.items()
        }
        return replace(self, forms=forms)

    def rebuilt(self, leaves: Mapping[str, Any]) -> Any:
        """Return the nest with these leaves."""
        return _filled(self.nest, leaves)


def structure_of(outputs: Any) -> Structure:
    """Take outputs apart."""
    found = dict(leaves_of(outputs))
    wrong = [what for what in map(_wrong, found.items()) if what]
    if wrong:
        return Structure(None, {}, {}, wrong[0])
    forms = {path: _form(leaf) for path, leaf in found.items()}
    return Structure(_emptied(outputs, ""), forms, {path: len(leaf) for path, leaf in found.items()})


def leaves_of(outputs: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, such as ``['logits'][0]``."""
    match outputs:
        case dict():
            for key, value in outputs.items():
                yield from leaves_of(value, f"{path}[{key!r}]")
        case tuple():
            for place, value in enumerate(outputs):
                yield from leaves_of(value, f"{path}[{place}]")
        case _:
            yield path or _ALL, outputs


def _wrong(found: tuple[str, Any]) -> str:
    path, leaf = found
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
    match outputs:
        case dict():
            return {key: _emptied(value, f"{path}[{key!r}]") for key, value in outputs.items()}
        case tuple():
            return _tuple_like(outputs, [_emptied(value, f"{path}[{place}]") for place, value in enumerate(outputs)])
    return path or _ALL


def _filled(nest: Any, leaves: Mapping[str, Any]) -> Any:
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
    """Return the parts as a tuple, or as a named one of the given class."""
    return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
