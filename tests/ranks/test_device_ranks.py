"""Ranks that move batches to a device; and that nothing of ours is a collective of the user's process group."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerated import ALL, WITHOUT_COLLECTIVES, Setting, hands_over, in_setting, trains
from quick import run_ranks


def several(rank: int, world_size: int, setting: Setting, what: tuple[Any, ...]) -> list[Any]:
    """Do one after the other, in one process group."""
    found: list[Any] = in_setting(rank, world_size, setting, lambda *where: [do(*where) for do in what])
    return found


def test_ranks_that_move_batches_to_a_device(tmp_path: Path) -> None:
    """What tests/gpu does on a GPU, on the CPU."""
    found = run_ranks(several, 2, Setting("gloo", "cpu", tmp_path), ALL)
    given = [batch for rank in found for batch in rank[ALL.index(hands_over)]]
    assert len(given) == len(set(given))
    parameters = [rank[ALL.index(trains)] for rank in found]
    assert parameters[0] == parameters[1]


def it_refuses(rank: int, world_size: int, setting: Setting) -> None:
    for collective in (dist.all_reduce, partial(dist.broadcast, src=0)):
        with pytest.raises(AssertionError, match="user's process group"):
            collective(torch.zeros(1))
    with pytest.raises(AssertionError, match="user's process group"):
        dist.barrier()


def test_nothing_is_a_collective_on_the_users_group(tmp_path: Path) -> None:
    """NCCL's take CUDA tensors, in the order of the user's calls: a group that refuses all stands for it."""
    run_ranks(several, 2, Setting("refuses", "cpu", tmp_path), (it_refuses, *WITHOUT_COLLECTIVES))
