"""Logs of the passes that ranks make, compared without waiting: what is found, and what is no contradiction."""

import copy
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch.distributed as dist
from iterables import ShardPerWorker
from messages import assert_tells
from quick import run_ranks, soaked
from torch.utils.data import DataLoader
from zoo import Indices, Source, as_it_is, seed_ambient

from ddp_patch import DDPSamplerWrapper, audit, loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import DDPPatchError

N = 21


def given(workers: int = 0, n: int = N, **options: Any) -> DataLoader[Any]:
    return DataLoader(Indices(n), batch_size=4, collate_fn=as_it_is, shuffle=True, num_workers=workers, **options)


def stream(workers: int = 0, n: int = N) -> DataLoader[Any]:
    return DataLoader(Source(n), batch_size=4, collate_fn=as_it_is, num_workers=workers)


def four_batches() -> DataLoader[Any]:
    """On each of three ranks."""
    return given(n=48)


def looks(train: Any, rank: int) -> None:
    if rank == 0:
        next(iter(train))


def keeps_its_iterator(train: Any, rank: int) -> None:
    if rank == 0:
        train.kept = iter(train)
        next(train.kept)


def sets_its_rank(train: Any, rank: int) -> None:
    train.set_epoch(rank)


def sets_an_epoch_alone(train: Any, rank: int) -> None:
    if rank == 0:
        train.set_epoch(5)


def looks_after_the_epoch_is_set(train: Any, rank: int) -> None:
    train.set_epoch(2)
    looks(train, rank)


# What a rank does, and what the error tells: which rank took how much of which epoch.
TOOK = ("DataLoader patched at", "test_log_ranks.py:", "rank 0 left epoch 0 after 1 batch", "took more of it")
FOUND: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None], tuple[str, ...]]] = {
    "looks": (four_batches, looks, TOOK),
    "workers": (lambda: given(1, 60), looks, TOOK),
    "set after": (four_batches, looks_after_the_epoch_is_set, ("rank 0 left epoch 2 after 1 batch",)),
    "stream": (lambda: stream(n=48), looks, TOOK),
    "rank": (four_batches, sets_its_rank, ("the ranks make different passes", "pass 0 is over epoch")),
    "alone": (lambda: given(n=72), sets_an_epoch_alone, ("over epoch 5", "over epoch 0")),
    "kept": (four_batches, keeps_its_iterator, TOOK),
}
REMEDY = ("Look at a batch on every rank", "iterate the unpatched loader", "loader.set_epoch(N)")


def in_step(train: Any, steps: int) -> tuple[str, int]:
    """Make steps together with the other ranks; tell what was raised and after how many."""
    batches, told, made = iter(train), "", 0
    for _ in range(steps):
        if not told:
            try:
                made += next(batches, None) is not None
            except DDPPatchError as error:
                told = f"{type(error).__name__}: {error}"
        dist.barrier()
    return told, made


def contradicting(rank: int, world_size: int) -> dict[str, tuple[str, int]]:
    seed_ambient(rank)
    told = {}
    for name, (make, act, _) in FOUND.items():
        train = patch_dataloader_to_ddp(make())
        act(train, rank)
        told[name] = in_step(train, 7)
    return told


def test_a_pass_of_one_rank_alone_is_told_on_every_rank_before_the_epoch_ends() -> None:
    ranks = run_ranks(contradicting, 3)
    for name, (_, _, facts) in FOUND.items():
        for told in ranks:
            message, steps = told[name]
            assert message.startswith("RankMismatchError"), name
            # Ranks compare after 2 and 4 batches; who is the first there finds at the next what it could not see.
            assert steps <= 4, name
        assert_tells(ranks[0][name][0], facts, REMEDY)


def looks_alike(train: Any, unpatched: Any, rank: int) -> None:
    next(iter(train))


def looks_at_the_unpatched_one(train: Any, unpatched: Any, rank: int) -> None:
    if rank == 0:
        next(iter(unpatched))


def looks_and_sets_the_epoch(train: Any, unpatched: Any, rank: int) -> None:
    looks(train, rank)
    train.set_epoch(3)


