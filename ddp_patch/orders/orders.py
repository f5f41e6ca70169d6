"""Look up an epoch's order, so that a rank reads only the items of its share.

torch's own samplers draw an epoch's order at once. ``order_of`` draws the same order, keeps it in 32-bit integers if
they suffice, and reads this rank's positions. Samplers with ``items_at`` return the items at any positions directly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from ddp_patch.compat.private_torch import is_torch_batch_sampler
from ddp_patch.errors import StreamLengthError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RandomAccess(Protocol):
    """A sampler that can look up the items at any positions of any epoch.

    Give your sampler these methods, and each rank looks up only its own items, so the cost does not grow with the
    number of ranks. The items must depend on position and epoch only, and equal the items that iterating yields. A
    subclass that overrides ``__iter__`` but not ``items_at`` is iterated. If some samplers of a class have no random
    access, set their attribute ``has_random_access`` to False.

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
        """Return how many items an epoch has."""

    def items_at(self, positions: NDArray[np.int64], epoch: int) -> Sequence[Any] | NDArray[Any]:
        """Return the items at some positions of an epoch.

        Args:
            positions: In ``range(len(self))``, in any order and number.
            epoch: From 0.

        Returns:
            The items, in the order of the positions.
        """


def is_random_access(sampler: object) -> TypeGuard[RandomAccess]:
    """Return whether a sampler has random access.

    The sampler's class or a base class must define ``items_at``, and no subclass of this class may override only
    ``__iter__``. A sampler whose ``has_random_access`` is False has none, whatever its class defines.

    Examples:
        >>> from ddp_patch.samplers import ScalableRandomSampler
        >>> is_random_access(ScalableRandomSampler(9, seed=1)), is_random_access(ScalableRandomSampler(9))
        (True, False)
    """
    if getattr(sampler, "has_random_access", True) is False:
        return False
    for base in type(sampler).__mro__:
        if "items_at" in vars(base):
            names = list(inspect.signature(vars(base)["items_at"]).parameters)[1:]
            return names == ["positions", "epoch"] and hasattr(type(sampler), "__len__")
        if "__iter__" in vars(base):
            return False
    return False


# The longest order with repeated items that is drawn at once; it takes 1 GiB.
_MOST_DRAWN = 2**28
# How many positions are looked up at once. The first block is small, so that the first batch comes at once.
_FIRST_BLOCK, _LARGEST_BLOCK = 64, 4096


def blocks(positions: range, largest: int = _LARGEST_BLOCK) -> Iterator[range]:
    """Cut positions into blocks, each twice as long as the one before.

    The first block is short, so that the first batch comes at once.

    Args:
        positions: What to cut.
        largest: How many positions a block has at most.

    Examples:
        >>> [len(block) for block in blocks(range(1000), largest=256)]
        [64, 128, 256, 256, 256, 40]
    """
    start, size = 0, _FIRST_BLOCK
    while start < len(positions):
        yield positions[start : start + size]
        start, size = start + size, min(2 * size, largest)


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """One epoch's stream, for looking up items.

    Attributes:
        length: The number of items.
        at: Returns the items at some positions, all in ``range(length)``.
        finish: Draws what the sampler draws after its last item.
        sizes: Returns the sizes of the batches at some positions, as runs of (size, number of batches); None if only
            the batches themselves show their sizes.
        pieces: Cuts positions into pieces that are looked up one after the other.
        drawn: The items, if they are in memory as whole numbers, shape (items,); if items are batches, the whole
            batches, shape (batches, size); otherwise None.
    """

    length: int
    at: Callable[[range], Sequence[Any]]
    finish: Callable[[], object] = lambda: None
    sizes: Callable[[range], Sequence[tuple[int, int]]] | None = None
    pieces: Callable[[range], Iterable[range]] = blocks
    drawn: torch.Tensor | None = None

    def items(self) -> Iterator[Any]:
        """Yield all items, then draw what the sampler draws after its last one."""
        for positions in self.pieces(range(self.length)):
            yield from self.at(positions)
        self.finish()


