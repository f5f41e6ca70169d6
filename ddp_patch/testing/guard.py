"""A guard for tests: makes an unpatched loader raise when one of several ranks iterates it."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ddp_patch.errors import NotPatchedError
from ddp_patch.loaders.recognition import sharded_by

__all__ = ["guard_this_process", "guarded", "places_recorded"]

# An environment variable, so that ranks are guarded too, however a guarded test starts them.
_VARIABLE = "DDP_PATCH_GUARD"
_for_good = ExitStack()  # guards this process as long as it is open
# Frames in these folders did not make a loader: torch and this package.
_NO_PLACES = tuple(str(Path(str(module.__file__)).parent) + os.sep for module in (torch, sys.modules["ddp_patch"]))
_PLACE = "_ddp_patch_made_at"  # the loader's attribute for the file and line that made it


def places_recorded() -> AbstractContextManager[None]:
    """Record, while entered, the file and line that make each loader."""
    return _methods_wrapped("__init__", _recording)


def _recording(begin: Any) -> Any:
    @functools.wraps(begin)
    def init(self: DataLoader[Any], *args: Any, **options: Any) -> None:
        vars(self).setdefault(_PLACE, _place())  # keeps what a subclass's constructor recorded
        begin(self, *args, **options)

    return init


@contextmanager
def guarded() -> Iterator[None]:
    """Make an unpatched loader raise, while entered, when it is iterated in a process group of several ranks.

    Ranks that are started meanwhile are guarded too, once they import ``ddp_patch``.

    Raises:
        NotPatchedError: From ``iter(loader)``, with the file and line that made the loader.

    Examples:
        >>> with guarded():
        ...     len(list(DataLoader(range(4))))  # no process group is up
        4
    """
    with patch.dict(os.environ, {_VARIABLE: "1"}), _iteration_guarded():
        yield


def guard_this_process() -> None:
    """Guard this process from now on if its environment says so, and otherwise stop guarding it."""
    _for_good.close()
    if _VARIABLE in os.environ:
        _for_good.enter_context(_iteration_guarded())


@contextmanager
def _iteration_guarded() -> Iterator[None]:
    with places_recorded(), _methods_wrapped("__iter__", _guarding):
        yield


@contextmanager
def _methods_wrapped(name: str, wrapped: Callable[[Any], Any]) -> Iterator[None]:
    """Wrap a method, while entered, in every class of loaders, those that are defined meanwhile included.

    Wrapping the base alone is not enough: torchdata's StatefulDataLoader does not call its base's methods.
    """
    with ExitStack() as stack:

        def wrap(kind: type[DataLoader[Any]]) -> None:
            if name in vars(kind):
                stack.enter_context(patch.object(kind, name, wrapped(vars(kind)[name])))

        before = DataLoader.__init_subclass__.__func__  # type: ignore[attr-defined]  # a bound class method has it

        def init_subclass(kind: type[DataLoader[Any]], /, **options: Any) -> None:
            before(kind, **options)
            wrap(kind)

        for kind in _kinds(DataLoader):
            wrap(kind)
        stack.enter_context(patch.object(DataLoader, "__init_subclass__", classmethod(init_subclass)))
        yield


def _kinds(kind: type[DataLoader[Any]]) -> Iterator[type[DataLoader[Any]]]:
    """Yield a class and all of its subclasses."""
    yield kind
    for other in kind.__subclasses__():
        yield from _kinds(other)


def _guarding(begin: Any) -> Any:
    @functools.wraps(begin)
    def iterate(self: DataLoader[Any]) -> Any:
        # A class's own method checks by itself. Some constructors begin its base's, for a loader that is patched later.
        if type(self).__iter__ is iterate:
            _require_sharded(self)
        return begin(self)

    return iterate


def _require_sharded(loader: DataLoader[Any]) -> None:
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and sharded_by(loader) is None:
        place = vars(loader).get(_PLACE, "a place that is not known, because it was made before the guard was on")
        raise NotPatchedError(
            f"Rank {dist.get_rank()} of {ranks} iterates a {type(loader).__name__} that is not sharded, so every rank "
            f"gets all of its data. It was made at {place}. Pass it through patch_dataloader_to_ddp() there; a sampler "
            "or dataset that shares by itself says so by an attribute is_ddp_aware = True."
        )


def _place() -> str:
    """Return the first file and line in the call stack that is outside torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NO_PLACES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
