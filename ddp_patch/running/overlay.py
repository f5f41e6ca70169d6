"""Keep the files of the other ranks, the *shadows*, apart from those of rank 0.

Rank 0 writes where the script says. Every shadow runs the same lines: it makes the same folders, removes the same files
and reads back what it wrote. All its changes go into a layer of its own, over the file system as it was when the run
began. So each rank sees what it has made, and no way of saving needs a special rule.

There are two layers. Before rank 0 changes what is at a path, it copies that into the layer "past", which shadows see.
Before a shadow does, it copies that into its own layer, and makes the call there.

Source:
    Linux' overlayfs: copy up before a change; an upper folder hides a lower one.
"""

import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from inspect import signature
from multiprocessing.util import get_temp_dir
from threading import get_ident
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias
from unittest.mock import patch

import torch

from ddp_patch.compat.files import files_opened_by

# What a call does with a path. "seen" and "changed" are about the file, and follow links. "replaced" and "removed" are
# about the name. "moved" takes all that is in a folder along. Empty: the argument is no path.
_How: TypeAlias = Literal["", "seen", "changed", "replaced", "removed", "moved"]

# Functions of ``os`` by what they do with their paths. Rank 0 keeps no copy for those of _TOUCHES.
_LOOKS = ("access", "getxattr", "listxattr", "lstat", "pathconf", "readlink", "stat", "statvfs")
_TOUCHES = ("chmod", "chown", "lchown", "removexattr", "setxattr", "utime")
_CHANGES: dict[str, tuple[_How, ...]] = {
    **dict.fromkeys(("mkdir", "rmdir"), ("replaced",)),
    **dict.fromkeys(("remove", "unlink"), ("removed",)),
    **dict.fromkeys(("rename", "replace"), ("moved", "replaced")),
    "link": ("changed", "replaced"),  # by its new name, a file may change later
    "symlink": ("", "replaced"),
    "truncate": ("changed",),
}
_OF_LINKS = {"lchown", "link", "lstat", "readlink"}  # these do not follow a link
_CREATES: int = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# The names of arguments that are paths, and of those that are open folders.
_NAMED = ("path", "src", "dst")
_IN_FOLDERS = ("dir_fd", "src_dir_fd", "dst_dir_fd")
_MOST_LINKS = 40  # as Linux follows them

# Devices and caches are read and written where they are: compilers and libraries in C use them, and several processes
# may write a cache at once.
_LEFT_ALONE = ("/dev", "/proc", "/sys", "~/.cache", "~/.triton", "~/.config/matplotlib")
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TRITON_CACHE_DIR", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR")

# Functions that open their path in C.
_OPENED_IN_C: list[tuple[Any, str, tuple[_How, ...]]] = [
    (torch, "save", ("", "changed")),
    (torch, "load", ("seen",)),
    (torch.jit, "save", ("", "changed")),
    (torch.jit, "load", ("seen",)),
    (torch.jit.RecursiveScriptModule, "save", ("", "changed")),  # type: ignore[attr-defined]  # torch does not list it
]
# The functions of the system, before any is replaced.
real: Any = SimpleNamespace(**{name: function for name, function in vars(os).items() if callable(function)})
open_file: Any = io.open


def _mode(place: str) -> int:
    """Return the mode of a file, folder or link at a place; 0 if there is nothing."""
    try:
        mode: int = real.lstat(place).st_mode
    except (OSError, ValueError):
        return 0
    return mode


def _is_folder(place: str) -> bool:
    return stat.S_ISDIR(_mode(place))


def _make_folders(place: str) -> None:
    """Make a folder and its parents."""
    if not _mode(place):
        _make_folders(os.path.dirname(place))
        with suppress(FileExistsError):  # another rank made it meanwhile
            real.mkdir(place)