# The functions ``_..._order`` draw an epoch's order with the same calls as the sampler's ``__iter__``, but as a whole
# and in the smallest integers that fit; the values are the same. The functions draw from the sampler's generator, or
# else from ``private_generator``, or from the global generator if both are None.


def _given(sampler: Any) -> torch.Generator | None:
    """Return a sampler's generator; None if it has none, or the global one."""
    return None if sampler.generator is torch.default_generator else sampler.generator


def _sequential_order(sampler: SequentialSampler, _: torch.Generator | None) -> EpochOrder:
    return EpochOrder(len(sampler.data_source), lambda positions: positions)


def _random_order(sampler: RandomSampler, private_generator: torch.Generator | None) -> EpochOrder:
    n, num_samples, given = len(sampler.data_source), sampler.num_samples, _given(sampler)
    generator = given
    if generator is None:
        seed = torch.empty((), dtype=torch.int64).random_(generator=private_generator)
        generator = torch.Generator().manual_seed(int(seed.item()))
    dtype = _integers(n)
    if sampler.replacement:
        return _drawn(torch.randint(n, (num_samples,), dtype=dtype, generator=generator))
    permuted = partial(torch.randperm, n, dtype=dtype, generator=generator)
    order = torch.cat([permuted() for _ in range(0, num_samples, n)]) if num_samples > n else permuted()
    # After n samples torch draws once more and discards the result, which moves the user's generator.
    return _drawn(order[:num_samples], permuted if given is not None and num_samples == n else lambda: None)


def _subset_order(sampler: SubsetRandomSampler, private_generator: torch.Generator | None) -> EpochOrder:
    indices, generator = sampler.indices, _given(sampler) or private_generator
    drawn = torch.randperm(len(indices), generator=generator, dtype=_integers(len(indices)))
    return EpochOrder(len(drawn), lambda positions: [indices[place] for place in _read(drawn, positions)])


def _weighted_order(sampler: WeightedRandomSampler, private_generator: torch.Generator | None) -> EpochOrder:
    generator = _given(sampler) or private_generator
    return _drawn(torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=generator))


# torch's own samplers, by exact type: a subclass may have any order.
_TORCH_ORDERS: Mapping[type, Callable[[Any, torch.Generator | None], EpochOrder]] = {
    SequentialSampler: _sequential_order,
    RandomSampler: _random_order,
    SubsetRandomSampler: _subset_order,
    WeightedRandomSampler: _weighted_order,
}


def is_torch_sampler(sampler: object) -> bool:
    """Return whether a sampler is of a class of torch's own, whose attributes no pass changes."""
    return type(sampler) in _TORCH_ORDERS


def is_always_alike(sampler: object) -> bool:
    """Return whether every epoch surely has the same order: the order of the dataset, or of a plain list."""
    return type(_sampler_of_items(sampler)) in {SequentialSampler, range, list, tuple}


def has_order(sampler: object) -> bool:
    """Return whether ``order_of`` can look up the sampler's order.

    An order with repeated items must fit into memory, and the sampler must have no generator of its own: torch draws
    such an order piece by piece, so drawing it at once would move the generator too far.
    """
    sampler = _sampler_of_items(sampler)
    if type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples > len(sampler.data_source)):
        return sampler.generator is None and sampler.num_samples <= _MOST_DRAWN and len(sampler.data_source) > 0
    return is_torch_sampler(sampler) or has_computed_order(sampler)


def has_computed_order(sampler: object) -> bool:
    """Return whether ``order_of`` computes the sampler's order without drawing anything."""
    return is_random_access(_sampler_of_items(sampler))


