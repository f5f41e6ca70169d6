"""A scratch world for the files of a rank that only shadows the first one.

The first rank is the script: what it writes is what a user finds. Every other rank runs the same lines, so it makes
the same folders, removes the same files and reads back what it wrote. It does all that in a layer of its own, over the
file system as that was when the run began. So each rank sees the world that it made, and no idiom of saving needs a
rule of its own. There are two layers: before the first rank changes what is at a path, it takes that into the past;
before another one does, it takes it into its own, and the call is then made there.

Source:
    The words and rules of Linux' overlayfs: copy up before a change, an upper folder that hides the lower one.
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

# What a call does at a path: it looks, or it changes what is there, and follows links; or it changes which file has the
# name; or it also moves all that is in a folder.
_How: TypeAlias = Literal["", "seen", "changed", "replaced", "moved"]

# Functions of ``os`` that look at the path that is their first argument; those that change what is at their paths. Of
# what some change, such as a file's mode, the first rank keeps nothing.
_LOOKS = ("access", "getxattr", "listxattr", "lstat", "pathconf", "readlink", "stat", "statvfs")
_TOUCHES = ("chmod", "chown", "lchown", "removexattr", "setxattr", "utime")
_CHANGES: dict[str, tuple[_How, ...]] = {
    **dict.fromkeys(("mkdir", "remove", "rmdir", "unlink"), ("replaced",)),
    **dict.fromkeys(("rename", "replace"), ("moved", "replaced")),
    "link": ("changed", "replaced"),  # as may be by its other name
    "symlink": ("", "replaced"),
    "truncate": ("changed",),
}
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
    "TORCHINDUCTOR_CACHE_DIR": "~/.cache/torch",
}

# What opens the path that it is given in C.
_OPENED_IN_C: list[tuple[Any, str, tuple[_How, ...]]] = [
    (torch, "save", ("", "changed")),
    (torch, "load", ("seen",)),
    (torch.jit, "save", ("", "changed")),
    (torch.jit, "load", ("seen",)),
    (torch.jit.RecursiveScriptModule, "save", ("", "changed")),  # type: ignore[attr-defined]  # torch does not list it
]
# The functions themselves, before any is replaced.
real: Any = SimpleNamespace(**{name: function for name, function in vars(os).items() if callable(function)})
open_file: Any = io.open


def _mode(place: str) -> int:
    """Return the mode of what lies at a place, which may be a link; 0 if nothing does."""
    try:
        mode: int = real.lstat(place).st_mode
    except (OSError, ValueError):
        return 0
    return mode


def _is_folder(place: str) -> bool:
    return stat.S_ISDIR(_mode(place))


def _make_folders(place: str) -> None:
    """Make a folder, and those that it is in."""
    if not _mode(place):
        _make_folders(os.path.dirname(place))
        with suppress(FileExistsError):  # another rank made it meanwhile
            real.mkdir(place)


class Layer:
    """Files that lie in a folder, over those of another layer, or of the disk.

    Paths are whole, without links.

    Args:
        folder: The folder.
        below: The layer below; None for the disk.
        left_alone: Beginnings of paths that are read and written where they are.
    """

    def __init__(self, folder: str, below: "Layer | None" = None, left_alone: tuple[str, ...] = ()) -> None:
        self.files: str = os.path.join(folder, "files")
        self._folder, self._below, self._left_alone = folder, below, left_alone
        self._hidden = os.path.join(folder, "hidden")
        self._linked: dict[tuple[int, int], str] = {}  # by the file: what lies here and is a second name of it

    def is_left_alone(self, path: str) -> bool:
        """Return whether a path is read and written where it is."""
        return f"{path}{os.sep}".startswith(self._left_alone)

    def lies(self, path: str) -> str:
        """Return where what is seen at a path lies; where nothing is, if nothing is seen there."""
        here = self.files + path
        if self.is_left_alone(path):
            return path
        if _mode(here) or self._hides(path):
            return here
        return path if self._below is None else self._below.lies(path)

    def names(self, path: str) -> list[str]:
        """Return the names in a folder."""
        lies, found = self.lies(path), set[str]()
        if self.is_left_alone(path) or not _is_folder(lies):
            return list(real.listdir(lies))
        names_below = real.listdir if self._below is None else self._below.names
        for names, folder in ((names_below, path), (real.listdir, self.files + path)):
            with suppress(FileNotFoundError, NotADirectoryError):
                found.update(names(folder))
        return sorted(name for name in found if _mode(self.lies(os.path.join(path, name))))

    def _hides(self, path: str) -> bool:
        """Return whether what is below is not seen at a path: a file marks that, or a folder that it is in."""
        try:
            return stat.S_ISREG(real.lstat(self._hidden + path).st_mode)
        except NotADirectoryError:
            return True
        except (OSError, ValueError):
            return False

    def hide(self, path: str) -> None:
        """Let nothing of what is below be seen at a path, and in it."""
        mark = self._hidden + path
        if _is_folder(mark):
            shutil.rmtree(mark)
        with suppress(NotADirectoryError):  # the folder that it is in is hidden
            _make_folders(os.path.dirname(mark))
            with open_file(mark, "w"):
                pass

    def take(self, path: str, how: _How, *, links: bool = False) -> None:
        """Take what is seen at a path into this layer, before it changes.

        Args:
            path: The path.
            how: What changes.
            links: Whether a second name will do for a file whose name changes, as it does for what will not be changed
                here.
        """
        here, lies = self.files + path, self.lies(path)
        if links and how == "changed" and _mode(path) and (second := self._linked.pop(_file_at(path), "")):
            self._copy(second, second)  # its file was moved, or not removed, and now changes
        if _is_folder(lies):
            _make_folders(here)
            for name in self.names(path) if how == "moved" else ():
                self.take(os.path.join(path, name), how, links=links)
        elif lies == here:
            return
        elif stat.S_ISREG(_mode(lies)) or stat.S_ISLNK(_mode(lies)):  # not a pipe, say, which holds nothing
            _make_folders(os.path.dirname(here))
            if links and how != "changed":
                with suppress(OSError):  # not on one disk
                    real.link(lies, here, follow_symlinks=False)
                    self._linked[_file_at(here)] = here
                    return
            self._copy(lies, here)
        elif not _mode(lies):
            self.hide(path)

    def _copy(self, source: str, target: str) -> None:
        """Copy a file or a link, so that others see all of it or nothing."""
        part = os.path.join(self._folder, f"{os.getpid()}-{get_ident()}")
        if stat.S_ISLNK(_mode(source)):
            real.symlink(real.readlink(source), part)
        else:
            with open_file(source, "rb") as read, open_file(part, "wb") as write:
                shutil.copyfileobj(read, write)
            found = real.stat(source)
            real.chmod(part, stat.S_IMODE(found.st_mode))
            real.utime(part, ns=(found.st_atime_ns, found.st_mtime_ns))
        real.replace(part, target)


def _file_at(place: str) -> tuple[int, int]:
    """Return what tells a file from all others on this machine."""
    found = real.lstat(place)
    return found.st_dev, found.st_ino


def kept(past: Layer, function: Callable[..., Any], hows: Sequence[_How], *args: Any, **options: Any) -> Any:
    """Call a function on the first rank, after what it changes was taken into the past."""
    for path, how in zip(args, hows, strict=False):
        if how not in {"", "seen"} and isinstance(path, str | bytes | os.PathLike):
            text = os.path.abspath(os.fsdecode(path))
            whole = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))
            whole = os.path.realpath(whole) if how == "changed" else whole
            if not past.is_left_alone(whole):
                with suppress(OSError):  # no reason for the first rank to fail: others then see what it makes of it
                    past.take(whole, how, links=True)
    return function(*args, **options)


class Shadow:
    """What another rank sees and calls.

    Args:
        layer: Its layer, over the past.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._here: str = real.getcwd()

    def _seen(self, path: Any, *, follow: bool = True) -> str:
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
            lies = self._layer.lies(found) if follow or any(todo) else ""
            if stat.S_ISLNK(_mode(lies)) and links < _MOST_LINKS:
                links, target = links + 1, real.readlink(lies)
                todo += reversed(target.split(os.sep))
                found = os.sep if target.startswith(os.sep) else os.path.dirname(found)
        return found

    def call(self, function: Callable[..., Any], hows: Sequence[_How], *args: Any, **options: Any) -> Any:
        """Call a function on what is seen at its paths, taken into the layer before; if it fails, take that back."""
        layer, given, renamed, stubs = self._layer, [*args], list[str](), list[str]()
        for at, (path, how) in enumerate(zip(args, hows, strict=False)):
            if not how or not isinstance(path, str | bytes | os.PathLike):
                continue
            is_followed = how in {"seen", "changed"} and function.__name__ not in _OF_LINKS
            seen = self._seen(path, follow=is_followed and options.get("follow_symlinks", True))
            given[at] = seen and layer.lies(seen)
            if how == "seen" or not seen or layer.is_left_alone(seen):
                continue
            given[at] = layer.files + seen
            if _is_folder(layer.lies(os.path.dirname(seen))):
                _make_folders(os.path.dirname(given[at]))
            if how == "replaced":
                stubs += self._stubs(seen)
            else:
                layer.take(seen, how)
            renamed += [seen] if how in {"replaced", "moved"} else []
        try:
            result = function(*given, **options)
        except OSError:
            for stub in stubs:
                real.unlink(stub)
            raise
        for seen in renamed:
            layer.hide(seen)
        return result

    def _stubs(self, seen: str) -> Iterator[str]:
        """Make what is as much in a call's way as what is seen at a path; yield what has to go if the call fails."""
        stub, lies = self._layer.files + seen, self._layer.lies(seen)
        is_needed = lies != stub and _mode(lies) != 0
        if _is_folder(lies):
            _make_folders(stub)
            is_needed = not real.listdir(stub) and bool(self._layer.names(seen))
            stub = os.path.join(stub, "stub")
        if is_needed:
            with open_file(stub, "w"):
                yield stub

    def chdir(self, path: Any) -> None:
        """Change the current folder, as ``os.chdir``."""
        self.call(real.chdir, ("seen",), path)
        self._here = self._seen(path)

    def getcwd(self) -> str:
        """Return the current folder, as ``os.getcwd``."""
        return self._here

    def listdir(self, path: Any = ".") -> list[Any]:
        """Return the names in a folder, as ``os.listdir``."""
        names = self._layer.names(self._seen("." if path is None else path))
        return list(map(os.fsencode, names)) if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        """Return what is in a folder, as ``os.scandir``."""
        folder: Any = os.fspath("." if path is None else path)
        return entries_of(_Entry(folder, name) for name in self.listdir(folder))


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
    """What ``os.scandir`` returns: an iterator that can be entered and closed."""

    def __init__(self, entries: Iterator[Any]) -> None:
        super().__init__()
        self._entries = entries

    def __next__(self) -> Any:
        return next(self._entries)


