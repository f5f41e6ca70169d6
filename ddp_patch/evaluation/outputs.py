"""Outputs in nests of tensors, arrays and lists: how a rank reads its own, and how the ranks compare theirs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate, chain
from typing import Any, TypeAlias

import numpy as np
import torch

from ddp_patch.errors import OutputsError
from ddp_patch.evaluation.shares import Misfit, RankShare
from ddp_patch.ranks.exchange import by_value, ranks_text

Leaf: TypeAlias = torch.Tensor | np.ndarray[Any, Any] | list[Any]


def _at(path: str) -> str:
    """Return the position of a leaf for a message; empty if the outputs are the leaf itself."""
    return path and f" at {path}"


def mapped(nest: Any, leaf_of: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a nest of dicts, tuples and dataclasses with other leaves; None is no leaf.

    Args:
        nest: The nest.
        leaf_of: Returns the new leaf for a path and a leaf.
        path: The path to the nest.

    Examples:
        >>> mapped({"logits": ([1], None, [2])}, lambda path, leaf: path)
        {'logits': ("['logits'][0]", None, "['logits'][2]")}
    """
    if is_dataclass(nest) and not isinstance(nest, type):  # models' outputs of transformers are dicts, too
        names = {each.name: each.init for each in fields(nest)}
        parts = {name: mapped(getattr(nest, name), leaf_of, f"{path}.{name}") for name in names}
        made = type(nest)(**{name: part for name, part in parts.items() if names[name]})
        for name, part in parts.items():
            object.__setattr__(made, name, part)  # a __post_init__ may have changed the field
        return made
    if isinstance(nest, dict):
        if len({*map(repr, nest)}) < len(nest):
            raise Misfit("passed a dict whose keys look alike and are not equal")
        return {key: mapped(part, leaf_of, f"{path}[{key!r}]") for key, part in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(mapped(getattr(nest, name), leaf_of, f"{path}.{name}") for name in nest._fields))
    if isinstance(nest, tuple):
        return tuple(mapped(part, leaf_of, f"{path}[{place}]") for place, part in enumerate(nest))
    return None if nest is None else leaf_of(path, nest)


def _leaves_of(nest: Any, path: str = "") -> dict[str, Any]:
    """Return all leaves of a nest by path; raise Misfit if the nest cannot be rebuilt."""
    found: dict[str, Any] = {}
    mapped(nest, found.setdefault, path)
    return found


def row_bytes(leaf: Leaf) -> int | None:
    """Return how many bytes each row of a leaf has; None if rows differ, so that rows are pickled."""
    if isinstance(leaf, list) or (isinstance(leaf, np.ndarray) and (leaf.dtype.hasobject or leaf.dtype.kind in "US")):
        return None
    return int(leaf.dtype.itemsize) * math.prod(leaf.shape[1:])


def _text_of(leaf: Leaf) -> str:
    """Describe a leaf without its number of rows."""
    if isinstance(leaf, list):
        return "list"
    shape = ", ".join(["n", *map(str, leaf.shape[1:])])
    if isinstance(leaf, torch.Tensor):
        return f"tensor {leaf.dtype} ({shape})"
    return f"array {leaf.dtype.type.__name__ if leaf.dtype.kind in 'US' else leaf.dtype} ({shape})"


def _why_no_rows(leaf: Any) -> str:
    """Describe a leaf that has no rows to send; return an empty text for any other leaf."""
    if isinstance(leaf, list):
        return ""
    if not isinstance(leaf, torch.Tensor | np.ndarray):
        return f"a {type(leaf).__name__}, which is no tensor, array or list"
    is_odd = isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized)
    if is_odd or hasattr(leaf, "full_tensor"):
        return "a sparse, nested, quantized or distributed tensor, which has no rows to send"
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked array, whose mask would be lost"
    return "" if leaf.ndim else f"a {type(leaf).__name__} without dimensions, which has no rows"


def joined(leaves: Sequence[Any]) -> Any:
    """Return the rows of several leaves of the same form as one leaf, on the first leaf's device."""
    first, *others = leaves
    if not others:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat([leaf.detach().to(first.device) for leaf in leaves])
    return np.concatenate(leaves) if isinstance(first, np.ndarray) else list(chain.from_iterable(leaves))


