"""Fingerprints of a dataset's samples, which show that ranks have different data; nothing is loaded or decoded."""

import copy
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, islice
from time import monotonic
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ddp_patch.compat.packages import is_hugging_face_table
from ddp_patch.loaders.recognition import nested_datasets
from ddp_patch.loaders.samples import copy_to_draw, length_of
from ddp_patch.orders.fingerprint import fingerprint, number_of
from ddp_patch.orders.orders import spread
from ddp_patch.walks import LOOKED_AT, stored

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Content", "FirstSamples", "Relation", "Row", "chosen_samples", "first_samples", "relation_of", "rows_of"]


# How many samples are looked at, and how much of each: numbers of an array, characters of a text, parts of a container.
_SAMPLES, _NUMBERS, _CHARACTERS, _PARTS = 16, 64, 256, 8
# A longer text is no path.
_LONGEST_PATH = 1024
# A shorter attribute of a dataset may have as many values as the dataset has samples by chance.
_LEAST_HELD = 8
# How many attributes of an object are looked at, and how many objects deep.
_ATTRIBUTES, _DEPTH = 64, 2
# Plain data, by exact type: a subclass may read a file, or ask another rank, for an element.
_PLAIN = (list, tuple, range, np.ndarray, torch.Tensor)


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
    """

    fingerprint: str
    identifies: bool
    is_order: bool = False


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
    for _, name, is_held, elements in _some_of_each(dataset):
        found[name, is_held].append(elements)
    return tuple(
        Content(name, fingerprint(elements), is_held, all(map(_identifies, elements)))
        for (name, is_held), elements in found.items()
    )


def rows_of(dataset: Any, known: Collection[str] = ()) -> dict[str, Row]:
    """Return what a dataset holds now, as ``chosen_samples`` looks at it, by name.

    An attribute that did not identify the samples at the patch may hold what the training changes, such as losses. So
    it counts only where its elements are all distinct texts or whole numbers.

    Args:
        dataset: The dataset.
        known: The names of what identified the samples at the patch.
    """
    found: dict[str, Row] = {}
    for part, name, is_held, elements in _some_of_each(dataset):
        identifies = _identifies(elements)
        numbers = map(_whole_number, elements)
        # Rows that were not shuffled yet count too: another rank may have shuffled its own.
        is_order = is_held and _are_distinct(elements) and all(number in range(len(part)) for number in numbers)
        names_samples = identifies and all(isinstance(value, tuple | int) for value in elements)
        if not is_held or names_samples or is_order or (identifies and name in known):
            again = sum(other.partition(" (")[0] == name for other in found)
            found[f"{name} ({again + 1})" if again else name] = Row(fingerprint(elements), identifies, is_order)
    return found


def _some_of_each(dataset: Any) -> Iterator[tuple[Any, str, bool, list[Any]]]:
    """Yield the nested datasets, each with what ``_contents`` finds in it."""
    for part in islice(nested_datasets(dataset), LOOKED_AT):
        with suppress(Exception):  # the user's indices, or a row that cannot be read yet
            for name, is_held, values in _contents(part):
                if elements := [*values]:
                    yield part, name, is_held, elements


def _whole_number(elements: Any) -> int | None:
    """Return the whole number that an element is, as ``_told`` describes it; None if it is none."""
    number = elements[2] if isinstance(elements, list) and elements[1:2] == [()] else elements
    return number if isinstance(number, int) else None


def _identifies(elements: list[Any]) -> bool:
    """Return whether no two elements are alike; but positions are the same for any data."""
    last = elements[-1]
    positions = _spread(last + 1) if isinstance(last, int) else []
    return _are_distinct(elements) and elements != positions


def _are_distinct(elements: list[Any]) -> bool:
    return len({fingerprint([value]) for value in elements}) == len(elements)


def _spread(n: int) -> list[int]:
    return [*dict.fromkeys(place * (n - 1) // (_SAMPLES - 1) for place in range(_SAMPLES))] if n > 0 else []


def _contents(dataset: Any) -> Iterator[tuple[str, bool, Sequence[Any]]]:
    """Yield some of a dataset's samples, after the name of what holds them and whether that is an attribute."""
    kind = type(dataset).__name__
    if isinstance(dataset, Subset):
        yield "the indices of a Subset", False, spread(dataset.indices)
        base: Any = dataset.dataset
        if not isinstance(base, Dataset):  # which nobody else looks at
            yield from _contents(base)
    elif is_hugging_face_table(dataset):
        yield "the first and last rows of a Hugging Face dataset", False, _ends(dataset)
    elif type(dataset) in _PLAIN:
        yield f"the elements of a {kind}", False, _looked_at(dataset)
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            yield "the tensors of a TensorDataset", False, _looked_at(tensor)
    elif not isinstance(dataset, IterableDataset):
        for name, values in _attributes(dataset):
            yield name, True, values


