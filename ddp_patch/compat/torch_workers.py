"""What ``get_worker_info()`` returns, and how workers are seeded. Seen in torch 2.4.0, 2.13.0 and 2.15.0."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data import get_worker_info

from ddp_patch.compat.missing import lacking, private
from ddp_patch.compat.names import full_name

if TYPE_CHECKING:
    from torch.utils.data._utils.worker import WorkerInfo
else:
    # The class of what ``get_worker_info()`` returns, which has no public name.
    WorkerInfo = private("torch.utils.data._utils.worker.WorkerInfo", "Sharing an iterable dataset")

__all__ = [
    "WorkerInfo",
    "made_worker_info",
    "noted_worker_info",
    "replace_worker_seed",
    "seed_as_worker",
    "thread_workers",
    "worker_info_told",
]

# Holds the one variable that ``get_worker_info()`` reads in a process.
_WORKER: Final[Any] = private("torch.utils.data._utils.worker", "Sharing an iterable dataset")


def thread_workers(loader: object) -> tuple[str, str] | None:
    """Return how a loader says that its workers are threads, and how it would say processes; None if they are.

    torch 2.15.0 has fields for a ``worker_method`` in its worker info, but no such loader yet; this is how its
    development has it. MONAI 1.6.1 makes a context for ``use_thread_workers=True`` whose processes are threads.
    """
    if getattr(loader, "worker_method", None) == "thread":
        return "worker_method='thread'", "worker_method='multiprocessing'"
    context = getattr(loader, "multiprocessing_context", None)
    process = getattr(context, "Process", None)
    if not (isinstance(process, type) and issubclass(process, threading.Thread)):
        return None
    if any(full_name(kind) == "monai.data.thread_buffer.ThreadDataLoader" for kind in type(loader).__mro__):
        return "use_thread_workers=True", "use_thread_workers=False"
    return f"multiprocessing_context={type(context).__name__}()", "multiprocessing_context='spawn'"


def made_worker_info(worker: int, workers: int, seed: int, dataset: Any) -> WorkerInfo:
    """Return what ``get_worker_info()`` returns in a worker. torch makes such values for its own workers only."""
    return WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)


# The attributes of a worker info.
_TELLING: Final = frozenset({"id", "num_workers", "seed", "dataset"})


class _NotedWorkerInfo(WorkerInfo):
    """A worker info that records which of its attributes are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in _TELLING:
            object.__getattribute__(self, "note")(name)
        return object.__getattribute__(self, name)


def noted_worker_info(worker: int, workers: int, seed: int, dataset: Any, note: Callable[[str], object]) -> WorkerInfo:
    """Return what ``made_worker_info`` does, calling ``note`` with the name of each attribute that somebody reads."""
    info = _NotedWorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)
    object.__setattr__(info, "note", note)  # frozen; set last, because making it reads nothing
    return info


@contextmanager
def worker_info_told(info: object) -> Iterator[None]:
    """Make ``get_worker_info()`` return ``info``. It reads this one variable, and there is no public way to set it.

    Raises:
        TorchVersionError: It reads another one: datasets would not learn which part is theirs.
    """
    before = getattr(_WORKER, "_worker_info", None)
    _WORKER._worker_info = info
    try:
        if get_worker_info() is not info:
            raise lacking("torch.utils.data._utils.worker._worker_info", "Setting get_worker_info()")
        yield
    finally:
        _WORKER._worker_info = before


def seed_as_worker(base_seed: int, worker: int) -> None:
    """Seed the global generators of the CPU as torch seeds those of a worker, which it does in workers only.

    Raises:
        TorchVersionError: This torch seeds numpy in another way.
    """
    name = "torch.utils.data._utils.worker._generate_state"
    numpy_seed = private(name, "Drawing what an unpatched loader's workers draw")(base_seed, worker)
    random.seed(base_seed + worker)
    torch.default_generator.manual_seed(base_seed + worker)
    np.random.seed(numpy_seed)


def replace_worker_seed(seed: int) -> None:
    """Make this ``get_worker_info().seed``. The value is frozen, and datasets read their seed nowhere else.

    Raises:
        TorchVersionError: This torch does not let it be replaced: ranks would augment alike.
    """
    try:
        object.__setattr__(get_worker_info(), "seed", seed)
    except (AttributeError, TypeError) as error:
        name = "a worker info whose seed can be replaced"
        raise lacking(name, "Seeding workers by rank", "Or use num_workers=0.") from error
