"""Ultralytics' loader and sampler, which every YOLO training uses."""

from typing import Any

from ultralytics.data.build import ContiguousDistributedSampler, InfiniteDataLoader, build_dataloader

from third_party.base import Case, Fate, Numbers, World, drawn_by


def infinite(world: World, **options: Any) -> Any:
    return InfiniteDataLoader(Numbers(), batch_size=4, shuffle=True, **options)


def contiguous(world: World) -> Any:
    return drawn_by(ContiguousDistributedSampler(Numbers(), world.size, batch_size=4, rank=world.rank, shuffle=True))


class Pictures(Numbers):
    """A YOLO data set tells how its samples are put together."""

    collate_fn: Any = staticmethod(list)


CASES = [
    Case("ultralytics", "`InfiniteDataLoader`", infinite),
    Case("ultralytics", "`InfiniteDataLoader` with 2 workers", lambda world: infinite(world, num_workers=2)),
    # Its generator is seeded by rank, so ranks have to agree on it.
    Case(
        "ultralytics",
        "`build_dataloader()`",
        lambda world: build_dataloader(Pictures(), batch=4, workers=0),
        on_ranks=True,
    ),
    Case("ultralytics", "`ContiguousDistributedSampler`", contiguous, Fate.AS_IT_IS),
    Case("ultralytics", "`ContiguousDistributedSampler`, of one process", lambda world: contiguous(World())),
]
