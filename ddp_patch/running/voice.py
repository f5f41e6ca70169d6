"""One voice: what the script prints on other ranks than the first."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO

from _ddp_patch_command import INTERRUPTED
from ddp_patch.loaders.hooks import OURS

__all__ = ["Voice", "errors_reported"]


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


def _redirect(out: int, err: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have put anything there
            stream.flush()
    os.dup2(out, 1)
    os.dup2(err, 2)


@contextmanager
def errors_reported(voice: Voice, *, sees_rank: bool) -> Iterator[None]:
    """Show what ends this rank, with its number, and end it with the exit code that Python would give.

    Args:
        voice: Lets the first rank speak.
        sees_rank: Whether the script sees which rank it is.
    """
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
        if isinstance(error, KeyError) and not sees_rank and {*error.args} & {"RANK", "LOCAL_RANK", "WORLD_SIZE"}:
            voice.report(
                f"ddp_patch: the ranks train as one process, so the script sees no {error.args[0]}. If it starts as "
                "one of several ranks, pass --mode ranks."
            )
        sys.exit(1)
    finally:
        voice.release()


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first line of the script on, if it has some."""
    own = trace
    while own is not None and own.tb_frame.f_code.co_filename.startswith((*OURS, "<frozen runpy>")):
        own = own.tb_next
    return own or trace
