"""What identifies a dataset's samples between ranks; nothing is loaded or decoded."""

import copy
import os
import re
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from ddp_patch.compat.private_packages import is_hugging_face_stage, is_hugging_face_table, is_table, rows_at
from ddp_patch.loaders.recognition import nested_datasets
from ddp_patch.loaders.samples import length_of
from ddp_patch.orders.digest import fingerprint
from ddp_patch.orders.random_states import is_users
from ddp_patch.walks import LOOKED_AT, held, stored, walk

__all__ = ["Content", "HeldData", "chosen_samples", "first_differing", "held_by"]

# How many elements are compared, evenly spread: by all that they are, and by their names and whole numbers alone.
_WHOLLY, _BY_NAME = 16, 1024
# A list of fewer elements is a setting. Of an element, so many parts count.
_FEW = 8
# Plain data, by exact type: a subclass may read a file, or ask another rank, for an element.
_PLAIN = (list, tuple, range, array, np.ndarray, np.memmap, torch.Tensor)
_DICTS = (dict, OrderedDict, defaultdict)

# Attributes whose names have one of these words may hold something else on each rank.
_OWN = ("seed", "rank", "device", "cache")
# What tempfile calls a folder or file that is one process's alone, and what signs a URL.
_OF_ONE_PROCESS = re.compile(r"\btmp[a-z0-9_]{8}\b|(?<=.)\?.*")


class Content(NamedTuple):
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
    """Values that a dataset is, or holds, one of which may belong to each sample.

    Attributes:
        name: Where they are.
        values: The values, in plain data or in a table.
        depth: How deep in a dataset's attributes they are; None where they are the dataset itself.
        field: Which attribute of these values counts; empty if they count themselves.
        samples: How many samples the dataset has.
    """

    name: str
    values: Any
    depth: int | None
    field: str
    samples: int

    @property
    def is_whole(self) -> bool:
        """Whether there is surely one for each sample."""
        return self.depth is None or len(self.values) == self.samples

    def told(self, *, in_a_pass: bool) -> list[Any]:
        """Describe some elements; none if they may well be no samples, or differ rightly.

        An attribute counts at the patch if it has one element for each sample, and whatever these are. What is deeper
        counts there, and all in a pass, where no two of its names or whole numbers are alike; and in a pass, a mask.
        """
        n, size = self.samples, len(self.values)
        if self.depth is None or (self.depth == 0 and size == n >= _FEW and not in_a_pass):
            return self.elements(_WHOLLY)
        if size < _FEW or not (in_a_pass or (n >= _FEW and n % size == 0)):
            return []
        elements = self.elements(_BY_NAME if in_a_pass else _WHOLLY, by_name=True)
        is_mask = in_a_pass and {*map(type, elements)} == {bool}
        return elements if is_mask or _are_distinct(elements) else []

    def elements(self, most: int, *, by_name: bool = False) -> list[Any]:
        """Describe some elements, evenly spread; none of a cache that fills, nor if one has no name."""
        with suppress(Exception):  # the user's elements
            places = _spread(len(self.values), most)
            rows = rows_at(self.values, places) if is_table(self.values) else [self.values[place] for place in places]
            parts = [stored(row)[self.field] for row in rows] if self.field else rows
            # As few parts of paths as tell them apart.
            tried = ([_told(one, length, by_name=by_name) for one in parts] for length in (1, 2, 3))
            first = next(tried)
            if None not in first:
                return first if _are_distinct(first) else next(filter(_are_distinct, tried), first)
        return []

    @property
    def whole_numbers(self) -> bytes:
        """Many whole numbers as bytes, because one among them may change; nothing of other values."""
        there = self.values[:: max(1, len(self.values) >> 18)]
        with suppress(Exception):  # it has others
            if isinstance(there, torch.Tensor | np.ndarray):
                return b"" if "float" in str(there.dtype) else np.ascontiguousarray(there).tobytes()
            return array("q", there).tobytes()
        return b""


def chosen_samples(dataset: Any) -> tuple[Content, ...]:
    """Return fingerprints of the samples that a dataset holds or was cut down to, as far as they can be told.

    A torch ``Subset`` counts by its indices. A map-style Hugging Face dataset counts by its first and its last row, as
    they are stored: ``split_dataset_by_node()`` leaves no other mark on one. Plain lists, tuples, arrays and tensors,
    tables of pandas, polars and pyarrow, those of a ``TensorDataset``, and attributes with one value for each sample
    count by a few elements; what is in other attributes, within two levels of lists and dicts, and what the objects in
    a list store, by names and whole numbers. A path counts by its last part. ``__getitem__`` of a dataset is never
    called.

    Examples:
        >>> halves = [Subset(range(10), range(start, start + 5)) for start in (0, 5)]
        >>> chosen_samples(halves[0]) == chosen_samples(halves[1])
        False
        >>> chosen_samples(["a", "b"]) == chosen_samples(["a", "c"])
        False
    """
    return tuple(
        Content(
            name,
            fingerprint(elements for _, elements in told),
            is_held=told[0][0].depth is not None,
            identifies=any(column.is_whole for column, _ in told) and all(_identify(elements) for _, elements in told),
        )
        for name, told in _told_by_name(dataset).items()
    )


