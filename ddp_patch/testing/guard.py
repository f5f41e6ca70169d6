"""A guard for tests: an unpatched loader raises when one of several ranks iterates it."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import NotPatchedError
from ddp_patch.loaders.first_use import about_to_use
from ddp_patch.loaders.hooks import called_before, made, places_recorded
from ddp_patch.loaders.recognition import sharded_by

__all__ = ["guard_this_process", "guarded"]

# An environment variable, so that ranks are guarded too, however a guarded test starts them.
_VARIABLE = "DDP_PATCH_GUARD"
_for_good = ExitStack()  # guards this process as long as it is open


@contextmanager
def guarded() -> Iterator[None]:
    """Raise when an unpatched loader is iterated in a process group of several ranks: a context manager.

    Ranks that are started inside are guarded too, once they import ``ddp_patch``.

    Raises:
        NotPatchedError: From ``iter(loader)``, with the file and line that made the loader.

    Examples:
        >>> with guarded():
        ...     len(list(DataLoader(range(4))))  # no process group is up
        4
    """
    with patch.dict(os.environ, {_VARIABLE: "1"}), _iteration_guarded():
        yield


def guard_this_process() -> None:
    """Guard this process from now on if its environment says so, and otherwise stop guarding it."""
    _for_good.close()
    if _VARIABLE in os.environ:
        _for_good.enter_context(_iteration_guarded())


@contextmanager
def _iteration_guarded() -> Iterator[None]:
    with places_recorded(), called_before("__iter__", _require_sharded):
        yield


def _require_sharded(loader: DataLoader[Any]) -> None:
    about_to_use(loader)
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and sharded_by(loader) is None:
        where = made(loader)
        unknown = "an unknown line, before the guard was on"
        place = unknown if where is None else where.place
        raise NotPatchedError(
            f"Rank {dist.get_rank()} of {ranks} iterates a {type(loader).__name__} that is not sharded, so every rank "
            f"gets all of its data. It was made at {place}. Pass it through patch_dataloader_to_ddp() there. If its "
            "sampler or dataset shards by itself, set is_ddp_aware = True in that class."
        )
