"""Hold what pictures of an epoch are drawn from: counts in columns, few enough to keep in a report."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Pictured", "ShareMap", "StepMap", "Waits"]

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
