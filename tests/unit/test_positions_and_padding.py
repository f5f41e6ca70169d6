import pytest

from ddp_patch.options import Uneven
from ddp_patch.positions_and_padding import Plan

# n, uneven -> each rank's positions; a position >= n repeats the item at position mod n.
TABLE: list[tuple[int, Uneven, list[list[int]]]] = [
    # Whole rounds: nothing to decide.
    (6, "pad", [[0, 3], [1, 4], [2, 5]]),
    (6, "drop", [[0, 3], [1, 4], [2, 5]]),
    (6, "keep", [[0, 3], [1, 4], [2, 5]]),
    # One item beyond: two repeated, one lost, or one rank longer.
    (7, "pad", [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
    (7, "drop", [[0, 3], [1, 4], [2, 5]]),
    (7, "keep", [[0, 3, 6], [1, 4], [2, 5]]),
    # Fewer items than ranks.
    (2, "pad", [[0], [1], [2]]),
    (1, "pad", [[0], [1], [2]]),
    (2, "drop", [[], [], []]),
    (2, "keep", [[0], [1], []]),
    # None: nothing can be repeated.
    (0, "pad", [[], [], []]),
]


@pytest.mark.parametrize(("n", "uneven", "shares"), TABLE)
def test_shares_of_three_ranks(n: int, uneven: Uneven, shares: list[list[int]]) -> None:
    plans = [Plan(rank, 3, uneven) for rank in range(3)]
    assert [list(plan.share(n)) for plan in plans] == shares
    assert [list(plan.padding(n)) for plan in plans] == [[p for p in share if p >= n] for share in shares]
