"""Real ranks, started quickly: forked from a process that has imported what they need."""

import multiprocessing
from collections.abc import Callable
from typing import Any, TypeVar

from ddp_patch import testing

R = TypeVar("R")

# The two of torch are what DistributedDataParallel imports when it is first used.
multiprocessing.set_forkserver_preload(["ddp_patch.testing", "torch._dynamo", "torch.nn.parallel", "zoo"])


def run_ranks(fn: Callable[..., R], world_size: int, *args: Any, **options: Any) -> list[R]:
    """As ``ddp_patch.testing.run_ranks`` does."""
    return testing.run_ranks(fn, world_size, *args, start_method="forkserver", **options)
