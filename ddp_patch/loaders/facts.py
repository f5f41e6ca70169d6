"""The facts of a loader or sampler: everything that sharding depends on, as one frozen value."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import chain, cycle, islice
from types import GeneratorType
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ddp_patch.compat.private_packages import ITERATORS_KEPT_FOR_STATES
from ddp_patch.compat.private_torch import RUNNING_ITERATOR, RunningLoader, has_own_iteration, is_torch_batch_sampler
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.columns import Column, columns_digest, columns_of, compared
from ddp_patch.loaders.copying import repeated_in, repeater_in, with_repeated
from ddp_patch.loaders.nested_samplers import is_one_shot, length_of, nested_samplers, or_unknown, steps_of
from ddp_patch.loaders.recognition import HeldWorld, samplers_in_use, sharded_by, world_of
from ddp_patch.options import Fingerprint
from ddp_patch.orders.digest import fingerprint
from ddp_patch.orders.random_states import RandomGenerator, random_generators
from ddp_patch.positions_and_padding import ONE_PER_STEP, Batching
from ddp_patch.walks import first_parts

L = TypeVar("L", bound=DataLoader[Any])

# Iterators that cannot be started again: a loader that keeps such an iterator goes on with it.
_RUNNING = (RunningLoader, GeneratorType, map, filter, zip, chain, islice, cycle)
# Attributes in which an iterator does no harm: torch begins a new one for each epoch, and samplers and datasets are
# checked elsewhere.
_LOOKED_AT_ELSEWHERE = frozenset({RUNNING_ITERATOR, "dataset", "sampler", "batch_sampler"}) | ITERATORS_KEPT_FOR_STATES


class ShardedUnit(Enum):
    """What is sharded in a loader."""

    SAMPLE = "sample"  # indices, which torch's own BatchSampler puts into batches on each rank
    BATCH = "batch"  # whole batches of any other batch sampler, or of torch's own where the user says so
    UNBATCHED = "unbatched"  # the sampler of a loader without automatic batching: batch_size=None
    ITERABLE = "iterable"  # an IterableDataset, which has no sampler


@dataclass(frozen=True)
class StreamFacts:
    """The facts of a stream, read without using it up.

    The user's code (lengths, the first items of an iterator's copy) runs at most once, and only if it is needed. The
    loader's present dataset and samplers are read at each call.

    Attributes:
        source: The sampler, batch sampler or iterable dataset that the stream comes from.
        loader: The loader that iterates the source; None for a sampler by itself.
    """

    source: Any
    loader: DataLoader[Any] | None = None

    @cached_property
    def samplers(self) -> Sequence[object]:
        """The source and all samplers nested in it, from the outside in."""
        return tuple(nested_samplers(self.source))

    @property
    def dataset(self) -> object:
        """The dataset of the samples, if known. A dataset is never copied."""
        return None if self.loader is None else self.loader.dataset

    @property
    def name(self) -> str:
        """The name of the source's class, for errors."""
        return type(self.source).__name__

    @cached_property
    def length(self) -> int | None:
        """How many items the stream has, by the source's ``len()``; None if it has no length."""
        return length_of(self.source, self.samplers)

    @property
    def described(self) -> dict[str, object]:
        """Classes and length, by the names under which ranks compare them and saved states have them."""
        kinds = " over ".join(type(nested).__qualname__ for nested in self.samplers)
        found: dict[str, object] = {"sampler": kinds, "sampler length": or_unknown(self.length)}
        if is_torch_batch_sampler(type(self.source)):
            found |= {"batch_size": self.source.batch_size, "drop_last": self.source.drop_last}
        return found

    @cached_property
    def is_one_shot(self) -> bool:
        """Whether the source is an iterator that yields its items only once."""
        return is_one_shot(self.source, self.dataset)

    @cached_property
    def columns(self) -> Sequence[Column]:
        """The columns of the dataset, by which ranks compare their data."""
        return columns_of(self.dataset)

    @property
    def generators(self) -> Sequence[RandomGenerator]:
        """The generators that get the same state on all ranks: torch's, and generators that only samplers draw from."""
        of_dataset = {*map(id, random_generators([self.dataset]))}
        of_samplers = {*map(id, random_generators(self.samplers))} - of_dataset
        holders = self.samplers if self.loader is None else (self.loader, *samplers_in_use(self.loader))
        found = random_generators(holders)
        return [each for each in found if isinstance(each, torch.Generator) or id(each) in of_samplers]


