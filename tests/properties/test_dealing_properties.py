"""Items dealt so that steps cost alike: nothing lost, and how far from the best by brute force and by proven bounds.

Whole batches, and padded ones: sort the items, and cut them into steps. No other cut has a smaller sum of the steps'
dearest items, because the i-th dearest of these is at least the dearest item of the i-th step so cut.

Batches that cost their sum are filled layer by layer. W is the number of ranks, D the widest layer: the difference
between its dearest item and its cheapest. So D is at most the dearest item of all.

1. No two batches differ by more than D. A layer gives batch i at least as much as batch j only if i has at most as
   much as j so far. So it turns their difference into one of two non-negative numbers less the other: at most the
   larger, which is a difference from before or within the layer.
2. All the waiting of a window, which is the sum of the steps' slowest batches less the sum of their means, is at most
   (1 - 1/W) D. In each step, the slowest is ahead of the batch in place j by some gap. The gaps of one j do not overlap
   over the steps, because batches are sorted over all steps, so they sum up to D at most; the mean is behind the
   slowest by the W - 1 gaps over W.
3. So the slowest ranks' sum is at most 2 - 1/W times the least there can be, which is at least the sum of the means,
   and at least the dearest item. There is no smaller factor: see the test of one item beside many.
"""

from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ddp_patch.costs import CostOf
from ddp_patch.sharding.balancing import balance_window

ROUNDING = 1e-5  # of single precision, over some additions: of all that a batch costs
TINY = 1e-37  # of the dearest cost: what is less is nothing to single precision

Costs = NDArray[np.float64]

finite = st.floats(0, 1e300)
number = (
    st.integers(0, 9).map(float) | st.floats(0, 1) | st.floats(-3, 3).map(np.exp) | st.sampled_from([0.0, 1.0, 1e3])
)
kinds: st.SearchStrategy[CostOf] = st.sampled_from(["sum", "padded"])


@st.composite
def windows(draw: st.DrawFn, numbers: st.SearchStrategy[float] = number) -> tuple[Costs, int, int]:
    """Costs, ranks and a batch size: some whole steps, and often some items that fill none."""
    ranks, size = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    most = 4 * ranks * size
    return np.array(draw(st.lists(numbers, max_size=most)), np.float64), ranks, size


def key(number: int = 0) -> np.random.SeedSequence:
    return np.random.SeedSequence(number)


def stepped(values: NDArray[Any], ranks: int, size: int) -> NDArray[Any]:
    """Return what is in each batch of the whole steps, shape (steps, ranks, size), as sharing gives it."""
    whole = len(values) // (ranks * size) * ranks * size
    return values[:whole].reshape(-1, size, ranks).swapaxes(1, 2)


def batch_costs(costs: Costs, ranks: int, size: int, cost_of: CostOf) -> Costs:
    """Return what each batch of the whole steps costs, shape (steps, ranks)."""
    items = stepped(costs[balance_window(costs, ranks, size, cost_of, key())], ranks, size)
    batches: Costs = items.sum(axis=2) if cost_of == "sum" else items.max(axis=2) * size
    return batches


def slowest(batches: Costs) -> float:
    """Return the sum over steps of the slowest rank."""
    return float(batches.max(axis=1, initial=0).sum())


def widest_layer(costs: Costs, ranks: int, size: int) -> float:
    """Return D: items sorted and cut into as many layers as a batch has items, how much those of one differ."""
    whole = len(costs) // (ranks * size) * ranks * size
    layers = np.sort(costs[:whole]).reshape(size, -1)
    return float(np.max(layers[:, -1] - layers[:, 0])) if whole else 0.0


