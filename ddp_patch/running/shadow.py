"""A scratch world for the files of a rank that only shadows the first one.

The first rank is the script: what it writes is what a user finds. Every other rank runs the same lines, so it makes the
same folders, removes the same files and reads back what it wrote. It does all that in a folder of its own, laid over the
file system: what it has written lies there, what it has not touched is read where it is, and what it has removed is
noted as gone. So each rank sees the world that it made, and no idiom of saving needs a rule of its own.

Source:
    The words and rules of Linux' overlayfs: copy up before a change, an upper folder that hides the lower one.
"""

import bz2  # noqa: F401 - its open is replaced
import errno
import io
import os
import shutil
import stat
import tarfile  # noqa: F401 - as above
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from getpass import getuser
from multiprocessing.util import get_temp_dir
from types import SimpleNamespace
from typing import Any, TypeAlias, cast
from unittest.mock import patch

import torch
from numpy.lib import _datasource

__all__ = ["Overlay", "shadowed"]

_PathLike: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"

# Read and written where they are: devices, and caches. Programs let several processes write these at once, and compilers
# and libraries in C read them.
_DEVICES = ("/dev", "/proc", "/sys")
_CACHES = {
    "XDG_CACHE_HOME": "~/.cache",
    "HF_HOME": "~/.cache/huggingface",
    "TORCH_HOME": "~/.cache/torch",
    "TRITON_CACHE_DIR": "~/.triton",
    "MPLCONFIGDIR": "~/.config/matplotlib",
}
_MOST_LINKS = 40  # as Linux follows them

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_ANONYMOUS = os.O_TMPFILE

# Functions of ``os`` that look at the path that is their first argument; those that change what lies there.
_LOOKS = ("access", "getxattr", "listxattr", "lstat", "pathconf", "readlink", "stat", "statvfs")
_CHANGES = ("chmod", "chown", "lchown", "removexattr", "setxattr", "truncate", "utime")
_OF_LINKS = {"lstat", "readlink", "lchown"}  # which are about a link, not what it names

# The functions themselves, before any is replaced.
_real = SimpleNamespace(**{name: function for name, function in vars(os).items() if callable(function)})
_open, _save, _load = io.open, torch.save, torch.load


