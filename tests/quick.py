"""Real ranks, started quickly: forked from a process that has imported what they need."""

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from ddp_patch import DDPPatchError, testing
from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import message_of
from ddp_patch.testing.twins import server_of

R = TypeVar("R")

# What a loader imports when it is patched, read and evaluated; and datasets' workers, when they begin.
OF_LOADERS = [f"ddp_patch.{room}" for room in ("evaluation.gather", "streams.even_steps")]
OF_DATASETS = ["zoo", "ddp_patch.streams.dataset"]
# The two of torch are what DistributedDataParallel imports when it is first used; scikit-learn has what is trained on.
OF_TRAINING = ["torch._dynamo", "torch.nn.parallel", "sklearn.datasets"]
OF_RANKS = ["ddp_patch.testing", *OF_TRAINING, "pytest", *OF_LOADERS, *OF_DATASETS, "frozen"]
multiprocessing.set_forkserver_preload(OF_RANKS)


def run_ranks(fn: Callable[..., R], world_size: int, *args: Any, **options: Any) -> list[R]:
    """As ``ddp_patch.testing.run_ranks`` does, with a later deadline: the machine may be busy with something else."""
    options = {"timeout": 300, **options}
    addresses = [address_of(rank) for rank in range(world_size)]
    return testing.run_ranks(_on_rank, world_size, fn, addresses, *args, **options)


def address_of(rank: int) -> str:
    """Return the address of the server of a rank's number."""
    server: Any = server_of(rank)
    server.ensure_running()
    address: str = server._forkserver_address
    return address


def take_server(rank: int, address: str, environment: Mapping[str, str]) -> None:
    """Have a rank's number served by a server that another process has started, and that outlives this one."""
    server: Any = server_of(rank)
    server.environment = environment
    server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_WRONLY)
    server.ensure_running = resource_tracker.ensure_running


def run_each(world_size: int, *functions: Callable[[int, int], Any], **options: Any) -> list[list[Any]]:
    """Run functions one after the other on the same ranks, and return for each what it returned on every rank."""
    return [list(results) for results in zip(*run_ranks(_each, world_size, functions, **options), strict=True)]


def _each(rank: int, world_size: int, functions: Sequence[Callable[[int, int], Any]]) -> list[Any]:
    return [function(rank, world_size) for function in functions]


def _on_rank(rank: int, world_size: int, fn: Callable[..., R], addresses: Sequence[str], *args: Any) -> R:
    """Call ``fn`` on a rank whose workers are forked from the process that the rank was forked from itself.

    They are forked elsewhere because a rank may fork while a thread of gloo's holds a lock. By itself multiprocessing
    would start a process for each rank's, which would import torch once more.
    """
    server: Any = vars(forkserver)["_forkserver"]
    server._forkserver_address = addresses[rank]
    server.ensure_running = resource_tracker.ensure_running
    return fn(rank, world_size, *args)


def keys_now() -> int:
    """Return how many keys the store has while no rank writes one."""
    dist.barrier()
    count: int = default_store().num_keys()
    dist.barrier()
    return count


def said(act: Callable[[], Any]) -> tuple[str, str]:
    """Return what a rank was told, after the name of the error; or "nothing", and what came of it."""
    try:
        return "nothing", repr(act())
    except DDPPatchError as error:
        return type(error).__name__, message_of(error)


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
