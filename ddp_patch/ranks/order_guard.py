"""Compare the orders in which ranks read their streams."""

import base64
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, repeat
from math import comb
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ddp_patch.compat.packages import order_remedy
from ddp_patch.errors import RankMismatchError, StreamOrderWarning
from ddp_patch.orders.fingerprint import ItemHashes
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.notices import Mailbox, Peers

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = [
    "ONE_STREAM",
    "Divergence",
    "EndGuard",
    "Finding",
    "Kept",
    "Marked",
    "Noted",
    "Notes",
    "OrderGuard",
    "OrderVerdict",
    "PartMarks",
    "compare",
    "compare_parts",
    "compare_workers",
    "decoded",
    "decoded_marks",
    "divergence",
    "encoded",
    "encoded_marks",
    "following",
    "kept",
    "position",
]


# This many items must be at another position in another reader's stream before it is no coincidence. Items that are
# drawn again and again from a few coincide by chance too, and then as often within one stream as between two.
_SURELY_MOVED = 8
_NO_ITEM = ItemHashes(0, 0, 0)


class OrderVerdict(Enum):
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

    verdict: OrderVerdict
    part: int = 0
    item: int = 0
    is_final: bool = True


def compare_parts(mine: Sequence[Notes], theirs: Sequence[Notes]) -> Finding:
    """Compare two readers, part by part, and their parts together; what only one has is not compared."""
    pairs = list(zip(mine, theirs, strict=False))
    is_final = all(one.is_final and other.is_final for one, other in pairs)
    verdicts = [compare(one, other) for one, other in pairs]
    # A shuffle of the files that workers share may give one reader's part to another worker of the other reader.
    if OrderVerdict.UNKNOWN in verdicts and compare(*_pooled(pairs)) is OrderVerdict.OTHER_ORDER:
        verdicts = [OrderVerdict.OTHER_ORDER if one is OrderVerdict.UNKNOWN else one for one in verdicts]
    for verdict in (OrderVerdict.OTHER_ORDER, OrderVerdict.UNKNOWN):
        if verdict in verdicts:
            part = verdicts.index(verdict)
            return Finding(verdict, part, _differing(*pairs[part])[0], is_final)
    return Finding(OrderVerdict.ALIKE, is_final=is_final)


def compare(mine: Notes, theirs: Notes) -> OrderVerdict:
    """Return whether two readers read a part in the same order.

    Args:
        mine: What one recorded.
        theirs: What the other recorded.

    Returns:
        ``ALIKE`` if no item differs, if those that differ do so in what augmentation changes alone, or if most are the
        same.
        ``OTHER_ORDER`` if items have other keys, or are surely at other positions. Otherwise ``UNKNOWN``: augmentation
        looks the same as a shuffle over a large range.
    """
    differing = _differing(mine, theirs)
    if not differing:
        return OrderVerdict.ALIKE
    pairs = [(mine.items[place], theirs.items[place]) for place in differing]
    if any(one.is_keyed and other.is_keyed and one.names != other.names for one, other in pairs):
        return OrderVerdict.OTHER_ORDER
    kept = [values for values in _values_of(pairs) if _is_kept(values)]
    if any(len(set(values)) == len(values) for values in kept):  # each item is known, whatever else is with it
        return OrderVerdict.ALIKE
    is_all = mine.is_all and theirs.is_all
    both = list(zip(zip(*mine.items, strict=True), zip(*theirs.items, strict=True), strict=True))
    if any(_is_reordered(one, other, is_all=is_all) for one, other in both):
        return OrderVerdict.OTHER_ORDER
    if kept or _mostly_same(mine, theirs, len(differing)):
        return OrderVerdict.ALIKE
    return OrderVerdict.UNKNOWN


def _mostly_same(mine: Notes, theirs: Notes, differing: int) -> bool:
    """Return whether most items are known and at one position: others were augmented, or come after a skipped one."""
    both = zip(mine.items, theirs.items, strict=False)
    return len({one.whole for one, other in both if one.whole == other.whole}) >= max(_SURELY_MOVED, differing)


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


