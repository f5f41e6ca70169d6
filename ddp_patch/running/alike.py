"""What the world gives a script is rank 0's on all ranks: the order of folders, the system's entropy, standard input.

Every rank runs the same lines, so it asks the world the same questions in the same order. Rank 0 draws a secret when
the run begins, from which all ranks take the system's entropy by the number of the question. What only rank 0 can know,
it leaves in the store of the ranks, by number and with what was asked where, and the others read it there.

This holds in the main thread of the main process. A thread, a worker or another process that the script starts gets
what it asks for on its own rank, and so do torch, this package and Python's ``multiprocessing``, whose names have to
differ. Clocks, process numbers and the names of machines are each rank's own.
"""

import hashlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from zlib import crc32

from ddp_patch.compat import entropy
from ddp_patch.errors import MissingRanksError, RankMismatchError
from ddp_patch.loaders.hooks import OURS
from ddp_patch.running.overlay import entries_of, places_left_alone

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch leaves it out of what it exports

__all__ = ["Answers", "alike", "asked"]


_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = ("site-packages", "dist-packages")  # which may lie in a folder of the library's
# Between the script and ``Answers`` stand functions of these files.
_BETWEEN = {__file__, str(entropy.__file__)}
_OF_RUNTIME = {"asyncio", "concurrent", "importlib", "multiprocessing"}  # of Python's library
_OF_CACHES = {"matplotlib"}  # packages that fill a cache of all ranks, which the next rank then finds