def entries_of(entries: Iterable[Any]) -> Any:
    """Return what ``os.scandir`` returns, with these entries."""
    return _Entries(iter(entries))


# ---- to let a rank see its world ----


def _places_left_alone() -> tuple[str, ...]:
    """Return how paths begin that are read and written where they are."""
    caches = (os.environ.get(name) or usual for name, usual in _CACHES.items())
    # Sockets of multiprocessing are made in C, in a folder that is made when it is first asked for.
    places = (os.path.realpath(os.path.expanduser(each)) for each in (*_DEVICES, get_temp_dir(), *caches))
    compiled = os.path.join(os.path.realpath(tempfile.gettempdir()), "torchinductor_")  # and the user's name
    return *(f"{each}{os.sep}" for each in places), compiled


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
    left_alone = (f"{home}{os.sep}", *_places_left_alone())
    past = Layer(os.path.join(home, "past"), None, left_alone)
    try:
        with ExitStack() as stack:
            _put_over_os(past, None if rank == 0 and writes else Shadow(Layer(own, past, left_alone)), stack)
            yield
    finally:
        if not keep:
            shutil.rmtree(own, ignore_errors=True)
            with suppress(FileNotFoundError):  # another rank has removed it
                if not any(name.startswith("rank-") for name in os.listdir(home)):
                    shutil.rmtree(home, ignore_errors=True)


