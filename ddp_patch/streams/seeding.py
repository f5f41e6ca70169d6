"""Derive randomness from (seed, epoch): swap random states, seed workers and count epochs.

We call the three *global* generators (torch's on the CPU, numpy's, Python's) ambient. Samplers and training both draw
from them. ``PrivateRNG`` keeps one from disturbing the other.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ddp_patch.compat import replace_worker_seed
from ddp_patch.streams.generators import plain

__all__ = [
    "EpochCounter",
    "PrivateRNG",
    "WorkerSeeding",
    "ambient_state",
    "ambient_unmoved",
    "distributed_permutation",
    "epoch_seed",
    "shuffle_key",
]

# What a seed is used for, so that no two uses draw the same numbers.
_ORDER, _WORKER, _SHUFFLE = 0, 1, 2


def _derive(seed: int, *key: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=key)


def _torch_seed(sequence: np.random.SeedSequence) -> int:
    # 63 bits: DataLoader's own worker seeds are int64, and users pass them on to other libraries.
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


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


def shuffle_key(seed: int, epoch: int) -> np.random.SeedSequence:
    """Return the key of an epoch's order that is computed, not drawn."""
    return _derive(seed, _SHUFFLE, epoch)


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


@dataclass(slots=True)
class _GlobalState:
    """A state of the three global generators."""

    torch: torch.Tensor
    numpy: np.random.BitGenerator
    numpy_gauss: dict[str, Any] | None  # the legacy state, if it holds a second normal draw
    python: tuple[Any, ...]

    @classmethod
    def capture(cls) -> "_GlobalState":
        # numpy keeps a second normal draw beside the bit generator. Swapping bit generators would lose it.
        numpy = np.random.get_state(legacy=False)
        gauss = numpy if numpy["has_gauss"] and numpy["bit_generator"] == "MT19937" else None
        bit_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public; numpy's stubs omit it
        return cls(torch.get_rng_state(), bit_generator, gauss, random.getstate())

    def install(self) -> None:
        torch.set_rng_state(self.torch)
        np.random.set_bit_generator(self.numpy)  # type: ignore[attr-defined]  # as get_bit_generator
        if self.numpy_gauss is not None:
            np.random.set_state(self.numpy_gauss)
        random.setstate(self.python)


class PrivateRNG:
    """Makes the global generators draw from a private stream of (seed, epoch) while entered.

    Enter it as often as you like: the private stream continues where it stopped.

    Examples:
        >>> with PrivateRNG(seed=7, epoch=0):
        ...     first = torch.rand(1)
        >>> with PrivateRNG(seed=7, epoch=0):
        ...     again = torch.rand(1)
        >>> bool(first == again)
        True
    """

    def __init__(self, seed: int, epoch: int) -> None:
        sequence = _derive(seed, _ORDER, epoch)
        self._private = _GlobalState(
            torch.Generator().manual_seed(_torch_seed(sequence)).get_state(),
            np.random.MT19937(sequence),
            None,
            random.Random(_python_seed(sequence)).getstate(),
        )

    # All threads share the global generators. If two threads swapped them at once, each would take the other's private
    # states for the ambient ones.
    _swapping = threading.RLock()

    def __enter__(self) -> None:
        self._swapping.acquire()
        self._ambient = _GlobalState.capture()
        self._private.install()

    def __exit__(self, *exc: object) -> None:
        self._private = _GlobalState.capture()
        self._ambient.install()
        self._swapping.release()


def ambient_state() -> tuple[object, ...]:
    """Return a value that changes whenever one of the global generators is drawn from."""
    state = _GlobalState.capture()
    numpy = np.random.get_state(legacy=False)
    return state.torch.numpy().tobytes(), repr(plain(numpy)), state.python


@contextmanager
def ambient_unmoved() -> Iterator[None]:
    """Put the global generators back into their current states on leaving."""
    state = _GlobalState.capture()
    try:
        yield
    finally:
        state.install()


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
    """

    worker_init_fn: Callable[[int], object] | None
    seed: int
    rank: int
    epochs: EpochCounter

    def __call__(self, worker_id: int) -> None:
        """Seed torch, numpy and ``random`` in worker ``worker_id``."""
        sequence = _derive(self.seed, _WORKER, self.epochs.upcoming, self.rank, worker_id)
        seed = _torch_seed(sequence)
        torch.manual_seed(seed)
        np.random.seed(sequence.generate_state(4))
        random.seed(_python_seed(sequence))
        replace_worker_seed(seed)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
