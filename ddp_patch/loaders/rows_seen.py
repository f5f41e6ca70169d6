"""What a pass notes of a dataset's rows, until the log of passes uses ``HeldData``; then delete this module."""

import copy
import os
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ddp_patch.compat.packages import is_hugging_face_table
from ddp_patch.loaders.recognition import nested_datasets
from ddp_patch.loaders.samples import length_of
from ddp_patch.orders.fingerprint import fingerprint
from ddp_patch.orders.orders import spread
from ddp_patch.walks import LOOKED_AT, stored

if TYPE_CHECKING:
    pass

__all__ = [
    "Row",
    "RowsSeen",
    "rows_of",
]


# How many samples are looked at, and how much of each: numbers of an array, characters of a text, parts of a container.
_SAMPLES, _NUMBERS, _CHARACTERS, _PARTS = 16, 64, 256, 8
# A longer text is no path.
_LONGEST_PATH = 1024
# A shorter attribute of a dataset may have as many values as the dataset has samples by chance.
_LEAST_HELD = 8
# How many attributes of an object are looked at, how many objects deep, and how many in all.
_ATTRIBUTES, _DEPTH, _IN_ALL = 64, 2, 256
# A path counts by as few of its last parts as distinguish the paths that are looked at, but by no more.
_PATH_PARTS = (1, 2, 3)
# What an attribute with such a name holds may differ by rank.
_RANKS_OWN = ("seed", "rank", "device")
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


class Row(NamedTuple):
    """What a rank notes of a dataset, or of one of its attributes, when a pass begins.

    Attributes:
        fingerprint: A fingerprint of some of its elements.
        identifies: Whether no two of these are alike, so that other samples would differ.
        is_order: Whether these are distinct indices of the dataset, as an order in which it is read has them.
        at_first: The fingerprint at the patch, if these are distinct names, which no training changes; otherwise none.
        is_whole: Whether there is one for each sample.
    """

    fingerprint: str
    identifies: bool
    is_order: bool = False
    at_first: str = ""
    is_whole: bool = True


class _Column(NamedTuple):
    """Some elements of what a dataset holds.

    Attributes:
        name: What holds them.
        is_held: Whether that is an attribute of a dataset, which may hold other things than samples.
        elements: Their descriptions.
        named: Descriptions of the texts and whole numbers in them alone; empty if one has none.
        has_texts: Whether there are texts in them.
        is_whole: Whether there is one for each sample; others are looked at because several samples, or parts of one,
            may come from each.
    """

    name: str
    is_held: bool
    elements: list[Any]
    named: list[Any]
    has_texts: bool = False
    is_whole: bool = True


def chosen_samples(dataset: Any) -> tuple[Content, ...]:
    """Return fingerprints of the samples that a dataset holds or was cut down to, as far as they can be told.

    A torch ``Subset`` counts by its indices. A map-style Hugging Face dataset counts by its first and its last row, as
    they are stored: ``split_dataset_by_node()`` leaves no other mark on one. Plain containers, the tensors of a
    ``TensorDataset``, and attributes of a dataset with one value for each sample count by a few elements. A path counts
    by its last part, and an object of another class by that class. ``__getitem__`` of a dataset is never called.

    Examples:
        >>> halves = [Subset(range(10), range(start, start + 5)) for start in (0, 5)]
        >>> chosen_samples(halves[0]) == chosen_samples(halves[1])
        False
        >>> chosen_samples(["a", "b"]) == chosen_samples(["a", "c"])
        False
    """
    found: dict[tuple[str, bool], list[list[Any]]] = defaultdict(list)
    whole: set[tuple[str, bool]] = set()
    for part in islice(nested_datasets(dataset), LOOKED_AT):
        with suppress(Exception):  # the user's indices, or a row that cannot be read yet
            for column in _contents(part):
                key = column.name, column.is_held
                if column.elements:
                    found[key].append(column.elements)
                if column.is_whole:
                    whole.add(key)
    return tuple(
        Content(name, fingerprint(elements), is_held, (name, is_held) in whole and all(map(_identifies, elements)))
        for (name, is_held), elements in found.items()
    )


