"""timm's loaders and samplers."""

from typing import Any

import torch
from timm.data.distributed_sampler import OrderedDistributedSampler, RepeatAugSampler
from timm.data.loader import MultiEpochsDataLoader, PrefetchLoader
from torch.utils.data import DataLoader, Dataset

from third_party.base import HELD, Case, Fate, N, Numbers, World, drawn_by, held_patched

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


def ordered(world: World) -> Any:
    return drawn_by(OrderedDistributedSampler(Numbers(), world.size, world.rank))


def repeated_augmentation(world: World) -> Any:
    return drawn_by(RepeatAugSampler(Numbers(), world.size, world.rank, selected_round=0))


CASES = [
    Case(PACKAGE, "`MultiEpochsDataLoader`", multi_epochs),
    Case(
        PACKAGE,
        "`MultiEpochsDataLoader` with 2 workers",
        lambda world: multi_epochs(world, num_workers=2, persistent_workers=True),
    ),
    Case(PACKAGE, "`PrefetchLoader`", prefetched, Fate.REFUSED, classes, remedy=held_patched, told=HELD),
    Case(PACKAGE, "`OrderedDistributedSampler`", ordered, Fate.AS_IT_IS),
    Case(PACKAGE, "`RepeatAugSampler`", repeated_augmentation, Fate.AS_IT_IS),
    Case(PACKAGE, "`OrderedDistributedSampler`, of one process", lambda world: ordered(World())),
    Case(PACKAGE, "`RepeatAugSampler`, of one process", lambda world: repeated_augmentation(World())),
]
