"""What the ranks of a made-up world drew, coded as numbers; and what a loader's samples are like."""

import hashlib
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date, time, timedelta
from enum import Enum
from itertools import chain
from os import PathLike
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, ConcatDataset, Subset, TensorDataset

from ddp_patch.auditing.epoch_report import Units
from ddp_patch.compat.packages import is_interleaved, is_split_by_node
from ddp_patch.loaders.facts import Level, LoaderFacts
from ddp_patch.loaders.recognition import nested_datasets, shards_itself
from ddp_patch.orders.fingerprint import fingerprint
from ddp_patch.sharding.epochs import EpochSampler

__all__ = [
    "Coding",
    "EpochDraws",
    "Numbers",
    "RankDraws",
    "Traits",
    "Value",
    "base_of",
    "contents",
    "digest",
    "divides_batches",
    "in_base",
    "layers_of",
    "length_of",
    "made_of_batches",
    "narrow",
    "signature",
    "traits_of",
]


Numbers = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Value:
    """Stand for a sample by its value, which is no index even where it is a whole number.

    Attributes:
        value: The sample.
    """

    value: Any


class Coding:
    """Give every item a number: an index is its own number, any other key gets the next negative one.

    Examples:
        >>> coding = Coding()
        >>> coding.codes([3, "a.jpg", 3, "b.jpg", "a.jpg"]).tolist()
        [3, -1, 3, -2, -1]
        >>> coding.name(-2)
        "'b.jpg'"
    """

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._names: list[str] = []

    def codes(self, items: Sequence[Any]) -> Numbers:
        """Return the items' numbers, shape (items,)."""
        if set(map(type, items)) == {int}:
            try:
                codes = np.fromiter(items, np.int64, len(items))
            except OverflowError:  # an index beyond 64 bits is numbered like any other key
                pass
            else:
                if codes.min() >= 0:
                    return codes
        return np.fromiter(map(self._code, items), np.int64, len(items))

    def name(self, code: int) -> str:
        """Return an item as text to show to people."""
        return str(code) if code >= 0 else self._names[-1 - code]

    def adopt(self, other: "Coding", codes: Numbers) -> Numbers:
        """Translate the numbers of another coding, such as another process's, to this one's."""
        if not other._names:
            return codes
        own = [self._number(key, name) for key, name in zip(other._codes, other._names, strict=True)]
        return np.where(codes >= 0, codes, np.array(own)[np.minimum(-1 - codes, len(own) - 1)])

    def _code(self, item: Any) -> int:
        index = _index(item)
        if index is not None:
            return index
        key = fingerprint([item])
        if key not in self._codes:  # else save the time to name it
            self._number(key, reprlib.repr(item.value if isinstance(item, Value) else item))
        return self._codes[key]

    def _number(self, key: str, name: str) -> int:
        if key not in self._codes:
            self._codes[key] = -1 - len(self._names)
            self._names.append(name)
        return self._codes[key]


def _index(item: Any) -> int | None:
    """Return an item as the index that a dataset would see, or None if it is another kind of key."""
    is_tensor = (
        isinstance(item, torch.Tensor) and item.ndim == 0 and not (item.is_floating_point() or item.is_complex())
    )
    if isinstance(item, bool) or not (is_tensor or isinstance(item, int | np.integer)):
        return None
    index = operator.index(item)
    return index if 0 <= index < 2**63 else None


def narrow(codes: Numbers) -> Numbers:
    """Return the numbers in 32 bits where they fit, otherwise as they are."""
    bounds = np.iinfo(np.int32)
    fits = not len(codes) or (codes.min() >= bounds.min and codes.max() <= bounds.max)
    return codes.astype(np.int32) if fits else codes


# Samples in memory, by index.
Held: TypeAlias = Sequence[Any] | NDArray[Any] | torch.Tensor
# What a fingerprint tells by its value. It tells any other object by its type alone.
_PLAIN = (type(None), int, float, complex, str, bytes, bytearray, Enum, date, time, timedelta, PathLike)
_ARRAYS = (torch.Tensor, np.ndarray, np.generic)