class RowsSeen:
    """What a dataset holds while a loader's passes are over it, as ranks compare it.

    An attribute may also hold what reading a sample writes, each rank of its own: caches, losses, a list of what was
    read. So an attribute is compared once it was the same at two looks of a pass, between which samples were read; and
    never again once reading has changed it, unless it named the samples at the patch.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        rows = rows_of(dataset)
        self._at_first = {name: row.fingerprint for name, row in rows.items() if row.identifies or not row.is_whole}
        self._written: set[str] = set()

    def now(self) -> dict[str, Row]:
        """Look at it now."""
        return rows_of(self._dataset, self._at_first)

    def steady(self, before: Mapping[str, Row], now: Mapping[str, Row]) -> dict[str, Row]:
        """Return what is the same as at the look before; samples were read since."""
        changed = {name for name, row in before.items() if name in now and now[name].fingerprint != row.fingerprint}
        self._written |= changed.difference(self._at_first)
        return {name: row for name, row in now.items() if before.get(name) == row and name not in self._written}


def rows_of(dataset: Any, at_first: Mapping[str, str] | None = None) -> dict[str, Row]:
    """Return what a dataset holds now, as ``chosen_samples`` looks at it, by name.

    An attribute that did not identify the samples at the patch may hold what the training changes, such as losses. So
    it counts only where its elements are told apart by their texts and whole numbers.

    Args:
        dataset: The dataset.
        at_first: What identified the samples at the patch, by name, with its fingerprint then; None at the patch.
    """
    found: dict[str, Row] = {}
    part: Any
    for part in islice(nested_datasets(dataset), LOOKED_AT):
        with suppress(Exception):  # as above
            for column in _contents(part):
                name, elements = column.name, column.elements
                again = sum(other.partition(" (")[0] == name for other in found)
                name = f"{name} ({again + 1})" if again else name
                identifies, is_known = _identifies(elements), at_first is None or name in at_first
                numbers = [_whole_number(value) for value in elements]
                # Rows that were not shuffled yet count too: another rank may have shuffled its own.
                is_order = (
                    column.is_held
                    and column.is_whole
                    and _are_distinct(elements)
                    and all(number in range(len(part)) for number in numbers)
                )
                names_samples = _are_distinct(column.named) and not (column.is_whole and _is_in_order(column.named))
                counts = not column.is_held or names_samples or is_order or (identifies and is_known)
                if elements and (counts if column.is_whole else names_samples and is_known):
                    told = column.named if names_samples else elements
                    print_now = fingerprint(told)
                    first = print_now if at_first is None else at_first.get(name, "")
                    is_name = names_samples and (column.has_texts or not column.is_whole)
                    found[name] = Row(
                        print_now, identifies and column.is_whole, is_order, first if is_name else "", column.is_whole
                    )
    return found


def held_by(dataset: Any) -> str:
    """Return a fingerprint of the whole numbers and texts that a dataset and what it wraps hold, alone or in lists.

    Those of two ranks differ where each made its dataset for a part of the data: a first number, or a list of files.

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
            for name, value, _ in _nested(type(part).__name__, part):
                if any(word in name.rpartition(".")[2].lower() for word in _RANKS_OWN):
                    continue
                if type(value) in {int, str}:
                    found.append([name, _told(value)])
                elif type(value) in _PLAIN and _length(value) is not None:
                    found.append([name, len(value), [_told(value[place]) for place in _spread(len(value))]])
    return fingerprint(found)


def _whole_number(elements: Any) -> int | None:
    """Return the whole number that an element is, as ``_told`` describes it; None if it is none."""
    number = elements[2] if isinstance(elements, list) and elements[1:2] == [()] else elements
    return number if isinstance(number, int) else None


def _identifies(elements: list[Any]) -> bool:
    """Return whether no two elements are alike; but positions are the same for any data."""
    return _are_distinct(elements) and not _is_in_order(elements)


def _are_distinct(elements: list[Any]) -> bool:
    return bool(elements) and len({fingerprint([value]) for value in elements}) == len(elements)


