"""Map an epoch of any length to a few hundred columns, for figures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddp_patch.auditing.drawn import Coding, EpochDraws, Numbers
from ddp_patch.auditing.judge_coverage import Judged, counts_of, dense, imbalance

__all__ = ["Pictured", "ShareMap", "StepMap", "Waits", "pictured"]


Counts: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ShareMap:
    """Map the samples that a single process draws to the ranks that get them.

    The order of the single process is cut into columns. Its k-th draw of a sample goes to the rank that gets this
    sample for the k-th time, counted over all ranks in the order of their steps. Where ranks get
    the sample more often than the single process draws it, these positions are got again from the first one on.

    Attributes:
        positions: How many samples the single process draws.
        width: How many positions a column holds; the last one may hold fewer.
        names: The sample at each position; empty where there are many.
        seen: How often ranks get a position, each with how many positions they get so often. Without those that no rank
            got where only a part of the epoch was drawn.
        times: How often ranks get each position; empty where there are many.
        levels: How many positions no rank got, ranks got once, and more often, shape (columns, 3).
        got: How many positions each rank got, shape (ranks, columns).
        again: How many of them another rank gets, too, or the same rank again, shape (ranks, columns).
        foreign: How many samples each rank got that the single process does not draw, shape (ranks,).
        reason: Why positions are got again: to fill the last round (padding), or otherwise.
    """

    positions: int = 0
    width: int = 1
    names: tuple[str, ...] = ()
    seen: tuple[tuple[int, int], ...] = ()
    times: tuple[int, ...] = ()
    levels: Counts = ()
    got: Counts = ()
    again: Counts = ()
    foreign: tuple[int, ...] = ()
    reason: Literal["padding", "repeated"] = "repeated"


@dataclass(frozen=True, slots=True)
class StepMap:
    """Map each rank's steps to the sizes of their batches.

    The steps of the rank with the most steps are cut into columns.

    Attributes:
        steps: How many steps that rank makes.
        width: How many steps a column holds; the last one may hold fewer.
        sizes: How many samples a batch has on average, shape (ranks, columns); 0 where a rank makes no such step.
        lacking: How many steps a rank does not make, shape (ranks, columns).
        largest: How many samples the largest batch has.
    """

    steps: int = 0
    width: int = 1
    sizes: tuple[tuple[float, ...], ...] = ()
    lacking: Counts = ()
    largest: int = 0


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
    """Hold what pictures are drawn from: the first epoch that has a problem, or else the first epoch.

    Attributes:
        epoch: The epoch's number.
        shares: Which rank gets what; empty where samples cannot be compared.
        steps: How large batches are.
        waits: How ranks wait for each other; None without ``cost``, or where nothing costs anything.
    """

    epoch: int = 0
    shares: ShareMap = ShareMap()
    steps: StepMap = StepMap()
    waits: Waits | None = None


# Show positions one by one, with their samples' names, up to this many.
_NAMED = 40
# Make no more columns than a narrow screen can show, and no more cells of all ranks.
_COLUMNS, _CELLS = 120, 8192
# Let columns hold whole turns of batches where that leaves this many columns.
_ENOUGH = 20
# Look up this many samples of all ranks at once.
_BLOCK = 2**18
# Show waiting in this many steps of this many ranks: bars of more are too thin to read at a glance.
_STEPS, _RANKS = 8, 10


def pictured(epoch: EpochDraws, judged: Judged, coding: Coding, costs: NDArray[np.float64] | None) -> Pictured:
    """Return what pictures of an epoch are drawn from.

    Args:
        epoch: What was drawn.
        judged: How the epoch was judged.
        coding: Gives samples their names.
        costs: What steps cost, shape (ranks, steps); None where it is not known.
    """
    can_tell = judged.found.is_known or epoch.is_sample
    return Pictured(
        epoch.number,
        _share_map(epoch, coding, "padding" if judged.padding else "repeated") if can_tell else ShareMap(),
        _step_map(epoch),
        None if costs is None else _waits(costs),
    )


def width_of_columns(length: int, ranks: int, batch: int = 1) -> int:
    """Return how many positions a column holds, so that a rank's fair share is the same in each column.

    One position, where that makes few columns. Otherwise whole turns of all ranks: columns of about four positions that
    eight ranks take in turns would hold one of a rank's positions or none, and look like stripes.

    Args:
        length: How many positions there are.
        ranks: How many ranks take them in turns.
        batch: How many positions a rank takes in its turn.

    Examples:
        >>> width_of_columns(103, 8), width_of_columns(1000, 8), width_of_columns(10_000, 8, batch=32)
        (1, 16, 256)
    """
    most = max(_NAMED, min(_COLUMNS, _CELLS // ranks))
    if length <= most:
        return 1
    turn = ranks * batch if length >= _ENOUGH * ranks * batch else ranks
    return -(-length // (most * turn)) * turn


def _share_map(epoch: EpochDraws, coding: Coding, reason: Literal["padding", "repeated"]) -> ShareMap:
    positions, ranks = len(epoch.alone.items), len(epoch.ranks)
    batch = max(1, round(positions / max(1, epoch.expected))) if epoch.units == "batches" else 1
    width = width_of_columns(positions, ranks, batch)
    columns = -(-positions // width)
    got, again = np.zeros((2, ranks, columns), np.int64)
    foreign = np.zeros(ranks, np.int64)
    seen = np.zeros(positions, np.int32)
    names, (expected, *shards) = dense([epoch.alone.items, *(drawn.items for drawn in epoch.ranks)])
    for rank, position, is_again in _places_in_stream(expected, shards, len(names)):
        foreign += np.bincount(rank[position < 0], minlength=ranks)
        np.add.at(seen, position[position >= 0], 1)
        for counts, here in ((got, position >= 0), (again, (position >= 0) & is_again)):
            cells = rank[here] * columns + position[here] // width
            counts += np.bincount(cells, minlength=counts.size).reshape(counts.shape)
    how_often = counts_of(seen, int(seen.max(initial=0)) + 1)
    level = np.arange(positions) // width * 3 + np.minimum(seen, 2)  # of a column's three
    levels = np.bincount(level, minlength=3 * columns).reshape(columns, 3)
    if epoch.is_sample:  # what nobody has may come later
        how_often[0] = levels[:, 0] = 0
    return ShareMap(
        positions,
        width,
        tuple(coding.name(int(code)) for code in epoch.alone.items) if positions <= _NAMED else (),
        tuple((times, int(how_often[times])) for times in np.flatnonzero(how_often).tolist()),
        tuple(seen.tolist()) if positions <= _NAMED else (),
        _counts(levels),
        _counts(got),
        _counts(again),
        tuple(foreign.tolist()) if not epoch.is_sample else (0,) * ranks,
        reason,
    )


def _places_in_stream(
    expected: Numbers, shards: Sequence[Numbers], span: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]]:
    """Find the position in a single process's order for every sample that a rank got, block by block of steps.

    Args:
        expected: The samples that the single process draws, numbered below ``span``, shape (positions,).
        shards: The samples that each rank got, numbered alike.
        span: The size of a table with one entry for each number.

    Yields:
        For each sample got, in no particular order, three arrays of one shape (samples,): its rank; its position, -1
        where the single process does not draw it; and whether this position is got more than once in all.
    """
    positions = np.argsort(expected, kind="stable")  # sample by sample: all its positions, in order
    count = np.bincount(expected, minlength=span)
    start = np.cumsum(count) - count  # where a sample's positions begin in ``positions``
    total = sum((np.bincount(shard, minlength=span) for shard in shards), np.zeros(span, np.int64))
    seen = np.zeros(span, np.int64)  # how often each sample was got in earlier blocks
    block = max(1, _BLOCK // len(shards))
    for begin in range(0, max(map(len, shards)), block):
        parts = [shard[begin : begin + block] for shard in shards]
        codes = np.concatenate(parts).astype(np.int64)
        ranks = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        steps = np.concatenate([np.arange(len(part)) for part in parts])
        order = np.lexsort((steps, codes))  # by sample, then by step; stable, so then by rank
        codes, ranks = codes[order], ranks[order]
        begins = np.flatnonzero(np.diff(codes, prepend=-1))
        lengths = np.diff(begins, append=len(codes))
        times = np.arange(len(codes)) - np.repeat(begins, lengths) + seen[codes]  # got this often before
        seen[codes[begins]] += lengths
        known = count[codes] > 0
        position = np.full(len(codes), -1, np.int64)
        position[known] = positions[start[codes[known]] + times[known] % count[codes[known]]]
        # The first position of a sample is got as often as any, and those before it come round first.
        which = times % np.maximum(1, count[codes])
        yield ranks, position, total[codes] > count[codes] + which


def _step_map(epoch: EpochDraws) -> StepMap:
    ranks, steps = epoch.ranks, epoch.steps
    most = max(_NAMED, min(_COLUMNS, _CELLS // len(ranks)))
    width = max(1, -(-steps // most))
    columns = -(-steps // width)
    sizes, made = np.zeros((2, len(ranks), columns), np.float64)
    for rank, drawn in enumerate(ranks):
        column = np.arange(len(drawn.sizes)) // width
        made[rank] = np.bincount(column, minlength=columns)
        sizes[rank] = np.bincount(column, weights=drawn.sizes, minlength=columns)
    total = np.bincount(np.arange(steps) // width, minlength=columns)
    return StepMap(
        steps,
        width,
        tuple(map(tuple, (sizes / np.maximum(1, made)).tolist())),
        _counts((total - made).astype(np.int64)),
        max(int(drawn.sizes.max(initial=0)) for drawn in ranks),
    )


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


def _counts(array: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, array.tolist()))
