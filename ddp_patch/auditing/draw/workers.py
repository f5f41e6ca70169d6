"""Read an iterable dataset as a loader's workers would, one worker after the other in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from ddp_patch.compat import made_worker_info, worker_info_told
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.loaders.nesting import deep_copy
from ddp_patch.shares.iterables.board import Board
from ddp_patch.streams.chunks import begun
from ddp_patch.streams.random_states import PrivateRNG

__all__ = ["base_seed", "batches_read"]


def base_seed(loader: DataLoader[Any]) -> int:
    """Draw the seed that a DataLoader draws for its workers, because that moves a generator that samplers share."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))


def batches_read(facts: LoaderFacts[Any]) -> Iterator[list[Any]]:
    """Yield an iterable dataset's batches in the order in which its workers make them."""
    tasks, has_batches = iter(facts.iterated), facts.loader.batch_sampler is not None
    seed = base_seed(facts.loader)
    workers = [_Worker.started(facts, number, seed) for number in range(max(1, facts.num_workers))]
    while workers:
        for worker in list(workers):
            if next(tasks, None) is None and has_batches:
                return
            if not (batch := worker.batch(facts)):
                workers.remove(worker)
                continue
            yield batch
            if len(batch) < (facts.batch_size or 1):
                workers.remove(worker)


@dataclass
class _Worker:
    """Simulate one worker with its copy of the dataset, or the main process where the loader has no workers.

    Attributes:
        info: What ``get_worker_info()`` returns in the worker; None in the main process.
        rng: The worker's global random states; None in the main process.
        items: The samples that it has not yet read.
    """

    info: Any
    rng: PrivateRNG | None
    items: Iterator[Any] = field(default_factory=lambda: iter(()))

    @classmethod
    def started(cls, facts: LoaderFacts[Any], number: int, seed: int) -> "_Worker":
        """Start a worker as torch does in a new worker process."""
        if facts.num_workers == 0:
            return cls(None, None, begun(facts.dataset))
        dataset = deep_copy(facts.dataset, sharing=_shared_memory(facts.dataset))
        info = made_worker_info(number, facts.num_workers, seed + number, dataset)
        worker = cls(info, PrivateRNG(seed, number))
        with worker._at_work():
            if (prepare := facts.loader.worker_init_fn) is not None:
                prepare(number)
            worker.items = begun(dataset)
        return worker

    def batch(self, facts: LoaderFacts[Any]) -> list[Any]:
        """Read the next batch; an empty one at the end."""
        size = facts.batch_size or 1
        with self._at_work():
            batch = list(islice(self.items, size))
        return [] if facts.drop_last and len(batch) < size else batch

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        if self.rng is None:
            yield
            return
        with self.rng, worker_info_told(self.info):
            yield


def _shared_memory(dataset: object) -> Iterator[object]:
    """Yield what a dataset shares with its workers: tensors in shared memory, and the board of a sharded one."""
    for value in getattr(dataset, "__dict__", {}).values():
        if isinstance(value, Board) or (isinstance(value, torch.Tensor) and value.is_shared()):  # type: ignore[no-untyped-call]  # torch's
            yield value