class Overlay:
    """A folder laid over the file system.

    A path is *seen* as the script names it, whole and without links; it *lies* in the folder if it was written, else
    where it is seen.

    Args:
        folder: The folder, which is there.
        left_alone: Folders that are read and written where they are.
    """

    def __init__(self, folder: str, left_alone: tuple[str, ...] = ()) -> None:
        self._folder, self._here = folder, _real.getcwd()
        self._left_alone = tuple(f"{each}{os.sep}" for each in (folder, *left_alone))
        self._gone: set[str] = set()  # removed; or made anew, so that what was there before is not seen

    # ---- where things are ----

    def seen(self, path: _PathLike, *, follow: bool = True) -> str:
        """Return a path whole, with links followed; that of a link itself if ``follow`` is false."""
        text = os.fsdecode(path)
        if not text:
            return ""  # which no function takes
        found, links = os.sep, 0
        todo = [*reversed(os.path.join(self._here, text).split(os.sep))]
        while todo:
            part = todo.pop()
            if part in {"", os.curdir}:
                continue
            if part == os.pardir:
                found = os.path.dirname(found)
                continue
            found = os.path.join(found, part)
            target = self._link(found) if follow or any(todo) else None
            if target is None or links == _MOST_LINKS:
                continue
            links += 1
            todo += reversed(target.split(os.sep))
            found = os.sep if target.startswith(os.sep) else os.path.dirname(found)
        return found

    def _link(self, seen: str) -> str | None:
        try:
            return cast(str, _real.readlink(self.lies(seen)))
        except OSError:
            return None

    def lies(self, seen: str) -> str:
        """Return where to read what is seen at a path; where nothing is, if nothing is seen there."""
        if not seen or self._is_left_alone(seen):
            return seen
        above = self._above(seen)
        try:
            _real.lstat(above)
        except FileNotFoundError:
            return above if self._is_hidden(seen) else seen
        except (OSError, ValueError):  # which whoever asks for it gets, too
            return above
        return above

    def made(self, seen: str, *, copied: bool = False) -> str:
        """Return where to write what will be seen at a path.

        Args:
            seen: The path.
            copied: Whether what is seen there now is to be changed, not replaced.
        """
        if not seen or self._is_left_alone(seen):
            return seen
        parent = os.path.dirname(seen)
        if _is_folder(self.lies(parent)):
            _make_folders(self._above(parent))
        if copied:
            self._copy_up(seen)
        return self._above(seen)

    def _copy_up(self, seen: str) -> None:
        """Copy what is seen at a path, and all that is in it, to where it will lie."""
        above, lies = self._above(seen), self.lies(seen)
        if _is_folder(lies, follow=False):
            _make_folders(above)
            for name in self.names(seen):
                self._copy_up(os.path.join(seen, name))
        elif lies != above and _is_link(lies):
            _real.symlink(_real.readlink(lies), above)
        elif lies != above and _is_there(lies):
            with _open(lies, "rb") as source, _open(above, "wb") as target:
                shutil.copyfileobj(source, target)
            found = _real.stat(lies)
            _real.chmod(above, stat.S_IMODE(found.st_mode))
            _real.utime(above, ns=(found.st_atime_ns, found.st_mtime_ns))

    def _above(self, seen: str) -> str:
        return self._folder + seen

    def _is_left_alone(self, seen: str) -> bool:
        return f"{seen}{os.sep}".startswith(self._left_alone)

    def _is_hidden(self, seen: str) -> bool:
        """Return whether a path, or a folder that it is in, was removed."""
        if not self._gone:
            return False
        while seen not in self._gone:
            if seen == os.sep:
                return False
            seen = os.path.dirname(seen)
        return True

    def names(self, seen: str) -> list[str]:
        """Return the names in a folder."""
        above, found = self._above(seen), dict[str, None]()
        if not self._is_hidden(seen) and _is_folder(seen):
            found = {name: None for name in _real.listdir(seen) if os.path.join(seen, name) not in self._gone}
        if not self._is_left_alone(seen) and _is_folder(above):
            found |= dict.fromkeys(_real.listdir(above))
        return list(found) if found or _is_folder(self.lies(seen)) else cast("list[str]", _real.listdir(self.lies(seen)))

    def _forget(self, seen: str) -> None:
        """Note that what is there, besides what was written, is seen no longer."""
        if not self._is_left_alone(seen) and _is_there(seen):
            self._gone.add(seen)

    # ---- what the script does ----

    def open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        """Open a file, as ``open``."""
        if isinstance(file, int) or not isinstance(mode, str):
            return _open(file, mode, *args, **options)
        seen = self.seen(file, follow="x" not in mode)
        lies = self.lies(seen)
        if not {*mode} & {*"wax+"} or _is_folder(lies):  # a folder: an error, or where a temporary file is opened
            return _open(lies, mode, *args, **options)
        if "x" in mode:
            self._require_new(file, seen)
        elif "r" in mode:
            _real.stat(lies)
        return _open(self.made(seen, copied="a" in mode or "r" in mode), mode, *args, **options)

    def os_open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        """Open a file, as ``os.open``."""
        seen = self.seen(path, follow=not flags & os.O_EXCL)
        if not flags & _WRITES or flags & _ANONYMOUS == _ANONYMOUS:
            return cast(int, _real.open(self.lies(seen), flags, mode))
        if flags & os.O_EXCL:
            self._require_new(path, seen)
        elif not flags & os.O_CREAT:
            _real.stat(self.lies(seen))
        return cast(int, _real.open(self.made(seen, copied=not flags & os.O_TRUNC), flags, mode))

    def _require_new(self, path: Any, seen: str) -> None:
        if _is_there(self.lies(seen)):
            raise _os_error(errno.EEXIST, path)

    def _require_empty(self, path: Any, seen: str) -> None:
        lies = self.lies(seen)
        if _is_folder(lies, follow=False) and self.names(seen):
            raise _os_error(errno.ENOTEMPTY, path)

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        """Make a folder, as ``os.mkdir``."""
        seen = self.seen(path, follow=False)
        self._require_new(path, seen)
        _real.mkdir(self.made(seen), mode)

    def remove(self, path: Any) -> None:
        """Remove a file, as ``os.remove``."""
        seen = self.seen(path, follow=False)
        lies = self.lies(seen)
        is_file = _is_there(lies) and not _is_folder(lies, follow=False)
        if not is_file or lies != seen or self._is_left_alone(seen):
            _real.unlink(lies)
        self._forget(seen)

    def rmdir(self, path: Any) -> None:
        """Remove an empty folder, as ``os.rmdir``."""
        seen = self.seen(path, follow=False)
        lies = self.lies(seen)
        self._require_empty(path, seen)
        if not _is_folder(lies, follow=False) or lies != seen or self._is_left_alone(seen):
            _real.rmdir(lies)
        self._forget(seen)

    def rename(self, src: Any, dst: Any) -> None:
        """Rename a file or folder, as ``os.rename`` and ``os.replace``."""
        before, after = (self.seen(each, follow=False) for each in (src, dst))
        _real.lstat(self.lies(before))
        if before == after:
            return
        if f"{after}{os.sep}".startswith(f"{before}{os.sep}"):
            raise _os_error(errno.EINVAL, src)
        are_folders = [_is_folder(self.lies(each), follow=False) for each in (before, after)]
        if _is_there(self.lies(after)) and are_folders[0] != are_folders[1]:
            raise _os_error(errno.ENOTDIR if are_folders[0] else errno.EISDIR, dst)
        self._require_empty(dst, after)
        _real.replace(self.made(before, copied=True), self.made(after))
        self._forget(before)
        self._forget(after)

    def link(self, src: Any, dst: Any, **options: Any) -> None:
        """Give a file a second name, as ``os.link``."""
        after = self.seen(dst, follow=False)
        self._require_new(dst, after)
        before = self.made(self.seen(src, follow=False), copied=True)  # Linux links a link itself
        _real.link(before, self.made(after), **options)

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False) -> None:
        """Make a link, as ``os.symlink``."""
        seen = self.seen(dst, follow=False)
        self._require_new(dst, seen)
        _real.symlink(src, self.made(seen), target_is_directory)

    def chdir(self, path: Any) -> None:
        """Change the current folder, as ``os.chdir``."""
        seen = self.seen(path)
        _real.chdir(self.lies(seen))
        self._here = seen

    def getcwd(self) -> str:
        """Return the current folder, as ``os.getcwd``."""
        return self._here

    def listdir(self, path: Any = ".") -> list[Any]:
        """Return the names in a folder, as ``os.listdir``."""
        names = self.names(self.seen("." if path is None else path))
        return list(map(os.fsencode, names)) if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        """Return what is in a folder, as ``os.scandir``."""
        folder = os.fspath("." if path is None else path)
        return _Entries([_Entry(folder, name) for name in self.listdir(folder)])

    def looking(self, function: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        """Call a function of ``os`` that looks at what is seen at a path."""
        follow = function.__name__ not in _OF_LINKS and options.get("follow_symlinks", True)
        return function(self.lies(self.seen(path, follow=follow)), *args, **options)

    def changing(self, function: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        """Call a function of ``os`` that changes what is seen at a path."""
        follow = function.__name__ not in _OF_LINKS and options.get("follow_symlinks", True)
        return function(self.made(self.seen(path, follow=follow), copied=True), *args, **options)

    def save(self, obj: Any, f: Any, *args: Any, **options: Any) -> None:
        """Save, as ``torch.save``, which opens a path in C."""
        _save(obj, self.made(self.seen(f)) if isinstance(f, str | os.PathLike) else f, *args, **options)

    def load(self, f: Any, *args: Any, **options: Any) -> Any:
        """Load, as ``torch.load``, which may open a path in C."""
        return _load(self.lies(self.seen(f)) if isinstance(f, str | os.PathLike) else f, *args, **options)


class _Entry:
    """What ``os.scandir`` yields.

    Args:
        folder: The folder, as it was given.
        name: A name in it.
    """

    def __init__(self, folder: Any, name: Any) -> None:
        self.name: Any = name
        self.path: Any = os.path.join(folder, name)

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, follow_symlinks=False)

    def _is(self, kind: Callable[[int], bool], follow_symlinks: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow_symlinks).st_mode)
        except FileNotFoundError:
            return False

    def is_junction(self) -> bool:
        return False


