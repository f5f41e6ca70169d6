"""Give the script the same folders, system entropy and standard input on all ranks.

Names in a folder are sorted, on a single rank, too. System entropy is ``os.urandom`` and all that draws from it. Rank 0
draws a secret when the run begins. The n-th question for entropy is answered by a hash of the secret and n: every rank
runs the same lines, so its n-th question is the same. Rank 0 reads standard input, and sends it to the others.

Only the main thread of the main process is answered so. Threads, workers and other processes draw from the system, and
so do torch, this package and Python's ``multiprocessing``, whose names have to differ. Clocks, process numbers,
environments and names of machines differ between ranks.
"""

import hashlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from types import FrameType
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np

from ddp_patch.compat import entropy
from ddp_patch.compat.files import globbed_by_os
from ddp_patch.loaders.hooks import OURS
from ddp_patch.running.overlay import entries_of

_LIBRARY, _NUMPY = (os.path.dirname(str(module.__file__)) + os.sep for module in (os, np))
_PACKAGES = ("site-packages", "dist-packages")  # which may lie in a folder of the library's
# Functions of these files stand between the script and the generator.
_BETWEEN = {__file__, str(entropy.__file__)}
_OF_RUNTIME = {"asyncio", "concurrent", "importlib", "multiprocessing"}  # of Python's library

# The latest question of each session. The latest session is the last.
_asked: list[str] = []


def asked() -> str:
    """Return the latest question of this rank, in words. The ranks compare it at each exchange."""
    return _asked[-1] if _asked else ""


@contextmanager
def asking_alone() -> Iterator[None]:
    """Draw from the system while entered, because other ranks do something else meanwhile."""
    _asked.append("")
    try:
        yield
    finally:
        _asked.pop()


@contextmanager
def folders_sorted() -> Iterator[None]:
    """Sort the names in folders while entered."""
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
def alike(of_rank_0: Callable[[Callable[[], str]], str]) -> Iterator[None]:
    """Give the script rank 0's entropy and standard input while entered.

    Args:
        of_rank_0: Calls a function on rank 0, and returns its result on every rank.
    """
    secret, draw_own = bytes.fromhex(of_rank_0(lambda: os.urandom(32).hex())), os.urandom
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
    """Return the script's line that asks; empty if a rank has to ask the system."""
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
    """Standard input. All ranks have the same file open, and only rank 0 reads it."""

    def __init__(self, own: Any, of_rank_0: Callable[[Callable[[], str]], str]) -> None:
        super().__init__()
        self._own, self._of_rank_0 = own, of_rank_0

    def isatty(self) -> bool:
        return bool(self._own.isatty())

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = bytes.fromhex(self._of_rank_0(lambda: os.read(self._own.fileno(), len(buffer)).hex()))
        buffer[: len(data)] = data
        return len(data)