def held_by(dataset: Any) -> dict[str, list[Any]]:
    """Return the lists of texts and of whole numbers that a dataset and what it wraps hold, such as files, by name.

    Of each there is the length, and then a few elements. Those of two ranks differ where each made its dataset for a
    part of the data. A value by itself may differ rightly: an id, a date, a folder; and so may seeds, ranks, devices
    and caches. Names that ``tempfile`` makes, and what follows a ``?`` in a URL, don't count.

    Examples:
        >>> class Part(torch.utils.data.Dataset):
        ...     def __init__(self, files):
        ...         self.files, self.made_by = files, id(self)
        >>> held_by(Part(["data/0.tar", "data/1.tar"]))
        {'Part.files': [2, '0.tar', '1.tar']}
    """
    found: dict[str, list[Any]] = {}
    seen = set[int]()
    for part in islice(walk(dataset, partial(held, is_wanted=_is_of_stream)), LOOKED_AT):
        for name, value, _ in _attributes(part):
            is_own = any(word in name.lower().rpartition(".")[2] for word in _OWN)
            if is_own or id(value) in seen or (values := _sequence(value)) is None:
                continue
            seen.add(id(value))
            elements = [_named(element) for element in _Column(name, values, 0, "", 0).elements(_WHOLLY)]
            if None not in elements and bool(elements) == bool(len(values)):
                like = sum(known.partition(" (")[0] == name for known in found)
                found[f"{name} (number {like + 1})" if like else name] = [len(values), *elements]
    return found


def _is_of_stream(part: object) -> bool:
    return isinstance(part, Dataset) or is_hugging_face_stage(part)


def _named(element: Any) -> str | int | None:
    """Return a described element as errors show it, if it is a text or a whole number."""
    if isinstance(element, list) and element and all(isinstance(part, str) for part in element):
        return _OF_ONE_PROCESS.sub("", "/".join(element))
    return element if isinstance(element, int) and not isinstance(element, bool) else None


