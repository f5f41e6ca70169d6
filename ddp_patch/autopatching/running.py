"""Run a script or module as ``python`` does, and a process group around it."""

import os
import random
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ddp_patch.errors import WorldError

__all__ = ["process_group", "run_module", "run_script", "seed_all"]

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_script(path: str, arguments: Sequence[str]) -> dict[str, object]:
    """Run a file as ``python path arguments...``: as ``__main__``, with its folder first in ``sys.path``.

    Returns:
        The script's global names.
    """
    with _as_in_python(path, arguments, str(Path(path).resolve().parent)):
        return runpy.run_path(path, run_name="__main__")


def run_module(name: str, arguments: Sequence[str]) -> dict[str, object]:
    """Run a module as ``python -m name arguments...``: as ``__main__``, with the current folder first in ``sys.path``.

    ``sys.argv[0]`` becomes its file.

    Returns:
        The module's global names.
    """
    with _as_in_python(name, arguments, str(Path.cwd())):
        return runpy.run_module(name, run_name="__main__", alter_sys=True)


@contextmanager
def _as_in_python(target: str, arguments: Sequence[str], folder: str) -> Iterator[None]:
    before = sys.argv, sys.path
    sys.argv = [target, *arguments]
    # What started this process has put the current folder, or that of its own script, first; unless it was told not to.
    sys.path = [folder, *sys.path[not sys.flags.safe_path :]]
    try:
        yield
    finally:
        sys.argv, sys.path = before


@contextmanager
def process_group(backend: str) -> Iterator[None]:
    """Make a process group of the ranks that torchrun started, and destroy it at the end.

    Raises:
        WorldError: The environment does not say which rank this is.
    """
    if missing := [name for name in _LAUNCHED if name not in os.environ]:
        raise WorldError(
            f"--init-process-group {backend} makes a process group from torchrun's environment, which lacks "
            f"{', '.join(missing)}. Start with torchrun --nproc-per-node N -m ddp_patch run ..."
        )
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # so that "cuda" is this rank's own
    dist.init_process_group(backend)
    try:
        yield
    finally:
        if dist.is_initialized():  # the script may have destroyed it already
            dist.destroy_process_group()


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
