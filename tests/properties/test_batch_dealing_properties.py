"""The samples of one batch dealt so that the ranks' parts of it cost alike: as the plan divides it, and by bounds.

What holds of the batches of a window (see ``test_dealing_properties.py``) holds of the parts of a batch, whose last
layer is filled up with nothing.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ddp_patch.options import Uneven
from ddp_patch.plan import Plan
from ddp_patch.sharding.balancing import balance_batch

ROUNDING = 1e-5  # of single precision, over some additions: of all that a batch costs

Costs = NDArray[np.float64]

number = st.integers(0, 9).map(float) | st.floats(0, 1) | st.floats(-3, 3).map(np.exp)
finite = number | st.floats(0, 1e300)
unevens: st.SearchStrategy[Uneven] = st.sampled_from(["pad", "drop", "keep"])


def one_batch(numbers: st.SearchStrategy[float], least: int = 0) -> st.SearchStrategy[Costs]:
    return st.lists(numbers, min_size=least, max_size=60).map(np.array)


@given(one_batch(finite), st.integers(1, 12), unevens)
def test_a_batch_is_divided_as_the_plan_says(costs: Costs, ranks: int, uneven: Uneven) -> None:
    order = balance_batch(costs.tolist(), ranks)
    assert sorted(order) == list(range(len(costs)))
    assert order == balance_batch(costs.tolist(), ranks)
    parts = [order[rank::ranks] for rank in range(ranks)]
    each, over = divmod(len(costs), ranks)
    assert [len(part) for part in parts] == [each + (rank < over) for rank in range(ranks)]
    if uneven != "drop":  # which would lose samples, and is refused
        shares = [Plan(rank, ranks, uneven).divide(len(costs))[0] for rank in range(ranks)]
        assert [len(part) for part in parts] == [len(share) for share in shares]
    assert all(part == sorted(part) for part in parts)


@given(one_batch(number, least=1), st.integers(1, 12))
def test_parts_of_a_batch_differ_by_less_than_one_sample(costs: Costs, ranks: int) -> None:
    order = np.array(balance_batch(costs.tolist(), ranks), np.int64)
    parts = np.array([costs[order[rank::ranks]].sum() for rank in range(ranks)])
    widest = widest_of_parts(costs, ranks)
    rounding = ROUNDING * costs.sum()
    assert np.ptp(parts) <= widest + rounding
    assert widest <= costs.max()
    assert parts.max() - parts.mean() <= (1 - 1 / ranks) * widest + rounding


def widest_of_parts(costs: Costs, ranks: int) -> float:
    """Return D of a batch: its last layer is filled up with nothing."""
    dearest_first = np.sort(costs)[::-1]
    layers = np.concatenate([dearest_first, np.zeros(-len(costs) % ranks)]).reshape(-1, ranks)
    return float((layers[:, 0] - layers[:, -1]).max())


def test_no_rank_has_the_dearest_part_of_each_batch() -> None:
    random, ranks = np.random.default_rng(3), 4
    dearest = []
    for _ in range(400):
        costs = random.lognormal(size=24)
        order = np.array(balance_batch(costs.tolist(), ranks), np.int64)
        dearest.append(int(np.argmax([costs[order[rank::ranks]].sum() for rank in range(ranks)])))
    assert min(np.bincount(dearest, minlength=ranks)) > 60  # of 100, which deviate by 9
