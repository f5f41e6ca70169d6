"""Ray's way to start ranks: the workers of a ``TorchTrainer``, in a Ray of its own, of which no process is left."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer

from ddp_patch.testing import run_ranks

__all__ = ["launch"]

OBJECT_STORE = 80 * 2**20  # Ray asks for at least 75 MiB
# A process of Ray's ends when the one that started it has; this is how long that may take.
ENDS_WITHIN_S = 30


def launch(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float) -> None:
    """Call ``fn(rank, world_size, *args)`` on every worker."""
    # Not below TMPDIR, which may be long: the paths of Ray's sockets may have no more than 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        try:
            # In a process of its own, which is ended at the deadline, and Ray with it.
            run_ranks(_drive, 1, folder, fn, world_size, args, timeout=timeout)
        finally:
            _, left = psutil.wait_procs(_processes_that_log_in(folder), timeout=ENDS_WITHIN_S)
            assert not left, f"Ray left {left} behind"


def _processes_that_log_in(folder: str) -> list[psutil.Process]:
    """Return Ray's processes; they have no more in common, as the workers change their names."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # somebody else's, or gone
            if any(Path(file.path).is_relative_to(folder) for file in process.open_files()):
                found.append(process)
    return found


def _drive(rank: int, alone: int, folder: str, fn: Callable[..., Any], world_size: int, args: Sequence[Any]) -> None:
    """Be the script that starts Ray."""
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]  # which Ray's processes would inherit
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(sys.path),  # so that they find the modules of these tests
        "RAY_AUTH_MODE": "disabled",  # else a token is written into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    ray.init(
        "local",
        num_cpus=world_size + 1,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
    )
    assert _processes_that_log_in(folder)  # which is how they are found when they should be gone
    try:
        TorchTrainer(
            _on_worker,
            train_loop_config={"fn": fn, "args": args},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=world_size),
            run_config=RunConfig(storage_path=folder),
        ).fit()
    finally:
        ray.shutdown()


def _on_worker(config: dict[str, Any]) -> None:
    context = get_context()
    config["fn"](context.get_world_rank(), context.get_world_size(), *config["args"])
