"""What the rows of a tensor, an array or a list look like."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

__all__ = ["Form", "Leaf", "form_of", "joined_rows", "rows_at", "widest", "wrong_leaf"]

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


def rows_at(leaf: Leaf, places: Sequence[int]) -> Leaf:
    """Return the rows of a leaf at some places; a view where these follow each other."""
    if isinstance(places, range) and places == range(len(places)):
        return leaf[: len(places)]
    return [leaf[place] for place in places] if isinstance(leaf, list) else leaf[list(places)]


def joined_rows(leaves: Sequence[Leaf], pad: Any = 0) -> Leaf:
    """Return the rows of several leaves as one leaf on the first one's device, as wide as the widest.

    Examples:
        >>> joined_rows([torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5]])], pad=-1).tolist()
        [[1, 2, -1], [3, 4, 5]]
    """
    first = leaves[0]
    if isinstance(first, list):
        return [row for leaf in leaves for row in leaf]
    form, rows = widest([form_of(leaf) for leaf in leaves]), sum(map(len, leaves))
    result: Any
    if isinstance(first, torch.Tensor):
        result = torch.empty((rows, *form.row), dtype=form.dtype, device=first.device)
    else:
        result = np.empty((rows, *form.row), form.dtype)
    if form.narrowest is not None:
        result[...] = pad
    done = 0
    for leaf in leaves:
        given = leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
        result[(slice(done, done + len(leaf)), *map(slice, form_of(leaf).row))] = given
        done += len(leaf)
    return result  # type: ignore[no-any-return]  # a tensor or an array


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
