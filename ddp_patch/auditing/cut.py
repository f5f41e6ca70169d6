"""Cut what one process gets into the shares of many ranks, without their loaders."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ddp_patch.auditing.drawn import RankDraws, joined
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit
from ddp_patch.options import Options
from ddp_patch.plan import Batching, Plan
from ddp_patch.sharding.refusals import unit_shared

__all__ = ["Cut"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Say how ranks share what one process gets, where that does not depend on the rank.

    Attributes:
        world_size: The number of ranks.
        options: What the user chose.
        batching: How a rank makes batches of samples; None where ranks share whole steps.
        max_items: Where only a part of an epoch is drawn, how many samples of it each rank gets at most.
    """

    world_size: int
    options: Options
    batching: Batching | None
    max_items: int

    @classmethod
    def of_loader(cls, facts: LoaderFacts[Any], world_size: int, options: Options, max_items: int) -> "Cut | None":
        """Return how ranks share a loader that is patched; None if that is more than cutting one order."""
        shared = unit_shared(facts, options.share)
        if shared.unit is ShardedUnit.ITERABLE or options.divides_batches or options.costs is not None:
            return None
        batching = shared.batching if shared.unit is ShardedUnit.SAMPLE else None
        return cls(world_size, options, batching, max_items)

    def share(self, rank: int, alone: RankDraws) -> RankDraws:
        """Return what a rank gets of what one process does.

        Examples:
            >>> cut = Cut(2, Options(), Batching(2, drop_last=False), 100)
            >>> alone = RankDraws(np.array([7, 8, 9, 5, 6]), np.array([2, 2, 1]), ended=True)
            >>> [cut.share(rank, alone).items.tolist() for rank in range(2)]
            [[7, 9, 6], [8, 5, 7]]
        """
        plan = Plan(rank, self.world_size, self.options.uneven)
        if self.batching is None:
            places = plan.own_and_repeated(len(alone.sizes)) if alone.ended else (plan.share(len(alone.sizes)),)
            steps = np.concatenate([np.asarray(part, np.int64) for part in places])
            ends = np.cumsum(alone.sizes)
            batches = [alone.items[ends[step] - alone.sizes[step] : ends[step]] for step in steps]
            return RankDraws(joined(batches), alone.sizes[steps], alone.ended)
        if alone.ended:
            own, again = plan.own_and_repeated(len(alone.items))
            items = alone.items[own.start : own.stop : own.step]
            if again:
                items = joined([items, alone.items[again.start : again.stop : again.step]])
        else:
            items = alone.items[rank :: self.world_size][: self.max_items]
        size, over = self.batching.size, len(items) % self.batching.size
        if over and (self.batching.drop_last or not alone.ended):
            items, over = items[: len(items) - over], 0
        sizes = np.full(-(-len(items) // size), size, np.int32)
        sizes[len(sizes) - 1 :] = over or size
        return RankDraws(items, sizes, alone.ended)
