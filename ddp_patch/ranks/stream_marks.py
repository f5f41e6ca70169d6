"""Compare how two readers read a stream to its end, from hashes at growing positions. Without a store."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddp_patch.ranks.stream_orders import Notes, Verdict, compare
from ddp_patch.streams.item_hashes import ItemHashes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike  # slow to import

__all__ = ["Divergence", "PartMarks", "decoded", "divergence", "encoded", "following", "position"]

# So many first items are all marked, and half as many between a position and twice that position.
_DENSE = 64
# Readers have something in common if so many first marks are the same.
_KEPT = 16
# Augmentation may change an item here and there. From a skipped item on most differ: so many, and a quarter.
_FEWEST, _PART = 3, 4
_NAMES, _NUMBERS = 1, 2
_BYTES = 3 * 4  # of the hashes of an item


def following(place: int) -> int:
    """Return which position is marked after this one.

    Examples:
        >>> following(0), following(62), following(64), following(1024)
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
    """What a reader marked of a part of a stream.

    Attributes:
        packed: The hashes of the items at the positions that are marked, three whole numbers of 32 bits for each.
        end: How many items the part has; None as long as its end was not found.
    """

    packed: bytes = b""
    end: int | None = None

    @classmethod
    def of(cls, hashes: "ArrayLike", end: int | None = None) -> "PartMarks":
        """Return marks of which 31 bits are kept, with the lowest bits, which say what they are of; 0 stays 0."""
        whole = np.asarray(hashes, dtype=np.int64).reshape(-1, 3)
        return cls((whole & 0x3FFFFFFF | (whole != 0).astype(np.int64) << 30).astype("<i4").tobytes(), end)

    @property
    def items(self) -> list[ItemHashes]:
        """The hashes."""
        return [ItemHashes(*item) for item in np.frombuffer(self.packed, dtype="<i4").reshape(-1, 3).tolist()]

    @property
    def read(self) -> int:
        """How many items were surely read."""
        if self.end is not None:
            return self.end
        marks = len(self.packed) // _BYTES
        return position(marks - 1) + 1 if marks else 0

    def agrees_with(self, other: "PartMarks") -> bool:
        """Return whether another reader has the same marks, as far as both have come."""
        shared = min(len(self.packed), len(other.packed))
        return self.packed[:shared] == other.packed[:shared]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two readers' parts part.

    Attributes:
        part: Which part.
        count: They are the same up to so many items at most.
        is_end: Whether one of them ends there, and the other does not.
    """

    part: int
    count: int
    is_end: bool


def divergence(mine: Sequence[PartMarks], theirs: Sequence[PartMarks]) -> Divergence | None:
    """Return where two readers of the same parts part; None if nothing shows that they do."""
    for part, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        for ended, goes_on in ((one, other), (other, one)):
            if ended.end is not None and goes_on.read > ended.end:
                return Divergence(part, ended.end, is_end=True)
        if not one.agrees_with(other) and (count := _other_items(one.items, other.items)) is not None:
            return Divergence(part, count, is_end=False)
    return None


def _other_items(mine: Sequence[ItemHashes], theirs: Sequence[ItemHashes]) -> int | None:
    """Return within how many items two readers surely read others; None if they may differ by augmentation alone."""
    if compare(Notes(mine[:_DENSE]), Notes(theirs[:_DENSE])) is Verdict.OTHER_ORDER:
        return next(place for place, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a.whole != b.whole) + 1
    pairs = list(zip(mine, theirs, strict=False))
    for kind in (_NAMES, _NUMBERS):
        values = [(one[kind], other[kind]) for one, other in pairs]
        if not all(map(all, values)) or len({value for value, _ in values}) < 2:
            continue
        differing = [mark for mark, (value, other) in enumerate(values) if value != other]
        if not differing:
            return None
        if differing[0] >= _KEPT:
            is_sure = len(differing) >= _FEWEST and len(differing) * _PART >= len(values) - differing[0]
            return position(differing[0]) + 1 if is_sure else None
    return None


def encoded(passes: Mapping[str, Sequence[PartMarks]]) -> str:
    """Return marks as a text that ``decoded`` reads: each pass's parts, by what the ranks call the pass."""
    return json.dumps(
        {name: [[part.end, base64.b64encode(part.packed).decode()] for part in parts] for name, parts in passes.items()}
    )


def decoded(text: str | bytes) -> dict[str, list[PartMarks]]:
    """Return what ``encoded`` made a text of."""
    return {
        name: [PartMarks(base64.b64decode(packed), end) for end, packed in parts]
        for name, parts in json.loads(text).items()
    }
