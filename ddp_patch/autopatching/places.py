"""Where loaders were made, as people read it, and patterns for that."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.hooks import Made, made

__all__ = ["UNKNOWN", "Patterns", "compared", "shown"]

UNKNOWN = "an unknown place"


def shown(loader: DataLoader[Any]) -> str:
    """Return where a loader was made: ``train.py:41``, from the current folder where it lies below it."""
    where = made(loader)
    if where is None:
        return UNKNOWN
    file, _, line = where.place.rpartition(":")
    here = Path.cwd()
    return f"{Path(file).relative_to(here) if Path(file).is_relative_to(here) else file}:{line}"


def compared(loader: DataLoader[Any]) -> str:
    """Return which loader of the script it is, in words that are the same on every rank, whose folders may differ."""
    where = made(loader)
    kind = type(loader).__name__
    if where is None:
        return f"a {kind} that was made before autopatch was on"
    return f"{kind} number {where.number} made at {_tail(where.place)}, called at {_tail(where.caller)}"


def _tail(place: str) -> str:
    return place.rpartition(os.sep)[2]


@dataclass
class Patterns:
    """Which loaders to patch, by patterns of the lines where they were made.

    A pattern is matched as a shell matches names, against the end of the path: ``train.py:41``, ``val_*.py``,
    ``*/data/*.py:1?``. Without a line, it means all of a file.

    Args:
        only: Patch these alone; all, where there are none.
        excepted: Leave these alone.

    Attributes:
        unused: Those that matched nothing yet.
    """

    only: Sequence[str] = ()
    excepted: Sequence[str] = ()
    unused: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.only, self.excepted = _listed("only", self.only), _listed("excepted", self.excepted)
        self.unused = {*self.only, *self.excepted}

    def why_left(self, loader: DataLoader[Any]) -> str | None:
        """Return the option that leaves a loader alone; None if it is to be patched."""
        where = made(loader)
        # Both are looked through whole, so that each pattern is seen to be used.
        excepted, chosen = ([self._matches(where, one) for one in each] for each in (self.excepted, self.only))
        if any(excepted):
            return "--except"
        return "--only" if self.only and not any(chosen) else None

    def _matches(self, where: Made | None, pattern: str) -> bool:
        if where is None:
            return False
        full = pattern if ":" in pattern else f"{pattern}:*"
        place = where.place.replace(os.sep, "/")
        if fnmatchcase(place, full) or fnmatchcase(place, f"*/{full}"):
            self.unused.discard(pattern)
            return True
        return False


def _listed(name: str, patterns: str | Sequence[str]) -> Sequence[str]:
    listed = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in listed:
        if not isinstance(pattern, str) or not pattern:
            raise InvalidOptionError(
                f"{name}={patterns!r} names no file. Pass patterns of where loaders are made, as 'train.py:41' or "
                "'val_*.py'."
            )
    return listed
