"""Seeds from (seed, epoch), for orders and for workers, and the count of epochs."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ddp_patch.compat.torch_workers import replace_worker_seed
from ddp_patch.errors import UnsupportedLoaderError

__all__ = [
    "EpochCounter",
    "Seed",
    "WorkerSeeding",
    "dealing_key",
    "distributed_permutation",
    "epoch_seed",
    "loader_seed",
    "order_seeds",
    "reader_seed",
    "shuffle_key",
]

# What a seed is used for, so that no two uses draw the same numbers.
_ORDER, _WORKER, _SHUFFLE, _LOADER, _READER, _PART, _DEALING = range(7)


def _derive(seed: int, *key: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=key)


def _torch_seed(sequence: np.random.SeedSequence) -> int:
    # 63 bits: DataLoader's own worker seeds are int64, and users pass them on to other libraries.
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def loader_seed(seed: int, stream: str, number: int) -> int:
    """Return the seed of one of several loaders, for which the user chose none.

    Args:
        seed: What all their seeds follow from.
        stream: A fingerprint, in hexadecimal digits, of what is known of the loader's stream.
        number: Which of the loaders with such a stream it is, from 1.

    Examples:
        >>> len({loader_seed(seed, "f0", number) for seed, number in [(0, 1), (0, 2), (1, 1)]})
        3
    """
    return _torch_seed(_derive(seed, _LOADER, int(stream, 16), number))


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of torch's global generator while epoch ``epoch`` is drawn.

    Examples:
        >>> sampler = torch.utils.data.RandomSampler(range(5))
        >>> _ = torch.manual_seed(epoch_seed(seed=7, epoch=2))
        >>> in_one_process = list(sampler)
        >>> from ddp_patch import DDPSamplerWrapper
        >>> patched = DDPSamplerWrapper(sampler, False, num_replicas=1, rank=0, seed=7)
        >>> patched.set_epoch(2)
        >>> list(patched) == in_one_process
        True
    """
    return _torch_seed(_derive(seed, _ORDER, epoch))


def order_seeds(seed: int, epoch: int, reader: int | None = None) -> tuple[int, np.random.SeedSequence, int]:
    """Return the seeds of torch's, numpy's and Python's global generators while an epoch is drawn.

    Args:
        seed: The seed in force.
        epoch: The epoch.
        reader: Which worker reads a part of it, if one does.
    """
    sequence = _derive(seed, _ORDER, epoch) if reader is None else _derive(seed, _PART, epoch, reader)
    return _torch_seed(sequence), sequence, _python_seed(sequence)


def reader_seed(seed: int, epoch: int) -> int:
    """Return the seed in ``get_worker_info()`` of worker 0 while it reads a dataset; that of worker j is j more.

    torch numbers the seeds of a loader's workers in this way, and datasets subtract j to get a common seed.
    """
    return _torch_seed(_derive(seed, _READER, epoch)) >> 1


def shuffle_key(seed: int, epoch: int) -> np.random.SeedSequence:
    """Return the key of an epoch's order that is computed, not drawn."""
    return _derive(seed, _SHUFFLE, epoch)


def dealing_key(seed: int, epoch: int, stage: int, window: int) -> np.random.SeedSequence:
    """Return the key of the random order of a balanced window of an epoch.

    Args:
        seed: The seed in force.
        epoch: The epoch.
        stage: How many numbers of ranks have shared the epoch before.
        window: Which window.
    """
    return _derive(seed, _DEALING, epoch, stage, window)


class Seed:
    """The seed in force. Whoever derives random states reads it here, so that a restored state's holds for all.

    Args:
        value: The seed, a whole number of at least 0.
        is_chosen: Whether the user chose it; then no state replaces it.
    """

    def __init__(self, value: int, *, is_chosen: bool) -> None:
        self.value: int = value
        self.is_chosen: bool = is_chosen

    def adopt(self, value: int) -> None:
        """Replace the seed by a state's, from now on."""
        self.value = value

    @contextmanager
    def tried(self, value: int) -> Iterator[None]:
        """While entered, have another seed in force."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


class EpochCounter:
    """Counts epochs: the next one begins when a pass draws its first item.

    An iterator that draws nothing does not count. A ``DataLoader`` with workers makes such a one for each pass.
    """

    def __init__(self) -> None:
        self.current: int = 0
        self.passes: int = 0
        self._begun = False

    @property
    def upcoming(self) -> int:
        """The epoch that the next pass will draw."""
        return self.current + self._begun

    def begin(self, epoch: int) -> None:
        """Record that a pass over ``epoch`` has begun to draw."""
        # An iterator of an earlier epoch may come late. Keep counting from the latest.
        self.current, self._begun = max(self.current, epoch), True
        self.passes += 1

    def set(self, epoch: int) -> None:
        """Make ``epoch`` the upcoming one."""
        self.current, self._begun = epoch, False


def _python_seed(sequence: np.random.SeedSequence) -> int:
    return int.from_bytes(sequence.generate_state(4).tobytes(), "little")


def distributed_permutation(n: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order, of shape [n], in which ``torch.utils.data.DistributedSampler(shuffle=True)`` visits n items.

    Source: ``DistributedSampler.__iter__``: a generator seeded ``seed + epoch`` and one ``torch.randperm``.
    """
    generator = torch.Generator().manual_seed((seed + epoch) % 2**64)
    return torch.randperm(n, generator=generator)


@dataclass(frozen=True, slots=True)
class WorkerSeeding:
    """A ``worker_init_fn`` that seeds each worker by (seed, epoch, rank, worker), then calls the user's.

    torch seeds workers from a number that the main process draws. Ranks that are seeded alike, or share a generator,
    draw the same number, so all would augment alike. This replaces ``get_worker_info().seed`` too, because datasets
    seed their own generators from it.

    Attributes:
        worker_init_fn: The user's function, or None.
        seed: Read when a worker starts.
    """

    worker_init_fn: Callable[[int], object] | None
    seed: Seed
    rank: int
    epochs: EpochCounter

    def __call__(self, worker_id: int) -> None:
        """Seed torch, numpy and ``random`` in worker ``worker_id``.

        Raises:
            UnsupportedLoaderError: The worker is a thread. A process runs its worker in its main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            raise UnsupportedLoaderError(
                f"Worker {worker_id} of the loader is a thread, and cannot be seeded by rank: threads use the same "
                "random states as the sampler, so ranks would draw different orders and lose samples. "
                "Use a loader whose workers are processes, or num_workers=0."
            )
        sequence = _derive(self.seed.value, _WORKER, self.epochs.upcoming, self.rank, worker_id)
        seed = _torch_seed(sequence)
        torch.manual_seed(seed)
        np.random.seed(sequence.generate_state(4))
        random.seed(_python_seed(sequence))
        replace_worker_seed(seed)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
