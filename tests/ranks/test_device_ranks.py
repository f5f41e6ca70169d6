"""Ranks whose batches come on devices; and that nothing of ours is a collective of the user's process group."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerated import ALL, WITHOUT_COLLECTIVES, Setting, hands_over, in_setting, is_auto, shows, trains
from messages import raises
from moving import pretend_streams
from quick import run_ranks
from torch.utils.data import DataLoader
from zoo import Indices

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.errors import InvalidOptionError, RankMismatchError

# As README.md shows it for two ranks on the CPU.
PRINTED = """epoch 0: accuracy 0.871 on 101 samples
epoch 1: accuracy 0.891 on 101 samples
epoch 2: accuracy 0.921 on 101 samples
"""


def several(rank: int, world_size: int, setting: Setting, what: tuple[Any, ...]) -> list[Any]:
    """Do one after the other, in one process group."""
    found: list[Any] = in_setting(rank, world_size, setting, lambda *where: [do(*where) for do in what])
    return found


def test_ranks_whose_batches_come_on_a_device(tmp_path: Path) -> None:
    """What tests/gpu does on a GPU, on the CPU."""
    found = run_ranks(several, 2, Setting("gloo", "cpu", tmp_path), (*ALL, is_auto))
    given = [batch for rank in found for batch in rank[ALL.index(hands_over)]]
    assert len(given) == len(set(given))
    parameters = [rank[ALL.index(trains)] for rank in found]
    assert parameters[0] == parameters[1]
    (printed, first), (nothing, second) = (rank[ALL.index(shows)] for rank in found)
    assert printed == PRINTED
    assert nothing == ""
    assert (first, second) == ([0, "nccl"], [1, "nccl"])
    assert [rank[-1] for rank in found] == ["cpu", "cpu"]


def it_refuses(rank: int, world_size: int, setting: Setting) -> None:
    for collective in (dist.all_reduce, partial(dist.broadcast, src=0)):
        with pytest.raises(AssertionError, match="user's process group"):
            collective(torch.zeros(1))
    with pytest.raises(AssertionError, match="user's process group"):
        dist.barrier()


def test_nothing_is_a_collective_on_the_users_group(tmp_path: Path) -> None:
    """NCCL's take CUDA tensors, in the order of the user's calls: a group that refuses all stands for it."""
    run_ranks(several, 2, Setting("refuses", "cpu", tmp_path), (it_refuses, *WITHOUT_COLLECTIVES))


def on_devices(rank: int, world_size: int) -> tuple[str, list[int]]:
    torch.manual_seed(rank)
    loader = DataLoader(Indices(10), 2, shuffle=True)
    batches = list(patch_dataloader_to_ddp(loader, device=["cpu", "meta"][rank]))
    return batches[0].device.type, [len(batch) for batch in batches]


def test_ranks_may_have_devices_of_their_own() -> None:
    assert run_ranks(on_devices, 2) == [("cpu", [2, 2, 1]), ("meta", [2, 2, 1])]


def ahead_on_one(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        pretend_streams(monkeypatch)
        device = ["cpu", "meta"][rank]
        # Where ranks do not meet within an epoch, they need not be equally far.
        patch_dataloader_to_ddp(DataLoader(Indices(10), 2, num_workers=1), device=device)
        with raises(RankMismatchError, ("batches fetched ahead", "2", "3")):
            patch_dataloader_to_ddp(DataLoader(Indices(10), 2, num_workers=1), device=device, order="leader")


def test_where_ranks_meet_within_an_epoch_they_all_copy_ahead_or_none() -> None:
    run_ranks(ahead_on_one, 2)


def refused_on_one(rank: int, world_size: int) -> None:
    kind = InvalidOptionError if rank else RankMismatchError
    with raises(kind, ("device='cuda:7'", "0"), "'auto'" if rank else ()):
        patch_dataloader_to_ddp(DataLoader(Indices(10)), device="cuda:7" if rank else "cpu", timeout=60)


def test_a_device_that_one_rank_lacks_is_told_to_all() -> None:
    run_ranks(refused_on_one, 2)
