"""What a rank notes of its passes: which order it drew, and which rows its dataset had. Without a store."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from ddp_patch.loaders.contents import Row
from ddp_patch.ranks.histories import Standing, State
from ddp_patch.streams.pass_fingerprint import PassFingerprint

__all__ = ["Difference", "PassNotes", "difference"]

# The rows of a dataset are looked at when a pass begins, and again after its first batch: some are made by the first
# ``__getitem__``.
_LOOKS = 2
# An encoded hash has this many bits.
_BITS = 48


Rows: TypeAlias = Mapping[str, Row]


class PassNotes:
    """The notes of one pass of this rank.

    Args:
        what: The class of the sampler.
        epoch: The epoch.
        begins_at: Where in the epoch it begins.
        skip: How many items of the share were taken before.
        fingerprint: That of what is drawn.
        rows: Looks at the dataset.
        standing: Tells how far the pass has come.
    """

    def __init__(
        self,
        what: str,
        epoch: int,
        begins_at: str,
        skip: int,
        fingerprint: PassFingerprint,
        rows: Callable[[], Rows],
        standing: Callable[[], Standing],
    ) -> None:
        self.what: str = what
        self.epoch: int = epoch
        self._begins_at, self._skip = begins_at, skip
        self._fingerprint, self._look, self._standing = fingerprint, rows, standing
        self._rows: list[Rows] = []
        self._old: list[Any] | None = None  # as it was left, once nothing changes it
        self.attempt: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the pass came to its end."""
        return self._standing().state is State.ENDED

    def settle(self) -> None:
        """Keep no more of a pass that is over than what was noted."""
        told = self._standing()
        if told.state is not State.OPEN:
            self._standing = partial(Standing, *told)

    def encoded(self, look: int, *, is_old: bool = False) -> list[Any]:
        """Return them as plain values.

        Args:
            look: How many items a mere look takes at most. Nobody compares it: the epoch may begin again.
            is_old: Whether to leave only the last mark: for ranks that are some epochs behind.
        """
        if is_old and self._old is not None:
            return self._old
        items, state = self._standing()
        taken = items - self._skip
        if len(self._rows) < _LOOKS and taken >= look * len(self._rows):
            self._rows.append(self._look())
        is_more = taken > look or state is State.ENDED
        marks = [[count, value % 2**_BITS] for count, value in self._fingerprint.marks]
        first = max(0, len(marks) - 1) if is_old else 0
        rows = [{name: list(row) for name, row in seen.items()} for seen in self._rows]
        notes = [self.epoch, self._begins_at, self.attempt, is_more, first, marks[first:], rows]
        if is_old and state is not State.OPEN:
            self._old = notes
        return notes


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """Where two ranks' passes over one epoch differ.

    Attributes:
        epoch: The epoch.
        count: The orders differ within so many items; None if the datasets do.
        attributes: The attributes of the datasets that differ.
    """

    epoch: int
    count: int | None = None
    attributes: tuple[str, ...] = ()


def difference(mine: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> Difference | None:
    """Return where the passes of two ranks differ, as far as both have come; None if they do not.

    Args:
        mine: This rank's notes, encoded.
        theirs: Another rank's.
    """
    known = {tuple(notes[:3]): notes for notes in theirs if notes[3]}
    for notes in mine:
        epoch, begins_at, attempt, is_more, _, _, rows = notes
        other = known.get((epoch, begins_at, attempt))
        if not is_more or other is None:
            continue
        for seen, seen_there in zip(rows, other[-1], strict=False):
            if names := _differing({k: Row(*v) for k, v in seen.items()}, {k: Row(*v) for k, v in seen_there.items()}):
                return Difference(epoch, attributes=names)
        if (count := _differs_within(notes, other)) is not None:
            return Difference(epoch, count)
    return None


def _differs_within(mine: Sequence[Any], theirs: Sequence[Any]) -> int | None:
    """Return within how many items the orders of two passes differ; None if they do not, as far as both have come."""
    first = max(mine[4], theirs[4])
    for one, another in zip(mine[5][first - mine[4] :], theirs[5][first - theirs[4] :], strict=False):
        if list(one) != list(another):
            return int(min(one[0], another[0]))
    return None


def _differing(mine: Rows, theirs: Rows) -> tuple[str, ...]:
    """Return the attributes that show that two datasets have other samples at the same indices.

    Ranks may keep other things than samples in them: losses, counts, seeds. So one that identifies the samples, and is
    the same on both, excuses the others, but for an order in which samples are read.
    """
    both = [name for name in mine if name in theirs]
    differing = [name for name in both if mine[name].fingerprint != theirs[name].fingerprint]
    if any(mine[name].identifies for name in both if name not in differing):
        differing = [name for name in differing if mine[name].is_order and theirs[name].is_order]
    return tuple(differing)
