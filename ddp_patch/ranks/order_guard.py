"""Compare the orders in which ranks and workers read an iterable dataset: always on, and without waiting."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ddp_patch.compat.datasets import order_remedy
from ddp_patch.errors import RankMismatchError, StreamOrderWarning
from ddp_patch.ranks.comparison import ranks_text
from ddp_patch.ranks.notices import Letters, Peers
from ddp_patch.ranks.stream_marks import Divergence, PartMarks, divergence
from ddp_patch.ranks.stream_marks import decoded as decoded_marks
from ddp_patch.ranks.stream_marks import encoded as encoded_marks
from ddp_patch.ranks.stream_orders import Finding, Notes, Verdict, compare_parts, decoded, encoded

__all__ = ["ONE_STREAM", "EndGuard", "Marked", "Noted", "OrderGuard", "compare_workers"]

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
    """

    def __init__(
        self,
        peers: Peers,
        dataset: object,
        noted: Noted,
        workers_read_alike: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self._rank, self._number = peers.rank, peers.number
        self._letters = Letters(peers, "orders")
        self._open = set(peers.others)
        self._name, self._remedy = type(dataset).__name__, order_remedy(dataset) or _SEED
        self._noted, self._workers_read_alike = noted, workers_read_alike
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
        for rank, text in self._letters.exchange(self._news(mine)).items():
            theirs = decoded(text)
            for name in mine.keys() & theirs.keys():
                found = compare_parts(mine[name], theirs[name])
                if found.verdict is Verdict.UNKNOWN:  # no items in common, as far as they show
                    self._require_unsharded(mine[name][found.part], theirs[name][found.part], rank)
                self._judge(found, f"part {found.part}", f"rank {self._rank}", ranks_text([rank]))
                if found.is_final:
                    self._open.discard(rank)
                    self._letters.drop(rank)
        if not self._open:
            self._noted.settle()

    def _compare_workers(self, mine: Mapping[str, Sequence[Notes]]) -> None:
        for number, parts in enumerate(mine.values(), 1):
            if len(parts) > 1 and self._workers_read_alike(number):
                found = compare_workers(parts)
                self._judge(found, "the stream", "worker 0", f"worker {found.part}, both of rank {self._rank}")

    def _require_unsharded(self, mine: Notes, theirs: Notes, rank: int) -> None:
        """Raise RankMismatchError if a dataset gave ranks other items, and asked for its rank before it did."""
        if mine.asked_rank or theirs.asked_rank:
            raise RankMismatchError(
                f"Iterating the loader that was patched as number {self._number}: {self._name} is sharded already. It "
                f"asked which rank it is on while it was read, and its first items differ between rank {self._rank} "
                f"and {ranks_text([rank])}. Each rank would take a shard of its own part only, and the rest would be "
                f"lost. Let {self._name} give every rank everything; or say is_ddp_aware = True in its class, and its "
                "loader is returned unchanged. If it asks for another reason, such as a seed, let items have a string "
                "or a whole number that names them."
            )

    def _news(self, mine: Mapping[str, Sequence[Notes]]) -> str | None:
        """Return what to leave: nothing as long as little has come since."""
        every = [notes for parts in mine.values() for notes in parts]
        items, finals = sum(len(notes.items) for notes in every), sum(notes.is_final for notes in every)
        if finals == self._left[1] and (items == 0 or items < 2 * self._left[0]):
            return None
        self._left = (items, finals)
        return encoded(mine)

    def _judge(self, found: Finding, where: str, mine: str, theirs: str) -> None:
        seen = (
            f"Iterating the loader that was patched as number {self._number}: item {found.item} of {where} of "
            f"{self._name} differs between {mine} and {theirs}"
        )
        if found.verdict is Verdict.OTHER_ORDER:
            raise RankMismatchError(
                f"{seen}, because each reads its own order. Samples would be lost: each rank keeps its share of what "
                f"should be one order. {self._remedy}. If the dataset already gives each rank other samples, leave its "
                "loader unpatched."
            )
        if found.verdict is Verdict.UNKNOWN and found.is_final and not self._has_warned:
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
        self._letters, self._marked = Letters(peers, "marks"), marked
        self._left = ""

    def compare(self) -> None:
        """Leave what was marked, and compare it with what the others have left by now.

        Raises:
            RankMismatchError: The ranks read other items, or not equally many.
        """
        mine = self._marked.passes()
        news = encoded_marks(mine)
        others = self._letters.exchange(None if news == self._left else news)
        self._left = news
        for rank, text in others.items():
            theirs = decoded_marks(text)
            for name, parts in mine.items():
                found = divergence(parts, theirs.get(name, ()))
                if found is not None:
                    raise self._error(name, rank, found)

    def _error(self, name: str, rank: int, found: Divergence) -> RankMismatchError:
        where = f"part {found.part} of {self._name} in {name.rpartition(' (')[0]}"
        what = (
            f"{where} ends after {found.count} items on one of them, and has more on the other"
            if found.is_end
            else f"{where} differs within the first {found.count} items"
        )
        return RankMismatchError(
            f"Iterating the loader that was patched as number {self._number}: rank {self._rank} and "
            f"{ranks_text([rank])} read different streams. {what[0].upper()}{what[1:]}. Each rank keeps its shard of "
            f"what should be one stream, so samples would be lost and steps would not be equal. {ONE_STREAM}"
        )
