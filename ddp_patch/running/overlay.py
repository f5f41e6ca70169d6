"""A scratch world for the files of a rank that only shadows the first one.

The first rank is the script: what it writes is what a user finds. Every other rank runs the same lines, so it makes
the same folders, removes the same files and reads back what it wrote. It does all that in a folder of its own, laid
over the file system as that was when the run began. So each rank sees the world that it made, and no idiom of saving
needs a rule of its own: what a call changes is first lifted into that folder, and the call itself is then made there.

Source:
    The words and rules of Linux' overlayfs: copy up before a change, an upper folder that hides the lower one.
"""

import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from getpass import getuser
from inspect import signature
from multiprocessing.util import get_temp_dir
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias
from unittest.mock import patch

import torch

from ddp_patch.compat.files import files_opened_by

__all__ = ["Past", "open_file", "shadowed"]

_PathLike: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"
# What a call does to a path. By it the first rank keeps what was there, and another one lifts what is seen there:
#   seen       nothing is kept or lifted; links are followed
#   emptied    a copy is kept; something in its place is lifted; links are followed
#   changed    a copy is kept; all of it is lifted; links are followed
#   touched    nothing is kept; all of it is lifted; links are followed
#   replaced   a second name is kept; something in its place is lifted
#   moved      a second name of each file is kept; all of it is lifted
_How: TypeAlias = Literal["", "seen", "emptied", "changed", "touched", "replaced", "moved"]

# Functions of ``os`` that look at the path that is their first argument; those that change what is at their paths.
_LOOKS = ("access", "getxattr", "listxattr", "lstat", "pathconf", "readlink", "stat", "statvfs")
_CHANGES: dict[str, tuple[_How, ...]] = {
    **dict.fromkeys(("chmod", "chown", "lchown", "removexattr", "setxattr", "utime"), ("touched",)),
    **dict.fromkeys(("mkdir", "remove", "rmdir", "unlink"), ("replaced",)),
    **dict.fromkeys(("rename", "replace"), ("moved", "replaced")),
    "link": ("changed", "replaced"),  # as may be by its other name
    "symlink": ("", "replaced"),
    "truncate": ("changed",),
}
_OF_FILES = {"emptied", "changed"}
_OF_LINKS = {"lchown", "link", "lstat", "readlink"}  # which are about a link, not what it names
_CREATES: int = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# How functions of ``os`` are given their paths, and an open folder, in which a path is.
_NAMED = ("path", "src", "dst")
_IN_FOLDERS = ("dir_fd", "src_dir_fd", "dst_dir_fd")
_MOST_LINKS = 40  # as Linux follows them

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

# What opens the path that it is given in C.
_OPENED_IN_C: list[tuple[Any, str, tuple[_How, ...]]] = [
    (torch, "save", ("", "emptied")),
    (torch, "load", ("seen",)),
    (torch.jit, "save", ("", "emptied")),
    (torch.jit, "load", ("seen",)),
    (torch.jit.RecursiveScriptModule, "save", ("", "emptied")),  # type: ignore[attr-defined]  # torch does not list it
]
# The functions themselves, before any is replaced.
real: Any = SimpleNamespace(**{name: function for name, function in vars(os).items() if callable(function)})
open_file: Any = io.open


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
        real.symlink(real.readlink(source), target)
        return
    with open_file(source, "rb") as read, open_file(target, "wb") as write:
        shutil.copyfileobj(read, write)
    found = real.stat(source)
    real.chmod(target, stat.S_IMODE(found.st_mode))
    real.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _mode(place: str, *, follow: bool = False) -> int:
    """Return the mode of what lies at a place; 0 if nothing does."""
    try:
        mode: int = real.stat(place, follow_symlinks=follow).st_mode
    except (OSError, ValueError):
        return 0
    return mode


def _file_at(place: str) -> tuple[int, int]:
    """Return what tells a file from all others on this machine."""
    found = real.stat(place, follow_symlinks=False)
    return found.st_dev, found.st_ino


def _is_folder(place: str, *, follow: bool = False) -> bool:
    return stat.S_ISDIR(_mode(place, follow=follow))


def _is_link(place: str) -> bool:
    return stat.S_ISLNK(_mode(place))


def _make_folders(place: str) -> None:
    """Make a folder, and those that it is in."""
    if not _mode(place):
        _make_folders(os.path.dirname(place))
        with suppress(FileExistsError):  # another rank made it meanwhile
            real.mkdir(place)


