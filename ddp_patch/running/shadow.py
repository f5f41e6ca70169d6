"""Let the first rank be the script: the others print nothing, and write into worlds of their own."""

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from getpass import getuser
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch

from _ddp_patch_command import INTERRUPTED
from ddp_patch.compat.files import files_opened_by
from ddp_patch.errors import MissingRanksError
from ddp_patch.loaders.hooks import OURS
from ddp_patch.running.overlay import MAY_CREATE, UNNAMED, Overlay, Past, make_folders, open_file, real

__all__ = ["Voice", "errors_reported", "is_shadowed", "shadowed"]


# ---- files ----

# Read and written where they are: devices, and caches. Programs let several processes write these at once, and
# compilers and libraries in C read them.
_DEVICES = ("/dev", "/proc", "/sys")
_CACHES = {
    "XDG_CACHE_HOME": "~/.cache",
    "HF_HOME": "~/.cache/huggingface",
    "TORCH_HOME": "~/.cache/torch",
    "TRITON_CACHE_DIR": "~/.triton",
    "MPLCONFIGDIR": "~/.config/matplotlib",
}

# Functions of ``os`` that look at the path that is their first argument; those that change what lies there.
_LOOKS = ("access", "getxattr", "listxattr", "lstat", "pathconf", "readlink", "stat", "statvfs")
_CHANGES = ("chmod", "chown", "lchown", "removexattr", "setxattr", "truncate", "utime")
_save = torch.save


# How functions of ``os`` are given an open folder, in which a path is.
_IN_FOLDERS = ("dir_fd", "src_dir_fd", "dst_dir_fd")


