"""Order the items of a window so that each step costs about the same on all ranks, and divide batches.

The new order is for interleaved sharding: the item at position p goes to rank ``p % ranks``, and a step takes the next
``size`` items of every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from ddp_patch.costs import Cost, CostOf
from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.orders.chunks import copied_items
from ddp_patch.orders.digest import Digest, number_of
from ddp_patch.orders.orders import EpochOrder, in_blocks
from ddp_patch.orders.random_states import Seed, balancing_key
from ddp_patch.positions_and_padding import Plan

if TYPE_CHECKING:
    from numpy.typing import NDArray


T = TypeVar("T")


def balance_window(
    costs: NDArray[np.float64], ranks: int, size: int, cost_of: CostOf, key: np.random.SeedSequence
) -> NDArray[np.int64]:
    """Return an order of a window's items, for interleaved sharding, in which batches of a step cost about the same.

    Steps come in a random order, and so do the batches of a step. A batch keeps the order of its items. Items that do
    not fill a step come last, and after them the items that do not fill a round.

    Args:
        costs: What each item costs, at least 0, shape (items,).
        ranks: How many ranks share the items.
        size: How many items a batch has; 1 where each is a whole batch.
        cost_of: What a batch costs: the ``"sum"`` of its items' costs; or, if items are ``"padded"`` to the longest,
            the largest cost times their number.
        key: The key of the random order.

    Returns:
        The items' positions in the window, in the new order.

    Examples:
        >>> key = np.random.SeedSequence(0)
        >>> order = balance_window(np.array([1.0, 9, 2, 8, 5, 5, 4, 6]), ranks=2, size=2, cost_of="sum", key=key)
        >>> [order[rank::2].tolist() for rank in range(2)]
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        >>> balance_window(np.array([1.0, 9, 2, 8, 5, 5, 4, 6]), ranks=2, size=1, cost_of="sum", key=key).tolist()
        [2, 0, 4, 6, 7, 5, 3, 1]

    Source:
        Whole batches, and padded ones, are sorted and cut into steps, which makes the sum of the steps' slowest ranks
        the least there can be. Batches that cost their sum are filled by longest processing time first: Graham, "Bounds
        on Multiprocessing Timing Anomalies", SIAM Journal on Applied Mathematics 17, 1969; if all batches have equally
        many items, one layer of items after the other: Babel, Kellerer and Kotov, "The k-partitioning problem",
        Mathematical Methods of Operations Research 47, 1998. No two batches then differ by more than the cost of the
        most expensive item. The waiting of a window, summed over its steps, is less than this cost, however many steps
        there are. ``tests/properties/test_dealing_properties.py`` has the proof.
    """
    costs = _scaled(costs)
    whole = len(costs) // (ranks * size) * ranks * size
    over = (len(costs) - whole) // ranks  # rounds of the last, incomplete step
    random = np.random.PCG64(key)
    steps = _shuffled(_steps(costs[:whole], ranks, size, cost_of), random)
    last = whole + _shuffled(_steps(costs[whole : whole + over * ranks], ranks, over, cost_of), random)
    in_order = [np.sort(part, axis=2).swapaxes(1, 2).reshape(-1) for part in (steps, last)]
    return np.concatenate([*in_order, np.arange(whole + over * ranks, len(costs))])


def _steps(costs: NDArray[np.float64], ranks: int, size: int, cost_of: CostOf) -> NDArray[np.int64]:
    """Return the items of each batch of each step, shape (steps, ranks, size), from the most expensive step on."""
    if not len(costs):
        return np.empty((0, ranks, size), np.int64)
    dearest_first = _ascending(costs)[::-1]
    if cost_of != "sum" or size == 1:
        return dearest_first.reshape(-1, ranks, size)
    batches, sums = _filled(costs, dearest_first, len(costs) // size)
    return batches[_ascending(sums)[::-1].reshape(-1, ranks)]


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
    """Return the steps in a random order, and the batches of each step in a random order."""
    number, ranks, _ = steps.shape
    order = np.argsort(random.random_raw(number))
    of_ranks = np.argsort(random.random_raw(number * ranks).reshape(number, ranks), axis=1)
    return steps[order[:, None], of_ranks]


def _scaled(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale costs to at most 1, so that sums are finite; a negative zero becomes zero."""
    return costs / (costs.max(initial=0.0) or 1.0) + 0.0


