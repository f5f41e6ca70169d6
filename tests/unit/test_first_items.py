"""How many first items two ranks may have in common."""

import random

import pytest

from ddp_patch.ranks.first_items import common_items


@pytest.mark.parametrize("drawn", [16, 64, 256])
@pytest.mark.parametrize("n", [100, 1000, 10000])
def test_what_is_drawn_with_replacement_may_be_on_two_ranks(n: int, drawn: int) -> None:
    rng = random.Random(n + drawn)
    ranks = [(rng.choices(range(n), k=drawn), rng.choices(range(n), k=drawn)) for _ in range(500)]
    assert sum(common_items(*of_ranks, ranks=2) > 0 for of_ranks in ranks) == 0


def test_the_same_items_are_told_and_so_are_two_shuffles_of_one_dataset() -> None:
    rng = random.Random(1)
    assert common_items(range(2), range(2), ranks=2) == 2
    assert common_items(range(12), range(12), ranks=8) == 12
    assert common_items(rng.sample(range(1000), 256), rng.sample(range(1000), 256), ranks=2) > 50


def test_padding_and_items_that_all_are_alike_show_nothing() -> None:
    assert common_items([0, 4, 8], [2, 6, 0], ranks=4) == 0
    assert common_items([7] * 9, [7] * 9, ranks=2) == 0
