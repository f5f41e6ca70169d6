"""Loaders with one iterator for all epochs on real ranks: seeded apart, compared, led by one, with workers."""

from typing import Any

import pytest
import torch
from quick import run_ranks
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


def epochs(rank: int, world_size: int, options: dict[str, Any], workers: int) -> list[list[int]]:
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


def test_the_guard_lets_one_be_made_and_patched() -> None:
    assert run_ranks(under_the_guard, 2) == [11, 11]


@pytest.mark.parametrize(("options", "workers"), WAYS.values(), ids=WAYS)
def test_every_epoch_is_shared_once(options: dict[str, Any], workers: int) -> None:
    first, second = run_ranks(epochs, 2, options, workers)
    for one, other in zip(first, second, strict=True):
        assert set(one) | set(other) == set(range(N))
        assert len(one) + len(other) == (N if "uneven" in options else N + 1)
    assert len({tuple(epoch) for epoch in first}) == 4
