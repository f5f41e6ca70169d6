"""Start ranks, and read from the environment which rank this process is, and on which GPU.

A script that runs as one process does not see its rank: many scripts decide by ``RANK`` whether they are distributed.
Only rank 0 prints.
"""

import argparse
import ctypes
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
import torch.distributed as dist

from _ddp_patch_command import INTERRUPTED
from ddp_patch.errors import MissingRanksError, WorldError
from ddp_patch.loaders.hooks import OURS

OF_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # of a single rank
_NAMES = (*OF_RANK, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_PREFIXES = ("ROLE_", "TORCHELASTIC_")
# Names under which a script may still read its rank.
_OWN = {"DDP_PATCH_RANK": "RANK", "DDP_PATCH_WORLD_SIZE": "WORLD_SIZE"}

# Variables with the process that has started the ranks, and with the folder of the shadows' files.
_STARTED, _SHADOWS = "DDP_PATCH_STARTED", "DDP_PATCH_SHADOWS"

ONE_NODE = {"1", "1:1"}  # as torchrun's --nnodes names this machine alone
_PARENT_DEATH_SIGNAL = 1  # as prctl(2) numbers it

_hidden: dict[str, str] = {}


def told(name: str, default: str = "") -> str:
    """Return a variable of the launcher, hidden or not."""
    return os.environ.get(name, _hidden.get(name, default))


def rank() -> int:
    """Return the number of this rank."""
    return int(told("RANK", "0"))


def ranks() -> int:
    """Return the number of ranks that a launcher has started."""
    return int(told("WORLD_SIZE", "1"))


def is_rank() -> bool:
    """Return whether a launcher has started this process as a rank."""
    return all(told(name) for name in OF_RANK)


def hide() -> None:
    """Hide the launcher's variables from the script, except as ``DDP_PATCH_RANK`` and ``DDP_PATCH_WORLD_SIZE``."""
    if not all(map(os.environ.get, OF_RANK)):
        return
    _hidden.update({name: text for name, text in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)})
    os.environ.update({own: _hidden[name] for own, name in _OWN.items()})
    for name in _hidden:
        del os.environ[name]


def is_hidden() -> bool:
    """Return whether the launcher's variables are hidden from the script."""
    return is_rank() and _OWN.keys() <= os.environ.keys()


_init_process_group = dist.init_process_group  # the session replaces it


@contextmanager
def group_made(backend: str, **options: Any) -> Iterator[None]:
    """Make a process group, and destroy it at the end."""
    with patch.dict(os.environ, _hidden):
        _init_process_group(backend, **options)
    try:
        yield
    finally:
        if dist.is_initialized():  # the script may have destroyed it already
            dist.destroy_process_group()


def backend_here() -> str:
    """Choose the GPU of this rank, if there are GPUs, and return the backend of the process group.

    Ranks of ``-n`` share GPUs if there are fewer GPUs than ranks. The backend is gloo then: NCCL needs a GPU per rank.

    Raises:
        WorldError: The environment does not say which GPU is this rank's.
    """
    count = torch.cuda.device_count()
    if not count:
        return "gloo"
    if is_started() and int(told("LOCAL_WORLD_SIZE")) > count:
        torch.cuda.set_device(int(told("LOCAL_RANK")) % count)
        return "gloo"
    # A launcher may show each rank only its own GPU.
    number = "0" if count == 1 else told("LOCAL_RANK").strip()
    if not number.isdecimal() or int(number) >= count:
        raise WorldError(
            f"This process sees {count} GPUs, from 0 to {count - 1}, and LOCAL_RANK={number or None} does not say "
            "which is this rank's. Set LOCAL_RANK, as torchrun does, and start as many ranks here as there are GPUs."
        )
    torch.cuda.set_device(int(number))
    return "cpu:gloo,cuda:nccl"


def is_started() -> bool:
    """Return whether ``-n`` has started this process."""
    return _STARTED in os.environ and is_rank()