def _how_opened(mode: object) -> _How:
    """Return what ``open`` does to a file by its mode."""
    kinds = {*mode} if isinstance(mode, str) else set[str]()
    if "x" in kinds:
        return "replaced"
    return "emptied" if "w" in kinds else "changed" if kinds & {*"a+"} else "seen"


def _how_opened_by(flags: int) -> _How:
    """Return what ``os.open`` does to a file by its flags."""
    if not flags & _CREATES:
        return "seen"
    return "replaced" if flags & os.O_EXCL else "emptied" if flags & os.O_TRUNC else "changed"


class Past:
    """The file system as it was when the run began.

    The first rank keeps what it is about to change or remove, and marks what it is about to make; others leave that
    out.

    Args:
        folder: A folder of all ranks on this machine.
        left_alone: Folders that are read and written where they are.
    """

    def __init__(self, folder: str, left_alone: Sequence[str]) -> None:
        self._left_alone = tuple(f"{each}{os.sep}" for each in left_alone)
        self._kept, self._made = os.path.join(folder, "kept"), os.path.join(folder, "made")
        self._second: dict[tuple[int, int], str] = {}  # by its file: the name that is kept

    def is_left_alone(self, path: str) -> bool:
        """Return whether a path, whole and without links, is in a folder that is read and written where it is."""
        return f"{path}{os.sep}".startswith(self._left_alone)

    def call(self, function: Callable[..., Any], hows: Sequence[_How], *args: Any, **options: Any) -> Any:
        """Call a function on the first rank, and before that keep what is at its paths."""
        for path, how in zip(args, hows, strict=False):
            if how not in {"", "seen", "touched"} and isinstance(path, str | bytes | os.PathLike):
                text = os.path.abspath(os.fsdecode(path))
                whole = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))
                whole = os.path.realpath(whole) if how in _OF_FILES else whole
                if not self.is_left_alone(whole):
                    if how in _OF_FILES:
                        self._keep_apart(whole)
                    self._keep(whole, how)
        return function(*args, **options)

    def _keep(self, path: str, how: _How) -> None:
        kept = self._kept + path
        if how == "moved" and _is_folder(path):
            for name in real.listdir(path):
                self._keep(os.path.join(path, name), how)
        if self._is_made(path) or (_mode(kept) and not _is_folder(kept)):
            return
        if not _mode(path):
            if _mode(os.path.dirname(path)):  # else nothing can be made there yet
                _make_folders(os.path.dirname(self._made + path))
                with suppress(IsADirectoryError), open_file(self._made + path, "w"):
                    pass
        elif _is_folder(path):
            _make_folders(kept)
        elif stat.S_ISREG(_mode(path)) or _is_link(path):  # not a pipe, say, which holds nothing
            _make_folders(os.path.dirname(kept))
            if how not in _OF_FILES:
                with suppress(OSError):  # not on one disk
                    real.link(path, kept)
                    self._second[_file_at(path)] = kept
                    return
            with suppress(OSError):  # no reason for the first rank to fail: the others then see what it makes of it
                _copy(path, f"{kept}.part")
                real.replace(f"{kept}.part", kept)

    def _keep_apart(self, path: str) -> None:
        """Copy a file that is about to change, if what is kept is a second name of it: it was moved, or not removed."""
        with suppress(OSError):
            if kept := self._second.pop(_file_at(path), ""):
                _copy(kept, f"{kept}.part")
                real.replace(f"{kept}.part", kept)

    def _is_made(self, path: str) -> bool:
        """Return whether the first rank has made what is at a path, or a folder that it is in: a file marks it."""
        try:
            return stat.S_ISREG(real.stat(self._made + path).st_mode)
        except NotADirectoryError:
            return True
        except (OSError, ValueError):
            return False

    def lies(self, path: str) -> str:
        """Return where what was at a path lies now; where nothing is, if nothing was there."""
        kept = self._kept + path
        return kept if _mode(kept) or self._is_made(path) else path

    def names(self, path: str) -> set[str]:
        """Return the names that were in a folder."""
        found: set[str] = set()
        for folder in (path, self._kept + path):
            if _is_folder(folder, follow=True):
                found.update(real.listdir(folder))
        return {name for name in found if _mode(self.lies(os.path.join(path, name)))}


