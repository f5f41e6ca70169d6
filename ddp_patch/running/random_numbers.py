"""Which random numbers a script draws: the same on every rank, or this rank's own while it trains on its part."""

import random
from typing import Any, TypeAlias

import numpy as np
import torch

from ddp_patch.orders.random_states import GlobalState

__all__ = ["RandomNumbers", "seed_all"]

# The states of the CPU's global generators, and of those of CUDA devices, where they are used.
_States: TypeAlias = tuple[GlobalState, list[torch.Tensor]]


def seed_all(seed: int | None) -> None:
    """Seed the global generators of Python, numpy and torch; None for a seed of the system's entropy."""
    random.seed(seed)
    np.random.seed(None if seed is None else seed % 2**32)
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed)


class RandomNumbers:
    """Swaps what the global generators draw: numbers that are the same on every rank, and numbers of this rank's own.

    A rank draws its own from the first optimizer step on, in passes over divided loaders: dropout and augmentation
    differ between the samples of a batch, and so between the ranks. All else that a script draws is the same on every
    rank: how it splits data, the first weights of its next model, what it draws in an evaluation.
    """

    def __init__(self) -> None:
        self._sequence = np.random.SeedSequence(0)
        self._passes: dict[object, bool] = {}  # those that run, the innermost last: whether the rank draws its own
        self._has_begun = self._draws_own = False
        self._other: Any = None  # the states that are not drawn from

    def seed(self, seed: int, rank: int) -> None:
        """Let this rank's own numbers follow from a seed and its number."""
        self._sequence = np.random.SeedSequence([seed, rank])

    def begin_own(self) -> None:
        """Let passes over divided loaders draw this rank's own numbers from now on."""
        if self._has_begun:
            return
        now = _of_cuda()
        if now:
            torch.cuda.manual_seed_all(int(self._sequence.generate_state(1)[0]))
        self._other = GlobalState.seeded(self._sequence), _of_cuda()
        _put_on_cuda(now)
        self._has_begun = True
        self._swap()

    def enter(self, *, own: bool) -> object:
        """Note that a pass begins, and whether it is over a divided loader; return its key."""
        key = object()
        self.change(key, own=own)
        return key

    def change(self, key: object, *, own: bool) -> None:
        """Note that a pass goes on over a divided loader, or a whole one."""
        self._passes[key] = own
        self._swap()

    def leave(self, key: object) -> None:
        """Note that a pass has ended, or was left."""
        self._passes.pop(key, None)
        self._swap()

    def _swap(self) -> None:
        own = self._has_begun and next(reversed(self._passes.values()), False)
        if own != self._draws_own:
            now: _States = GlobalState.capture(), _of_cuda()
            of_cpu, of_cuda = self._other
            of_cpu.install()
            _put_on_cuda(of_cuda)
            self._other, self._draws_own = now, own


def _of_cuda() -> list[torch.Tensor]:
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return torch.cuda.get_rng_state_all() if used else []


def _put_on_cuda(states: list[torch.Tensor]) -> None:
    if states:
        torch.cuda.set_rng_state_all(states)
