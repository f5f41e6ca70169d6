"""Give every rank but the first one a world of its own for its files, and keep what was for them."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from getpass import getuser
from multiprocessing.util import get_temp_dir
from typing import Any
from unittest.mock import patch

import torch

from ddp_patch.compat.files import files_opened_by
from ddp_patch.running.overlay import MAY_CREATE, UNNAMED, Overlay
from ddp_patch.running.past import Past, is_there, make_folders, open_file, real

__all__ = ["is_shadowed", "shadowed"]


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


class Keeper:
    """Lets the first rank keep what was, before it changes it.

    Args:
        past: What was.
        left_alone: Folders that are of no interest.
    """

    def __init__(self, past: Past, left_alone: Sequence[str]) -> None:
        self._past = past
        self._left_alone = tuple(f"{each}{os.sep}" for each in left_alone)

    def _whole(self, path: Any, *, follow: bool) -> str | None:
        """Return a path whole, and without links; None for an open file, or what is of no interest."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        text = os.path.abspath(os.fsdecode(path))
        whole = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))
        whole = os.path.realpath(whole) if follow else whole
        return None if f"{whole}{os.sep}".startswith(self._left_alone) else whole

    def _about_to_write(self, path: Any) -> None:
        if (whole := self._whole(path, follow=True)) is not None:
            self._past.keep(whole, in_place=True)

    def open(self, file: Any, mode: Any = "r", *args: Any, **options: Any) -> Any:
        """Open a file, as ``open``."""
        if isinstance(mode, str) and {*mode} & {*"wax+"}:
            self._about_to_write(file)
        return open_file(file, mode, *args, **options)

    def os_open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        """Open a file, as ``os.open``."""
        if flags & MAY_CREATE and flags & UNNAMED != UNNAMED:
            self._about_to_write(path)
        return int(real.open(path, flags, *args, **options))

    def truncate(self, path: Any, length: int) -> None:
        """Cut a file, as ``os.truncate``."""
        self._about_to_write(path)
        real.truncate(path, length)

    def _about_to_make(self, path: Any) -> None:
        if (whole := self._whole(path, follow=False)) is not None and not is_there(whole):
            self._past.keep(whole, in_place=False)

    def mkdir(self, path: Any, *args: Any, **options: Any) -> None:
        """Make a folder, as ``os.mkdir``."""
        self._about_to_make(path)
        real.mkdir(path, *args, **options)

    def link(self, src: Any, dst: Any, **options: Any) -> None:
        """Give a file a second name, as ``os.link``."""
        self._about_to_make(dst)
        real.link(src, dst, **options)

    def symlink(self, src: Any, dst: Any, *args: Any, **options: Any) -> None:
        """Make a link, as ``os.symlink``."""
        self._about_to_make(dst)
        real.symlink(src, dst, *args, **options)

    def removing(self, function: Callable[..., Any], path: Any) -> None:
        """Call a function of ``os`` that removes what is at a path."""
        if (whole := self._whole(path, follow=False)) is not None and is_there(whole):
            self._past.keep(whole, in_place=False)
        function(path)

    def renaming(self, function: Callable[..., Any], src: Any, dst: Any) -> None:
        """Call a function of ``os`` that moves what is at a path to another."""
        before, after = (self._whole(path, follow=False) for path in (src, dst))
        if before is not None and is_there(before):
            self._past.keep_all(before)
        if after is not None:
            self._past.keep(after, in_place=False)
        function(src, dst)

    def save(self, obj: Any, f: Any, *args: Any, **options: Any) -> None:
        """Save, as ``torch.save``."""
        self._about_to_write(f)
        _save(obj, f, *args, **options)


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
    past = Past(home)
    try:
        with ExitStack() as stack:
            if rank == 0 and writes:
                _keep(stack, Keeper(past, left_alone))
            else:
                _lay_over(stack, Overlay(own, past, left_alone))
            _entered = True
            yield
    finally:
        _entered = False
        if not keep:
            shutil.rmtree(own, ignore_errors=True)
            with suppress(FileNotFoundError):  # another rank has removed it
                if not any(name.startswith("rank-") for name in os.listdir(home)):
                    shutil.rmtree(home, ignore_errors=True)


def _keep(stack: ExitStack, keeper: Keeper) -> None:
    """Let the first rank keep what was, until the stack closes."""
    functions: dict[str, Callable[..., Any]] = {"open": keeper.os_open, "truncate": keeper.truncate}
    functions |= {"mkdir": keeper.mkdir, "link": keeper.link, "symlink": keeper.symlink}
    functions |= {name: partial(keeper.removing, getattr(real, name)) for name in ("remove", "unlink", "rmdir")}
    functions |= {name: partial(keeper.renaming, getattr(real, name)) for name in ("rename", "replace")}
    _replace(stack, functions)
    stack.enter_context(files_opened_by(keeper.open, keeper.save))


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
