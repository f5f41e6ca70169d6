"""Real ranks, started quickly: forked from a process that has imported what they need."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from ddp_patch import testing

R = TypeVar("R")

# What a loader imports when it is patched, read and evaluated; and datasets' workers, when they begin.
OF_LOADERS = [f"ddp_patch.{room}" for room in ("evaluation.gather", "shares.iterables.even_steps")]
OF_DATASETS = ["zoo", "ddp_patch.shares.iterables.dataset"]
# The two of torch are what DistributedDataParallel imports when it is first used; scikit-learn has what is trained on.
OF_TRAINING = ["torch._dynamo", "torch.nn.parallel", "sklearn.datasets"]
OF_RANKS = ["ddp_patch.testing", *OF_TRAINING, "pytest", *OF_LOADERS, *OF_DATASETS]
multiprocessing.set_forkserver_preload(OF_RANKS)


def run_ranks(fn: Callable[..., R], world_size: int, *args: Any, **options: Any) -> list[R]:
    """As ``ddp_patch.testing.run_ranks`` does."""
    return testing.run_ranks(fn, world_size, *args, start_method="forkserver", **options)


def soaked(*values: Any) -> Any:
    """Return a case that takes long and that others are like, so that the session ``soak`` alone tries it."""
    return pytest.param(*values, marks=pytest.mark.soak)


def fork_workers_elsewhere() -> None:
    """Have this rank's workers forked from a process of its own, which imports what they need once.

    Workers forked from a rank right after a collective may inherit a lock that a thread of gloo's holds.
    """
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(OF_DATASETS)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
