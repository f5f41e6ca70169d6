"""What the samplers share: passes that can be resumed, and orders that follow from one key."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from ddp_patch.errors import SamplerError
from ddp_patch.plan import blocks
from ddp_patch.progress import Progress
from ddp_patch.samplers.checks import randomness, whole
from ddp_patch.seeding import EpochCounter, shuffle_key

__all__ = ["At", "KeyedSampler", "Positions", "ResumableSampler", "Stateful", "check_state", "named_state"]

T = TypeVar("T")

Positions: TypeAlias = npt.NDArray[np.int64]
# An epoch: the items at any of its positions.
At: TypeAlias = Callable[[Positions], Sequence[Any] | npt.NDArray[Any]]

# Of what states say, and of what an epoch holds.
_VERSION = 1


@runtime_checkable
class Stateful(Protocol):
    """torch's protocol of what can be saved and gone on with."""

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a state was taken."""


class ResumableSampler(Sampler[T]):
    """A sampler whose pass can be left and gone on with, in this process or another.

    A subclass gives ``_begin``, which begins a pass and returns its items' positions looked up, and how many there
    are; and ``_state`` and ``_load_state``, what a pass follows from besides how far it has come.
    """

    _progress: Progress | None = None
    _skip = 0
    _block = 4096  # so many items are looked up at once

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._runs())

    def _runs(self) -> Iterator[Iterator[T]]:
        """Yield the items in runs; as with torch's samplers, nothing is drawn before the first is asked for."""
        skip, self._skip = self._skip, 0
        at, length = self._begin()
        # The epoch and the states that a pass follows from are kept by the subclass.
        self._progress = progress = Progress(skip=skip, given=skip)
        for run in blocks(range(skip, length), self._block):
            found = at(np.arange(run.start, run.stop))
            yield progress.begin(found.tolist() if isinstance(found, np.ndarray) else found)
        progress.ended = True

    def _begin(self) -> tuple[At, int]:
        raise NotImplementedError

    @property
    def _is_running(self) -> bool:
        """Whether a pass has begun and not come to its end."""
        return self._progress is not None and not self._progress.ended

    def _leave(self) -> None:
        """Forget the pass that is running, if any: the next one begins at its beginning."""
        self._progress, self._skip = None, 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest pass stands, as plain values.

        A pass stands where items were taken from this sampler, which a ``DataLoader`` with workers does ahead of the
        training. A patched loader's sampler has a state of its own, and that is the one to keep.
        """
        taken = self._progress.taken if self._progress is not None and not self._progress.ended else self._skip
        return named_state(self, {"taken": taken, **self._state()})

    def _state(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next pass go on where a state was taken, of a sampler with the same arguments.

        Raises:
            SamplerError: It is the state of something else.
        """
        check_state(self, state_dict, {"taken", *self._state()})
        self._leave()
        self._load_state(state_dict)
        self._skip = state_dict["taken"]

    def _load_state(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


def named_state(sampler: object, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state that says of which kind of sampler it is, and of which version."""
    return {"kind": type(sampler).__name__, "version": _VERSION, **values}


def check_state(sampler: object, state: Mapping[str, Any], names: set[str]) -> None:
    """Raise SamplerError unless a state is of this kind of sampler, of this version, and has these names alone."""
    name = type(sampler).__name__
    if not isinstance(state, Mapping) or state.get("kind") != name:
        kind = state.get("kind", "nothing named") if isinstance(state, Mapping) else f"a {type(state).__name__}"
        raise SamplerError(
            f"{name}.load_state_dict() was given the state of {kind}: each kind of sampler stands somewhere else. Pass "
            f"what the state_dict() of a {name} returned."
        )
    if state.get("version") != _VERSION:
        raise SamplerError(
            f"{name}.load_state_dict() was given version {state.get('version')!r} and reads {_VERSION}: what an epoch "
            "holds may differ. Go on with the version of ddp_patch that saved it, or begin an epoch anew."
        )
    if differing := sorted(names ^ (state.keys() - {"kind", "version"})):
        raise SamplerError(
            f"{name}.load_state_dict() was given {sorted(state)} and needs {sorted(names | {'kind', 'version'})}: "
            f"{', '.join(differing)} is in one of them alone, as where one sampler was given generator= and the other "
            "not. Make the sampler with the arguments of the one that was saved."
        )


class KeyedSampler(ResumableSampler[T]):
    """A sampler whose every epoch follows from one key: of ``seed`` and the epoch, or drawn when a pass begins.

    Without ``seed`` a pass draws one number from ``generator``, or from torch's global one, as torch's
    ``RandomSampler`` does. A subclass gives ``_order``.

    Attributes:
        seed: What every epoch's order follows from, or None.
        generator: What a pass draws its key from, or None.
    """

    def __init__(self, seed: int | None, generator: torch.Generator | None) -> None:
        randomness(seed, generator)
        self.seed = seed
        self.generator = generator
        self.epochs = EpochCounter()
        self._drawn: int | None = None  # of the pass that is running
        self._to_come: int | None = None  # of the pass that was loaded
        self._latest: tuple[int, At] | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def _order(self, key: np.random.SeedSequence) -> At:
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The epoch being drawn, or before the first pass the one that will be."""
        return self.epochs.current

    @property
    def has_random_access(self) -> bool:
        """Whether any part of any epoch can be looked up: where ``seed`` was given."""
        return self.seed is not None

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be drawn. Without it, each pass that draws anything is the next epoch's."""
        before = None if self._is_running else self.epochs.upcoming
        self.epochs.set(whole("epoch", epoch, 0, "an epoch's order is derived from its number"))
        if self.epochs.upcoming != before:  # else the pass that was loaded is still to come
            self._leave()

    def items_at(self, positions: Positions, epoch: int) -> Any:
        """Return the items at some positions of an epoch.

        Args:
            positions: In ``range(len(self))``, in any order and number.
            epoch: From 0.

        Raises:
            SamplerError: There is no ``seed``, so no epoch follows from its number.
        """
        if self.seed is None:
            raise SamplerError(
                f"{type(self).__name__}.items_at() was called without a seed: epoch {epoch} then follows from what the "
                "generators draw, and not from its number. Pass seed=, or iterate the sampler."
            )
        return self._epoch(self.seed, epoch)(positions)

    def _epoch(self, seed: int, epoch: int) -> At:
        if self._latest is None or self._latest[0] != epoch:
            self._latest = epoch, self._order(shuffle_key(seed, epoch))
        return self._latest[1]

    def _begin(self) -> tuple[At, int]:
        self.epochs.begin(self.epochs.upcoming)
        if self.seed is not None:
            return self._epoch(self.seed, self.epochs.current), len(self)
        loaded, self._to_come = self._to_come, None
        # One number, as torch's RandomSampler draws one for each pass.
        drawn = torch.empty((), dtype=torch.int64).random_(generator=self.generator) if loaded is None else loaded
        self._drawn = int(drawn)
        return self._order(shuffle_key(self._drawn, 0)), len(self)

    def _leave(self) -> None:
        super()._leave()
        self._to_come = None

    def _state(self) -> dict[str, Any]:
        running = self._is_running
        state: dict[str, Any] = {
            "epoch": self.epochs.current if running else self.epochs.upcoming,
            "drawn": self._drawn if running else self._to_come,
        }
        return state if self.generator is None else {**state, "generator": self.generator.get_state()}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.epochs.set(state["epoch"])
        self._to_come = state["drawn"]
        if self.generator is not None:
            self.generator.set_state(state["generator"])
