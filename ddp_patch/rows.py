"""Outputs as rows: nests of tensors, arrays and lists taken apart, told of in short, and put together again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

__all__ = ["Form", "Leaf", "Structure", "leaves_of", "structure_of"]

Leaf: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | list[Any]"

_ALL = "the outputs"  # the path of outputs that are no nest


@dataclass(frozen=True, slots=True)
class Form:
    """What the rows of a tensor, an array or a list are.

    Attributes:
        kind: "tensor", "array" or "list".
        dtype: Of a tensor or an array.
        row: The shape of a row of these.
        device: The type of the device that a tensor, or those in a list, lie on.
        is_bytes: Whether rows are so many bytes each; else they are objects, to be pickled.
    """

    kind: str
    dtype: Any = None
    row: tuple[int, ...] = ()
    device: str = "cpu"
    is_bytes: bool = False

    def __str__(self) -> str:
        if self.kind == "list":
            return "list"
        # Strings of other lengths are strings all the same.
        dtype = self.dtype if self.is_bytes else self.dtype.kind
        return f"{self.kind} {dtype} {('n', *self.row)}".replace("'", "")


@dataclass(frozen=True, slots=True)
class Structure:
    """A nest with its leaves replaced by their paths, and what these are.

    Attributes:
        nest: Dicts and tuples, with a path in the place of each leaf.
        forms: What each leaf is, by its path.
        rows: How many rows each has, by its path.
        wrong: What is in the nest and should not be.
    """

    nest: Any
    forms: Mapping[str, Form]
    rows: Mapping[str, int]
    wrong: str = ""

    def problem(self, samples: int) -> str:
        """Return why this cannot be the output for so many samples, or nothing."""
        if not samples and not any(self.rows.values()):
            return ""
        if self.wrong:
            return f"gives {self.wrong}"
        wrong = [f"{rows} rows at {path}" for path, rows in self.rows.items() if rows != samples]
        if wrong or not self.rows:
            return f"gives {', '.join(wrong) or 'nothing'} for {samples} samples (or batches)"
        return ""

    def forms_text(self) -> str:
        """Return what the leaves are."""
        return "; ".join(f"{path}: {form}" for path, form in sorted(self.forms.items()))

    def merged(self, others: Sequence["Structure"]) -> "Structure":
        """Return the structure with types that hold the others' strings too."""
        forms = {
            path: form
            if form.kind == "list" or form.is_bytes
            else replace(form, dtype=np.result_type(*(other.forms[path].dtype for other in others)))
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
        case torch.Tensor() if leaf.layout != torch.strided or leaf.is_nested:
            return f"a sparse or nested tensor at {path}, which has no rows to send"
        case torch.Tensor() | np.ndarray() if leaf.ndim:
            return ""
        case list():
            return ""
        case torch.Tensor() | np.ndarray():
            return f"a {type(leaf).__name__} without dimensions at {path}, which has no rows"
    return f"{type(leaf).__name__} at {path}, which is no tensor, array or list"


def _form(leaf: Leaf) -> Form:
    if isinstance(leaf, torch.Tensor):
        return Form("tensor", leaf.dtype, tuple(leaf.shape[1:]), leaf.device.type, is_bytes=True)
    if isinstance(leaf, np.ndarray):
        return Form(
            "array", leaf.dtype, leaf.shape[1:], is_bytes=not leaf.dtype.hasobject and leaf.dtype.kind not in "US"
        )
    devices = [tensor.device.type for element in leaf[:1] for tensor in _tensors(element)]
    return Form("list", device=next(iter(devices), "cpu"))


def _tensors(element: Any) -> Iterator[torch.Tensor]:
    match element:
        case torch.Tensor():
            yield element
        case Mapping():
            for value in element.values():
                yield from _tensors(value)
        case list() | tuple():
            for value in element:
                yield from _tensors(value)


def _emptied(outputs: Any, path: str) -> Any:
    match outputs:
        case dict():
            return {key: _emptied(value, f"{path}[{key!r}]") for key, value in outputs.items()}
        case tuple():
            parts = [_emptied(value, f"{path}[{place}]") for place, value in enumerate(outputs)]
            return type(outputs)(*parts) if hasattr(outputs, "_fields") else tuple(parts)
    return path or _ALL


def _filled(nest: Any, leaves: Mapping[str, Any]) -> Any:
    match nest:
        case dict():
            return {key: _filled(value, leaves) for key, value in nest.items()}
        case tuple():
            parts = [_filled(value, leaves) for value in nest]
            return type(nest)(*parts) if hasattr(nest, "_fields") else tuple(parts)
    return leaves[nest]