class _Entries:
    """What ``os.scandir`` returns: an iterator that can be closed."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _os_error(number: int, path: Any) -> OSError:
    """Return the error that the system has for this; its class follows from the number."""
    return OSError(number, os.strerror(number), os.fsdecode(path))


def _mode(look: Callable[[str], os.stat_result], place: str) -> int:
    """Return the mode of what lies at a place; 0 if nothing does."""
    try:
        return look(place).st_mode
    except (OSError, ValueError):
        return 0


def _is_there(place: str) -> bool:
    return _mode(_real.lstat, place) != 0


def _is_folder(place: str, *, follow: bool = True) -> bool:
    return stat.S_ISDIR(_mode(_real.stat if follow else _real.lstat, place))


def _is_link(place: str) -> bool:
    return stat.S_ISLNK(_mode(_real.lstat, place))


def _make_folders(place: str) -> None:
    if not _is_there(place):
        _make_folders(os.path.dirname(place))
        _real.mkdir(place)


# How functions of ``os`` are given an open folder, in which a path is.
_IN_FOLDERS = ("dir_fd", "src_dir_fd", "dst_dir_fd")


def _of_paths(real: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return our function in the place of a real one, which is called for open files, and paths in open folders."""

    @wraps(real)
    def call(*args: Any, **options: Any) -> Any:
        if any(options.get(name) is not None for name in _IN_FOLDERS) or (args and isinstance(args[0], int)):
            return real(*args, **options)
        return ours(*args, **{name: value for name, value in options.items() if name not in _IN_FOLDERS})

    return call


