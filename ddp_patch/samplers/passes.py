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
from ddp_patch.samplers.checks import randomness, whole
from ddp_patch.streams.progress import Progress
from ddp_patch.streams.seeding import EpochCounter, shuffle_key

__all__ = [
    "At",
    "CountingSampler",
    "KeyedSampler",
    "Positions",
    "ResumableSampler",
    "Stateful",
    "check_number",
    "taken_from",
]

T = TypeVar("T")

Positions: TypeAlias = npt.NDArray[np.int64]
# An epoch: the items at any of its positions.
At: TypeAlias = Callable[[Positions], Sequence[Any] | npt.NDArray[Any]]


def taken_from(order: npt.NDArray[np.integer[Any]], positions: Positions) -> npt.NDArray[np.int64]:
    """Return an order's items at some positions, which it may hold in fewer bytes."""
    return np.take(order, positions, axis=0).astype(np.int64)


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

    A subclass gives ``_begin``, which begins a pass and returns what it yields, in parts; and ``_state`` and
    ``_load_state``, what a pass follows from besides how far it has come.
    """

    _count = "taken"  # what a state calls how far a pass has come
    _first = 0  # what is counted from
    _progress: Progress | None = None
    _skip = 0
    _block = 4096  # so many items are looked up at once

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._runs())

    def _runs(self) -> Iterator[Iterator[T]]:
        """Yield the items in runs; as with torch's samplers, nothing is drawn before the first is asked for."""
        skip, self._skip = self._skip, self._first
        parts = self._begin(skip)
        # The epoch and the states that a pass follows from are kept by the subclass.
        self._progress = progress = Progress(skip)
        for part in parts:
            yield progress.give(part)
        progress.end()

    def _begin(self, skip: int) -> Iterator[Sequence[Any]]:
        raise NotImplementedError

    def _looked_up(self, at: At, skip: int, length: int) -> Iterator[Sequence[Any]]:
        """Return an epoch's items, but for so many at its beginning, in parts."""
        self._require_count(skip, length)
        parts = (at(np.arange(run.start, run.stop)) for run in blocks(range(skip, length), self._block))
        return (found.tolist() if isinstance(found, np.ndarray) else found for found in parts)

    @property
    def _is_running(self) -> bool:
        """Whether a pass has begun and not come to its end."""
        return self._progress is not None and not self._progress.is_ended

    def _leave(self) -> None:
        """Forget the pass that is running, if any: the next one begins at its beginning."""
        self._progress, self._skip = None, self._first

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest pass stands, as plain values.

        A pass stands where items were taken from this sampler, which a ``DataLoader`` with workers does ahead of the
        training. A patched loader's sampler has a state of its own, and that is the one to keep.
        """
        if self._progress is None or self._progress.is_ended:
            return self.state_between_passes()
        return named_state(self, {self._count: self._progress.taken, **self._state(in_pass=True)})

    def state_between_passes(self) -> dict[str, Any]:
        """Return what the next pass follows from, as a state, although one may be running: it is left then."""
        return named_state(self, {self._count: self._skip, **self._state(in_pass=False)})

    def _state(self, *, in_pass: bool) -> dict[str, Any]:
        """Return what the pass that is running follows from; or else the next one."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next pass go on where a state was taken, of a sampler with the same arguments.

        ``len()`` stays that of a whole pass.

        Raises:
            SamplerError: It is the state of something else, or damaged; then nothing has changed.
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
        """Raise SamplerError unless what a pass follows from can be loaded."""
        raise NotImplementedError

    def _load_state(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError


class CountingSampler(ResumableSampler[T]):
    """A resumable sampler that counts epochs of its own."""

    def __init__(self) -> None:
        self.epochs: EpochCounter = EpochCounter()

    @property
    def epoch(self) -> int:
        """The epoch being drawn, or before the first pass the one that will be."""
        return self.epochs.current

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be drawn. Without it, each pass that draws anything is the next epoch's."""
        before = None if self._is_running else self.epochs.upcoming
        self.epochs.set(whole("epoch", epoch, 0, "an epoch's order is derived from its number"))
        if self.epochs.upcoming != before:  # else the pass that was loaded is still to come
            self._leave()

    def _state(self, *, in_pass: bool) -> dict[str, Any]:
        return {"epoch": self.epochs.current if in_pass else self.epochs.upcoming}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        check_number(self, "epoch", state["epoch"], 0)

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self.epochs.set(state["epoch"])


def named_state(sampler: object, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state that says of which kind of sampler it is, and of which version."""
    return {"kind": type(sampler).__name__, "version": _VERSION, **values}


def check_names(sampler: object, state: Mapping[str, Any], names: set[str]) -> None:
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
    if differing := sorted(names ^ state.keys()):
        raise SamplerError(
            f"{name}.load_state_dict() was given {sorted(state)} and needs {sorted(names)}: "
            f"{', '.join(differing)} is in one of them alone, as where one sampler was given generator= and the other "
            "not. Make the sampler with the arguments of the one that was saved."
        )


def check_number(sampler: object, name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise SamplerError unless a number in a state is one that the sampler could have told."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not (is_whole and least <= value and (most is None or value <= most)):  # type: ignore[operator]  # a whole one
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise SamplerError(
            f"{type(sampler).__name__} cannot go on from a state with {name}={value!r}: here that is a whole number of "
            f"{bounds}. Pass what the state_dict() of a sampler with the same arguments returned."
        )


class KeyedSampler(CountingSampler[T]):
    """A sampler whose every epoch follows from one key: of ``seed`` and the epoch, or drawn when a pass begins.

    Without ``seed`` a pass draws one number from ``generator``, or from torch's global one, as torch's
    ``RandomSampler`` does. A subclass gives ``_order``.

    Attributes:
        seed: What every epoch's order follows from, or None.
        generator: What a pass draws its key from, or None.
    """

    def __init__(self, seed: int | None, generator: torch.Generator | None) -> None:
        super().__init__()
        self.seed: int | None = randomness(seed, generator)
        self.generator = generator
        self._drawn: int | None = None  # of the pass that is running
        self._to_come: int | None = None  # of the pass that was loaded
        self._latest: tuple[int, At] | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def _order(self, key: np.random.SeedSequence) -> At:
        raise NotImplementedError

    @property
    def has_random_access(self) -> bool:
        """Whether any part of any epoch can be looked up: where ``seed`` was given."""
        return self.seed is not None

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

    def _begin(self, skip: int) -> Iterator[Sequence[Any]]:
        self.epochs.begin(self.epochs.upcoming)
        return self._looked_up(self._begun(), skip, len(self))

    def _begun(self) -> At:
        if self.seed is not None:
            return self._epoch(self.seed, self.epochs.current)
        loaded, self._to_come = self._to_come, None
        # One number, as torch's RandomSampler draws one for each pass.
        drawn = torch.empty((), dtype=torch.int64).random_(generator=self.generator) if loaded is None else loaded
        self._drawn = int(drawn)
        return self._order(shuffle_key(self._drawn, 0))

    def _leave(self) -> None:
        super()._leave()
        self._to_come = None

    def state_of_latest_pass(self) -> dict[str, Any]:
        """Return where the latest pass began, once its order was drawn."""
        if self._progress is None:  # a subclass that iterates in its own way
            return self.state_between_passes()
        return named_state(self, {self._count: self._progress.skip, **self._state(in_pass=True)})

    def _state(self, *, in_pass: bool) -> dict[str, Any]:
        state = super()._state(in_pass=in_pass) | {
            "drawn": self._drawn if in_pass else self._to_come,
            "seed": self.seed,
        }
        return state if self.generator is None else {**state, "generator": self.generator.get_state()}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        super()._check_state(state)
        self._require_count(state[self._count], len(self))
        if state["drawn"] is not None:
            check_number(self, "drawn", state["drawn"], 0)
        if state["seed"] != self.seed:
            raise SamplerError(
                f"{type(self).__name__}.load_state_dict() was given a state of seed={state['seed']!r} and has "
                f"seed={self.seed!r}: the order is another. Make the sampler with the seed of the one that was saved."
            )

    def _load_state(self, state: Mapping[str, Any]) -> None:
        super()._load_state(state)
        self._to_come = state["drawn"]
        if self.generator is not None:
            self.generator.set_state(state["generator"])
