"""Epochs of which any part can be looked up, so that a rank takes its share without what lies between.

torch's own samplers draw an epoch's order at once; here it is kept as they draw it, in 32 bits where these hold it, and
each rank reads its positions. Other samplers take part by ``items_at``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddp_patch.permutation import Permutation
from ddp_patch.seeding import shuffle_key

__all__ = ["Order", "RandomAccess", "ScalableShuffle", "blocks", "has_order", "order_of"]

_DRAWN_AT_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

_FIRST_BLOCK, _LARGEST_BLOCK = 64, 4096


@runtime_checkable
class RandomAccess(Protocol):
    """A sampler whose items can be looked up at any positions of any epoch.

    A sampler that has both methods is not drawn: each rank asks for the items of its own share, so it costs
    no more for any number of ranks. Every rank must be given the same items for the same position and epoch.

    Examples:
        >>> class Strided:
        ...     def __len__(self):
        ...         return 10**9
        ...     def __iter__(self):
        ...         return iter(self.items_at(np.arange(len(self)), 0))
        ...     def items_at(self, positions, epoch):
        ...         return (positions * 7 + epoch) % len(self)
        >>> from ddp_patch import DDPSamplerWrapper
        >>> share = DDPSamplerWrapper(Strided(), False, num_replicas=1000, rank=3)
        >>> next(iter(share)), len(share)
        (21, 1000000)
    """

    def __len__(self) -> int:
        """How many items an epoch has."""

    def items_at(self, positions: npt.NDArray[np.int64], epoch: int) -> Sequence[Any] | npt.NDArray[Any]:
        """Return the items at these positions, in ``range(len(self))``, of an epoch."""


@dataclass(frozen=True, slots=True)
class Order:
    """One epoch's stream, to be looked up.

    Attributes:
        length: How many items it has.
        at: Gives the items at some positions, all of them in ``range(length)``.
        finish: Draws what the sampler draws after its last item.
    """

    length: int
    at: Callable[[range], Sequence[Any]]
    finish: Callable[[], object] = lambda: None


def has_order(sampler: object) -> bool:
    """Tell whether ``order_of`` knows the sampler.

    torch's samplers are those of exactly its types: a subclass may have any order.
    """
    return type(sampler) in _DRAWN_AT_ONCE or _is_random_access(sampler)


def _is_random_access(sampler: object) -> TypeGuard[RandomAccess]:
    return isinstance(sampler, RandomAccess) and not isinstance(sampler, type)


def order_of(sampler: object, epoch: int) -> Order:
    """Return the order of an epoch, which torch's samplers draw here; it is the order that iterating them gives."""
    # As each sampler's __iter__ draws it, but as a whole, and in the smallest type: the values do not depend on it.
    if type(sampler) is SequentialSampler:
        return Order(len(sampler.data_source), lambda positions: positions)
    if type(sampler) is RandomSampler:
        return _random_order(sampler)
    if type(sampler) is SubsetRandomSampler:
        indices = sampler.indices
        drawn = torch.randperm(len(indices), generator=sampler.generator, dtype=_integers(len(indices)))
        return Order(len(drawn), lambda positions: [indices[place] for place in _read(drawn, positions)])
    if type(sampler) is WeightedRandomSampler:
        return _drawn(
            torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator)
        )
    assert _is_random_access(sampler)  # noqa: S101 - who calls this has asked has_order()
    return Order(len(sampler), lambda positions: _looked_up(sampler, positions, epoch))


def _random_order(sampler: RandomSampler) -> Order:
    n, num_samples = len(sampler.data_source), sampler.num_samples
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    dtype = _integers(n)
    if sampler.replacement:
        return _drawn(torch.randint(n, (num_samples,), dtype=dtype, generator=generator))
    whole, rest = divmod(num_samples, n)
    drawn = [torch.randperm(n, generator=generator, dtype=dtype) for _ in range(whole)]
    if rest:
        drawn.append(torch.randperm(n, generator=generator, dtype=dtype)[:rest])
        return _drawn(drawn[0] if len(drawn) == 1 else torch.cat(drawn))
    given = sampler.generator

    def finish() -> None:
        if given is not None:  # torch draws one more and takes nothing of it, which moves the user's generator
            torch.randperm(n, generator=given, dtype=dtype)

    return _drawn(drawn[0] if len(drawn) == 1 else torch.cat(drawn), finish)


def _integers(n: int) -> torch.dtype:
    """The smallest type that holds ``range(n)``."""
    return torch.int32 if n <= torch.iinfo(torch.int32).max else torch.int64


def _drawn(order: torch.Tensor, finish: Callable[[], object] = lambda: None) -> Order:
    return Order(len(order), lambda positions: _read(order, positions), finish)


def _read(order: torch.Tensor, positions: range) -> list[int]:
    return cast(list[int], order[positions.start : positions.stop : positions.step].tolist())


def _looked_up(sampler: RandomAccess, positions: range, epoch: int) -> Sequence[Any]:
    found = sampler.items_at(positions.start + positions.step * np.arange(len(positions)), epoch)
    return found.tolist() if isinstance(found, np.ndarray | torch.Tensor) else found


def blocks(positions: range) -> Iterator[range]:
    """Cut positions into blocks: a short one first, so that the first batch comes at once, then twice as many each."""
    start, size = 0, _FIRST_BLOCK
    while start < len(positions):
        yield positions[start : start + size]
        start, size = start + size, min(2 * size, _LARGEST_BLOCK)


class ScalableShuffle(Sampler[int]):
    """The order of a shuffling sampler of torch's, in constant memory: computed at the positions asked for.

    Args:
        sampler: A ``RandomSampler`` without replacement, or a ``SubsetRandomSampler``.
        seed: What each epoch's order follows from.
    """

    def __init__(self, sampler: RandomSampler | SubsetRandomSampler, seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch = 0
        self._latest: tuple[tuple[int, ...], Permutation] | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        for positions in blocks(range(len(self))):
            yield from self.items_at(np.arange(positions.start, positions.stop), self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that iterating gives."""
        self.epoch = epoch

    def items_at(self, positions: npt.NDArray[np.int64], epoch: int) -> list[int]:
        """Return the indices at these positions of an epoch."""
        indices = self.sampler.indices if isinstance(self.sampler, SubsetRandomSampler) else None
        n = len(self.sampler.data_source) if indices is None else len(indices)  # type: ignore[union-attr]  # one or the other
        # More samples than there are: one permutation after another.
        rounds, places = np.divmod(positions, n)
        found = np.empty_like(positions)
        for number in np.unique(rounds).tolist():
            here = rounds == number
            found[here] = self._permutation(n, epoch, number)(places[here])
        return found.tolist() if indices is None else [indices[place] for place in found.tolist()]

    def _permutation(self, *which: int) -> Permutation:
        if self._latest is None or self._latest[0] != which:
            n, epoch, number = which
            self._latest = which, Permutation(n, shuffle_key(self.seed, epoch, number))
        return self._latest[1]