def _cut(leaf: Leaf, sizes: Sequence[int]) -> list[Leaf]:
    """Return a leaf's rows in pieces of these sizes."""
    return [leaf[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _taken(leaf: Leaf, share: RankShare) -> Leaf:
    """Return the rows that are not padding; a view if these rows come first."""
    real = share.real.tolist()
    if real == list(range(len(real))):
        return leaf[: len(real)]
    return [leaf[row] for row in real] if isinstance(leaf, list) else leaf[real]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a tensor, an array or a list of the outputs is read.

    Attributes:
        text: The leaf's form without its number of rows: the same on all ranks that read alike.
        columns: The rows that are not padding, by path.
        entry: For a list of batches, an entry without rows, whose leaves each have a column; else None.
    """

    text: str
    columns: Mapping[str, Leaf]
    entry: Any = None

    def without_rows(self) -> "Reading":
        """Return the reading without rows, for a rank that has none."""
        return replace(self, columns={path: rows[:0] for path, rows in self.columns.items()})

    def leaf(self, rows: Mapping[str, Leaf], path: str, batch_sizes: Callable[[], Sequence[int]]) -> Any:
        """Return the leaf of all ranks' rows, which ``batch_sizes`` cuts into batches."""
        if self.entry is None:
            return rows[path]
        sizes = batch_sizes()
        pieces = {column: iter(_cut(rows[column], sizes)) for column in self.columns}
        return [mapped(self.entry, lambda column, _: next(pieces[column]), f"{path}[i]") for _ in sizes]


def read(outputs: Any, share: RankShare) -> dict[str, Reading]:
    """Return how each leaf of a rank's outputs is read, by path; an empty dict if the rank has no rows.

    Raises:
        Misfit: The outputs cannot be read as those of the rank.
    """
    leaves = _leaves_of(outputs)
    if not len(share.sizes) and not any(len(leaf) for leaf in leaves.values() if not _why_no_rows(leaf)):
        return {}
    if not leaves:
        raise Misfit(f"passed {'None' if outputs is None else 'nothing'}; expected {share.expected()}")
    return {path: _read_leaf(leaf, path, share) for path, leaf in leaves.items()}


def _read_leaf(leaf: Any, path: str, share: RankShare) -> Reading:
    """Read a leaf: as one entry per batch, if it is a list that fits; else as rows."""
    if why := _why_no_rows(leaf):
        raise Misfit(f"passed {why}{_at(path)}")
    if share.takes_lists and isinstance(leaf, list) and len(leaf) == len(share.sizes) > 0:
        try:
            return _read_list(leaf, f"{path}[i]", share)
        except Misfit as misfit:
            why = f"; read as one entry per batch, {misfit}"
    if len(leaf) != share.samples or not len(share.sizes):
        raise Misfit(f"passed {len(leaf)} rows{_at(path)}; expected {share.expected()}{why}")
    return Reading(_text_of(leaf), {path: _taken(leaf, share)})


def _read_list(entries: Sequence[Any], base: str, share: RankShare) -> Reading:
    """Read a list with the outputs of each batch."""
    leaves = [_leaves_of(entry, base) for entry in entries]
    texts = []
    for number, (of_entry, size) in enumerate(zip(leaves, share.sizes.tolist(), strict=True)):
        for path, leaf in of_entry.items():
            if why := _why_no_rows(leaf) or ("" if len(leaf) == size else f"{len(leaf)} rows for a batch of {size}"):
                raise Misfit(f"entry {number} has {why}{_at(path.removeprefix(base))}")
        parts = [f"{_text_of(leaf)}{_at(path.removeprefix(base))}" for path, leaf in sorted(of_entry.items())]
        texts.append(", ".join(parts) or "nothing")
        if texts[number] != texts[0]:
            raise Misfit(f"entry {number} is {texts[number]}, not {texts[0]}, as entry 0")
    rows = {path: _taken(joined([of_entry[path] for of_entry in leaves]), share) for path in leaves[0]}
    return Reading(f"a list of batches of {texts[0]}", rows, mapped(entries[0], lambda _, leaf: leaf[:0], base))


GATHERING = "Gathering outputs"

_WHEN = {"gather_in_order": "after the loop over the loader", "gather_step": "in the same step of the loop"}


def judge_outputs(operation: str, records: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise an error unless the ranks' outputs fit together.

    Args:
        operation: What the user called.
        records: The report of each rank; see ``OwnOutputs.said``.

    Raises:
        OutputsError: The outputs are of different passes or steps, or differ in form.
    """
    if problems := {rank: said["problem"] for rank, said in records.items() if said["problem"]}:
        raise _refusal(operation, problems)
    calls = {rank: f"calls {said['at']}" for rank, said in records.items()}
    if len(by_value(calls)) > 1:
        raise _refusal(operation, calls)
    with_rows = {rank: said["forms"] for rank, said in records.items() if said["forms"]}
    for path in dict.fromkeys(path for forms in with_rows.values() for path in forms):
        passed = {rank: f"passed {forms.get(path, 'nothing')}{_at(path)}" for rank, forms in with_rows.items()}
        if len(by_value(passed)) > 1:
            raise _refusal(operation, passed)


def _refusal(operation: str, problems: Mapping[int, str]) -> OutputsError:
    """Return an error with a line for each problem and its ranks."""
    listed = "\n".join(f"  {ranks_text(ranks)} {what}" for what, ranks in by_value(problems).items())
    return OutputsError(
        f"{GATHERING}: the ranks' outputs do not fit.\n{listed}\nCall {operation}() on every rank {_WHEN[operation]}, "
        "with one row per sample that the rank got, padding included, and outputs that are built alike on each. Where "
        "rows differ in width, pad them, or pass each as an element of a list, as outputs.extend(rows) does."
    )