def looks_and_sets_the_epoch_back(train: Any, unpatched: Any, rank: int) -> None:
    for _ in range(2):
        looks(train, rank)
    if rank == 0:
        train.set_epoch(0)


REMEDIES = (looks_alike, looks_at_the_unpatched_one, looks_and_sets_the_epoch, looks_and_sets_the_epoch_back)


def remedied(rank: int, world_size: int) -> list[set[int]]:
    seed_ambient(rank)
    taken = []
    for workers in (0, 1):
        for remedy in REMEDIES:
            unpatched = given(workers)
            train = patch_dataloader_to_ddp(unpatched)
            remedy(train, unpatched, rank)
            taken.append({index for batch in train for index in batch})
    return taken


def test_each_remedy_works() -> None:
    first, second = run_ranks(remedied, 2)
    for ours, theirs in zip(first, second, strict=True):
        assert ours | theirs == set(range(N))


def honest(rank: int, world_size: int, workers: int) -> None:
    """Programs that lose no data, on ranks that do not step together; none is told anything."""
    seed_ambient(rank)
    slowly(rank, patch_dataloader_to_ddp(given(workers)))
    train: Any = patch_dataloader_to_ddp(given(workers))
    for epoch in range(3):
        whole(train)
        if rank == 1 and epoch == 1:
            break  # stops here
    shows_a_batch(rank, patch_dataloader_to_ddp(DataLoader(Indices(N), batch_size=4, num_workers=workers)))
    for options in ({"uneven": "keep"}, {"uneven": "drop"}, {"order": "leader"}):
        various(patch_dataloader_to_ddp(given(workers), **options))  # type: ignore[call-overload]  # their values are fit
    parts = ShardPerWorker([12] * 2 * max(1, workers))
    various(patch_dataloader_to_ddp(DataLoader(parts, 2, collate_fn=as_it_is, num_workers=workers), share="by_worker"))
    various(patch_dataloader_to_ddp(stream(workers)))
    if workers:
        various(patch_dataloader_to_ddp(given(workers, persistent_workers=True)))
        takes_what_it_has(rank, patch_dataloader_to_ddp(two_parts(), uneven="keep"))
    train = patch_dataloader_to_ddp(given(workers))
    for epoch in range(3):
        train.set_epoch(epoch)
        for step, _ in enumerate(train):
            if step == 0 and rank == 0:
                next(iter(train))  # within the epoch, which goes on
    stopped, resumed = patch_dataloader_to_ddp(given(workers), seed=1), patch_dataloader_to_ddp(given(workers), seed=1)
    next(iter(stopped))
    restore_loader(resumed, loader_state(stopped, batches_done=1))
    whole(resumed)
    whole(resumed)
    copied = copy.deepcopy(resumed)
    if rank == 0:
        next(iter(copied))
    whole(resumed)
    by_hand: DDPSamplerWrapper[int] = DDPSamplerWrapper(range(N))
    whole(by_hand)
    whole(by_hand)


def two_parts() -> DataLoader[Any]:
    """Two ranks that keep their shares get 3 and 2 items of each part: one has two batches more than the other."""
    return DataLoader(ShardPerWorker([5, 5]), collate_fn=as_it_is, num_workers=2)


def takes_what_it_has(rank: int, train: Any) -> None:
    """Without asking whether there is more."""
    for _ in range(3):
        assert len(list(islice(train, 4 if rank else 6))) == (4 if rank else 6)
        dist.barrier()


def shows_a_batch(rank: int, ordered: Any) -> None:
    """Every epoch has the same order, so nothing is lost."""
    for _ in range(3):
        if rank == 0:
            next(iter(ordered))
        for _ in ordered:
            dist.barrier()


def slowly(rank: int, train: Any) -> None:
    for _ in range(3):
        for _ in train:
            time.sleep(rank / 20)


def various(train: Any) -> None:
    whole(train)
    next(iter(train))
    list(islice(train, 2))
    list(zip(train, train, strict=False))
    for epoch in (0, 0, 3, 1):
        train.set_epoch(epoch)
        list(islice(train, 1 + epoch))
        whole(train)


def whole(train: Any) -> None:
    for _ in train:
        pass


@pytest.mark.parametrize("workers", [0, soaked(1)])
def test_ranks_that_do_the_same_are_told_nothing_however_fast_they_are(workers: int) -> None:
    run_ranks(honest, 2, workers)


