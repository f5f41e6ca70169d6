"""The figures of a report: shares, steps, waiting."""

from collections.abc import Sequence

import numpy as np

from ddp_patch.auditing.show_epochs import waiting_text
from ddp_patch.auditing.show_maps import Pictured, ShareMap, StepMap, Waits
from ddp_patch.auditing.show_svg import Bar, BarRow, Figure, Fill, columns_of, ticks_of

__all__ = ["figures_of"]


# Say numbers of up to this many ranks one by one.
_MANY = 24
_LONGEST_NAME = 5
# Tell so many different counts from each other.
_DIFFERENT = 5
# A number fits into each of so many cells on a narrow screen, too.
_FEW_SHARES = 12
_FILLS: tuple[Fill, Fill, Fill] = ("never", "once", "again")


def _how_often_seen(shares: ShareMap, epoch: int) -> Figure:
    """Return the strip that shows how often all ranks together see each sample that one process draws."""
    legend = _how_often(shares)
    bars: list[Bar] = []
    texts = [str(times) for times in shares.times]
    for level, fill in enumerate(_FILLS):
        heights = [_stacked(column, level) for column in shares.levels]
        bars += columns_of(heights, fill, shares.width, shares.positions, texts)
    cell = _width_text(shares.width, "sample")
    if shares.times:
        cell = "Each cell is a sample; the number says how often all ranks together see it."
    caption = f"Left to right: the samples in the order in which one process would draw them. {cell}"
    if shares.width > 1:
        caption += " Its colours show what fraction is seen never, once or more than once."
    if foreign := sum(shares.foreign):
        caption += f" Ranks also get {foreign} samples that one process would not get."
    return Figure(
        f"How often samples are seen in epoch {epoch}",
        caption,
        "; ".join(text for _, text in legend) + ".",
        legend,
        (BarRow("all ranks", tuple(bars)),),
        ticks_of(shares.positions, shares.width),
        height=44,
    )


def _how_often(shares: ShareMap) -> tuple[tuple[Fill, str], ...]:
    """Say how many samples are seen how often; the numbers of those seen more than twice together where they differ."""
    total, filling = max(1, shares.positions), ", to fill the last round" if shares.reason == "padding" else ""
    few, many = shares.seen[:_DIFFERENT], shares.seen[_DIFFERENT:]
    named = {0: "never", 1: "once"}
    found = [(times, named.get(times, f"{times} times"), count) for times, count in few]
    if many:
        found.append((many[0][0], f"{many[0][0]} to {many[-1][0]} times", sum(count for _, count in many)))
    return tuple(
        (_FILLS[min(times, 2)], f"{name}: {count} ({_percent(count / total)}){filling if times > 1 else ''}")
        for times, name, count in found
    )


def _percent(fraction: float) -> str:
    """Return a fraction in percent; never 0 % or 100 % unless it is exactly so."""
    percent = 100 * fraction
    if 0 < percent < 0.5:
        return "< 1 %"
    return "> 99 %" if 99.5 <= percent < 100 else f"{percent:.0f} %"


def _stacked(column: Sequence[int], level: int) -> tuple[float, float]:
    """Return where a level of a column begins and how high it is: what is seen stands below what nobody sees."""
    total = max(1, sum(column))
    below = sum(column[1:level]) if level else sum(column[1:])
    return below / total, column[level] / total


