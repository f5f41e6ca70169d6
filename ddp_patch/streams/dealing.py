"""Balance the items of a window so that each step costs about the same on all ranks: arithmetic on costs.

The order that comes out is for interleaved sharding: the item at position p goes to rank ``p % ranks``, and a step
takes the next ``size`` items of every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from ddp_patch.costs import CostOf

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

__all__ = ["Dealt", "as_it_came", "deal", "deal_batch"]


@dataclass(frozen=True, slots=True)
class Dealt:
    """A balanced window.

    Attributes:
        steps: Which items each batch of each step has, shape (steps, ranks, items), in any order within a batch.
        last: The same of a last step that does not fill its batches, shape (0 or 1, ranks, items).
        left: What does not fill a round, shape (items,).
    """

    steps: NDArray[np.int64]
    last: NDArray[np.int64]
    left: NDArray[np.int64]

    @property
    def order(self) -> NDArray[np.int64]:
        """The order for interleaved sharding."""
        in_order = [np.sort(steps, axis=2).swapaxes(1, 2).reshape(-1) for steps in (self.steps, self.last)]
        return np.concatenate([*in_order, self.left])

    def of_rank(self, rank: int) -> NDArray[np.int64]:
        """Return what a rank takes of the order."""
        own = [np.sort(steps[:, rank], axis=1).reshape(-1) for steps in (self.steps, self.last)]
        return np.concatenate([*own, self.left[rank : rank + 1]])


def deal(costs: NDArray[np.float64], ranks: int, size: int, cost_of: CostOf, key: np.random.SeedSequence) -> Dealt:
    """Balance the items of a window so that the batches of each step cost about the same.

    The steps come in a random order, and so do the batches within each. A batch has its items in the order in which
    they came. What does not fill a step comes last, and what does not fill a round of it after all else, as it came.

    Args:
        costs: What each item costs, at least 0, shape (items,).
        ranks: How many ranks share the items.
        size: How many items a batch has; 1 where each is a whole batch.
        cost_of: What a batch costs: the ``"sum"`` of its items, or where these are ``"padded"`` to the longest, the
            largest times their number.
        key: What the random order follows from.

    Returns:
        The items' positions in the window, in the new order.

    Examples:
        >>> key = np.random.SeedSequence(0)
        >>> dealt = deal(np.array([1.0, 9, 2, 8, 5, 5, 4, 6]), ranks=2, size=2, cost_of="sum", key=key)
        >>> [dealt.of_rank(rank).tolist() for rank in range(2)]
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        >>> deal(np.array([1.0, 9, 2, 8, 5, 5, 4, 6]), ranks=2, size=1, cost_of="sum", key=key).order.tolist()
        [2, 0, 4, 6, 7, 5, 3, 1]

    Source:
        Whole batches, and padded ones, are sorted and cut into steps, which makes the sum of the steps' slowest ranks
        the least there can be. Batches that cost their sum are filled by longest processing time first: Graham,
        "Bounds on Multiprocessing Timing Anomalies", SIAM Journal on Applied Mathematics 17, 1969; with as many items
        in each, one layer of items after the other: Babel, Kellerer and Kotov, "The k-partitioning problem",
        Mathematical Methods of Operations Research 47, 1998. No two batches then differ by more than the most expensive
        item costs, and all the waiting of a window, summed over its steps, is less than that: each rank waits less than
        one item, however many steps there are. ``tests/properties/test_dealing_properties.py`` has the proof.
    """
    costs = _scaled(costs)
    whole = len(costs) // (ranks * size) * ranks * size
    over = (len(costs) - whole) // ranks  # rounds of the last step, which is no whole one
    random = np.random.PCG64(key)
    steps = _shuffled(_steps(costs[:whole], ranks, size, cost_of), random)
    last = whole + _shuffled(_steps(costs[whole : whole + over * ranks], ranks, over, cost_of), random)
    return Dealt(steps, last, np.arange(whole + over * ranks, len(costs)))


def as_it_came(items: int) -> Dealt:
    """Return a window of one rank, which has its order already."""
    return Dealt(np.arange(items).reshape(-1, 1, 1), np.empty((0, 1, 0), np.int64), np.empty(0, np.int64))


def deal_batch(costs: Sequence[float], ranks: int) -> list[int]:
    """Return an order of one batch's samples in which the ranks' parts cost about the same.

    Args:
        costs: What each sample costs, at least 0.
        ranks: How many ranks share the batch. The first of them get a sample more where it does not come out even.

    Returns:
        The samples' positions in the batch, for interleaved sharding.

    Examples:
        >>> order = deal_batch([9.0, 5, 5, 3, 1], ranks=2)
        >>> [order[rank::2] for rank in range(2)]
        [[1, 2, 4], [0, 3]]

    Source:
        As in ``deal``. Plain numbers, because a batch is too short for arrays to be faster.
    """
    dearest_first = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    for start in range(0, len(costs), ranks):
        least_first = sorted(range(ranks), key=sums.__getitem__)
        for sample, part in zip(dearest_first[start : start + ranks], least_first, strict=False):
            parts[part].append(sample)
            sums[part] += costs[sample]
    # Whichever part has the first sample goes to the first rank: no rank has the most expensive part each time.
    parts = sorted(map(sorted, parts), key=lambda part: (-len(part), part))
    return [sample for samples in zip_longest(*parts) for sample in samples if sample is not None]


def _steps(costs: NDArray[np.float64], ranks: int, size: int, cost_of: CostOf) -> NDArray[np.int64]:
    """Return which items each batch of each step has, shape (steps, ranks, size), from the most expensive step on."""
    if not len(costs):
        return np.empty((0, ranks, size), np.int64)
    dearest_first = _ascending(costs)[::-1]
    if cost_of == "sum" and size > 1:
        batches, sums = _filled(costs, dearest_first, len(costs) // size)
        dearest_first = batches[_ascending(sums)[::-1]]
    return dearest_first.reshape(-1, ranks, size)


def _filled(
    costs: NDArray[np.float64], dearest_first: NDArray[np.int64], batches: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return batches of equally many items, shape (batches, items), and their sums.

    Layer by layer, from the most expensive on, the most expensive item of a layer goes to the cheapest batch.
    """
    layers, costs_of = dearest_first.reshape(-1, batches), costs[dearest_first].reshape(-1, batches)
    filled, sums = np.empty_like(layers), np.zeros(batches)
    for place, layer in enumerate(layers):
        least_first = _ascending(sums)
        filled[place, least_first] = layer
        sums[least_first] += costs_of[place]
    return filled.T, sums


def _shuffled(steps: NDArray[np.int64], random: np.random.PCG64) -> NDArray[np.int64]:
    """Return steps in a random order, and the batches of each, too."""
    number, ranks, _ = steps.shape
    order = np.argsort(random.random_raw(number))
    of_ranks = np.argsort(random.random_raw(number * ranks).reshape(number, ranks), axis=1)
    return steps[order[:, None], of_ranks]


def _scaled(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return costs of at most 1, so that sums of any are finite, and without a negative zero."""
    return costs / (costs.max(initial=0.0) or 1.0) + 0.0


def _ascending(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the indices that sort some values, equal ones as they come; faster than ``argsort``.

    It must not depend on the machine, so no two things that are sorted are equal: each contains its index, instead of
    its last bits. The bits of floats that are not negative sort as the floats do.
    """
    places = np.uint64((1 << len(values).bit_length()) - 1)
    keyed = np.ascontiguousarray(values).view(np.uint64) & ~places
    keyed |= np.arange(len(values), dtype=np.uint64)
    keyed.sort()
    keyed &= places
    return keyed.view(np.int64)