@dataclass(frozen=True)
class LoaderFacts(Generic[L]):
    """The facts of a loader.

    Lengths run the user's code, so each is computed at most once, and only if needed.

    Attributes:
        loader: The loader itself, to be copied.
        unit: What is sharded.
        source: The sampler, batch sampler or iterable dataset that yields the sharded items.
        sharded_by: The object that shards the loader already, or None.
        batch_size: How many samples a batch has; None if torch does not make the batches.
        drop_last: Whether torch leaves out a last, incomplete batch.
        num_workers: How many workers the loader has.
        batches_ahead: How many batches the workers prefetch.
        repeater: The object that repeats the sampler or batch sampler, in a loader with one iterator for all epochs; or
            None.
        running: The attributes that hold an iterator over this loader: torch's, or the one for all epochs.
        other_loader_in: The attribute with another loader, which the loader may iterate instead of its own data, or
            None.
        iterator_in: The attribute that holds a running iterator with which the loader may continue, or None. torch's
            own iteration starts anew, and so does a copy of a loader with a repeater.
    """

    loader: L
    unit: ShardedUnit
    source: Any
    sharded_by: object | None
    batch_size: int | None
    drop_last: bool
    num_workers: int
    batches_ahead: int
    repeater: object | None
    running: Sequence[str]
    other_loader_in: str | None
    iterator_in: str | None

    @property
    def dataset(self) -> Any:
        """The loader's dataset."""
        return self.loader.dataset

    @cached_property
    def stream(self) -> StreamFacts:
        """What is sharded."""
        return StreamFacts(self.source, self.loader)

    @property
    def iterated(self) -> Any:
        """The batch sampler that the loader iterates now for one epoch, or its sampler if it has none.

        The attribute is read each time, because a ``set_epoch`` of the user's may put another sampler there.
        """
        return _iterated(self.loader, self.repeater)

    def placed(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return attributes for a copy of the loader; a repeated sampler is put into a copy of the repeater."""
        if self.repeater is None:
            return dict(attributes)
        place = "sampler" if self.loader.batch_sampler is None else "batch_sampler"
        return {**attributes, place: with_repeated(self.repeater, attributes[place])}

    @property
    def samplers(self) -> Sequence[object]:
        """All samplers in use now, from the outside in."""
        return tuple(samplers_in_use(self.loader))

    @property
    def has_all_data(self) -> bool:
        """Whether all ranks' datasets should be the same: the loader is unsharded, or has a ``DistributedSampler``."""
        return self.sharded_by is None or isinstance(self.sharded_by, DistributedSampler)

    @property
    def made_for(self) -> HeldWorld | None:
        """The rank and the number of ranks that the loader is sharded for already; None if not known."""
        return None if self.sharded_by is None else world_of(self.sharded_by)

    @cached_property
    def dataset_length(self) -> int | None:
        """How many samples the dataset has, by its ``len()``; None if it has no length."""
        return length_of(self.dataset, nested_samplers(self.dataset))

    @property
    def batching(self) -> Batching:
        """How the items that a rank gets become its batches."""
        if self.unit in {ShardedUnit.BATCH, ShardedUnit.UNBATCHED}:
            return ONE_PER_STEP
        return Batching(self.batch_size or 1, self.drop_last)

    def in_whole_batches(self) -> "LoaderFacts[L]":
        """Return the same facts, but for sharding the batches that torch makes of the sampler's indices."""
        return replace(self, unit=ShardedUnit.BATCH, source=self.iterated)

    @property
    def described(self) -> dict[str, object]:
        """The facts that must be the same on every rank, by name."""
        name = type(self.loader).__qualname__
        if self.sharded_by is not None:
            # The ranks' lengths and generators may rightly differ, so only the kind of sharding is compared.
            return {"loader": name, "sharded already by": type(self.sharded_by).__qualname__}
        return {
            "loader": name,
            "sharded already by": "nothing",
            "dataset": type(self.dataset).__qualname__,
            "dataset length": or_unknown(self.dataset_length),
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "shared by": self.unit.value,
            **self.stream.described,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the loader alone: another process reads the facts of its own copy."""
        return look_at, (self.loader,)


def look_at(loader: L) -> LoaderFacts[L]:
    """Return the facts of a loader.

    ``loader`` may also be a framework's wrapper: an attribute that it lacks counts as None, 0 or False.
    """
    kind, repeater = type(loader), repeater_in(loader)
    iterates_itself = has_own_iteration(kind)
    iterated = _iterated(loader, repeater)
    unit, source = _sharded_part(loader, iterated)
    attributes = getattr(loader, "__dict__", {})
    kept = {name: first_parts(value) for name, value in attributes.items() if name not in _LOOKED_AT_ELSEWHERE}
    running = tuple(name for name, (value, *_) in kept.items() if isinstance(value, RunningLoader))
    harmless = () if iterates_itself and repeater is None else running
    begun = (name for name, parts in kept.items() if any(isinstance(part, _RUNNING) for part in parts))
    # An iteration of the class's own may draw from another loader, as Ray's does.
    named = ((name, part) for name, value in attributes.items() for part in first_parts(value))
    others = (name for name, part in named if part is not loader and isinstance(part, DataLoader))
    batching: Any = iterated if unit is ShardedUnit.SAMPLE else loader
    num_workers = getattr(loader, "num_workers", 0)
    return LoaderFacts(
        loader=loader,
        unit=unit,
        source=source,
        sharded_by=sharded_by(loader),
        batch_size=getattr(batching, "batch_size", None),
        drop_last=getattr(batching, "drop_last", False),
        num_workers=num_workers,
        batches_ahead=num_workers * (getattr(loader, "prefetch_factor", None) or 0),
        repeater=repeater,
        running=running,
        other_loader_in=next(others, None) if iterates_itself else None,
        iterator_in=next((name for name in begun if name not in harmless), None),
    )


def _sharded_part(loader: DataLoader[Any], iterated: Any) -> tuple[ShardedUnit, object]:
    """Return what is sharded in a loader, and the sampler or dataset that yields it."""
    if isinstance(loader.dataset, IterableDataset):
        return ShardedUnit.ITERABLE, loader.dataset
    if loader.batch_sampler is None:
        return ShardedUnit.UNBATCHED, iterated
    if is_torch_batch_sampler(type(iterated)):
        return ShardedUnit.SAMPLE, iterated.sampler
    return ShardedUnit.BATCH, iterated


def _iterated(loader: DataLoader[Any], repeater: object | None) -> Any:
    """Return the sampler or batch sampler that a loader iterates for one epoch."""
    return next(samplers_in_use(loader), None) if repeater is None else repeated_in(repeater)


# The text of the log and the audit for a dataset without columns that tell its samples apart.
NOTHING_TO_COMPARE = "ranks compare no data: it holds no list, array or tensor that tells its samples apart"


def claimed_by(facts: LoaderFacts[Any], *, even: bool) -> dict[str, object]:
    """Return what the ranks compare of a loader that is sharded already, by name, without what is not known.

    For torch's ``DistributedSampler``, its settings are compared, too.

    Args:
        facts: The facts of the loader.
        even: Whether ranks have to make equally many steps.

    Examples:
        >>> sampler = DistributedSampler(range(10), num_replicas=2, rank=1, shuffle=False)
        >>> for name, value in claimed_by(look_at(DataLoader(range(10), sampler=sampler)), even=False).items():
        ...     print(f"{name}: {value}")
        shuffle of its DistributedSampler: False
        drop_last of its DistributedSampler: False
        number of samples of its DistributedSampler: 10
    """
    holder, name = facts.sharded_by, type(facts.sharded_by).__name__
    claimed = {f"batches of its {name} (uneven='keep' lets them differ)": steps_of(facts.loader)} if even else {}
    if isinstance(holder, DistributedSampler):
        # Without a shuffle, the seed has no effect.
        settings = ("seed", "shuffle", "drop_last")[1 if getattr(holder, "shuffle", None) is False else 0 :]
        claimed |= {f"{setting} of its {name}": getattr(holder, setting, None) for setting in settings}
        claimed[f"number of samples of its {name}"] = length_of(getattr(holder, "dataset", None), ())
    return {fact: value for fact, value in claimed.items() if value is not None}


def data_of(dataset: object) -> str:
    """Return a fingerprint of a dataset's data, by its columns: 32 hexadecimal digits."""
    return fingerprint(_identifying(dataset))


def has_nothing_to_compare(dataset: object, by: Fingerprint) -> bool:
    """Return whether ranks have nothing to compare their datasets by, although the user wants them compared.

    Examples:
        >>> class Noise(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 8
        >>> has_nothing_to_compare(Noise(), by="auto"), has_nothing_to_compare(range(8), by="auto")
        (True, False)
    """
    return by == "auto" and not _identifying(dataset)


def _identifying(dataset: object) -> list[tuple[str, str]]:
    """Return the names and digests of the columns that tell a dataset's samples apart."""
    columns = columns_of(dataset)
    kept = compared({0: columns}).kept
    return [(one.name, one.digest) for one in columns if one.name in kept]


def data_digest(dataset: object, by: Fingerprint, columns: Collection[str]) -> str:
    """Return a digest of what identifies a dataset now; empty if ranks compare no data, or a column is missing now.

    Args:
        dataset: The dataset.
        by: The option ``fingerprint=``.
        columns: The names of the columns that identify the dataset by default.

    Raises:
        InvalidOptionError: The user's function returns None.

    Examples:
        >>> data_digest(range(3), by=len, columns=()) == data_digest(range(1, 4), by=len, columns=())
        True
        >>> data_digest(range(3), by=None, columns=["the elements of a range"])
        ''
    """
    if not callable(by):
        return columns_digest(dataset, columns) if by == "auto" else ""
    if (value := by(dataset)) is None:
        raise InvalidOptionError(
            f"fingerprint={by!r} returned None for {type(dataset).__name__}, which identifies no data. Let it return "
            "what names the samples: texts, numbers, bytes, paths, arrays, or lists of these; or pass "
            "fingerprint=None to compare no data."
        )
    return fingerprint([value])
