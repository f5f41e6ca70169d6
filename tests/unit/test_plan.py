import pytest
from messages import raises

from ddp_patch.errors import InvalidOptionError
from ddp_patch.options import Layout, Uneven
from ddp_patch.plan import Plan

# n, uneven, layout -> each rank's positions; a position >= n repeats the item at position mod n.
TABLE: list[tuple[int, Uneven, Layout, list[list[int]]]] = [
    # Whole rounds: nothing to decide.
    (6, "pad", "interleaved", [[0, 3], [1, 4], [2, 5]]),
    (6, "drop", "interleaved", [[0, 3], [1, 4], [2, 5]]),
    (6, "keep", "interleaved", [[0, 3], [1, 4], [2, 5]]),
    (6, "pad", "contiguous", [[0, 1], [2, 3], [4, 5]]),
    # One item beyond: two repeated, one lost, or one rank longer.
    (7, "pad", "interleaved", [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
    (7, "drop", "interleaved", [[0, 3], [1, 4], [2, 5]]),
    (7, "keep", "interleaved", [[0, 3, 6], [1, 4], [2, 5]]),
    (7, "pad", "contiguous", [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
    (7, "drop", "contiguous", [[0, 1], [2, 3], [4, 5]]),
    (7, "keep", "contiguous", [[0, 1, 2], [3, 4], [5, 6]]),
    # Fewer items than ranks.
    (2, "pad", "interleaved", [[0], [1], [2]]),
    (1, "pad", "contiguous", [[0], [1], [2]]),
    (2, "drop", "interleaved", [[], [], []]),
    (2, "keep", "contiguous", [[0], [1], []]),
    # None: nothing can be repeated.
    (0, "pad", "interleaved", [[], [], []]),
    (0, "pad", "contiguous", [[], [], []]),
]


@pytest.mark.parametrize(("n", "uneven", "layout", "shares"), TABLE)
def test_shares_of_three_ranks(n: int, uneven: Uneven, layout: Layout, shares: list[list[int]]) -> None:
    plans = [Plan(rank, 3, uneven, layout) for rank in range(3)]
    assert [list(plan.share(n)) for plan in plans] == shares
    assert [list(plan.padding(n)) for plan in plans] == [[p for p in share if p >= n] for share in shares]


@pytest.mark.parametrize(("rank", "num_replicas"), [(3, 3), (-1, 3), (0, 0)])
def test_a_rank_that_does_not_exist(rank: int, num_replicas: int) -> None:
    with raises(InvalidOptionError, f"num_replicas={num_replicas}", "rank"):
        Plan(rank, num_replicas)
