"""States on real ranks: the same on all, restored by all or by none."""

from itertools import islice
from typing import Any

import pytest
from messages import assert_tells
from quick import run_each
from zoo import BY_NAME, comparable, loader, seed_ambient

from ddp_patch import (
    DDPPatchError,
    loader_state,
    patch_dataloader_to_ddp,
    restore_loader,
)

KINDS = ["shuffle=True, generator", "own numpy Generator", "P x K batches", "all three global states, lazily"]
KINDS += ["iterable, global random states, 2 workers"]


def batches_of(given: Any) -> list[Any]:
    return [[comparable(item) for item in batch] for batch in given]


def resumed(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Each rank's states of each kind in the middle and at the end, and led, by another rank's generators.

    No ``seed=`` is given, so that each job draws a seed of its own, which the state keeps.
    """
    states = []
    for kind in KINDS:
        for order in ("auto", "leader") if "iterable" not in kind else ("auto",):

            def start(ambient_seed: int, state: Any = None, kind: str = kind, order: Any = order) -> Any:
                seed_ambient(ambient_seed)
                patched = patch_dataloader_to_ddp(BY_NAME[kind].make(), order=order)
                if state is not None:
                    restore_loader(patched, state)
                return patched

            whole = start(10 + rank)
            beginning = loader_state(whole, batches_done=0)
            epochs = [batches_of(whole) for _ in range(3)]
            # At the end of a stream, which nobody knows before, a state is of the epoch that is over.
            for stop in (1, len(epochs[1]))[: 1 if "iterable" in kind else 2]:
                running = start(20 + rank, beginning)
                batches_of(running)
                iterator = iter(running)
                list(islice(iterator, stop))
                states.append(loader_state(running))
                assert states[-1] == loader_state(running, batches_done=stop)
                again = start(30 + rank, states[-1])
                expected = [epochs[1][stop:], epochs[2]] if stop < len(epochs[1]) else [epochs[2]]
                assert [batches_of(again) for _ in expected] == expected, (kind, order, stop)
                list(iterator)  # under a leader no rank may stay behind
    return states


def refused(rank: int, world_size: int) -> list[str]:
    """What each rank is told where they restore different states, or one of them cannot."""
    told = []
    for damage in ({"epoch": rank}, {"parts": [[[2, 1 + rank // 2]]]}, {"seed": 1 + rank}, {"version": 2 + rank // 2}):
        options: dict[str, Any] = {} if "seed" in damage else {"seed": 3}
        patched: Any = patch_dataloader_to_ddp(loader(shuffle=True), **options)
        expected = patch_dataloader_to_ddp(loader(shuffle=True), seed=patched.sampler.seed)
        state = loader_state(patched, batches_done=0) | damage
        with pytest.raises(DDPPatchError) as caught:
            restore_loader(patched, state)
        told.append(f"{type(caught.value).__name__}: {caught.value}")
        assert list(patched) == list(expected)  # as it was
    patched = patch_dataloader_to_ddp(loader(shuffle=True), seed=3)
    for batches_done in (0, 1):
        if batches_done:
            next(iter(patched))
        restore_loader(patched, loader_state(patched, batches_done=batches_done))
    return told


def test_all_ranks_have_one_state_and_are_told_where_they_restore_others() -> None:
    (first, *others), told = run_each(3, resumed, refused)
    assert all(other == first for other in others)
    for rank, (epochs, done, seeds, versions) in enumerate(told):
        mismatch = ("RankMismatchError", "Restoring a loader's state")
        table = "epoch to resume in: 0 on rank 0; 1 on rank 1; 2 on rank 2"
        assert_tells(epochs, (*mismatch, table), "same on every rank")
        assert_tells(done, (*mismatch, "parts: [[[2, 2]]] on rank 2; [[[2, 1]]] on ranks 0, 1"), "same on every rank")
        assert_tells(seeds, (*mismatch, "seed: 1 on rank 0; 2 on rank 1; 3 on rank 2"), "same on every rank")
        if rank == 2:
            assert versions.startswith("StateError: ")
            assert_tells(versions, ("version 3", "reads version 2 alone"), "version of ddp_patch")
        else:
            assert_tells(versions, (*mismatch, "rank 2: StateError", "version 2"), "all ranks again")
