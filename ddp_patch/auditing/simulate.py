"""Every rank of a made-up world, on one machine: what each would draw, without processes, network or data."""

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddp_patch.auditing.coding import Coding, Numbers, narrow
from ddp_patch.auditing.workers import base_seed, batches_read
from ddp_patch.errors import InvalidOptionError, NotALoaderError, StreamLengthWarning
from ddp_patch.loader import Level, copy_loader, level, nested_samplers, random_generators, samplers_in_use, sharding
from ddp_patch.nesting import tell_epoch
from ddp_patch.patching import patch_dataloader_to_ddp
from ddp_patch.seeding import PrivateRNG, generator_state, set_generator_state, unmoved
from ddp_patch.streams import own

__all__ = [
    "Drawn",
    "Factory",
    "Rank",
    "Subject",
    "ambient_of",
    "copied",
    "made_of_batches",
    "ranks_of",
    "stream_of",
]

Factory: TypeAlias = Callable[[int, int], DataLoader[Any]]

# What ranks of a made-up world are seeded with: like no two of each other.
_SEED = 20_000
# So many batches are drawn before they are written down.
_BLOCK = 1024
# Where torch's own samplers keep what they never change, which copies may share.
_READ_ONLY = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one rank drew in one epoch.

    Attributes:
        items: Every item's number, in order.
        sizes: How many items each step's batch had.
        ended: Whether the epoch came to its end; otherwise these are its first items.
        told: What ``len(loader)`` said before and after; None where it said nothing.
        seconds: How long drawing took, writing down left out.
        memory: How many bytes the process grew by meanwhile, as far as is known.
        error: What was raised, if anything.
    """

    items: Numbers
    sizes: Numbers
    ended: bool
    told: tuple[int | None, int | None] = (None, None)
    seconds: float = 0.0
    memory: int | None = None
    error: str | None = None

    def first_steps(self, steps: int) -> "Drawn":
        """Return what the first so many steps drew."""
        sizes = self.sizes[:steps]
        return Drawn(self.items[: int(sizes.sum())], sizes, False, self.told, self.seconds, self.memory, self.error)


@dataclass(frozen=True, slots=True)
class Subject:
    """What is audited: a loader, which is copied for every rank, or a factory of one loader for each.

    Args:
        make: The loader, or ``make(rank, world_size)``.
        patch: Whether a loader is shared by ``patch_dataloader_to_ddp`` first.
        options: Passed on to it.
        set_epoch: Whether the training calls ``set_epoch(epoch)`` before each epoch.
        max_items: How many items of each rank's epoch are drawn at most.

    Raises:
        NotALoaderError: It is neither.
        InvalidOptionError: It is one rank's share already; or options were given that nothing would take.
    """

    make: DataLoader[Any] | Factory
    patch: bool
    options: Mapping[str, Any]
    set_epoch: bool
    max_items: int

    def __post_init__(self) -> None:
        if not isinstance(self.make, DataLoader):
            if not callable(self.make):
                raise NotALoaderError(
                    f"audit needs a DataLoader or a function make(rank, world_size) that returns one, and got "
                    f"{self.make!r} ({type(self.make).__name__}). Pass the finished loader itself."
                )
        elif (found := sharding(self.make)) is not None:
            rank, ranks = (getattr(found, name, "?") for name in ("rank", "num_replicas"))
            raise InvalidOptionError(
                f"audit was given a loader that is one rank's share already ({type(found).__name__}, rank {rank} of "
                f"{ranks}), and other ranks' shares cannot be made of it. Pass a function make(rank, world_size) that "
                "builds each rank's loader, or the loader as it is before it is shared."
            )
        if self.options and not self._patches:
            raise InvalidOptionError(
                f"audit was given {', '.join(self.options)} for patch_dataloader_to_ddp(), which is not called: "
                f"{'patch=False' if isinstance(self.make, DataLoader) else 'a factory makes finished loaders'}. Leave "
                "them out, or pass an unpatched loader."
            )

    @property
    def _patches(self) -> bool:
        return self.patch and isinstance(self.make, DataLoader)

    @property
    def name(self) -> str:
        """What people call it."""
        if isinstance(self.make, DataLoader):
            return type(self.make).__name__
        return getattr(self.make, "__name__", type(self.make).__name__)

    def loader(self, rank: int, world_size: int) -> DataLoader[Any]:
        """Return the loader of a rank of a made-up world."""
        if not isinstance(self.make, DataLoader):
            made = self.make(rank, world_size)
            if not isinstance(made, DataLoader):
                raise NotALoaderError(
                    f"The factory {self.name}(rank={rank}, world_size={world_size}) returned {made!r} "
                    f"({type(made).__name__}), not a DataLoader. Return the loader that this rank would iterate."
                )
            return made
        alone = copied(self.make)
        if not self._patches:
            return alone
        return patch_dataloader_to_ddp(alone, rank=rank, num_replicas=world_size, **self.options)

    def finish(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the loader of a real rank, which knows its process group."""
        return patch_dataloader_to_ddp(loader, **self.options) if self._patches else loader


