"""One voice: what the script prints and saves on other ranks than the first."""

import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic, sleep
from types import TracebackType
from typing import IO, Any
from unittest.mock import patch

import torch

from _ddp_patch_command import INTERRUPTED
from ddp_patch.errors import MissingRanksError
from ddp_patch.loaders.hooks import OURS
from ddp_patch.ranks.exchange import digest
from ddp_patch.running.lockstep import Lockstep

__all__ = ["Voice", "errors_reported", "saved_once"]

_PERIOD_S = 0.05


class Voice:
    """Lets one rank speak: others hold back what they write to stdout and stderr until it is known that they may.

    The files themselves are changed, so that the workers of loaders and libraries in C are silent, too.

    Args:
        rank: This rank. The first one speaks as ever.
        log_dir: The folder for what the others write, ``rank-1.log`` and so on; None to forget it.
    """

    def __init__(self, rank: int, log_dir: Path | None) -> None:
        self._rank, self._log_dir = rank, log_dir
        self._real = [os.dup(number) for number in (1, 2)]
        self._held: list[IO[bytes]] = []
        if rank:
            self._held = [TemporaryFile() for _ in self._real]  # noqa: SIM115 - open until all is decided
            _redirect(*(file.fileno() for file in self._held))

    def silence(self) -> None:
        """Write nothing from now on, but to the log if there is one."""
        if not self._held:
            return
        log = os.open(os.devnull, os.O_WRONLY)
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            log = os.open(self._log_dir / f"rank-{self._rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        _redirect(log, log)
        self._write_held(log, log)

    def release(self) -> None:
        """Write what was held back, and all that comes."""
        if self._held:
            _redirect(*self._real)
            self._write_held(*self._real)

    def _write_held(self, *files: int) -> None:
        for file, held in zip(files, self._held, strict=True):
            held.seek(0)
            with open(file, "wb", closefd=False) as out:
                out.write(held.read())
            held.close()
        self._held = []

    def report(self, text: str) -> None:
        """Write a text to stderr, with the rank before each line."""
        lines = "".join(f"[rank {self._rank}] {line}\n" for line in text.splitlines())
        with open(self._real[1], "wb", closefd=False) as out:
            out.write(lines.encode(errors="replace"))


def _redirect(out: int, err: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have put anything there
            stream.flush()
    os.dup2(out, 1)
    os.dup2(err, 2)


@contextmanager
def errors_reported(voice: Voice) -> Iterator[None]:
    """Show what ends this rank, with its number, and end it with the exit code that Python would give."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            voice.report(ended.code)
            sys.exit(1)
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the script raises
        voice.report("".join(traceback.format_exception(type(error), error, _of_script(error.__traceback__))))
        sys.exit(1)
    finally:
        voice.release()


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first line of the script on, if it has some."""
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename.startswith((*OURS, "<frozen runpy>")):
        own = own.tb_next
    return own or trace


@contextmanager
def saved_once(lockstep: Lockstep, tell: Callable[[str], object], timeout: float) -> Iterator[None]:
    """Let the first rank alone save to files by ``torch.save`` while entered; others wait before they load these.

    Args:
        lockstep: The ranks.
        tell: Tells the user something, once.
        timeout: How many seconds a rank waits for the first one to have saved what it loads.
    """
    save, load = torch.save, torch.load
    saved, make_folder = Counter[str](), tempfile.mkdtemp
    own: set[str] = set()  # temporary folders, which have other names on other ranks

    def making_folder(*args: Any, **options: Any) -> Any:
        folder = make_folder(*args, **options)
        own.add(os.path.realpath(os.fsdecode(folder)))
        return folder

    def saving(obj: Any, f: Any, *args: Any, **options: Any) -> None:
        path = _path(f)
        if path is None or not own.isdisjoint(map(str, Path(path).parents)):
            save(obj, f, *args, **options)
            return
        saved[path] += 1
        if lockstep.rank == 0:
            save(obj, f, *args, **options)
            lockstep.put(f"saved/{digest(path)}", str(saved[path]).encode())
        tell("torch.save() writes files on rank 0 alone; pass --all-ranks-write to write them on all.")

    def loading(f: Any, *args: Any, **options: Any) -> Any:
        path, until = _path(f), monotonic() + timeout
        times = 0 if path is None or lockstep.rank == 0 else saved[path]
        while times and int(lockstep.left(f"saved/{digest(path)}").get(0, b"0")) < times:
            if monotonic() > until:
                raise MissingRanksError(
                    f"Rank {lockstep.rank} would load {path}, which this script has saved {times} times here, and rank "
                    f"0 has not done so as often within {timeout:g} s. Let what is saved follow from whole "
                    "evaluations, so that every rank decides the same."
                )
            sleep(_PERIOD_S)
        return load(f, *args, **options)

    with (
        patch.object(torch, "save", saving),
        patch.object(torch, "load", loading),
        patch.object(tempfile, "mkdtemp", making_folder),
    ):
        yield


def _path(file: Any) -> str | None:
    """Return the path of a file that is named; None for one that is open."""
    return os.path.realpath(os.fspath(file)) if isinstance(file, str | os.PathLike) else None
