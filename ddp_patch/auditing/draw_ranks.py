"""Draw a loader's epochs as a rank of a made-up world would, workers included."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from inspect import getclosurevars
from itertools import chain, islice
from multiprocessing.managers import BaseProxy
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import SemLock
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ddp_patch.auditing.draw_loaders import (
    Audited,
    Traits,
    base_of,
    digest,
    layers_of,
    length_of,
    made_by,
    samples_of,
    traits_of,
)
from ddp_patch.auditing.draw_records import Coding, Numbers, RankDraws, narrow
from ddp_patch.compat.private_torch import made_worker_info, seed_as_worker, worker_info_told
from ddp_patch.errors import StreamLengthWarning
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit
from ddp_patch.loaders.samples import deep_copy, tell_epoch
from ddp_patch.orders.chunks import copy_item, start_iterating
from ddp_patch.orders.generators import generator_state, random_generators, set_generator_state
from ddp_patch.orders.random_states import PrivateRNG, look
from ddp_patch.ranks.mailbox import unwatched
from ddp_patch.streams.dataset import ShardedIterable
from ddp_patch.streams.reading import Reader
from ddp_patch.streams.shared_state import SharedWorkerState
from ddp_patch.walks import LOOKED_AT, elements, stored

__all__ = ["Rank", "Workers", "called"]


# What processes share that were forked, beside tensors in shared memory.
_IN_SHARED_MEMORY = (SharedWorkerState, SynchronizedBase, SemLock, BaseProxy)
# How deep it is looked for: a dataset in a dataset, an object that it holds, and the attributes of that.
_DEPTH = 4


def _base_seed(loader: DataLoader[Any]) -> int:
    """Draw the seed that a DataLoader draws for its workers, because that moves a generator that samplers share."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))


class Workers:
    """The workers of one loader of an iterable dataset, or the main process where it has none.

    Args:
        facts: What a look at the loader told.
    """

    def __init__(self, facts: LoaderFacts[Any]) -> None:
        self._facts = facts
        self._latest: list[_Worker] = []

    @property
    def have_asked(self) -> bool:
        """Tell whether the dataset asked in the latest pass which worker it is in, in any of them."""
        return any(worker.reader.has_asked for worker in self._latest)

    @property
    def idle(self) -> tuple[int, ...]:
        """Return the numbers of the workers that gave nothing in the latest pass."""
        return tuple(number for number, worker in enumerate(self._latest) if worker.given == 0)

    @property
    def parts(self) -> tuple[int, ...]:
        """Return how long each part of the latest pass is, where workers of a patched loader read one each; else ()."""
        dataset = self._facts.dataset
        if not isinstance(dataset, ShardedIterable):
            return ()
        number = dataset.shared.latest_pass
        found = tuple(length for length in dataset.shared.lengths(number) if length is not None)
        return found if dataset.shared.ways(number) == {"parts"} and len(found) == dataset.shared.readers else ()

    def batches(self) -> Iterator[list[Any]]:
        """Yield the batches of the next pass, in the order in which the loader gives them."""
        facts = self._facts
        tasks, has_batches = iter(facts.iterated), facts.loader.batch_sampler is not None
        self._latest = self._begun()
        if facts.num_workers > 0:
            tasks = iter(facts.iterated)  # torch begins its sampler a second time where it has workers
        workers = [*self._latest]
        while workers:
            for worker in list(workers):
                task = next(tasks, None)
                if task is None and has_batches:
                    return
                size = 1 if task is None or not has_batches else len(task)
                if batch := worker.batch(size, facts.drop_last):
                    yield batch
                if len(batch) < max(1, size):
                    workers.remove(worker)

    def _begun(self) -> "list[_Worker]":
        """Return workers that begin to read: new ones, or those of the pass before where they are persistent."""
        if self._latest and self._facts.num_workers > 0 and self._facts.loader.persistent_workers:
            for worker in self._latest:
                worker.begin()
            return self._latest
        seed = _base_seed(self._facts.loader)
        return [_Worker(self._facts, number, seed) for number in range(max(1, self._facts.num_workers))]


