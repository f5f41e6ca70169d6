"""States on real ranks, restored by all or by none; ``test_users_draw_ranks.py`` has what goes on after them."""

from typing import Any

import pytest
from messages import assert_tells
from quick import run_ranks
from zoo import loader

from ddp_patch import DDPPatchError, loader_state, patch_dataloader_to_ddp, restore_loader


def refused(rank: int, world_size: int) -> list[str]:
    """What each rank is told where they restore different states, or one of them cannot."""
    told = []
    for damage in ({"epoch": rank}, {"taken": [2 * (1 + rank // 2)]}, {"seed": 1 + rank}, {"version": 4 + rank // 2}):
        options: dict[str, Any] = {} if "seed" in damage else {"seed": 3}
        patched: Any = patch_dataloader_to_ddp(loader(shuffle=True), **options)
        expected = patch_dataloader_to_ddp(loader(shuffle=True), seed=patched.sampler.seed)
        state = loader_state(patched, batches_done=0) | damage
        with pytest.raises(DDPPatchError) as caught:
            restore_loader(patched, state)
        told.append(f"{type(caught.value).__name__}: {caught.value}")
        assert list(patched) == list(expected)  # as it was
    return told


def test_all_ranks_are_told_where_they_restore_other_states() -> None:
    for rank, (epochs, done, seeds, versions) in enumerate(run_ranks(refused, 3)):
        mismatch = ("RankMismatchError", "Restoring a loader's state")
        table = "epoch to resume in: 0 on rank 0; 1 on rank 1; 2 on rank 2"
        assert_tells(epochs, (*mismatch, table), "same on every rank")
        assert_tells(done, (*mismatch, "items taken of it: 4 on rank 2; 2 on ranks 0, 1"), "same on every rank")
        assert_tells(seeds, (*mismatch, "seed: 1 on rank 0; 2 on rank 1; 3 on rank 2"), "same on every rank")
        if rank == 2:
            assert versions.startswith("StateError: ")
            assert_tells(versions, ("version 5", "reads version 4 alone"), "version of ddp_patch")
        else:
            assert_tells(versions, (*mismatch, "rank 2: StateError", "version 5"), "all ranks again")
