"""lhotse's samplers, whose batches are sets of cuts: pieces of recordings."""

from typing import Any

from lhotse import CutSet
from lhotse.cut import MonoCut
from lhotse.dataset.sampling import (
    BucketingSampler,
    CutPairsSampler,
    DynamicBucketingSampler,
    DynamicCutSampler,
    RoundRobinSampler,
    SimpleCutSampler,
    WeightedSimpleCutSampler,
    ZipSampler,
)
from torch.utils.data import DataLoader, Dataset

from third_party.base import Batch, Case, Fate, N, World

ONE = {"rank": 0, "world_size": 1}  # which turns off lhotse's own sharding


class Cuts(Dataset[Any]):
    """A batch is the names of its cuts."""

    def __getitem__(self, cuts: Any) -> Any:
        several = cuts if isinstance(cuts, tuple) else (cuts,)
        return [cut.id for held in several for cut in held]


def cuts(n: int = N, first: int = 0) -> Any:
    """Cuts of one to four seconds, without recordings: samplers only ask for the duration."""
    return CutSet.from_cuts(
        MonoCut(id=f"cut-{number}", start=0.0, duration=1.0 + number % 4, channel=0)
        for number in range(first, first + n)
    ).to_eager()


def drawn_by(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Cuts(), batch_size=None, sampler=sampler)


def simple(world: World, **options: Any) -> Any:
    return drawn_by(SimpleCutSampler(cuts(), max_duration=8.0, shuffle=True, **options))


def weighted(world: World) -> Any:
    weights = [1.0 + number % 3 for number in range(N)]
    sampler = WeightedSimpleCutSampler(cuts(), weights, num_samples=20, max_duration=8.0, shuffle=True, **ONE)
    return drawn_by(sampler)


def bucketing(world: World, **options: Any) -> Any:
    return drawn_by(BucketingSampler(cuts(), num_buckets=3, max_duration=8.0, shuffle=True, **options))


def dynamic(world: World, **options: Any) -> Any:
    return drawn_by(DynamicCutSampler(cuts(), max_duration=8.0, shuffle=True, **options))


def dynamic_bucketing(world: World, **options: Any) -> Any:
    return drawn_by(DynamicBucketingSampler(cuts(), num_buckets=3, max_duration=8.0, shuffle=True, **options))


def pairs(world: World) -> Any:
    return drawn_by(CutPairsSampler(cuts(), cuts(), max_source_duration=8.0, shuffle=True, **ONE))


def two(world: World, kind: Any) -> Any:
    parts = [SimpleCutSampler(part, max_duration=8.0, shuffle=True, **ONE) for part in (cuts(11), cuts(11, first=11))]
    return drawn_by(kind(*parts))


def names(batch: Any) -> Batch:
    return tuple(batch)


def shared(name: str, make: Any) -> Case:
    """A sampler that is told that there is one process."""
    return Case("lhotse", f"`{name}(rank=0, world_size=1)`", lambda world: make(world, **ONE), items=names, whole=True)


def on_its_own(name: str, make: Any) -> Case:
    """A sampler that reads the world of the environment, and shards whole batches by itself."""
    return Case("lhotse", f"`{name}`", make, Fate.AS_IT_IS, items=names, on_ranks=True, repeats=True)


CASES = [
    *(shared(name, make) for name, make in [("SimpleCutSampler", simple), ("DynamicCutSampler", dynamic)]),
    *(
        shared(name, make)
        for name, make in [("BucketingSampler", bucketing), ("DynamicBucketingSampler", dynamic_bucketing)]
    ),
    *(on_its_own(name, make) for name, make in [("SimpleCutSampler", simple), ("DynamicCutSampler", dynamic)]),
    *(
        on_its_own(name, make)
        for name, make in [("BucketingSampler", bucketing), ("DynamicBucketingSampler", dynamic_bucketing)]
    ),
    Case("lhotse", "`WeightedSimpleCutSampler(rank=0, world_size=1)`", weighted, items=names, whole=True),
    Case("lhotse", "`CutPairsSampler(rank=0, world_size=1)`", pairs, items=names, whole=True),
    Case("lhotse", "`ZipSampler` of such", lambda world: two(world, ZipSampler), items=names, whole=True),
    Case("lhotse", "`RoundRobinSampler` of such", lambda world: two(world, RoundRobinSampler), items=names, whole=True),
]
