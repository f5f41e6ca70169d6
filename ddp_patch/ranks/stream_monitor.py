"""Compare what ranks read of a stream: its first items, and marked items to its end."""

import warnings
from collections.abc import Callable, Mapping, Sequence

from ddp_patch.compat.packages import order_remedy
from ddp_patch.errors import RankMismatchError, StreamOrderWarning
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.mailbox import Mailbox, Peers
from ddp_patch.ranks.order_verdicts import (
    AlikeMarks,
    OrderComparison,
    PartMarks,
    StreamMismatch,
    Verdict,
    alike_marks,
    compare_parts,
    stream_mismatch,
)

__all__ = ["ONE_STREAM", "StreamMonitor"]


# What to do where no package is known to shuffle.
_SEED = (
    "Give its shuffle a seed that is the same on every rank and follows from the epoch, such as random.Random(epoch) "
    "with the epoch that the dataset gets by set_epoch(), and list files in sorted order"
)

# What to do where ranks read different streams.
ONE_STREAM = (
    "Let the dataset give every rank the same: skip an unreadable item on all of them or raise an error, and raise an "
    "error where a connection is lost. Or use share='by_worker', where each rank reads a part of its own."
)


# So many first items of two orders of the same samples have some in common, where any shuffle leaves them near.
_ENOUGH = 64
# How many others a rank reads at once while a pass goes on.
_AT_ONCE = 2

_Passes = Mapping[str, Sequence[PartMarks]]


class StreamMonitor:
    """Compares what this rank's readers read with what the other ranks' read.

    Args:
        peers: Who they are.
        dataset: What is read.
        first_items: Returns what this rank's readers marked of the first items of some passes, part by part, by what
            all ranks call the pass.
        marks: Returns what they marked of the latest passes to their ends, as above.
        settle: Called when no more first items are needed.
        workers_read_alike: Tells of a pass, by its number from 1, whether all workers of a rank read the same stream.
        held: A fingerprint of what the dataset holds at the patch.
    """

    def __init__(
        self,
        peers: Peers,
        dataset: object,
        first_items: Callable[[], _Passes],
        marks: Callable[[], _Passes],
        settle: Callable[[], None],
        workers_read_alike: Callable[[int], bool],
        held: str,
    ) -> None:
        self._rank, self._name = peers.rank, type(dataset).__name__
        self._began = f"Iterating the loader that was patched as number {peers.number}"
        self._remedy = order_remedy(dataset) or _SEED
        self._first_items, self._marks, self._settle = first_items, marks, settle
        self._workers_read_alike, self._held = workers_read_alike, held
        self._first_mailbox: Mailbox[tuple[str, _Passes]] = Mailbox(peers, "orders")
        self._marks_mailbox: Mailbox[_Passes] = Mailbox(peers, "marks")
        self._open = set(peers.others)  # whose first items may still show something
        self._alike: dict[int, dict[str, list[AlikeMarks]]] = {}  # by rank, then by what the ranks call the pass
        self._has_warned = False

    def compare(self, at_end: bool = True) -> None:
        """Leave what was marked, and compare it with what the others have left by now.

        Args:
            at_end: Whether a pass has come to its end. Else a few others are read, in turn: marks are long, and a rank
                that differs from one of the others mostly differs from all.

        Warns:
            StreamOrderWarning: Once, if the items do not show whether the orders differ.

        Raises:
            RankMismatchError: The ranks, or the workers of this one, read in different orders, or other items, or not
                equally many.
        """
        most = None if at_end else _AT_ONCE
        if self._open:
            self._compare_first_items(most)
        self._compare_marks(most)

    def _compare_first_items(self, most: int | None) -> None:
        mine = self._first_items()
        for number, parts in enumerate(mine.values(), 1):
            if len(parts) > 1 and self._workers_read_alike(number):
                first, *others = parts
                found = compare_parts([first] * len(others), others)
                self._judge(found, "the stream", "worker 0", f"worker {found.part + 1}, both of rank {self._rank}")
        for rank, (held, theirs) in self._first_mailbox.post_and_read((self._held, mine), most).items():
            for name in mine.keys() & theirs.keys():
                found = compare_parts(mine[name], theirs[name])
                both = mine[name][found.part], theirs[name][found.part]
                has_enough = found.is_final or min(part.count for part in both) >= _ENOUGH
                if found.verdict is Verdict.UNKNOWN and has_enough:  # no items in common, as far as they show
                    self._require_unsharded(*both, rank, is_held=held == self._held)
                self._judge(found, f"part {found.part}", f"rank {self._rank}", ranks_text([rank]))
                if found.is_final:
                    self._open.discard(rank)
                    self._first_mailbox.drop(rank)
        if not self._open:
            self._settle()

    def _compare_marks(self, most: int | None) -> None:
        mine = self._marks()
        for rank, theirs in self._marks_mailbox.post_and_read(mine, most).items():
            known = self._alike.setdefault(rank, {})
            for name, parts in mine.items():
                other_passes = [before for other, before in known.items() if other != name]
                best = max(other_passes, key=lambda of_parts: sum(map(max, of_parts)), default=())
                found = stream_mismatch(parts, theirs.get(name, ()), best)
                if found is not None:
                    raise self._other_stream(name, rank, found)
                if any(part.packed for part in parts):  # of earlier passes only the ends are left
                    known[name] = alike_marks(parts, theirs.get(name, ()))
            self._alike[rank] = {name: before for name, before in known.items() if name in mine}

    def _require_unsharded(self, mine: PartMarks, theirs: PartMarks, rank: int, *, is_held: bool) -> None:
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
            f"{self._began}: {self._name} is sharded already. {why}, "
            f"and its first items differ between rank {self._rank} and {ranks_text([rank])}. Each rank would take a "
            f"shard of its own part only, and the rest would be lost. Let {self._name} give every rank everything; or "
            "say is_ddp_aware = True in its class, and its loader is returned unchanged. If ranks differ for another "
            "reason, such as a seed, let items have a string or a whole number that names them."
        )

    def _judge(self, found: OrderComparison, where: str, mine: str, theirs: str) -> None:
        seen = f"{self._began}: item {found.item} of {where} of {self._name} differs between {mine} and {theirs}"
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

    def _other_stream(self, name: str, rank: int, found: StreamMismatch) -> RankMismatchError:
        where = f"part {found.part} of {self._name} in {name.rpartition(' (')[0]}"
        what, remedy = (
            (f"{where} ends after {found.count} items on one of them, and has more on the other", ONE_STREAM)
            if found.is_end
            else (f"{where} differs within the first {found.count} items", f"{ONE_STREAM} {self._remedy}.")
        )
        return RankMismatchError(
            f"{self._began}: rank {self._rank} and {ranks_text([rank])} read different streams. "
            f"{what[0].upper()}{what[1:]}. Each rank keeps its shard of what should be one stream, so samples would be "
            f"lost and steps would not be equal. {remedy}"
        )
