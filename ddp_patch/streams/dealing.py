"""Deal the items of a window so that each step costs alike on all ranks: arithmetic on costs.

An order of n items is meant for interleaved sharing: the item at place p goes to rank ``p % ranks``, and a step takes
the next ``size`` items of every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ddp_patch.costs import CostOf

if TYPE_CHECKING:
    from numpy.typing import NDArray  # which takes long to import

__all__ = ["deal", "deal_batch"]

_PLACE_BITS = np.uint64(32)
_PLACE = np.uint64(2**32 - 1)


def deal(
    costs: NDArray[np.float64], ranks: int, size: int, cost_of: CostOf, key: np.random.SeedSequence
) -> NDArray[np.int64]:
    """Return an order of a window's items in which the batches of each step cost alike.

    The steps come in a random order, and so do the batches within each. A batch has its items in the order in which
    they came. What does not fill a step comes last, and what does not fill a round of it after all else, as it came.

    Args:
        costs: What each item costs, at least 0, shape (items,); fewer than 2**32.
        ranks: How many ranks share the items.
        size: How many items a batch has; 1 where each is a whole batch.
        cost_of: What a batch costs: the ``"sum"`` of its items, or where these are ``"padded"`` to the longest, the
            largest times their number.
        key: What the random order follows from.

    Returns:
        The items' places in the window, in the order in which they are dealt.

    Examples:
        >>> key = np.random.SeedSequence(0)
        >>> order = deal(np.array([1.0, 9, 2, 8, 5, 5, 4, 6]), ranks=2, size=2, cost_of="sum", key=key)
        >>> order.reshape(2, 2, 2).swapaxes(1, 2).tolist()  # steps, ranks, items
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        >>> deal(np.array([1.0, 9, 2, 8, 5, 5, 4, 6]), ranks=2, size=1, cost_of="sum", key=key).tolist()
        [2, 0, 4, 6, 7, 5, 3, 1]

    Source:
        Whole batches, and padded ones, are sorted and cut into steps, which makes the sum of the steps' slowest ranks
        the least there can be. Batches that cost their sum are filled by longest processing time first: Graham,
        "Bounds on Multiprocessing Timing Anomalies", SIAM Journal on Applied Mathematics 17, 1969; with as many items
        in each, one layer of items after the other: Babel, Kellerer and Kotov, "The k-partitioning problem",
        Mathematical Methods of Operations Research 47, 1998. No two batches then differ by more than the dearest item
        costs, and all the waiting of a window, summed over its steps, is less than that: each rank waits less than one
        item, however many steps there are. ``tests/properties/test_dealing_properties.py`` has the proof.
    """
    costs = _scaled(costs)
    whole = len(costs) // (ranks * size) * ranks * size
    over = (len(costs) - whole) // ranks  # rounds of the last step, which is no whole one
    random = np.random.PCG64(key)
    steps = _steps(costs[:whole], ranks, size, cost_of)
    last = whole + _steps(costs[whole : whole + over * ranks], ranks, over, cost_of)
    left = np.arange(whole + over * ranks, len(costs))
    return np.concatenate([_interleaved(steps, random), _interleaved(last, random), left])


def deal_batch(costs: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """Return an order of one batch's samples in which the ranks' parts of it cost alike in sum.

    Args:
        costs: What each sample costs, at least 0, shape (samples,); fewer than 2**32.
        ranks: How many ranks share the batch. The first of them get a sample more where it does not come out even.

    Returns:
        The samples' places in the batch, for interleaved sharing.

    Examples:
        >>> order = deal_batch(np.array([9.0, 5, 5, 3, 1]), ranks=2)
        >>> [order[rank::2].tolist() for rank in range(2)]
        [[1, 2, 4], [0, 3]]

    Source:
        As in ``deal``.
    """
    costs = _scaled(costs)
    whole, over = divmod(len(costs), ranks)
    dearest_first = _ascending(costs)[::-1]
    parts, sums = _filled(costs, dearest_first[: whole * ranks], ranks)
    by_sum = _ascending(sums)
    parts, last = parts[by_sum], dearest_first[whole * ranks :]  # the cheapest samples, to the cheapest parts
    longer = np.sort(np.concatenate([parts[:over], last[:, None]], axis=1), axis=1)
    shorter = np.sort(parts[over:], axis=1)
    # Whichever part has the first sample goes to the first rank: no rank has the dearest part each time.
    longer, shorter = (part[np.argsort(part[:, 0])] if part.size else part for part in (longer, shorter))
    if not over:
        return shorter.T.reshape(-1)
    rounds = np.concatenate([longer[:, :whole], shorter]).T.reshape(-1)
    return np.concatenate([rounds, longer[:, whole]])


def _steps(costs: NDArray[np.float64], ranks: int, size: int, cost_of: CostOf) -> NDArray[np.int64]:
    """Return which items each batch of each step has, shape (steps, ranks, size), from the dearest step on."""
    if not len(costs):
        return np.empty((0, ranks, size), np.int64)
    dearest_first = _ascending(costs)[::-1]
    if cost_of == "sum" and size > 1:
        batches, sums = _filled(costs, dearest_first, len(costs) // size)
        dearest_first = batches[_ascending(sums)[::-1]]
    return np.sort(dearest_first.reshape(-1, ranks, size), axis=2)


def _filled(
    costs: NDArray[np.float64], dearest_first: NDArray[np.int64], batches: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return batches of equally many items, shape (batches, items), and their sums.

    Layer by layer, from the dearest items on, the dearest item of a layer goes to the batch with the least so far.
    """
    layers = dearest_first.reshape(-1, batches)
    filled, sums = np.empty((batches, len(layers)), np.int64), np.zeros(batches)
    for place, layer in enumerate(layers):
        least_first = _ascending(sums)
        filled[least_first, place] = layer
        sums[least_first] += costs[layer]
    return filled, sums


def _interleaved(steps: NDArray[np.int64], random: np.random.PCG64) -> NDArray[np.int64]:
    """Return the order that gives each rank a batch of each step, of steps and batches in a random order."""
    number, ranks, _ = steps.shape
    order = np.argsort(random.random_raw(number))
    of_ranks = np.argsort(random.random_raw(number * ranks).reshape(number, ranks), axis=1)
    return steps[order[:, None], of_ranks].swapaxes(1, 2).reshape(-1)


def _scaled(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return costs of at most 1, so that sums of any are finite, and without a negative zero."""
    return costs / (costs.max(initial=0.0) or 1.0) + 0.0


def _ascending(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the places of some values in ascending order, and of equal ones as they come; faster than ``argsort``.

    It must not depend on the machine, so no two things that are sorted are equal: each has its place in it. The bits
    of floats that are not negative sort as the floats do. Single precision will do: what it takes for equal is.
    """
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    keyed = (bits << _PLACE_BITS) | np.arange(len(values), dtype=np.uint64)
    keyed.sort()
    return (keyed & _PLACE).astype(np.int64)
