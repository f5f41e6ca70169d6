"""One process's batches, divided over the ranks."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from ddp_patch.costs import Costs
from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.plan import Plan
from ddp_patch.streams.dealing import deal_batch

__all__ = ["Division"]


class Division:
    """Gives a rank its part of each batch of a pass: at least one sample, unless the batch is empty.

    Args:
        plan: The rank's share of a batch.
        name: What makes the batches, for an error.
        costs: What the samples cost, if the parts of a batch are to cost alike.

    Examples:
        >>> [Division(Plan(rank, 2), "a sampler")([5, 3, 8]) for rank in range(2)]
        [[5, 8], [3, 5]]
        >>> [Division(Plan(rank, 2), "a sampler", Costs(abs, "sum"))([5, 9, 1, 3]) for rank in range(2)]
        [[5, 3], [9, 1]]
    """

    def __init__(self, plan: Plan, name: str, costs: Costs | None = None) -> None:
        self._plan, self._name, self._costs = plan, name, costs
        self._taken = array("I")  # the positions of this rank's samples in their batches, if these are balanced

    def __call__(self, batch: Any) -> Any:
        """Return this rank's part of a batch of indices.

        Args:
            batch: The batch: a list, tensor, array, or anything that gives its indices when it is iterated.

        Returns:
            A tensor or array of such a batch, else a list.

        Raises:
            UnsupportedLoaderError: The batch cannot be taken apart.
        """
        if isinstance(batch, str | bytes | dict) or not isinstance(batch, Iterable) or getattr(batch, "ndim", 1) == 0:
            raise UnsupportedLoaderError(
                f"share='within_batches' divides batches of indices, and {self._name} yields a {type(batch).__name__}, "
                "whose samples are unknown. Let it yield lists of indices, or use share='batches'."
            )
        items: Any = batch if isinstance(batch, list | tuple | torch.Tensor | np.ndarray) else list(batch)
        own, repeated = self._places(items)
        if isinstance(items, torch.Tensor | np.ndarray):
            return items[[*own, *repeated]]
        if isinstance(own, range) and not repeated:
            return list(items[own.start : own.stop : own.step])
        return [items[place] for place in chain(own, repeated)]

    def _places(self, items: Any) -> tuple[Sequence[int], Sequence[int]]:
        """Return which samples of a batch are this rank's, and which its padding repeats."""
        own, repeated = self._plan.divide(len(items))
        if self._costs is None:
            return own, repeated
        costs = self._costs.of(items.tolist() if isinstance(items, torch.Tensor | np.ndarray) else items)
        dealt = deal_batch(costs.tolist(), self._plan.num_replicas)
        places = [dealt[place] for place in own]
        self._taken.extend(places)
        return places, [dealt[place] for place in repeated]

    def origins(self, sizes: Iterable[int]) -> np.ndarray[Any, Any] | None:
        """Return where this rank's samples that are not padding come from: their positions among those of all batches.

        Args:
            sizes: How many samples each batch has.

        Returns:
            None if that follows from the plan.
        """
        if self._costs is None:
            return None
        of_batches = np.array([*sizes], np.int64)
        own = [len(self._plan.divide(size)[0]) for size in of_batches.tolist()]
        begins = np.cumsum(of_batches) - of_batches
        return np.repeat(begins, own) + np.array(self._taken, np.int64)
