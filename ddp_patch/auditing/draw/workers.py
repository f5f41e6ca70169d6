"""Read an iterable dataset as a loader's workers would, in turns and in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.managers import BaseProxy
from multiprocessing.sharedctypes import SynchronizedBase
from multiprocessing.synchronize import SemLock
from typing import Any

import torch
from torch.utils.data import DataLoader

from ddp_patch.compat.torch_workers import made_worker_info, seed_as_worker, worker_info_told
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.loaders.nesting import deep_copy
from ddp_patch.shares.iterables.board import Board
from ddp_patch.shares.iterables.dataset import ShardedIterable
from ddp_patch.shares.iterables.reading import Reader
from ddp_patch.streams.chunks import begun
from ddp_patch.streams.generators import LOOKED_AT
from ddp_patch.streams.random_states import PrivateRNG

__all__ = ["Workers", "base_seed"]

# What processes share that were forked, beside tensors in shared memory.
_IN_SHARED_MEMORY = (Board, SynchronizedBase, SemLock, BaseProxy)
# How deep it is looked for: a dataset in a dataset, an object that it holds, and the attributes of that.
_DEPTH = 4


def base_seed(loader: DataLoader[Any]) -> int:
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
        number = dataset.board.latest_pass
        found = tuple(length for length in dataset.board.lengths(number) if length is not None)
        return found if dataset.board.ways(number) == {"parts"} and len(found) == dataset.board.readers else ()

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
                if not (batch := worker.batch(size, facts.drop_last)):
                    workers.remove(worker)
                    continue
                yield batch
                if len(batch) < size:
                    workers.remove(worker)

    def _begun(self) -> "list[_Worker]":
        """Return workers that begin to read: new ones, or those of the pass before where they are persistent."""
        if self._latest and self._facts.num_workers > 0 and self._facts.loader.persistent_workers:
            for worker in self._latest:
                worker.begin()
            return self._latest
        seed = base_seed(self._facts.loader)
        return [_Worker.started(self._facts, number, seed) for number in range(max(1, self._facts.num_workers))]


@dataclass
class _Worker:
    """Simulate one worker with its copy of the dataset, or the main process where the loader has no workers.

    Attributes:
        dataset: Its copy of the dataset; the dataset itself in the main process.
        info: What ``get_worker_info()`` returns in the worker; None in the main process.
        rng: The worker's global random states; None in the main process.
        reader: Notes whether the dataset asks which worker it is in.
        items: The samples that it has not yet read.
        given: How many it has given in this pass.
    """

    dataset: Any
    info: Any = None
    rng: PrivateRNG | None = None
    reader: Reader = field(default_factory=Reader)
    items: Iterator[Any] = field(default_factory=lambda: iter(()))
    given: int = 0

    @classmethod
    def started(cls, facts: LoaderFacts[Any], number: int, seed: int) -> "_Worker":
        """Start a worker as torch does in a new worker process."""
        if facts.num_workers == 0:
            worker = cls(facts.dataset)
        else:
            dataset = deep_copy(facts.dataset, sharing=_in_shared_memory(facts.dataset, _DEPTH))
            info = made_worker_info(number, facts.num_workers, seed + number, dataset)
            worker = cls(dataset, info, PrivateRNG(seed, number))
            with worker._at_work():
                seed_as_worker(seed, number)
                if (prepare := facts.loader.worker_init_fn) is not None:
                    worker.reader.prepare(dataset, prepare, number)
        worker.begin()
        return worker

    def begin(self) -> None:
        """Begin a pass over the dataset."""
        self.given = 0
        with self._at_work():
            self.items = begun(self.dataset)

    def batch(self, size: int, drop_last: bool) -> list[Any]:
        """Read the next batch; an empty one at the end."""
        with self._at_work():
            batch = list(islice(self.items, size))
        self.given += len(batch)
        return [] if drop_last and len(batch) < size else batch

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        if self.rng is None:
            yield
            return
        with self.rng, worker_info_told(self.info):
            info = self.reader.info(self.info.id, self.info.num_workers, self.info.seed, self.dataset)
            with worker_info_told(info):
                yield


def _in_shared_memory(holder: object, depth: int) -> Iterator[object]:
    """Yield what an object shares with its copies in forked processes."""
    held = getattr(holder, "__dict__", {}).values()
    match holder:
        case dict():
            held = holder.values()
        case list() | tuple():
            held = holder
    for value in islice(held, LOOKED_AT):
        if isinstance(value, torch.Tensor):
            if value.is_shared():  # type: ignore[no-untyped-call]  # torch's
                yield value
        elif isinstance(value, _IN_SHARED_MEMORY):
            yield value
        elif depth:
            yield from _in_shared_memory(value, depth - 1)
