"""Make each rank's loader, iterate it as a training would, and record which samples it yields."""

import copy
import reprlib
import warnings
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from ddp_patch.compat.private_torch import RUNNING_ITERATOR, has_own_iteration, has_own_iterators
from ddp_patch.errors import InvalidOptionError, StreamLengthWarning, message_of
from ddp_patch.loaders.copying import OWN_METHODS, change_loader, copy_loader
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit, look_at
from ddp_patch.loaders.nested_samplers import nested_samplers, steps_of, tell_epoch
from ddp_patch.loaders.recognition import require_loader
from ddp_patch.options import Share
from ddp_patch.orders.digest import fingerprint
from ddp_patch.orders.orders import is_torch_sampler
from ddp_patch.orders.random_states import PrivateRNG
from ddp_patch.patching import patch_dataloader_to_ddp
from ddp_patch.ranks.claims import unwatched
from ddp_patch.sharding.refusals import unit_shared
from ddp_patch.sharding.sampler import EpochSampler

Factory: TypeAlias = Callable[[int, int], DataLoader[Any]]
Numbers: TypeAlias = NDArray[np.integer[Any]]


# ---- what is audited ----


@dataclass(frozen=True, slots=True)
class Audited:
    """The subject of an audit: a loader, which is copied for every rank, or a factory of each rank's loader.

    Args:
        make: The facts of the loader, or a function ``make(rank, world_size)``.
        patch: Whether ``patch_dataloader_to_ddp`` shards a loader first.
        options: Options for ``patch_dataloader_to_ddp``.
        set_epoch: Whether the training calls ``set_epoch(epoch)`` before each epoch.
        max_items: How many items of each rank's epoch to draw, rounded up to a whole batch.
        whole: Whether to keep a last, incomplete batch, so that all samples are drawn.

    Raises:
        InvalidOptionError: The loader is one rank's share already; or there are options, and nothing is patched.
    """

    make: LoaderFacts[Any] | Factory
    patch: bool
    options: Mapping[str, Any]
    set_epoch: bool
    max_items: int
    whole: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.make, LoaderFacts) and (found := self.make.sharded_by) is not None:
            rank, ranks = self.make.made_for or ("?", "?")
            raise InvalidOptionError(
                f"audit was given a loader that is one rank's share already ({type(found).__name__}, rank {rank} of "
                f"{ranks}), and other ranks' shares cannot be made of it. Pass a function make(rank, world_size) that "
                "builds each rank's loader, or the loader as it is before it is shared."
            )
        if self.options and not self.patches:
            raise InvalidOptionError(
                f"audit was given {', '.join(self.options)} for patch_dataloader_to_ddp(), which is not called: "
                f"{'a factory makes finished loaders' if self.is_made else 'patch=False'}. Leave them out, or pass an "
                "unpatched loader."
            )

    @property
    def is_made(self) -> bool:
        """Whether a factory makes each rank's loader."""
        return not isinstance(self.make, LoaderFacts)

    @property
    def patches(self) -> bool:
        """Whether ``patch_dataloader_to_ddp`` shards the loader."""
        return self.patch and not self.is_made

    @property
    def name(self) -> str:
        """The name in reports."""
        return type(self.make.loader).__name__ if isinstance(self.make, LoaderFacts) else name_of(self.make)

    def made_for(self, rank: int, world_size: int) -> LoaderFacts[Any]:
        """Make a rank's loader, and return its facts."""
        if isinstance(self.make, LoaderFacts):
            share: Share = self.options.get("share", "auto")
            made = _copied(_whole(self.make, share) if self.whole else self.make)
            if self.patches:
                made = patch_dataloader_to_ddp(made, rank=rank, num_replicas=world_size, **self.options)
            return look_at(made)
        made = made_by(self.make, rank, world_size)
        require_loader(f"audit, from {self.name}(rank={rank}, world_size={world_size}),", made)
        return _whole(look_at(made), "auto") if self.whole else look_at(made)