class _Worker:
    """Simulates one worker with its copy of the dataset, or the main process where the loader has no workers.

    It starts as torch does in a new worker process.

    Args:
        facts: What a look at the loader told.
        number: The worker's number.
        seed: The seed that the loader drew for its workers.

    Attributes:
        reader: Notes whether the dataset asks which worker it is in.
        given: How many items it has given in this pass.
    """

    def __init__(self, facts: LoaderFacts[Any], number: int, seed: int) -> None:
        self.reader: Reader = Reader()
        self._dataset = facts.dataset
        self._rng: PrivateRNG | None = None  # the main process has no random states of its own
        if facts.num_workers > 0:
            self._dataset = deep_copy(facts.dataset, sharing=_in_shared_memory(facts.dataset, _DEPTH))
            self._info = made_worker_info(number, facts.num_workers, seed + number, self._dataset)
            self._rng = PrivateRNG(seed, number)
            with self._at_work():
                seed_as_worker(seed, number)
                if (prepare := facts.loader.worker_init_fn) is not None:
                    self.reader.prepare(self._dataset, prepare, number)
        self.begin()

    def begin(self) -> None:
        """Begin a pass over the dataset."""
        self.given: int = 0
        with self._at_work():
            self._items = start_iterating(self._dataset)

    def batch(self, size: int, drop_last: bool) -> list[Any]:
        """Read the next batch; an empty one at the end."""
        with self._at_work():
            batch = list(islice(self._items, size))
        self.given += len(batch)
        return [] if drop_last and len(batch) < size else batch

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        if self._rng is None:
            yield
            return
        with self._rng, worker_info_told(self._info):
            info = self.reader.info(self._info.id, self._info.num_workers, self._info.seed, self._dataset)
            with worker_info_told(info):
                yield


def _in_shared_memory(holder: object, depth: int) -> Iterator[object]:
    """Yield what an object shares with its copies in forked processes."""
    for value in islice(elements(holder) or stored(holder).values(), LOOKED_AT):
        if isinstance(value, torch.Tensor):
            if value.is_shared():  # type: ignore[no-untyped-call]  # torch's
                yield value
        elif isinstance(value, _IN_SHARED_MEMORY):
            yield value
        elif depth:
            yield from _in_shared_memory(value, depth - 1)


# Draw this many batches before recording them.
_BLOCK = 1024


class _Record:
    """Record blocks of batches as numbers, with the time and memory that drawing them took.

    Args:
        coding: Gives every item its number.

    Attributes:
        count: Items recorded so far.
        error: The exception that the sampler or dataset raised, as text.
    """

    def __init__(self, coding: Coding) -> None:
        self.count: int = 0
        self.error: str | None = None
        self._coding = coding
        self._items: list[Numbers] = []
        self._sizes: list[Numbers] = []
        self._seconds = 0.0
        self._resident_before, self._grown = _resident_bytes(), 0

    def draw_block(self, steps: Iterator[list[Any]], most: int) -> bool:
        """Draw the next block of batches, of at most about ``most`` items; tell whether there was a batch."""
        # Draw the first batch alone: a sampler that makes its whole order at once holds it now, and may drop it later.
        batches = _BLOCK if self._items else 1
        block: list[list[Any]] = []
        begun = time.perf_counter()
        try:
            block.extend(islice(_until(steps, most), batches))
        except Exception as raised:  # noqa: BLE001 - the user's own: this rank would see it, too
            self.error = f"{type(raised).__name__}: {raised}"
        self._seconds += time.perf_counter() - begun
        recorded = sum(part.nbytes for part in (*self._items, *self._sizes))
        self._grown = max(self._grown, _resident_bytes() - self._resident_before - recorded)
        if block:
            self._sizes.append(narrow(np.fromiter(map(len, block), np.int64, len(block))))
            self._items.append(narrow(self._coding.codes(list(chain.from_iterable(block)))))
            self.count += len(self._items[-1])
        return bool(block)

    def drawn(self, ended: bool, lengths: tuple[int | None, int | None]) -> RankDraws:
        """Return all that was recorded."""
        memory = self._grown if self._resident_before else None
        return RankDraws(_joined(self._items), _joined(self._sizes), ended, lengths, self._seconds, memory, self.error)


def _until(steps: Iterator[list[Any]], most: int) -> Iterator[list[Any]]:
    """Yield steps until they hold ``most`` items."""
    while most > 0 and (step := next(steps, None)) is not None:
        most -= max(1, len(step))
        yield step