def _who_gets_what(shares: ShareMap, epoch: int) -> Figure:
    """Return a row of columns for each rank, filled by the fraction of each column that the rank gets."""
    ranks, repeats = len(shares.got), sum((times - 1) * count for times, count in shares.seen if times > 1)
    begins = range(0, shares.positions, shares.width)
    fair = [min(shares.width, shares.positions - begin) / (ranks if shares.width > 1 else 1) for begin in begins]
    # How much of each column a rank gets alone, and how much is seen more often, in fair shares.
    scaled = [
        [((all_ - both) / share, both / share) for all_, both, share in zip(got, again, fair, strict=True)]
        for got, again in zip(shares.got, shares.again, strict=True)
    ]
    most = _most(scaled, shares)
    rows = []
    texts = [name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…" for name in shares.names]
    for rank, row in enumerate(scaled):
        new = [(0.0, min(alone / most, 1.0)) for alone, _ in row]
        over = [(max(0.0, min(alone, most - both)) / most, min(both / most, 1.0)) for alone, both in row]
        bars = [
            *columns_of(new, "once", shares.width, shares.positions, texts),
            *columns_of(over, "again", shares.width, shares.positions, texts),
        ]
        rows.append(BarRow(f"rank {rank}", tuple(bars)))
    told = _by_rank("gets", [sum(row) for row in shares.got], f"of {shares.positions}")
    told += [f"{repeats} of them another rank, or this one, had already ({shares.reason})"] if repeats else []
    legend = _legend(shares, any(alone + both < most - 1e-9 for row in scaled for alone, both in row))
    return Figure(
        f"Who gets what in epoch {epoch}",
        f"Left to right as above; each row is a rank. {_in_column(shares, most)}",
        "; ".join(told) + ".",
        legend,
        tuple(rows),
        ticks_of(shares.positions, shares.width),
        height=_row_height(ranks),
        is_dense=len(shares.names) > _FEW_SHARES,
    )


def _most(scaled: Sequence[Sequence[tuple[float, float]]], shares: ShareMap) -> float:
    """Return how many fair shares a full column stands for."""
    if shares.reason == "padding":  # what fills the last round does not make all other columns look empty
        return 1.0
    # A rank may get a whole batch or nothing of the last column, which is a part of one.
    whole = shares.positions // shares.width or 1
    return max(1.0, *(alone + both for row in scaled for alone, both in row[:whole]))


def _legend(shares: ShareMap, has_ground: bool) -> tuple[tuple[Fill, str], ...]:
    """Say what the fills of who gets what mean, of those that can be seen."""
    again = "also got by another rank"
    again += ", to fill the last round" if shares.reason == "padding" else ", or twice by this one"
    return (
        *((("once", "got by this rank alone"),) if any(times == 1 for times, _ in shares.seen) else ()),
        *((("again", again),) if any(times > 1 for times, _ in shares.seen) else ()),
        *((("none", "not got by this rank"),) if has_ground else ()),
    )


def _in_column(shares: ShareMap, most: float) -> str:
    if shares.names:
        return "Each cell is a sample."
    fair = "its fair share of it" if most == 1 else f"{most:.3g} times its fair share of it"
    if round(most, 9) == len(shares.got) > 1:
        fair = "as many samples as the column has"
    full = f" A full column means that the rank gets {fair}." if shares.width > 1 else ""
    return _width_text(shares.width, "sample") + full


def _width_text(width: int, what: str) -> str:
    """Say how many positions or steps a column is."""
    return f"A column is {width} {what}s." if width > 1 else f"A column is one {what}."


def _row_height(ranks: int) -> int:
    """Return how high a row is in pixels, so that many rows fit on a screen."""
    return max(3, min(22, 520 // max(1, ranks)))


def _by_rank(verb: str, counts: Sequence[int], what: str) -> list[str]:
    """Say a number of each rank, or the range of numbers where ranks are many."""
    if len(counts) > _MANY:
        return [f"Each of {len(counts)} ranks {verb} {min(counts)} to {max(counts)} {what}"]
    return [f"Rank {rank} {verb} {count} {what}" for rank, count in enumerate(counts)]


# Write sizes into cells up to this many columns; a narrow screen has room for fewer.
_TEXTS, _FEW_STEPS = 40, 12


def _batch_sizes(steps: StepMap, epoch: int) -> Figure:
    """Return a row for each rank, filled by how large its batches are."""
    ranks, columns = len(steps.sizes), len(steps.sizes[0])
    is_short = any(map(any, steps.lacking))
    has_texts = steps.width == 1 and columns <= _TEXTS and ranks <= _MANY
    spans = [min(steps.width, steps.steps - at * steps.width) for at in range(columns)]
    rows = []
    for rank, (sizes, lacking) in enumerate(zip(steps.sizes, steps.lacking, strict=True)):
        full = [(0.0, size / max(1, steps.largest)) for size in sizes]
        # The empty part is drawn over the whole height: no batch is there, however small.
        none = [(1 - lacks / span, lacks / span) for lacks, span in zip(lacking, spans, strict=True)]
        texts = [f"{size:g}" if not lacks else "" for size, lacks in zip(sizes, lacking, strict=True)]
        bars = [
            *columns_of(full, "once", steps.width, steps.steps, texts if has_texts else ()),
            *columns_of(none, "never", steps.width, steps.steps),
        ]
        rows.append(BarRow(f"rank {rank}", tuple(bars)))
    told = _by_rank("makes", [steps.steps - sum(lacking) for lacking in steps.lacking], "steps")
    told.append(f"the largest batch has {steps.largest} samples")
    missing: tuple[tuple[Fill, str], ...] = (("never", "no step"),) if is_short else ()
    return Figure(
        f"Batch sizes in epoch {epoch}",
        f"Left to right: the steps. {_width_text(steps.width, 'step')} The taller the bar, the larger the batch.",
        "; ".join(told) + ".",
        (("once", f"a batch; full: {steps.largest} samples"), *missing),
        tuple(rows),
        ticks_of(steps.steps, steps.width),
        height=_row_height(ranks),
        is_dense=columns > _FEW_STEPS,
    )


def _waiting_figures(pictured: Pictured, balanced: Pictured | None, world_size: int) -> list[Figure]:
    """Return a few steps of every rank along the time, and the same of the balanced loader, where there is one.

    Both have one scale, so that the shorter one is seen to be shorter.
    """
    both = {"Ranks": pictured}
    if balanced is not None:
        both = {"Without cost=, ranks": pictured, "With cost=, ranks": balanced}
    shown = {who: each.waits for who, each in both.items() if each.waits is not None}
    longest = max((sum(waits.slowest) for waits in shown.values()), default=0.0)
    return [_figure(who, both[who].epoch, waits, longest, world_size) for who, waits in shown.items()]


def _figure(who: str, epoch: int, waits: Waits, longest: float, world_size: int) -> Figure:
    share, some = waiting_text(waits.imbalance), ""
    if len(waits.ranks) < world_size:
        some = f" Shown are {len(waits.ranks)} of {world_size} ranks."
    heading = f"{who} wait {share} of the time (epoch {epoch})"
    each = zip(waits.ranks, waits.costs, strict=True)
    rows = tuple(BarRow(f"rank {rank}", _bars(costs, waits, longest)) for rank, costs in each)
    return Figure(
        heading,
        "Left to right: time, in the unit of cost. Each bar is a rank's work in one step. At an upright line the "
        f"slowest rank is done and the next step begins. The {len(waits.slowest)} steps shown are consecutive, and "
        f"most like the whole epoch.{some}",
        f"{heading}.",
        (("once", "works"), ("wait", "waits for the slowest rank")),
        rows,
        ((0.0, "0"), (sum(waits.slowest) / longest, f"{sum(waits.slowest):.4g}")),
    )


def _bars(costs: tuple[float, ...], waits: Waits, longest: float) -> tuple[Bar, ...]:
    """Return a rank's work, its waiting and the ends of its steps, one after the other."""
    ends = np.cumsum(waits.slowest) / longest
    slowest = np.array(waits.slowest) / longest
    bars: list[Bar] = []
    for end, full, cost in zip(ends.tolist(), slowest.tolist(), costs, strict=True):
        begin, work = end - full, cost / longest
        bars += [Bar(begin, work, "once", 0.1, 0.8)] if work else []
        bars += [Bar(begin + work, full - work, "wait", 0.1, 0.8)] if full > work else []
        bars.append(Bar(end, 0.0, "line"))
    return tuple(bars)


def figures_of(pictured: Pictured, balanced: Pictured | None, world_size: int) -> list[Figure]:
    """Return how often samples are seen, who gets what, the sizes of batches, and how ranks wait if costs are known.

    Args:
        pictured: What was found.
        balanced: The same of the loader patched with ``cost=``; None where there is none.
        world_size: The number of ranks.

    Returns:
        The figures; none of an epoch without a sample.
    """
    found, epoch = [], pictured.epoch
    if pictured.shares.positions:
        found += [_how_often_seen(pictured.shares, epoch), _who_gets_what(pictured.shares, epoch)]
    if pictured.steps.steps:
        found.append(_batch_sizes(pictured.steps, epoch))
    return found + _waiting_figures(pictured, balanced, world_size)
