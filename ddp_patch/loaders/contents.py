"""What identifies a dataset's samples between ranks; nothing is loaded or decoded."""

import copy
import os
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ddp_patch.compat.packages import is_hugging_face_table
from ddp_patch.loaders.recognition import nested_datasets
from ddp_patch.loaders.samples import length_of
from ddp_patch.orders.fingerprint import fingerprint
from ddp_patch.walks import LOOKED_AT, stored

__all__ = ["Content", "HeldData", "chosen_samples", "held_by"]

# How many elements are looked at, at the patch and in each pass; how many attributes in all, and how deep.
_SAMPLES, _IN_A_PASS, _IN_ALL, _DEPTH = 16, 1024, 256, 2
# Of how many elements an attribute may tell samples apart, and how many parts of an element count.
_FEW = 8
# A longer text is no path.
_LONGEST_PATH = 1024
# Plain data, by exact type: a subclass may read a file, or ask another rank, for an element.
_PLAIN = (list, tuple, range, np.ndarray, torch.Tensor, deque, array)


@dataclass(frozen=True, slots=True)
class Content:
    """A fingerprint of some of a dataset's samples.

    Attributes:
        name: What they were read from.
        fingerprint: Their fingerprint.
        is_held: Whether that is an attribute of a dataset, which may hold other things than samples.
        identifies: Whether no two of them are alike, so that another part of the data would differ.
    """

    name: str
    fingerprint: str
    is_held: bool
    identifies: bool


class _Column(NamedTuple):
    """What a dataset is, or holds: the values, and whether by its names and whole numbers alone, and one a sample."""

    name: str
    values: Any
    is_held: bool = False
    by_name: bool = False
    is_whole: bool = True


def chosen_samples(dataset: Any) -> tuple[Content, ...]:
    """Return fingerprints of the samples that a dataset holds or was cut down to, as far as they can be told.

    A torch ``Subset`` counts by its indices. A map-style Hugging Face dataset counts by its first and its last row, as
    they are stored: ``split_dataset_by_node()`` leaves no other mark on one. Plain containers, the tensors of a
    ``TensorDataset``, and attributes with one value for each sample count by a few elements; other attributes by names
    and whole numbers. A path counts by its last part, and an object of another class by that class. ``__getitem__`` of
    a dataset is never called.

    Examples:
        >>> halves = [Subset(range(10), range(start, start + 5)) for start in (0, 5)]
        >>> chosen_samples(halves[0]) == chosen_samples(halves[1])
        False
        >>> chosen_samples(["a", "b"]) == chosen_samples(["a", "c"])
        False
    """
    found: dict[str, list[tuple[_Column, list[Any]]]] = defaultdict(list)
    for column, elements in _columns(dataset):
        found[column.name].append((column, elements))
    return tuple(
        Content(
            name,
            fingerprint(elements for _, elements in parts),
            is_held=parts[0][0].is_held,
            identifies=any(column.is_whole for column, _ in parts) and all(_identifies(told) for _, told in parts),
        )
        for name, parts in found.items()
    )


