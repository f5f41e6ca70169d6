"""Hooks on the construction of loaders, and on their first use."""

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader

from ddp_patch.walks import walk


class Use(Enum):
    """The kinds of use of a loader."""

    ITERATED = "iterated"
    MEASURED = "measured by len()"
    ASKED = "asked about"  # a function of this package reads the loader
    HANDED = "handed to a framework"


Told: TypeAlias = Callable[[DataLoader[Any], Use], object]

_told: list[Told] = []


def about_to_use(loader: object, use: Use = Use.ASKED) -> None:
    """Call the hooks before a loader is used. An object that is no ``DataLoader`` is ignored."""
    if _told and issubclass(type(loader), DataLoader):  # isinstance() is True for accelerate's wrappers
        for tell in reversed(_told):
            tell(loader, use)  # type: ignore[arg-type]  # its class was checked


@contextmanager
def told_of_uses(tell: Told) -> Iterator[None]:
    """While entered, call ``tell(loader, use)`` before a loader is used."""
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)


# The folders of torch and of this package, whose files are not the user's.
OURS = tuple(str(Path(str(module.__file__)).parent) + os.sep for module in (torch, sys.modules["ddp_patch"]))
_MADE = "_ddp_patch_made"  # the loader's attribute that says where it was constructed


class Made(NamedTuple):
    """Where a loader was constructed.

    Attributes:
        place: The file and line that called the loader's class.
        caller: The file and line that called the function with that line, because one function may construct several
            loaders.
        number: The number of the loader among those constructed there, from 1.
    """

    place: str
    caller: str
    number: int


def made(loader: DataLoader[Any]) -> Made | None:
    """Return where a loader was constructed; None if this was not recorded."""
    return vars(loader).get(_MADE)


@contextmanager
def places_recorded() -> Iterator[None]:
    """While entered, record where each loader is constructed."""
    numbers: Counter[tuple[str, str]] = Counter()

    def record(loader: DataLoader[Any]) -> None:
        where = _place_and_caller()
        numbers[where] += 1
        vars(loader)[_MADE] = Made(*where, numbers[where])

    with called_before("__init__", record):
        yield


@contextmanager
def called_before(name: str, call: Callable[[DataLoader[Any]], object]) -> Iterator[None]:
    """While entered, run ``call(loader)`` before a method of each loader, whatever its class.

    ``call`` runs once if a class's method calls the base class's method. ``call`` does not run if another method of the
    class calls the base class's method: some constructors begin the base class's iteration, of an unfinished loader.

    Args:
        name: The method's name.
        call: The function to run. An error that it raises reaches the method's caller. If it returns anything but None,
            the caller gets this value, and the method is not called.
    """
    with ExitStack() as stack:

        def wrap(kind: type[DataLoader[Any]]) -> None:
            # Wrap the method in each class, because torchdata's StatefulDataLoader does not call its base class's
            # methods.
            if name in vars(kind):
                stack.enter_context(patch.object(kind, name, _wrapped(kind, name, call)))

        # The method of another ``called_before`` that is entered, if any. Otherwise the base class's, which is written
        # in C since Python 3.12.
        before = vars(DataLoader).get("__init_subclass__")

        def init_subclass(kind: type[DataLoader[Any]], /, **options: Any) -> None:
            base = super(DataLoader, kind).__init_subclass__ if before is None else before.__get__(None, kind)
            base(**options)
            wrap(kind)

        for kind in walk(DataLoader, type.__subclasses__):
            wrap(kind)
        stack.enter_context(patch.object(DataLoader, "__init_subclass__", classmethod(init_subclass)))
        yield


def _wrapped(kind: type[DataLoader[Any]], name: str, call: Callable[[DataLoader[Any]], object]) -> Callable[..., Any]:
    method = vars(kind)[name]

    @functools.wraps(method)
    def calling_first(self: DataLoader[Any], *args: Any, **options: Any) -> Any:
        if next(base for base in type(self).__mro__ if name in vars(base)) is kind:
            instead = call(self)
            if instead is not None:
                return instead
        return method(self, *args, **options)

    return calling_first


def script_line(frame: FrameType | None) -> str:
    """Return the innermost line of a call stack that is outside torch and this package, as ``from_here`` shows it."""
    return from_here(_line(_outside(frame)))


def from_here(place: str) -> str:
    """Return a file and line such as ``train.py:41``, relative to the current folder if the file is below it."""
    file, _, line = place.rpartition(":")
    here = Path.cwd()
    return f"{Path(file).relative_to(here) if Path(file).is_relative_to(here) else file}:{line}"


def _place_and_caller() -> tuple[str, str]:
    """Return the two innermost lines of the call stack that are outside torch and this package."""
    frame = _outside(sys._getframe(1))
    return _line(frame), _line(frame and frame.f_back)


def _outside(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return frame


def _line(frame: FrameType | None) -> str:
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
