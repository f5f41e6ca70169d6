"""Ultralytics' loader and sampler, which every YOLO training uses."""

from typing import Any

from ultralytics.data.build import ContiguousDistributedSampler, InfiniteDataLoader, build_dataloader

from third_party.base import Case, Fate, Numbers, World, drawn_by, persistent


def contiguous(world: World) -> Any:
    return drawn_by(ContiguousDistributedSampler(Numbers(), world.size, batch_size=4, rank=world.rank, shuffle=True))


class Pictures(Numbers):
    """A YOLO data set tells how its samples are put together."""

    collate_fn: Any = staticmethod(list)


CASES = [
    *(
        Case("ultralytics", name, make, Fate.REFUSED, remedy=persistent, told="persistent_workers=True")
        for name, make in {
            "`InfiniteDataLoader`": lambda world: InfiniteDataLoader(Numbers(), 4, shuffle=True, num_workers=2),
            "`build_dataloader()`": lambda world: build_dataloader(Pictures(), batch=4, workers=2),
        }.items()
    ),
    Case("ultralytics", "`ContiguousDistributedSampler`", contiguous, Fate.AS_IT_IS),
    Case("ultralytics", "`ContiguousDistributedSampler`, of one process", lambda world: contiguous(World())),
]
