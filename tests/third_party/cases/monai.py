"""MONAI's loaders."""

from typing import Any

from monai.data import DataLoader, DistributedSampler, DistributedWeightedRandomSampler, ThreadDataLoader

from third_party.base import Case, Fate, N, Numbers, World


def ordered(world: World) -> Any:
    sampler = DistributedSampler(Numbers(), num_replicas=world.size, rank=world.rank, even_divisible=False)
    return DataLoader(Numbers(), batch_size=4, sampler=sampler)


def weighted(world: World) -> Any:
    sampler = DistributedWeightedRandomSampler(Numbers(), weights=range(N), num_replicas=world.size, rank=world.rank)
    return DataLoader(Numbers(), batch_size=4, sampler=sampler)


CASES = [
    Case("monai", "`DataLoader`", lambda world: DataLoader(Numbers(), batch_size=4, shuffle=True)),
    Case(
        "monai",
        "`DataLoader` with 2 workers",
        lambda world: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2),
    ),
    Case("monai", "`ThreadDataLoader`", lambda world: ThreadDataLoader(Numbers(), batch_size=4, shuffle=True)),
    Case("monai", "`DistributedSampler`", ordered, Fate.AS_IT_IS),
    Case("monai", "`DistributedWeightedRandomSampler`", weighted, Fate.AS_IT_IS, repeats=True),
]