def _ascending(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the indices that sort values of at least 0, faster than ``argsort``; equal values keep their order.

    Ties must not depend on the machine, so the low bits of each key are replaced by the index. Floats of at least 0
    sort as their bits do.
    """
    places = np.uint64((1 << len(values).bit_length()) - 1)
    keyed = np.ascontiguousarray(values).view(np.uint64) & ~places
    keyed |= np.arange(len(values), dtype=np.uint64)
    keyed.sort()
    keyed &= places
    return keyed.view(np.int64)


def part_of_batch(batch: Any, plan: Plan, name: str) -> Any:
    """Return a rank's part of a batch of indices: at least one sample, unless the batch is empty.

    Args:
        batch: The batch: a list, tensor, array or any other iterable of indices.
        plan: The rank's share of a batch.
        name: What makes the batches, for an error.

    Returns:
        A tensor or array if the batch is one, otherwise a list.

    Raises:
        UnsupportedLoaderError: The batch cannot be taken apart.

    Examples:
        >>> [part_of_batch([5, 3, 8], Plan(rank, 2), "a sampler") for rank in range(2)]
        [[5, 8], [3, 5]]
    """
    if isinstance(batch, str | bytes | dict) or not isinstance(batch, Iterable) or getattr(batch, "ndim", 1) == 0:
        raise UnsupportedLoaderError(
            f"share='within_batches' divides batches of indices, and {name} yields a {type(batch).__name__}, "
            "whose samples are unknown. Let it yield lists of indices, or use share='batches'."
        )
    items: Any = batch if isinstance(batch, list | tuple | torch.Tensor | np.ndarray) else list(batch)
    own, repeated = plan.divide(len(items))
    if not repeated and isinstance(items, list | tuple):
        return list(items[own.start : own.stop : own.step])
    places = [*own, *repeated]
    return items[places] if isinstance(items, torch.Tensor | np.ndarray) else [items[place] for place in places]


@dataclass(frozen=True, slots=True)
class Balancer:
    """How a sampler's stream is balanced.

    Attributes:
        costs: What the items cost.
        size: How many items a batch takes.
        are_batches: Whether each item is a batch.
        seed: The random order of steps follows from this seed and the epoch.
    """

    costs: Cost
    size: int
    are_batches: bool
    seed: Seed

    @property
    def described(self) -> dict[str, object]:
        """The facts that the order follows from, by their names in states."""
        return self.costs.described | ({} if self.are_batches else {"batch_size": self.size})

    def width(self, ranks: int) -> int:
        """Return how many items a window has for this many ranks."""
        return min(self.costs.window * ranks * self.size, sys.maxsize)

    def order_of(
        self, items: Sequence[Any] | np.ndarray[Any, Any], ranks: int, epoch: int, window: int
    ) -> NDArray[np.int64]:
        """Return the order of a window that is balanced for this many ranks, for interleaved sharding.

        Args:
            items: The window's items.
            ranks: How many ranks share the items.
            epoch: The epoch.
            window: The number of the window in the epoch.
        """
        if ranks == 1:  # no rank waits for another, so the order stays
            return np.arange(len(items))
        costs = self.costs.of(items, are_batches=self.are_batches)
        key = balancing_key(self.seed.value, epoch, window)
        return balance_window(costs, ranks, self.size, self.costs.of_batch, key)


def balanced_stream(balancer: Balancer, epoch: int, ranks: int, stream: Iterator[T]) -> Iterator[T]:
    """Balance a stream, window by window. A window is drawn as soon as its first item is asked for.

    Args:
        balancer: How the items are balanced.
        epoch: The epoch.
        ranks: How many ranks began the epoch.
        stream: The sampler's stream, which has begun.
    """
    rest, width, number = copied_items(stream), balancer.width(ranks), count()
    while items := list(islice(rest, width)):
        yield from map(items.__getitem__, balancer.order_of(items, ranks, epoch, next(number)).tolist())


def balanced_order(
    balancer: Balancer, ranks: int, epoch: int, order: EpochOrder, begin: int, digest: Digest | None
) -> EpochOrder:
    """Return an order, balanced for this many ranks.

    Args:
        balancer: How the items are balanced.
        ranks: How many ranks began the epoch.
        epoch: The epoch.
        order: The order.
        begin: The position at which the pass begins.
        digest: Records how each window from this position on is balanced; None if the ranks do not compare it.
    """
    width = balancer.width(ranks)
    to_note = begin // width

    @lru_cache(maxsize=1)
    def window(number: int) -> tuple[Any, np.ndarray[Any, Any]]:
        """Return a window's items, which may be an array, and the balanced order of their positions."""
        nonlocal to_note
        positions = range(number * width, min(order.length, (number + 1) * width))
        drawn = order.drawn
        items: Any
        if drawn is None or positions.stop > len(drawn):
            items = order.at(positions)
        else:
            items = drawn[positions.start : positions.stop].numpy()
        places = balancer.order_of(items, ranks, epoch, number)
        if number == to_note and digest is not None:
            digest.add_hash(number_of([places]), len(places))
            to_note += 1
        return items, places

    def at(positions: range) -> list[Any]:
        found: list[Any] = []
        for number, here in in_blocks(positions, width):
            items, places = window(number)
            taken = places[here.start : here.stop : here.step]
            found += items[taken].tolist() if isinstance(items, np.ndarray) else map(items.__getitem__, taken.tolist())
        return found

    def by_window(positions: range) -> Iterator[range]:
        """Cut positions at windows, so that a window is balanced when its first item is asked for."""
        for number, here in in_blocks(positions, width):
            yield range(here.start + number * width, here.stop + number * width, here.step)

    return EpochOrder(order.length, at, pieces=by_window)
