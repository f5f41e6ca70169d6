"""Ray's way to start ranks: the workers of a ``TorchTrainer``, in a Ray of its own, of which no process is left."""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import ray
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer

from ddp_patch.testing import run_ranks

__all__ = ["launch"]

OBJECT_STORE = 80 * 2**20  # Ray asks for at least 75 MiB
# A process of Ray's ends with the one that started it; this is how long that may take.
ENDS_WITHIN_S = 30


def launch(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float) -> None:
    """Call ``fn(rank, world_size, *args)`` on every worker."""
    run_ranks(_drive, 1, fn, world_size, args, timeout=timeout)  # in a process that is ended at the deadline


def _drive(rank: int, alone: int, fn: Callable[..., Any], world_size: int, args: Sequence[Any]) -> None:
    """Be the script that starts Ray."""
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]  # which Ray's processes would inherit
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(sys.path),  # so that they find the modules of these tests
        "RAY_AUTH_MODE": "disabled",  # else a token is written into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    # Not below TMPDIR, which may be long: the paths of Ray's sockets may have no more than 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            "local",
            num_cpus=world_size + 1,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        started = psutil.Process().children(recursive=True)
        try:
            TorchTrainer(
                _on_worker,
                train_loop_config={"fn": fn, "args": args},
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=world_size),
                run_config=RunConfig(storage_path=folder),
            ).fit()
            started += psutil.Process().children(recursive=True)
        finally:
            ray.shutdown()
        _, left = psutil.wait_procs(set(started), timeout=ENDS_WITHIN_S)
    assert not left, f"Ray left {left} behind"


def _on_worker(config: dict[str, Any]) -> None:
    context = get_context()
    config["fn"](context.get_world_rank(), context.get_world_size(), *config["args"])
