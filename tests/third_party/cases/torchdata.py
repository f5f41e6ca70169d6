"""torchdata's loader that saves its place."""

from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from third_party.base import Case, Numbers, World


def shuffled(world: World) -> Any:
    return StatefulDataLoader(Numbers(), batch_size=4, shuffle=True)


def with_workers(world: World) -> Any:
    return StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2)


CASES = [
    Case("torchdata", "`StatefulDataLoader`", shuffled, on_ranks=True),
    Case("torchdata", "`StatefulDataLoader` with 2 workers", with_workers, on_ranks=True),
]
