"""Samplers whose epochs follow from a key: the seed and the epoch, or a number that the pass draws."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ddp_patch.errors import SamplerError
from ddp_patch.samplers.checks import randomness
from ddp_patch.samplers.passes import At, CountingSampler, Positions
from ddp_patch.samplers.states import check_number, named_state
from ddp_patch.streams.seeding import shuffle_key

__all__ = ["KeyedSampler", "LatestEpoch", "generator_of", "taken_from"]

T = TypeVar("T")
Epoch = TypeVar("Epoch")


def generator_of(key: np.random.SeedSequence) -> np.random.Generator:
    """Return a generator that draws the same numbers from the same key in every version of numpy.

    Examples:
        >>> generator_of(np.random.SeedSequence(7)).integers(100, size=3).tolist()
        [94, 62, 68]
    """
    return np.random.Generator(np.random.PCG64(key))  # default_rng() may choose another bit generator one day


def taken_from(order: npt.NDArray[np.integer[Any]], positions: Positions) -> npt.NDArray[np.int64]:
    """Return the items at some positions of an order, which may hold them in fewer bytes.

    Examples:
        >>> taken_from(np.array([4, 3, 5], np.int16), np.array([2, 0])).tolist()
        [5, 4]
    """
    return np.take(order, positions, axis=0).astype(np.int64)


class LatestEpoch(Generic[Epoch]):
    """Keeps the latest epoch, so that an epoch is drawn once however often it is looked up.

    Examples:
        >>> latest = LatestEpoch[str]()
        >>> latest.of(3, lambda: "drawn"), latest.of(3, lambda: "drawn again")
        ('drawn', 'drawn')
    """

    def __init__(self) -> None:
        self._kept: tuple[int, Epoch] | None = None

    def of(self, epoch: int, draw: Callable[[], Epoch]) -> Epoch:
        """Return the epoch with this number, and draw it unless it is the latest."""
        if self._kept is None or self._kept[0] != epoch:
            self._kept = epoch, draw()
        return self._kept[1]


class KeyedSampler(CountingSampler[T]):
    """A sampler whose every epoch follows from one key.

    The key is made of ``seed`` and the epoch. Without ``seed``, a pass draws one number from ``generator``, or from
    torch's global generator, as torch's ``RandomSampler`` does. A subclass implements ``_order`` and ``__len__``.

    Attributes:
        seed: Every epoch's order follows from it; None if orders are drawn.
        generator: A pass draws its key from it; None for torch's global generator.
    """

    def __init__(self, seed: int | None, generator: torch.Generator | None) -> None:
        super().__init__()
        self.seed: int | None = randomness(seed, generator)
        self.generator = generator
        self._drawn: int | None = None  # the running pass's number
        self._to_come: int | None = None  # the number of a pass that was loaded and has not begun
        self._latest = LatestEpoch[At]()

    def __len__(self) -> int:
        raise NotImplementedError

    def _order(self, key: np.random.SeedSequence) -> At:
        raise NotImplementedError

    @property
    def has_random_access(self) -> bool:
        """Whether any part of any epoch can be looked up, which needs ``seed``."""
        return self.seed is not None

    def items_at(self, positions: Positions, epoch: int) -> Any:
        """Return the items at some positions of an epoch.

        Args:
            positions: In ``range(len(self))``, in any order and number.
            epoch: From 0.

        Returns:
            The items, in the order of the positions: indices as an array of the shape ``(positions,)``, batches as an
            array of the shape ``(positions, batch_size)`` or as a list of lists.

        Raises:
            SamplerError: There is no ``seed``, so an epoch's number does not say its order.
        """
        if self.seed is None:
            raise SamplerError(
                f"{type(self).__name__}.items_at() was called without a seed: the order of epoch {epoch} then follows "
                "from what generators draw, not from its number. Pass seed=, or iterate the sampler."
            )
        return self._epoch(self.seed, epoch)(positions)

    def _epoch(self, seed: int, epoch: int) -> At:
        return self._latest.of(epoch, lambda: self._order(shuffle_key(seed, epoch)))

    def _begin(self, skip: int) -> Iterator[Sequence[Any]]:
        self.epochs.begin(self.epochs.upcoming)
        return self._looked_up(self._order_of_pass(), skip, len(self))

    def _order_of_pass(self) -> At:
        """Return the order of the pass that begins, and draw its number if there is no seed."""
        if self.seed is not None:
            return self._epoch(self.seed, self.epochs.current)
        loaded, self._to_come = self._to_come, None
        drawn = torch.empty((), dtype=torch.int64).random_(generator=self.generator) if loaded is None else loaded
        self._drawn = int(drawn)
        return self._order(shuffle_key(self._drawn, 0))

    def _leave(self) -> None:
        super()._leave()
        self._to_come = None

    def state_of_latest_pass(self) -> dict[str, Any]:
        """Return the state at the beginning of the latest pass, with the number that the pass drew."""
        if self._progress is None:  # a subclass iterates in its own way
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
                f"seed={self.seed!r}, so the order differs. Make the sampler with the seed of the one that was saved."
            )

    def _load_state(self, state: Mapping[str, Any]) -> None:
        super()._load_state(state)
        self._to_come = state["drawn"]
        if self.generator is not None:
            self.generator.set_state(state["generator"])
