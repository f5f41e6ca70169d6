"""Which random numbers a script draws: the same on every rank, or this rank's own while it trains on its part."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ddp_patch.orders.random_states import GlobalState

__all__ = ["RandomNumbers", "seed_all"]


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

    Args:
        seed: What this rank's own numbers follow from, with its number.
        rank: This rank.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._sequence = np.random.SeedSequence([seed, rank])
        self._passes: dict[object, bool] = {}  # those that run, the innermost last: whether the rank draws its own
        self._has_begun = self._draws_own = False
        self._other: Any = None  # the states that are not drawn from

    def begin_own(self) -> None:
        """Let passes over divided loaders draw this rank's own numbers from now on."""
        if self._has_begun:
            return
        self._other = _States.seeded(self._sequence)
        self._has_begun = True
        self._swap()

    def enter(self, *, own: bool) -> object:
        """Note that a pass begins, and whether it is over a divided loader; return its key."""
        key = object()
        self._passes[key] = own
        self._swap()
        return key

    def leave(self, key: object) -> None:
        """Note that a pass has ended, or was left."""
        self._passes.pop(key, None)
        self._swap()

    def _swap(self) -> None:
        own = self._has_begun and next(reversed(self._passes.values()), False)
        if own != self._draws_own:
            now = _States.capture()
            self._other.install()
            self._other, self._draws_own = now, own


@dataclass(frozen=True, slots=True)
class _States:
    """States of all global generators, those of CUDA included where it is used."""

    of_cpu: GlobalState
    of_cuda: list[torch.Tensor]

    @classmethod
    def capture(cls) -> "_States":
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return cls(GlobalState.capture(), torch.cuda.get_rng_state_all() if used else [])

    @classmethod
    def seeded(cls, sequence: np.random.SeedSequence) -> "_States":
        now = cls.capture()
        if now.of_cuda:
            torch.cuda.manual_seed_all(int(sequence.generate_state(1)[0]))
        found = cls(GlobalState.seeded(sequence), cls.capture().of_cuda)
        now.install()
        return found

    def install(self) -> None:
        self.of_cpu.install()
        if self.of_cuda:
            torch.cuda.set_rng_state_all(self.of_cuda)
