"""One process's batches, divided over the ranks."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.plan import Plan

__all__ = ["part_of"]


def part_of(batch: Any, plan: Plan, name: str) -> Any:
    """Return a rank's part of a batch of indices, which has at least one unless the batch is empty.

    Args:
        batch: The batch: a list, tensor, array, or anything that gives its indices when it is iterated.
        plan: The rank's share of a batch.
        name: What made the batch, for an error.

    Returns:
        A tensor or array of such a batch, else a list.

    Raises:
        UnsupportedLoaderError: The batch cannot be taken apart.

    Examples:
        >>> [part_of([5, 3, 8], Plan(rank, 2), "a sampler") for rank in range(2)]
        [[5, 8], [3, 5]]
    """
    if isinstance(batch, str | bytes | dict) or not isinstance(batch, Iterable) or getattr(batch, "ndim", 1) == 0:
        raise UnsupportedLoaderError(
            f"share='within_batches' divides batches of indices, and {name} yields a {type(batch).__name__}, of which "
            "it is not known what its samples are. Let it yield lists of indices, or use share='batches'."
        )
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch[_places(plan, len(batch))]
    items: Sequence[Any] = batch if isinstance(batch, list | tuple) else list(batch)
    own, repeated = plan.divide(len(items))
    part = list(items[own.start : own.stop : own.step])
    return part + [items[place] for place in repeated] if repeated else part


def _places(plan: Plan, samples: int) -> list[int]:
    return list(chain(*plan.divide(samples)))
