"""Columns: sequences with one element for each sample of a dataset, by which ranks compare their data.

======================================================  ============  ==================
what the datasets of ranks hold                         at the patch  when a pass begins
======================================================  ============  ==================
files in another order                                  certain       certain
labels in another order, and nothing tells them apart   likely        nothing
a longer array of other numbers, and nothing else       likely        nothing
noise beside the same files                             nothing       nothing
a cache that fills; a list of another length            nothing       nothing
======================================================  ============  ==================
"""

import copy
import os
import re
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from hashlib import blake2b
from inspect import getclosurevars
from itertools import chain, islice
from types import FunctionType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from ddp_patch.compat.private_packages import is_hugging_face_stage, is_hugging_face_table, is_table, rows_at
from ddp_patch.orders.digest import as_array, few_numbers, few_places, fingerprint
from ddp_patch.orders.random_states import is_users
from ddp_patch.walks import LOOKED_AT, held, stored, walk

# How many elements of a column are read, evenly spread; how many rows of Hugging Face's tables, which may have
# pictures.
_MOST: Final = 256
_MOST_ROWS: Final = 16
# How many columns are read when a pass begins, and how many elements in all: reading should cost little in each epoch.
_MOST_KEPT, _MOST_IN_ALL = 4, 128
# An attribute with fewer elements than _FEW is a setting. At most _PARTS parts of an element count.
_FEW: Final = 8
_PARTS: Final = 64
# The exact types of arrays: one that is longer than its dataset may be what samples are cut from, as tokens.
_ARRAYS: Final = (array, np.ndarray, np.memmap, torch.Tensor)
# The exact types of plain data: a subclass may read a file, or ask another rank, for an element.
_PLAIN: Final = (list, tuple, range, *_ARRAYS)
_DICTS: Final = (dict, OrderedDict, defaultdict)
_NO_DATASETS: Final = {*_PLAIN, *_DICTS, str, int, float, bool, type(None)}

# Lists whose names have one of these words may differ between ranks.
_OWN: Final = ("seed", "rank", "device", "cache")
# The names that tempfile gives files and folders of one process, and the query of a URL, which may be a signature.
_OF_ONE_PROCESS: Final = re.compile(r"\btmp[a-z0-9_]{8}\b|(?<=.)\?.*")

# What distinguishes a column's elements; a larger number is surer.
NOTHING, VALUES, NUMBERS, NAMES = range(4)


class Column(NamedTuple):
    """A rank's report of a column.

    Attributes:
        holder: The dataset that has the column.
        name: The column's name in errors.
        digest: The digest of the column's length, and of the elements that are read.
        tells: What distinguishes the elements: VALUES, NUMBERS or NAMES; NOTHING if two elements are equal.
        proves: Whether equal columns on all ranks prove that the ranks have the same samples: not if the elements are
            positions, which are the same for any data.
    """

    holder: str
    name: str
    digest: str
    tells: int
    proves: bool


class Verdict(NamedTuple):
    """The result of comparing the ranks' columns: names of columns.

    Attributes:
        certain: The columns that differ, and tell samples apart.
        likely: Other columns that differ, if no column proves that the samples are the same.
        kept: The columns to compare when passes begin: they are the same on all ranks, and tell samples apart best.
    """

    certain: Sequence[str]
    likely: Sequence[str]
    kept: Sequence[str]


def columns_of(dataset: Any, names: Collection[str] | None = None, most: int = _MOST) -> tuple[Column, ...]:
    """Return the columns of a dataset, and of the datasets in it. ``__getitem__`` of a dataset is never called.

    A column is plain data or a table: the dataset itself, ``Subset.indices``, a tensor of a ``TensorDataset``, or an
    attribute, within two levels of dicts and objects, with as many elements as its dataset has samples. An element
    counts by its texts and whole numbers; by its value if it has none. A path counts by its last parts. Parts that all
    elements have in common do not count. A list with a None in it is a cache, and no column. An attribute that is an
    array of more elements is a column that tells no samples apart.

    Args:
        dataset: The dataset.
        names: Only the columns with these names; None for all.
        most: How many elements of each column are read.

    Examples:
        >>> halves = [Subset(range(10), range(start, start + 5)) for start in (0, 5)]
        >>> one, other = map(columns_of, halves)
        >>> [column.name for column in one], one[0].digest == other[0].digest
        (['the indices of a Subset', 'the elements of a range'], False)
    """
    return tuple(
        column
        for holder, name, values, samples in _columns(dataset)
        if (names is None or name in names) and (column := _column(holder, name, values, samples, most)) is not None
    )


