"""The table of ``docs/compatibility.md``: with which versions of what is below this package its tests passed."""

import platform
import re
from pathlib import Path

import numpy as np
import torch

__all__ = ["PAGE", "row", "with_row", "write_row"]

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"


def row(session: str, passed: int, skipped: int) -> str:
    """Return the line of a session: the versions that are installed, and how many tests passed."""
    versions = platform.python_version(), torch.__version__.partition("+")[0], np.__version__
    return "| " + " | ".join([f"`{session}`", *versions, f"{passed:,}", f"{skipped:,}"]) + " |"


def with_row(text: str, line: str) -> str:
    """Return a page whose line of the same session is this one."""
    session = line.split("|")[1]
    text, found = re.subn(rf"(?m)^\|{re.escape(session)}\|.*$", lambda match: line, text)
    if found != 1:
        raise ValueError(f"{found} lines of the page begin with {session}, and there should be one.")
    return text


def write_row(session: str, passed: int, skipped: int) -> None:
    """Write the line of a session into the page."""
    PAGE.write_text(with_row(PAGE.read_text(), row(session, passed, skipped)))
