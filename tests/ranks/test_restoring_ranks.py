"""States on real ranks, restored by all or by none; ``test_users_draw_ranks.py`` has what goes on after them."""

from typing import Any

import pytest
import torch
from messages import assert_tells
from quick import run_ranks
from torch.utils.data import DataLoader
from zoo import Indices, loader

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


class Refuses(list[int]):
    """A sampler with a state, which one rank does not load."""

    rank = 0

    def state_dict(self) -> dict[str, int]:
        return {"drawn": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.rank and state["drawn"]:
            raise LookupError("no such state here")


def loads_on_one_rank(rank: int, world_size: int) -> str:
    sampler = Refuses(range(8))
    sampler.rank = rank
    patched: Any = patch_dataloader_to_ddp(DataLoader(Indices(8), 2, sampler=sampler))
    state = loader_state(patched, batches_done=0)
    with pytest.raises(DDPPatchError) as caught:
        restore_loader(patched, state | {"states": state["states"].replace('"drawn": 0', '"drawn": 1')})
    assert loader_state(patched) == state  # as it was
    return f"{type(caught.value).__name__}: {caught.value}"


def test_all_ranks_are_told_where_a_sampler_of_one_does_not_load_its_state() -> None:
    first, second = run_ranks(loads_on_one_rank, 2)
    assert second.startswith("StateError: ")
    assert_tells(second, ("Refuses cannot resume", "LookupError"), "as it was saved")
    assert_tells(first, ("RankMismatchError", "rank 1: StateError", "LookupError"), "all ranks again")


def failed_before(rank: int, world_size: int) -> list[list[int]]:
    """Patch a loader whose seed differs between ranks, then the same loader with one seed; and another one so."""
    found = []
    for seeds in ([rank, 3], [3]):
        given = loader(shuffle=True, generator=torch.Generator().manual_seed(7))
        for seed in seeds:
            try:
                found.append([item for batch in patch_dataloader_to_ddp(given, seed=seed) for item in batch])
            except DDPPatchError:
                assert seed != 3
    return found


def test_a_patch_that_failed_changes_no_order() -> None:
    for after, plain in run_ranks(failed_before, 2):
        assert after == plain
