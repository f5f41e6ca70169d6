"""How many samples a step has: on this rank and on all, padding and not."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple

from ddp_patch.plan import Plan
from ddp_patch.shares.sizes import Sizes

__all__ = ["DividedBatches", "StepSamples", "divided", "of_whole_batches"]


class StepSamples(NamedTuple):
    """The samples of one step. On each rank, padding comes after what is not.

    Attributes:
        items: How many samples this rank's batch has.
        real: How many of them are not padding.
        total: How many samples are not padding on all ranks together; None if this rank alone cannot know.
        until: Up to which step the following ones surely have the same numbers.
    """

    items: int
    real: int
    total: int | None
    until: int


def divided(plan: Plan, samples: int, until: int) -> StepSamples:
    """Return the samples of a step that is a batch of one process, divided.

    Args:
        plan: This rank's share of a batch.
        samples: How many samples the batch has.
        until: As in the result.

    Examples:
        >>> [divided(Plan(rank, 4), 3, until=1)[:3] for rank in (0, 3)]
        [(1, 1, 3), (1, 0, 3)]
    """
    own, repeated = plan.divide(samples)
    return StepSamples(len(own) + len(repeated), len(own), samples, until)


def of_whole_batches(plan: Plan, round_: int, length: int | None, sizes: Sizes) -> int | None:
    """Return how many samples the whole batches of a round have that are not padding; None if that is not known.

    Args:
        plan: A rank's share of the batches.
        round_: Which round.
        length: How many batches all ranks share; None while nobody has found the end.
        sizes: How many samples each has, as far as they are known.

    Examples:
        >>> sizes = Sizes()
        >>> for size in (4, 2, 5):
        ...     sizes.add(size)
        >>> [of_whole_batches(Plan(0, 2), round_, 3, sizes) for round_ in (0, 1)]
        [6, 5]
    """
    positions = _positions(plan, round_, length)
    known = positions is not None and all(position < len(sizes) for position in positions)
    return sum(sizes[position] for position in positions or ()) if known else None


def _positions(plan: Plan, round_: int, length: int | None) -> Sequence[int] | None:
    """Return which batches are in a round, but for padding."""
    if length is None:
        start = round_ * plan.num_replicas
        return None if plan.needs_length else range(start, start + plan.num_replicas)
    shares = (replace(plan, rank=rank).share(length) for rank in range(plan.num_replicas))
    return [share[round_] for share in shares if round_ < len(share) and share[round_] < length]


@dataclass(frozen=True, slots=True)
class DividedBatches:
    """A rank's rows in a pass over divided batches: one for each sample that it got.

    Attributes:
        plan: The rank's share of a batch.
        sizes: How many samples each batch has.

    Examples:
        >>> rows = DividedBatches(Plan(1, 2), [3, 2])
        >>> rows.samples, rows.rows, list(rows.real_places()), list(rows)
        (3, 2, [0, 2], [range(1, 3, 2), range(4, 5, 2)])
    """

    plan: Plan
    sizes: Iterable[int]

    def _steps(self) -> Iterator[StepSamples]:
        return (divided(self.plan, size, 0) for size in self.sizes)

    def own_sizes(self) -> list[int]:
        """Return how many rows this rank has of each batch."""
        return [step.items for step in self._steps()]

    @property
    def samples(self) -> int:
        """How many rows there are."""
        return sum(step.items for step in self._steps())

    @property
    def rows(self) -> int:
        """How many of them are not padding."""
        return sum(step.real for step in self._steps())

    @property
    def length(self) -> int:
        """How many samples all batches have together."""
        return sum(self.sizes)

    def real_places(self) -> Iterator[int]:
        """Yield which rows are not padding."""
        at = 0
        for step in self._steps():
            yield from range(at, at + step.real)
            at += step.items

    def __iter__(self) -> Iterator[range]:
        """Yield where the rows of each batch that are not padding lie among all ranks', in the stream's order."""
        for start, size in zip(accumulate(chain([0], self.sizes)), self.sizes, strict=False):
            own, _ = self.plan.divide(size)
            yield range(start + own.start, start + own.stop, own.step)

    def of_ranks(self) -> "list[DividedBatches]":
        """Return every rank's."""
        return [replace(self, plan=replace(self.plan, rank=rank)) for rank in range(self.plan.num_replicas)]
