"""Passes that can be stopped and resumed: the base of every sampler here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from ddp_patch.plan import blocks
from ddp_patch.samplers.checks import whole
from ddp_patch.samplers.states import check_names, check_number, named_state
from ddp_patch.streams.progress import Progress
from ddp_patch.streams.seeding import EpochCounter

__all__ = ["At", "CountingSampler", "Positions", "ResumableSampler"]

T = TypeVar("T")

Positions: TypeAlias = npt.NDArray[np.int64]
# An epoch, as a function that returns the items at any of its positions.
At: TypeAlias = Callable[[Positions], Sequence[Any] | npt.NDArray[Any]]


class ResumableSampler(Sampler[T]):
    """A sampler whose pass can be stopped and resumed, in this process or another.

    A subclass implements ``_begin``, which begins a pass and returns its items in parts. It also implements ``_state``,
    ``_check_state`` and ``_load_state`` for all that a pass follows from, except how many items were taken.
    """

    _count = "taken"  # the name in a state for how far the pass has come
    _first = 0  # where that count begins
    _block = 4096  # how many items are looked up at once, at most
    _progress: Progress | None = None  # of the latest pass
    _skip = 0  # where the next pass begins

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[Iterator[T]]:
        """Yield a pass in parts, and draw nothing before the first item is asked for, as torch's samplers do."""
        skip, self._skip = self._skip, self._first
        parts = self._begin(skip)
        self._progress = progress = Progress(skip)
        for part in parts:
            yield progress.give(part)
        progress.end()

    def _begin(self, skip: int) -> Iterator[Sequence[Any]]:
        raise NotImplementedError

    def _looked_up(self, at: At, skip: int, length: int) -> Iterator[Sequence[Any]]:
        """Look an epoch's items up in parts, from position ``skip`` on."""
        self._require_count(skip, length)
        parts = (at(np.arange(run.start, run.stop)) for run in blocks(range(skip, length), self._block))
        return (found.tolist() if isinstance(found, np.ndarray) else found for found in parts)

    @property
    def _is_running(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._progress is not None and not self._progress.is_ended

    def _leave(self) -> None:
        """Forget the pass that is running or was loaded, so that the next one begins at its first item."""
        self._progress, self._skip = None, self._first

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the latest pass, as plain values.

        The state counts the items taken from this sampler, and a ``DataLoader`` with workers takes them ahead of the
        training. In a patched loader, save the state of that loader's own sampler instead.
        """
        if self._progress is None or self._progress.is_ended:
            return self.state_between_passes()
        return named_state(self, {self._count: self._progress.taken, **self._state(in_pass=True)})

    def state_between_passes(self) -> dict[str, Any]:
        """Return the state from which the next pass begins, as if a pass that is running were left."""
        return named_state(self, {self._count: self._skip, **self._state(in_pass=False)})

    def _state(self, *, in_pass: bool) -> dict[str, Any]:
        """Return what the running pass follows from if ``in_pass``, else what the next one follows from."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next pass resume where a sampler with the same arguments was saved.

        ``len()`` stays the length of a whole pass.

        Args:
            state_dict: What ``state_dict()`` returned.

        Raises:
            SamplerError: The state is damaged or belongs to something else. Nothing has changed then.
        """
        check_names(self, state_dict, set(self.state_between_passes()))
        self._require_count(state_dict[self._count])
        self._check_state(state_dict)
        self._leave()
        self._load_state(state_dict)
        self._skip = state_dict[self._count]

    def _require_count(self, taken: object, most: int | None = None) -> None:
        check_number(self, self._count, taken, self._first, most)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise SamplerError unless ``_load_state`` can load the state."""
        raise NotImplementedError

    def _load_state(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


class CountingSampler(ResumableSampler[T]):
    """A resumable sampler that counts its own epochs."""

    def __init__(self) -> None:
        self.epochs: EpochCounter = EpochCounter()

    @property
    def epoch(self) -> int:
        """The current epoch; before the first pass, the next one."""
        return self.epochs.current

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one. If this is never called, each pass that draws an item is the next epoch's."""
        before = None if self._is_running else self.epochs.upcoming
        self.epochs.set(whole("epoch", epoch, 0, "an epoch's order is derived from its number"))
        if self.epochs.upcoming != before:  # the same epoch again keeps a pass that was loaded
            self._leave()

    def _state(self, *, in_pass: bool) -> dict[str, Any]:
        return {"epoch": self.epochs.current if in_pass else self.epochs.upcoming}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        check_number(self, "epoch", state["epoch"], 0)

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.epochs.set(state["epoch"])