class World:
    """The file system as a rank sees it: layers over the disk. Paths within are absolute and have no links.

    Args:
        layers: The folders of the layers. The first one is the uppermost, and takes all changes.
        left_alone: Prefixes of paths that are read and written where they are.
    """

    def __init__(self, layers: Sequence[str], left_alone: tuple[str, ...]) -> None:
        self._layers, self._left_alone = layers, left_alone
        self._files = os.path.join(layers[0], "files")
        self._here: str = real.getcwd()

    def is_left_alone(self, path: str) -> bool:
        """Return whether a path is read and written where it is."""
        return f"{path}{os.sep}".startswith(self._left_alone)

    def lies(self, path: str) -> str:
        """Return the place on the disk that a path means. Nothing is there if the path does not exist."""
        for layer in () if self.is_left_alone(path) else self._layers:
            here = f"{layer}/files{path}"
            if _mode(here) or _hides(layer, path):
                return here
        return path

    def names(self, path: str) -> list[str]:
        """Return the names in a folder."""
        lies, found = self.lies(path), set[str]()
        if self.is_left_alone(path) or not _is_folder(lies):
            return list(real.listdir(lies))
        for folder in (path, *(f"{layer}/files{path}" for layer in self._layers)):
            with suppress(FileNotFoundError, NotADirectoryError):
                found.update(real.listdir(folder))
        return sorted(name for name in found if _mode(self.lies(os.path.join(path, name))))

    def hide(self, path: str) -> None:
        """Hide a path of the lower layers, and all that is in it."""
        mark = f"{self._layers[0]}/hidden{path}"
        if _is_folder(mark):
            shutil.rmtree(mark)
        with suppress(NotADirectoryError):  # the folder that it is in is hidden
            _make_folders(os.path.dirname(mark))
            with open_file(mark, "w"):
                pass

    def take(self, path: str, how: _How) -> None:
        """Copy what is at a path into the uppermost layer, before it changes."""
        here, lies = self._files + path, self.lies(path)
        if _is_folder(lies):
            _make_folders(here)
            for name in self.names(path) if how == "moved" else ():
                self.take(os.path.join(path, name), how)
        elif lies != here and not _mode(lies):
            self.hide(path)
        elif lies != here and (stat.S_ISREG(_mode(lies)) or stat.S_ISLNK(_mode(lies))):  # a pipe holds nothing
            _make_folders(os.path.dirname(here))
            if how == "removed":  # nobody changes it any more, so a second name will do
                with suppress(OSError):  # not on one disk
                    real.link(lies, here, follow_symlinks=False)
            if not _mode(here):
                self._copy(lies, here)

    def _copy(self, source: str, target: str) -> None:
        """Copy a file or a link. Other processes see all of it or nothing."""
        part = os.path.join(self._layers[0], f"{os.getpid()}-{get_ident()}")
        if stat.S_ISLNK(_mode(source)):
            real.symlink(real.readlink(source), part)
        else:
            with open_file(source, "rb") as read, open_file(part, "wb") as write:
                shutil.copyfileobj(read, write)
            found = real.stat(source)
            real.chmod(part, stat.S_IMODE(found.st_mode))
            real.utime(part, ns=(found.st_atime_ns, found.st_mtime_ns))
        real.replace(part, target)

    def seen(self, path: Any, *, follow: bool = True) -> str:
        """Return an absolute path without links; only the last name may stay a link, if ``follow`` is false."""
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
            lies = self.lies(found) if follow or any(todo) else ""
            if stat.S_ISLNK(_mode(lies)) and links < _MOST_LINKS:
                links, target = links + 1, real.readlink(lies)
                todo += reversed(target.split(os.sep))
                found = os.sep if target.startswith(os.sep) else os.path.dirname(found)
        return found

    def call(self, function: Callable[..., Any], hows: Sequence[_How], *args: Any, **options: Any) -> Any:
        """Call a function with the places that its paths mean, after what it changes was copied up."""
        given, renamed, stubs = [*args], list[str](), list[str]()
        for at, (path, how) in enumerate(zip(args, hows, strict=False)):
            if not how or not isinstance(path, str | bytes | os.PathLike):
                continue
            is_followed = how in {"seen", "changed"} and function.__name__ not in _OF_LINKS
            seen = self.seen(path, follow=is_followed and options.get("follow_symlinks", True))
            given[at] = seen and self.lies(seen)
            if how == "seen" or not seen or self.is_left_alone(seen):
                continue
            given[at] = self._files + seen
            if _is_folder(self.lies(os.path.dirname(seen))):
                _make_folders(os.path.dirname(given[at]))
            if how in {"replaced", "removed"}:
                stubs += self._stubs(seen)
            else:
                self.take(seen, how)
            renamed += [seen] if how != "changed" else []
        try:
            result = function(*given, **options)
        except OSError:
            for stub in stubs:
                real.unlink(stub)
            raise
        for seen in renamed:
            self.hide(seen)
        return result

    def _stubs(self, seen: str) -> Iterator[str]:
        """Put a stub where a call shall find something in its way; yield what to remove if the call fails."""
        stub, lies = self._files + seen, self.lies(seen)
        is_needed = lies != stub and _mode(lies) != 0
        if _is_folder(lies):
            _make_folders(stub)
            is_needed = not real.listdir(stub) and bool(self.names(seen))
            stub = os.path.join(stub, "stub")
        if is_needed:
            with open_file(stub, "w"):
                yield stub

    def chdir(self, path: Any) -> None:
        """Change the current folder, as ``os.chdir``."""
        self.call(real.chdir, ("seen",), path)
        self._here = self.seen(path)

    def getcwd(self) -> str:
        """Return the current folder, as ``os.getcwd``."""
        return self._here

    def listdir(self, path: Any = ".") -> list[Any]:
        """Return the names in a folder, as ``os.listdir``."""
        names = self.names(self.seen("." if path is None else path))
        return list(map(os.fsencode, names)) if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        """Return what is in a folder, as ``os.scandir``."""
        folder: Any = os.fspath("." if path is None else path)
        return entries_of(_Entry(folder, name) for name in self.listdir(folder))