def _of_paths(of_os: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return our function in the place of one of ``os``, which is called for open files, and paths in open folders."""

    @wraps(of_os)
    def call(*args: Any, **options: Any) -> Any:
        if any(options.get(name) is not None for name in _IN_FOLDERS) or (args and isinstance(args[0], int)):
            return of_os(*args, **options)
        return ours(*args, **{name: value for name, value in options.items() if name not in _IN_FOLDERS})

    return call


def _caches() -> list[str]:
    """Return the folders of caches."""
    compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{getuser()}")
    caches = [os.environ.get(name, usual) for name, usual in _CACHES.items()]
    caches += [os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled)]
    return [os.path.realpath(os.path.expanduser(cache)) for cache in caches]


# Functions of ``os`` before which the first rank keeps what is at a path: how, for each of their paths.
_KEPT_BEFORE: dict[str, tuple[str, ...]] = {
    "truncate": ("writes",),
    "mkdir": ("makes",),
    "remove": ("makes",),
    "unlink": ("makes",),
    "rmdir": ("makes",),
    "link": ("", "makes"),
    "symlink": ("", "makes"),
    "rename": ("moves", "makes"),
    "replace": ("moves", "makes"),
}


_entered = False  # whether this process is in such a world


def is_shadowed() -> bool:
    """Return whether this process is in such a world, or keeps what was for others."""
    return _entered


@contextmanager
def shadowed(rank: int, folder: str, *, keep: bool = False, writes: bool = True) -> Iterator[None]:
    """Let a rank but the first one write into a world of its own, while entered; the first one keeps what was.

    Args:
        rank: The rank.
        folder: A folder of all ranks on this machine. Whoever leaves last removes it.
        keep: Whether the folder stays.
        writes: Whether the first rank writes where the script says.
    """
    global _entered
    home = os.path.realpath(folder)
    own = os.path.join(home, f"rank-{rank}")
    make_folders(own)
    # Sockets of multiprocessing are made in C, in a folder that is made when it is first asked for.
    left_alone = (home, *_DEVICES, os.path.realpath(get_temp_dir()), *_caches())
    past = Past(home, left_alone)
    try:
        with ExitStack() as stack:
            if rank == 0 and writes:
                _keep(stack, past)
            else:
                _lay_over(stack, Overlay(own, past))
            _entered = True
            yield
    finally:
        _entered = False
        if not keep:
            shutil.rmtree(own, ignore_errors=True)
            with suppress(FileNotFoundError):  # another rank has removed it
                if not any(name.startswith("rank-") for name in os.listdir(home)):
                    shutil.rmtree(home, ignore_errors=True)


def _keep(stack: ExitStack, past: Past) -> None:
    """Let the first rank keep what was, until the stack closes."""

    def keeping(name: str, hows: Sequence[str]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            paths = [*args, *(options[each] for each in ("path", "src", "dst") if each in options)]
            for path, how in zip(paths, hows, strict=False):
                if how:
                    past.keep_before(path, writes=how == "writes", moves=how == "moves")
            return getattr(real, name)(*args, **options)

        return call

    def open_kept(file: Any, mode: Any = "r", *args: Any, **options: Any) -> Any:
        if isinstance(mode, str) and {*mode} & {*"wax+"}:
            past.keep_before(file, writes=True)
        return open_file(file, mode, *args, **options)

    def os_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & MAY_CREATE and flags & UNNAMED != UNNAMED:
            past.keep_before(path, writes=True)
        return int(real.open(path, flags, *args, **options))

    def save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
        past.keep_before(f, writes=True)
        _save(obj, f, *args, **options)

    _replace(stack, {"open": os_open} | {name: keeping(name, hows) for name, hows in _KEPT_BEFORE.items()})
    stack.enter_context(files_opened_by(open_kept, save))


def _lay_over(stack: ExitStack, overlay: Overlay) -> None:
    """Let another rank see and write its own world, until the stack closes."""
    functions: dict[str, Callable[..., Any]] = {
        "open": overlay.os_open,
        "mkdir": overlay.mkdir,
        "remove": overlay.remove,
        "unlink": overlay.remove,
        "rmdir": overlay.rmdir,
        "rename": overlay.rename,
        "replace": overlay.rename,
        "link": overlay.link,
        "symlink": overlay.symlink,
        "chdir": overlay.chdir,
        "listdir": overlay.listdir,
        "scandir": overlay.scandir,
    }
    functions |= {name: partial(overlay.looking, getattr(real, name)) for name in _LOOKS}
    functions |= {name: partial(overlay.changing, getattr(real, name)) for name in _CHANGES}
    _replace(stack, functions)
    stack.enter_context(patch.object(os, "getcwd", overlay.getcwd))
    stack.enter_context(patch.object(os, "getcwdb", lambda: os.fsencode(overlay.getcwd())))
    stack.enter_context(files_opened_by(overlay.open, overlay.save, overlay.load))


def _replace(stack: ExitStack, functions: Mapping[str, Callable[..., Any]]) -> None:
    for name, ours in functions.items():
        stack.enter_context(patch.object(os, name, _of_paths(getattr(real, name), ours)))


# ---- what is printed ----


class Voice:
    """Lets the first rank speak: what the others write to stdout and stderr is not shown.

    The files themselves are changed, so that the workers of loaders and libraries in C are silent, too.

    Args:
        rank: This rank.
        folder: The folder for what the others write, ``rank-1.log`` and so on; None to forget it.
        sees_rank: Whether the script sees which rank it is.
    """

    def __init__(self, rank: int, folder: Path | None, *, sees_rank: bool = True) -> None:
        self._rank, self._sees_rank = rank, sees_rank
        self._reported: BaseException | None = None
        self._stderr = os.dup(2)
        if rank:
            log = os.devnull
            if folder is not None:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                log = str(folder / f"rank-{rank}.log")
            _flush()
            silent = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(silent, 1)
            os.dup2(silent, 2)

    def report(self, text: str) -> None:
        """Write a text to stderr, with the rank before each line."""
        lines = "".join(f"[rank {self._rank}] {line}\n" for line in text.splitlines())
        with open(self._stderr, "wb", closefd=False) as out:
            out.write(lines.encode(errors="replace"))

    def report_error(self, error: BaseException) -> None:
        """Show what ends this rank, once; an error that says who is missing names the lines itself."""
        if error is self._reported or isinstance(error, SystemExit | KeyboardInterrupt):
            return
        self._reported = error
        if isinstance(error, MissingRanksError):
            self.report(f"{type(error).__name__}: {error}")
            return
        self.report("".join(traceback.format_exception(type(error), error, _of_script(error.__traceback__))))
        if isinstance(error, KeyError) and not self._sees_rank and {*error.args} & {"RANK", "LOCAL_RANK", "WORLD_SIZE"}:
            self.report(
                f"ddp_patch: the ranks train as one process, so the script sees no {error.args[0]}. If it starts as "
                "one of several ranks, pass --mode ranks."
            )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have put anything there
            stream.flush()


@contextmanager
def errors_reported(voice: Voice, *, at_once: bool) -> Iterator[None]:
    """Show what ends this rank, with its number, and end it with the exit code that Python would give.

    Args:
        voice: Lets the first rank speak.
        at_once: Whether Ctrl-C ends the process here, with the workers of its loaders, for which torch would wait.
    """
    try:
        yield
    except KeyboardInterrupt:
        if at_once:
            _flush()
            for worker in multiprocessing.active_children():
                if worker.pid is not None:
                    os.kill(worker.pid, signal.SIGKILL)
            os._exit(INTERRUPTED)
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            voice.report(ended.code)
            sys.exit(1)
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the script raises
        voice.report_error(error)
        sys.exit(1)


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first line of the script on, if it has some."""
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename.startswith((*OURS, "<frozen runpy>")):
        own = own.tb_next
    return own or trace
