"""Count an epoch of any length in a few hundred columns, for pictures."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ddp_patch.auditing.draw.coding import Coding, Numbers
from ddp_patch.auditing.draw.drawn import Epoch
from ddp_patch.auditing.judge.counting import dense
from ddp_patch.auditing.judge.judging import Judged
from ddp_patch.auditing.judge.measures import imbalance
from ddp_patch.auditing.pictured import Pictured, ShareMap, StepMap, Waits

__all__ = ["pictured"]

# Show positions one by one, with their samples' names, up to this many.
_NAMED = 40
# Make no more columns than a screen can show, and no more cells of all ranks: a page holds each picture twice.
_COLUMNS, _CELLS = 240, 8192
# Look up this many samples of all ranks at once.
_BLOCK = 2**18
# Show waiting in this many steps of this many ranks: bars of more are too thin to read at a glance.
_STEPS, _RANKS = 8, 10


def pictured(epoch: Epoch, judged: Judged, coding: Coding, costs: NDArray[np.float64] | None) -> Pictured:
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


def _columns(length: int, ranks: int) -> int:
    """Return how many columns to cut a length into."""
    return min(length, max(_NAMED, min(_COLUMNS, _CELLS // ranks)))


def _share_map(epoch: Epoch, coding: Coding, reason: Literal["padding", "repeated"]) -> ShareMap:
    positions, ranks = len(epoch.alone.items), len(epoch.ranks)
    columns = _columns(positions, ranks)
    first, again = np.zeros((2, ranks, columns), np.int64)
    foreign = np.zeros(ranks, np.int64)
    is_got = np.zeros(positions, bool)
    names, (expected, *shards) = dense([epoch.alone.items, *(drawn.items for drawn in epoch.ranks)])
    for rank, position, is_again in _places_in_stream(expected, shards, len(names)):
        foreign += np.bincount(rank[position < 0], minlength=ranks)
        for counts, chosen in ((first, ~is_again), (again, is_again)):
            here = chosen & (position >= 0)
            cells = rank[here] * columns + _column_of(position[here], columns, positions)
            counts += np.bincount(cells, minlength=counts.size).reshape(counts.shape)
        is_got[position[position >= 0]] = True
    missing = np.bincount(_column_of(np.flatnonzero(~is_got), columns, positions), minlength=columns)
    return ShareMap(
        positions,
        tuple(coding.name(int(code)) for code in epoch.alone.items) if positions <= _NAMED else (),
        _counts(first + again),
        _counts(again),
        # Where only a part was drawn, what nobody has may come later.
        tuple(missing.tolist()) if not epoch.is_sample else (0,) * columns,
        tuple(foreign.tolist()) if not epoch.is_sample else (0,) * ranks,
        reason,
    )


def _column_of(places: NDArray[np.int64], columns: int, length: int) -> NDArray[np.int64]:
    """Return the column that holds each place of a length."""
    return places * columns // max(1, length)


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
        where the single process does not draw it; and whether some rank had got this position before.
    """
    positions = np.argsort(expected, kind="stable")  # sample by sample: all its positions, in order
    count = np.bincount(expected, minlength=span)
    start = np.cumsum(count) - count  # where a sample's positions begin in ``positions``
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
        yield ranks, position, times >= count[codes]


def _step_map(epoch: Epoch) -> StepMap:
    ranks, steps = epoch.ranks, epoch.steps
    columns = _columns(steps, len(ranks))
    sizes, made = np.zeros((2, len(ranks), columns), np.float64)
    for rank, drawn in enumerate(ranks):
        column = _column_of(np.arange(len(drawn.sizes)), columns, steps)
        made[rank] = np.bincount(column, minlength=columns)
        sizes[rank] = np.bincount(column, weights=drawn.sizes, minlength=columns)
    total = np.bincount(_column_of(np.arange(steps), columns, steps), minlength=columns)
    return StepMap(
        steps,
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
