"""The order in which ranks share a sampler's items: its own, permuted once more, in runs, or balanced."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from ddp_patch.orders.chunks import copy_item, start_iterating
from ddp_patch.orders.digest import Digest
from ddp_patch.orders.orders import EpochOrder, has_computed_order, has_order, order_of
from ddp_patch.orders.random_states import distributed_permutation, epoch_seed
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.sharding.balancing import Balancer, balanced_order, balanced_stream

T = TypeVar("T")


class SharedOrder(Generic[T]):
    """The order in which ranks share a sampler's items, and how an epoch of it comes.

    Args:
        sampler: The sampler.
        agreed: What the ranks agreed on.
        shuffles: Whether the whole epoch is permuted once more.
        balancer: Balances the costs of the ranks' items; None if nobody said what these cost.

    Attributes:
        shuffles: As given; users may change it.
    """

    def __init__(self, sampler: Iterable[T], agreed: Agreed, *, shuffles: bool, balancer: Balancer | None) -> None:
        self.shuffles: bool = shuffles
        self._sampler, self._balancer = sampler, balancer
        self._seed, self._gives_runs = agreed.seed, agreed.options.gives_runs

    @property
    def is_drawn(self) -> bool:
        """Whether the sampler's order can be looked up once it is drawn; a computed one follows from the epoch."""
        return has_order(self._sampler) and not has_computed_order(self._sampler)

    @property
    def is_looked_up(self) -> bool:
        """Whether a pass looks its items up in the epoch's order, instead of drawing those of all ranks."""
        return has_order(self._sampler) and not (self.shuffles or self._gives_runs)

    @property
    def may_adapt(self) -> bool:
        """Whether somebody may change the sampler within a pass, so that a step at a time is to be drawn."""
        return self._balancer is None and not has_order(self._sampler)

    def drawn(self, epoch: int) -> Callable[[], EpochOrder]:
        """Return what draws the sampler's own order of an epoch."""
        # The generator draws what the global one would draw from the epoch's states, and nobody else can draw from it.
        private_generator = torch.Generator().manual_seed(epoch_seed(self._seed.value, epoch))
        return partial(order_of, self._sampler, epoch, private_generator)

    def balanced(self, epoch: int, ranks: int) -> Callable[[EpochOrder, int, Digest | None], EpochOrder] | None:
        """Return what balances an epoch's order, which so many ranks began; None if it is shared as it comes."""
        return None if self._balancer is None else partial(balanced_order, self._balancer, ranks, epoch)

    def stream(self, epoch: int, ranks: int, *, has_generators: bool) -> Iterator[T]:
        """Begin to yield an epoch's items, in the order that the ranks share.

        Args:
            epoch: The epoch.
            ranks: How many ranks began it.
            has_generators: Whether the sampler draws from generators of its own.
        """
        begin: Callable[[], Iterator[T]] = partial(start_iterating, self._sampler)
        # Where nobody else draws from the same, the sampler is not begun: it may count epochs by that.
        if self.is_looked_up or (self.is_drawn and not has_generators):
            begin = partial(_in_order, self.drawn(epoch))
        if self.shuffles:
            begin = partial(_arranged, begin, partial(_in_permutation, self._seed.value, epoch))
        if self._gives_runs:
            begin = partial(_arranged, begin, partial(_in_runs, ranks))
        return begin() if self._balancer is None else balanced_stream(self._balancer, epoch, ranks, begin())


def _in_order(order: Callable[[], EpochOrder]) -> Iterator[Any]:
    """Draw an order when its first item is asked for, as torch's samplers do, and yield its items."""
    yield from order().items()


def _arranged(begin: Callable[[], Iterator[T]], places: Callable[[int], Sequence[int]]) -> Iterator[T]:
    """Yield a sampler's epoch in another order, which needs all of it.

    Args:
        begin: Begins the sampler.
        places: Returns the places of the items in its own order, given their number.
    """
    items = [copy_item(item) for item in begin()]
    for place in places(len(items)):
        yield items[place]


def _in_permutation(seed: int, epoch: int, n: int) -> Sequence[int]:
    """Return ``DistributedSampler(shuffle=True)``'s order."""
    places: Sequence[int] = distributed_permutation(n, seed, epoch).tolist()
    return places


def _in_runs(ranks: int, n: int) -> Sequence[int]:
    """Return the order in which each rank takes a run, where an order is shared in rounds."""
    each, more = divmod(n, ranks)  # the first ranks have one more
    starts = [rank * each + min(rank, more) for rank in range(ranks)]
    return [starts[place % ranks] + place // ranks for place in range(n)]