def columns_digest(dataset: Any, names: Collection[str]) -> str:
    """Return a digest of a dataset's columns of these names; empty if a name has no column now, or there are no names.

    Examples:
        >>> rows = [f"{number}.png" for number in range(9)]
        >>> before = columns_digest(rows, ["the elements of a list"])
        >>> rows.reverse()
        >>> before == columns_digest(rows, ["the elements of a list"]), columns_digest(rows, [])
        (False, '')
    """
    columns = columns_of(dataset, names, _MOST_IN_ALL // len(names)) if names else ()
    return _digest(sorted((one.name, one.digest) for one in columns)) if names and len(columns) == len(names) else ""


def compared(reported: Mapping[int, Sequence[Column]]) -> Verdict:
    """Compare the ranks' columns.

    If one column differs and another column of the same dataset is the same, the column that tells samples apart more
    surely decides: names before whole numbers, whole numbers before other values.

    Args:
        reported: The columns of each rank.
    """
    of_ranks = [{column.name: column for column in columns} for columns in reported.values()]
    common = [[one[name] for one in of_ranks] for name in of_ranks[0] if all(name in one for one in of_ranks)]
    rows = [(each[0], min(one.tells for one in each), len({one.digest for one in each}) > 1) for each in common]
    best, proven = Counter[str](), Counter[str]()  # by the columns' holders
    for each, (column, tells, differs) in zip(common, rows, strict=True):
        if not differs:
            best[column.holder] = max(best[column.holder], tells)
            if all(one.proves for one in each):
                proven[column.holder] = max(proven[column.holder], tells)
    counted = [(column, tells) for column, tells, differs in rows if differs and proven[column.holder] <= tells]
    kept = [each.name for each, tells, differs in rows if not differs and 0 < tells == best[each.holder]]
    return Verdict(
        tuple(column.name for column, tells in counted if tells),
        tuple(column.name for column, tells in counted if not tells),
        tuple(kept[place] for place in spread(len(kept), _MOST_KEPT)),
    )


def _columns(dataset: Any) -> Iterator[tuple[str, str, Any, int]]:
    """Yield the dataset, the name and the values of each column of a dataset and of the datasets in it.

    Yield how many samples the dataset has, too: an array may have more elements.
    """
    holders, named, seen = Counter[str](), Counter[str](), set[int]()
    for part in islice(_datasets(dataset), LOOKED_AT):
        kind, n = type(part).__name__, _length(part)
        holders[kind] += 1
        for name, value, least in _held(part) if n >= 0 else ():
            if (values := plain_data(value)) is None or len(values) < least or id(value) in seen:
                continue
            if len(values) == n or (len(values) > n and least == _FEW and type(value) in _ARRAYS):
                seen.add(id(value))
                yield f"{kind} {holders[kind]}", _numbered(name, named), values, n


def _numbered(name: str, named: Counter[str]) -> str:
    """Return a name with its number, if it was given before."""
    named[name] += 1
    return f"{name} (number {named[name]})" if named[name] > 1 else name


def _datasets(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and all datasets in it, from the outside in; also a list that is a ``Subset``'s dataset."""
    for part in walk(dataset, partial(held, is_wanted=_is_dataset)):
        yield part
        if isinstance(part, Subset) and not _is_dataset(part.dataset):
            yield part.dataset


def _length(part: Any) -> int:
    """Return how many samples a dataset has; -1 if it has no length."""
    with suppress(Exception):  # the user's code may raise anything
        return len(part)
    return -1


def _is_dataset(value: Any) -> bool:
    return type(value) not in _NO_DATASETS and (isinstance(value, Dataset) or is_hugging_face_table(value))


def _held(part: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield the name of each value that may be a column of a dataset, the value, and how many elements it needs."""
    if isinstance(part, Subset):
        yield "the indices of a Subset", part.indices, 1
    elif isinstance(part, TensorDataset):
        yield from ((f"tensors[{place}] of a TensorDataset", tensor, 1) for place, tensor in enumerate(part.tensors))
    elif plain_data(part) is not None:
        yield f"the elements of a {type(part).__name__}", part, 1
    elif not isinstance(part, IterableDataset):
        yield from ((name, value, _FEW) for name, value in attributes(part))


def attributes(dataset: Any, *, closures: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield a dataset's attributes, by name, and the values in their dicts, short lists and objects, within two levels.

    Args:
        dataset: The dataset.
        closures: Whether variables in the closures of functions count, too.
    """
    found = [(f"{type(dataset).__name__}.{name}", value) for name, value in stored(dataset).items()]
    for _ in range(3):
        yield from found
        found = [(f"{name}[{key!r}]", part) for name, value in found for key, part in _parts(value, closures=closures)]


def _parts(value: Any, *, closures: bool) -> Iterator[tuple[Any, Any]]:
    if type(value) in _DICTS:
        yield from ((key, part) for key, part in islice(value.items(), LOOKED_AT) if type(key) is str)
    elif type(value) in {list, tuple} and len(value) < _FEW:
        yield from enumerate(value)
    elif closures and isinstance(value, FunctionType):
        with suppress(ValueError):  # a variable without a value yet
            yield from getclosurevars(value).nonlocals.items()
    elif is_users(value):
        yield from islice(stored(value).items(), LOOKED_AT)


def plain_data(value: Any) -> Any:
    """Return the value if it is plain data or a table; else None."""
    if type(value) in _PLAIN:
        is_strange = isinstance(value, torch.Tensor) and (value.device.type != "cpu" or value.layout != torch.strided)
        return None if is_strange or getattr(value, "shape", (1,)) == () else value
    return value if is_table(value) or is_hugging_face_table(value) else None


# ---- lists of what a dataset reads ----


def lists_in(dataset: Any) -> dict[str, str]:
    """Return the lists of texts and of whole numbers, such as files, in a dataset and the objects that it wraps.

    The lists of two ranks differ if each rank built its dataset for a part of the data. A list is described by its
    length, its first and last element, and a digest. Variables in the closures of functions count, too. Single values,
    such as an id, a date or a folder, may rightly differ, and so may seeds, ranks, devices and caches. Names that
    ``tempfile`` makes, and the part of a URL after ``?``, don't count.

    Examples:
        >>> class Part(Dataset):
        ...     def __init__(self, files):
        ...         self.files, self.made_by = files, id(self)
        >>> lists_in(Part(["data/0.tar", "data/1.tar"]))
        {'Part.files': '2, from 0.tar to 1.tar (digest d13bb7d1e8bc74fe)'}
    """
    found, named, seen = dict[str, str](), Counter[str](), set[int]()
    for part in islice(walk(dataset, partial(held, is_wanted=_is_of_stream)), LOOKED_AT):
        for name, value in attributes(part, closures=True):
            is_own = any(word in name.lower().rpartition(".")[2] for word in _OWN)
            if is_own or id(value) in seen or (values := plain_data(value)) is None:
                continue
            seen.add(id(value))
            shown = _shown(elements_at(values, spread(len(values), _MOST)))
            if shown or not len(values):
                ends = f", from {shown[0]!s:.80} to {shown[-1]!s:.80} (digest {_digest(shown)})" if shown else ""
                found[_numbered(name, named)] = f"{len(values)}{ends}"
    return found


def _is_of_stream(part: object) -> bool:
    return isinstance(part, Dataset) or is_hugging_face_stage(part)


def _shown(looked_at: list[Any]) -> list[str | int]:
    """Return elements that are whole numbers or texts; of paths, the last parts; of other elements, nothing."""
    if {*map(type, looked_at)} == {int}:
        return looked_at
    if not all(isinstance(element, str | os.PathLike) for element in looked_at):
        return []
    return _apart([_OF_ONE_PROCESS.sub("", os.fspath(element)) for element in looked_at], last_parts)


# ---- elements ----


def _column(holder: str, name: str, values: Any, samples: int, most: int) -> Column | None:
    """Return a column, by evenly spread elements; None for a cache, which has None in it, and for unreadable data."""
    n = len(values)
    places = spread(n, most)
    try:
        if (rows := _rows_of(values, places)) is not None:
            shown, by = rows
        else:
            looked_at = elements_at(values, places)
            if type(None) in map(type, looked_at):
                return None
            shown, by = _described(looked_at)
        tells = by if n == samples and len({*shown}) == len(shown) else NOTHING
        return Column(holder, name, _digest((n, shown)), tells, tells > NOTHING and shown != places)
    except Exception:  # noqa: BLE001 - the user's elements may raise anything
        return None


def _rows_of(values: Any, places: list[int]) -> tuple[list[Any], int] | None:
    """Return some numbers of each row of a numeric array; None for a flat array of whole numbers, or other values."""
    if isinstance(values, torch.Tensor):
        is_whole = not (values.is_floating_point() or values.is_complex())
    elif isinstance(values, np.ndarray) and values.dtype.kind in "biufc":
        is_whole = values.dtype.kind in "biu"
    else:
        return None
    if is_whole and values.ndim == 1:
        return None
    some = as_array(values)[(slice(None), *few_places(tuple(values.shape[1:])))][places]
    return [row.tobytes() for row in some], NUMBERS if is_whole else VALUES


def elements_at(values: Any, places: list[int]) -> list[Any]:
    """Return some elements of plain data, or rows of a table."""
    if isinstance(values, np.ndarray | torch.Tensor) and values.ndim == 1:
        return list(as_array(values)[places].tolist())
    if type(values) in _PLAIN:
        return [values[place] for place in places]
    if is_table(values):
        return rows_at(values, places)
    rows = copy.copy(values)
    rows.set_format("arrow")  # read rows as they are stored, without decoding
    found: list[Any] = rows[[places[at] for at in spread(len(places), _MOST_ROWS)]].to_pylist()
    return found


def _described(looked_at: list[Any]) -> tuple[list[Any], int]:
    """Return a hashable value for each element, and what may tell the elements apart."""
    kinds = {*map(type, looked_at)}
    if kinds <= {int, bool}:
        return looked_at, NUMBERS
    if kinds == {str}:
        return _apart(looked_at, last_parts), NAMES
    found = _apart(looked_at, _parts_of)
    if () in found:
        return [*map(_value_of, looked_at)], VALUES
    if len({*map(len, found)}) == 1:  # leave out parts that all elements have in common
        apart = [parts for parts in zip(*found, strict=True) if len({*parts}) > 1]
        found = [*zip(*apart, strict=True)] if apart else found
    return found, NAMES if any(isinstance(part, str | bytes) for part in chain(*found)) else NUMBERS


def _apart(looked_at: list[Any], described: Callable[[Any, int], Any]) -> list[Any]:
    """Describe elements, with as few last parts of paths as tell the elements apart."""
    for length in (1, 2, 3):
        found = [described(element, length) for element in looked_at]
        if len({*found}) == len(found):
            return found
    return [described(element, 1) for element in looked_at]


def _parts_of(element: Any, length: int) -> tuple[str | bytes | int, ...]:
    """Return the texts and whole numbers in an element, or one level deeper; of a path, its last parts."""
    parts: Iterable[Any] = (element,)
    if isinstance(element, list | tuple):
        parts = element[:: -(-len(element) // _PARTS)] if element else ()
    elif isinstance(element, Mapping):
        parts = [element[key] for key in sorted(element, key=str)]
    elif is_dataclass(element) or is_users(element):
        parts = stored(element).values()
    return tuple(part for part in (_part(each, length) for each in islice(parts, _PARTS)) if part is not None)


def _part(value: Any, length: int) -> str | bytes | int | None:
    if isinstance(value, str | os.PathLike):
        return last_parts(os.fspath(value), length)
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    return value if isinstance(value, int | bytes) else None


def _value_of(element: Any) -> str:
    if isinstance(element, torch.Tensor | np.ndarray) and element.ndim:
        return few_numbers(element).hex()
    return fingerprint([element])


def last_parts(text: str, length: int) -> str:
    """Return the last parts of a path, because ranks may keep copies of a file in folders of their own.

    Examples:
        >>> last_parts("/data/cats/1.png", 2), last_parts("https://host/1.png?signature=7", 1)
        ('cats/1.png', '1.png')
    """
    path = text.partition("?")[0] if "://" in text else text.replace("\\", "/")
    return "/".join(path.rsplit("/", length)[-length:])


def _digest(value: Any) -> str:
    """Return a digest of texts, bytes and whole numbers in lists and tuples."""
    return blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def spread(n: int, most: int) -> list[int]:
    """Return at most ``most`` positions in ``range(n)``, from the first to the last, evenly spread."""
    return [*range(n)] if n <= most else [place * (n - 1) // (most - 1) for place in range(most)]
