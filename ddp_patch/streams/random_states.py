"""Swap the global random states for private ones, read and restore them.

We call the three *global* generators (torch's on the CPU, numpy's, Python's) ambient. Samplers and training both draw
from them. ``PrivateRNG`` keeps one from disturbing the other.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

from ddp_patch.compat.arrays import may_hold_a_normal
from ddp_patch.options import Options
from ddp_patch.streams.generators import plain
from ddp_patch.streams.seeding import Seed, epoch_seed, order_seeds

__all__ = [
    "Entered",
    "PrivateRNG",
    "ambient_state",
    "ambient_unmoved",
    "epoch_generator",
    "epoch_states",
    "one_at_a_time",
]

# All threads share the global generators, and may share others. If two threads swapped states at once, each would take
# the other's private ones for those of the training.
_swapping = threading.RLock()


def one_at_a_time() -> AbstractContextManager[object]:
    """Return what to enter while random states are swapped: one thread of the process at a time may."""
    return _swapping


def _allow_swapping() -> None:
    """Replace the lock in a worker that was forked while another thread held it."""
    global _swapping
    _swapping = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_allow_swapping)


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
        gauss = np.random.get_state(legacy=False) if may_hold_a_normal() else None
        bit_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public; numpy's stubs omit it
        return cls(torch.get_rng_state(), bit_generator, gauss, random.getstate())

    def is_same(self, other: "_GlobalState") -> bool:
        """Return whether the same numbers would be drawn from another one."""
        mine, others = self.numpy.state, other.numpy.state
        return (
            torch.equal(self.torch, other.torch)
            and self.python == other.python
            and (self.numpy_gauss is None) == (other.numpy_gauss is None)
            and mine["state"]["pos"] == others["state"]["pos"]
            and np.array_equal(mine["state"]["key"], others["state"]["key"])
        )

    def install(self) -> None:
        torch.set_rng_state(self.torch)
        np.random.set_bit_generator(self.numpy)  # type: ignore[attr-defined]  # as get_bit_generator
        if self.numpy_gauss is not None:
            np.random.set_state(self.numpy_gauss)
        random.setstate(self.python)


class PrivateRNG:
    """Let the global generators draw from a private stream of (seed, epoch) while entered.

    Enter it as often as you like: the private stream continues where it stopped.

    Examples:
        >>> with PrivateRNG(seed=7, epoch=0):
        ...     first = torch.rand(1)
        >>> with PrivateRNG(seed=7, epoch=0):
        ...     again = torch.rand(1)
        >>> bool(first == again)
        True
    """

    def __init__(self, seed: int, epoch: int, reader: int | None = None) -> None:
        self._key = seed, epoch, reader
        self._private = self._at_first()
        self._first: _GlobalState | None = None

    def _at_first(self) -> _GlobalState:
        for_torch, for_numpy, for_python = order_seeds(*self._key)
        return _GlobalState(
            torch.Generator().manual_seed(for_torch).get_state(),
            np.random.MT19937(for_numpy),
            None,
            random.Random(for_python).getstate(),
        )

    @property
    def is_unmoved(self) -> bool:
        """Whether nothing was drawn from the private stream."""
        if self._first is None:
            self._first = self._at_first()
        return self._private.is_same(self._first)

    def __enter__(self) -> None:
        self._lock = _swapping
        self._lock.acquire()
        self._ambient = _GlobalState.capture()
        self._private.install()

    def __exit__(self, *exc: object) -> None:
        self._private = _GlobalState.capture()
        self._ambient.install()
        self._lock.release()


def epoch_states(options: Options, seed: Seed, epoch: int, reader: int | None = None) -> AbstractContextManager[None]:
    """Return what to enter while an epoch is drawn: its private states, or nothing with ``agreement="ambient"``.

    Args:
        options: What the user chose.
        seed: The seed in force.
        epoch: The epoch.
        reader: Which worker reads a part of it, if that has states of its own.
    """
    return nullcontext() if options.agreement == "ambient" else PrivateRNG(seed.value, epoch, reader)


class Entered(AbstractContextManager[None]):
    """Several contexts as one that may be entered again and again, each made anew.

    Args:
        make: Make them, from the outside in.
    """

    def __init__(self, *make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self._make:
                stack.enter_context(make())
            self._entered = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.__exit__(kind, error, trace)


def epoch_generator(options: Options, seed: Seed, epoch: int) -> torch.Generator | None:
    """Return the generator that torch's own samplers draw an epoch from; None with ``agreement="ambient"``.

    It draws what the global one would draw in ``epoch_states``, and nobody else can draw from it.
    """
    return None if options.agreement == "ambient" else torch.Generator().manual_seed(epoch_seed(seed.value, epoch))


def ambient_state() -> tuple[object, ...]:
    """Return a value that changes whenever somebody draws from one of the global generators."""
    state = _GlobalState.capture()
    numpy = np.random.get_state(legacy=False)
    return state.torch.numpy().tobytes(), repr(plain(numpy)), state.python


@contextmanager
def ambient_unmoved() -> Iterator[None]:
    """Put the global generators back into their current states on leaving."""
    with one_at_a_time():
        state = _GlobalState.capture()
        try:
            yield
        finally:
            state.install()