class Overlay:
    """A folder laid over the file system.

    A path is *seen* as the script names it, whole and without links; it *lies* in the folder if it was written, else
    where it was in the past.

    Args:
        folder: The folder, which is there.
        past: What lies below.
    """

    def __init__(self, folder: str, past: Past) -> None:
        self._folder, self._past = folder, past
        self._here: str = real.getcwd()
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
            lies = self.lies(found) if follow or any(todo) else ""
            if _is_link(lies) and links < _MOST_LINKS:
                links, target = links + 1, real.readlink(lies)
                todo += reversed(target.split(os.sep))
                found = os.sep if target.startswith(os.sep) else os.path.dirname(found)
        return found

    def lies(self, seen: str) -> str:
        """Return where to read what is seen at a path; where nothing is, if nothing is seen there."""
        if not seen or self._past.is_left_alone(seen):
            return seen
        above = self._folder + seen
        try:
            real.lstat(above)
        except FileNotFoundError:
            return above if _is_within(seen, self._gone) else self._past.lies(seen)
        except (OSError, ValueError):  # which whoever asks for it gets, too
            return above
        return above

    def names(self, seen: str) -> list[str]:
        """Return the names in a folder."""
        lies = self.lies(seen)
        if self._past.is_left_alone(seen) or not _is_folder(lies, follow=True):
            return list(real.listdir(lies))
        found: set[str] = set()
        if not _is_within(seen, self._gone):
            found = {name for name in self._past.names(seen) if os.path.join(seen, name) not in self._gone}
        if _is_folder(above := self._folder + seen):
            found.update(real.listdir(above))
        return sorted(found)

    # ---- what is changed ----

    def call(self, function: Callable[..., Any], hows: Sequence[_How], *args: Any, **options: Any) -> Any:
        """Call a function on what is seen at its paths, lifted into the folder before; if it fails, take that back."""
        given, replaced, stubs = [*args], list[str](), list[str]()
        for at, (path, how) in enumerate(zip(args, hows, strict=False)):
            if not how or not isinstance(path, str | bytes | os.PathLike):
                continue
            is_of_link = how in {"replaced", "moved"} or function.__name__ in _OF_LINKS
            seen = self.seen(path, follow=not is_of_link and options.get("follow_symlinks", True))
            lies = self.lies(seen)
            # A folder that is opened: an error, or where a file without a name is made.
            if how == "seen" or lies == "" or self._past.is_left_alone(seen) or (how in _OF_FILES and _is_folder(lies)):
                given[at] = lies
                continue
            given[at] = self._folder + seen
            if _is_folder(self.lies(os.path.dirname(seen)), follow=True):
                _make_folders(os.path.dirname(given[at]))
            if how in {"replaced", "emptied"}:
                stubs += self._stubs(seen, makes=function.__name__ == "mkdir")
            else:
                self._copy_up(seen)
            replaced += [seen] if how in {"replaced", "moved"} else []
        try:
            result = function(*given, **options)
        except OSError:
            for stub in stubs:
                real.unlink(stub)
            raise
        self._gone.update(seen for seen in replaced if _mode(self._past.lies(seen)))
        return result

    def _stubs(self, seen: str, *, makes: bool) -> Iterator[str]:
        """Make what is as much in a call's way as what is seen at a path; yield what has to go if the call fails.

        Args:
            seen: The path.
            makes: Whether the call makes a folder, so that it is no matter what a folder there holds.
        """
        above, lies = self._folder + seen, self.lies(seen)
        stub = above
        if _is_folder(lies):
            _make_folders(above)
            stub = os.path.join(above, "stub")
            is_needed = not makes and not real.listdir(above) and bool(self.names(seen))
        else:
            is_needed = lies != above and _mode(lies) != 0
        if is_needed:
            with open_file(stub, "w"):
                yield stub

    def _copy_up(self, seen: str) -> None:
        """Copy what is seen at a path, and all that is in it, to where it will lie."""
        above, lies = self._folder + seen, self.lies(seen)
        if _is_folder(lies):
            _make_folders(above)
            for name in self.names(seen):
                self._copy_up(os.path.join(seen, name))
        elif lies != above and _mode(lies):
            _copy(lies, above)

    # ---- what the script calls ----

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
        folder = os.fspath("." if path is None else path)
        return _Entries(iter([_Entry(folder, name) for name in self.listdir(folder)]))


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

    def _mode(self, *, follow: bool) -> int:
        try:
            return os.stat(self.path, follow_symlinks=follow).st_mode
        except FileNotFoundError:
            return 0

    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self._mode(follow=False))

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISDIR(self._mode(follow=follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISREG(self._mode(follow=follow_symlinks))

    def is_junction(self) -> bool:
        return False


class _Entries(ExitStack, Iterator[_Entry]):
    """What ``os.scandir`` returns: an iterator that can be entered and closed."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        super().__init__()
        self._entries = entries

    def __next__(self) -> _Entry:
        return next(self._entries)


# ---- to let a rank see its world ----


@contextmanager
def shadowed(rank: int, folder: str, *, keep: bool = False, writes: bool = True) -> Iterator[None]:
    """Let a rank but the first one write into a world of its own, while entered; the first one keeps what was.

    Args:
        rank: The rank.
        folder: A folder of all ranks on this machine. Whoever leaves last removes it.
        keep: Whether the folder stays.
        writes: Whether the first rank writes where the script says.
    """
    home = os.path.realpath(folder)
    own = os.path.join(home, f"rank-{rank}")
    _make_folders(own)
    # Sockets of multiprocessing are made in C, in a folder that is made when it is first asked for.
    past = Past(home, (home, *_DEVICES, os.path.realpath(get_temp_dir()), *_caches()))
    try:
        with ExitStack() as stack:
            _put_over_os(past if rank == 0 and writes else Overlay(own, past), stack)
            yield
    finally:
        if not keep:
            shutil.rmtree(own, ignore_errors=True)
            with suppress(FileNotFoundError):  # another rank has removed it
                if not any(name.startswith("rank-") for name in os.listdir(home)):
                    shutil.rmtree(home, ignore_errors=True)


def _caches() -> list[str]:
    """Return the folders of caches."""
    compiled = {"TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"torchinductor_{getuser()}")}
    caches = [os.environ.get(name) or usual for name, usual in (_CACHES | compiled).items()]
    return [os.path.realpath(os.path.expanduser(cache)) for cache in caches]


def _put_over_os(world: Past | Overlay, stack: ExitStack) -> None:
    """Let all that opens, finds, changes and removes files go through a world, until the stack closes."""

    def open_any(file: Any, mode: Any = "r", *args: Any, **options: Any) -> Any:
        return world.call(open_file, (_how_opened(mode),), file, mode, *args, **options)

    def open_by_flags(path: Any, flags: int, *args: Any, **options: Any) -> Any:
        return world.call(real.open, (_how_opened_by(flags),), path, flags, *args, **options)

    calls, functions = {**_CHANGES}, dict[str, Callable[..., Any]](open=open_by_flags)
    if isinstance(world, Overlay):
        calls |= dict.fromkeys(_LOOKS, ("seen",))
        functions |= {name: getattr(world, name) for name in ("chdir", "listdir", "scandir")}
        stack.enter_context(patch.object(os, "getcwd", world.getcwd))
        stack.enter_context(patch.object(os, "getcwdb", lambda: os.fsencode(world.getcwd())))
    functions |= {name: partial(world.call, getattr(real, name), hows) for name, hows in calls.items()}
    for name, ours in functions.items():
        stack.enter_context(patch.object(os, name, _of_paths(getattr(real, name), ours)))
    stack.enter_context(files_opened_by(open_any))
    for owner, name, hows in _OPENED_IN_C:
        stack.enter_context(patch.object(owner, name, _bound(world, getattr(owner, name), hows)))


def _bound(world: Past | Overlay, function: Callable[..., Any], hows: Sequence[_How]) -> Callable[..., Any]:
    """Return a function that goes through a world, whether its path is given by position or by name."""
    takes = signature(function)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        bound = takes.bind(*args, **options)
        return world.call(function, hows, *bound.args, **bound.kwargs)

    return call


def _of_paths(of_os: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return our function in the place of one of ``os``, which is called for open files, and paths in open folders."""

    @wraps(of_os)
    def call(*args: Any, **options: Any) -> Any:
        if any(options.get(name) is not None for name in _IN_FOLDERS) or (args and isinstance(args[0], int)):
            return of_os(*args, **options)
        named = [options.pop(name) for name in _NAMED if name in options]
        return ours(*args, *named, **{name: value for name, value in options.items() if name not in _IN_FOLDERS})

    return call
