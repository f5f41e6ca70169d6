"""Frameworks that shard loaders themselves: which loaders they get as they are, and which are patched before."""

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

from torch.utils.data import DataLoader

from ddp_patch.autopatching.exempt import is_off
from ddp_patch.autopatching.session import Session
from ddp_patch.compat.frameworks import ACCELERATE_TAKES_LOADERS, TAKE_LOADERS
from ddp_patch.loaders.facts import Level, look_at
from ddp_patch.loaders.first_use import Use

__all__ = ["Frameworks"]


class Frameworks:
    """Sees, while entered, the loaders that are passed to frameworks.

    Lightning would replace the loader's sampler, so the loader is patched before. accelerate shards all loaders
    correctly except those with a batch sampler that is not torch's own, so only these are patched before. The rest is
    left to accelerate, and to any framework that returns a loader which shards itself.

    Args:
        session: Decides on the loaders.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stack = ExitStack()
        self._missing: dict[tuple[str, str, str], Callable[[Any], Any]] = {
            **dict.fromkeys(TAKE_LOADERS, self._patching_first),
            ACCELERATE_TAKES_LOADERS: self._for_accelerate,
        }

    def __enter__(self) -> Self:
        self.find()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def find(self, loader: object = None) -> None:
        """Take hold of those that were imported since."""
        for place in [place for place in self._missing if place[0] in sys.modules]:
            module, kind, method = place
            owner = getattr(sys.modules[module], kind, None)
            if owner is not None:  # else it is being imported
                wrap = self._missing.pop(place)
                self._stack.enter_context(patch.object(owner, method, wrap(getattr(owner, method))))

    def _patching_first(self, take: Any) -> Any:
        @functools.wraps(take)
        def taking(*args: Any, **options: Any) -> Any:
            for given in (*args, *options.values()):
                if isinstance(given, DataLoader):
                    self._session.used(given, Use.HANDED)
            return take(*args, **options)

        return taking

    def _for_accelerate(self, take: Any) -> Any:
        @functools.wraps(take)
        def taking(accelerator: Any, data_loader: Any, *args: Any, **options: Any) -> Any:
            if issubclass(type(data_loader), DataLoader) and not is_off():
                if _splits_batches(data_loader):
                    self._session.used(data_loader, Use.HANDED)
                if self._session.has_patched(data_loader):
                    from ddp_patch.integrations.accelerate import prepare_patched

                    return prepare_patched(accelerator, data_loader)
            return take(accelerator, data_loader, *args, **options)

        return taking


def _splits_batches(loader: DataLoader[Any]) -> bool:
    """Return whether accelerate would split a batch sampler's batches, or lose some."""
    facts = look_at(loader)
    return facts.sharded_by is None and facts.level is Level.BATCH
