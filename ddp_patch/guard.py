"""A guard for tests: an unpatched loader that is iterated on one of several ranks raises, saying where it was made."""

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import NotPatchedError
from ddp_patch.loader import sharding

__all__ = ["guard_this_process", "guarded", "places_recorded"]

# Told by the environment, so that ranks which a guarded test starts are guarded too, however it starts them.
_VARIABLE = "DDP_PATCH_GUARD"
_for_good = ExitStack()
_NO_PLACES = tuple(str(Path(str(module.__file__)).parent) + os.sep for module in (torch, sys.modules[__package__]))
_places: WeakKeyDictionary[DataLoader[Any], str] = WeakKeyDictionary()


@contextmanager
def places_recorded() -> Iterator[None]:
    """While entered, it is written down of every loader in which file and line it is made."""
    begin = DataLoader.__init__

    @functools.wraps(begin)
    def init(self: DataLoader[Any], *args: Any, **options: Any) -> None:
        _places.setdefault(self, _place())
        begin(self, *args, **options)

    with patch.object(DataLoader, "__init__", init):
        yield


@contextmanager
def guarded() -> Iterator[None]:
    """While entered, iterating an unpatched loader raises if a process group with more than one rank is up.

    Ranks that are started meanwhile are guarded too, from where they import ``ddp_patch``.

    Raises:
        NotPatchedError: From ``iter(loader)``, with the file and line where the loader was made.

    Examples:
        >>> with guarded():
        ...     len(list(DataLoader(range(4))))  # no process group is up
        4
    """
    with patch.dict(os.environ, {_VARIABLE: "1"}), _classes_guarded():
        yield


@contextmanager
def _classes_guarded() -> Iterator[None]:
    with places_recorded(), ExitStack() as stack:

        def guard(kind: type[DataLoader[Any]]) -> None:
            # A subclass need not call its base's: torchdata's StatefulDataLoader does not.
            if "__iter__" in vars(kind):
                stack.enter_context(patch.object(kind, "__iter__", _guarding(vars(kind)["__iter__"])))

        def init_subclass(kind: type[DataLoader[Any]], /, **options: Any) -> None:
            super(DataLoader, kind).__init_subclass__(**options)
            guard(kind)

        for kind in _kinds(DataLoader):
            guard(kind)
        stack.enter_context(patch.object(DataLoader, "__init_subclass__", classmethod(init_subclass)))
        yield


def _kinds(kind: type[DataLoader[Any]]) -> Iterator[type[DataLoader[Any]]]:
    yield kind
    for other in kind.__subclasses__():
        yield from _kinds(other)


def _guarding(begin: Any) -> Any:
    @functools.wraps(begin)
    def iterate(self: DataLoader[Any]) -> Any:
        _require_sharded(self)
        return begin(self)

    return iterate


def guard_this_process() -> None:
    """Guard the process for the rest of its life, or no longer, as its environment tells."""
    _for_good.close()
    if _VARIABLE in os.environ:
        _for_good.enter_context(_classes_guarded())


def _require_sharded(loader: DataLoader[Any]) -> None:
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and sharding(loader) is None:
        place = _places.get(loader, "a place that is not known, because it was made before the guard was on")
        raise NotPatchedError(
            f"Rank {dist.get_rank()} of {ranks} iterates a {type(loader).__name__} that is not sharded, so every rank "
            f"gets all of its data. It was made at {place}. Pass it through patch_dataloader_to_ddp() there."
        )


def _place() -> str:
    """Return the file and line that made a loader: the first outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NO_PLACES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
