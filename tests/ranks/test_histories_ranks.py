"""Passes that ranks make over one loader, compared without waiting: what is found, and what is no contradiction."""

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


# What a rank does, and what the error tells: which rank took how much of which epoch. Which of the others it names
# depends on whose records have come by then.
FOUND: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None], tuple[str, ...]]] = {
    "looks": (four_batches, looks, ("DataLoader", "number", "Rank 0 took 1 batch of epoch 0", "took more")),
    "workers": (lambda: given(1, 60), looks, ("Rank 0 took 1 batch of epoch 0", "then began epoch 1")),
    "set after": (four_batches, looks_after_the_epoch_is_set, ("Rank 0 took 1 batch of epoch 2", "then began epoch 3")),
    "stream": (lambda: stream(n=48), looks, ("Rank 0 took 1 batch of epoch 0", "then began epoch 1")),
    "rank": (four_batches, sets_its_rank, ("took 0 batches of epoch 0", "more of epoch 0")),
    "alone": (lambda: given(n=72), sets_an_epoch_alone, ("Rank 0 took 0 batches of epoch 0", "then began epoch 5")),
    "kept": (four_batches, keeps_its_iterator, ("Rank 0 took 1 batch of epoch 0", "then began epoch 1")),
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
        if name == "kept":  # an iterator that lives may go on; that it does not is known one epoch later
            in_step(train, 5)
        told[name] = in_step(train, 7)
    return told


def test_a_pass_of_one_rank_alone_is_told_on_every_rank_before_the_epoch_ends() -> None:
    ranks = run_ranks(contradicting, 3)
    for name, (_, _, facts) in FOUND.items():
        for told in ranks:
            message, steps = told[name]
            assert message.startswith("RankMismatchError"), name
            # Who is the first at a comparison finds what it could not see there at the next, or at the end.
            assert steps < {"workers": 5, "alone": 7}.get(name, 4), name
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
    alone: Any = patch_dataloader_to_ddp(given(workers))
    train: Any = patch_dataloader_to_ddp(given(workers))
    for epoch in range(3):
        whole(train)
        if rank == 0:
            whole(alone)  # validates on one rank
        if rank == 1 and epoch == 1:
            break  # stops here
    shows_a_batch(rank, patch_dataloader_to_ddp(DataLoader(Indices(N), batch_size=4, num_workers=workers)))
    for options in ({"uneven": "keep"}, {"uneven": "drop"}, {"layout": "contiguous"}, {"order": "leader"}):
        various(patch_dataloader_to_ddp(given(workers), **options))  # type: ignore[call-overload]  # their values are fit
    various(patch_dataloader_to_ddp(stream(workers), share="by_worker"))
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
        assert_tells(told[-1][0], ("RankMismatchError", "Rank 0 took 1 batch of epoch 0"), REMEDY)


def counted(rank: int, world_size: int) -> tuple[int, int]:
    """How often a pass of 1000 steps comes to the store."""
    train = patch_dataloader_to_ddp(DataLoader(Indices(2000), batch_size=None, shuffle=True))
    whole(train)
    mailbox: Any = train.sampler.monitor._mailbox  # type: ignore[attr-defined]
    calls: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(default_store(), name)

    counting = Counting()
    mailbox._open_store = lambda: counting
    whole(train)
    return calls.count("set"), len(calls)


def test_a_pass_of_a_thousand_steps_comes_to_the_store_every_32_steps() -> None:
    """At its beginning, after 1, 2, 4, ... 32, 64, 96, ... steps, and at its end; to leave a record and read all."""
    for sets, calls in run_ranks(counted, 2):
        assert sets == 38
        assert calls <= 38 * 3
