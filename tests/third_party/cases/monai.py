"""MONAI's loaders."""

from typing import Any

from monai.data import DataLoader, DistributedSampler, DistributedWeightedRandomSampler, ThreadDataLoader

from ddp_patch import patch_dataloader_to_ddp
from third_party.base import Case, Fate, N, Numbers, World


def ordered(world: World) -> Any:
    sampler = DistributedSampler(Numbers(), num_replicas=world.size, rank=world.rank, even_divisible=False)
    return DataLoader(Numbers(), batch_size=4, sampler=sampler)


def weighted(world: World) -> Any:
    sampler = DistributedWeightedRandomSampler(Numbers(), weights=range(N), num_replicas=world.size, rank=world.rank)
    return DataLoader(Numbers(), batch_size=4, sampler=sampler)


def threads(world: World) -> Any:
    return ThreadDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2, use_thread_workers=True)


def processes(loader: Any, options: dict[str, Any]) -> Any:
    given = ThreadDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2, use_thread_workers=False)
    return patch_dataloader_to_ddp(given, **options)


CASES = [
    Case("monai", "`DataLoader`", lambda world: DataLoader(Numbers(), batch_size=4, shuffle=True)),
    Case(
        "monai",
        "`DataLoader` with 2 workers",
        lambda world: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2),
    ),
    Case("monai", "`ThreadDataLoader`", lambda world: ThreadDataLoader(Numbers(), batch_size=4, shuffle=True)),
    Case(
        "monai",
        "`ThreadDataLoader` with thread workers",
        threads,
        Fate.REFUSED,
        remedy=processes,
        told="use_thread_workers=False",
    ),
    Case("monai", "`DistributedSampler`", ordered, Fate.AS_IT_IS),
    Case("monai", "`DistributedWeightedRandomSampler`", weighted, Fate.AS_IT_IS, repeats=True),
]
