"""What a rank is told while all ranks step through a loader together."""

import warnings
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_patch import DDPPatchError
from ddp_patch.errors import StreamOrderWarning

__all__ = ["FOUND", "WARNED", "Told", "in_step"]

FOUND = "RankMismatchError"
WARNED = "StreamOrderWarning"


class Told(NamedTuple):
    """The error or warning that a rank met, after how many steps, how many warnings; and the batches that it got."""

    found: str
    message: str
    steps: int
    warnings: int
    batches: list[Any]


def in_step(train: Any, *epochs: int) -> Told:
    """Make so many steps in each epoch, of those that it has, each together with the other ranks."""
    found, message, came = "", "", []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for steps in epochs:
            batches: Any = None
            for _ in range(steps):
                try:
                    batches = iter(train) if batches is None else batches
                    came += [] if found else [batch for batch in [next(batches, None)] if batch is not None]
                except DDPPatchError as error:
                    found, message = type(error).__name__, str(error)
                dist.barrier()
    warned = [str(one.message) for one in caught if one.category is StreamOrderWarning]
    if warned and not found:
        found, message = WARNED, warned[0]
    return Told(found, message, len(came), len(warned), came)
