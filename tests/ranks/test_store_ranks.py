"""What loaders leave in the store of the process group: all that a slower rank needs, and nothing that grows."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from quick import keys_now, run_each, run_ranks
from torch.utils.data import DataLoader
from zoo import Indices, Source, as_it_is, seed_ambient

from ddp_patch import DDPPatchError, DDPSamplerWrapper, patch_dataloader_to_ddp

MANY = 25


def given(n: int = 48) -> DataLoader[Any]:
    return DataLoader(Indices(n), batch_size=4, collate_fn=as_it_is, shuffle=True)


def stream() -> DataLoader[Any]:
    return DataLoader(Source(48), batch_size=4, collate_fn=as_it_is)


def whole(loader: Any) -> None:
    assert list(loader)


def refused(rank: int, at: int | None = None) -> None:
    """On one rank or on every one; who refuses does not come to the meeting."""
    with pytest.raises(DDPPatchError):
        patch_dataloader_to_ddp(given(), share="all" if at in {rank, None} else None)  # type: ignore[call-overload]


# Makes a loader, reads it and lets it go.
MADE: dict[str, Callable[[int], object]] = {
    "patched": lambda rank: patch_dataloader_to_ddp(given()),
    "read": lambda rank: whole(patch_dataloader_to_ddp(given())),
    "several": lambda rank: patch_dataloader_to_ddp({"train": given(), "val": given(20)}),
    "wrapper": lambda rank: whole(DDPSamplerWrapper(list(range(20)))),
    "by worker": lambda rank: whole(patch_dataloader_to_ddp(stream(), share="by_worker")),
    "by hand": lambda rank: whole(patch_dataloader_to_ddp(given(), rank=rank, num_replicas=dist.get_world_size())),
    "refused": refused,
    "refused by the last": lambda rank: refused(rank, 1),
}


OF_A_PASS = 8  # keys: at most five words, and who has begun it
KEPT = 8  # what a rank leaves of so many loaders that are gone stays, so that slower ranks may read it


def keys() -> int:
    """How many there are once the next loader is patched."""
    gc.collect()
    patch_dataloader_to_ddp(given())
    return keys_now()


def made_again_and_again(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    seed_ambient(rank)
    counts = {}
    for name, make in MADE.items():
        for _ in range(2 * KEPT):
            make(rank)
        few = keys()
        for _ in range(MANY):
            make(rank)
        counts[name] = few, keys()
    return counts


@pytest.mark.soak  # some hundred patches
def test_patching_again_and_again_leaves_nothing_that_grows() -> None:
    for counts in run_ranks(made_again_and_again, 2):
        assert {name: many - few for name, (few, many) in counts.items() if many > few} == {}


def dropped_together(rank: int, world_size: int) -> tuple[int, int]:
    kept = [patch_dataloader_to_ddp(given()) for _ in range(MANY)]
    for train in kept:
        whole(train)
    del train
    many = keys_now()
    del kept
    gc.collect()
    return many, keys()


def dropped_by_the_faster(rank: int, world_size: int) -> tuple[str, int]:
    """Rank 0 looks, trains, drops the loader and patches others, before rank 1 reads its first batch."""
    seed_ambient(rank)
    train: Any = patch_dataloader_to_ddp(given())
    if rank == 0:
        next(iter(train))
        whole(train)
        del train
        gc.collect()
    others = [patch_dataloader_to_ddp(given()) for _ in range(3)]
    told = ""
    if rank == 1:
        try:
            whole(train)
        except DDPPatchError as error:
            told = f"{type(error).__name__}: {error}"
        del train
    del others
    return told, keys()


def test_loaders_that_are_dropped_leave_the_store_but_for_what_slower_ranks_need() -> None:
    (first, second), together = run_each(2, dropped_by_the_faster, dropped_together)
    assert second[0].startswith("RankMismatchError")
    assert "rank 0 left epoch 0 after 1 batch" in second[0]
    assert max(first[1], second[1]) < 2 * KEPT * OF_A_PASS
    for many, few in together:
        assert many >= MANY * OF_A_PASS / 2
        assert few < 2 * KEPT * OF_A_PASS
