"""An epoch of any length in a few hundred columns, for pictures."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddp_patch.auditing.draw.coding import Coding, Numbers
from ddp_patch.auditing.draw.drawn import Epoch
from ddp_patch.auditing.judge.counting import dense
from ddp_patch.auditing.judge.judging import Judged
from ddp_patch.auditing.pictured import CostLine, Pictured, ShareMap, StepMap

__all__ = ["pictured"]

# So many positions, or fewer, are shown one by one with their samples' names.
_NAMED = 40
# More than one screen shows; and so many cells of all ranks, because a page holds each picture twice.
_COLUMNS, _CELLS = 240, 8192
# So many samples of all ranks are looked up at once.
_BLOCK = 2**18


def pictured(epoch: Epoch, judged: Judged, coding: Coding, costs: NDArray[np.float64] | None) -> Pictured:
    """Return what pictures of an epoch are drawn of.

    Args:
        epoch: What was drawn.
        judged: What it came to.
        coding: Gives samples their names.
        costs: Of each rank, a row, and of each step; None where it is not known.
    """
    can_tell = judged.found.is_known or epoch.is_sample
    return Pictured(
        epoch.number,
        _share_map(epoch, coding, "padding" if judged.padding else "repeated") if can_tell else ShareMap(),
        _step_map(epoch),
        None if costs is None else _cost_line(costs),
    )


def _columns(length: int, ranks: int) -> int:
    return min(length, max(_NAMED, min(_COLUMNS, _CELLS // ranks)))


def _share_map(epoch: Epoch, coding: Coding, reason: Any) -> ShareMap:
    positions, ranks = len(epoch.alone.items), len(epoch.ranks)
    columns = _columns(positions, ranks)
    first, again = np.zeros((2, ranks, columns), np.int64)
    foreign = np.zeros(ranks, np.int64)
    is_got = np.zeros(positions, bool)
    names, (expected, *shares) = dense([epoch.alone.items, *(drawn.items for drawn in epoch.ranks)])
    for rank, position, is_again in _places_in_stream(expected, shares, len(names)):
        foreign += np.bincount(rank[position < 0], minlength=ranks)
        for counts, chosen in ((first, ~is_again), (again, is_again)):
            here = chosen & (position >= 0)
            cells = rank[here] * columns + position[here] * columns // max(1, positions)
            counts += np.bincount(cells, minlength=counts.size).reshape(counts.shape)
        is_got[position[position >= 0]] = True
    missing = np.bincount(np.flatnonzero(~is_got) * columns // max(1, positions), minlength=columns)
    return ShareMap(
        positions,
        tuple(coding.name(int(code)) for code in epoch.alone.items) if positions <= _NAMED else (),
        _counts(first + again),
        _counts(again),
        # Of a sample, what nobody has may come later.
        tuple(missing.tolist()) if not epoch.is_sample else (0,) * columns,
        tuple(foreign.tolist()) if not epoch.is_sample else (0,) * ranks,
        reason,
    )


def _places_in_stream(
    expected: Numbers, shares: Sequence[Numbers], span: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield, block by block of steps, who got what: ranks, positions (-1 for none), and whether these were got before.

    All numbers are below ``span``, so a table is looked up.
    """
    order = np.argsort(expected, kind="stable")
    count = np.bincount(expected, minlength=span)
    start = np.cumsum(count) - count
    seen = np.zeros(span, np.int64)
    block = max(1, _BLOCK // len(shares))
    for begin in range(0, max(map(len, shares)), block):
        parts = [share[begin : begin + block] for share in shares]
        codes = np.concatenate(parts).astype(np.int64)
        ranks = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        by_code = np.lexsort((np.concatenate([np.arange(len(part)) for part in parts]), codes))  # stable: then by rank
        codes, ranks = codes[by_code], ranks[by_code]
        begins = np.flatnonzero(np.diff(codes, prepend=-1))
        lengths = np.diff(begins, append=len(codes))
        times = np.arange(len(codes)) - np.repeat(begins, lengths) + seen[codes]
        seen[codes[begins]] += lengths
        known = count[codes] > 0
        position = np.full(len(codes), -1, np.int64)
        position[known] = order[start[codes[known]] + times[known] % count[codes[known]]]
        yield ranks, position, times >= count[codes]


def _step_map(epoch: Epoch) -> StepMap:
    ranks, steps = epoch.ranks, epoch.steps
    columns = _columns(steps, len(ranks))
    sizes, made = np.zeros((2, len(ranks), columns), np.float64)
    for rank, drawn in enumerate(ranks):
        column = np.arange(len(drawn.sizes)) * columns // max(1, steps)
        made[rank] = np.bincount(column, minlength=columns)
        sizes[rank] = np.bincount(column, weights=drawn.sizes, minlength=columns)
    of = np.bincount(np.arange(steps) * columns // max(1, steps), minlength=columns)
    return StepMap(
        steps,
        tuple(map(tuple, (sizes / np.maximum(1, made)).tolist())),
        _counts((of - made).astype(np.int64)),
        max(int(drawn.sizes.max(initial=0)) for drawn in ranks),
    )


def _cost_line(costs: NDArray[np.float64]) -> CostLine:
    steps = costs.shape[1]
    columns = _columns(steps, 1)
    column = np.arange(steps) * columns // steps
    of = np.bincount(column)
    slowest, mean = (np.bincount(column, weights=each) / of for each in (costs.max(axis=0), costs.mean(axis=0)))
    return CostLine(steps, tuple(slowest.tolist()), tuple(mean.tolist()))


def _counts(array: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, array.tolist()))
