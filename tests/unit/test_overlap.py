"""What ranks show of their streams at the patch: their orders, their first samples, and for which ranks they are."""

from messages import raises

from ddp_patch.errors import RankMismatchError
from ddp_patch.ranks.agreement import require_all_shares, require_one_order


def test_orders_that_differ_are_refused_and_one_that_is_unknown_is_not() -> None:
    facts = ("rank 0 and ranks 1, 2", "different orders from Mine", "random generator", "weights", "set", "files")
    with raises(RankMismatchError, facts, ("same on every rank", "order='leader'", "is_ddp_aware = True")):
        require_one_order({0: "a", 1: "b", 2: "b"}, "Mine")
    require_one_order({0: "a", 1: "a"}, "Mine")
    require_one_order({0: "a", 1: None}, "Mine")


# Loaders that are sharded already, by what each rank's was made for: its place here, and (rank, ranks) there.
COVERED: list[dict[int, tuple[int, tuple[int, int]]]] = [
    {0: (0, (0, 2)), 1: (1, (1, 2))},
    {0: (0, (1, 2)), 1: (1, (0, 2))},  # counted in another order
    {0: (0, (0, 2)), 1: (1, (0, 2)), 2: (2, (1, 2)), 3: (3, (1, 2))},  # pairs that replicate each other
    {0: (0, (0, 2)), 1: (0, (0, 2)), 2: (1, (1, 2)), 3: (1, (1, 2))},  # the same, by a mesh
    {0: (0, (0, 1)), 1: (1, (0, 1))},  # all replicate each other
]
NOT_COVERED: list[dict[int, tuple[int, tuple[int, int]]]] = [
    {0: (0, (0, 4)), 1: (1, (1, 4))},
    {0: (0, (0, 2)), 1: (1, (0, 2))},
    {0: (0, (0, 2)), 1: (1, (1, 2)), 2: (2, (0, 2))},
    {0: (0, (0, 2)), 1: (1, (1, 3))},
    {0: (0, (0, 4)), 1: (0, (1, 4)), 2: (1, (2, 4)), 3: (1, (3, 4))},  # a mesh whose ranks ought to replicate
]


def test_shares_are_right_where_ranks_take_each_equally_often() -> None:
    for held in COVERED:
        require_all_shares(held)
    for held in NOT_COVERED:
        with raises(RankMismatchError, ("Agreeing", "sharded already", "on rank"), ("own rank", "process_group=")):
            require_all_shares(held)
