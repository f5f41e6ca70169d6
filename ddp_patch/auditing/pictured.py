"""Sum an epoch of any length up in a few hundred numbers, from which its picture is drawn; and what steps cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddp_patch.auditing.given import Coverage, EpochGiven, Numbers, RankGiven, counts_of, dense, joined
from ddp_patch.costs import Cost
from ddp_patch.errors import InvalidOptionError

__all__ = ["Costs", "Pictured", "StepCosts", "Waits", "imbalance", "pictured", "step_costs"]


Costs: TypeAlias = NDArray[np.float64]
# Returns what each rank's steps cost, from what it was given.
StepCosts: TypeAlias = Callable[[RankGiven], Costs]


def step_costs(costs: Cost, below: Sequence[int] | None) -> StepCosts:
    """Return what tells the cost of each step that a rank was given.

    Args:
        costs: What samples cost by their indices in the loader's dataset.
        below: For each index of that dataset, the one below torch's ``Subset`` layers; None if that is the same.
    """
    own = None if below is None else {index: place for place, index in enumerate(below)}

    def cost_of(given: RankGiven) -> Costs:
        names, places = np.unique(given.items, return_inverse=True)
        if len(names) and int(names[0]) < 0:
            raise InvalidOptionError(
                "audit was given cost= and a loader whose keys are no indices, so what one costs cannot be looked up. "
                "Leave cost out, or sample indices."
            )
        indices: Any = names if own is None else np.array([own[index] for index in names.tolist()])
        return costs.of_batches(costs.of(indices)[places], given.sizes)

    return cost_of


def imbalance(costs: Costs) -> tuple[float | None, float | None]:
    """Return the slowest rank's cost over the ranks' mean: over all steps, and in the worst step; None if all cost 0.

    Args:
        costs: The cost of each step, shape (ranks, steps).
    """
    slowest, mean = costs.max(axis=0), costs.mean(axis=0)
    if not mean.any():
        return None, None
    return float(slowest.sum() / mean.sum()), float((slowest[mean > 0] / mean[mean > 0]).max())


@dataclass(frozen=True, slots=True)
class Waits:
    """Hold how long ranks work in a few consecutive steps, of which they wait for the slowest.

    The steps are those that are most like the whole epoch: about as dear, and about as uneven. Costs are in the unit of
    the user's ``cost``.

    Attributes:
        first: The number of the first of these steps.
        ranks: The ranks that are shown: some where there are many.
        costs: What each step costs each of these ranks, shape (ranks, steps); 0 where a rank makes no such step.
        slowest: What each step costs the slowest rank of all, shape (steps,).
        imbalance: The slowest rank's cost over the ranks' mean, over all steps of the epoch.
    """

    first: int
    ranks: tuple[int, ...]
    costs: tuple[tuple[float, ...], ...]
    slowest: tuple[float, ...]
    imbalance: float


@dataclass(frozen=True, slots=True)
class Pictured:
    """Hold what the picture is drawn from: of the first epoch that has a problem, or else of the first.

    The samples stand in the order in which one process would draw them, cut into columns.

    Attributes:
        epoch: The epoch's number.
        positions: How many samples one process draws; 0 where samples cannot be compared.
        width: How many samples a column holds; the last one may hold fewer.
        levels: Which fraction of a column is seen never, once and again, shape (columns, 3). Nothing counts as never
            seen where only a part of the epoch was drawn.
        seen: How many samples are seen never, once and again.
        bands: The first and last rank of each band: one rank each, or several where there are many.
        got: How often a band's ranks get a sample of a column, on average, shape (bands, columns).
        waits: How ranks wait for each other; None without ``cost``, or where nothing costs anything.
    """

    epoch: int = 0
    positions: int = 0
    width: int = 1
    levels: tuple[tuple[float, ...], ...] = ()
    seen: tuple[int, ...] = ()
    bands: tuple[tuple[int, int], ...] = ()
    got: tuple[tuple[float, ...], ...] = ()
    waits: Waits | None = None


# Make about so many columns, and no more bands of ranks than colours can be told apart.
_COLUMNS, _BANDS = 120, 32
# Let columns hold whole rounds of all ranks where that leaves this many columns, or they would look like stripes.
_ENOUGH = 20
# Show waiting in this many steps of this many ranks: bars of more are too thin to read at a glance.
_STEPS, _RANKS = 8, 10


def pictured(epoch: EpochGiven, found: Coverage | None, costs: Costs | None) -> Pictured:
    """Return what the picture of an epoch is drawn from.

    Args:
        epoch: What was given.
        found: What is missing and repeated; None where it cannot be told.
        costs: What steps cost, shape (ranks, steps); None where it is not known.
    """
    waits = None if costs is None else _waits(costs)
    positions, world = len(epoch.alone.items), len(epoch.ranks)
    if not positions or (found is None and not epoch.is_sample):
        return Pictured(epoch.number, waits=waits)
    turn = world if positions >= max(_ENOUGH * world, _COLUMNS + 1) else 1
    width = -(-positions // (_COLUMNS * turn)) * turn
    groups = np.array_split(np.arange(world), min(world, _BANDS))
    parts = [joined([epoch.ranks[rank].items for rank in group]) for group in groups]
    names, (expected, *bands) = dense([epoch.alone.items, *parts])
    drawn = counts_of(expected, len(names))[expected]  # one process may draw a sample several times
    starts = np.arange(0, positions, width)

    def by_column(values: Costs) -> tuple[float, ...]:
        means = np.add.reduceat(values, starts) / np.diff(starts, append=positions)
        return tuple(means.round(4).tolist())

    def times_got(band: Numbers) -> Costs:
        return np.asarray(counts_of(band, len(names))[expected] / drawn)

    total, got = np.zeros(positions), []
    for times in map(times_got, bands):  # one at a time: each is as long as the epoch
        total += times
        got.append(by_column(times))
    once, again = np.minimum(total, 1), np.clip(total - 1, 0, 1)
    never = np.zeros(positions) if epoch.is_sample else 1 - once  # what nobody has may come later
    levels = (never, once - again, again)
    return Pictured(
        epoch.number,
        positions,
        width,
        tuple(zip(*map(by_column, levels), strict=True)),
        tuple(round(level.sum()) for level in levels),
        tuple((int(group[0]), int(group[-1])) for group in groups),
        tuple(got),
        waits,
    )


def _waits(costs: Costs) -> Waits | None:
    """Return the few consecutive steps whose cost and slowest rank are most like those of the mean step."""
    ranks, steps = costs.shape
    slowest, mean = costs.max(axis=0), costs.mean(axis=0)
    whole, _ = imbalance(costs)
    if whole is None:
        return None
    few = min(_STEPS, steps)
    runs = (np.convolve(each, np.full(few, 1 / few), "valid") / each.mean() for each in (slowest, mean))
    first = int(np.argmin(sum(np.abs(run - 1) for run in runs)))
    shown = np.linspace(0, ranks - 1, min(_RANKS, ranks)).astype(int)
    part = slice(first, first + few)
    each_rank = tuple(map(tuple, costs[shown, part].tolist()))
    return Waits(first, tuple(shown.tolist()), each_rank, tuple(slowest[part].tolist()), whole)
