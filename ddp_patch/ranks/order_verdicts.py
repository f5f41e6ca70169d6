"""What two readers' marks of a stream show about what they read. Without a store."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, repeat
from math import comb
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddp_patch.orders.fingerprint import ItemHashes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = [
    "AlikeMarks",
    "OrderComparison",
    "PartMarks",
    "StreamMismatch",
    "Verdict",
    "alike_marks",
    "compare",
    "compare_parts",
    "next_mark",
    "position",
    "stream_mismatch",
]


# This many items must be at another position in another reader's stream before it is no coincidence. Items that are
# drawn again and again from a few coincide by chance too, and then as often within one stream as between two.
_SURELY_MOVED = 8
_BYTES = 3 * 4  # of the hashes of an item

# So many first items are all marked, and half as many between a position and twice that position.
_DENSE = 64
# Readers have something in common if so many first marks are the same.
_FEWEST_ALIKE = 16
# Augmentation may change an item here and there. From a skipped item on many differ: so many, and a quarter. That the
# ones before it are all the same may be chance only once in so many cases, because marks are compared again and again.
_FEWEST, _PART, _ONCE_IN = 3, 4, 10**6


def next_mark(place: int) -> int:
    """Return which position is marked after this one.

    Examples:
        >>> next_mark(0), next_mark(62), next_mark(64), next_mark(1024)
        (1, 63, 66, 1056)
    """
    return place + max(1, (1 << place.bit_length()) // _DENSE)


def position(mark: int) -> int:
    """Return the position of the mark with this number.

    Examples:
        >>> [position(mark) for mark in (0, 63, 64, 96)]
        [0, 63, 64, 128]
    """
    octave, within = divmod(max(0, mark - _DENSE // 2), _DENSE // 2)
    return mark if mark < _DENSE else (_DENSE // 2 + within) << octave


@dataclass(frozen=True, slots=True)
class PartMarks:
    """What a reader marked of a part of a stream: its first items, or items at ``position`` to the end.

    Attributes:
        packed: The hashes of the items that are marked, three whole numbers of 32 bits for each.
        end: How many items the part has; None as long as its end was not found.
        is_final: Whether no more will be marked in this pass.
        asked_rank: Whether the dataset asked which rank it is on, by the first of them.
    """

    packed: bytes = b""
    end: int | None = None
    is_final: bool = False
    asked_rank: bool = False

    @classmethod
    def of(
        cls, hashes: "ArrayLike", end: int | None = None, *, is_final: bool = False, asked_rank: bool = False
    ) -> "PartMarks":
        """Return marks of which 31 bits are kept, with the lowest bits, which say what they are of; 0 stays 0."""
        whole = np.asarray(hashes, dtype=np.int64).reshape(-1, 3)
        packed = (whole & 0x3FFFFFFF | (whole != 0).astype(np.int64) << 30).astype("<i4").tobytes()
        return cls(packed, end, is_final, asked_rank)

    @property
    def items(self) -> list[ItemHashes]:
        """The hashes."""
        return [ItemHashes(*item) for item in np.frombuffer(self.packed, dtype="<i4").reshape(-1, 3).tolist()]

    @property
    def count(self) -> int:
        """How many items are marked."""
        return len(self.packed) // _BYTES

    @property
    def read(self) -> int:
        """How many items were surely read, where they are marked at ``position``."""
        if self.end is not None:
            return self.end
        return position(self.count - 1) + 1 if self.count else 0

    def agrees_with(self, other: "PartMarks") -> bool:
        """Return whether another reader has the same marks, as far as both have come."""
        shared = min(len(self.packed), len(other.packed))
        return self.packed[:shared] == other.packed[:shared]


class Verdict(Enum):
    """What two readers' first items say about their orders."""

    ALIKE = "alike"
    OTHER_ORDER = "other order"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class OrderComparison:
    """How two readers' parts compare.

    Attributes:
        verdict: ``OTHER_ORDER`` if that is so of one part, else ``UNKNOWN`` if that is so of one.
        part: Which part; 0 where all are alike.
        item: The first item of it that differs.
        is_final: Whether nothing can change it, because both recorded all that they will.
    """

    verdict: Verdict
    part: int = 0
    item: int = 0
    is_final: bool = True


