"""Epochs of which any part can be looked up, so that a rank takes its share without what lies between.

torch's own samplers draw an epoch's order at once; here it is kept as they draw it, in 32 bits where these hold it, and
each rank reads its positions. Other samplers take part by ``items_at``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

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

from ddp_patch.errors import StreamLengthError
from ddp_patch.plan import blocks
from ddp_patch.streams.permutation import Permutation
from ddp_patch.streams.random_access import RandomAccess, is_random_access
from ddp_patch.streams.seeding import shuffle_key

__all__ = [
    "Order",
    "ScalableShuffle",
    "has_order",
    "is_random_access",
    "order_of",
]

# Of an order that is drawn turn by turn, how many items a turn has, at least.
_TURN = 2**17


@dataclass(frozen=True, slots=True)
class Order:
    """One epoch's stream, to be looked up.

    Attributes:
        length: How many items it has.
        at: Gives the items at some positions, all of them in ``range(length)``. It is asked for increasing ones, from
            call to call too.
        finish: Draws what the sampler draws after its last item.
    """

    length: int
    at: Callable[[range], Sequence[Any]]
    finish: Callable[[], object] = lambda: None


def has_order(sampler: object) -> bool:
    """Tell whether ``order_of`` knows the sampler.

    torch's samplers are those of exactly its types: a subclass may have any order. Of the user's own generator nothing
    is drawn ahead of the turn in use: where there are several, the sampler is to be iterated.
    """
    if type(sampler) is RandomSampler:
        turns = sampler.replacement or sampler.num_samples > len(sampler.data_source)
        return not (turns and (sampler.generator is not None or len(sampler.data_source) == 0))
    known = (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, ScalableShuffle)
    return type(sampler) in known or is_random_access(sampler)


def order_of(sampler: Any, epoch: int) -> Order:
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
    if type(sampler) is ScalableShuffle:
        return sampler.order(epoch)
    return Order(len(sampler), partial(_looked_up, sampler, epoch))


def _random_order(sampler: RandomSampler) -> Order:
    n, num_samples, given = len(sampler.data_source), sampler.num_samples, sampler.generator
    generator = given
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    dtype = _integers(n)

    def permuted(size: int) -> torch.Tensor:
        turns = [torch.randperm(n, generator=generator, dtype=dtype) for _ in range(-(-size // n))]
        return (turns[0] if len(turns) == 1 else torch.cat(turns))[:size]

    if sampler.replacement:
        drawn = _Turns(num_samples, _TURN, lambda size: torch.randint(n, (size,), dtype=dtype, generator=generator))
        return Order(num_samples, drawn.at)
    if num_samples > n:
        return Order(num_samples, _Turns(num_samples, n * -(-_TURN // n), permuted).at)
    # After n samples torch draws once more and takes nothing of it, which moves the user's generator.
    return _drawn(permuted(num_samples), lambda: permuted(n) if given is not None and num_samples == n else None)


class _Turns:
    """An order that is drawn turn by turn, of which one is held.

    Args:
        length: How many items it has.
        size: How many a turn has.
        draw: Draws the next turn, of as many items as it is told.
    """

    def __init__(self, length: int, size: int, draw: Callable[[int], torch.Tensor]) -> None:
        self._length, self._size, self._draw = length, size, draw
        self._number = 0
        self._turn = draw(min(size, length))

    def at(self, positions: range) -> list[int]:
        """Return the items at positions that increase, from call to call too."""
        items: list[int] = []
        while len(items) < len(positions):
            rest = positions[len(items) :]
            while rest[0] >= (self._number + 1) * self._size:
                self._number += 1
                self._turn = self._draw(min(self._size, self._length - self._number * self._size))
            start = self._number * self._size
            here = rest[: -(-(start + self._size - rest.start) // rest.step)]
            items += _read(self._turn, range(here.start - start, here.stop - start, here.step))
        return items


def _integers(n: int) -> torch.dtype:
    """The smallest type that holds ``range(n)``."""
    return torch.int32 if n <= torch.iinfo(torch.int32).max else torch.int64


def _drawn(order: torch.Tensor, finish: Callable[[], object] = lambda: None) -> Order:
    return Order(len(order), partial(_read, order), finish)


def _read(order: torch.Tensor, positions: range) -> list[int]:
    return cast(list[int], order[positions.start : positions.stop : positions.step].tolist())


def _looked_up(sampler: RandomAccess, epoch: int, positions: range) -> list[Any]:
    if not positions:
        return []
    found = sampler.items_at(_as_array(positions), epoch)
    items = found.tolist() if isinstance(found, np.ndarray | torch.Tensor) else list(found)
    if len(items) != len(positions):
        raise StreamLengthError(
            f"{type(sampler).__name__}.items_at() gave {len(items)} items for {len(positions)} positions, so a rank "
            "would take too few or too many. Let it return one item for each."
        )
    return items


def _as_array(positions: range) -> npt.NDArray[np.int64]:
    step = positions.step if len(positions) > 1 else 1  # of a single position it may be larger than 64 bits
    return positions.start + step * np.arange(len(positions))


class ScalableShuffle(Sampler[int]):
    """The order of a shuffling sampler of torch's, in constant memory: computed at the positions asked for.

    Args:
        sampler: A ``RandomSampler`` without replacement, of no more samples than there are, or a
            ``SubsetRandomSampler``.
        seed: What each epoch's order follows from.
    """

    def __init__(self, sampler: RandomSampler | SubsetRandomSampler, seed: int) -> None:
        self.sampler = sampler
        self.seed = seed
        self.epoch: int = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        order = self.order(self.epoch)
        for positions in blocks(range(order.length)):
            yield from order.at(positions)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that iterating gives."""
        self.epoch = epoch

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch."""
        sampler = self.sampler
        indices = sampler.indices if isinstance(sampler, SubsetRandomSampler) else None
        n = len(sampler.data_source if isinstance(sampler, RandomSampler) else sampler.indices)
        permutation = Permutation(n, shuffle_key(self.seed, epoch))

        def at(positions: range) -> list[int]:
            places: list[int] = permutation(_as_array(positions)).tolist()
            return places if indices is None else [indices[place] for place in places]

        return Order(len(self.sampler), at)
