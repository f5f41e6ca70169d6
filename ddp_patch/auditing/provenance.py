"""Tell where a report comes from: the code that made the loader, the command, the date and the versions."""

import inspect
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from ddp_patch.loaders.hooks import made

__all__ = ["Provenance", "place_in_code", "versions"]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a report depends on."""
    found = {"python": platform.python_version()}
    for package in ("ddp-patch", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout that is imported without being installed
            found[package] = "not installed"
    return found


def place_in_code(audited: DataLoader[Any] | Any) -> str | None:
    """Return the file and line where a function is defined, or where a loader was made; None if it is not known.

    Examples:
        >>> from tokenize import open as function
        >>> place_in_code(function).split("/")[-1].split(":")[0]
        'tokenize.py'
    """
    if isinstance(audited, DataLoader):
        where = made(audited)
        return None if where is None else _from_here(where.place)
    while isinstance(audited, partial):
        audited = audited.func
    function = inspect.unwrap(audited)
    if not hasattr(function, "__code__"):  # an object that can be called
        function = getattr(type(function), "__call__", None)  # noqa: B004 - it is the method's code that tells
    code = getattr(function, "__code__", None)
    return None if code is None else _from_here(f"{code.co_filename}:{code.co_firstlineno}")


def _from_here(place: str) -> str:
    """Return a place in a file as seen from the working folder, if the file is in there."""
    here = f"{Path.cwd()}/"
    return place.removeprefix(here)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Tell when, how and with what reports were made.

    Attributes:
        command: The command line, or what stands for it.
        date: The date and time, as text.
        versions: Versions by package.
    """

    command: str
    date: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
    versions: Mapping[str, str] = field(default_factory=versions)

    def lines(self) -> list[tuple[str, str]]:
        """Return what is told as pairs of a name and a text."""
        used = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return [("date", self.date), ("command", self.command), ("versions", used)]
