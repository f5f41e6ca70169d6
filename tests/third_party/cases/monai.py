"""MONAI's loaders."""

from functools import partial
from typing import Any

from monai.data import DataLoader, DistributedSampler, DistributedWeightedRandomSampler, ThreadDataLoader

from ddp_patch import patch_dataloader_to_ddp
from third_party.base import Case, Fate, N, Numbers, World


def shuffled(kind: Any, **options: Any) -> Any:
    return kind(Numbers(), batch_size=4, shuffle=True, **options)


def shared(kind: Any, world: World, **options: Any) -> Any:
    sampler = kind(Numbers(), num_replicas=world.size, rank=world.rank, **options)
    return DataLoader(Numbers(), batch_size=4, sampler=sampler)


def processes(loader: Any, options: dict[str, Any]) -> Any:
    given = shuffled(ThreadDataLoader, num_workers=2, use_thread_workers=False)
    return patch_dataloader_to_ddp(given, **options)


case = partial(Case, "monai")
CASES = [
    case("`DataLoader`", lambda world: shuffled(DataLoader)),
    case("`DataLoader` with 2 workers", lambda world: shuffled(DataLoader, num_workers=2)),
    case("`ThreadDataLoader`", lambda world: shuffled(ThreadDataLoader)),
    case(
        "`ThreadDataLoader` with thread workers",
        lambda world: shuffled(ThreadDataLoader, num_workers=2, use_thread_workers=True),
        Fate.REFUSED,
        remedy=processes,
        told="use_thread_workers=False",
    ),
    case("`DistributedSampler`", lambda world: shared(DistributedSampler, world, even_divisible=False), Fate.AS_IT_IS),
    case(
        "`DistributedWeightedRandomSampler`",
        lambda world: shared(DistributedWeightedRandomSampler, world, weights=range(N)),
        Fate.AS_IT_IS,
        repeats=True,
    ),
]
