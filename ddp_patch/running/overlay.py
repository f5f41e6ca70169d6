"""A scratch world for the files of a rank that only shadows the first one.

The first rank is the script: what it writes is what a user finds. Every other rank runs the same lines, so it makes
the same folders, removes the same files and reads back what it wrote. It does all that in a folder of its own, laid
over the file system as that was when the run began. So each rank sees the world that it made, and no idiom of saving
needs a rule of its own.

Source:
    The words and rules of Linux' overlayfs: copy up before a change, an upper folder that hides the lower one.
"""

import errno
import io
import os
import shutil
import stat
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

__all__ = ["MAY_CREATE", "UNNAMED", "Overlay", "Past", "make_folders", "open_file", "real"]

_PathLike: TypeAlias = "str | bytes | os.PathLike[str] | os.PathLike[bytes]"

_MOST_LINKS = 40  # as Linux follows them
MAY_CREATE: int = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
UNNAMED: int = os.O_TMPFILE
_OF_LINKS = {"lstat", "readlink", "lchown"}  # which are about a link, not what it names
_save, _load = torch.save, torch.load
# The functions themselves, before any is replaced.
real: Any = SimpleNamespace(**{name: function for name, function in vars(os).items() if callable(function)})
open_file: Any = io.open


def is_within(path: str, places: Container[str]) -> bool:
    """Return whether a path, or a folder that it is in, is one of some places."""
    while path not in places:
        if path == os.sep:
            return False
        path = os.path.dirname(path)
    return True


def copy(source: str, target: str) -> None:
    """Copy a file or a link."""
    if is_link(source):
        real.symlink(real.readlink(source), target)
        return
    with open_file(source, "rb") as read, open_file(target, "wb") as write:
        shutil.copyfileobj(read, write)
    found = real.stat(source)
    real.chmod(target, stat.S_IMODE(found.st_mode))
    real.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _mode(look: Callable[[str], os.stat_result], place: str) -> int:
    """Return the mode of what lies at a place; 0 if nothing does."""
    try:
        return look(place).st_mode
    except (OSError, ValueError):
        return 0


def is_there(place: str) -> bool:
    """Return whether anything lies at a place."""
    return _mode(real.lstat, place) != 0


def is_folder(place: str, *, follow: bool = True) -> bool:
    """Return whether a folder lies at a place."""
    return stat.S_ISDIR(_mode(real.stat if follow else real.lstat, place))


def is_link(place: str) -> bool:
    """Return whether a link lies at a place."""
    return stat.S_ISLNK(_mode(real.lstat, place))


def make_folders(place: str) -> None:
    """Make a folder, and those that it is in."""
    if not is_there(place):
        make_folders(os.path.dirname(place))
        with suppress(FileExistsError):  # another rank made it meanwhile
            real.mkdir(place)