# What describes a rank's own machine, or the rank, in the environment: how names begin.
_OF_MACHINE = (
    *("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "NCCL_", "GLOO_", "UCX_", "OMP_", "MKL_", "KMP_", "LD_", "TORCH", "TRITON_"),
    *("SLURM", "PMI", "OMPI_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "DDP_PATCH_", "RANK", "WORLD_SIZE", "XDG_"),
    *("HF_HOME", "HOME", "HOST", "LOGNAME", "MPLCONFIGDIR", "OLDPWD", "PATH", "PWD", "PYTHON", "SHLVL", "SSH_", "TEMP"),
    *("TMP", "USER", "VIRTUAL_ENV", "_"),
)


# What errors say that ranks part by.
_SAME_LINES = (
    "let what the script does next not follow from a clock, a process number or the name of a machine, which differ "
    "between ranks."
)
_now: list["Answers"] = []  # those that are asked, the latest last


def asked() -> str:
    """Return what this rank asked the world so far, to compare it with the other ranks when they meet."""
    return _now[-1].asked if _now else ""


class Answers:
    """Asks the world on rank 0, and tells the other ranks what it said, by number.

    Args:
        store: A store of these ranks alone.
        rank: This rank.
        timeout: How many seconds it waits for rank 0.
    """

    def __init__(self, store: "Store", rank: int, timeout: float) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._process = os.getpid()
        self._secret = b""
        self._sent = self._digest = self._number = 0
        self._last = "nothing"

    @property
    def asked(self) -> str:
        """What this rank asked so far, which is the same on ranks that run the same lines."""
        return f"question {self._number} to the world ({self._digest:08x}), {self._last}"

    def begin(self, ranks: int) -> None:
        """Take rank 0's secret and environment. Values travel only where they differ."""
        own = {name: _digest(text) for name, text in os.environ.items() if not name.startswith(_OF_MACHINE)}
        if self._rank:
            self._store.set(f"environment {self._rank}", json.dumps(own))
        else:
            others = [json.loads(self._waited(f"environment {rank}")) for rank in range(1, ranks)]
            differ = {name for other in others for name, _ in other.items() ^ own.items()}
            taken = {name: os.environ.get(name) for name in sorted(differ)}
            self._store.set("start", json.dumps([os.urandom(32).hex(), taken]))
        secret, taken = json.loads(self._waited("start"))
        self._secret = bytes.fromhex(secret)
        os.environ.update({name: text for name, text in taken.items() if text is not None})
        for name in [name for name, text in taken.items() if text is None and name in os.environ]:
            del os.environ[name]

    def entropy(self, draw: Callable[[int], bytes], size: int) -> bytes:
        """Return so many bytes: rank 0's, or where it is not asked, what ``draw`` gives."""
        if not self._is_replayed("the system's entropy"):
            return draw(size)
        return hashlib.shake_256(self._secret + self._number.to_bytes(8)).digest(size)

    def read(self, descriptor: int, size: int) -> bytes:
        """Return the next bytes of rank 0's standard input, at most so many; none at the end."""
        return self._answer("standard input", lambda: os.read(descriptor, size))

    def names(self, read: Callable[[], Iterable[str]], path: Any) -> list[str]:
        """Return the names in a folder as rank 0 sees them, and in that order.

        Args:
            read: Reads the names on this rank.
            path: The folder, for errors.
        """

        def found() -> bytes:
            try:
                return json.dumps(list(read())).encode()
            except OSError as error:
                return json.dumps(error.errno).encode()

        names = json.loads(self._answer("the names in a folder", found))
        if isinstance(names, int):
            raise OSError(names, os.strerror(names), path)
        own = set[str]()
        if self._rank:
            with suppress(OSError):
                own.update(read())
        return _as_seen(names, own)

    def _answer(self, what: str, ask: Callable[[], bytes]) -> bytes:
        if not self._is_replayed(what):
            return ask()
        self._sent += 1
        name, asked = f"answer {self._sent}", self.asked.encode()
        if self._rank == 0:
            found = ask()
            self._store.set(name, asked + b"\n" + found)  # type: ignore[arg-type]  # it takes bytes, too
            return found
        theirs, _, found = self._waited(name).partition(b"\n")
        if theirs != asked:
            raise RankMismatchError(
                f"The ranks no longer do the same:\n  rank 0 asked {theirs.decode()}\n  rank {self._rank} asked "
                f"{asked.decode()}\nEvery rank runs the whole script: {_SAME_LINES}"
            )
        return found

    def _waited(self, name: str) -> bytes:
        try:
            self._store.wait([name], timedelta(seconds=self._timeout))
            found: bytes = self._store.get(name)
        except RuntimeError as error:
            raise MissingRanksError(
                f"Rank {self._rank} asked {self.asked}, waited at most {self._timeout:g} s, and another rank did not "
                f"({str(error).splitlines()[0]}). If one has ended, its own error says why. If not, {_SAME_LINES}"
            ) from None
        return found

    def _is_replayed(self, what: str) -> bool:
        """Return whether rank 0 answers, and count that."""
        if (
            self not in _now
            or os.getpid() != self._process
            or threading.current_thread() is not threading.main_thread()
        ):
            return False
        line = _asker(sys._getframe(1))
        if line:
            self._number += 1
            self._last = f"for {what} at {line}"
            self._digest = crc32(self._last.encode(), self._digest)
        return bool(line)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]


def _asker(frame: FrameType | None) -> str:
    """Return the line that asks, outside of Python's library; nothing if each rank has to ask for itself."""
    while frame is not None:
        file = frame.f_code.co_filename
        is_library = file.startswith(_LIBRARY) and not any(name in file for name in _PACKAGES)
        if str(frame.f_globals.get("__name__")).partition(".")[0] in (_OF_RUNTIME if is_library else _OF_CACHES):
            return ""
        if not (is_library or file in _BETWEEN or file.startswith("<frozen")):
            return "" if file.startswith(OURS) else f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _as_seen(names: Sequence[str], own: set[str]) -> list[str]:
    """Return rank 0's names in a folder as another rank sees the files.

    A name that this rank alone sees stands for one that rank 0 alone sees: both made it at the same line, and it says
    when or in which process. What rank 0 alone sees beyond these has appeared since.

    Examples:
        >>> _as_seen(["c", "log-17", "a"], {"a", "c", "log-18"})
        ['c', 'log-18', 'a']
    """
    counterparts = iter(sorted(own.difference(names)))
    return [name if name in own else next(counterparts, name) for name in names]


class _Input(io.RawIOBase):
    """Standard input, as rank 0 reads it."""

    def __init__(self, answers: Answers, descriptor: int) -> None:
        super().__init__()
        self._answers, self._descriptor = answers, descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._answers.read(self._descriptor, len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def alike(store: "Store", rank: int, ranks: int, timeout: float) -> Iterator[Answers]:
    """Let what the world gives be rank 0's while entered, after what ranks' files lie in (``shadowed``).

    Args:
        store: A store of these ranks, where no name is taken.
        rank: This rank.
        ranks: How many there are.
        timeout: How many seconds ranks wait for rank 0.

    Yields:
        What was asked so far.

    Raises:
        MissingRanksError: Another rank did not come within the timeout, or has ended.
    """
    answers, places = Answers(store, rank, timeout), places_left_alone()
    answers.begin(ranks)
    list_own, scan_own, draw_own = os.listdir, os.scandir, os.urandom

    def is_own(path: Any) -> bool:
        return isinstance(path, int) or f"{os.path.realpath(path)}{os.sep}".startswith(places)

    def listdir(path: Any = ".") -> list[Any]:
        path = "." if path is None else path
        if is_own(text := path if isinstance(path, int) else os.fsdecode(path)):
            return list_own(path)
        names = answers.names(lambda: list_own(text), path)
        return list(map(os.fsencode, names)) if isinstance(path, bytes) else names

    def scandir(path: Any = ".") -> Any:
        path = "." if path is None else path
        if is_own(path if isinstance(path, int) else os.fsdecode(path)):
            return scan_own(path)
        folder, found = os.fspath(path), dict[Any, Any]()

        def read() -> Iterable[str]:
            with scan_own(folder) as entries:
                found.update((each.name, each) for each in entries)
            return map(os.fsdecode, found)

        names = answers.names(read, path)
        return entries_of(folder, map(os.fsencode, names) if isinstance(folder, bytes) else names, found)

    with ExitStack() as stack:
        stack.enter_context(patch.object(os, "listdir", listdir))
        stack.enter_context(patch.object(os, "scandir", scandir))
        stack.enter_context(entropy.entropy_drawn_by(lambda size: answers.entropy(draw_own, size)))
        stack.enter_context(_input_by(answers, rank))
        _now.append(answers)
        stack.callback(_now.remove, answers)
        yield answers


@contextmanager
def _input_by(answers: Answers, rank: int) -> Iterator[None]:
    """Let the script read what rank 0 reads, while entered. All ranks have the same file open: only rank 0 reads it."""
    try:
        own = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):  # there is none, or it is a test's
        yield
        return
    kept, nothing = os.dup(own), os.open(os.devnull, os.O_RDONLY)
    if rank:
        os.dup2(nothing, own)
    os.close(nothing)
    text = io.TextIOWrapper(io.BufferedReader(_Input(answers, kept)), sys.stdin.encoding, sys.stdin.errors)
    try:
        with patch.object(sys, "stdin", text):
            yield
    finally:
        os.dup2(kept, own)
        os.close(kept)
