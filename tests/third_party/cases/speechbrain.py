"""SpeechBrain's loaders and samplers."""

from typing import Any

from speechbrain.dataio.dataloader import LoopedLoader, SaveableDataLoader, make_dataloader
from speechbrain.dataio.sampler import (
    ConcatDatasetBatchSampler,
    DistributedSamplerWrapper,
    DynamicBatchSampler,
    ReproducibleRandomSampler,
    ReproducibleWeightedRandomSampler,
)
from torch.utils.data import DataLoader, SequentialSampler

from ddp_patch import patch_dataloader_to_ddp
from third_party.base import Case, Fate, N, Numbers, World


def made(world: World) -> Any:
    return make_dataloader(Numbers(), batch_size=4, shuffle=True)


def peeked_into(world: World) -> Any:
    loader = SaveableDataLoader(Numbers(), batch_size=4, shuffle=True)
    next(iter(loader))
    return loader


def looped(world: World) -> Any:
    return LoopedLoader(DataLoader(Numbers(24), batch_size=4, shuffle=True), epoch_length=6)


def patch_inner(outer: Any, options: dict[str, Any]) -> Any:
    outer.loader = patch_dataloader_to_ddp(outer.loader, **options)
    outer.epoch_length = len(outer.loader)
    return outer


def by_length(world: World) -> Any:
    sampler = DynamicBatchSampler(
        Numbers(), max_batch_length=20, num_buckets=3, lengths_list=[1 + index % 7 for index in range(N)]
    )
    return SaveableDataLoader(Numbers(), batch_sampler=sampler)


def random_order(world: World) -> Any:
    return SaveableDataLoader(Numbers(), batch_size=4, sampler=ReproducibleRandomSampler(Numbers()))


def weighted(world: World) -> Any:
    sampler = ReproducibleWeightedRandomSampler([1.0 + index for index in range(N)], num_samples=N, replacement=True)
    return SaveableDataLoader(Numbers(), batch_size=4, sampler=sampler)


def several(world: World) -> Any:
    samplers = [ReproducibleRandomSampler(Numbers(n)) for n in (12, 12)]
    return SaveableDataLoader(Numbers(24), batch_sampler=ConcatDatasetBatchSampler(samplers, [2, 2]))


def wrapped(world: World) -> Any:
    world_told = {"num_replicas": world.size, "rank": world.rank}
    sampler = DistributedSamplerWrapper(SequentialSampler(Numbers()), shuffle=False, **world_told)
    return SaveableDataLoader(Numbers(), batch_size=4, sampler=sampler)


PACKAGE = "speechbrain"
CASES = [
    Case(PACKAGE, "`make_dataloader(shuffle=True)`", made),
    Case(PACKAGE, "`SaveableDataLoader`, iterated before", peeked_into),
    Case(
        PACKAGE,
        "`LoopedLoader`",
        looped,
        Fate.REFUSED,
        remedy=patch_inner,
        told="outer.loader = patch_dataloader_to_ddp(outer.loader)",
    ),
    Case(PACKAGE, "`DynamicBatchSampler`", by_length, whole=True),
    Case(PACKAGE, "`ReproducibleRandomSampler`", random_order),
    Case(PACKAGE, "`ReproducibleWeightedRandomSampler`", weighted),
    Case(PACKAGE, "`ConcatDatasetBatchSampler`", several, whole=True),
    Case(PACKAGE, "`DistributedSamplerWrapper`", wrapped, Fate.AS_IT_IS),
]
