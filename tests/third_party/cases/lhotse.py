"""lhotse's samplers, whose batches are sets of cuts: pieces of recordings."""

from collections.abc import Iterator
from typing import Any

from lhotse import CutSet
from lhotse.cut import MonoCut
from lhotse.dataset import sampling
from torch.utils.data import DataLoader, Dataset

from third_party.base import Case, Fate, N

ONE: dict[str, Any] = {"rank": 0, "world_size": 1}  # which turns off lhotse's own sharding
PLAIN: dict[str, dict[str, Any]] = {"SimpleCutSampler": {}, "DynamicCutSampler": {}}
PLAIN |= {"BucketingSampler": {"num_buckets": 3}, "DynamicBucketingSampler": {"num_buckets": 3}}


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


def sampler(kind: str, *given: Any, limit: str = "max_duration", **options: Any) -> Any:
    return getattr(sampling, kind)(*given, shuffle=True, **{limit: 8.0}, **options)


def two(kind: str) -> Any:
    return getattr(sampling, kind)(*(sampler("SimpleCutSampler", cuts(11, at), **ONE) for at in (0, 11)))


def case(name: str, make: Any, **how: Any) -> Case:
    def made(world: object) -> Any:
        return DataLoader(Cuts(), batch_size=None, sampler=make())

    return Case("lhotse", name, made, items=tuple, **how)


def cases() -> Iterator[Case]:
    """Yield samplers that are told that there is one process, and those that shard by what the environment says."""
    for kind, options in PLAIN.items():
        told = {**options, **ONE}
        yield case(f"`{kind}(rank=0, world_size=1)`", lambda k=kind, o=told: sampler(k, cuts(), **o), whole=True)
    for kind, options in PLAIN.items():
        own = {"fate": Fate.AS_IT_IS, "on_ranks": True, "repeats": True}
        yield case(f"`{kind}`", lambda k=kind, o=options: sampler(k, cuts(), **o), **own)
    weights = [1.0 + number % 3 for number in range(N)]
    others = {
        "`WeightedSimpleCutSampler(rank=0, world_size=1)`": lambda: sampler(
            "WeightedSimpleCutSampler", cuts(), weights, num_samples=20, **ONE
        ),
        "`CutPairsSampler(rank=0, world_size=1)`": lambda: sampler(
            "CutPairsSampler", cuts(), cuts(), limit="max_source_duration", **ONE
        ),
        "`ZipSampler` of such": lambda: two("ZipSampler"),
        "`RoundRobinSampler` of such": lambda: two("RoundRobinSampler"),
    }
    for name, make in others.items():
        yield case(name, make, whole=True)


CASES = [*cases()]
