"""The file system as it was when a run of several ranks began; the functions of ``os`` as they are."""

import io
import os
import shutil
import stat
from collections.abc import Callable, Container
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

__all__ = ["Past", "copy", "is_folder", "is_link", "is_there", "is_within", "make_folders", "open_file", "real"]


# The functions themselves, before any is replaced.
real: Any = SimpleNamespace(**{name: function for name, function in vars(os).items() if callable(function)})
open_file: Any = io.open


class Past:
    """The file system as it was when the run began.

    The first rank keeps what it is about to change or remove, and notes what it is about to make; others leave that
    out.

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
        if self._is_made(path) or (is_there(kept) and not is_folder(kept, follow=False)):
            return
        if not is_there(path):
            with open_file(self._notes, "ab", buffering=0) as notes:
                notes.write(os.fsencode(path) + b"\0")
            return
        if is_folder(path, follow=False):
            make_folders(kept)
            return
        if not stat.S_ISREG(_mode(real.lstat, path)) and not is_link(path):
            return  # a pipe, say, which holds nothing
        make_folders(os.path.dirname(kept))
        if not in_place:
            with suppress(OSError):  # not on one disk
                real.link(path, kept)
                return
        with suppress(OSError):  # no reason for the first rank to fail: the others then see what it makes of it
            copy(path, f"{kept}.part")
            real.replace(f"{kept}.part", kept)

    def keep_all(self, path: str) -> None:
        """Keep what is at a path, and all that is in it, on the first rank, which is about to move it."""
        self.keep(path, in_place=False)
        for name in real.listdir(path) if is_folder(path, follow=False) else ():
            self.keep_all(os.path.join(path, name))

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