@cache
def partitions(n: int, size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return all ways to put n items into groups of so many."""

    def found(left: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if not left:
            yield ()
        for others in combinations(left[1:], size - 1) if left else ():
            for rest in found(tuple(item for item in left[1:] if item not in others)):
                yield ((left[0], *others), *rest)

    return tuple(found(tuple(range(n))))


def least_by_maxima(costs: Costs, group: int) -> float:
    """Return, over all ways to cut items into groups, the least sum of the groups' dearest items."""
    return float(costs[np.array(partitions(len(costs), group))].max(axis=2).sum(axis=1).min())


def least_by_sums(costs: Costs, ranks: int, size: int) -> float:
    """Return the least sum over steps of the slowest rank, over all batches and all ways to put these into steps."""
    sums = costs[np.array(partitions(len(costs), size))].sum(axis=2)  # shape (ways, batches)
    steps = np.array(partitions(sums.shape[1], ranks))
    return float(sums[:, steps].max(axis=3).sum(axis=2).min())


@given(windows(finite | number), kinds)
def test_each_item_comes_once_and_calls_agree(window: tuple[Costs, int, int], cost_of: CostOf) -> None:
    costs, ranks, size = window
    given_costs = costs.copy()
    order = balance_window(costs, ranks, size, cost_of, key())
    assert sorted(order.tolist()) == list(range(len(costs)))
    assert order.tolist() == balance_window(costs, ranks, size, cost_of, key()).tolist()
    assert costs.tolist() == given_costs.tolist()


@given(windows(), kinds)
def test_what_fills_no_step_comes_last(window: tuple[Costs, int, int], cost_of: CostOf) -> None:
    costs, ranks, size = window
    order = balance_window(costs, ranks, size, cost_of, key()).tolist()
    whole, rounds = len(costs) // (ranks * size) * ranks * size, len(costs) // ranks * ranks
    assert sorted(order[:whole]) == list(range(whole))
    assert sorted(order[whole:rounds]) == list(range(whole, rounds))
    assert order[rounds:] == list(range(rounds, len(costs)))


@given(windows(), kinds)
def test_a_batch_has_its_items_as_they_came(window: tuple[Costs, int, int], cost_of: CostOf) -> None:
    costs, ranks, size = window
    order = balance_window(costs, ranks, size, cost_of, key())
    rounds = len(costs) // ranks * ranks
    last = order[len(costs) // (ranks * size) * ranks * size : rounds]
    assert (np.diff(stepped(order, ranks, size), axis=2) > 0).all()
    assert (np.diff(last.reshape(-1, ranks), axis=0) > 0).all()


@given(st.data(), st.sampled_from([(8, 2, 1), (9, 3, 1), (10, 2, 1), (8, 2, 2), (12, 2, 2), (12, 3, 2), (12, 2, 3)]))
def test_padded_and_whole_batches_have_the_least_sum_there_is(data: st.DataObject, shape: tuple[int, int, int]) -> None:
    n, ranks, size = shape
    costs = np.array(data.draw(st.lists(number, min_size=n, max_size=n)))
    least = least_by_maxima(costs, ranks * size) * size
    for cost_of in ("padded", "sum") if size == 1 else ("padded",):
        found = slowest(batch_costs(costs, ranks, size, cost_of))
        assert found <= least * (1 + ROUNDING) + costs.max() * TINY


@given(windows())
def test_no_two_batches_differ_by_more_than_a_layer(window: tuple[Costs, int, int]) -> None:
    costs, ranks, size = window
    batches = batch_costs(costs, ranks, size, "sum")
    if batches.size and size > 1:
        rounding = ROUNDING * batches.max()
        assert batches.max() - batches.min() <= widest_layer(costs, ranks, size) + rounding
        assert batches.max() - batches.min() <= costs.max() + rounding


@given(windows())
def test_all_waiting_of_a_window_is_less_than_one_item(window: tuple[Costs, int, int]) -> None:
    costs, ranks, size = window
    batches = batch_costs(costs, ranks, size, "sum")
    waiting = slowest(batches) - batches.mean(axis=1).sum()
    assert waiting <= (1 - 1 / ranks) * widest_layer(costs, ranks, size) + ROUNDING * batches.sum()


@given(st.data(), st.sampled_from([(8, 2, 2), (8, 2, 4), (9, 3, 3), (8, 4, 2), (10, 2, 5), (12, 3, 2)]))
@example(None, (8, 2, 4))
def test_against_the_best_of_all_batches(data: st.DataObject | None, shape: tuple[int, int, int]) -> None:
    n, ranks, size = shape
    one_beside_many = [n, *[1] * (n // 2), *[0] * (n - n // 2 - 1)]
    drawn = data.draw(st.lists(number, min_size=n, max_size=n)) if data else one_beside_many
    costs = np.array(drawn, np.float64)
    found, least = slowest(batch_costs(costs, ranks, size, "sum")), least_by_sums(costs, ranks, size)
    rounding = ROUNDING * costs.sum()
    assert least - rounding <= found <= (2 - 1 / ranks) * least + rounding
    assert found <= least + (1 - 1 / ranks) * widest_layer(costs, ranks, size) + rounding


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_one_item_beside_many_comes_near_the_bound(ranks: int) -> None:
    size = 30 * ranks + 1
    costs = np.zeros(ranks * size)
    costs[0], costs[1 : (ranks - 1) * size + 1] = size, 1
    best = size  # the one item and nothing beside it, and on every other rank as many ones as fit
    assert (2 - 1 / ranks) * 0.98 < slowest(batch_costs(costs, ranks, size, "sum")) / best <= 2 - 1 / ranks


TYPICAL = np.random.default_rng(5).lognormal(size=4 * 3 * 40)


@pytest.mark.parametrize("cost_of", ["sum", "padded"])
def test_the_order_has_no_trend(cost_of: CostOf) -> None:
    ranks, size, keys = 4, 3, 400
    costs = TYPICAL
    steps, of_ranks = [], []
    for number in range(keys):
        batches = stepped(costs[balance_window(costs, ranks, size, cost_of, key(number))], ranks, size).sum(axis=2)
        steps.append(np.corrcoef(batches.sum(axis=1), range(len(batches)))[0, 1])
        of_ranks.append(batches.mean(axis=0) - batches.mean())
    # Each correlation has a deviation of 1/sqrt(steps - 1), and the mean of some that over their root.
    deviation = 1 / np.sqrt((len(costs) / (ranks * size) - 1) * keys)
    assert abs(np.mean(steps)) < 4 * deviation
    assert np.std(steps) > 0.9 * deviation * np.sqrt(keys)
    deviations = np.std(of_ranks, axis=0) / np.sqrt(keys)
    assert (np.abs(np.mean(of_ranks, axis=0)) < 4 * deviations).all()


@pytest.mark.parametrize("cost_of", ["sum", "padded"])
def test_another_key_gives_another_order_of_the_same_batches(cost_of: CostOf) -> None:
    orders = [balance_window(TYPICAL, 4, 3, cost_of, key(number)) for number in range(2)]
    batches = [sorted(stepped(order, 4, 3).reshape(-1, 3).tolist()) for order in orders]
    assert orders[0].tolist() != orders[1].tolist()
    assert batches[0] == batches[1]
