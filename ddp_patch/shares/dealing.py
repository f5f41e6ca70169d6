"""Deal a sampler's stream window by window, so that each step costs alike on all ranks, and then share it as always."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np

from ddp_patch.costs import Costs
from ddp_patch.plan import Batching, Done, Plan
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.streams.chunks import owned
from ddp_patch.streams.dealing import Dealt, as_it_came, deal
from ddp_patch.streams.seeding import Seed, dealing_key

__all__ = ["Dealing", "DealtStream"]

T = TypeVar("T")

# An item with its place in the stream as the sampler gives it.
_Placed: TypeAlias = tuple[int, T]


@dataclass(frozen=True, slots=True)
class Dealing:
    """How a sampler's stream is dealt.

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
        """Return how a stream is dealt; None where it is not. A batch that is divided is dealt by itself."""
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
        """Return how many items a window has for so many ranks."""
        return self.steps * ranks * self.size

    def dealt(
        self, items: Sequence[Any] | np.ndarray[Any, Any], ranks: int, epoch: int, stage: int, window: int
    ) -> Dealt:
        """Return a window as it is dealt to so many ranks.

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


class DealtStream(Iterator[T]):
    """What is left of a stream, dealt for the ranks that share it now.

    A window is drawn as soon as its first item is asked for. Where other numbers of ranks have taken a part, the stream
    is dealt for each of them in turn, and what they took is left out.

    Args:
        stream: The sampler's stream, begun.
        dealing: How it is dealt.
        epoch: Which epoch it is.
        before: What other numbers of ranks have taken.
        plans: The shares whose origins are recorded.

    Attributes:
        origins: For each plan, where the items of its share come from: their places in the sampler's stream.
    """

    def __init__(self, stream: Iterator[T], dealing: Dealing, epoch: int, before: Done, plans: Sequence[Plan]) -> None:
        self._dealing, self._epoch, self._plans = dealing, epoch, plans
        self.origins: list[array[int]] = [array("q") for _ in plans]
        placed: Iterator[_Placed[T]] = enumerate(owned(stream))
        taken = [stint for stint in before if stint[1]]
        for stage, (ranks, each) in enumerate(taken):
            dealt = (pair for window in self._dealt(placed, ranks, stage) for pair in window)
            placed = islice(dealt, ranks * each, None)
        self._items = self._recorded(self._dealt(placed, plans[0].num_replicas, len(taken)))

    def __next__(self) -> T:
        return next(self._items)

    def _recorded(self, windows: Iterator[Sequence[_Placed[T]]]) -> Iterator[T]:
        # A window has whole rounds, but for the last one.
        for window in windows:
            for plan, origins in zip(self._plans, self.origins, strict=True):
                origins.extend(place for place, _ in window[plan.rank :: plan.num_replicas])
            yield from (item for _, item in window)

    def _dealt(self, placed: Iterator[_Placed[T]], ranks: int, stage: int) -> Iterator[Sequence[_Placed[T]]]:
        """Yield a stream's windows, each dealt to so many ranks."""
        for number, window in enumerate(_windows(placed, self._dealing.width(ranks))):
            items = [item for _, item in window]
            yield [
                window[place] for place in self._dealing.dealt(items, ranks, self._epoch, stage, number).order.tolist()
            ]


def _windows(stream: Iterator[T], size: int) -> Iterator[list[T]]:
    """Cut a stream into windows. What came before an exception is a window, too."""
    failure: Exception | None = None
    is_ended = False
    while not is_ended:
        window: list[T] = []
        try:
            window.extend(islice(stream, size))
        except Exception as error:  # noqa: BLE001 - the user's own, raised in its place
            failure = error
        is_ended = len(window) < size
        if window:
            yield window
        if failure is not None:
            raise failure
