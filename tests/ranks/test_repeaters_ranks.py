"""Loaders with one iterator for all epochs on real ranks: seeded apart, compared, led by one, with workers."""

from typing import Any

import pytest
import torch
from quick import run_each
from repeaters import Infinite
from zoo import Indices

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import NotPatchedError
from ddp_patch.testing.ranks import guarded

N = 21
# Options, and the number of workers.
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "seeded apart": ({}, 2),
    "kept": ({"uneven": "keep"}, 0),
    "led": ({"order": "leader"}, 2),
}


def of_all_ways(rank: int, world_size: int) -> dict[str, list[list[int]]]:
    return {name: epochs(rank, *way) for name, way in WAYS.items()}


def epochs(rank: int, options: dict[str, Any], workers: int) -> list[list[int]]:
    torch.manual_seed(rank)
    given = Infinite(Indices(N), 4, shuffle=True, num_workers=workers)
    loader = patch_dataloader_to_ddp(given, **options)
    seen = []
    for epoch in range(4):
        if epoch == 2:
            loader.sampler.set_epoch(epoch)
        seen.append([int(index) for batch in loader for index in batch])
    return seen


def under_the_guard(rank: int, world_size: int) -> int:
    with guarded():
        given = Infinite(Indices(N), 4)  # its constructor begins an iterator, which is no iteration yet
        with pytest.raises(NotPatchedError):
            iter(given)
        return sum(len(batch) for batch in patch_dataloader_to_ddp(given))


def test_every_epoch_is_shared_once_and_the_guard_lets_one_be_made_and_patched() -> None:
    (first, second), under_guard = run_each(2, of_all_ways, under_the_guard)
    for name in WAYS:
        for one, other in zip(first[name], second[name], strict=True):
            assert set(one) | set(other) == set(range(N)), name
            assert len(one) + len(other) == (N if name == "kept" else N + 1), name
        assert len({tuple(epoch) for epoch in first[name]}) == 4, name
    assert under_guard == [11, 11]