def _is_in_order(elements: list[Any]) -> bool:
    """Return whether each element is its own position."""
    return isinstance(elements[-1], int) and elements == _spread(elements[-1] + 1)


def _spread(n: int) -> list[int]:
    return [*dict.fromkeys(place * (n - 1) // (_SAMPLES - 1) for place in range(_SAMPLES))] if n > 0 else []


def _contents(dataset: Any) -> Iterator[_Column]:
    """Yield what shows which samples a dataset holds."""
    kind = type(dataset).__name__
    if isinstance(dataset, Subset):
        yield _Column("the indices of a Subset", False, [*spread(dataset.indices)], [])
        base: Any = dataset.dataset
        if not isinstance(base, Dataset):  # which nobody else looks at
            yield from _contents(base)
    elif is_hugging_face_table(dataset):
        yield _Column("the first and last rows of a Hugging Face dataset", False, _ends(dataset), [])
    elif type(dataset) in _PLAIN:
        yield from _columns(f"the elements of a {kind}", dataset, is_held=False)
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            yield from _columns("the tensors of a TensorDataset", tensor, is_held=False)
    elif not isinstance(dataset, IterableDataset):
        yield from _attributes(dataset)


def _attributes(dataset: Any) -> Iterator[_Column]:
    """Yield what a dataset's attributes hold: one value for each sample, or for some or a part of one."""
    n = length_of(dataset, ()) or 0
    for name, value, depth in islice(_nested(type(dataset).__name__, dataset), _IN_ALL) if n >= _LEAST_HELD else ():
        if is_hugging_face_table(value):
            if len(value) == n:
                yield _Column(f"the first and last rows of {name}", True, _ends(value), [])
            continue
        length = _length(value) if type(value) in _PLAIN or _is_numbered(value) else None
        is_whole = length == n
        if length is not None and (is_whole or (length >= _LEAST_HELD and (n % length == 0 or length % n == 0))):
            # What is deeper, or of another length, may be anything; but other names are of other samples.
            is_plain = depth == 0 and is_whole and type(value) in _PLAIN
            columns = _columns(name, value, is_held=True)
            for column in columns:
                if is_plain:
                    yield column
                elif _are_distinct(column.named):
                    yield column._replace(elements=column.named, is_whole=is_whole)


def _is_numbered(value: Any) -> bool:
    """Return whether a dict has what belongs to each number."""
    return type(value) is dict and all(place in value for place in _spread(len(value)))


def _nested(name: str, holder: object, depth: int = 0) -> Iterator[tuple[str, Any, int]]:
    """Yield an object's attributes, by name, and those of the plain objects that it holds, in containers too."""
    for attribute, value in islice(_parts(name, holder), _ATTRIBUTES):
        yield attribute, value, depth
        is_plain = not isinstance(value, type | ModuleType | FunctionType | Dataset | nn.Module | DataLoader)
        if depth < _DEPTH and is_plain:
            yield from _nested(attribute, value, depth + 1)


def _parts(name: str, holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object, a dict or a short list holds, with its name; nothing of long ones."""
    if type(holder) is dict:
        parts = {f"{name}[{key!r}]": value for key, value in islice(holder.items(), LOOKED_AT) if type(key) is str}
        yield from parts.items()
    elif type(holder) in {list, tuple}:
        few = [] if len(holder) >= _LEAST_HELD else holder
        yield from ((f"{name}[{place}]", value) for place, value in enumerate(few))
    elif _is_users(holder):
        yield from ((f"{name}.{attribute}", value) for attribute, value in stored(holder).items())


def _is_users(value: object) -> bool:
    """Return whether an object is of a class that somebody wrote, which stores attributes."""
    is_stored = hasattr(value, "__dict__") or any("__slots__" in vars(kind) for kind in type(value).__mro__)
    return is_stored and type(value) not in _PLAIN


def _ends(table: Any) -> list[Any]:
    """Return the first and the last row of a Hugging Face dataset as they are stored, with nothing decoded."""
    rows = copy.copy(table)
    rows.set_format("arrow")
    return [rows[place].to_pylist() for place in (0, len(table) - 1)] if len(table) else []


def _length(values: Any) -> int | None:
    return None if isinstance(values, torch.Tensor | np.ndarray) and values.ndim == 0 else len(values)


def _columns(name: str, values: Any, *, is_held: bool) -> Iterator[_Column]:
    """Yield descriptions of some elements, evenly spread, and of what these store; none of a cache that fills."""
    elements = [values[position] for position in _spread(len(values))]
    if any(element is None for element in elements):
        return
    yield _column(name, is_held, elements)
    first = elements[0] if elements else None
    if _is_users(first) and not isinstance(first, tuple | list | dict | str | bytes | os.PathLike | torch.Tensor):
        for attribute, value in islice(stored(first).items(), _PARTS):
            if isinstance(value, str | int | os.PathLike):
                column = _column(f"{name}[].{attribute}", True, [stored(one).get(attribute) for one in elements])
                if _identifies(column.named):
                    yield column


def _column(name: str, is_held: bool, elements: list[Any]) -> _Column:
    named = [_named(element) for element in elements]
    has_all = all(found is not None for found in named)
    told = _distinct([partial(_told, element) for element in elements])
    return _Column(
        name,
        is_held,
        told,
        _distinct([partial(_told, found) for found in named]) if has_all else [],
        has_all and any(_has_text(found) for found in named),
    )


def _distinct(told: Sequence[Callable[[int], Any]]) -> list[Any]:
    """Return descriptions, with as few parts of paths as make them distinct; with one if none do."""
    first = [tell(1) for tell in told]
    if _are_distinct(first):
        return first
    more = ([tell(parts) for tell in told] for parts in _PATH_PARTS[1:])
    return next((found for found in more if found != first and _are_distinct(found)), first)


def _named(value: Any) -> Any:
    """Return what an element has of texts and whole numbers; None if it has none."""
    match value:
        case str() | os.PathLike() | bytes():
            return value
        case bool() | float() | np.floating() | np.bool_():
            return None
        case int() | np.integer():
            return int(value)
        case torch.Tensor() | np.ndarray():
            is_number = type(value) in _PLAIN and not value.ndim and not getattr(value, "is_cuda", False)
            return _named(value.item()) if is_number else None
        case dict():
            parts = [(key, _named(part)) for key, part in islice(value.items(), _PARTS) if type(key) in {str, int}]
            return [part for part in parts if part[1] is not None] or None
        case list() | tuple():
            return [part for part in map(_named, value[:_PARTS]) if part is not None] or None
    return None


def _has_text(named: Any) -> bool:
    if isinstance(named, list | tuple):
        return any(map(_has_text, named))
    return isinstance(named, str | bytes | os.PathLike)


def _told(value: Any, parts: int = 1) -> Any:
    """Describe an element: enough to distinguish two samples, and nothing in which ranks may differ.

    Args:
        value: The element.
        parts: By how many of its last parts a path counts.
    """
    match value:
        case os.PathLike():
            return _told(os.fspath(value), parts)
        case str():
            # Ranks may keep their copies of a file in folders of their own.
            is_path = len(value) < _LONGEST_PATH
            name = "/".join(value.replace("\\", "/").rsplit("/", parts)[-parts:]) if is_path else value
            return name[:_CHARACTERS], name[-_CHARACTERS:]
        case bytes():
            return len(value), value[:_CHARACTERS]
        case bool() | int() | float() | complex() | np.number() | np.bool_():
            return value.item() if isinstance(value, np.generic) else value
        case torch.Tensor() | np.ndarray() if type(value) in _PLAIN and not getattr(value, "is_cuda", False):
            flat = value.reshape(-1)
            numbers = flat[:: max(1, len(flat) // _NUMBERS)][:_NUMBERS].tolist()
            return [str(value.dtype), tuple(value.shape), *map(_told, numbers)]
        case dict():
            return [len(value), *([_told(key), _told(part, parts)] for key, part in islice(value.items(), _PARTS))]
        case list() | tuple():
            return [len(value), *(_told(part, parts) for part in value[:_PARTS])]
    return type(value).__name__