def _hides(layer: str, path: str) -> bool:
    """Return whether a layer hides a path of the lower ones: a file marks the path, or a folder that it is in."""
    try:
        return stat.S_ISREG(real.lstat(f"{layer}/hidden{path}").st_mode)
    except NotADirectoryError:
        return True
    except (OSError, ValueError):
        return False


class _Entry:
    """An entry of ``os.scandir``."""

    def __init__(self, folder: Any, name: Any) -> None:
        self.name, self.path = name, os.path.join(folder, name)

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def _is(self, of_mode: Callable[[int], bool], *, follow: bool) -> bool:
        with suppress(FileNotFoundError):  # all else is raised, as by os.DirEntry
            return of_mode(os.stat(self.path, follow_symlinks=follow).st_mode)
        return False

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, follow=False)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow=follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow=follow_symlinks)

    def is_junction(self) -> bool:
        return False


class _Entries(ExitStack, Iterator[Any]):
    """The iterator of ``os.scandir``, which can be entered and closed."""

    def __init__(self, entries: Iterator[Any]) -> None:
        super().__init__()
        self._entries = entries

    def __next__(self) -> Any:
        return next(self._entries)


def entries_of(entries: Iterable[Any]) -> Any:
    """Return an iterator as ``os.scandir`` does."""
    return _Entries(iter(entries))


# ---- to let a rank see its world ----


