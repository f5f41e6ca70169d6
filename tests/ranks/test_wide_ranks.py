"""Many real ranks that evaluate, gather, weigh and share by worker; and the files that each has open."""

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch.distributed as dist
from quick import run_ranks, soaked
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from zoo import loader, seed_ambient

from ddp_patch import gather_in_order, gather_step, iter_with_weights, patch_dataloader_to_ddp
from ddp_patch.ranks.group import kept_groups

PASSES, N = 8, 70
LONG_S = 240.0  # that ranks wait for each other


class Parts(IterableDataset[int]):
    """Reader r of n reads the items r and r + n."""

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        return iter([info.id, info.id + info.num_workers])


def open_files() -> int:
    gc.collect()  # loaders of passes before
    return len(list(Path("/proc/self/fd").iterdir()))


def many(rank: int, world_size: int) -> int:
    """Return how many files the ranks' group takes on this rank."""
    seed_ambient(rank)
    alone = open_files()

    def once() -> None:
        """Use loaders that are patched anew, as a program may make them for each epoch."""
        given = patch_dataloader_to_ddp(loader(batch_size=3, sampler=range(N)))
        split = patch_dataloader_to_ddp(DataLoader(Parts(), 1, collate_fn=list), share="by_worker", uneven="drop")
        rows: list[int] = []
        whole: list[int] = []
        for batch in given:
            rows += batch
            whole += gather_step([*batch], given)
        assert whole == gather_in_order(rows, given) == [*range(N)]
        assert [item for batch in split for item in batch] == [rank, rank + world_size]
        weights = [own.tolist() for _, own in iter_with_weights(given, weight_of=lambda batch: [1.0] * len(batch))]
        assert max(weights[0]) == pytest.approx(world_size / min(N, 3 * world_size))

    once()
    dist.barrier()
    before = open_files()
    for _ in range(PASSES):
        once()
    dist.barrier()
    after = open_files()
    dist.barrier()  # a rank that ends closes the others' connections
    assert after == before
    return before - alone


@pytest.mark.parametrize("world_size", [4, soaked(8), soaked(32)])
def test_ranks_leave_no_file_open(world_size: int) -> None:
    """And have few connections beside those of the user's own group."""
    assert max(run_ranks(many, world_size)) <= 10 + 2 * math.log2(world_size)


def end_in_turn(rank: int, world_size: int, folder: Path) -> None:
    """Gather, and end when the rank after this one has."""
    given = patch_dataloader_to_ddp(loader(batch_size=3, sampler=range(N)), timeout=LONG_S)
    assert gather_in_order([item for batch in given for item in batch], given) == [*range(N)]
    while rank < world_size - 1 and not (folder / f"{rank + 1}").exists():
        sleep(0.01)
    for group in kept_groups(range(world_size), "rows"):
        group.close()  # as when the process ends
    (folder / f"{rank}").touch()
    dist.barrier()


def test_the_last_of_many_ranks_wait_for_none_that_has_ended(tmp_path: Path) -> None:
    """Of eight, each is connected with six others. The seventh would have to connect with it, and is gone."""
    run_ranks(end_in_turn, 8, tmp_path, timeout=LONG_S / 2)