class Past:
    """The file system as it was when the run began.

    The first rank keeps what it is about to change or remove, and notes what it is about to make; others leave that
    out.

    Args:
        folder: A folder of all ranks on this machine.
        left_alone: Folders that are read and written where they are.
    """

    def __init__(self, folder: str, left_alone: Sequence[str]) -> None:
        self._left_alone = tuple(f"{each}{os.sep}" for each in left_alone)
        self._kept, self._notes = os.path.join(folder, "kept"), os.path.join(folder, "made")
        self._made: set[str] = set()
        self._known = 0  # how much of the notes was read

    def is_left_alone(self, path: str) -> bool:
        """Return whether a path, whole and without links, is in a folder that is read and written where it is."""
        return f"{path}{os.sep}".startswith(self._left_alone)

    def keep_before(self, path: Any, *, writes: bool = False, moves: bool = False) -> None:
        """Keep what is at a path, on the first rank, before it makes, changes or removes that.

        Args:
            path: The path; what is none, as an open file, is no matter.
            writes: Whether the file itself is written, so that links are followed, and a second name would not do.
            moves: Whether all that is in a folder is moved.
        """
        if isinstance(path, str | bytes | os.PathLike):
            text = os.path.abspath(os.fsdecode(path))
            whole = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))
            whole = os.path.realpath(whole) if writes else whole
            if not self.is_left_alone(whole):
                self._keep(whole, writes=writes, moves=moves)

    def _keep(self, path: str, *, writes: bool, moves: bool) -> None:
        kept = self._kept + path
        if moves and is_folder(path, follow=False):
            for name in real.listdir(path):
                self._keep(os.path.join(path, name), writes=False, moves=True)
        if self._is_made(path) or (is_there(kept) and not is_folder(kept, follow=False)):
            return
        if not is_there(path):
            with open_file(self._notes, "ab", buffering=0) as notes:
                notes.write(os.fsencode(path) + b"\0")
        elif is_folder(path, follow=False):
            make_folders(kept)
        elif stat.S_ISREG(_mode(real.lstat, path)) or is_link(path):  # not a pipe, say, which holds nothing
            make_folders(os.path.dirname(kept))
            if not writes:
                with suppress(OSError):  # not on one disk
                    real.link(path, kept)
                    return
            with suppress(OSError):  # no reason for the first rank to fail: the others then see what it makes of it
                copy(path, f"{kept}.part")
                real.replace(f"{kept}.part", kept)

    def lies(self, path: str) -> str:
        """Return where what was at a path lies now; where nothing is, if nothing was there."""
        kept = self._kept + path
        return kept if is_there(kept) or self._is_made(path) else path

    def names(self, path: str) -> set[str]:
        """Return the names that were in a folder."""
        found: set[str] = set()
        for folder in (path, self._kept + path):
            if is_folder(folder):
                found.update(real.listdir(folder))
        return {name for name in found if is_there(self.lies(os.path.join(path, name)))}

    def _is_made(self, path: str) -> bool:
        """Return whether the first rank has made what is at a path, or a folder that it is in."""
        try:
            size = real.stat(self._notes).st_size
        except FileNotFoundError:
            return False
        if size > self._known:
            with open_file(self._notes, "rb") as notes:
                notes.seek(self._known)
                self._made.update(os.fsdecode(path) for path in notes.read(size - self._known).split(b"\0") if path)
            self._known = size
        return is_within(path, self._made)


