"""Ultralytics' loader and sampler, which every YOLO training uses."""

from typing import Any

from torch.utils.data import DataLoader
from ultralytics.data.build import ContiguousDistributedSampler, InfiniteDataLoader, build_dataloader

from ddp_patch import patch_dataloader_to_ddp
from third_party.base import Case, Fate, Numbers, World

REMEDY = "persistent_workers=True"


def infinite(world: World) -> Any:
    return InfiniteDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2)


def with_persistent_workers(given: Any, options: dict[str, Any]) -> Any:
    collate: Any = given.collate_fn
    loader: Any = DataLoader(given.dataset, 4, shuffle=True, num_workers=2, persistent_workers=True, collate_fn=collate)
    return patch_dataloader_to_ddp(loader, **options)


def contiguous(world: World) -> Any:
    sampler = ContiguousDistributedSampler(Numbers(), world.size, batch_size=4, rank=world.rank, shuffle=True)
    return DataLoader(Numbers(), batch_size=4, sampler=sampler)


class Pictures(Numbers):
    """A YOLO data set tells how its samples are put together."""

    collate_fn: Any = staticmethod(list)


CASES = [
    Case("ultralytics", "`InfiniteDataLoader`", infinite, Fate.REFUSED, remedy=with_persistent_workers, told=REMEDY),
    Case(
        "ultralytics",
        "`build_dataloader()`",
        lambda world: build_dataloader(Pictures(), batch=4, workers=0),
        Fate.REFUSED,
        remedy=with_persistent_workers,
        told=REMEDY,
    ),
    Case("ultralytics", "`ContiguousDistributedSampler`", contiguous, Fate.AS_IT_IS),
    Case("ultralytics", "`ContiguousDistributedSampler`, of one process", lambda world: contiguous(World())),
]