class HeldData:
    """What a dataset holds while a loader's passes are over it, as ranks compare it.

    Make it at the patch. Call ``begin()`` when a pass begins, and ``read()`` after its first batches and at its end:
    what changed since it began was changed by reading (caches, counters) and is left out from then on, unless it named
    the samples at the patch. Two ranks' data in one pass differ in ``differing(mine, theirs)`` of what ``told()``
    returns: in what was the same at the patch, and is not now.

    Args:
        dataset: The dataset.

    Examples:
        >>> ranks = [Subset(range(10), [0, 1, 2]) for _ in range(2)]
        >>> held = [HeldData(one) for one in ranks]
        >>> ranks[1].indices[:] = [0, 1, 3]
        >>> for one in held:
        ...     one.begin()
        >>> HeldData.differing(*(one.told() for one in held))
        ('the indices of a Subset',)
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._first = self._begun = _digests(dataset)
        self._named = {one.name for one in chosen_samples(dataset) if one.identifies or not one.is_held}
        self._written: set[str] = set()
        self._made: dict[str, str] = {}  # the latest look while samples were read

    def begin(self) -> None:
        """Look at what is held when a pass begins."""
        # What was made while samples were read, and did not stay the same meanwhile, may be a cache.
        self._written |= self._made.keys() - self._begun.keys() - self._named
        self._begun, self._made = _digests(self._dataset), {}

    def told(self) -> dict[str, str]:
        """Return digests at the patch and when the pass began, by name; of masks, indices and names."""
        counted = {name: now for name, now in self._begun.items() if name not in self._written}
        return {name: f"{self._first.get(name, '')} {now}" for name, now in counted.items()}

    @property
    def is_changed(self) -> bool:
        """Whether the user has changed any of that since the patch."""
        return any(len(set(both.split(" "))) > 1 for both in self.told().values())

    def read(self) -> None:
        """Note what reading has changed since the pass began; what it has made counts once it stays as it is."""
        now = _digests(self._dataset)
        for name, digest in now.items():
            before = self._begun.get(name, self._made.get(name, digest))
            if before != digest and name.partition(" (")[0] not in self._named:
                self._written.add(name)
            elif name not in self._begun and name in self._made:
                self._begun[name] = digest
        self._made = now

    @staticmethod
    def differing(mine: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
        """Return the names of what was the same on two ranks at the patch, and is not in this pass."""
        both = ((name, mine[name].split(" "), theirs[name].split(" ")) for name in mine if name in theirs)
        return tuple(name for name, (was, now), (other_was, other) in both if was == other_was and now != other)


def _digests(dataset: Any) -> dict[str, str]:
    """Return digests of all masks and of what tells samples apart, by name; a second of one name gets a number."""
    found: dict[str, str] = {}
    for column, elements in _columns(dataset, in_a_pass=True):
        again = sum(name.partition(" (")[0] == column.name for name in found)
        name = f"{column.name} ({again + 1})" if again else column.name
        found[name] = fingerprint([len(column.values), _whole_numbers(column.values), elements])[:12]
    return found


def _whole_numbers(values: Any) -> bytes:
    """Return many whole numbers of a sequence as bytes, because one among them may change; nothing of other values."""
    with suppress(Exception):
        if isinstance(values, torch.Tensor | np.ndarray):
            there = values[:: max(1, values.nbytes >> 20)]
            return b"" if "float" in str(there.dtype) else np.ascontiguousarray(there).tobytes()
        return array("q", values[:: max(1, len(values) >> 17)]).tobytes()
    return b""


def held_by(dataset: Any) -> str:
    """Return a fingerprint of the whole numbers and texts that a dataset and what it wraps hold, alone or in lists.

    Those of two ranks differ where each made its dataset for a part of the data: a first number, or a list of files.
    Seeds, ranks and devices may differ rightly.

    Examples:
        >>> class Part(Dataset):
        ...     def __init__(self, start):
        ...         self.start = start
        >>> held_by(Part(0)) == held_by(Part(0)), held_by(Part(0)) == held_by(Part(1))
        (True, False)
    """
    found: list[Any] = []
    for part in islice(nested_datasets(dataset), LOOKED_AT):
        with suppress(Exception):  # the user's lists
            for name, value, _ in islice(_nested(type(part).__name__, part), _IN_ALL):
                own = any(word in name.rpartition(".")[2].lower() for word in ("seed", "rank", "device"))
                values = [value] if type(value) in {int, str} else value
                if not own and type(values) in _PLAIN:
                    found.append([name, len(values), _described(_Column(name, values), _SAMPLES)])
    return fingerprint(found)


def _columns(dataset: Any, *, in_a_pass: bool = False) -> Iterator[tuple[_Column, list[Any]]]:
    """Yield what shows which samples a dataset holds, and masks, where a pass is looked at; with some elements."""
    for part in islice(nested_datasets(dataset), LOOKED_AT):
        with suppress(Exception):  # the user's indices, or a row that cannot be read yet
            found = chain(_of_part(part), _attributes(part, in_a_pass=in_a_pass))
            for column in chain.from_iterable((one, *_of_objects(one)) for one in found):
                elements = _described(column, _IN_A_PASS if in_a_pass and column.is_held else _SAMPLES)
                is_mask = in_a_pass and {*map(type, elements)} == {bool}
                if elements and (is_mask or not column.by_name or _are_distinct(elements)):
                    yield column, elements


def _of_objects(column: _Column) -> Iterator[_Column]:
    """Yield what objects of the user's hold of names and numbers, where a column has such objects."""
    first = column.values[0] if type(column.values) in {list, tuple} and column.values else None
    if not isinstance(first, os.PathLike | torch.Tensor) and (attributes := stored(first)):
        some = [stored(column.values[place]) for place in _spread(len(column.values), _IN_A_PASS)]
        for attribute in [*attributes][:_FEW]:
            if isinstance(attributes[attribute], str | int | os.PathLike):
                values = [held.get(attribute) for held in some]
                yield _Column(f"{column.name}[].{attribute}", values, True, True, column.is_whole)


def _of_part(part: Any) -> Iterator[_Column]:
    if isinstance(part, Subset):
        yield _Column("the indices of a Subset", part.indices)
        part = None if isinstance(part.dataset, Dataset) else part.dataset  # which nobody else looks at
    if is_hugging_face_table(part):
        yield _Column("the first and last rows of a Hugging Face dataset", _ends(part))
    elif type(part) in _PLAIN:
        yield _Column(f"the elements of a {type(part).__name__}", part)
    elif isinstance(part, TensorDataset):
        yield from (_Column("the tensors of a TensorDataset", tensor) for tensor in part.tensors)