def _joined(parts: list[Numbers]) -> Numbers:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _resident_bytes() -> int:
    """Return how much memory this process holds, in bytes; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


# Seed simulated ranks with this and their rank, so that no two are seeded alike.
_SEED = 20_000


class Rank:
    """Simulate one rank.

    A rank has its own loader and its own global random states. Copies of a loader may share a random generator, so each
    rank also keeps its own state of every shared generator.

    Args:
        subject: What is audited.
        rank: The rank.
        world_size: The number of ranks.
        seeded_as: The rank whose global random states this one starts with.
        is_real: Whether this process is that rank, with a process group and its own copy of the subject.

    Attributes:
        traits: Describes its loader.
        base: The dataset below torch's ``Subset`` layers.
    """

    def __init__(self, subject: Audited, rank: int, world_size: int, seeded_as: int, *, is_real: bool = False) -> None:
        self._subject = subject
        self._ambient = PrivateRNG(_SEED, seeded_as)
        make = subject.make
        given, reached = (make.stream.holders, []) if isinstance(make, LoaderFacts) else ((), _reached_by(make))
        with look(random_generators(reached)), self._ambient, unwatched():
            self._facts: LoaderFacts[Any] = subject.made_for(rank, world_size, is_real)
            held = random_generators([*reached, *_with_shared([*self._facts.stream.holders, *given])])
        self._workers = Workers(self._facts)
        self._held = [[generator, generator_state(generator)] for generator in held]
        self.traits: Traits = traits_of(self._facts)
        self.base: object = base_of(self._facts.dataset)

    @property
    def digest(self) -> str | None:
        """Return a hash of the samples that this dataset holds in memory; None where it holds none."""
        return digest(self.base)

    @property
    def layers(self) -> Sequence[Numbers]:
        """Return the indices of this dataset and of each ``Subset`` above it."""
        return layers_of(self._facts.dataset)

    def epoch(self, number: int, coding: Coding) -> RankDraws:
        """Draw the loader's next pass as epoch ``number``."""
        with warnings.catch_warnings(), self._own_generators(), self._ambient:
            warnings.simplefilter("ignore", StreamLengthWarning)  # the audit reports wrong lengths itself
            if self._subject.set_epoch:
                _set_epoch(self._facts, number)
            return self._draw(coding)

    def _draw(self, coding: Coding) -> RankDraws:
        """Draw an epoch, or its first ``max_items`` items, and record it."""
        most, workers = self._subject.max_items, self._workers
        length_before = length_of(self._facts.loader)
        record, steps = _Record(coding), self._steps()
        ended = False
        while record.count < most and record.error is None and not ended:
            has_drawn = record.draw_block(steps, most - record.count)
            ended = not has_drawn and record.error is None
        if record.error is None and not ended:
            # Ask for one step more: the epoch may end right here. An error beyond the last item asked for is none.
            with suppress(Exception):
                ended = next(steps, None) is None
        drawn = record.drawn(ended, (length_before, length_of(self._facts.loader)))
        # Each batch that is divided is shared by itself.
        parts = tuple(drawn.sizes.tolist()) if self.traits.divides_batches else workers.parts
        return replace(drawn, asked=workers.have_asked, idle=workers.idle, parts=parts)

    def _steps(self) -> Iterator[list[Any]]:
        """Return the items of every step: of an iterable dataset what workers read, else what the loader asks for."""
        if self._facts.unit is ShardedUnit.ITERABLE:
            return self._workers.batches()
        return samples_of(self._facts.dataset, self._indices(), self._subject.by_contents)

    def _indices(self) -> Iterator[list[Any]]:
        """Yield the items of every step, as the loader would ask its dataset for them."""
        indices = start_iterating(self._facts.iterated)
        _base_seed(self._facts.loader)
        if self._facts.unit is ShardedUnit.SAMPLE:
            yield from indices  # torch's batch sampler makes a new list for each batch, so nothing needs copying
        elif self._facts.unit is ShardedUnit.BATCH or self.traits.units == "batches":
            yield from (list(copy_item(batch)) for batch in indices)
        else:
            yield from ([copy_item(item)] for item in indices)

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Give shared generators this rank's states, and restore the others' afterwards."""
        with look(generator for generator, _ in self._held):
            for generator, state in self._held:
                set_generator_state(generator, state)
            yield
            for held in self._held:
                held[1] = generator_state(held[0])


def called(make: Callable[..., Any], *rank_and_size: int) -> Any:
    """Call a function ``make()`` or ``make(rank, world_size)``, and leave all random states as they are."""
    with look(random_generators(_reached_by(make)), seed=_SEED), unwatched():
        return made_by(make, *rank_and_size) if rank_and_size else make()


def _reached_by(make: Callable[..., Any]) -> list[object]:
    """Return what may hold generators that a factory uses for all ranks: itself, and the object of a method."""
    return _with_shared([SimpleNamespace(make=make), getattr(make, "__self__", make)])


def _with_shared(holders: Sequence[object]) -> list[object]:
    """Return the holders and what all copies of them share: their classes, and what their functions name."""
    written = [dict(vars(kind)) for holder in holders for kind in type(holder).__mro__]
    shared: list[dict[str, Any]] = []
    for function in [value for names in (*map(stored, holders), *written) for value in names.values()]:
        if isinstance(function, FunctionType):
            with suppress(ValueError):  # what it names has no value yet
                named = getclosurevars(function)
                shared += [dict(named.nonlocals), dict(named.globals)]
    return [*holders, *(SimpleNamespace(**names) for names in (*written, *shared))]


def _set_epoch(facts: LoaderFacts[Any], epoch: int) -> None:
    if callable(tell := getattr(facts.loader, "set_epoch", None)):
        tell(epoch)
    else:
        tell_epoch(facts.iterated, epoch)
        if facts.unit is ShardedUnit.ITERABLE and callable(tell := getattr(facts.dataset, "set_epoch", None)):
            tell(epoch)
