"""Hooks for a loader's first use: before it is iterated, measured by ``len()`` or passed to this package."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeAlias

from torch.utils.data import DataLoader

__all__ = ["Use", "about_to_use", "told_of_uses"]


class Use(Enum):
    """What happens to a loader."""

    ITERATED = "iterated"
    MEASURED = "measured by len()"
    ASKED = "asked about"  # by a function of this package
    HANDED = "handed to a framework"


Told: TypeAlias = Callable[[DataLoader[Any], Use], object]

_told: list[Told] = []


def about_to_use(loader: object, use: Use = Use.ASKED) -> None:
    """Tell that a loader is about to be used; what is no ``DataLoader`` is no matter."""
    if _told and issubclass(type(loader), DataLoader):  # isinstance() believes what accelerate's say of themselves
        for tell in reversed(_told):
            tell(loader, use)  # type: ignore[arg-type]  # its class was asked


@contextmanager
def told_of_uses(tell: Told) -> Iterator[None]:
    """Call ``tell(loader, use)``, while entered, before a loader is used."""
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)
