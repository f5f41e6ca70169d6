"""What the world gives a script is the same on all ranks: the order of folders, the system's entropy, standard input.

Names in a folder are sorted, on a single rank, too. Rank 0 draws a secret when the run begins, and all ranks take the
system's entropy from it by the number of the question: every rank runs the same lines, so it asks the same questions in
the same order. What rank 0 reads from standard input, the others find in the store of the ranks.

Entropy is replayed in the main thread of the main process. A thread, a worker or another process that the script starts
draws its own, and so do torch, this package and Python's ``multiprocessing``, whose names have to differ. Clocks,
process numbers, environments and the names of machines are each rank's own.
"""

import hashlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from zlib import crc32

import numpy as np

from ddp_patch.compat import entropy
from ddp_patch.compat.files import globbed_by_os
from ddp_patch.errors import MissingRanksError
from ddp_patch.loaders.hooks import OURS
from ddp_patch.running.overlay import entries_of

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch leaves it out of what it exports


_LIBRARY, _NUMPY = (os.path.dirname(str(module.__file__)) + os.sep for module in (os, np))
_PACKAGES = ("site-packages", "dist-packages")  # which may lie in a folder of the library's
# Between the script and what draws stand functions of these files.
_BETWEEN = {__file__, str(entropy.__file__)}
_OF_RUNTIME = {"asyncio", "concurrent", "importlib", "multiprocessing"}  # of Python's library

# The latest question of each session, the latest session last.
_asked: list[str] = []


def asked() -> str:
    """Return what this rank asked the world so far, to compare it with the other ranks when they meet."""
    return _asked[-1] if _asked else ""


@contextmanager
def asking_alone() -> Iterator[None]:
    """Let this rank draw entropy of its own while entered, as often as it likes: other ranks do something else."""
    _asked.append("")
    try:
        yield
    finally:
        _asked.pop()


@contextmanager
def folders_sorted() -> Iterator[None]:
    """Let names in folders be sorted while entered, however the file system has them."""
    list_own, scan_own = os.listdir, os.scandir

    def scandir(path: Any = ".") -> Any:
        with scan_own(path) as entries:
            return entries_of(sorted(entries, key=lambda each: each.name))

    with (
        patch.object(os, "listdir", lambda path=".": sorted(list_own(path))),
        patch.object(os, "scandir", scandir),
        globbed_by_os(),
    ):
        yield


@contextmanager
def alike(store: "Store", rank: int, timeout: float) -> Iterator[None]:
    """Let entropy and standard input be rank 0's while entered.

    Args:
        store: A store of these ranks, where no name is taken.
        rank: This rank.
        timeout: How many seconds ranks wait for rank 0.

    Raises:
        MissingRanksError: Rank 0 did not come within the timeout, or has ended.
    """

    def of_rank_0(name: str, find: Callable[[], bytes]) -> bytes:
        if rank == 0:
            store.set(name, found := find())  # type: ignore[arg-type]  # it takes bytes, too
            return found
        try:
            store.wait([name], timedelta(seconds=timeout))
            return bytes(store.get(name))
        except RuntimeError as error:
            raise MissingRanksError(
                f"Rank {rank} waited for the {name} of rank 0, at most {timeout:g} s, and rank 0 did not give it "
                f"({str(error).splitlines()[0]}). If it has ended, its own error says why. If not, let what the script "
                "does next not follow from a clock, a process number or the name of a machine."
            ) from None

    secret, draw_own = of_rank_0("secret", lambda: os.urandom(32)), os.urandom
    process, numbers, sessions = os.getpid(), count(1), len(_asked) + 1

    def draw(size: int) -> bytes:
        is_main = threading.current_thread() is threading.main_thread() and os.getpid() == process
        line = _asker(sys._getframe(1)) if is_main and len(_asked) == sessions else ""
        if not line:
            return draw_own(size)
        number, digest = next(numbers), crc32(f"{_asked[-1]} {line}".encode())
        _asked[-1] = f"question {number} to the world ({digest:08x}), for the system's entropy at {line}"
        return hashlib.shake_256(secret + number.to_bytes(8)).digest(size)

    with ExitStack() as stack:
        stack.enter_context(entropy.entropy_drawn_by(draw))
        if (own := sys.stdin) is not None:
            given = io.TextIOWrapper(io.BufferedReader(_Input(own, of_rank_0)), own.encoding, own.errors)
            stack.enter_context(patch.object(sys, "stdin", given))
        _asked.append("")
        stack.callback(_asked.pop)
        yield


def _asker(frame: FrameType | None) -> str:
    """Return the line that asks, outside of Python's library and numpy; nothing if each rank has to ask for itself."""
    while frame is not None:
        file = frame.f_code.co_filename
        is_library = file.startswith(_NUMPY) or (file.startswith(_LIBRARY) and not any(x in file for x in _PACKAGES))
        if is_library and str(frame.f_globals.get("__name__")).partition(".")[0] in _OF_RUNTIME:
            return ""
        if not (is_library or file in _BETWEEN or file.startswith("<frozen")):
            return "" if file.startswith(OURS) else f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _Input(io.RawIOBase):
    """Standard input, as rank 0 reads it. All ranks have the same file open: only rank 0 reads it.

    Args:
        own: This rank's.
        of_rank_0: Returns what rank 0 finds, by a name.
    """

    def __init__(self, own: Any, of_rank_0: Callable[[str, Callable[[], bytes]], bytes]) -> None:
        super().__init__()
        self._own, self._of_rank_0, self._reads = own, of_rank_0, 0

    def isatty(self) -> bool:
        return bool(self._own.isatty())

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._reads += 1
        data = self._of_rank_0(f"input {self._reads}", lambda: os.read(self._own.fileno(), len(buffer)))
        buffer[: len(data)] = data
        return len(data)