def without_the_group(rank: int, world_size: int) -> None:
    """Nothing is compared once the group is gone, and nothing is missed."""
    train = patch_dataloader_to_ddp(given())
    looks(train, rank)
    dist.destroy_process_group()
    whole(train)
    assert not dist.is_initialized()


def test_a_loader_outlives_its_process_group() -> None:
    run_ranks(without_the_group, 2)


def patched(told: list[str], make: Callable[[], Any]) -> Any:
    try:
        return make()
    except DDPPatchError as error:
        told.append(f"{type(error).__name__}: {error}")
        return None


# Shares and their number, by rank, in a group of four; and what is told, with its remedy.
BY_HAND: list[tuple[Callable[[int], tuple[int, int]], tuple[str, ...]]] = [
    (lambda rank: (0, 2), ("RankMismatchError", "shard 0 of 2", "only 2 of the group's 4 ranks may")),
    (lambda rank: (rank % 2, 4), ("RankMismatchError", "of 4", "only 1 of the group's 4 ranks may")),
    (lambda rank: (rank, 8), ("WorldError", "num_replicas=8", "group of 4 ranks")),
    (lambda rank: (rank % 2, 2), ()),
    (lambda rank: (rank, 4), ()),
    (lambda rank: (0, 1), ()),
]


def given_by_hand(rank: int, world_size: int) -> list[list[str]]:
    """What each rank is told of worlds given by hand: at the patch, or when it first iterates."""
    all_told = []
    for n, (share_of, _) in enumerate(BY_HAND, N):  # no loader looks like another, so none is taken for another
        told: list[str] = []
        share, ranks = share_of(rank)
        train = patched(
            told,
            lambda n=n, share=share, ranks=ranks: patch_dataloader_to_ddp(  # type: ignore[misc]
                given(n=n), rank=share, num_replicas=ranks
            ),
        )
        dist.barrier()
        if train is not None:
            patched(told, lambda train=train: whole(train))  # type: ignore[misc]
        all_told.append(told)
    train = patch_dataloader_to_ddp(given(n=100), rank=rank, num_replicas=4)
    looks(train, rank)
    all_told.append([in_step(train, 4)[0]])
    assert audit(given(), world_size=3).ok  # whose worlds are made up
    return all_told


def test_worlds_given_by_hand_are_held_to_the_process_group() -> None:
    ranks = run_ranks(given_by_hand, 4)
    for place, (_, facts) in enumerate(BY_HAND):
        for told in ranks:
            assert bool(told[place]) == bool(facts), told[place]
            for message in told[place]:
                assert_tells(message, facts, "Leave rank= and num_replicas= out")
    for told in ranks:
        assert_tells(told[-1][0], ("RankMismatchError", "rank 0 left epoch 0 after 1 batch"), REMEDY)


def counted(rank: int, world_size: int) -> list[tuple[str, int]]:
    """What a pass of 1000 steps asks of the store, and how many bytes go to it and come."""
    train = patch_dataloader_to_ddp(DataLoader(Indices(2000), batch_size=None, shuffle=True))
    whole(train)
    calls: list[tuple[str, int]] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            def asked(*given: Any) -> Any:
                answer = getattr(default_store(), name)(*given)
                calls.append((name, sum(len(part) for part in (*given, answer) if isinstance(part, str | bytes))))
                return answer

            return asked

    mailbox: Any = train.sampler.rank_passes.monitor.mailbox  # type: ignore[attr-defined]
    mailbox._store = Counting
    mailbox._open_store = Counting
    whole(train)
    return calls


def test_a_comparison_is_four_requests_and_a_pass_of_667_steps_makes_25() -> None:
    """After 2, 4, ... 32, 64, 96, ... steps, and at its end: a record is left, and two and a mismatch looked for."""
    for calls in run_ranks(counted, 3):
        names = [name for name, _ in calls]
        assert names.count("set") == 25
        assert 2 * 25 <= names.count("compare_set") <= 3 * 25  # the other one may be rank 0
        assert len(calls) <= 4 * 25
        assert sum(size for _, size in calls) < 360 * 25  # the place of the patch is in each
