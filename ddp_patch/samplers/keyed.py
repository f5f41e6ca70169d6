"""The base of samplers whose epochs follow from a key; checks of arguments; a shuffle, windows and iterations."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain, count, islice
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from ddp_patch.errors import SamplerError
from ddp_patch.loaders.samples import tell_epoch
from ddp_patch.orders.orders import Permutation, blocks
from ddp_patch.orders.random_states import EpochCounter, shuffle_key
from ddp_patch.validation import as_index

__all__ = [
    "At",
    "IterationBatchSampler",
    "KeyedSampler",
    "Positions",
    "ScalableRandomSampler",
    "WindowSampler",
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


class CountingSampler(Sampler[T]):
    """A sampler that counts its own epochs: each pass that draws an item is the next one's."""

    def __init__(self) -> None:
        self.epochs: EpochCounter = EpochCounter()

    @property
    def epoch(self) -> int:
        """The current epoch; before the first pass, the next one."""
        return self.epochs.current

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one."""
        self.epochs.set(whole("epoch", epoch, 0, "an epoch's order is derived from its number"))


class KeyedSampler(CountingSampler[T]):
    """A sampler whose every epoch follows from one key.

    The key is made of ``seed`` and the epoch. Without ``seed``, a pass draws one number from torch's global generator,
    as torch's ``RandomSampler`` does. A subclass implements ``_order`` and ``__len__``.

    Attributes:
        seed: Every epoch's order follows from it; None if orders are drawn.
    """

    _block = 4096  # how many items are looked up at once, at most

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.seed: int | None = None if seed is None else whole("seed", seed, 0, "epochs' orders are derived from it")
        self._looked_up: tuple[int, At] | None = None  # the latest epoch

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


class WindowSampler(KeyedSampler[int]):
    """Yield the starts of windows over a time series, with another random offset in each epoch.

    Windows follow each other at ``stride`` and wrap round at the end of the series. With the default stride an epoch
    sees every point once, and a few points twice if the window does not divide the series. Every point is equally
    likely to be one of these, and to be anywhere in its window.

    Args:
        size: How many points the series has, less than 2**62.
        window: How many points a window has.
        stride: How many points lie from one window's start to the next one's; by default ``window``.
        shuffle: Whether the windows come in a random order. Otherwise they come in the order of the series.
        seed: As for ``ScalableRandomSampler``.

    Raises:
        SamplerError: The window or the stride is longer than the series, or an argument is of another kind.

    Examples:
        >>> sampler = WindowSampler(size=10, window=3, shuffle=False, seed=0)
        >>> starts = list(sampler)
        >>> len(starts), [(start - starts[0]) % 10 for start in starts]
        (4, [0, 3, 6, 9])
    """

    _block = 2**16  # as in ScalableRandomSampler

    def __init__(
        self,
        size: int,
        window: int,
        stride: int | None = None,
        *,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        self.size: int = whole("size", size, 1, "it is the number of points in the series", bits=62)
        self.window: int = _of_at_most("window", window, self.size, "would hold points twice")
        step = self.window if stride is None else stride
        self.stride: int = _of_at_most("stride", step, self.size, "would leave the series behind")
        self.shuffle: bool = flag("shuffle", shuffle)

    def __len__(self) -> int:
        return -(-self.size // self.stride)

    def _order(self, key: np.random.SeedSequence) -> At:
        offset_key, shuffle_key = key.spawn(2)
        offset = int(generator_of(offset_key).integers(self.size))
        numbers = Permutation(len(self), shuffle_key) if self.shuffle else None
        return partial(self._starts, offset, numbers)

    def _starts(self, offset: int, numbers: Permutation | None, positions: Positions) -> Positions:
        windows = positions if numbers is None else numbers(positions)
        return (offset + windows * self.stride) % self.size


def _of_at_most(name: str, value: int, size: int, consequence: str) -> int:
    """Return a number from 1 to the series' size, or raise SamplerError."""
    number = whole(name, value, 1, "it counts points of the series")
    if number > size:
        raise SamplerError(
            f"{name}={number} is longer than the series, which has {size} points, and {consequence}. Pass at most "
            f"{size}."
        )
    return number


class IterationBatchSampler(CountingSampler[list[int]]):
    """Yield a fixed number of batches, from as many epochs of a batch sampler as that takes.

    Before each epoch, the wrapped samplers that have a ``set_epoch`` get the epoch's number. One pass is one training,
    and its number is this sampler's epoch. No two trainings share an epoch of the wrapped samplers.

    In a patched loader, all ranks together get ``num_iterations`` batches. For as many steps on each rank, multiply by
    the number of ranks.

    Args:
        batch_sampler: A batch sampler, or any iterable of batches that can be iterated again.
        num_iterations: How many iterations the training has.

    Raises:
        SamplerError: ``num_iterations`` is no such number, or, while drawing, an epoch has no batch.

    Examples:
        >>> list(IterationBatchSampler([[0, 1], [2]], num_iterations=5))
        [[0, 1], [2], [0, 1], [2], [0, 1]]

    Source:
        maskrcnn-benchmark's ``IterationBasedBatchSampler``.
    """

    sets_nested_epochs = True  # so that no wrapper sets the epochs of the wrapped samplers

    def __init__(self, batch_sampler: Iterable[list[int]], num_iterations: int) -> None:
        super().__init__()
        self.batch_sampler = batch_sampler
        self.num_iterations: int = whole("num_iterations", num_iterations, 1, "a training needs at least one")

    def __len__(self) -> int:
        return self.num_iterations

    def __iter__(self) -> Iterator[list[int]]:
        self.epochs.begin(self.epochs.upcoming)
        yield from islice(self._batches(self.epochs.current), self.num_iterations)

    def _batches(self, training: int) -> Iterator[list[int]]:
        """Yield a training's batches without end."""
        # Every epoch has a batch at least, so a training needs at most `num_iterations` epochs.
        for epoch in count(training * self.num_iterations):
            tell_epoch(self.batch_sampler, epoch)
            batch = None
            for batch in self.batch_sampler:
                yield batch
            if batch is None:
                raise SamplerError(
                    f"Epoch {epoch} of {type(self.batch_sampler).__name__} has no batch, so {self.num_iterations} "
                    "iterations are never reached. Pass a batch sampler that gives some each time it is iterated, not "
                    "an iterator."
                )
