"""How a pass gets balanced items from an order that can be looked up: one window at a time."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from ddp_patch.orders.fingerprint import fingerprint
from ddp_patch.orders.orders import Order
from ddp_patch.schedule import Sizes, size_of
from ddp_patch.sharding.balancing import BalancedWindow, Balancer, as_it_came
from ddp_patch.sharding.drawing import Epoch, Origins
from ddp_patch.sharding.sources import Indexed

__all__ = ["BalancedOrder"]


T = TypeVar("T")


class BalancedOrder(Indexed[T]):
    """Looks up a window of the epoch's order, balances it, and takes this rank's part of it.

    It begins with the window in which the pass resumes. Nobody else has taken a part of the epoch.

    Args:
        epoch: The epoch.
        balancer: How its order is balanced.
    """

    length: int | None
    drawn: int
    sizes: Sizes | None
    origins: Origins

    def __init__(self, epoch: Epoch[T], balancer: Balancer) -> None:
        super().__init__(epoch)
        self._balancer = balancer
        self.origins = Origins()

    def parts(self, skip: int) -> Iterator[Sequence[T]]:
        """Draw the order, and yield this rank's items window by window."""
        epoch, plan = self._epoch, self._epoch.plan
        order = self._drawn_order()
        self.drawn = sys.maxsize
        length = self.length = order.length
        real, repeated = plan.sources(length)
        windows = _Windows(order, self._balancer, plan.num_replicas, epoch.number)
        padding = _at(windows.items(0), windows.dealt(0).order[list(repeated)]) if repeated else []
        # The items that every rank has come first. Whoever asks for more finds the end, at the same step.
        rounds = length // plan.num_replicas
        first = min(skip * plan.num_replicas // windows.width, windows.count)
        done = first * windows.width // plan.num_replicas
        if epoch.keeps_sizes:
            self.sizes = Sizes()
            self.sizes.add(0, batches=first * windows.width)  # nobody asks for those that were done
        last: Sequence[T] = []
        orders: list[str] = []
        for number in range(first, windows.count):
            if epoch.noted is not None:
                epoch.noted.add_window(number * windows.width, windows.dealt(number).order)
            own = windows.dealt(number).of_rank(plan.rank)[: len(real) - done]
            taken = own[max(0, skip - done) :]
            self.origins.add(taken + number * windows.width)
            if self.sizes is not None:
                _note(self.sizes, windows.items(number), windows.dealt(number).order)
            if epoch.verify is not None:
                orders.append(fingerprint([windows.dealt(number).order]))
            items = _at(windows.items(number), taken)
            until = max(0, rounds - max(done, skip))
            yield items[:until]
            last, done = items[until:], done + len(own)
        self._verify(order, has_whole_rounds=skip <= rounds, dealt=orders)
        yield last
        yield padding[max(0, skip - len(real)) :]
        self._finish()


class _Windows:
    """The windows of an order, the latest of them in memory."""

    def __init__(self, order: Order, balancer: Balancer, ranks: int, epoch: int) -> None:
        self._order, self._balancer, self._ranks, self._epoch = order, balancer, ranks, epoch
        self.width: int = balancer.width(ranks)
        self.count: int = -(-order.length // self.width)
        self._latest: tuple[int, Any, BalancedWindow] = (-1, [], as_it_came(0))

    def items(self, number: int) -> Any:
        """Return the items of a window as they come, which may be an array."""
        return self._window(number)[0]

    def dealt(self, number: int) -> BalancedWindow:
        """Return their positions in the window, balanced."""
        return self._window(number)[1]

    def _window(self, number: int) -> tuple[Any, BalancedWindow]:
        if self._latest[0] != number:
            positions = range(number * self.width, min(self._order.length, (number + 1) * self.width))
            found = self._order.array(positions)
            items = self._order.at(positions) if found is None else found
            self._latest = (number, items, self._balancer.dealt(items, self._ranks, self._epoch, 0, number))
        return self._latest[1:]


def _at(items: Any, places: np.ndarray[Any, Any]) -> list[Any]:
    if isinstance(items, np.ndarray):
        listed: list[Any] = items[places].tolist()
        return listed
    return [items[place] for place in places.tolist()]


def _note(sizes: Sizes, items: Any, places: Iterable[int]) -> None:
    for place in places:
        sizes.add(size_of(items[place]))