def _put_over_os(past: Layer, shadow: Shadow | None, stack: ExitStack) -> None:
    """Let all that opens, finds, changes and removes files go through a world, until the stack closes."""
    call: Callable[..., Any] = partial(kept, past) if shadow is None else shadow.call

    def open_any(file: Any, mode: Any = "r", *args: Any, **options: Any) -> Any:
        kinds = {*mode} if isinstance(mode, str) else set[str]()
        how = "replaced" if "x" in kinds else "changed" if kinds & {*"wa+"} else "seen"
        return call(open_file, (how,), file, mode, *args, **options)

    def open_by_flags(path: Any, flags: int, *args: Any, **options: Any) -> Any:
        how = "replaced" if flags & os.O_EXCL else "changed" if flags & _CREATES else "seen"
        return call(real.open, (how,), path, flags, *args, **options)

    calls, functions = {**_CHANGES}, dict[str, Callable[..., Any]](open=open_by_flags)
    if shadow is not None:
        calls |= dict.fromkeys(_LOOKS, ("seen",)) | dict.fromkeys(_TOUCHES, ("changed",))
        functions |= {name: getattr(shadow, name) for name in ("chdir", "listdir", "scandir")}
        stack.enter_context(patch.object(os, "getcwd", shadow.getcwd))
        stack.enter_context(patch.object(os, "getcwdb", lambda: os.fsencode(shadow.getcwd())))
    functions |= {name: partial(call, getattr(real, name), hows) for name, hows in calls.items()}
    for name, ours in functions.items():
        stack.enter_context(patch.object(os, name, _of_paths(getattr(real, name), ours)))
    stack.enter_context(files_opened_by(open_any))
    for owner, name, hows in _OPENED_IN_C:
        stack.enter_context(patch.object(owner, name, _bound(call, getattr(owner, name), hows)))


def _bound(through: Callable[..., Any], function: Callable[..., Any], hows: Sequence[_How]) -> Callable[..., Any]:
    """Return a function that goes through a world, whether its path is given by position or by name."""
    takes = signature(function)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        bound = takes.bind(*args, **options)
        return through(function, hows, *bound.args, **bound.kwargs)

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
