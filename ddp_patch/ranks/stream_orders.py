"""Decide from the first items of two readers whether they read a stream in the same order. Without a store."""

import base64
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

import numpy as np

from ddp_patch.streams.item_hashes import ItemHashes

__all__ = ["Finding", "Notes", "Verdict", "compare", "compare_parts", "decoded", "encoded"]

# This many items must be at another position in another reader's stream before it is no coincidence. Items that are
# drawn again and again from a few coincide by chance too, and then as often within one stream as between two.
_SURELY_MOVED = 8
_NO_ITEM = ItemHashes(0, 0, 0)


class Verdict(Enum):
    """What two readers' first items say about their orders."""

    ALIKE = "alike"
    OTHER_ORDER = "other order"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Notes:
    """What a reader recorded of the first items of a part.

    Attributes:
        items: The items' hashes, in order.
        is_final: Whether no more will be recorded in this pass.
        is_all: Whether these are all items that the part has.
        asked_rank: Whether the dataset asked which rank it is on, by the first of them.
    """

    items: Sequence[ItemHashes] = ()
    is_final: bool = False
    is_all: bool = False
    asked_rank: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
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


def compare_parts(mine: Sequence[Notes], theirs: Sequence[Notes]) -> Finding:
    """Compare two readers, part by part, and their parts together; what only one has is not compared."""
    pairs = list(zip(mine, theirs, strict=False))
    is_final = all(one.is_final and other.is_final for one, other in pairs)
    verdicts = [compare(one, other) for one, other in pairs]
    # A shuffle of the files that workers share may give one reader's part to another worker of the other reader.
    if Verdict.UNKNOWN in verdicts and compare(*_pooled(pairs)) is Verdict.OTHER_ORDER:
        verdicts = [Verdict.OTHER_ORDER if one is Verdict.UNKNOWN else one for one in verdicts]
    for verdict in (Verdict.OTHER_ORDER, Verdict.UNKNOWN):
        if verdict in verdicts:
            part = verdicts.index(verdict)
            return Finding(verdict, part, _differing(*pairs[part])[0], is_final)
    return Finding(Verdict.ALIKE, is_final=is_final)


def compare(mine: Notes, theirs: Notes) -> Verdict:
    """Return whether two readers read a part in the same order.

    Args:
        mine: What one recorded.
        theirs: What the other recorded.

    Returns:
        ``ALIKE`` if no item differs, or if those that differ do so in what augmentation changes alone.
        ``OTHER_ORDER`` if items have other keys, or are surely at other positions. Otherwise ``UNKNOWN``: augmentation
        looks the same as a shuffle over a large range.
    """
    differing = _differing(mine, theirs)
    if not differing:
        return Verdict.ALIKE
    pairs = [(mine.items[place], theirs.items[place]) for place in differing]
    if any(one.is_keyed and other.is_keyed and one.names != other.names for one, other in pairs):
        return Verdict.OTHER_ORDER
    kept = [values for values in _values_of(pairs) if _is_kept(values)]
    if any(len(set(values)) == len(values) for values in kept):  # each item is known, whatever else is with it
        return Verdict.ALIKE
    is_all = mine.is_all and theirs.is_all
    both = list(zip(zip(*mine.items, strict=True), zip(*theirs.items, strict=True), strict=True))
    if any(_is_reordered(one, other, is_all=is_all) for one, other in both):
        return Verdict.OTHER_ORDER
    return Verdict.ALIKE if kept else Verdict.UNKNOWN


def _pooled(pairs: Sequence[tuple[Notes, Notes]]) -> tuple[Notes, Notes]:
    """Return all parts' notes as those of one part: what appears once in a part appears once in both."""
    lengths = [max(len(one.items), len(other.items)) for one, other in pairs]
    mine, theirs = (_joined(parts, lengths) for parts in zip(*pairs, strict=True))
    return mine, theirs


def _joined(parts: Sequence[Notes], lengths: Sequence[int]) -> Notes:
    filled = [
        [*notes.items, *[_NO_ITEM] * (length - len(notes.items))] for notes, length in zip(parts, lengths, strict=True)
    ]
    return Notes(list(chain.from_iterable(filled)), is_all=all(notes.is_all for notes in parts))


def _values_of(pairs: Sequence[tuple[ItemHashes, ItemHashes]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs' names, then their numbers."""
    yield [(one.names, other.names) for one, other in pairs]
    yield [(one.numbers, other.numbers) for one, other in pairs]


def _is_kept(pairs: Sequence[tuple[int, int]]) -> bool:
    """Return whether two readers have the same values at the same positions; 0 stands for no value.

    What all items have alike, such as one label, would be alike in any order, too.
    """
    kept = {one for one, _ in pairs}
    return all(one == other != 0 for one, other in pairs) and len(kept) >= min(2, len(pairs))


def _differing(mine: Notes, theirs: Notes) -> list[int]:
    """Return the positions at which two readers have other items, as far as both have come."""
    both = enumerate(zip(mine.items, theirs.items, strict=False))
    return [place for place, (one, other) in both if one.whole != other.whole]


def _is_reordered(mine: Sequence[int], theirs: Sequence[int], *, is_all: bool) -> bool:
    """Return whether values are surely at other positions in one list than in the other; 0 stands for no value.

    A value that a list has twice has no single position. Many such values show that they are drawn with repetition, so
    that as many would be found in the other list by chance.
    """
    counts, others = Counter(mine), Counter(theirs)
    single = [value for value, count in counts.items() if count == others[value] == 1 and value]
    place_of = {value: place for place, value in enumerate(theirs)}
    moved = sum(mine[place_of[value]] != value if place_of[value] < len(mine) else True for value in single)
    if is_all and len(single) == len(mine) == len(theirs):
        return moved > 0
    repeated = sum(count > 1 for value, count in chain(counts.items(), others.items()) if value)
    return moved >= _SURELY_MOVED + 2 * repeated


def encoded(passes: Mapping[str, Sequence[Notes]]) -> str:
    """Return notes as a text that ``decoded`` reads: each pass's parts, by what the ranks call the pass."""
    return json.dumps({name: [_encoded(notes) for notes in parts] for name, parts in passes.items()})


def decoded(text: str | bytes) -> dict[str, list[Notes]]:
    """Return what ``encoded`` made a text of."""
    return {name: [_decoded(*notes) for notes in parts] for name, parts in json.loads(text).items()}


def _encoded(notes: Notes) -> tuple[bool, bool, bool, str]:
    hashes = np.array(notes.items, dtype="<i8").tobytes()
    return notes.is_final, notes.is_all, notes.asked_rank, base64.b64encode(hashes).decode()


def _decoded(is_final: bool, is_all: bool, asked_rank: bool, text: str) -> Notes:
    hashes = np.frombuffer(base64.b64decode(text), dtype="<i8").reshape(-1, 3)
    return Notes([ItemHashes(*pair) for pair in hashes.tolist()], is_final, is_all, asked_rank)
