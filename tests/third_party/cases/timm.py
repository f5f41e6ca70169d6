"""timm's loaders and samplers."""

from typing import Any

import torch
from timm.data.distributed_sampler import OrderedDistributedSampler, RepeatAugSampler
from timm.data.loader import MultiEpochsDataLoader, PrefetchLoader
from torch.utils.data import DataLoader, Dataset

from ddp_patch import patch_dataloader_to_ddp
from third_party.base import Case, Fate, N, Numbers, World

PACKAGE = "timm"


class Pictures(Dataset[Any]):
    """Picture i is of one value, and its class is i."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 2, 2), index, dtype=torch.uint8), index


def classes(batch: Any) -> tuple[int, ...]:
    return tuple(batch[1].tolist())


def multi_epochs(world: World, **options: Any) -> Any:
    return MultiEpochsDataLoader(Numbers(), batch_size=4, shuffle=True, **options)


def prefetched(world: World) -> Any:
    inner = DataLoader(Pictures(), batch_size=4, shuffle=True)
    return PrefetchLoader(inner, device=torch.device("cpu"))


def patch_inner(outer: Any, options: dict[str, Any]) -> Any:
    outer.loader = patch_dataloader_to_ddp(outer.loader, **options)
    return outer


def ordered(world: World) -> Any:
    return DataLoader(Numbers(), 4, sampler=OrderedDistributedSampler(Numbers(), world.size, world.rank))


def repeated_augmentation(world: World) -> Any:
    sampler = RepeatAugSampler(Numbers(), world.size, world.rank, selected_round=0)
    return DataLoader(Numbers(), 4, sampler=sampler)


CASES = [
    Case(PACKAGE, "`MultiEpochsDataLoader`", multi_epochs),
    Case(
        PACKAGE,
        "`MultiEpochsDataLoader` with 2 workers",
        lambda world: multi_epochs(world, num_workers=2, persistent_workers=True),
    ),
    Case(
        PACKAGE,
        "`PrefetchLoader`",
        prefetched,
        Fate.REFUSED,
        classes,
        remedy=patch_inner,
        told="outer.loader = patch_dataloader_to_ddp(outer.loader)",
    ),
    Case(PACKAGE, "`OrderedDistributedSampler`", ordered, Fate.AS_IT_IS),
    Case(PACKAGE, "`RepeatAugSampler`", repeated_augmentation, Fate.AS_IT_IS),
    Case(PACKAGE, "`OrderedDistributedSampler`, of one process", lambda world: ordered(World())),
    Case(PACKAGE, "`RepeatAugSampler`, of one process", lambda world: repeated_augmentation(World())),
]