# So many first items are all marked, and half as many between a position and twice that position.
_DENSE = 64
# Readers have something in common if so many first marks are the same.
_KEPT = 16
# Augmentation may change an item here and there. From a skipped item on many differ: so many, and a quarter. That the
# ones before it are all the same may be chance only once in so many cases, because marks are compared again and again.
_FEWEST, _PART, _ONCE_IN = 3, 4, 10**6
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


class Kept(NamedTuple):
    """How many marks of a part two readers had alike in a pass in which none of its names, or numbers, differed."""

    names: int = 0
    numbers: int = 0


def divergence(
    mine: Sequence[PartMarks], theirs: Sequence[PartMarks], before: Sequence[Kept] = ()
) -> Divergence | None:
    """Return where two readers of the same parts part; None if nothing shows that they do.

    Args:
        mine: What one marked of each.
        theirs: What the other marked of each.
        before: What they had alike of each in another pass.
    """
    pairs = zip(mine, theirs, strict=False)
    for part, ((one, other), known) in enumerate(zip(pairs, chain(before, repeat(Kept())))):  # noqa: B905 - endless
        for ended, goes_on in ((one, other), (other, one)):
            if ended.end is not None and goes_on.read > ended.end:
                return Divergence(part, ended.end, is_end=True)
        if not one.agrees_with(other) and (count := _other_items(one.items, other.items, known)) is not None:
            return Divergence(part, count, is_end=False)
    return None


def kept(mine: Sequence[PartMarks], theirs: Sequence[PartMarks]) -> list[Kept]:
    """Return what two readers have alike of each part, as far as both have come."""
    found = []
    for one, other in zip(mine, theirs, strict=False):
        shared = min(len(one.packed), len(other.packed)) // _BYTES
        if one.agrees_with(other):
            found.append(Kept(shared, shared))
        else:
            kinds = _kinds(one.items, other.items)
            found.append(Kept(*(0 if any(a != b for a, b in values) else shared for values in kinds)))
    return found


def _kinds(mine: Sequence[ItemHashes], theirs: Sequence[ItemHashes]) -> list[list[tuple[int, int]]]:
    """Return the items' names of two readers, and their numbers."""
    return [[(one[kind], other[kind]) for one, other in zip(mine, theirs, strict=False)] for kind in (_NAMES, _NUMBERS)]


def _other_items(mine: Sequence[ItemHashes], theirs: Sequence[ItemHashes], before: Kept) -> int | None:
    """Return within how many items two readers surely read others; None if they may differ by augmentation alone."""
    if compare(Notes(mine[:_DENSE]), Notes(theirs[:_DENSE])) is OrderVerdict.OTHER_ORDER:
        return next(place for place, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a.whole != b.whole) + 1
    first = None
    for values, alike_before in zip(_kinds(mine, theirs), before, strict=True):
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

    Augmentation changes any of them alike. So that all that differ come late would be a coincidence: one choice of so
    many marks among the late ones, of all choices.
    """
    same, late, others = alike_before + differing[0], marks - differing[0], len(differing)
    if same < _KEPT or others < _FEWEST or others * _PART < late:
        return False
    return comb(late, others) * _ONCE_IN <= comb(same + late, others)


def encoded_marks(passes: Mapping[str, Sequence[PartMarks]]) -> str:
    """Return marks as a text that ``decoded_marks`` reads: each pass's parts, by what the ranks call the pass."""
    return json.dumps(
        {name: [[part.end, base64.b64encode(part.packed).decode()] for part in parts] for name, parts in passes.items()}
    )


def decoded_marks(text: str | bytes) -> dict[str, list[PartMarks]]:
    """Return what ``encoded_marks`` made a text of."""
    return {
        name: [PartMarks(base64.b64decode(packed), end) for end, packed in parts]
        for name, parts in json.loads(text).items()
    }


# What to do where no package is known to shuffle.
_SEED = (
    "Give its shuffle a seed that is the same on every rank and follows from the epoch, such as random.Random(epoch) "
    "with the epoch that the dataset gets by set_epoch(), and list files in sorted order"
)

# What to do where ranks read different streams.
ONE_STREAM = (
    "Let the dataset give every rank the same: skip an unreadable item on all of them or raise an error, and raise an "
    "error where a connection is lost. Or use iterable_sharding='by_worker', where each rank reads a part of its own."
)