def _attributes(dataset: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the name of each attribute of a dataset with one value for each sample, and some of these."""
    n = length_of(dataset, ()) or 0
    for name, value, depth in _nested(type(dataset).__name__, dataset) if n >= _LEAST_HELD else ():
        if type(value) in _PLAIN and getattr(value, "ndim", 1) > 0 and len(value) == n:
            elements = _looked_at(value)
            if depth == 0 or all(isinstance(part, tuple | int) for part in elements):
                yield name, elements
        elif is_hugging_face_table(value) and len(value) == n:
            yield f"the first and last rows of {name}", _ends(value)


def _nested(name: str, holder: object, depth: int = 0) -> Iterator[tuple[str, Any, int]]:
    """Yield an object's attributes, by name, and those of the plain objects that it holds."""
    for attribute, value in islice(stored(holder).items(), _ATTRIBUTES):
        yield f"{name}.{attribute}", value, depth
        is_plain = not isinstance(value, type | ModuleType | FunctionType | Dataset | nn.Module | DataLoader)
        if depth < _DEPTH and is_plain and type(value) not in _PLAIN and hasattr(value, "__dict__"):
            yield from _nested(f"{name}.{attribute}", value, depth + 1)


def _ends(table: Any) -> list[Any]:
    """Return the first and the last row of a Hugging Face dataset as they are stored, with nothing decoded."""
    rows = copy.copy(table)
    rows.set_format("arrow")
    return [rows[place].to_pylist() for place in (0, len(table) - 1)] if len(table) else []


def _looked_at(values: Any) -> list[Any]:
    """Return the descriptions of some elements, evenly spread; none of a cache that fills up."""
    elements = [values[position] for position in _spread(len(values))]
    return [] if any(element is None for element in elements) else [_told(element) for element in elements]


def _told(value: Any) -> Any:
    """Describe an element: enough to distinguish two samples, and nothing in which ranks may differ."""
    match value:
        case os.PathLike():
            return _told(os.fspath(value))
        case str():
            # Ranks may keep their copies of a file in folders of their own.
            name = value.replace("\\", "/").rpartition("/")[2] if len(value) < _LONGEST_PATH else value
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
            return [len(value), *([_told(key), _told(part)] for key, part in islice(value.items(), _PARTS))]
        case list() | tuple():
            return [len(value), *map(_told, value[:_PARTS])]
    return type(value).__name__


# Looking stops here, because a sampler may be slow or endless.
_MOST_SAMPLES, _MOST_SECONDS = 2**18, 1.0
# How many hashes a rank sends at most: 8 KiB.
_MOST_HASHES = 1024
# If streams are drawn independently, how many samples they must be expected to share before sharing none is evidence:
# by chance that happens once in e**20 cases.
_EXPECTED = 20.0
_HASHES = 2**64

Relation: TypeAlias = Literal["parts", "overlapping", "unclear"]


@dataclass(frozen=True, slots=True)
class FirstSamples:
    """The first samples of a rank's stream, in no order.

    Attributes:
        hashes: The smallest hashes of their indices or names, each once, in ascending order.
        is_cut: Whether there are more.
        is_whole: Whether the stream ends with these samples.
        largest: The most samples in an item: 1 where items are indices.
    """

    hashes: Sequence[int]
    is_cut: bool
    is_whole: bool
    largest: int


def first_samples(sampler: Any, dataset: object, n: int | None, ranks: int) -> FirstSamples | None:
    """Return which samples a stream begins with: as many as one rank's share of the dataset.

    Nothing is known of a dataset without a length, or of items other than its indices or names, and lists of them.

    Args:
        sampler: What the stream comes from. A copy of it is drawn from.
        dataset: What the samples come from. It is not copied.
        n: How many samples the dataset has.
        ranks: How many ranks share them.
    """
    if not n:
        return None
    samples: list[Any] = []
    largest, wanted, until = 1, min(-(-n // ranks), _MOST_SAMPLES), monotonic() + _MOST_SECONDS
    try:
        with copy_to_draw(sampler, dataset) as drawn:
            items = iter(drawn)
            batch = _samples_in(next(items, None))
            while batch and len(samples) < wanted and monotonic() < until:
                samples += batch
                largest = max(largest, len(batch))
                batch = _samples_in(next(items, None))
    except Exception:  # noqa: BLE001 - the user's code, run for a better message
        return None
    if not all(isinstance(index, str) or 0 <= index < n for index in samples):
        return None  # numbers that mean something else
    hashes = np.unique(_hashed(samples))
    return FirstSamples(hashes[:_MOST_HASHES].tolist(), len(hashes) > _MOST_HASHES, not batch, largest)


def _samples_in(item: Any) -> list[Any]:
    """Return the indices or names that an item of a stream is, or is a list of; none for the end."""
    if item is None:
        return []
    listed = item.tolist() if isinstance(item, torch.Tensor | np.ndarray | np.generic) else item
    found = listed if isinstance(listed, list) else [listed]
    if not all(isinstance(sample, int | str) for sample in found):
        raise TypeError("neither indices nor names")
    return found


def _hashed(samples: Sequence[Any]) -> "NDArray[np.uint64]":
    """Return a number below 2**64 for each sample, evenly spread."""
    numbers = [number_of([name]) if isinstance(name, str) else name for name in samples]
    mixed = np.array(numbers, dtype=np.uint64)
    for multiplier in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9):  # splitmix64's
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(multiplier)
    return mixed ^ (mixed >> np.uint64(31))


def relation_of(parties: Sequence[FirstSamples], n: int, ranks: int) -> Relation:
    """Return how the streams of several groups of ranks relate; each group has its own order.

    They are parts if they share no more than padding and either hold all samples between them, or would share many if
    they were drawn independently of each other. Two ranks that shuffle a million samples with a generator each have
    other samples among their first hundred too, so that alone proves nothing.

    Args:
        parties: What each begins with.
        n: How many samples the dataset has.
        ranks: How many ranks share them.

    Examples:
        >>> halves = [FirstSamples([*range(start, 12, 2)], False, True, 1) for start in (0, 1)]
        >>> relation_of(halves, 12, 2), relation_of([halves[0], halves[0]], 12, 2), relation_of(halves, 10**6, 2)
        ('parts', 'overlapping', 'unclear')
    """
    # Compare up to the hash that all parties were asked for.
    last = min((party.hashes[-1] for party in parties if party.is_cut), default=_HASHES - 1)
    held = [{value for value in party.hashes if value <= last} for party in parties]
    taken, together = sum(map(len, held)), len(set().union(*held))
    padding = (ranks - 1) * max(party.largest for party in parties)
    if taken - together > padding or 2 * (taken - together) >= taken:
        return "overlapping"
    if all(party.is_whole for party in parties) and last == _HASHES - 1 and n - together <= padding:
        return "parts"
    looked_at = n * (last + 1) / _HASHES
    expected = sum(len(first) * len(second) for first, second in combinations(held, 2)) / looked_at
    return "parts" if expected >= _EXPECTED else "unclear"
