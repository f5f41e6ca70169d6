"""The ``console`` blocks of Markdown pages that run ``ddp-patch``, compared with what it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

from sybil import Example
from sybil.parsers.markdown import CodeBlockParser

__all__ = ["ConsoleParser", "normalised"]

_ROOT = Path(__file__).parent.parent
# Columns of the terminal.
_WIDTH = "110"


class ConsoleParser(CodeBlockParser):
    """Runs the lines of a ``console`` block that begin with ``$ ddp-patch``, and compares what follows them.

    ``$ echo $?`` stands for the exit code of the command before. Blocks of other commands are left alone.
    """

    language = "console"

    def evaluate(self, example: Example) -> str | None:
        block: str = example.parsed
        if not block.startswith("$ ddp-patch "):
            return None
        code = 0
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, told = part.partition("\n")
            if command == "echo $?":
                printed = f"{code}\n"
            else:
                code, printed = _run(command)
            if normalised(printed) != normalised(told):
                return f"$ {command}\nprints\n{printed}\nand the page says\n{told}"
        return None


def normalised(printed: str) -> str:
    """Return what is printed without times, memory, and the blanks at lines' ends and before a table's border."""
    without = re.sub(r"\d+\.\d{3} s(, \d+ MiB more)?", "TIME", printed)
    return "\n".join(re.sub(r" *│?$", "", line) for line in without.rstrip().splitlines())


def _run(command: str) -> tuple[int, str]:
    program, *arguments = command.split()
    assert program == "ddp-patch"
    environment = {**os.environ, "COLUMNS": _WIDTH, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(  # noqa: S603 - the project's own pages
        [sys.executable, "-m", "ddp_patch", *arguments],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