class Noted(Protocol):
    """Where a rank's readers record the first items that they read."""

    def passes(self) -> Mapping[str, Sequence[Notes]]:
        """Return what was recorded of each pass, part by part, by what all ranks call the pass."""

    def settle(self) -> None:
        """Record that no more is needed."""


def compare_workers(parts: Sequence[Notes]) -> Finding:
    """Compare the workers of one rank, which all read one stream; ``part`` is the one that differs from the first."""
    firsts = [parts[0]] * (len(parts) - 1)
    found = compare_parts(firsts, parts[1:])
    return Finding(found.verdict, found.part + 1, found.item, found.is_final)


class OrderGuard:
    """Compares what this rank's readers read first with what the other ranks' read.

    Args:
        peers: Who they are.
        dataset: What is read.
        noted: What this rank's readers recorded.
        workers_read_alike: Tells of a pass, by its number from 1, whether all workers of a rank read the same stream.
        held: A fingerprint of what the dataset holds at the patch.
    """

    def __init__(
        self,
        peers: Peers,
        dataset: object,
        noted: Noted,
        workers_read_alike: Callable[[int], bool] = lambda number: True,
        held: str = "",
    ) -> None:
        self._rank, self._number = peers.rank, peers.number
        self._mailbox = Mailbox(peers, "orders")
        self._open = set(peers.others)
        self._name, self._remedy = type(dataset).__name__, order_remedy(dataset) or _SEED
        self._noted, self._workers_read_alike, self._held = noted, workers_read_alike, held
        self._left = (0, 0)
        self._has_warned = False

    def compare(self) -> None:
        """Leave what was recorded, and compare it with what the others have left by now.

        Warns:
            StreamOrderWarning: Once, if the items do not show whether the orders differ.

        Raises:
            RankMismatchError: The ranks, or the workers of this one, read in different orders.
        """
        if not self._open:
            return
        mine = self._noted.passes()
        self._compare_workers(mine)
        for rank, text in self._mailbox.exchange(self._news(mine)).items():
            held, _, noted = text.partition(b"|")
            theirs, is_held = decoded(noted), held.decode() == self._held
            for name in mine.keys() & theirs.keys():
                found = compare_parts(mine[name], theirs[name])
                if found.verdict is OrderVerdict.UNKNOWN:  # no items in common, as far as they show
                    self._require_unsharded(mine[name][found.part], theirs[name][found.part], rank, is_held=is_held)
                self._judge(found, f"part {found.part}", f"rank {self._rank}", ranks_text([rank]))
                if found.is_final:
                    self._open.discard(rank)
                    self._mailbox.drop(rank)
        if not self._open:
            self._noted.settle()

    def _compare_workers(self, mine: Mapping[str, Sequence[Notes]]) -> None:
        for number, parts in enumerate(mine.values(), 1):
            if len(parts) > 1 and self._workers_read_alike(number):
                found = compare_workers(parts)
                self._judge(found, "the stream", "worker 0", f"worker {found.part}, both of rank {self._rank}")

    def _require_unsharded(self, mine: Notes, theirs: Notes, rank: int, *, is_held: bool) -> None:
        """Raise RankMismatchError if a dataset gave ranks other items, and was made for its rank or asked for it.

        What ranks' datasets hold may differ for another reason, such as a seed. So that counts only where items have
        names or numbers, which other items have too.
        """
        are_told = any(item.names or item.numbers for item in mine.items)
        if mine.asked_rank or theirs.asked_rank:
            why = "It asked which rank it is on while it was read or its worker was prepared"
        elif not is_held and are_told:
            why = "What it holds differs between ranks since it was made"
        else:
            return
        raise RankMismatchError(
            f"Iterating the loader that was patched as number {self._number}: {self._name} is sharded already. {why}, "
            f"and its first items differ between rank {self._rank} and {ranks_text([rank])}. Each rank would take a "
            f"shard of its own part only, and the rest would be lost. Let {self._name} give every rank everything; or "
            "say is_ddp_aware = True in its class, and its loader is returned unchanged. If ranks differ for another "
            "reason, such as a seed, let items have a string or a whole number that names them."
        )

    def _news(self, mine: Mapping[str, Sequence[Notes]]) -> str | None:
        """Return what to leave: nothing as long as little has come since."""
        every = [notes for parts in mine.values() for notes in parts]
        items, finals = sum(len(notes.items) for notes in every), sum(notes.is_final for notes in every)
        if finals == self._left[1] and (items == 0 or items < 2 * self._left[0]):
            return None
        self._left = (items, finals)
        return f"{self._held}|{encoded(mine)}"

    def _judge(self, found: Finding, where: str, mine: str, theirs: str) -> None:
        seen = (
            f"Iterating the loader that was patched as number {self._number}: item {found.item} of {where} of "
            f"{self._name} differs between {mine} and {theirs}"
        )
        if found.verdict is OrderVerdict.OTHER_ORDER:
            raise RankMismatchError(
                f"{seen}, because each reads its own order. Samples would be lost: each rank keeps its share of what "
                f"should be one order. {self._remedy}. If the dataset already gives each rank other samples, leave its "
                "loader unpatched."
            )
        if found.verdict is OrderVerdict.UNKNOWN and found.is_final and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{seen}. Either only augmentation differs, which is fine, or each reads its own order, which loses "
                "samples. The items do not show which: they have no string or whole number that names a sample and "
                f"that augmentation keeps. {self._remedy}. Or give the items such a field. If only augmentation "
                "differs, ignore this StreamOrderWarning.",
                StreamOrderWarning,
                stacklevel=2,
            )


