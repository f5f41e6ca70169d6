"""What ranks compare of a stream: one digest of each pass, which workers mark in shared memory as they read."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from ddp_patch.orders.digest import END, Digest, Mark, mark_counts
from ddp_patch.streams.item_names import name_of
from ddp_patch.streams.shared_state import MOST_MARKS, SharedWorkerState

__all__ = ["StreamDigest", "marked"]

T = TypeVar("T")

_COUNTS = list(islice(mark_counts(), MOST_MARKS))
_PLACES = {count: place for place, count in enumerate(_COUNTS)}
# So many names are hashed at once, which takes less time than one by one.
_AT_ONCE = 64


def marked(items: Iterator[T], report: np.void) -> Iterator[T]:
    """Pass on what the reader of a part reads from its first item on, and mark in its report what comes.

    Examples:
        >>> shared = SharedWorkerState(readers=1)
        >>> report = shared.report(1, part=0)
        >>> list(marked(iter("ab"), report)), int(report["read"])
        (['a', 'b'], 2)
    """
    number, digest, names, are_named, wanted = report["number"], Digest(), list[bytes](), False, 1
    report["marks"] = 0
    for item in items:
        name = name_of(item)
        # One that has none counts as any other such, so that the others are compared.
        names.append(name or b"")
        are_named = are_named or name is not None
        if len(names) == wanted:
            digest.add_names(names)
            names.clear()
            place = _PLACES.get(digest.count)
            if place is not None and report["number"] == number:  # else a later pass has the memory
                report["values"][place], report["has_names"] = digest.value, are_named
                report["marks"] = place + 1  # last: the mark is there when it counts
            wanted = min(_AT_ONCE, digest.until_mark)
        yield item
    if names:
        digest.add_names(names)
    digest.end()
    if report["number"] == number:
        report["end"], report["has_names"] = digest.marks[END], are_named
        report["read"] = digest.count


class StreamDigest:
    """The digest of one pass over a stream, whatever the number of its readers.

    Readers of one stream have the same. Where each reads a part, that of all parts at a count is the hash of theirs.

    Args:
        shared: Where readers mark it.
        number: The pass.
    """

    def __init__(self, shared: SharedWorkerState, number: int) -> None:
        self._shared, self._number = shared, number

    def _reported(self, what: str) -> list[Any]:
        return self._shared.reported(self._number, what)

    @property
    def _is_one_stream(self) -> bool:
        return self._shared.ways(self._number) == {"stream"}

    def _parts(self) -> list[tuple[list[int], int | None]]:
        """Return the marks of each part, and the digest of all of it, or None before its end."""
        # The ends first, and how many marks there are before these: what they tell of was written before.
        read, ends, made, values = map(self._reported, ("read", "end", "marks", "values"))
        return [
            (of_part[: max(0, count)], end if length >= 0 else None)
            for of_part, count, length, end in zip(values, made, read, ends, strict=True)
        ]

    @property
    def marks(self) -> dict[int, int]:
        """The values of all marks that are known, by their counts; none before it is known whether there are parts.

        Where a part ended before a count, its end counts: so it differs from that of a stream that goes on.
        """
        if len(self._shared.ways(self._number)) != 1:
            return {}
        parts = [
            marks if end is None else marks + [end] * (len(_COUNTS) + 1 - len(marks)) for marks, end in self._parts()
        ]
        values = max(parts, key=len) if self._is_one_stream else map(hash, zip(*parts, strict=False))
        return dict(zip((*_COUNTS, END), values, strict=False))

    @property
    def latest(self) -> Mark | None:
        """The latest mark; None before the first."""
        marks = self.marks
        return Mark(*next(reversed(marks.items()))) if marks else None

    @property
    def asked_rank(self) -> bool:
        """Whether the dataset asked which rank it is on, by its first item, or was made for its rank."""
        return 1 in self._reported("asked_rank")

    @property
    def is_unnamed(self) -> bool:
        """Whether none of the items that were read so far has a name: then no more than their number is compared."""
        return max(self._reported("marks")) > 0 and 1 not in self._reported("has_names")

    def workers_differ(self) -> tuple[int, int] | None:
        """Return where workers that read one stream differ: the count, and which one has others than worker 0."""
        if not self._is_one_stream:
            return None
        (first, first_end), *others = self._parts()
        for worker, (marks, end) in enumerate(others, 1):
            differ = (count for count, one, other in zip(_COUNTS, first, marks, strict=False) if one != other)
            if (count := next(differ, None)) is not None:
                return count, worker
            if None not in {first_end, end} and first_end != end:
                return self._reported("read")[0], worker
        return None
