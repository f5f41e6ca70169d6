"""Facts of the passes that ranks make, claimed without waiting: what is asked for, and what is no contradiction."""

import copy
from collections.abc import Callable, Iterator
from itertools import count, cycle
from typing import Any

import torch.distributed as dist
from messages import assert_tells
from quick import run_each, run_ranks, said
from torch.utils.data import DataLoader, Sampler
from zoo import Indices, as_it_is

from ddp_patch import patch_dataloader_to_ddp
from ddp_patch.compat.private_torch import default_store
from ddp_patch.ranks import claims

N = 21


def given(workers: int = 0, n: int = N, **options: Any) -> DataLoader[Any]:
    return DataLoader(Indices(n), batch_size=4, collate_fn=as_it_is, shuffle=True, num_workers=workers, **options)


def whole(train: Any) -> None:
    for _ in train:
        pass


# Shares and their number, by rank, in a group of four; and what is told, with its remedy.
BY_HAND: list[tuple[Callable[[int], tuple[int, int]], tuple[str, ...]]] = [
    (lambda rank: (0, 2), ("RankMismatchError", "shard 0 of 2", "only 2 of the group's 4 ranks may")),
    (lambda rank: (rank % 2, 4), ("RankMismatchError", "of 4", "only 1 of the group's 4 ranks may")),
    (lambda rank: (rank, 8), ("WorldError", "num_replicas=8", "group of 4 ranks")),
    (lambda rank: (rank % 2, 2), ()),
    (lambda rank: (rank, 4), ()),
    (lambda rank: (0, 1), ()),
]


def given_by_hand(rank: int, world_size: int) -> list[str]:
    """What each rank is told of worlds given by hand: at the patch, or when it first iterates."""
    told = []
    for n, (share_of, _) in enumerate(BY_HAND, N):  # no loader looks like another, so none is taken for another
        share, ranks = share_of(rank)
        made: list[Any] = []
        refused = said(lambda: made.append(patch_dataloader_to_ddp(given(n=n), rank=share, num_replicas=ranks)))  # noqa: B023 - called here
        dist.barrier()
        told.append(": ".join(refused if refused[0] != "nothing" else said(lambda: whole(made[0]))))  # noqa: B023 - as above
    return told


class Told(Sampler[int]):
    """A sampler of indices without end, that tells when the generator of a pass ends."""

    begun, ended = count(1), list[int]()  # this process's, also of copies

    def __iter__(self) -> Iterator[int]:
        number = next(self.begun)
        try:
            yield from cycle(range(N))
        finally:
            self.ended.append(number)


def leaves_passes(rank: int, world_size: int) -> list[list[int]]:
    """Break passes off; return which of a sampler's generators have ended, each time when a pass has begun."""
    train, found = patch_dataloader_to_ddp(DataLoader(Indices(N), sampler=Told(), batch_size=4)), []
    for _ in range(4):
        next(iter(train))
        found.append([*Told.ended])
    return found


def outlives_its_group(rank: int, world_size: int) -> None:
    """Rank 0 looks at a batch of it and of a copy; nobody is told of it once the group is gone."""
    alone = patch_dataloader_to_ddp(given())
    if rank == 0:
        next(iter(alone))
        next(iter(copy.deepcopy(alone)))
    dist.barrier()
    dist.destroy_process_group()
    whole(alone)


def test_worlds_given_by_hand_are_held_to_the_group_and_neither_passes_nor_it_are_kept() -> None:
    told_by_hand, of_passes, _ = run_each(4, given_by_hand, leaves_passes, outlives_its_group)
    assert of_passes == [[[], [1], [1, 2], [1, 2, 3]]] * 4  # as one process ends them
    for told in told_by_hand:
        for message, (_, facts) in zip(told, BY_HAND, strict=True):
            assert message.startswith("nothing") != bool(facts), message
            if facts:
                assert_tells(message, facts, "Leave rank= and num_replicas= out")


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

    module: Any = claims
    module.default_store, train.sampler.rank_passes.monitor.claims._store = Counting, Counting  # type: ignore[attr-defined]
    whole(train)
    return calls


def test_a_comparison_is_two_requests_and_a_pass_of_667_steps_makes_17() -> None:
    """After 2, 4, ... 32, 64, 96, ... steps, and at its end: a word is claimed, and a mismatch looked for."""
    for calls in run_ranks(counted, 3):
        names = [name for name, _ in calls]
        assert names.count("compare_set") <= 2 * 17 + 2  # the last one to begin it tells that all have
        assert len(calls) <= 2 * 17 + 20  # and says that it has begun, and deletes what it claimed two passes before
        assert sum(size for name, size in calls if name == "compare_set") < 300 * 17  # the value comes back
