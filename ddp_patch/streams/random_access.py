"""Samplers that can look up any part of any epoch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

__all__ = ["RandomAccess", "is_random_access"]


class RandomAccess(Protocol):
    """A sampler that can look up the items at any positions of any epoch.

    Give your sampler these methods, and each rank looks up only its own items, so the cost does not grow with the
    number of ranks. The items must depend on position and epoch only, and be those that iterating gives. A subclass
    that overrides ``__iter__`` but not ``items_at`` is iterated. If some samplers of a class cannot be looked up, set
    their attribute ``has_random_access`` to False.

    Examples:
        >>> class Strided:
        ...     def __len__(self):
        ...         return 10**9
        ...     def __iter__(self):
        ...         return iter(self.items_at(np.arange(len(self)), 0))
        ...     def items_at(self, positions, epoch):
        ...         return (positions * 7 + epoch) % len(self)
        >>> from ddp_patch import DDPSamplerWrapper
        >>> share = DDPSamplerWrapper(Strided(), False, num_replicas=1000, rank=3)
        >>> next(iter(share)), len(share)
        (21, 1000000)
    """

    def __len__(self) -> int:
        """Return how many items an epoch has."""

    def items_at(self, positions: NDArray[np.int64], epoch: int) -> Sequence[Any] | NDArray[Any]:
        """Return the items at some positions of an epoch.

        Args:
            positions: In ``range(len(self))``, in any order and number.
            epoch: From 0.

        Returns:
            The items, in the order of the positions.
        """


def is_random_access(sampler: object) -> TypeGuard[RandomAccess]:
    """Return whether a sampler can be looked up.

    Its class or a base must define ``items_at``, and no class below that base may override ``__iter__`` alone. A
    sampler whose ``has_random_access`` is False cannot be looked up, whatever its class has.

    Examples:
        >>> from ddp_patch.samplers import ScalableRandomSampler
        >>> is_random_access(ScalableRandomSampler(9, seed=1)), is_random_access(ScalableRandomSampler(9))
        (True, False)
    """
    if getattr(sampler, "has_random_access", True) is False:
        return False
    for base in type(sampler).__mro__:
        if "items_at" in vars(base):
            names = list(inspect.signature(vars(base)["items_at"]).parameters)[1:]
            return names == ["positions", "epoch"] and hasattr(type(sampler), "__len__")
        if "__iter__" in vars(base):
            return False
    return False
