"""Loaders with one iterator for all epochs: their batch sampler is wrapped in one that repeats it forever."""

import copy
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ddp_patch.compat.torch_loaders import KeptIterator, has_own_iteration, has_own_iterators
from ddp_patch.errors import UnsupportedLoaderError
from ddp_patch.loaders.nesting import iterated_by

__all__ = ["OneIterator", "repeated_in", "repeater_in", "with_repeated"]

_HOLD = frozenset({"sampler", "batch_sampler"})


def repeater_in(loader: Any) -> object | None:
    """Return what repeats a loader's sampler or batch sampler forever; None in ordinary loaders.

    Elsewhere than in a loader with an iteration of its own, such a sampler is one endless stream; and an iterable
    dataset is read once, whatever repeats its indices.
    """
    kind = type(loader)
    if not has_own_iteration(kind) or has_own_iterators(kind) or isinstance(loader.dataset, IterableDataset):
        return None
    outer = iterated_by(loader)
    return outer if _repeats(outer) else None


def repeated_in(repeater: object) -> Any:
    """Return the sampler that a repeater repeats."""
    (repeated,) = vars(repeater).values()
    return repeated


def with_repeated(repeater: Any, sampler: object) -> Any:
    """Return a copy of a repeater that repeats another sampler."""
    clone = copy.copy(repeater)
    vars(clone).update(dict.fromkeys(vars(clone), sampler))
    return clone


class OneIterator(KeptIterator, Iterator[Any]):
    """The one iterator of a loader that is not shared: torch's own, which begins when its first batch is asked for.

    Args:
        loader: The loader. It is not kept alive, because it holds this iterator.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = weakref.ref(loader)
        self.drop_pass()

    def drop_pass(self) -> None:
        """Leave what has begun."""
        self._begun: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._begun is None:
            loader = self._loader()
            if loader is None:
                raise UnsupportedLoaderError(
                    "A copy of a patched loader cannot be iterated after the loader itself is gone: it has one "
                    "iterator for all epochs, and that was the loader's. Keep what patch_dataloader_to_ddp() returned."
                )
            self._begun = DataLoader.__iter__(loader)
        return next(self._begun)

    def __getstate__(self) -> DataLoader[Any] | None:
        return self._loader()

    def __setstate__(self, loader: DataLoader[Any]) -> None:
        self._loader = weakref.ref(loader)
        self.drop_pass()


def _repeats(sampler: object) -> bool:
    """Return whether it holds one sampler and nothing else, has no length, and a copy repeats what it holds."""
    held = getattr(sampler, "__dict__", {})
    if len(held) != 1 or not held.keys() <= _HOLD or hasattr(type(sampler), "__len__") or None in held.values():
        return False
    trial = _Trial()
    try:
        return list(islice(with_repeated(sampler, trial), 5)) == [*trial.batches, *trial.batches, trial.batches[0]]
    except Exception:  # noqa: BLE001 - the user's code, tried on what it was not made for
        return False


class _Trial:
    """Stands for the sampler in a copy of what may repeat it."""

    def __init__(self) -> None:
        self.batches = [[0], [1]]
        self._begun = 0

    def __iter__(self) -> Iterator[list[int]]:
        self._begun += 1
        if self._begun > len(self.batches) + 1:
            raise RuntimeError("it asks on and gives nothing")
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)