def base_of(dataset: Any) -> Any:
    """Return the dataset below all ``Subset`` layers, or the dataset itself where it has none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def in_base(dataset: Any, items: Iterable[Any]) -> list[Any]:
    """Translate a dataset's indices to indices of the dataset below its ``Subset`` layers.

    Examples:
        >>> in_base(Subset(Subset("abcdef", [1, 3, 5]), [2, 0]), [0, 1])
        [5, 1]
    """
    found = list(items)
    while isinstance(dataset, Subset):
        indices = dataset.indices
        found = [[indices[one] for one in item] if isinstance(item, list) else indices[item] for item in found]
        dataset = dataset.dataset
    return found


def layers_of(dataset: Any) -> list[Numbers]:
    """Return the indices that each layer of a dataset has in the dataset at its base, from there upwards.

    Returns:
        An array for the base and one for each ``Subset`` above it, shape (samples of the layer,). The list ends before
        a layer that has no length or whose indices are no whole numbers.

    Examples:
        >>> [layer.tolist() for layer in layers_of(Subset(Subset("abcd", [3, 1, 0]), [2, 0]))]
        [[0, 1, 2, 3], [3, 1, 0], [0, 3]]
    """
    below = layers_of(dataset.dataset) if isinstance(dataset, Subset) else []
    try:
        found = [operator.index(index) for index in in_base(dataset, range(len(dataset)))]
        return [*below, np.array(found, np.int64)]
    except Exception:  # noqa: BLE001 - the user's dataset may raise anything
        return below


def contents(dataset: Any) -> Held | None:
    """Return the samples of a dataset that holds them in memory, by index; None for any other dataset.

    Examples:
        >>> contents(Subset(["a", "b", "c"], [2, 0]))
        ['c', 'a']
    """
    match dataset:
        case list() | tuple() | range() | np.ndarray() | torch.Tensor():
            return dataset
        case TensorDataset():
            return [*zip(*dataset.tensors, strict=True)]
        case Subset():
            below = contents(dataset.dataset)
            return None if below is None else [below[index] for index in dataset.indices]
        case ConcatDataset():
            parts = [held for part in dataset.datasets if (held := contents(part)) is not None]
            return [*chain.from_iterable(parts)] if len(parts) == len(dataset.datasets) else None
    return None


def digest(dataset: Any) -> str | None:
    """Return a hash of the samples that a dataset holds in memory; None where it holds none or they cannot be told."""
    held = contents(dataset)
    match held:
        case None:
            return None
        case range():
            return fingerprint([repr(held)])
        case torch.Tensor():
            return fingerprint([held])
        case np.ndarray() if not held.dtype.hasobject:
            return fingerprint([held])
    return fingerprint(held) if all(map(_is_told, held)) else None


def _is_told(item: Any) -> bool:
    """Tell whether an item has a value that a fingerprint tells."""
    match item:
        case list() | tuple() | Set():
            return all(map(_is_told, item))
        case Mapping():
            return all(_is_told(value) for value in item.values())
    if is_dataclass(item) and not isinstance(item, type):
        return all(_is_told(getattr(item, field.name)) for field in fields(item))
    return isinstance(item, (*_PLAIN, *_ARRAYS))


# Hash this many items at once: converting them all would need twice the memory of an epoch.
_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class RankDraws:
    """Hold what one rank drew in one epoch.

    Attributes:
        items: Number of each item in the order drawn, shape (items,).
        sizes: Number of items in each step's batch, shape (steps,).
        ended: Whether the epoch came to its end; if not, these are its first items.
        lengths: What ``len(loader)`` returned before and after the epoch; None where it raised.
        seconds: Time spent drawing, without the time spent recording.
        memory: Bytes by which the process grew while drawing; None where the system does not report it.
        error: The exception that ended the epoch, as text; None without one.
        asked: Whether an iterable dataset asked which worker it is in.
        idle: Numbers of the workers that gave nothing of an iterable dataset.
        parts: How long each part of the stream is that ranks share by itself; empty where they share one stream.
    """

    items: Numbers
    sizes: Numbers
    ended: bool
    lengths: tuple[int | None, int | None] = (None, None)
    seconds: float = 0.0
    memory: int | None = None
    error: str | None = None
    asked: bool = False
    idle: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()

    def first_steps(self, steps: int) -> "RankDraws":
        """Return what the first ``steps`` steps drew."""
        sizes = self.sizes[:steps]
        return replace(self, items=self.items[: int(sizes.sum())], sizes=sizes, ended=False)


@dataclass(frozen=True, slots=True)
class EpochDraws:
    """Hold one epoch as every rank drew it, and as a single process would.

    Attributes:
        number: The epoch's number, from 0.
        ranks: What each rank drew, by rank.
        alone: What a single process would draw, its last incomplete batch included.
        units: Whether ranks shard samples or whole batches.
        is_iterable: Whether items are samples read from an iterable dataset, not indices.
        unpatched: What the unpatched loader of an iterable dataset gives a single process; None where none is patched.
    """

    number: int
    ranks: Sequence[RankDraws]
    alone: RankDraws
    units: Units
    is_iterable: bool
    unpatched: RankDraws | None = None

    @property
    def is_sample(self) -> bool:
        """Tell whether only a part of the epoch was drawn."""
        return not all(drawn.ended for drawn in (*self.ranks, self.alone))

    @property
    def expected(self) -> int:
        """Return how many samples or batches a single process would get."""
        return len(self.alone.items) if self.units == "samples" else len(self.alone.sizes)

    @property
    def parts(self) -> tuple[int, ...]:
        """Return how many units each part has that ranks share in rounds of its own; one where they share a stream."""
        return self.alone.parts or (self.expected,)

    @property
    def filling(self) -> int:
        """Return how many units fill the last round of each part."""
        return sum(-length % len(self.ranks) for length in self.parts)

    @property
    def steps(self) -> int:
        """Return how many steps the rank with the most steps makes."""
        return max(len(drawn.sizes) for drawn in self.ranks)


def signature(ranks: Sequence[RankDraws]) -> bytes:
    """Return a hash of what ranks drew: two epochs with one order have one hash."""
    running = hashlib.blake2b(digest_size=16)
    for drawn in ranks:
        running.update(b"%d:" % len(drawn.items))
        for start in range(0, len(drawn.items), _PIECE):
            running.update(drawn.items[start : start + _PIECE].astype(np.int64).tobytes())
    return running.digest()


@dataclass(frozen=True, slots=True)
class Traits:
    """Describe a rank's loader.

    Attributes:
        units: Whether ranks shard samples or whole batches.
        is_iterable: Whether the dataset is iterable, so that it is read and has no indices.
        batch_size: Samples in a batch, where the loader or its batch sampler says so; otherwise 1.
        num_workers: The loader's workers.
        keeps_workers: Whether they live on from epoch to epoch.
        num_shards: In how many pieces an iterable dataset says that its workers may share it; None if it does not say.
        may_be_split: Whether Hugging Face's ``split_dataset_by_node()`` has split the dataset, or may have, which its
            ``interleave_datasets()`` hides.
        divides_batches: Whether each rank takes a part of every batch of one process.
        drops_batch: Whether the loader leaves out a last, incomplete batch.
        drops_round: Whether a sampler leaves out the last, incomplete round of ranks.
        sharers: How many of the loader's samplers and its dataset shard by themselves.
        dataset_length: Samples in the dataset; None where it is iterable or has no length.
        base_length: Samples in the dataset below torch's ``Subset`` layers; None as above.
    """

    units: Units
    is_iterable: bool
    batch_size: int
    num_workers: int
    keeps_workers: bool
    num_shards: int | None
    may_be_split: bool
    divides_batches: bool
    drops_batch: bool
    drops_round: bool
    sharers: int
    dataset_length: int | None
    base_length: int | None

    @property
    def batchers(self) -> int:
        """Return how many parts of a rank make batches, each with a last one of its own.

        Each worker makes its own batches of an iterable dataset. Elsewhere the rank's one batch sampler makes them.
        """
        return max(1, self.num_workers) if self.is_iterable else 1


def traits_of(facts: LoaderFacts[Any]) -> Traits:
    """Return the traits of a loader that was looked at."""
    samplers, batches = facts.samplers, None if facts.level is Level.UNBATCHED else facts.iterated
    is_iterable = facts.level is Level.ITERABLE
    size = facts.batch_size or getattr(batches, "batch_size", None)
    return Traits(
        units="batches" if made_of_batches(facts) else "samples",
        is_iterable=is_iterable,
        batch_size=size if isinstance(size, int) and size > 0 else 1,
        num_workers=facts.num_workers,
        keeps_workers=facts.loader.persistent_workers,
        num_shards=_num_shards(facts.dataset) if is_iterable else None,
        may_be_split=is_iterable and not isinstance(facts.sharded_by, EpochSampler) and _may_be_split(facts.dataset),
        divides_batches=divides_batches(facts),
        drops_batch=facts.drop_last or getattr(batches, "drop_last", False) is True,
        drops_round=any(getattr(sampler, "drop_last", False) is True for sampler in samplers),
        sharers=sum(map(shards_itself, (*samplers, facts.dataset))),
        dataset_length=None if is_iterable else facts.dataset_length,
        base_length=None if is_iterable else length_of(base_of(facts.dataset)),
    )


def _may_be_split(dataset: Any) -> bool:
    return is_interleaved(dataset) or any(map(is_split_by_node, nested_datasets(dataset)))


def _num_shards(dataset: Any) -> int | None:
    with suppress(Exception):
        found = dataset.num_shards
        return found if isinstance(found, int) else None
    return None


def length_of(sized: Any) -> int | None:
    """Return ``len(sized)``; None where it raises, for whatever reason."""
    with suppress(Exception):
        return len(sized)
    return None


def divides_batches(facts: LoaderFacts[Any]) -> bool:
    """Tell whether each rank takes a part of every batch of one process."""
    return isinstance(facts.sharded_by, EpochSampler) and facts.sharded_by.agreed.options.divides_batches


def made_of_batches(facts: LoaderFacts[Any]) -> bool:
    """Tell whether ranks shard whole batches of this loader."""
    if divides_batches(facts):
        return False
    if facts.level is Level.UNBATCHED:
        return any(isinstance(sampler, BatchSampler) for sampler in facts.stream.samplers)
    return facts.level is Level.BATCH