def _caches() -> list[str]:
    """Return the folders of caches."""
    compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{getuser()}")
    caches = [os.environ.get(name, usual) for name, usual in _CACHES.items()]
    caches += [os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled)]
    return [os.path.realpath(os.path.expanduser(cache)) for cache in caches]


@contextmanager
def shadowed(folder: str) -> Iterator[None]:
    """Let all files that this process and its forks write lie in a folder, while entered.

    Args:
        folder: The folder, which is there.
    """
    # Sockets of multiprocessing are made in C, in a folder that is made when it is first asked for.
    overlay = Overlay(os.path.realpath(folder), (*_DEVICES, os.path.realpath(get_temp_dir()), *_caches()))
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
    functions |= {name: partial(overlay.looking, getattr(_real, name)) for name in _LOOKS}
    functions |= {name: partial(overlay.changing, getattr(_real, name)) for name in _CHANGES}
    replaced: dict[str, Any] = {
        **{f"os.{name}": _of_paths(getattr(_real, name), ours) for name, ours in functions.items()},
        "os.getcwd": overlay.getcwd,
        "os.getcwdb": lambda: os.fsencode(overlay.getcwd()),
        "shutil._use_fd_functions": False,  # rmtree goes by paths, wherever it was imported
        "torch.save": overlay.save,
        "torch.load": overlay.load,
        **dict.fromkeys(("builtins.open", "io.open", "tarfile.bltn_open", "bz2._builtin_open"), overlay.open),
    }
    openers = _datasource._file_openers
    openers.keys()  # which numpy fills in at the first use
    if hasattr(shutil, "_rmtree_impl"):  # as of Python 3.13
        replaced["shutil._rmtree_impl"] = shutil._rmtree_unsafe
    with ExitStack() as stack:
        for name, ours in replaced.items():
            stack.enter_context(patch(name, ours))
        stack.enter_context(patch.dict(openers._file_openers, {None: overlay.open}))
        yield
