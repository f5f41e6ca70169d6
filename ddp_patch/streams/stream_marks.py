"""What ranks compare of a stream: one digest of each pass, which workers mark in shared memory as they read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from ddp_patch.orders.digest import END, Digest, Mark, mark_counts
from ddp_patch.streams.item_names import name_of
from ddp_patch.streams.shared_state import SharedWorkerState, shared_arrays

__all__ = ["StreamDigest", "StreamMarks"]

T = TypeVar("T")

# Marks of this many passes are kept: iterators may live side by side.
_PASSES_KEPT = 4
# A part has at most so many marks: enough for 10**12 items.
_MOST_MARKS = 128
_COUNTS = list(islice(mark_counts(), _MOST_MARKS))
_PLACES = {count: place for place, count in enumerate(_COUNTS)}
# So many names are hashed at once, which takes less time than one by one.
_AT_ONCE = 64


class StreamMarks:
    """The marks that a loader's readers make of the latest passes.

    Args:
        shared: What the main process and its workers report to each other.

    Examples:
        >>> shared = SharedWorkerState(readers=1)
        >>> marks = StreamMarks(shared)
        >>> shared.begin(1, epoch=0)
        >>> marks.begin(1)
        >>> list(marks.watching(0, 1, iter("ab")))
        ['a', 'b']
        >>> shared.note_part(1, 0, None)
        >>> digest = marks.of_pass(1)
        >>> digest.latest.at == END, digest.at(2) == digest.at(3), digest.length
        (True, False, 2)
    """

    def __init__(self, shared: SharedWorkerState) -> None:
        self.shared: SharedWorkerState = shared
        of_each = (_PASSES_KEPT, shared.readers)
        self._values, self._ends, self._made, self._flags, self._numbers = shared_arrays(
            (*of_each, _MOST_MARKS), (*of_each, 2), of_each, (*of_each, 2), (_PASSES_KEPT,)
        )
        self._digests: dict[int, StreamDigest] = {}  # of these passes, in the main process

    def begin(self, number: int) -> None:
        """Note, in the main process, that pass ``number`` begins."""
        slot = number % _PASSES_KEPT
        for known in list(self._digests):
            if known <= number - _PASSES_KEPT:
                self._digests.pop(known).keep()
        for noted in (self._ends, self._made, self._flags):
            noted[slot] = -1
        self._numbers[slot] = number

    def watching(
        self, part: int, number: int, items: Iterator[T], asked_rank: Callable[[], bool] = lambda: False
    ) -> Iterator[T]:
        """Return a part's items, which are marked as they are read.

        Args:
            part: The part.
            number: The pass.
            items: What the reader of the part reads, from its first item on.
            asked_rank: Tells whether the dataset has asked which rank it is on.
        """
        slot = number % _PASSES_KEPT
        # Another iterator's worker may be about the same part of the same pass.
        is_mine = part < self.shared.readers and self._numbers[slot] == number and self._made[slot, part] < 0
        return self._marking(number, part, items, asked_rank) if is_mine else items

    def _marking(self, number: int, part: int, items: Iterator[T], asked_rank: Callable[[], bool]) -> Iterator[T]:
        slot = number % _PASSES_KEPT
        # By numpy, which writes a number in a fraction of torch's time.
        values, made, end = (noted[slot].numpy()[part : part + 1] for noted in (self._values, self._made, self._ends))
        flags, current = self._flags[slot, part].numpy(), self._numbers.numpy()
        digest, names, are_named, wanted = Digest(), list[bytes](), False, 1
        made[0] = 0
        for item in items:
            name = name_of(item)
            # One that has none counts as any other such, so that the others are compared.
            names.append(name or b"")
            are_named = are_named or name is not None
            if len(names) == wanted:
                digest.add_names(names)
                names.clear()
                place = _PLACES.get(digest.count)
                if place is not None and current[slot] == number:  # else a later pass has the memory
                    flags[:] = asked_rank(), are_named
                    values[0, place] = digest.value
                    made[0] = place + 1  # last: the rest is there when it is seen
                wanted = min(_AT_ONCE, digest.until_mark)
            yield item
        if names:
            digest.add_names(names)
        digest.end()
        if current[slot] == number:
            flags[:] = asked_rank(), are_named
            end[0] = digest.count, digest.marks[END]

    def of_pass(self, number: int) -> "StreamDigest":
        """Return the digest of a pass, as far as it was read."""
        return self._digests.setdefault(number, StreamDigest(self, number))

    def parts(self, number: int) -> list["_PartMarks"]:
        """Return the marks of each part in a pass; nothing of a pass that is no longer known."""
        slot = number % _PASSES_KEPT
        if self._numbers[slot] != number:
            return []
        # Read the ends first, then how many marks there are: what they tell of was written before.
        ends, made = self._ends[slot].tolist(), self._made[slot].tolist()
        values = self._values[slot, :, : max(0, *made)].tolist()
        return [
            _PartMarks(of_part[: max(0, count)], *((None, None) if end[0] < 0 else end))
            for of_part, count, end in zip(values, made, ends, strict=True)
        ]

    def flags(self, number: int) -> tuple[bool, bool]:
        """Return whether, in a pass, the dataset asked which rank it is on, and whether an item had a name."""
        noted = self._flags[number % _PASSES_KEPT] * (self._numbers[number % _PASSES_KEPT] == number)
        asked, named = (noted > 0).any(dim=0).tolist()
        return asked, named


class _PartMarks(NamedTuple):
    """What a reader marked of its part.

    Attributes:
        values: The digests at the first counts.
        length: How many items it had; None before its end was found.
        end: The digest of all, then.
    """

    values: list[int]
    length: int | None
    end: int | None

    def at(self, count: int) -> int | None:
        """Return the digest at a count; that of all if there are fewer items, None before so many were read."""
        place = _MOST_MARKS if count == END else _PLACES[count]
        return self.values[place] if place < len(self.values) else self.end


class StreamDigest:
    """The digest of one pass over a stream, whatever the number of its readers.

    Readers of one stream have the same. Where each reads a part, that of all parts at a count is the hash of theirs.

    Args:
        marks: Where readers mark it.
        number: The pass.
    """

    def __init__(self, marks: StreamMarks, number: int) -> None:
        self._marks, self._number = marks, number
        self._kept: list[_PartMarks] | None = None
        self._is_one_stream = False

    def keep(self) -> None:
        """Keep what was marked so far: the memory is used for another pass."""
        self._kept = self._known()

    @property
    def latest(self) -> Mark | None:
        """The latest mark; None before the first."""
        parts = self._known()
        reading = [len(part.values) for part in parts if part.end is None]
        is_over = len(reading) < len(parts) if self._is_one_stream else not reading
        made = 0 if is_over or not parts else max(reading) if self._is_one_stream else min(reading)
        count = END if is_over else _COUNTS[made - 1] if made else 0
        value = self._at(count, parts) if count else None
        return None if value is None else Mark(count, value)

    @property
    def marks(self) -> Mapping[int, int]:
        """The values of all marks that are known, by their counts."""
        parts = self._known()
        values = ((count, self._at(count, parts)) for count in (*_COUNTS, END))
        return {count: value for count, value in values if value is not None}

    def at(self, count: int) -> int | None:
        """Return the value of the mark at a count; None if that is not known, yet or any longer.

        Where a part ended before that count, its end counts: so it differs from that of a stream that goes on.
        """
        return self._at(count, self._known()) if count in _PLACES or count == END else None

    def _at(self, count: int, parts: Sequence[_PartMarks]) -> int | None:
        values = [part.at(count) for part in parts]
        if self._is_one_stream:
            return next((value for value in values if value is not None), None)
        return hash(tuple(values)) if values and None not in values else None

    @property
    def length(self) -> int | None:
        """How many items there were, in all parts together; None before all ends were found."""
        lengths = [part.length for part in self._known()]
        known = [length for length in lengths if length is not None]
        if self._is_one_stream:
            return known[0] if known else None
        return sum(known) if known and len(known) == len(lengths) else None

    @property
    def asked_rank(self) -> bool:
        """Whether the dataset asked which rank it is on, by its first item, or was made for its rank."""
        return self._marks.flags(self._number)[0]

    @property
    def is_unnamed(self) -> bool:
        """Whether none of the items that were read so far has a name: then no more than their number is compared."""
        return any(part.values for part in self._known()) and not self._marks.flags(self._number)[1]

    def workers_differ(self) -> tuple[int, int] | None:
        """Return where workers that read one stream differ: the count, and which one has others than worker 0."""
        parts = self._known()
        if not (parts and self._is_one_stream):
            return None
        first, *others = parts
        for worker, other in enumerate(others, 1):
            both = list(zip(first.values, other.values, strict=False))
            if both and both[-1][0] != both[-1][1]:  # digests that differ do so from then on
                return next(count for count, (one, two) in zip(_COUNTS, both, strict=False) if one != two), worker
            if first.length is not None and other.end not in {None, first.end}:
                return first.length, worker
        return None

    def _known(self) -> list[_PartMarks]:
        """Return the parts' marks, once it is known whether they are parts."""
        if self._kept is not None:
            return self._kept
        ways = self._marks.shared.ways(self._number)
        self._is_one_stream = ways == {"stream"}
        return self._marks.parts(self._number) if len(ways) == 1 else []