def _attributes(dataset: Any, *, in_a_pass: bool) -> Iterator[_Column]:
    """Yield what a dataset's attributes hold: one value for each sample, or names of some, or of a part of one."""
    if isinstance(dataset, IterableDataset | Subset | TensorDataset):
        return
    n = length_of(dataset, ()) or 0
    for name, value, depth in islice(_nested(type(dataset).__name__, dataset), _IN_ALL):
        if is_hugging_face_table(value) and len(value) == n:
            yield _Column(f"the first and last rows of {name}", _ends(value), is_held=True)
        values = [*value.values()] if type(value) is dict and 0 in value and len(value) < 2**17 else value
        if type(values) not in _PLAIN or not getattr(values, "shape", (1,)) or len(values) < _FEW:
            continue
        if len(values) == n and depth == 0 and not in_a_pass and values is value:
            yield _Column(name, values, is_held=True)
        elif in_a_pass or (n >= _FEW and (n % len(values) == 0 or len(values) % n == 0)):
            yield _Column(name, values, is_held=True, by_name=True, is_whole=len(values) == n)


def _nested(name: str, holder: Any, depth: int = 0) -> Iterator[tuple[str, Any, int]]:
    """Yield an object's attributes, by name, and those of the plain objects, dicts and short lists that it holds."""
    if type(holder) is dict:
        parts = {f"{name}[{key!r}]": value for key, value in islice(holder.items(), LOOKED_AT) if type(key) is str}
    elif type(holder) in {list, tuple} and len(holder) < _FEW:
        parts = {f"{name}[{place}]": value for place, value in enumerate(holder)}
    else:
        parts = {} if type(holder) in _PLAIN else {f"{name}.{key}": value for key, value in stored(holder).items()}
    for attribute, value in parts.items():
        yield attribute, value, depth
        is_plain = not isinstance(value, type | ModuleType | FunctionType | Dataset | torch.nn.Module | DataLoader)
        if depth < _DEPTH and is_plain:
            yield from _nested(attribute, value, depth + 1)


def _described(column: _Column, most: int) -> list[Any]:
    """Return descriptions of some elements, evenly spread; none of a cache that fills, nor if one has no name."""
    with suppress(Exception):  # the user's elements
        values, places = column.values, _spread(len(column.values), most)
        is_flat = isinstance(values, torch.Tensor | np.ndarray) and values.ndim == 1
        is_here = is_flat and not getattr(values, "is_cuda", False)
        elements = values[places].tolist() if is_here else [values[place] for place in places]
        # As few parts of paths as tell them apart.
        tried = ([_told(one, parts, by_name=column.by_name) for one in elements] for parts in (1, 2, 3))
        first = next(tried)
        if None not in first:
            return first if _are_distinct(first) else next(filter(_are_distinct, tried), first)
    return []


def _identifies(elements: list[Any]) -> bool:
    """Return whether no two elements are alike; but positions are the same for any data."""
    return _are_distinct(elements) and not (
        isinstance(elements[-1], int) and elements == _spread(elements[-1] + 1, _SAMPLES)
    )


def _are_distinct(elements: list[Any]) -> bool:
    return bool(elements) and len({repr(value) for value in elements}) == len(elements)


def _spread(n: int, most: int) -> list[int]:
    return [*range(n)] if n <= most else [place * (n - 1) // (most - 1) for place in range(most)]


def _ends(table: Any) -> list[Any]:
    """Return the first and the last row of a Hugging Face dataset as they are stored, with nothing decoded."""
    rows = copy.copy(table)
    rows.set_format("arrow")
    return [rows[place].to_pylist() for place in (0, len(table) - 1)] if len(table) else []


def _told(value: Any, parts: int = 1, *, by_name: bool = False) -> Any:
    """Describe an element: enough to tell two samples apart, and nothing in which ranks may differ.

    Args:
        value: The element.
        parts: By how many of its last parts a path counts: ranks may keep copies of a file in folders of their own.
        by_name: Whether it counts by its texts and whole numbers alone. One without any is None.
    """
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        is_path = isinstance(text, str) and len(text) < _LONGEST_PATH
        return "/".join(text.replace("\\", "/").rsplit("/", parts)[-parts:]) if is_path else fingerprint([text])
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and not getattr(value, "is_cuda", False):
        if not value.ndim:
            value = value.item()
        elif type(value) in _PLAIN and not by_name:
            return fingerprint([value])
    if isinstance(value, list | tuple | dict):
        listed = value if not isinstance(value, dict) else value.values() if by_name else value.items()
        told = [_told(part, parts, by_name=by_name) for part in islice(listed, _FEW)]
        return [one for one in told if one is not None] or None if by_name else [len(value), *told]
    if isinstance(value, int | bytes) or (isinstance(value, float | complex) and not by_name):
        return value
    return None if by_name or value is None else type(value).__name__
