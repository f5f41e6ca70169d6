"""Balance a sampler's stream window by window, so that each step costs about the same on all ranks."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np

from ddp_patch.costs import Costs
from ddp_patch.plan import Batching, Done, Plan
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.streams.chunks import owned
from ddp_patch.streams.dealing import Dealt, as_it_came, deal
from ddp_patch.streams.seeding import Seed, dealing_key

__all__ = ["Dealing", "dealt_stream"]

T = TypeVar("T")

# Items, and their positions in the sampler's own order.
_Window: TypeAlias = tuple[Sequence[T], np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class Dealing:
    """How a sampler's stream is balanced.

    Attributes:
        costs: What the items cost.
        size: How many items a batch takes.
        steps: How many steps a window has.
        are_batches: Whether each item is a batch.
        seed: What the random order of steps follows from, with the epoch.
    """

    costs: Costs
    size: int
    steps: int
    are_batches: bool
    seed: Seed

    @classmethod
    def of(cls, agreed: Agreed, batching: Batching, *, are_batches: bool) -> Self | None:
        """Return how a stream is balanced; None if it is not. A batch that is divided is balanced by itself."""
        options = agreed.options
        if options.costs is None or options.divides_batches:
            return None
        return cls(options.costs, batching.size, options.cost_window, are_batches, agreed.seed)

    @property
    def described(self) -> dict[str, object]:
        """What the order follows from, by the names under which states keep it."""
        return {"cost": self.costs.described, "cost_of": self.costs.cost_of, "cost_window": self.steps} | (
            {} if self.are_batches else {"batch_size": self.size}
        )

    def width(self, ranks: int) -> int:
        """Return how many items a window has for this many ranks."""
        return min(self.steps * ranks * self.size, sys.maxsize)

    def dealt(
        self, items: Sequence[Any] | np.ndarray[Any, Any], ranks: int, epoch: int, stage: int, window: int
    ) -> Dealt:
        """Return a window, balanced for this many ranks.

        Args:
            items: Its items.
            ranks: How many ranks share them.
            epoch: Which epoch it is.
            stage: How many other numbers of ranks have taken a part of it before.
            window: Which window of the rest it is.
        """
        if ranks == 1:  # nobody waits
            return as_it_came(len(items))
        costs = self.costs.of(items, are_batches=self.are_batches)
        key = dealing_key(self.seed.value, epoch, stage, window)
        return deal(costs, ranks, self.size, self.costs.cost_of, key)


def dealt_stream(
    stream: Iterator[T],
    dealing: Dealing,
    epoch: int,
    before: Done,
    plans: Sequence[Plan],
    note: Callable[[Sequence[np.ndarray[Any, Any]]], object],
) -> Iterator[T]:
    """Return the rest of a stream, balanced for the present number of ranks.

    A window is drawn as soon as its first item is asked for. If other numbers of ranks have taken a part, the stream is
    balanced for each of them in turn, and what they took is left out. Nothing here refers to what is returned, so that
    an abandoned stream is closed at once.

    Args:
        stream: The sampler's stream, begun.
        dealing: How it is balanced.
        epoch: Which epoch it is.
        before: What other numbers of ranks have taken.
        plans: Whose shares will be taken.
        note: Called for each window with the positions in the sampler's stream from which the next items of each share
            come.
    """
    *taken, (ranks, _) = worlds = [*(stint for stint in before if stint[1]), (plans[0].num_replicas, 0)]
    windows = _numbered(owned(stream), dealing.width(worlds[0][0]))
    for stage, (earlier, each) in enumerate(taken):
        dealt = _dealt(windows, dealing, earlier, epoch, stage)
        windows = _without(dealt, earlier * each, dealing.width(worlds[stage + 1][0]))
    dealt = _dealt(windows, dealing, ranks, epoch, len(taken))
    return chain.from_iterable(map(partial(_recorded, plans, note), dealt))


def _recorded(
    plans: Sequence[Plan], note: Callable[[Sequence[np.ndarray[Any, Any]]], object], window: _Window[T]
) -> Sequence[T]:
    """Record where the items of a window come from, which has whole rounds unless it is the last one."""
    items, places = window
    note([places[plan.rank :: plan.num_replicas] for plan in plans])
    return items


def _dealt(windows: Iterator[_Window[T]], dealing: Dealing, ranks: int, epoch: int, stage: int) -> Iterator[_Window[T]]:
    """Balance a stream's windows for this many ranks."""
    for number, (items, places) in enumerate(windows):
        order = dealing.dealt(items, ranks, epoch, stage, number).order
        yield list(map(items.__getitem__, order.tolist())), places[order]


def _numbered(stream: Iterator[T], width: int) -> Iterator[_Window[T]]:
    """Cut a stream into windows, and number its items."""
    start = 0
    for items in _cut(stream, width):
        yield items, np.arange(start, start + len(items), dtype=np.int64)
        start += len(items)


def _without(windows: Iterator[_Window[T]], taken: int, width: int) -> Iterator[_Window[T]]:
    """Leave out the first items of a balanced stream, and cut the rest into other windows."""
    numbered = chain.from_iterable(zip(items, places.tolist(), strict=True) for items, places in windows)
    for window in _cut(islice(numbered, taken, None), width):
        items, places = zip(*window, strict=True)
        yield items, np.array(places, np.int64)


def _cut(stream: Iterator[T], width: int) -> Iterator[list[T]]:
    """Cut a stream into windows. What came before an exception is a window, too."""
    failure: Exception | None = None
    is_ended = False
    while not is_ended:
        window: list[T] = []
        try:
            window.extend(islice(stream, width))
        except Exception as error:  # noqa: BLE001 - the user's own, raised where it came
            failure = error
        is_ended = len(window) < width
        if window:
            yield window
        if failure is not None:
            raise failure
