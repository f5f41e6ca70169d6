"""Real ranks, started quickly: forked from a process that has imported what they need."""

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any, TypeVar

import pytest

from ddp_patch import testing

R = TypeVar("R")

# What a loader imports when it is patched, read and evaluated; and datasets' workers, when they begin.
OF_LOADERS = [f"ddp_patch.{room}" for room in ("evaluation.gather", "streams.by_worker")]
OF_DATASETS = ["zoo", "ddp_patch.streams.dataset"]
# The two of torch are what DistributedDataParallel imports when it is first used; scikit-learn has what is trained on.
OF_TRAINING = ["torch._dynamo", "torch.nn.parallel", "sklearn.datasets"]
OF_RANKS = ["ddp_patch.testing", *OF_TRAINING, "pytest", *OF_LOADERS, *OF_DATASETS, "frozen"]
multiprocessing.set_forkserver_preload(OF_RANKS)


def run_ranks(fn: Callable[..., R], world_size: int, *args: Any, **options: Any) -> list[R]:
    """As ``ddp_patch.testing.run_ranks`` does."""
    forkserver.ensure_running()
    address = vars(forkserver)["_forkserver"]._forkserver_address
    return testing.run_ranks(_on_rank, world_size, fn, address, *args, start_method="forkserver", **options)


def _on_rank(rank: int, world_size: int, fn: Callable[..., R], address: str, *args: Any) -> R:
    """Call ``fn`` on a rank whose workers are forked from the process that the rank was forked from itself.

    They are forked elsewhere because a rank may fork while a thread of gloo's holds a lock. By itself multiprocessing
    would start a process for each rank's, which would import torch once more.
    """
    server: Any = vars(forkserver)["_forkserver"]
    server._forkserver_address = address
    server.ensure_running = resource_tracker.ensure_running
    return fn(rank, world_size, *args)


def in_turn(those: Iterable[tuple[Any, ...]], ways: Sequence[Any]) -> list[Any]:
    """Return cases: each of those in one of the ways, in turn, and for the session ``soak`` in the others, too."""
    return [
        (*one, way) if number % len(ways) == place else soaked(*one, way)
        for number, one in enumerate(those)
        for place, way in enumerate(ways)
    ]


def soaked(*values: Any) -> Any:
    """Return a case that takes long and that others are like, so that the session ``soak`` alone tries it."""
    return pytest.param(*values, marks=pytest.mark.soak)
