"""Samplers of which any part of any epoch can be looked up."""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

__all__ = ["RandomAccess", "is_random_access"]


class RandomAccess(Protocol):
    """A sampler whose items can be looked up at any positions of any epoch.

    A sampler that has these methods is not drawn: each rank asks for the items of its own share, so it costs no more
    for any number of ranks. The items must follow from position and epoch alone, and be those that iterating gives. A
    subclass that has an ``__iter__`` of its own, and no ``items_at``, is iterated; so is a sampler whose attribute
    ``has_random_access`` is False, for classes of which only some samplers can be looked up.

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
        """How many items an epoch has."""

    def items_at(self, positions: npt.NDArray[np.int64], epoch: int) -> Sequence[Any] | npt.NDArray[Any]:
        """Return the items at these positions, in ``range(len(self))``, of an epoch."""


def is_random_access(sampler: object) -> TypeGuard[RandomAccess]:
    """Tell whether the sampler's class, or the nearest base that says how to iterate it, has ``items_at``.

    A sampler whose ``has_random_access`` is False has none, whatever its class has.
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
