"""What the ranks got in an epoch, in numbers and in words; the figures of a report: shares, steps, waiting."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddp_patch.auditing.drawn import Units
from ddp_patch.auditing.show_maps import Pictured, ShareMap, StepMap, Waits
from ddp_patch.auditing.show_svg import Bar, BarRow, Figure, Fill, columns_of, ticks_of

__all__ = ["EpochReport", "balance_text", "batches_text", "epoch_text", "figures_of", "waiting_text"]


# List sizes of global batches one by one up to this many.
_FEW = 4


@dataclass(frozen=True, slots=True)
class EpochReport:
    """Tell what the ranks got in one epoch.

    Attributes:
        epoch: The epoch's number, from 0.
        items: Number of samples that each rank got, shape (ranks,).
        steps: Number of batches that each rank got, shape (ranks,).
        units: What the numbers below count: samples, or batches where ranks shard whole batches.
        expected: How many a single process would get.
        distinct: How many different ones a single process would get, as far as they can be distinguished.
        missing: How many no rank got. None where only a part was looked at, or where samples cannot be compared: all
            are equal, or an iterable dataset makes new ones in each pass.
        missing_examples: The names of some samples that no rank got.
        repeated: How many times ranks got one more often than a single process would, padding included and foreign ones
            not. None where it is not known.
        repeated_examples: The names of some samples that are seen more than once, each with the ranks that got it.
        padding: How many of these repeats fill the last round.
        dropped: How many of the missing ones the loader was asked to leave out.
        global_batches: Sizes of global batches, in samples, each with how many steps in a row have it. So
            ``((64, 3), (40, 1))`` means 64 samples in each of the first 3 steps, then 40 in one.
        imbalance: The slowest rank's cost over the ranks' mean, over all steps; 1 is balance. None without ``cost``.
        worst_imbalance: The slowest rank's cost over the ranks' mean, in the worst step. None without ``cost``.
        foreign: How many ranks got that a single process never gets. None where it is not known.
        foreign_examples: The names of some samples that a single process never gets, each with the ranks that got it.

    Examples:
        >>> from torch.utils.data import DataLoader
        >>> from ddp_patch import audit
        >>> epoch, _ = audit(DataLoader(range(10), batch_size=2), world_size=4).epochs
        >>> epoch.expected, epoch.items, epoch.repeated, epoch.padding, epoch.global_batches
        (10, (3, 3, 3, 3), 2, 2, ((8, 1), (4, 1)))
    """

    epoch: int
    items: tuple[int, ...]
    steps: tuple[int, ...]
    units: Units
    expected: int
    distinct: int
    missing: int | None
    missing_examples: tuple[str, ...]
    repeated: int | None
    repeated_examples: tuple[tuple[str, tuple[int, ...]], ...]
    padding: int
    dropped: int
    global_batches: tuple[tuple[int, int], ...]
    imbalance: float | None = None
    worst_imbalance: float | None = None
    foreign: int | None = 0
    foreign_examples: tuple[tuple[str, tuple[int, ...]], ...] = ()


def epoch_text(epoch: EpochReport) -> str:
    """Return in words what ranks got, and what is missing and repeated."""
    parts = [
        f"{_range(epoch.items)} samples in {_range(epoch.steps)} steps per rank; of {epoch.expected} {epoch.units}"
        + (f" ({epoch.distinct} different ones)" if epoch.distinct < epoch.expected else ""),
        *_coverage_text(epoch),
    ]
    return ", ".join(parts)


def _coverage_text(epoch: EpochReport) -> list[str]:
    if epoch.repeated is None:
        return ["missing and repeated: not known"]
    missing = "missing: not known" if epoch.missing is None else f"{epoch.missing} missing"
    return [
        missing + (f" ({epoch.dropped} as the loader asks)" if epoch.dropped else ""),
        f"{epoch.repeated} repeat{'s' * (epoch.repeated != 1)}"
        + (f" ({epoch.padding} to fill the last round)" if epoch.padding else ""),
        *([f"{epoch.foreign} that one process never gets"] if epoch.foreign else []),
    ]


def batches_text(batches: Sequence[tuple[int, int]]) -> str:
    """Return in words how large global batches are, given each run of equal ones: a size and a number of steps."""
    if len(batches) > _FEW:
        steps = sum(steps for _, steps in batches)
        mean = sum(size * steps for size, steps in batches) / steps
        return f"{_range([size for size, _ in batches])} samples, {mean:.4g} on average, in {steps} steps"
    runs = [(str(size), f"in each of {steps} steps" if steps > 1 else "in 1 step") for size, steps in batches]
    return ", then ".join(f"{size}{'' if at else ' samples'} {when}" for at, (size, when) in enumerate(runs)) or "none"


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def balance_text(epoch: EpochReport, balanced: EpochReport | None) -> str | None:
    """Return in words how long ranks wait, without ``cost=`` and with it; None where costs are not known.

    Args:
        epoch: The epoch without.
        balanced: The same epoch with it; None where there is none.
    """
    both = [epoch] if balanced is None else [epoch, balanced]
    found = [(each.imbalance, each.worst_imbalance) for each in both if each.imbalance and each.worst_imbalance]
    if len(found) < len(both):
        return None
    waiting = [waiting_text(all_steps) for all_steps, _ in found]
    shown, worst = ([f"{each:.4g}" for each in column] for column in zip(*found, strict=True))
    without = "" if balanced is None else " without cost="
    with_it = "".join(f", {share} with it" for share in waiting[1:])
    return (
        f"ranks wait {waiting[0]} of the time{without}{with_it}; the slowest rank takes {' and '.join(shown)} times "
        f"the mean, in the worst step {' and '.join(worst)}"
    )


def waiting_text(imbalance: float) -> str:
    """Return the percentage of the time that the mean rank waits, where a step takes as long as its slowest rank.

    Examples:
        >>> waiting_text(1.5), waiting_text(1.004)
        ('33 %', '0.4 %')
    """
    share = 100 * (1 - 1 / imbalance)
    return f"{share:.1f} %" if 0.05 <= share < 9.95 else f"{share:.0f} %"


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
