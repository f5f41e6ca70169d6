"""What pictures of an epoch are drawn of: counts in columns, few enough to keep."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["CostLine", "Pictured", "ShareMap", "StepMap"]

Counts: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ShareMap:
    """Which rank got which positions of the stream of one process, the whole of it cut into columns.

    A rank that gets a sample for the k-th time, counted over all ranks in the order of their steps, gets the k-th
    position at which one process would get this sample; where there is none, it gets one of these positions again.

    Attributes:
        positions: How many one process would draw.
        names: The samples at these positions; empty where columns hold several.
        got: Of each rank and column, how many positions it got.
        again: Of each rank and column, how many it got that another rank, or itself, had got before.
        missing: Of each column, how many positions no rank got.
        foreign: Of each rank, how many samples it got that one process would not get at all.
        reason: Why positions are got again: to fill the last round, or not.
    """

    positions: int = 0
    names: tuple[str, ...] = ()
    got: Counts = ()
    again: Counts = ()
    missing: tuple[int, ...] = ()
    foreign: tuple[int, ...] = ()
    reason: Literal["padding", "repeated"] = "repeated"


@dataclass(frozen=True, slots=True)
class StepMap:
    """How large each rank's batches are, the steps of the longest rank cut into columns.

    Attributes:
        steps: How many steps the rank makes that makes the most.
        sizes: Of each rank and column, how many samples its batches have on average; 0 where it makes none.
        lacking: Of each rank and column, how many steps it does not make.
        largest: How many samples the largest batch has.
    """

    steps: int = 0
    sizes: tuple[tuple[float, ...], ...] = ()
    lacking: Counts = ()
    largest: int = 0


@dataclass(frozen=True, slots=True)
class CostLine:
    """What steps cost, the steps of the longest rank cut into columns; a rank that makes no such step costs 0 there.

    Attributes:
        steps: How many these are.
        slowest: Of each column, the mean over its steps of the slowest rank's cost.
        mean: Of each column, the mean over its steps of all ranks' mean cost.
    """

    steps: int = 0
    slowest: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Pictured:
    """What pictures are drawn of: one epoch, the first that has a problem, or else the first.

    Attributes:
        epoch: Its number.
        shares: Who got what; empty where samples cannot be compared.
        steps: In batches of how many.
        costs: At what cost; None without ``cost``.
    """

    epoch: int = 0
    shares: ShareMap = ShareMap()
    steps: StepMap = StepMap()
    costs: CostLine | None = None