def ambient_of(rank: int) -> PrivateRNG:
    """Return the global random states of a rank that is seeded like no other."""
    return PrivateRNG(_SEED, rank)


class Rank:
    """One rank: its loader, its own global random states, and its own states of generators that copies share.

    Args:
        build: Makes its loader.
        subject: What is audited.
        seeded_as: Which rank's global random states it begins with.
    """

    def __init__(self, build: Callable[[], DataLoader[Any]], subject: Subject, seeded_as: int) -> None:
        self._subject = subject
        self._ambient = ambient_of(seeded_as)
        with self._ambient:
            self.loader = build()
        # A function that cannot be copied shares its generators with the other ranks' copies.
        given = subject.make if isinstance(subject.make, DataLoader) else None
        held = random_generators([given, *samplers_in_use(given)]) if given is not None else []
        self._held = [[generator, generator_state(generator)] for generator in held]

    def epoch(self, number: int, coding: Coding, tells_epoch: bool = False) -> Drawn:
        """Draw one epoch.

        Args:
            number: Which one.
            coding: Gives items their numbers.
            tells_epoch: Whether ``set_epoch`` is called although the training does not.
        """
        with warnings.catch_warnings(), self._ambient, self._own_generators():
            warnings.simplefilter("ignore", StreamLengthWarning)  # lengths are judged here
            if tells_epoch or self._subject.set_epoch:
                _set_epoch(self.loader, number)
            return _drawn(self.loader, coding, self._subject.max_items)

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        with unmoved(generator for generator, _ in self._held):
            for generator, state in self._held:
                set_generator_state(generator, state)
            yield
            for held in self._held:
                held[1] = generator_state(held[0])


def ranks_of(subject: Subject, world_size: int, alike: bool = False) -> list[Rank]:
    """Return every rank of a made-up world; seeded differently, or ``alike``."""

    def build(rank: int) -> Callable[[], DataLoader[Any]]:
        return lambda: subject.loader(rank, world_size)

    return [Rank(build(rank), subject, seeded_as=0 if alike else rank) for rank in range(world_size)]


def _set_epoch(loader: Any, epoch: int) -> None:
    if callable(tell := getattr(loader, "set_epoch", None)):
        tell(epoch)
    else:
        tell_epoch(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, epoch)


