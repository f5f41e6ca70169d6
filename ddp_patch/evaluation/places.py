"""Where every rank's rows lie among all, in the order of the unpatched loader: arithmetic, without ranks."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from ddp_patch.evaluation.readings import Kind
from ddp_patch.plan import Plan
from ddp_patch.shares.step_samples import DividedBatches
from ddp_patch.shares.turns import Turns, places_of_parts

__all__ = ["Placed", "StepStand", "WholeStand", "placed_in_step", "placed_whole", "places_of_rows", "reordered"]

Order = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the rows of all ranks go.

    Attributes:
        rows: How many rows there are.
        places: Where each share's rows go, in order. Each may be iterated several times.
        cuts: How many of them each batch of the unpatched loader has; empty where nobody asks.
    """

    rows: int
    places: Sequence[Iterable[range]]
    cuts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class WholeStand:
    """What a rank got in a whole pass, as the others need to know it.

    Attributes:
        turns: Its batches.
        rows: How many samples are not padding; of whole batches that are shared, how many batches.
        sizes: How many samples each of these batches has, without padding; of divided batches, each of one process's.
        division: The rank's share of a batch, where batches are divided.
    """

    turns: Turns
    rows: int
    sizes: Sequence[int] | None = None
    division: Plan | None = None

    @property
    def sent(self) -> "WholeStand":
        """The same, without what every rank knows."""
        return self if self.division is None else replace(self, sizes=None)


def placed_whole(stands: Sequence[WholeStand], own: WholeStand) -> Mapping[Kind, Placed]:
    """Return where the rows of a whole pass go, by what they stand for.

    Args:
        stands: What each share's rank got, as it was sent.
        own: What this rank got.
    """
    first, counts = stands[0], [stand.rows for stand in stands]
    if first.division is not None:
        sizes = own.sizes or ()
        divided = [
            DividedBatches(replace(first.division, rank=rank), sizes) for rank in range(first.division.num_replicas)
        ]
        return _of_samples(Placed(sum(counts), divided, sizes))
    if len(first.turns.parts) > 1:
        turns = [stand.turns for stand in stands]
        cuts = Counter(place[:2] for of_rank in turns for place in of_rank.positions())
        return _of_samples(Placed(sum(counts), places_of_parts(turns), [cuts[batch] for batch in sorted(cuts)]))
    plan, rows, size = first.turns.plan, sum(counts), first.turns.batching.size
    placed = Placed(rows, places_of_rows(plan, counts), [min(size, rows - at) for at in range(0, rows, size)])
    if first.sizes is None:
        return _of_samples(placed)
    return _of_batches(placed, [stand.sizes or () for stand in stands])


@dataclass(frozen=True, slots=True)
class StepStand:
    """What a rank got in one step.

    Attributes:
        keys: By which its rows that are not padding are sorted among all.
        size: Where whole batches are shared, how many samples the batch has; else None.
        is_last: Whether no step follows.
    """

    keys: Sequence[Any]
    size: int | None
    is_last: bool

    @property
    def sent(self) -> "StepStand":
        """The same: all of it is needed."""
        return self


def placed_in_step(stands: Sequence[StepStand]) -> Mapping[Kind, Placed]:
    """Return where the rows of one step go, by what they stand for.

    Examples:
        >>> placed = placed_in_step([StepStand([4, 6], None, True), StepStand([5], None, True)])[Kind.SAMPLES]
        >>> placed.rows, placed.places
        (3, [[range(0, 1), range(2, 3)], [range(1, 2)]])
    """
    place_of = {key: place for place, key in enumerate(sorted(chain.from_iterable(stand.keys for stand in stands)))}
    places = [[range(place_of[key], place_of[key] + 1) for key in stand.keys] for stand in stands]
    placed = Placed(len(place_of), places)
    if stands[0].size is None:
        return _of_samples(placed)
    return _of_batches(placed, [[stand.size or 0] * len(stand.keys) for stand in stands])


def _of_samples(placed: Placed) -> Mapping[Kind, Placed]:
    return {Kind.SAMPLES: placed, Kind.LIST: placed}


def _of_batches(batches: Placed, sizes: Sequence[Sequence[int]]) -> Mapping[Kind, Placed]:
    """Return where the samples of whole batches go, too.

    Args:
        batches: Where the batches go.
        sizes: How many samples each of a share's batches has, by share.
    """
    in_order = [0] * batches.rows
    for places, of_share in zip(batches.places, sizes, strict=True):
        for place, size in zip(chain.from_iterable(places), of_share, strict=True):
            in_order[place] = size
    ends = list(accumulate(in_order))
    samples = [
        [range(ends[place] - in_order[place], ends[place]) for place in chain.from_iterable(places)]
        for places in batches.places
    ]
    placed = Placed(sum(in_order), samples, in_order)
    return {Kind.BATCHES: batches, Kind.SAMPLES: placed, Kind.LIST: placed}


def reordered(placed: Placed, origins: Order, *, of_batches: bool) -> tuple[Order, Sequence[int]]:
    """Return in which order to take rows that were dealt, and the cuts of that order.

    Args:
        placed: The rows as they were dealt.
        origins: Where each comes from in the unpatched loader's order; of whole batches, where each batch comes from.
        of_batches: Whether the rows are the samples of whole batches.

    Examples:
        >>> order, cuts = reordered(Placed(5, [], [2, 3]), np.array([1, 0]), of_batches=True)
        >>> order.tolist(), cuts
        ([2, 3, 4, 0, 1], [3, 2])
    """
    order = np.argsort(origins, kind="stable")
    if not of_batches:
        return order, placed.cuts
    sizes = np.array(placed.cuts, np.int64)
    begins = np.cumsum(sizes) - sizes
    taken = [np.arange(begins[batch], begins[batch] + sizes[batch]) for batch in order]
    return np.concatenate([np.empty(0, np.int64), *taken]), sizes[order].tolist()


def places_of_rows(plan: Plan, counts: Sequence[int]) -> list[list[range]]:
    """Return the positions of each share's rows among all rows, in the stream's order.

    Args:
        plan: How the stream was sharded.
        counts: The number of rows of each share.
    """
    if plan.needs_length:
        runs = zip(counts, accumulate(counts), strict=True)
        return [[range(end - count, end)] if count else [] for count, end in runs]
    places: list[list[range]] = [[] for _ in counts]
    start = 0
    # Place rounds together in which the same ranks have a row: with drop_last and uneven="keep", some lack a batch.
    for before, until in pairwise(sorted({0, *counts})):
        takers = [share for share, count in enumerate(counts) if count >= until]
        end = start + len(takers) * (until - before)
        for place, share in enumerate(takers):
            places[share].append(range(start + place, end, len(takers)))
        start = end
    return places