class Marked(Protocol):
    """Where a rank's readers mark what they read, to the end of each pass."""

    def passes(self) -> Mapping[str, Sequence[PartMarks]]:
        """Return the marks of the latest passes, part by part, by what all ranks call the pass."""


class EndGuard:
    """Compares what this rank's readers read, to the end of each pass, with what the other ranks' read.

    Args:
        peers: Who they are.
        dataset: What is read.
        marked: What this rank's readers marked.
    """

    def __init__(self, peers: Peers, dataset: object, marked: Marked) -> None:
        self._rank, self._number, self._name = peers.rank, peers.number, type(dataset).__name__
        self._mailbox, self._marked = Mailbox(peers, "marks"), marked
        self._remedy = order_remedy(dataset) or _SEED
        self._left = ""
        self._kept: dict[int, dict[str, list[Kept]]] = {}  # by rank, then by what the ranks call the pass

    def compare(self) -> None:
        """Leave what was marked, and compare it with what the others have left by now.

        Raises:
            RankMismatchError: The ranks read other items, or not equally many.
        """
        mine = self._marked.passes()
        news = encoded_marks(mine)
        others = self._mailbox.exchange(None if news == self._left else news)
        self._left = news
        for rank, text in others.items():
            theirs, known = decoded_marks(text), self._kept.setdefault(rank, {})
            for name, parts in mine.items():
                others_parts = theirs.get(name, ())
                others_before = [before for other, before in known.items() if other != name]
                earlier = max(others_before, key=lambda of_parts: sum(map(max, of_parts)), default=())
                found = divergence(parts, others_parts, earlier)
                if found is not None:
                    raise self._error(name, rank, found)
                if any(part.packed for part in parts):  # of earlier passes only the ends are left
                    known[name] = kept(parts, others_parts)
            self._kept[rank] = {name: before for name, before in known.items() if name in mine}

    def _error(self, name: str, rank: int, found: Divergence) -> RankMismatchError:
        where = f"part {found.part} of {self._name} in {name.rpartition(' (')[0]}"
        what, remedy = (
            (f"{where} ends after {found.count} items on one of them, and has more on the other", ONE_STREAM)
            if found.is_end
            else (f"{where} differs within the first {found.count} items", f"{ONE_STREAM} {self._remedy}.")
        )
        return RankMismatchError(
            f"Iterating the loader that was patched as number {self._number}: rank {self._rank} and "
            f"{ranks_text([rank])} read different streams. {what[0].upper()}{what[1:]}. Each rank keeps its shard of "
            f"what should be one stream, so samples would be lost and steps would not be equal. {remedy}"
        )