def copied(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of the loader whose samplers, or iterable dataset, are its own, with random generators."""
    names = ["batch_sampler", "sampler", "generator"]
    names += ["dataset"] if level(loader) is Level.ITERABLE else []
    given = {name: getattr(loader, name) for name in names}
    memo = _shared(loader)
    try:
        new = copy.deepcopy(given, memo)
    except Exception as error:
        raise InvalidOptionError(
            f"audit copies a loader's sampler for every rank, and copying {type(given['sampler']).__name__} raised "
            f"{type(error).__name__}: {error}. Pass a function make(rank, world_size) that builds each rank's loader."
        ) from error
    return copy_loader(loader, **new)


def _shared(loader: DataLoader[Any]) -> dict[int, Any]:
    """What copies of samplers share with them, as ``copy.deepcopy`` wants it."""
    is_iterable = level(loader) is Level.ITERABLE
    memo: dict[int, Any] = {} if is_iterable else {id(loader.dataset): loader.dataset}
    holders = [*samplers_in_use(loader), *nested_samplers(loader.sampler), *([loader.dataset] if is_iterable else [])]
    for holder in holders:
        data: Any = torch.Tensor | np.ndarray
        data = data | list | range if type(holder) in _READ_ONLY else data if is_iterable else ()
        for value in getattr(holder, "__dict__", {}).values():
            is_data = isinstance(value, Dataset | nn.Module) and not isinstance(value, IterableDataset)
            if is_data or isinstance(value, data):
                memo[id(value)] = value
            elif type(value) is list and set(map(type, value)) <= {int, float, str}:
                memo[id(value)] = value[:]  # as deepcopy would, without a look at each
    return memo


def made_of_batches(loader: DataLoader[Any]) -> bool:
    """Tell whether what is shared are whole batches."""
    if level(loader) is Level.UNBATCHED:
        return any(isinstance(sampler, BatchSampler) for sampler in nested_samplers(loader.sampler))
    return level(loader) is Level.BATCH


def stream_of(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader that leaves no last batch out, whose items are those that there are to share."""
    batches: Any = loader.batch_sampler
    if level(loader) is Level.SAMPLE and batches.drop_last:
        return copy_loader(
            loader, drop_last=False, batch_sampler=BatchSampler(batches.sampler, batches.batch_size, False)
        )
    if level(loader) is Level.ITERABLE and loader.drop_last:
        return copy_loader(loader, drop_last=False)
    return loader


def _drawn(loader: DataLoader[Any], coding: Coding, max_items: int) -> Drawn:
    """Draw an epoch and write it down."""
    items: list[Numbers] = []
    sizes: list[Numbers] = []
    error: str | None = None
    before, ended, seconds, count, grown = _length(loader), False, 0.0, 0, 0
    resident = _resident_bytes()
    steps = _steps(loader)
    while count < max_items and not ended and error is None:
        begun = time.perf_counter()
        block: list[list[Any]] = []
        try:
            block.extend(islice(_until(steps, max_items - count), _BLOCK))
        except Exception as raised:  # noqa: BLE001 - the user's own: it is what this rank would see
            error = f"{type(raised).__name__}: {raised}"
        seconds += time.perf_counter() - begun
        grown = max(grown, _resident_bytes() - resident - sum(part.nbytes for part in (*items, *sizes)))
        ended = error is None and not block
        if block:
            sizes.append(narrow(np.fromiter(map(len, block), np.int64, len(block))))
            items.append(narrow(coding.codes(list(chain.from_iterable(block)))))
            count += len(items[-1])
    if error is None and not ended:
        with suppress(Exception):  # what is raised after the last item asked for is beyond this sample
            ended = next(steps, None) is None
    told = (before, _length(loader))
    return Drawn(_joined(items), _joined(sizes), ended, told, seconds, grown if resident else None, error)


def _until(steps: Iterator[list[Any]], most: int) -> Iterator[list[Any]]:
    """Yield steps until they have so many items."""
    while most > 0 and (step := next(steps, None)) is not None:
        most -= max(1, len(step))
        yield step


def _joined(parts: list[Numbers]) -> Numbers:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _length(loader: DataLoader[Any]) -> int | None:
    with suppress(Exception):  # a length that cannot be told, for whatever reason, is none
        return len(loader)
    return None


def _resident_bytes() -> int:
    """How much memory this process holds; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def _steps(loader: DataLoader[Any]) -> Iterator[list[Any]]:
    """Yield every step's items as the loader would ask for them: without a dataset's ``__getitem__``."""
    if level(loader) is Level.ITERABLE:
        yield from batches_read(loader)
        return
    batches = loader.batch_sampler
    indices = iter(cast(Iterable[Any], loader.sampler if batches is None else batches))
    base_seed(loader)
    if level(loader) is Level.SAMPLE:
        yield from indices  # torch's own make a new list for each batch
    elif batches is not None or made_of_batches(loader):
        yield from (list(own(batch)) for batch in indices)
    else:
        yield from ([own(item)] for item in indices)