def first_differing(of_ranks: Mapping[int, Mapping[str, Sequence[Any]]]) -> dict[int, dict[str, object]]:
    """Return for each rank what it has where the first of the lists differs that ``held_by`` has told on every rank.

    Examples:
        >>> first_differing({0: {"Part.files": [2, "0.tar", "1.tar"]}, 1: {"Part.files": [2, "0.tar", "3.tar"]}})
        {0: {'Part.files[1]': '1.tar'}, 1: {'Part.files[1]': '3.tar'}}
    """
    for name in next(iter(of_ranks.values())):
        told = [held[name] for held in of_ranks.values() if name in held]
        if len(told) < len(of_ranks) or all(one == told[0] for one in told):
            continue
        columns = [*zip(*told, strict=False)]
        place = next((place for place, column in enumerate(columns) if place and len({*column}) > 1), None)
        names = {} if len({*columns[0]}) == 1 else {0: f"len({name})"}
        if place is not None:
            names[place] = f"{name}[{_spread(min(columns[0]), _WHOLLY)[place - 1]}]"
        return {rank: {names[at]: one[at] for at in names} for rank, one in zip(of_ranks, told, strict=True)}
    return {rank: {} for rank in of_ranks}


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
        self._first = self._begun = self._now()
        self._named = {one.name for one in chosen_samples(dataset) if one.identifies or not one.is_held}
        self._written: set[str] = set()
        self._made: dict[str, str] = {}  # the latest look while samples were read

    def _now(self) -> dict[str, str]:
        """Return digests of all masks and of what tells samples apart, by name."""
        return {
            name: fingerprint([len(one.values), one.whole_numbers, elements] for one, elements in told)[:12]
            for name, told in _told_by_name(self._dataset, in_a_pass=True).items()
        }

    def begin(self) -> None:
        """Look at what is held when a pass begins."""
        # What was made while samples were read, and did not stay the same meanwhile, may be a cache.
        self._written |= self._made.keys() - self._begun.keys() - self._named
        self._begun, self._made = self._now(), {}

    def told(self) -> dict[str, list[str]]:
        """Return digests at the patch and when the pass began, by name; of masks, indices and names."""
        counted = self._begun.keys() - self._written
        return {name: [self._first.get(name, ""), self._begun[name]] for name in sorted(counted)}

    @property
    def is_changed(self) -> bool:
        """Whether the user has changed any of that since the patch."""
        return any(was != now for was, now in self.told().values())

    def read(self) -> None:
        """Note what reading has changed since the pass began; what it has made counts once it stays as it is."""
        now = self._now()
        for name, digest in now.items():
            before = self._begun.get(name, self._made.get(name, digest))
            if before != digest and name not in self._named:
                self._written.add(name)
            elif name not in self._begun and name in self._made:
                self._begun[name] = digest
        self._made = now

    @staticmethod
    def differing(mine: Mapping[str, Sequence[str]], theirs: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """Return the names of what was the same on two ranks at the patch, and is not in this pass."""
        both = ((name, *mine[name], *theirs[name]) for name in mine if name in theirs)
        return tuple(name for name, was, now, other_was, other in both if was == other_was and now != other)


def _told_by_name(dataset: Any, *, in_a_pass: bool = False) -> dict[str, list[tuple[_Column, list[Any]]]]:
    """Return what shows which samples a dataset holds, described, by name; several datasets in it may have one name."""
    found: dict[str, list[tuple[_Column, list[Any]]]] = defaultdict(list)
    for part in islice(nested_datasets(dataset), LOOKED_AT):
        with suppress(Exception):  # the user's indices, or a row that cannot be read yet
            for column in _columns(part):
                if elements := column.told(in_a_pass=in_a_pass):
                    found[column.name].append((column, elements))
    return found


def _columns(part: Any) -> Iterator[_Column]:
    """Yield the plain sequences that a dataset is or was cut down to, those that it holds, and fields of objects."""
    n, whole = length_of(part, ()) or 0, part
    if isinstance(part, Subset):
        yield _Column("the indices of a Subset", part.indices, None, "", n)
        whole = part.dataset  # if it is no Dataset, nobody else looks at it
    elif isinstance(part, TensorDataset):
        for tensor in part.tensors:
            yield _Column("the tensors of a TensorDataset", tensor, None, "", n)
    elif not isinstance(part, IterableDataset):
        for name, value, depth in _attributes(part):
            is_table_of_all = is_hugging_face_table(value)
            if (values := _sequence(value)) is not None and (not is_table_of_all or len(value) == n):
                place = None if is_table_of_all else depth + (type(value) in _DICTS)
                yield _Column(name, values, place, "", n)
                for field in _fields(values):
                    yield _Column(f"{name}[].{field}", values, depth + 1, field, n)
    if (values := _sequence(whole)) is not None:
        yield _Column(f"the elements of a {type(whole).__name__}", values, None, "", n)
        for field in _fields(values):
            yield _Column(f"{field} of the elements", values, 1, field, n)


def _fields(values: Any) -> Iterator[str]:
    """Yield what the objects in a list store, as the first one does; nothing where they are plain."""
    first = values[0] if type(values) in {list, tuple} and len(values) else None
    return islice(stored(first), _FEW)


def _attributes(dataset: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield a dataset's attributes, by name, and what is in their dicts, short lists and objects, within two levels."""
    found = [(f"{type(dataset).__name__}.{name}", value) for name, value in stored(dataset).items()]
    for depth in range(3):
        yield from ((name, value, depth) for name, value in found)
        found = [(f"{name}[{key!r}]", part) for name, value in found for key, part in _parts(value)]


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if type(value) in _DICTS:
        yield from ((key, part) for key, part in islice(value.items(), LOOKED_AT) if type(key) is str)
    elif type(value) in {list, tuple} and len(value) < _FEW:
        yield from enumerate(value)
    elif is_users(value):
        yield from islice(stored(value).items(), LOOKED_AT)


def _sequence(value: Any) -> Any:
    """Return plain data or a table; the first and the last row of a Hugging Face dataset; None of anything else."""
    if is_hugging_face_table(value):
        rows = copy.copy(value)
        rows.set_format("arrow")  # as they are stored, with nothing decoded
        return [rows[place].to_pylist() for place in (0, len(value) - 1)] if len(value) else []
    if is_table(value):
        return value
    if type(value) in _DICTS:  # of samples by their numbers
        return [*value.values()] if 0 in value else None
    is_elsewhere = isinstance(value, torch.Tensor) and value.device.type != "cpu"
    return value if type(value) in _PLAIN and getattr(value, "shape", (1,)) != () and not is_elsewhere else None


def _identify(elements: Sequence[Any]) -> bool:
    """Return whether no two elements are alike; but positions are the same for any data."""
    last = elements[-1]
    return _are_distinct(elements) and not (isinstance(last, int) and elements == _spread(last + 1, _WHOLLY))


def _are_distinct(elements: Sequence[Any]) -> bool:
    return bool(elements) and len({repr(value) for value in elements}) == len(elements)


def _spread(n: int, most: int) -> list[int]:
    return [*range(n)] if n <= most else [place * (n - 1) // (most - 1) for place in range(most)]


def _told(value: Any, parts: int, *, by_name: bool) -> Any:
    """Describe an element: enough to tell two samples apart, and nothing in which ranks may differ.

    Args:
        value: The element.
        parts: By how many of its last parts a path counts: ranks may keep copies of a file in folders of their own.
        by_name: Whether it counts by its texts and whole numbers alone. One without any is None.
    """
    if isinstance(value, str | os.PathLike):
        return os.fspath(value).replace("\\", "/").rsplit("/", parts)[-parts:]
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        if value.ndim:
            return None if by_name else fingerprint([value])
        value = value.item()
    if isinstance(value, list | tuple | dict):
        listed = value.values() if isinstance(value, dict) else value
        told = [_told(part, parts, by_name=by_name) for part in islice(listed, _FEW)]
        return [one for one in told if one is not None] or None if by_name else [len(value), *told]
    if isinstance(value, int | bytes) or (isinstance(value, float | complex) and not by_name):
        return value
    return None if by_name or value is None else type(value).__name__
