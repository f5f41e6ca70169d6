"""A guard for tests: an unpatched loader that is iterated on one of several ranks raises, saying where it was made."""

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

# Told by the environment, so that ranks which a guarded test starts are guarded too, however it starts them.
_VARIABLE = "DDP_PATCH_GUARD"
_for_good = ExitStack()
_NO_PLACES = tuple(str(Path(str(module.__file__)).parent) + os.sep for module in (torch, sys.modules["ddp_patch"]))
_PLACE = "_ddp_patch_made_at"  # the attribute of a loader that tells where it was made


def places_recorded() -> AbstractContextManager[None]:
    """While entered, it is written down of every loader in which file and line it is made."""
    return _methods_wrapped("__init__", _recording)


def _recording(begin: Any) -> Any:
    @functools.wraps(begin)
    def init(self: DataLoader[Any], *args: Any, **options: Any) -> None:
        vars(self).setdefault(_PLACE, _place())  # by a subclass's constructor before its base's
        begin(self, *args, **options)

    return init


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
    with patch.dict(os.environ, {_VARIABLE: "1"}), _iteration_guarded():
        yield


def guard_this_process() -> None:
    """Guard the process for the rest of its life, or no longer, as its environment tells."""
    _for_good.close()
    if _VARIABLE in os.environ:
        _for_good.enter_context(_iteration_guarded())


@contextmanager
def _iteration_guarded() -> Iterator[None]:
    with places_recorded(), _methods_wrapped("__iter__", _guarding):
        yield


@contextmanager
def _methods_wrapped(name: str, wrapped: Callable[[Any], Any]) -> Iterator[None]:
    """While entered, a method is wrapped in every class of loaders, also those that are made meanwhile.

    A subclass need not call its base's: torchdata's StatefulDataLoader does not.
    """
    with ExitStack() as stack:

        def wrap(kind: type[DataLoader[Any]]) -> None:
            if name in vars(kind):
                stack.enter_context(patch.object(kind, name, wrapped(vars(kind)[name])))

        before = DataLoader.__init_subclass__.__func__  # type: ignore[attr-defined]  # a class method

        def init_subclass(kind: type[DataLoader[Any]], /, **options: Any) -> None:
            before(kind, **options)
            wrap(kind)

        for kind in _kinds(DataLoader):
            wrap(kind)
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
    """Return the file and line that made a loader: the first outside of torch and of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NO_PLACES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