def name_of(make: Callable[..., Any]) -> str:
    """Return a factory's name."""
    return getattr(make, "__name__", type(make).__name__)


def made_by(make: Factory, rank: int, world_size: int) -> Any:
    """Call a factory; add a note to any error with the rank of the call."""
    try:
        return make(rank, world_size)
    except Exception as error:
        error.add_note(
            f"It was raised by {name_of(make)}({rank}, {world_size}), which audit called as make(rank, world_size)."
        )
        raise


def _whole(facts: LoaderFacts[Any], share: Share) -> LoaderFacts[Any]:
    """Return the facts of a loader that leaves out no incomplete batch; unchanged if whole batches are shared."""
    if not facts.drop_last or facts.unit in {ShardedUnit.BATCH, ShardedUnit.UNBATCHED}:
        return facts
    if facts.unit is ShardedUnit.ITERABLE:
        return look_at(copy_loader(facts.loader, drop_last=False))
    if unit_shared(facts, share).unit is ShardedUnit.BATCH:
        return facts
    batches = BatchSampler(facts.stream.source, cast(int, facts.batch_size), False)
    return look_at(copy_loader(facts.loader, **facts.placed({"drop_last": False, "batch_sampler": batches})))


def _copied(facts: LoaderFacts[Any]) -> DataLoader[Any]:
    """Return a copy of the loader with its own samplers or iterable dataset, and its own random generators."""
    names = ["dataset"] if facts.unit is ShardedUnit.ITERABLE else []
    memo, new = _shared(facts), {}
    for name in (*names, "sampler", "batch_sampler", "generator"):
        value = getattr(facts.loader, name)
        try:
            new[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise InvalidOptionError(
                f"audit copies a loader's {name} for every rank, and copying {type(value).__name__} raised "
                f"{type(error).__name__}: {message_of(error)}. Pass a function make(rank, world_size) that builds each "
                "rank's loader."
            ) from error
    return copy_loader(facts.loader, **new)


def _shared(facts: LoaderFacts[Any]) -> dict[int, Any]:
    """Return the large data that copies share with the loader, as a memo for ``copy.deepcopy``."""
    is_iterable = facts.unit is ShardedUnit.ITERABLE
    memo: dict[int, Any] = {} if is_iterable else {id(facts.dataset): facts.dataset}
    for holder in (*facts.samplers, *nested_samplers(facts.loader.sampler), *([facts.dataset] if is_iterable else [])):
        kinds: tuple[type, ...] = (Dataset, nn.Module)
        if is_iterable or is_torch_sampler(holder):
            kinds += (torch.Tensor, np.ndarray)
        if is_torch_sampler(holder):
            kinds += (list, range)
        values = getattr(holder, "__dict__", {}).values()
        memo |= {id(each): each for each in values if isinstance(each, kinds) and not isinstance(each, IterableDataset)}
    return memo


# ---- which samples came, as numbers ----


class _Index(Dataset[Any]):
    """A stand-in for a dataset, which returns the index itself instead of a sample."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return index

    def __getitems__(self, indices: Any) -> list[Any]:
        """Return all indices of a batch, because torch reads a batch at once."""
        return list(indices)


def indexed(dataset: Any) -> Dataset[Any]:
    """Return a dataset that maps an index to the index below the dataset's ``Subset`` layers.

    Examples:
        >>> indexed(Subset(Subset("abcdef", [1, 3, 5]), [2, 0])).__getitems__([0, 1])
        [5, 1]
    """
    return Subset(indexed(dataset.dataset), dataset.indices) if isinstance(dataset, Subset) else _Index(dataset)


def _base_of(dataset: Any) -> Any:
    """Return the dataset below all ``Subset`` layers, or the dataset itself if it has none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _is_in_memory(dataset: Any) -> bool:
    """Return whether a dataset has its samples in memory."""
    if isinstance(dataset, ConcatDataset):
        return all(map(_is_in_memory, dataset.datasets))
    return isinstance(_base_of(dataset), list | tuple | range | np.ndarray | torch.Tensor | TensorDataset)


# An index; or a hash and a readable text of any other key or sample.
_Identity: TypeAlias = int | tuple[str, str]


def _identity(item: Any) -> _Identity:
    """Return the identity of an item: its index, or a hash if it is no index."""
    number = item.item() if isinstance(item, torch.Tensor) and item.ndim == 0 else item
    is_index = isinstance(number, int | np.integer) and not isinstance(number, bool) and 0 <= number < 2**63
    return int(number) if is_index else (fingerprint([item]), reprlib.repr(item))


class Coding:
    """Numbers for identities: an index is its own number, any other identity gets the next negative number.

    Examples:
        >>> coding = Coding()
        >>> coding.codes([3, ("f1", "'a.jpg'"), 3, ("c4", "'b.jpg'"), ("f1", "'a.jpg'")])
        [3, -1, 3, -2, -1]
        >>> coding.name(-2)
        "'b.jpg'"
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # the numbers by hash
        self._names: list[str] = []

    def codes(self, found: Sequence[_Identity]) -> list[int]:
        """Return the numbers of identities."""
        return [each if isinstance(each, int) else self._number(*each) for each in found]

    def name(self, code: int) -> str:
        """Return the readable text of an item."""
        return str(code) if code >= 0 else self._names[-1 - code]

    def _number(self, key: str, name: str) -> int:
        if key not in self._numbers:
            self._names.append(name)
            self._numbers[key] = -len(self._names)
        return self._numbers[key]


@dataclass(frozen=True, slots=True)
class RankGiven:
    """One rank's samples in one epoch.

    Attributes:
        items: The number of each item, in order, shape (items,).
        sizes: How many items each step's batch has, shape (steps,).
        ended: Whether the epoch came to its end; if not, ``items`` are its first items.
        lengths: ``len(loader)`` before and after the epoch; None if it raised an error.
        error: The text of the error that ended the epoch; None without an error.
        workers: The number of the worker that made each step's batch, shape (steps,).
        parts: How many items each worker's part of an iterable dataset has, if a patched loader's workers each read a
            part; else empty.
    """

    items: Numbers
    sizes: Numbers
    ended: bool
    lengths: tuple[int | None, int | None] = (None, None)
    error: str | None = None
    workers: Numbers | None = None
    parts: tuple[int, ...] = ()

    @property
    def batches(self) -> list[Numbers]:
        """The items of each step."""
        return np.split(self.items, np.cumsum(self.sizes)[:-1]) if len(self.sizes) else []

    def first_steps(self, steps: int) -> "RankGiven":
        """Return the samples of the first ``steps`` steps."""
        sizes = self.sizes[:steps]
        return replace(self, items=self.items[: int(sizes.sum())], sizes=sizes, ended=False)

    def has_same_samples(self, other: "RankGiven") -> bool:
        """Return whether another process got the same samples, in any order."""
        return len(self.items) == len(other.items) and np.array_equal(np.sort(self.items), np.sort(other.items))

    def read_once(self) -> "RankGiven":
        """Return one worker's samples if all workers got the same samples, in any order.

        If each worker reads the whole of an iterable dataset, ranks have one worker's samples to share.

        Examples:
            >>> steps, workers = np.ones(4, int), np.array([0, 1, 0, 1])
            >>> RankGiven(np.array([5, 5, 6, 6]), steps, True, workers=workers).read_once().items.tolist()
            [5, 6]
        """
        if self.workers is None or not len(self.workers) or self.error is not None:
            return self
        of_item, first = np.repeat(self.workers, self.sizes), self.workers[0]
        sorted_items = [np.sort(self.items[of_item == worker]) for worker in range(int(self.workers.max()) + 1)]
        if not all(np.array_equal(sorted_items[0], other) for other in sorted_items):
            return self
        return replace(self, items=self.items[of_item == first], sizes=self.sizes[self.workers == first], workers=None)


# ---- a rank ----


# Ranks are seeded by this number and their rank, so that no two are seeded alike.
_SEED = 20_000


class Rank:
    """A simulated rank, with its own loader and its own global random states.

    Args:
        subject: The subject of the audit.
        rank: The rank.
        world_size: The number of ranks.
        seeded_as: The number of the rank by which the global random states are seeded.

    Attributes:
        is_iterable: Whether the dataset is iterable, so that its samples are read, because it has no indices.
        readers: How many workers read an iterable dataset; 1 for any other dataset.
        divides_batches: Whether each rank takes a part of every batch of one process.
        makes_batches: Whether a batch sampler other than torch's makes the batches, which ranks may share as a whole.
        drops_batch: Whether the loader leaves out a last, incomplete batch.
        drops_round: Whether a sampler leaves out the last, incomplete round of ranks.
        base: The dataset below torch's ``Subset`` layers.
        is_in_memory: Whether the dataset has its samples in memory.
    """

    def __init__(self, subject: Audited, rank: int, world_size: int, seeded_as: int) -> None:
        self._subject = subject
        self._loader: DataLoader[Any] | None = None
        self._ambient = PrivateRNG(_SEED, seeded_as)
        with self._ambient, unwatched():
            facts = subject.made_for(rank, world_size)
        self._facts: LoaderFacts[Any] = facts
        by, is_unbatched = facts.sharded_by, facts.unit is ShardedUnit.UNBATCHED
        gives_batches = any(isinstance(sampler, BatchSampler) for sampler in facts.stream.samplers)
        self.is_iterable: bool = facts.unit is ShardedUnit.ITERABLE
        self.readers: int = max(1, facts.num_workers) if self.is_iterable else 1
        self.divides_batches: bool = isinstance(by, EpochSampler) and by.agreed.options.divides_batches
        are_batches = facts.unit is ShardedUnit.BATCH or (is_unbatched and gives_batches)
        self.makes_batches: bool = are_batches and not self.divides_batches
        batches = None if is_unbatched else facts.iterated
        self.drops_batch: bool = facts.drop_last or getattr(batches, "drop_last", False) is True
        self.drops_round: bool = any(getattr(sampler, "drop_last", False) is True for sampler in facts.samplers)
        self.base: Any = _base_of(facts.dataset)
        self.is_in_memory: bool = _is_in_memory(facts.dataset)

    def epoch(self, number: int, coding: Coding, by_value: bool = False) -> RankGiven:
        """Iterate the loader once more, as epoch ``number``; identify samples by their values or by their indices."""
        if self._loader is None:
            self._loader = self._noting(by_value)
        with warnings.catch_warnings(), self._ambient, unwatched():
            # The audit itself reports wrong lengths.
            warnings.simplefilter("ignore", StreamLengthWarning)
            warnings.filterwarnings("ignore", "Length of IterableDataset")
            if self._subject.set_epoch:
                _set_epoch(self._facts, number)
            before = steps_of(self._facts.loader)
            given = _drawn(self._loader, coding, self._subject.max_items)
            workers = given.workers if self.readers > 1 else None
            lengths = before, steps_of(self._facts.loader)
            return replace(given, lengths=lengths, workers=workers, parts=self._parts())

    def _noting(self, by_value: bool) -> DataLoader[Any]:
        """Return the loader with a ``collate_fn`` that returns the identities of a batch's samples.

        Only an iterable dataset is read, and only then workers are started. The loaders of a factory, and of classes
        with an iteration of their own, which would expect the user's batches, are not changed: a plain DataLoader with
        their attributes is iterated instead.
        """
        facts, kind = self._facts, type(self._facts.loader)
        are_batches = facts.loader.batch_sampler is not None or self.makes_batches
        new: dict[str, Any] = {"collate_fn": partial(_noted, are_batches), "pin_memory": False}
        if not self.is_iterable:
            new |= {"dataset": facts.dataset if by_value else indexed(facts.dataset)}
            new |= {"num_workers": 0, "timeout": 0, "persistent_workers": False, "prefetch_factor": None}
        if not (self._subject.is_made or has_own_iteration(kind) or has_own_iterators(kind)):
            return change_loader(facts.loader, **new)
        plain: DataLoader[Any] = DataLoader.__new__(DataLoader)
        kept = {name: value for name, value in vars(facts.loader).items() if name not in OWN_METHODS}
        # A loader around another one, as accelerate's, has the inner loader's attributes without storing them.
        others = [name for name in vars(DataLoader([0])) if name not in kept and hasattr(facts.loader, name)]  # type: ignore[arg-type]  # torch takes any sequence
        kept |= {name: getattr(facts.loader, name) for name in others}
        if not self.is_iterable:
            new["sampler" if facts.loader.batch_sampler is None else "batch_sampler"] = facts.iterated
        vars(plain).update(kept | {RUNNING_ITERATOR: None} | new)
        return plain

    def _parts(self) -> tuple[int, ...]:
        """Return how many items each worker's part has, if a patched loader's workers each read a part."""
        by = self._facts.sharded_by
        latest = by.rank_passes.epochs.latest if isinstance(by, EpochSampler) else None
        if latest is None or not latest.source.is_in_parts:
            return ()
        return tuple(part.length or 0 for part in latest.source.parts(0))


def _noted(are_batches: bool, batch: Any) -> tuple[list[_Identity], int]:
    """Return the identities of a batch's samples, and the worker that made the batch: a ``collate_fn``."""
    info = get_worker_info()
    # A patched loader records reads of the worker's id. This read is not recorded.
    worker = 0 if info is None else object.__getattribute__(info, "id")
    items = batch if are_batches else [batch]
    if set(map(type, items)) == {int} and min(items) >= 0 and max(items) < 2**63:
        return list(items), worker  # plain indices, the usual case
    return list(map(_identity, items)), worker


def _drawn(loader: DataLoader[Any], coding: Coding, most: int) -> RankGiven:
    """Draw an epoch, or its first ``most`` items."""
    items, sizes, workers = array("q"), array("q"), array("q")
    ended, error = False, None
    steps: Iterator[tuple[list[_Identity], int]] = iter(())
    try:
        steps = iter(loader)
        for given, worker in steps:
            items.extend(coding.codes(given))
            sizes.append(len(given))
            workers.append(worker)
            if max(len(items), len(sizes)) >= most:
                break
        else:
            ended = True
    except Exception as raised:  # noqa: BLE001 - the user's own error, which a real rank would raise, too
        text = message_of(raised)
        # torch sends a worker's error with its traceback.
        is_workers = " in DataLoader worker process " in text.partition("\n")[0]
        error = text.rstrip().rpartition("\n")[2] if is_workers else f"{type(raised).__name__}: {text}"
    if not (ended or error):
        # Ask for one more step, because the epoch may end here. An error after the last requested item does not count.
        with suppress(Exception):
            ended = next(steps, None) is None
    return RankGiven(_narrow(items), _narrow(sizes), ended, error=error, workers=_narrow(workers))


def _narrow(numbers: Sequence[int]) -> Numbers:
    """Return whole numbers as an array, of 32 bits if they fit."""
    codes, bounds = np.array(numbers, np.int64), np.iinfo(np.int32)
    fits = not len(codes) or (codes.min() >= bounds.min and codes.max() <= bounds.max)
    return codes.astype(np.int32) if fits else codes


def _set_epoch(facts: LoaderFacts[Any], epoch: int) -> None:
    if callable(tell := getattr(facts.loader, "set_epoch", None)):
        tell(epoch)
    else:
        tell_epoch(facts.iterated, epoch)
        if facts.unit is ShardedUnit.ITERABLE and callable(tell := getattr(facts.dataset, "set_epoch", None)):
            tell(epoch)
