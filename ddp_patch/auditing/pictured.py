"""Sum an epoch of any length up in a few hundred numbers, from which its picture is drawn."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddp_patch.auditing.drawn import Coding, EpochDraws, joined
from ddp_patch.auditing.judge_costs import imbalance
from ddp_patch.auditing.judge_coverage import Judged, counts_of, dense

__all__ = ["Pictured", "Waits", "pictured"]


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
        names: The sample at each position; empty where there are many.
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
    names: tuple[str, ...] = ()
    levels: tuple[tuple[float, ...], ...] = ()
    seen: tuple[int, ...] = ()
    bands: tuple[tuple[int, int], ...] = ()
    got: tuple[tuple[float, ...], ...] = ()
    waits: Waits | None = None


# Show positions one by one, with their samples' names, up to this many.
_NAMED = 40
# Make about so many columns, and no more bands of ranks than colours can be told apart.
_COLUMNS, _BANDS = 120, 32
# Let columns hold whole rounds of all ranks where that leaves this many columns, or they would look like stripes.
_ENOUGH = 20
# Show waiting in this many steps of this many ranks: bars of more are too thin to read at a glance.
_STEPS, _RANKS = 8, 10


def pictured(epoch: EpochDraws, judged: Judged, coding: Coding, costs: NDArray[np.float64] | None) -> Pictured:
    """Return what the picture of an epoch is drawn from.

    Args:
        epoch: What was drawn.
        judged: How the epoch was judged.
        coding: Gives samples their names.
        costs: What steps cost, shape (ranks, steps); None where it is not known.
    """
    waits = None if costs is None else _waits(costs)
    positions, world = len(epoch.alone.items), len(epoch.ranks)
    if not positions or not (judged.found.is_known or epoch.is_sample):
        return Pictured(epoch.number, waits=waits)
    width = _width_of_columns(positions, world)
    groups = np.array_split(np.arange(world), min(world, _BANDS))
    parts = [joined([epoch.ranks[rank].items for rank in group]) for group in groups]
    names, (expected, *bands) = dense([epoch.alone.items, *parts])
    drawn, order = counts_of(expected, len(names))[expected], _occurrences(expected)
    got, times = [], np.zeros(positions, np.int32)
    starts, each = np.arange(0, positions, width), np.minimum(width, positions - np.arange(0, positions, width))
    total = np.zeros(len(names), np.int32)
    for band in bands:
        counts = counts_of(band, len(names))
        total += counts
        got.append(tuple((np.add.reduceat(counts[expected] / drawn, starts) / each).round(4).tolist()))
    # One process may draw a sample several times. The ranks get it at the first of these places first.
    times = total[expected] // drawn + (order < total[expected] % drawn)
    levels = np.array([times == 0, times == 1, times > 1])
    if epoch.is_sample:
        levels[0] = False  # what nobody has may come later
    return Pictured(
        epoch.number,
        positions,
        width,
        tuple(map(coding.name, epoch.alone.items.tolist())) if positions <= _NAMED else (),
        tuple(map(tuple, (np.add.reduceat(levels, starts, axis=1, dtype=float) / each).T.round(4).tolist())),
        tuple(levels.sum(axis=1).tolist()),
        tuple((int(group[0]), int(group[-1])) for group in groups),
        tuple(got),
        waits,
    )


def _width_of_columns(length: int, ranks: int) -> int:
    """Return how many positions a column holds, so that a rank's share is the same in each column."""
    if length <= _COLUMNS:
        return 1
    turn = ranks if length >= _ENOUGH * ranks else 1
    return -(-length // (_COLUMNS * turn)) * turn


def _occurrences(codes: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return how often each code was there before.

    Examples:
        >>> _occurrences(np.array([7, 8, 7, 7])).tolist()
        [0, 0, 1, 2]
    """
    order = np.argsort(codes, kind="stable")
    begins = np.flatnonzero(np.diff(codes[order], prepend=-1))
    found = np.empty(len(codes), np.int64)
    found[order] = np.arange(len(codes)) - np.repeat(begins, np.diff(begins, append=len(codes)))
    return found


def _waits(costs: NDArray[np.float64]) -> Waits | None:
    """Return the few consecutive steps whose cost and slowest rank are most like those of the mean step."""
    ranks, steps = costs.shape
    slowest, mean = costs.max(axis=0), costs.mean(axis=0)
    whole, _ = imbalance(costs)
    if whole is None:
        return None
    few = min(_STEPS, steps)
    unlike = sum(np.abs(_means_of(few, each) / each.mean() - 1) for each in (slowest, mean))
    first = int(np.argmin(unlike))
    shown = np.linspace(0, ranks - 1, min(_RANKS, ranks)).astype(int)
    part = slice(first, first + few)
    each_rank = tuple(map(tuple, costs[shown, part].tolist()))
    return Waits(first, tuple(shown.tolist()), each_rank, tuple(slowest[part].tolist()), whole)


def _means_of(few: int, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of each run of a few consecutive values."""
    sums: NDArray[np.float64] = np.cumsum(np.concatenate([[0.0], values]))
    return (sums[few:] - sums[:-few]) / few
