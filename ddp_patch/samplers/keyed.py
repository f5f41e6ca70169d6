"""The base of samplers whose epochs follow from a key; checks of arguments; a scalable shuffle."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from ddp_patch.errors import SamplerError
from ddp_patch.orders.orders import Permutation, blocks
from ddp_patch.orders.random_states import EpochCounter, shuffle_key
from ddp_patch.validation import as_index

__all__ = [
    "At",
    "KeyedSampler",
    "Positions",
    "ScalableRandomSampler",
    "flag",
    "generator_of",
    "sequence",
    "smallest",
    "whole",
]

T = TypeVar("T")

Positions: TypeAlias = npt.NDArray[np.int64]
# An epoch, as a function that returns the items at any of its positions.
At: TypeAlias = Callable[[Positions], Sequence[Any] | npt.NDArray[Any]]


def whole(name: str, value: object, least: int, reason: str, bits: int | None = None) -> int:
    """Return a whole number as an int, or raise SamplerError if it is something else, too small or too large.

    Args:
        name: The argument's name.
        value: The argument.
        least: The smallest number allowed.
        reason: Why the argument must be such a number, for the error message.
        bits: The number must be less than 2**bits; None for any size.

    Examples:
        >>> whole("batch_size", np.int32(8), 1, "it is the number of samples in a batch")
        8
    """
    number = as_index(value)
    if number is None or number < least:
        raise SamplerError(f"{name}={value!r} is not a whole number of at least {least}: {reason}. Pass such an int.")
    if bits is not None and number.bit_length() > bits:
        raise SamplerError(
            f"{name}={number} is more than 2**{bits} - 1: positions are computed in 64 bits. Pass at most that."
        )
    return number


def flag(name: str, value: object) -> bool:
    """Return a bool, or raise SamplerError if the value is something else."""
    if not isinstance(value, bool):
        raise SamplerError(f"{name}={value!r} is neither True nor False. Pass one of them.")
    return value


def sequence(name: str, values: Any) -> npt.NDArray[Any] | list[Any]:
    """Return a value for each sample, as an array or a list, or raise SamplerError if they have no order."""
    if isinstance(values, torch.Tensor):
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy(force=True)  # numpy has no bfloat16
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, Mapping | Set) or not isinstance(values, Iterable):
        raise SamplerError(
            f"{name}={values!r} is not a sequence (type {type(values).__name__}). Pass a list, array or tensor."
        )
    return list(values)


def smallest(n: int) -> type[np.integer[Any]]:
    """Return the smallest type of integers that holds ``range(n)``, which is the fastest to sort and look up.

    Examples:
        >>> smallest(1000)
        <class 'numpy.int16'>
    """
    return next((kind for kind in (np.int16, np.int32) if n <= np.iinfo(kind).max), np.int64)


def generator_of(key: np.random.SeedSequence) -> np.random.Generator:
    """Return a generator that draws the same numbers from the same key in every version of numpy.

    Examples:
        >>> generator_of(np.random.SeedSequence(7)).integers(100, size=3).tolist()
        [94, 62, 68]
    """
    return np.random.Generator(np.random.PCG64(key))  # default_rng() may choose another bit generator one day


class KeyedSampler(Sampler[T]):
    """A sampler whose every epoch follows from one key, and which counts them: each pass that draws is the next one's.

    The key is made of ``seed`` and the epoch. Without ``seed``, a pass draws one number from torch's global generator,
    as torch's ``RandomSampler`` does. A subclass implements ``_order`` and ``__len__``.

    Attributes:
        seed: Every epoch's order follows from it; None if orders are drawn.
    """

    _block = 4096  # how many items are looked up at once, at most

    def __init__(self, seed: int | None) -> None:
        self.epochs: EpochCounter = EpochCounter()
        self.seed: int | None = None if seed is None else whole("seed", seed, 0, "epochs' orders are derived from it")
        self._looked_up: tuple[int, At] | None = None  # the latest epoch

    @property
    def epoch(self) -> int:
        """The current epoch; before the first pass, the next one."""
        return self.epochs.current

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one."""
        self.epochs.set(whole("epoch", epoch, 0, "an epoch's order is derived from its number"))

    def __len__(self) -> int:
        raise NotImplementedError

    def _order(self, key: np.random.SeedSequence) -> At:
        raise NotImplementedError

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[Sequence[T]]:
        """Yield a pass in parts, and draw nothing before the first item is asked for, as torch's samplers do."""
        self.epochs.begin(self.epochs.upcoming)
        if self.seed is not None:
            at = self._epoch(self.seed, self.epochs.current)
        else:
            at = self._order(shuffle_key(int(torch.empty((), dtype=torch.int64).random_()), 0))
        for run in blocks(range(len(self)), self._block):
            found = at(np.arange(run.start, run.stop))
            yield found.tolist() if isinstance(found, np.ndarray) else found

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
        """Return an epoch, which is drawn once however often it is looked up."""
        if self._looked_up is None or self._looked_up[0] != epoch:
            self._looked_up = epoch, self._order(shuffle_key(seed, epoch))
        return self._looked_up[1]


class ScalableRandomSampler(KeyedSampler[int]):
    """Shuffle ``range(n)`` in constant memory: each item is computed when it is needed.

    Args:
        n: How many samples there are, from 0 to 2**63 - 1.
        seed: Every epoch's order follows from it and the epoch's number. Default: each pass draws one number from
            torch's global generator.

    Raises:
        SamplerError: ``n`` is no such number.

    Examples:
        >>> sampler = ScalableRandomSampler(10**12, seed=0)
        >>> first = next(iter(sampler))
        >>> first == sampler.items_at(np.array([0]), epoch=0).item()
        True
    """

    _block = 2**16  # the permutation takes some hundred numpy calls for however few positions

    def __init__(self, n: int, *, seed: int | None = None) -> None:
        super().__init__(seed)
        self.n: int = whole("n", n, 0, "it is the number of samples to shuffle", bits=63)

    def __len__(self) -> int:
        return self.n

    def _order(self, key: np.random.SeedSequence) -> At:
        return Permutation(self.n, key)