class Overlay:
    """A folder laid over the file system.

    A path is *seen* as the script names it, whole and without links; it *lies* in the folder if it was written, else
    where it was in the past.

    Args:
        folder: The folder, which is there.
        past: What lies below.
    """

    def __init__(self, folder: str, past: Past) -> None:
        self._folder, self._past, self._here = folder, past, real.getcwd()
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
            target: str = real.readlink(self.lies(seen))
        except OSError:
            return None
        return target

    def lies(self, seen: str) -> str:
        """Return where to read what is seen at a path; where nothing is, if nothing is seen there."""
        if not seen or self._past.is_left_alone(seen):
            return seen
        above = self._above(seen)
        try:
            real.lstat(above)
        except FileNotFoundError:
            return above if is_within(seen, self._gone) else self._past.lies(seen)
        except (OSError, ValueError):  # which whoever asks for it gets, too
            return above
        return above

    def made(self, seen: str, *, copied: bool = False) -> str:
        """Return where to write what will be seen at a path.

        Args:
            seen: The path.
            copied: Whether what is seen there now is to be changed, not replaced.
        """
        if not seen or self._past.is_left_alone(seen):
            return seen
        parent = os.path.dirname(seen)
        if is_folder(self.lies(parent)):
            make_folders(self._above(parent))
        if copied:
            self._copy_up(seen)
        return self._above(seen)

    def _copy_up(self, seen: str) -> None:
        """Copy what is seen at a path, and all that is in it, to where it will lie."""
        above, lies = self._above(seen), self.lies(seen)
        if is_folder(lies, follow=False):
            make_folders(above)
            for name in self.names(seen):
                self._copy_up(os.path.join(seen, name))
        elif lies != above and is_there(lies):
            copy(lies, above)

    def _above(self, seen: str) -> str:
        return self._folder + seen

    def names(self, seen: str) -> list[str]:
        """Return the names in a folder."""
        lies = self.lies(seen)
        if self._past.is_left_alone(seen) or not is_folder(lies):
            return list(real.listdir(lies))
        found: set[str] = set()
        if not is_within(seen, self._gone):
            found = {name for name in self._past.names(seen) if os.path.join(seen, name) not in self._gone}
        if is_folder(above := self._above(seen)):
            found.update(real.listdir(above))
        return sorted(found)

    def _forget(self, seen: str) -> None:
        """Note that what is there, besides what was written, is seen no longer."""
        if not self._past.is_left_alone(seen) and is_there(self._past.lies(seen)):
            self._gone.add(seen)

    # ---- what the script does ----

    def open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        """Open a file, as ``open``."""
        if isinstance(file, int) or not isinstance(mode, str):
            return open_file(file, mode, *args, **options)
        seen = self.seen(file, follow="x" not in mode)
        lies = self.lies(seen)
        if not {*mode} & {*"wax+"} or is_folder(lies):  # a folder: an error, or where a temporary file is opened
            return open_file(lies, mode, *args, **options)
        if "x" in mode:
            self._require_new(file, seen)
        elif "r" in mode:
            real.stat(lies)
        return open_file(self.made(seen, copied="a" in mode or "r" in mode), mode, *args, **options)

    def os_open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        """Open a file, as ``os.open``."""
        seen = self.seen(path, follow=not flags & os.O_EXCL)
        if not flags & MAY_CREATE or flags & UNNAMED == UNNAMED:
            return int(real.open(self.lies(seen), flags, mode))
        if flags & os.O_EXCL:
            self._require_new(path, seen)
        elif not flags & os.O_CREAT:
            real.stat(self.lies(seen))
        return int(real.open(self.made(seen, copied=not flags & os.O_TRUNC), flags, mode))

    def _require_new(self, path: Any, seen: str) -> None:
        if is_there(self.lies(seen)):
            raise _os_error(errno.EEXIST, path)

    def _require_empty(self, path: Any, seen: str) -> None:
        lies = self.lies(seen)
        if is_folder(lies, follow=False) and self.names(seen):
            raise _os_error(errno.ENOTEMPTY, path)

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        """Make a folder, as ``os.mkdir``."""
        seen = self.seen(path, follow=False)
        self._require_new(path, seen)
        real.mkdir(self.made(seen), mode)

    def remove(self, path: Any) -> None:
        """Remove a file, as ``os.remove``."""
        self._remove(real.unlink, path, is_folder=False)

    def rmdir(self, path: Any) -> None:
        """Remove an empty folder, as ``os.rmdir``."""
        self._remove(real.rmdir, path, is_folder=True)

    def _remove(self, function: Callable[[str], None], path: Any, *, is_folder: bool) -> None:
        seen = self.seen(path, follow=False)
        lies = self.lies(seen)
        if is_folder:
            self._require_empty(path, seen)
        # What is not there, or is no such thing, is the function's error; what lies below is only seen no longer.
        is_right = is_there(lies) and stat.S_ISDIR(real.lstat(lies).st_mode) is is_folder
        if not is_right or lies == self._above(seen) or self._past.is_left_alone(seen):
            function(lies)
        self._forget(seen)

    def rename(self, src: Any, dst: Any) -> None:
        """Rename a file or folder, as ``os.rename`` and ``os.replace``."""
        before, after = (self.seen(each, follow=False) for each in (src, dst))
        real.lstat(self.lies(before))
        if before == after:
            return
        if f"{after}{os.sep}".startswith(f"{before}{os.sep}"):
            raise _os_error(errno.EINVAL, src)
        are_folders = [is_folder(self.lies(each), follow=False) for each in (before, after)]
        if is_there(self.lies(after)) and are_folders[0] != are_folders[1]:
            raise _os_error(errno.ENOTDIR if are_folders[0] else errno.EISDIR, dst)
        self._require_empty(dst, after)
        real.replace(self.made(before, copied=True), self.made(after))
        self._forget(before)
        self._forget(after)

    def link(self, src: Any, dst: Any, **options: Any) -> None:
        """Give a file a second name, as ``os.link``."""
        after = self.seen(dst, follow=False)
        self._require_new(dst, after)
        before = self.made(self.seen(src, follow=False), copied=True)  # Linux links a link itself
        real.link(before, self.made(after), **options)

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False) -> None:
        """Make a link, as ``os.symlink``."""
        seen = self.seen(dst, follow=False)
        self._require_new(dst, seen)
        real.symlink(src, self.made(seen), target_is_directory)

    def chdir(self, path: Any) -> None:
        """Change the current folder, as ``os.chdir``."""
        seen = self.seen(path)
        real.chdir(self.lies(seen))
        self._here = seen

    def getcwd(self) -> str:
        """Return the current folder, as ``os.getcwd``."""
        here: str = self._here
        return here

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

    def _mode(self, follow_symlinks: bool) -> int:
        return _mode(lambda path: os.stat(path, follow_symlinks=follow_symlinks), self.path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISDIR(self._mode(follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISREG(self._mode(follow_symlinks))

    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self._mode(follow_symlinks=False))

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