def compare_parts(mine: Sequence[PartMarks], theirs: Sequence[PartMarks]) -> OrderComparison:
    """Compare two readers' first items, part by part and all parts together; what only one has is not compared."""
    pairs = list(zip(mine, theirs, strict=False))
    is_final = all(ours.is_final and other.is_final for ours, other in pairs)
    verdicts = [compare(ours, other) for ours, other in pairs]
    # A shuffle of the files that workers share may give one reader's part to another worker of the other reader.
    if Verdict.UNKNOWN in verdicts and compare(*_pooled(pairs)) is Verdict.OTHER_ORDER:
        verdicts = [Verdict.OTHER_ORDER if found is Verdict.UNKNOWN else found for found in verdicts]
    for verdict in (Verdict.OTHER_ORDER, Verdict.UNKNOWN):
        if verdict in verdicts:
            part = verdicts.index(verdict)
            both = (parts[part].items for parts in (mine, theirs))
            return OrderComparison(verdict, part, _differing(*both)[0], is_final)
    return OrderComparison(Verdict.ALIKE, is_final=is_final)


def _pooled(pairs: Sequence[tuple[PartMarks, PartMarks]]) -> list[PartMarks]:
    """Return all parts' marks as those of one part: what appears once in a part appears once in both."""
    sizes = [max(len(part.packed) for part in pair) for pair in pairs]
    pooled = []
    for parts in zip(*pairs, strict=True):
        is_whole = all(part.end is not None for part in parts)
        # What one reader has not read yet is filled up with items that have no hashes.
        packed = b"".join(part.packed.ljust(size, b"\0") for part, size in zip(parts, sizes, strict=True))
        pooled.append(PartMarks(packed, len(packed) // _BYTES if is_whole else None))
    return pooled


def compare(mine: PartMarks, theirs: PartMarks) -> Verdict:
    """Return whether two readers read a part in the same order, by its first items.

    Args:
        mine: What one recorded.
        theirs: What the other recorded.

    Returns:
        ``ALIKE`` if no item differs, if those that differ do so in what augmentation changes alone, or if most are the
        same.
        ``OTHER_ORDER`` if items have other keys, or are surely at other positions. Otherwise ``UNKNOWN``: augmentation
        looks the same as a shuffle over a large range.
    """
    if mine.agrees_with(theirs):
        return Verdict.ALIKE
    are_whole = mine.end is not None and theirs.end is not None
    return _compare_items(mine.items, theirs.items, are_whole=are_whole)


def _compare_items(mine: Sequence[ItemHashes], theirs: Sequence[ItemHashes], *, are_whole: bool) -> Verdict:
    differing = _differing(mine, theirs)
    if not differing:
        return Verdict.ALIKE
    pairs = [(mine[place], theirs[place]) for place in differing]
    if any(ours.is_keyed and other.is_keyed and ours.names != other.names for ours, other in pairs):
        return Verdict.OTHER_ORDER
    kept = [values for values in _names_and_numbers(pairs) if _is_kept(values)]
    if any(len(set(values)) == len(values) for values in kept):  # each item is known, whatever else is with it
        return Verdict.ALIKE
    both = zip(zip(*mine, strict=True), zip(*theirs, strict=True), strict=True)
    if any(_is_reordered(ours, other, are_whole=are_whole) for ours, other in both):
        return Verdict.OTHER_ORDER
    # If most are known and at one position, others were augmented, or come after a skipped one.
    same = {ours.whole for ours, other in zip(mine, theirs, strict=False) if ours.whole == other.whole}
    return Verdict.ALIKE if kept or len(same) >= max(_SURELY_MOVED, len(differing)) else Verdict.UNKNOWN


def _differing(mine: Sequence[ItemHashes], theirs: Sequence[ItemHashes]) -> list[int]:
    """Return the positions at which two readers have other items, as far as both have come."""
    both = enumerate(zip(mine, theirs, strict=False))
    return [place for place, (ours, other) in both if ours.whole != other.whole]


def _names_and_numbers(pairs: Sequence[tuple[ItemHashes, ItemHashes]]) -> tuple[list[tuple[int, int]], ...]:
    """Return the names of pairs of items, and their numbers."""
    names = [(ours.names, other.names) for ours, other in pairs]
    return names, [(ours.numbers, other.numbers) for ours, other in pairs]


def _is_kept(pairs: Sequence[tuple[int, int]]) -> bool:
    """Return whether two readers have the same values at the same positions; 0 stands for no value.

    What all items have alike, such as one label, would be alike in any order, too.
    """
    return all(ours == other != 0 for ours, other in pairs) and len(set(pairs)) >= min(2, len(pairs))


def _is_reordered(mine: Sequence[int], theirs: Sequence[int], *, are_whole: bool) -> bool:
    """Return whether values are surely at other positions in one list than in the other; 0 stands for no value.

    A value that a list has twice has no single position. Many such values show that they are drawn with repetition, so
    that as many would be found in the other list by chance.
    """
    counts, others = Counter(mine), Counter(theirs)
    single = [value for value, count in counts.items() if count == others[value] == 1 and value]
    place_of = {value: place for place, value in enumerate(theirs)}
    moved = sum(mine[place_of[value]] != value if place_of[value] < len(mine) else True for value in single)
    if are_whole and len(single) == len(mine) == len(theirs):
        return moved > 0
    repeated = sum(count > 1 for value, count in chain(counts.items(), others.items()) if value)
    return moved >= _SURELY_MOVED + 2 * repeated


@dataclass(frozen=True, slots=True)
class StreamMismatch:
    """Where two readers' parts part.

    Attributes:
        part: Which part.
        count: They are the same up to so many items at most.
        is_end: Whether one of them ends there, and the other does not.
    """

    part: int
    count: int
    is_end: bool


class AlikeMarks(NamedTuple):
    """How many marks of a part two readers had alike in a pass in which none of its names, or numbers, differed."""

    names: int = 0
    numbers: int = 0


def stream_mismatch(
    mine: Sequence[PartMarks], theirs: Sequence[PartMarks], before: Sequence[AlikeMarks] = ()
) -> StreamMismatch | None:
    """Return where two readers of the same parts part; None if nothing shows that they do.

    Args:
        mine: What one marked of each.
        theirs: What the other marked of each.
        before: What they had alike of each in another pass.
    """
    known = chain(before, repeat(AlikeMarks()))
    for part, (ours, other, alike_before) in enumerate(zip(mine, theirs, known, strict=False)):
        for ended, goes_on in ((ours, other), (other, ours)):
            if ended.end is not None and goes_on.read > ended.end:
                return StreamMismatch(part, ended.end, is_end=True)
        if not ours.agrees_with(other) and (count := _other_items(ours.items, other.items, alike_before)) is not None:
            return StreamMismatch(part, count, is_end=False)
    return None


def alike_marks(mine: Sequence[PartMarks], theirs: Sequence[PartMarks]) -> list[AlikeMarks]:
    """Return what two readers have alike of each part, as far as both have come."""
    found = []
    for ours, other in zip(mine, theirs, strict=False):
        shared = min(ours.count, other.count)
        if ours.agrees_with(other):
            found.append(AlikeMarks(shared, shared))
        else:
            kinds = _names_and_numbers(list(zip(ours.items, other.items, strict=False)))
            found.append(AlikeMarks(*(0 if any(a != b for a, b in values) else shared for values in kinds)))
    return found


def _other_items(mine: Sequence[ItemHashes], theirs: Sequence[ItemHashes], before: AlikeMarks) -> int | None:
    """Return within how many items two readers surely read others; None if they may differ by augmentation alone."""
    if _compare_items(mine[:_DENSE], theirs[:_DENSE], are_whole=False) is Verdict.OTHER_ORDER:
        return _differing(mine, theirs)[0] + 1
    first = None
    for values, alike_before in zip(_names_and_numbers(list(zip(mine, theirs, strict=False))), before, strict=True):
        known = {value for value, _ in values}
        if not all(map(all, values)) or len(known) < min(2, len(values)):
            continue
        differing = [mark for mark, (value, other) in enumerate(values) if value != other]
        if not differing and len(known) == len(values):  # each item is known, whatever else is with it
            return None
        if first is None and differing and _are_others(differing, len(values), alike_before):
            first = position(differing[0]) + 1
    return first


def _are_others(differing: Sequence[int], marks: int, alike_before: int) -> bool:
    """Return whether marks differ from one on because another item is there, and not because some are augmented.

    If augmentation caused it, differences would be spread evenly. What is compared is the chance that all fall late.
    """
    same, late, others = alike_before + differing[0], marks - differing[0], len(differing)
    if same < _FEWEST_ALIKE or others < _FEWEST or others * _PART < late:
        return False
    return comb(late, others) * _ONCE_IN <= comb(same + late, others)
