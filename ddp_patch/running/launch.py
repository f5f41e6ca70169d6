"""Start ranks, or take what a launcher has told this one: which it is, of how many, on which GPU, where they meet.

A script that runs as one process is not to see that: many decide by ``RANK`` whether they are distributed. Rank 0 is
the script, so it alone speaks.
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
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from _ddp_patch_command import INTERRUPTED
from ddp_patch.errors import MissingRanksError, WorldError
from ddp_patch.loaders.hooks import OURS

OF_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # of a single rank
_NAMES = (*OF_RANK, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_PREFIXES = ("ROLE_", "TORCHELASTIC_")
# The names under which a script may still read it.
_OWN = {"DDP_PATCH_RANK": "RANK", "DDP_PATCH_WORLD_SIZE": "WORLD_SIZE"}

# The environment's names of: the process that has started the ranks; where the files of ranks but the first one lie.
_STARTED, _SHADOWS = "DDP_PATCH_STARTED", "DDP_PATCH_SHADOWS"

ONE_NODE = {"1", "1:1"}  # as torchrun's --nnodes names this machine alone
_PARENT_DEATH_SIGNAL = 1  # as prctl(2) numbers it

_hidden: dict[str, str] = {}


def told(name: str, default: str = "") -> str:
    """Return what the launcher has put into the environment, hidden or not."""
    return os.environ.get(name, _hidden.get(name, default))


def rank() -> int:
    """Return which rank this process is."""
    return int(told("RANK", "0"))


def ranks() -> int:
    """Return how many ranks a launcher has started."""
    return int(told("WORLD_SIZE", "1"))


def is_rank() -> bool:
    """Return whether a launcher has started this process as one of several, or as the only one."""
    return all(told(name) for name in OF_RANK)


def hide() -> None:
    """Hide it from the script, from now on; that may read ``DDP_PATCH_RANK`` and ``DDP_PATCH_WORLD_SIZE``."""
    if not all(map(os.environ.get, OF_RANK)):
        return
    _hidden.update({name: text for name, text in os.environ.items() if name in _NAMES or name.startswith(_PREFIXES)})
    os.environ.update({own: _hidden[name] for own, name in _OWN.items()})
    for name in _hidden:
        del os.environ[name]


def is_hidden() -> bool:
    """Return whether the script does not see which rank it is."""
    return is_rank() and _OWN.keys() <= os.environ.keys()


_init_process_group = dist.init_process_group  # which scripts may not call


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


def store_of_ranks() -> Any:
    """Return a store of the ranks that ``-n`` has started, before there is a process group."""
    with patch.dict(os.environ, _hidden):
        store, _, _ = next(rendezvous("env://"))
    return dist.PrefixStore("ddp_patch", store)  # type: ignore[attr-defined]  # torch documents it


def backend_here() -> str:
    """Choose this rank's GPU, where there are some, and return the backend of a process group that uses it.

    Ranks that ``-n`` has started share the GPUs if there are fewer of these, over gloo: NCCL takes one rank for each.

    Raises:
        WorldError: The environment does not say which GPU is this rank's.
    """
    count = torch.cuda.device_count()
    if not count:
        return "gloo"
    if is_started() and int(told("LOCAL_WORLD_SIZE")) > count:
        torch.cuda.set_device(int(told("LOCAL_RANK")) % count)
        return "gloo"
    # A launcher may show each rank its own one alone.
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
    """Return the folder for what ranks but the first one write, where ``-n`` has started this process."""
    again = told("TORCHELASTIC_RESTART_COUNT", "0")  # what was there before is another world then
    return os.environ[_SHADOWS] if again == "0" else os.path.join(os.environ[_SHADOWS], f"restart-{again}")


def drawn_seed() -> int:
    """Return a seed that is the same on every rank of this run, because it follows from where they meet."""
    return crc32(":".join(map(told, ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))).encode())


def end_with_launcher() -> None:
    """Let Linux end this rank when its launcher is killed, and let Ctrl-C be told to it alone, not to its workers."""
    launcher = int(os.environ[_STARTED])
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGINT, signal.SIG_IGN))
    if sys.platform == "linux" and launcher != os.getpid():
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != launcher:  # it was killed before
            os._exit(1)


# ---- to start ranks ----


def started(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start ranks that run ``ddp-patch run`` with these arguments, and wait for them.

    Args:
        given: The arguments as torchrun's parser reads them.
        arguments: The arguments.

    Returns:
        The exit code of the rank that failed first; 0 if none did, and 128 and its number if a signal ended it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run as run_ranks

    logging.disable(logging.ERROR)  # the launcher's own words about what the ranks have said
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
    """Return whether every process that Python starts here hashes strings as the others do."""
    return os.environ.get("PYTHONHASHSEED", "random") != "random"


@contextmanager
def alone(kept: Path | None) -> Iterator[None]:
    """Let this process be the only rank.

    Args:
        kept: The folder for what it writes; None if it writes where the script says.
    """
    with patch.dict(os.environ, {**ALONE, _STARTED: str(os.getpid()), _SHADOWS: str(kept)}):
        yield


@contextmanager
def made_equal(kept: Path | None) -> Iterator[None]:
    """Let all that should be equal on the ranks start equal, while they run: hashes, the file system.

    Args:
        kept: The folder for what ranks write; None for one that is removed, for what ranks but the first one write.
    """
    folder = tempfile.mkdtemp(prefix="ddp_patch-") if kept is None else str(kept.resolve())
    equal = {_STARTED: str(os.getpid()), _SHADOWS: folder}
    if not hashes_alike():
        equal["PYTHONHASHSEED"] = "0"
    alone = {name: text for name, text in os.environ.items() if name not in OF_RANK}
    try:
        with patch.dict(os.environ, {**alone, **equal}, clear=True):
            yield
    finally:
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)


# ---- who speaks ----


@contextmanager
def rank_zero_speaks(rank: int) -> Iterator[Callable[[BaseException], None]]:
    """Silence every other rank while entered; show what ends this one, and end it with the exit code of Python.

    The files themselves are changed, so that the workers of loaders and libraries in C are silent, too.

    Args:
        rank: This rank.

    Yields:
        What shows an error that ends this rank before all is left, with the rank before each line.
    """
    stderr, seen = os.dup(2), list[BaseException]()
    if rank:
        _flush()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)

    def write(text: str) -> None:
        lines = "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())
        with open(stderr, "wb", closefd=False) as out:
            out.write(lines.encode(errors="replace"))

    def show(error: BaseException) -> None:
        if error not in seen and not isinstance(error, SystemExit | KeyboardInterrupt):
            seen.append(error)
            write(_text_of(error))

    try:
        yield show
    except KeyboardInterrupt:
        if is_started():
            _end_with_workers()  # for which torch would wait
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            write(ended.code)
            sys.exit(1)
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the script raises
        show(error)
        sys.exit(1)


def _text_of(error: BaseException) -> str:
    """Return an error as Python shows it, from the first line of the script on."""
    if isinstance(error, MissingRanksError):  # which says what the others did
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
