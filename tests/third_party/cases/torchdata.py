"""torchdata's loader that saves its place."""

from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from third_party.base import Case, Numbers


def shuffled(**options: Any) -> Any:
    return StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, **options)


CASES = [
    Case("torchdata", "`StatefulDataLoader`", lambda world: shuffled(), on_ranks=True),
    Case("torchdata", "`StatefulDataLoader` with 2 workers", lambda world: shuffled(num_workers=2), on_ranks=True),
]
