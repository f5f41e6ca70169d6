"""Several loaders in one call, on real ranks that are seeded differently: what they give, and how often ranks meet."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from quick import run_ranks
from torch.utils.data import DataLoader
from zoo import Indices, N, Own, PKBatches, Source, as_it_is, loader, seed_ambient

from ddp_patch import check_loaders_is_patched, patch_dataloader_to_ddp
from ddp_patch.ranks.exchange import _Meeting


def meetings() -> int:
    """How often this rank has met the others so far, as the store counts it."""
    meeting = _Meeting(range(dist.get_world_size()), "counting", 0)
    return int(meeting.store.add(f"{meeting.base}/count/{dist.get_rank()}", 0))


def of_all_kinds(rank: int) -> list[DataLoader[Any]]:
    shared = torch.Generator().manual_seed(rank)
    done: Any = patch_dataloader_to_ddp(loader(shuffle=True), seed=5)
    return [
        loader(shuffle=True),
        loader(shuffle=True),
        DataLoader(Indices(7), 2, shuffle=True, collate_fn=as_it_is),
        loader(batch_sampler=PKBatches()),
        done,
        loader(shuffle=True, generator=shared),
        loader(shuffle=True, generator=shared),
        DataLoader(Source(), 3, num_workers=2, collate_fn=as_it_is),
        loader(sampler=Own(lambda: torch.randperm(N).tolist())),
    ]


def drawn(rank: int, world_size: int, patch: Callable[[list[Any]], list[Any]]) -> tuple[list[Any], int]:
    """What all loaders give in two epochs, and how often the ranks met to patch."""
    seed_ambient(100 + rank)
    given = of_all_kinds(rank)
    before = meetings()
    patched = patch(given)
    met = meetings() - before
    return [[list(one) for one in patched] for _ in range(2)], met


def in_turn(given: list[Any]) -> list[Any]:
    return [patch_dataloader_to_ddp(one) for one in given]


def in_one_call(given: list[Any]) -> list[Any]:
    return patch_dataloader_to_ddp(given)


def test_in_one_call_each_gives_what_it_gives_in_turn() -> None:
    schedule, calls = (run_ranks(drawn, 2, patch) for patch in (in_turn, in_one_call))
    for (epochs, met), (expected, met_in_turn) in zip(calls, schedule, strict=True):
        assert epochs == expected
        assert (met, met_in_turn) == (1, 9)


def meeting_once(rank: int, world_size: int) -> tuple[int, int, bool]:
    before = meetings()
    nest: Any = {"train": loader(shuffle=True), "val": [loader(), loader(batch_sampler=PKBatches())], "test": None}
    patched = patch_dataloader_to_ddp(nest)
    for_three = meetings() - before
    patch_dataloader_to_ddp([])
    return for_three, meetings() - before, check_loaders_is_patched(patched)


def test_ranks_meet_once_for_three_loaders() -> None:
    assert run_ranks(meeting_once, 3) == [(1, 2, True)] * 3