@contextmanager
def shadowed(rank: int, folder: str, *, writes: bool = True) -> Iterator[None]:
    """While entered, let a shadow write into a layer of its own, and let rank 0 keep what it changes.

    Args:
        rank: The rank.
        folder: A folder for the layers of all ranks on this machine. The last rank removes it.
        writes: Whether rank 0 writes where the script says; if not, it is a shadow, too.
    """
    home = os.path.realpath(folder)
    own, past = os.path.join(home, f"rank-{rank}"), os.path.join(home, "past")
    here = real.getcwd()
    _make_folders(own)
    _make_folders(past)
    # Sockets of multiprocessing are made in C, in a folder that is made when it is first asked for.
    places = (*_LEFT_ALONE, *filter(None, map(os.environ.get, _CACHES)), get_temp_dir(), home)
    compiled = os.path.join(os.path.realpath(tempfile.gettempdir()), "torchinductor_")  # and the user's name
    left_alone = *(f"{os.path.realpath(os.path.expanduser(each))}{os.sep}" for each in places), compiled
    try:
        with ExitStack() as stack:
            if rank == 0 and writes:
                _put_over_os(partial(kept, World([past], left_alone)), None, stack)
            else:
                world = World([own, past], left_alone)
                _put_over_os(world.call, world, stack)
            yield
    finally:
        if rank or not writes:
            with suppress(OSError):
                real.chdir(here)  # the present folder may lie in the layer
        shutil.rmtree(own, ignore_errors=True)
        with suppress(FileNotFoundError):  # another rank has removed it
            if not any(name.startswith("rank-") for name in os.listdir(home)):
                shutil.rmtree(home, ignore_errors=True)


def kept(past: World, function: Callable[..., Any], hows: Sequence[_How], *args: Any, **options: Any) -> Any:
    """Call a function on rank 0, after what it changes was copied into the past."""
    for path, how in zip(args, hows, strict=False):
        if how not in {"", "seen"} and isinstance(path, str | bytes | os.PathLike):
            text = os.path.abspath(os.fsdecode(path))
            whole = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))
            whole = os.path.realpath(whole) if how == "changed" else whole
            if not past.is_left_alone(whole):
                with suppress(OSError):  # a full disk, say, is no reason for rank 0 to fail
                    past.take(whole, how)
    return function(*args, **options)


def _put_over_os(call: Callable[..., Any], world: World | None, stack: ExitStack) -> None:
    """Replace all functions that open, find, change and remove files, until the stack closes."""

    def open_any(file: Any, mode: Any = "r", *args: Any, **options: Any) -> Any:
        kinds = {*mode} if isinstance(mode, str) else set[str]()
        how = "replaced" if "x" in kinds else "changed" if kinds & {*"wa+"} else "seen"
        return call(open_file, (how,), file, mode, *args, **options)

    def open_by_flags(path: Any, flags: int, *args: Any, **options: Any) -> Any:
        how = "replaced" if flags & os.O_EXCL else "changed" if flags & _CREATES else "seen"
        return call(real.open, (how,), path, flags, *args, **options)

    calls, functions = {**_CHANGES}, dict[str, Callable[..., Any]](open=open_by_flags)
    if world is not None:
        calls |= dict.fromkeys(_LOOKS, ("seen",)) | dict.fromkeys(_TOUCHES, ("changed",))
        functions |= {name: getattr(world, name) for name in ("chdir", "listdir", "scandir")}
        stack.enter_context(patch.object(os, "getcwd", world.getcwd))
        stack.enter_context(patch.object(os, "getcwdb", lambda: os.fsencode(world.getcwd())))
    functions |= {name: partial(call, getattr(real, name), hows) for name, hows in calls.items()}
    for name, ours in functions.items():
        stack.enter_context(patch.object(os, name, _of_paths(getattr(real, name), ours)))
    stack.enter_context(files_opened_by(open_any))
    for owner, name, hows in _OPENED_IN_C:
        stack.enter_context(patch.object(owner, name, _bound(call, getattr(owner, name), hows)))


def _bound(through: Callable[..., Any], function: Callable[..., Any], hows: Sequence[_How]) -> Callable[..., Any]:
    """Return a function whose path may be given by position or by name."""
    takes = signature(function)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        bound = takes.bind(*args, **options)
        return through(function, hows, *bound.args, **bound.kwargs)

    return call


def _of_paths(of_os: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of a function of ``os``, which itself is called for open files and open folders."""

    @wraps(of_os)
    def call(*args: Any, **options: Any) -> Any:
        if any(options.get(name) is not None for name in _IN_FOLDERS) or (args and isinstance(args[0], int)):
            return of_os(*args, **options)
        named = [options.pop(name) for name in _NAMED if name in options]
        return ours(*args, *named, **{name: value for name, value in options.items() if name not in _IN_FOLDERS})

    return call