def shadows() -> str:
    """Return the folder of the shadows' files, if ``-n`` has made one."""
    folder, again = os.environ.get(_SHADOWS, ""), told("TORCHELASTIC_RESTART_COUNT", "0")
    return os.path.join(folder, f"restart-{again}") if folder else ""  # a restarted run sees what rank 0 left


def drawn_seed() -> int:
    """Return a seed from the address of this run: it is the same on all ranks."""
    return crc32(":".join(map(told, ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))).encode())


def end_with_launcher() -> None:
    """End this rank when its launcher is killed (on Linux), and let its workers ignore Ctrl-C."""
    launcher = int(os.environ[_STARTED])
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGINT, signal.SIG_IGN))
    if sys.platform == "linux" and launcher != os.getpid():
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != launcher:  # the launcher was killed already
            os._exit(1)


# ---- to start ranks ----


def started(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start ranks of ``ddp-patch run``, and wait for them.

    Args:
        given: The arguments as torchrun's parser reads them.
        arguments: The arguments.

    Returns:
        The exit code of the rank that failed first, or 0. If a signal ended that rank: 128 plus its number.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run as run_ranks

    logging.disable(logging.ERROR)  # the ranks have shown their errors already
    here = given.nproc_per_node or "1"
    if here.isdecimal():
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // max(1, int(here)))))
    ours = {"module": True, "training_script": "ddp_patch", "training_script_args": ["run", *arguments]}
    alone = given.standalone or (given.nnodes in ONE_NODE and not given.rdzv_endpoint)
    try:
        run_ranks(argparse.Namespace(**{**vars(given), **ours, "nproc_per_node": here, "standalone": alone}))  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    except ChildFailedError as error:
        first, failure = error.get_first_failure()
        code: int = failure.exitcode
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        sys.stderr.write(f"ddp_patch: rank {first} ended first, by {how}.\n")
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def hashes_alike() -> bool:
    """Return whether strings have the same hashes in every process."""
    return os.environ.get("PYTHONHASHSEED", "random") != "random"


@contextmanager
def alone() -> Iterator[None]:
    """Make this process the only rank, while entered."""
    with patch.dict(os.environ, {**ALONE, _STARTED: str(os.getpid())}):
        yield


@contextmanager
def made_equal() -> Iterator[None]:
    """Give all ranks one hash seed, and a folder for the shadows' files, while entered."""
    folder = tempfile.mkdtemp(prefix="ddp_patch-")
    equal = {_STARTED: str(os.getpid()), _SHADOWS: folder}
    if not hashes_alike():
        equal["PYTHONHASHSEED"] = "0"
    alone = {name: text for name, text in os.environ.items() if name not in OF_RANK}
    try:
        with patch.dict(os.environ, {**alone, **equal}, clear=True):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- who speaks ----


@contextmanager
def rank_zero_speaks(rank: int) -> Iterator[Callable[[BaseException], None]]:
    """Silence every rank but rank 0 while entered. Show the error that ends this rank, and exit as Python does.

    The file descriptors are replaced, so that workers and libraries in C are silent, too.

    Args:
        rank: This rank.

    Yields:
        A function that shows an error, with the rank before each line.
    """
    stderr, seen = os.dup(2), list[BaseException]()
    if rank:
        _flush()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)

    def show(error: BaseException) -> None:
        if error not in seen and not isinstance(error, SystemExit | KeyboardInterrupt):
            seen.append(error)
            lines = "".join(f"[rank {rank}] {line}\n" for line in _text_of(error).splitlines())
            with open(stderr, "wb", closefd=False) as out:
                out.write(lines.encode(errors="replace"))

    try:
        yield show
    except KeyboardInterrupt:
        if is_started():
            _end_with_workers()  # torch would wait for them
        sys.exit(INTERRUPTED)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the script raises
        show(error)
        sys.exit(1)


def _text_of(error: BaseException) -> str:
    """Return the traceback of an error, from the first line of the script on."""
    if isinstance(error, MissingRanksError):  # the error says what the others did
        return f"{type(error).__name__}: {error}"
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((*OURS, "<frozen runpy>")):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def _end_with_workers() -> None:
    _flush()
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(INTERRUPTED)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have put anything there
            stream.flush()
