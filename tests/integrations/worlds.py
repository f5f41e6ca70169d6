"""Worlds made in one process: every rank's loader, and whether the ranks' shares complete one another."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch.utils.data import DataLoader
from zoo import seed_ambient

from ddp_patch import patch_dataloader_to_ddp

Loader = DataLoader[Any]


def ranks_of(make: Callable[[], Loader], num_replicas: int, **options: Any) -> list[Loader]:
    """One patched loader for each rank, made as that rank would: seeded like no other."""
    loaders: list[Loader] = []
    for rank in range(num_replicas):
        seed_ambient(100 + rank)
        loaders.append(patch_dataloader_to_ddp(make(), rank=rank, num_replicas=num_replicas, **options))
    return loaders


def epoch_of(loaders: list[Loader], items_of: Callable[[Any], Iterable[int]]) -> list[list[int]]:
    """Every rank's items in one epoch, for which all ranks make the same number of steps."""
    epochs = []
    for rank, loader in enumerate(loaders):
        seed_ambient(100 + rank)  # the same before every epoch: if epochs differ, that is not why
        epochs.append(list(loader))
    assert len({len(batches) for batches in epochs}) == 1
    return [list(chain.from_iterable(map(items_of, batches))) for batches in epochs]


def assert_shared_exactly(shares: list[list[int]], n: int) -> None:
    """Every one of n items is somebody's, and only what fills up the last round is somebody else's too."""
    together = Counter(chain.from_iterable(shares))
    assert set(together) == set(range(n))
    assert len({len(share) for share in shares}) == 1
    assert together.total() - n < len(shares)
