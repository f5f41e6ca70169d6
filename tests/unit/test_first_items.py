"""What the first items of two ranks are, and how many they may have in common by chance."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ddp_patch.loaders.overlap import row_hashes
from ddp_patch.ranks.apart import bits_against_chance, common_items

BITS = 10


def bits(of_ranks: tuple[list[int], list[int]], passes: int = 1) -> float:
    common, repeats = common_items(*of_ranks)
    return bits_against_chance(passes * common, passes * repeats)


@pytest.mark.parametrize("drawn", [16, 64, 256])
@pytest.mark.parametrize("n", [100, 1000, 10000])
def test_what_is_drawn_with_replacement_is_hardly_ever_unlikely(n: int, drawn: int) -> None:
    rng = random.Random(n + drawn)
    found = [bits((rng.choices(range(n), k=drawn), rng.choices(range(n), k=drawn))) for _ in range(500)]
    assert sum(one > BITS for one in found) == 0


def test_the_same_items_are_unlikely_and_so_are_two_shuffles_of_one_dataset() -> None:
    rng = random.Random(1)
    assert bits((list(range(12)), list(range(12)))) > BITS
    shuffles = (rng.sample(range(1000), 256), rng.sample(range(1000), 256))
    assert bits(shuffles) > 5 * BITS
    few = (rng.sample(range(10000), 256), rng.sample(range(10000), 256))
    assert bits(few, passes=3) > BITS


def test_items_that_all_are_alike_show_nothing() -> None:
    assert bits(([7] * 9, [7] * 9)) == 0


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0), (4,), (4, 2)])
def test_batches_of_any_shape_have_hashes(shape: tuple[int, ...]) -> None:
    assert len(row_hashes(torch.zeros(shape), most=9)) == shape[0]
    assert len(row_hashes(np.zeros(shape), most=9)) == shape[0]
    assert row_hashes(torch.zeros(shape), most=0) == []


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray])
def test_of_a_large_sample_some_bytes_count_wherever_they_lie(kind: Callable[[Any], Any]) -> None:
    batch = np.random.default_rng(0).random((4, 3, 64, 64))
    assert len({*row_hashes(kind(batch), most=9)}) == 4
    assert row_hashes(kind(batch.transpose(0, 2, 3, 1)), most=9) == row_hashes(
        kind(np.ascontiguousarray(batch.transpose(0, 2, 3, 1))), most=9
    )
