"""Scratch worlds for the files of ranks that only shadow the first one.

The first rank is the script: what it writes is what a user finds. Every other rank runs the same lines, so it makes the
same folders, removes the same files and reads back what it wrote. It does all that in a folder of its own, laid over the
file system as that was when the run began. So each rank sees the world that it made, and no idiom of saving needs a rule
of its own.

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
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from getpass import getuser
from multiprocessing.util import get_temp_dir
from types import SimpleNamespace
from typing import Any, TypeAlias, cast
from unittest.mock import patch

import torch
from numpy.lib import _datasource

__all__ = ["Overlay", "Past", "shadowed"]

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


class Past:
    """The file system as it was when the run began.

    The first rank keeps what it is about to change or remove, and notes what it is about to make; others leave that out.

    Args:
        folder: A folder of all ranks on this machine.
    """

    def __init__(self, folder: str) -> None:
        self._kept, self._notes = os.path.join(folder, "kept"), os.path.join(folder, "made")
        self._made: set[str] = set()
        self._known = 0  # how much of the notes was read

    def keep(self, path: str, *, in_place: bool) -> None:
        """Keep what is at a path, on the first rank, which is about to change it; once.

        Args:
            path: The path, whole and without links.
            in_place: Whether the file itself is changed, so that a second name of it would not do.
        """
        kept = self._kept + path
        if self._is_made(path) or (_is_there(kept) and not _is_folder(kept)):
            return
        if not _is_there(path):
            with _open(self._notes, "ab", buffering=0) as notes:
                notes.write(os.fsencode(path) + b"\0")
            return
        if _is_folder(path, follow=False):
            _make_folders(kept)
            return
        _make_folders(os.path.dirname(kept))
        try:
            if in_place:
                raise OSError
            _real.link(path, kept)
        except OSError:  # not on one disk
            _copy(path, f"{kept}.part")
            _real.replace(f"{kept}.part", kept)

    def keep_all(self, path: str) -> None:
        """Keep what is at a path, and all that is in it, on the first rank, which is about to move it."""
        self.keep(path, in_place=False)
        for name in _real.listdir(path) if _is_folder(path, follow=False) else ():
            self.keep_all(os.path.join(path, name))

    def lies(self, path: str) -> str:
        """Return where what was at a path lies now; where nothing is, if nothing was there."""
        kept = self._kept + path
        return kept if _is_there(kept) or self._is_made(path) else path

    def names(self, path: str) -> set[str]:
        """Return the names that were in a folder."""
        found: set[str] = set()
        for folder in (path, self._kept + path):
            if _is_folder(folder):
                found.update(_real.listdir(folder))
        return {name for name in found if _is_there(self.lies(os.path.join(path, name)))}

    def _is_made(self, path: str) -> bool:
        """Return whether the first rank has made what is at a path, or a folder that it is in."""
        try:
            size = _real.stat(self._notes).st_size
        except FileNotFoundError:
            return False
        if size > self._known:
            with _open(self._notes, "rb") as notes:
                notes.seek(self._known)
                self._made.update(os.fsdecode(path) for path in notes.read(size - self._known).split(b"\0") if path)
            self._known = size
        return _is_within(path, self._made)


def _is_within(path: str, places: Container[str]) -> bool:
    """Return whether a path, or a folder that it is in, is one of some places."""
    while path not in places:
        if path == os.sep:
            return False
        path = os.path.dirname(path)
    return True


def _copy(source: str, target: str) -> None:
    """Copy a file or a link."""
    if _is_link(source):
        _real.symlink(_real.readlink(source), target)
        return
    with _open(source, "rb") as read, _open(target, "wb") as write:
        shutil.copyfileobj(read, write)
    found = _real.stat(source)
    _real.chmod(target, stat.S_IMODE(found.st_mode))
    _real.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


class Overlay:
    """A folder laid over the file system.

    A path is *seen* as the script names it, whole and without links; it *lies* in the folder if it was written, else
    where it was in the past.

    Args:
        folder: The folder, which is there.
        past: What lies below.
        left_alone: Folders that are read and written where they are.
    """

    def __init__(self, folder: str, past: Past, left_alone: Sequence[str] = ()) -> None:
        self._folder, self._past, self._here = folder, past, _real.getcwd()
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
            return above if _is_within(seen, self._gone) else self._past.lies(seen)
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
        elif lies != above and _is_there(lies):
            _copy(lies, above)

    def _above(self, seen: str) -> str:
        return self._folder + seen

    def _is_left_alone(self, seen: str) -> bool:
        return f"{seen}{os.sep}".startswith(self._left_alone)

    def names(self, seen: str) -> list[str]:
        """Return the names in a folder."""
        lies = self.lies(seen)
        if self._is_left_alone(seen) or not _is_folder(lies):
            return cast("list[str]", _real.listdir(lies))
        found: set[str] = set()
        if not _is_within(seen, self._gone):
            found = {name for name in self._past.names(seen) if os.path.join(seen, name) not in self._gone}
        if _is_folder(above := self._above(seen)):
            found.update(_real.listdir(above))
        return sorted(found)

    def _forget(self, seen: str) -> None:
        """Note that what is there, besides what was written, is seen no longer."""
        if not self._is_left_alone(seen) and _is_there(self._past.lies(seen)):
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
        if not is_file or lies == self._above(seen) or self._is_left_alone(seen):
            _real.unlink(lies)
        self._forget(seen)

    def rmdir(self, path: Any) -> None:
        """Remove an empty folder, as ``os.rmdir``."""
        seen = self.seen(path, follow=False)
        lies = self.lies(seen)
        self._require_empty(path, seen)
        if not _is_folder(lies, follow=False) or lies == self._above(seen) or self._is_left_alone(seen):
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
        return _open(file, mode, *args, **options)

    def os_open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        """Open a file, as ``os.open``."""
        if flags & _WRITES and flags & _ANONYMOUS != _ANONYMOUS:
            self._about_to_write(path)
        return cast(int, _real.open(path, flags, *args, **options))

    def truncate(self, path: Any, length: int) -> None:
        """Cut a file, as ``os.truncate``."""
        self._about_to_write(path)
        _real.truncate(path, length)

    def _about_to_make(self, path: Any) -> None:
        if (whole := self._whole(path, follow=False)) is not None and not _is_there(whole):
            self._past.keep(whole, in_place=False)

    def mkdir(self, path: Any, *args: Any, **options: Any) -> None:
        """Make a folder, as ``os.mkdir``."""
        self._about_to_make(path)
        _real.mkdir(path, *args, **options)

    def link(self, src: Any, dst: Any, **options: Any) -> None:
        """Give a file a second name, as ``os.link``."""
        self._about_to_make(dst)
        _real.link(src, dst, **options)

    def symlink(self, src: Any, dst: Any, *args: Any, **options: Any) -> None:
        """Make a link, as ``os.symlink``."""
        self._about_to_make(dst)
        _real.symlink(src, dst, *args, **options)

    def removing(self, function: Callable[..., Any], path: Any) -> None:
        """Call a function of ``os`` that removes what is at a path."""
        if (whole := self._whole(path, follow=False)) is not None and _is_there(whole):
            self._past.keep(whole, in_place=False)
        function(path)

    def renaming(self, function: Callable[..., Any], src: Any, dst: Any) -> None:
        """Call a function of ``os`` that moves what is at a path to another."""
        before, after = (self._whole(path, follow=False) for path in (src, dst))
        if before is not None and _is_there(before):
            self._past.keep_all(before)
        if after is not None:
            self._past.keep(after, in_place=False)
        function(src, dst)

    def save(self, obj: Any, f: Any, *args: Any, **options: Any) -> None:
        """Save, as ``torch.save``."""
        self._about_to_write(f)
        _save(obj, f, *args, **options)


_entered = False  # whether this process is in such a world


@contextmanager
def shadowed(rank: int, folder: str) -> Iterator[None]:
    """Let a rank but the first one write into a world of its own, while entered; within one, do nothing.

    Args:
        rank: The rank.
        folder: A folder of all ranks on this machine, which is there.
    """
    global _entered  # noqa: PLW0603 - as functions of os are this process's
    if _entered:
        yield
        return
    home = os.path.realpath(folder)
    # Sockets of multiprocessing are made in C, in a folder that is made when it is first asked for.
    left_alone = (home, *_DEVICES, os.path.realpath(get_temp_dir()), *_caches())
    replaced = (
        _of_first(home, left_alone) if rank == 0 else _of_shadow(os.path.join(home, f"rank-{rank}"), home, left_alone)
    )
    replaced["shutil._use_fd_functions"] = False  # rmtree goes by paths, wherever it was imported
    if hasattr(shutil, "_rmtree_impl"):  # as of Python 3.13
        replaced["shutil._rmtree_impl"] = shutil._rmtree_unsafe
    openers = _datasource._file_openers
    openers.keys()  # which numpy fills in at the first use
    with ExitStack() as stack:
        for name, ours in replaced.items():
            stack.enter_context(patch(name, ours))
        stack.enter_context(patch.dict(openers._file_openers, {None: replaced["io.open"]}))
        _entered = True
        try:
            yield
        finally:
            _entered = False


def _opening(open_file: Callable[..., Any]) -> dict[str, Any]:
    return dict.fromkeys(("builtins.open", "io.open", "tarfile.bltn_open", "bz2._builtin_open"), open_file)


def _of_first(home: str, left_alone: Sequence[str]) -> dict[str, Any]:
    """Return what replaces what on the first rank."""
    keeper = Keeper(Past(home), left_alone)
    functions: dict[str, Callable[..., Any]] = {"open": keeper.os_open, "truncate": keeper.truncate}
    functions |= {"mkdir": keeper.mkdir, "link": keeper.link, "symlink": keeper.symlink}
    functions |= {name: partial(keeper.removing, getattr(_real, name)) for name in ("remove", "unlink", "rmdir")}
    functions |= {name: partial(keeper.renaming, getattr(_real, name)) for name in ("rename", "replace")}
    of_os = {f"os.{name}": _of_paths(getattr(_real, name), ours) for name, ours in functions.items()}
    return {**of_os, **_opening(keeper.open), "torch.save": keeper.save}


def _of_shadow(own: str, home: str, left_alone: Sequence[str]) -> dict[str, Any]:
    """Return what replaces what on another rank."""
    _make_folders(own)
    overlay = Overlay(own, Past(home), left_alone)
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
    return {
        **{f"os.{name}": _of_paths(getattr(_real, name), ours) for name, ours in functions.items()},
        **_opening(overlay.open),
        "os.getcwd": overlay.getcwd,
        "os.getcwdb": lambda: os.fsencode(overlay.getcwd()),
        "torch.save": overlay.save,
        "torch.load": overlay.load,
    }
