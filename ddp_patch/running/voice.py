"""One voice: what the script prints on other ranks than the first."""

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO

from _ddp_patch_command import INTERRUPTED
from ddp_patch.errors import MissingRanksError
from ddp_patch.loaders.hooks import OURS

__all__ = ["Voice", "errors_reported"]


class Voice:
    """Lets one rank speak: others hold back what they write to stdout and stderr until it is known that they may.

    The files themselves are changed, so that the workers of loaders and libraries in C are silent, too.

    Args:
        rank: This rank. The first one speaks as ever.
        log_dir: The folder for what the others write, ``rank-1.log`` and so on; None to forget it.
        sees_rank: Whether the script sees which rank it is.
    """

    def __init__(self, rank: int, log_dir: Path | None, *, sees_rank: bool = True) -> None:
        self._rank, self._log_dir, self._sees_rank = rank, log_dir, sees_rank
        self._reported: BaseException | None = None
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
            self._log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            log = os.open(self._log_dir / f"rank-{self._rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
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

    def report_error(self, error: BaseException) -> None:
        """Show what ends this rank, once; an error that says who is missing names the lines itself."""
        if error is self._reported or isinstance(error, SystemExit | KeyboardInterrupt):
            return
        self._reported = error
        if isinstance(error, MissingRanksError):
            self.report(f"{type(error).__name__}: {error}")
            return
        self.report("".join(traceback.format_exception(type(error), error, _of_script(error.__traceback__))))
        if isinstance(error, KeyError) and not self._sees_rank and {*error.args} & {"RANK", "LOCAL_RANK", "WORLD_SIZE"}:
            self.report(
                f"ddp_patch: the ranks train as one process, so the script sees no {error.args[0]}. If it starts as "
                "one of several ranks, pass --mode ranks."
            )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have put anything there
            stream.flush()


def _redirect(out: int, err: int) -> None:
    _flush()
    os.dup2(out, 1)
    os.dup2(err, 2)


@contextmanager
def errors_reported(voice: Voice, *, at_once: bool) -> Iterator[None]:
    """Show what ends this rank, with its number, and end it with the exit code that Python would give.

    Args:
        voice: Lets the first rank speak.
        at_once: Whether Ctrl-C ends the process here, with the workers of its loaders, for which torch would wait.
    """
    try:
        yield
    except KeyboardInterrupt:
        if at_once:
            _flush()
            for worker in multiprocessing.active_children():
                if worker.pid is not None:
                    os.kill(worker.pid, signal.SIGKILL)
            os._exit(INTERRUPTED)
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            voice.report(ended.code)
            sys.exit(1)
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the script raises
        voice.report_error(error)
        sys.exit(1)
    finally:
        voice.release()


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first line of the script on, if it has some."""
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename.startswith((*OURS, "<frozen runpy>")):
        own = own.tb_next
    return own or trace