def order_of(sampler: Any, epoch: int, private_generator: torch.Generator | None = None) -> EpochOrder:
    """Return the order of an epoch: the items that iterating the sampler yields. For torch's samplers, draw it now.

    Args:
        sampler: The sampler.
        epoch: The epoch.
        private_generator: The generator from which torch's samplers draw if they have none. Default: the global one.
    """
    if _is_batching(sampler):
        return _in_batches(order_of(sampler.sampler, epoch, private_generator), sampler.batch_size, sampler.drop_last)
    if is_torch_sampler(sampler):
        return _TORCH_ORDERS[type(sampler)](sampler, private_generator)
    return EpochOrder(len(sampler), partial(_looked_up, sampler, epoch))


def _is_batching(sampler: object) -> TypeGuard[BatchSampler]:
    """Return whether a sampler makes batches of another one's items as torch does."""
    return is_torch_batch_sampler(type(sampler))


def _sampler_of_items(sampler: Any) -> Any:
    """Return the sampler of the items that torch's batch sampler makes batches of; any other sampler itself."""
    while _is_batching(sampler):
        sampler = sampler.sampler
    return sampler


def _in_batches(items: EpochOrder, size: int, drop_last: bool) -> EpochOrder:
    """Return the order of the batches that torch's ``BatchSampler`` makes of an order of items."""
    length = items.length
    whole = None if items.drawn is None else items.drawn[: length // size * size].reshape(-1, size)

    def at(positions: range) -> list[list[Any]]:
        if whole is not None and positions and positions[-1] < len(whole):
            return cast("list[list[Any]]", _cut(whole, positions).tolist())
        starts = range(positions.start * size, positions.stop * size, positions.step * size)
        return [list(items.at(range(start, min(start + size, length)))) for start in starts]

    def sizes(positions: range) -> list[tuple[int, int]]:
        full = max(0, min(positions.stop, length // size) - positions.start)
        return [(size, full), (length % size, len(positions) - full)]

    batches = length // size if drop_last else -(-length // size)
    return EpochOrder(batches, at, items.finish, sizes, drawn=whole)


def in_blocks(positions: range, size: int) -> Iterator[tuple[int, range]]:
    """Cut positions at the multiples of a size; yield each block's number, and the positions within the block.

    Examples:
        >>> list(in_blocks(range(3, 14, 4), size=10))
        [(0, range(3, 11, 4)), (1, range(1, 5, 4))]
    """
    while positions:
        number = positions.start // size
        start = number * size
        here = positions[: -(-(start + size - positions.start) // positions.step)]
        yield number, range(here.start - start, here.stop - start, here.step)
        positions = positions[len(here) :]


def _integers(n: int) -> torch.dtype:
    """Return the smaller of torch's 32- and 64-bit integer types that can store ``range(n)``."""
    return torch.int32 if n <= torch.iinfo(torch.int32).max else torch.int64


def _drawn(order: torch.Tensor, finish: Callable[[], object] = lambda: None) -> EpochOrder:
    return EpochOrder(len(order), partial(_read, order), finish, drawn=order)


def _read(order: torch.Tensor, positions: range) -> list[int]:
    return cast(list[int], _cut(order, positions).tolist())


def _cut(order: torch.Tensor, positions: range) -> torch.Tensor:
    return order[positions.start : positions.stop : positions.step]


def _looked_up(sampler: RandomAccess, epoch: int, positions: range) -> list[Any]:
    if not positions:
        return []
    found = sampler.items_at(_as_array(positions), epoch)
    items = found.tolist() if isinstance(found, np.ndarray | torch.Tensor) else list(found)
    if len(items) != len(positions):
        raise StreamLengthError(
            f"{type(sampler).__name__}.items_at() returned {len(items)} items for {len(positions)} positions, so a "
            "rank would take too few or too many. Let it return one item for each position."
        )
    return items


def _as_array(positions: range) -> NDArray[np.int64]:
    step = positions.step if len(positions) > 1 else 1  # a single position's step may exceed 64 bits
    return positions.start + step * np.arange(len(positions))
