"""Compare the ranks' passes over a loader: always on, and without waiting."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import get_ident
from time import perf_counter
from typing import TypeAlias, cast
from weakref import WeakMethod

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.contents import Row, RowsSeen
from ddp_patch.orders.fingerprint import PassFingerprint
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.histories import (
    History,
    NotesReport,
    PassMismatch,
    PassProgress,
    PassRecord,
    PassState,
    ReadAhead,
    pass_mismatch,
)
from ddp_patch.ranks.mailbox import Mailbox, Peers, StepCounts
from ddp_patch.ranks.remedies import ONE_STREAM

__all__ = ["NotesMismatch", "PassMonitor", "PassNotes", "notes_mismatch"]


# The rows of a dataset are looked at when a pass begins, and after its first two batches: some are made by the first
# ``__getitem__``. Once more at its end shows what reading changes.
_LOOKS = 3

Rows: TypeAlias = Mapping[str, Row]


class PassNotes:
    """The notes of one pass of this rank.

    Args:
        sampler: The class of the sampler.
        epoch: The epoch.
        begins_at: Where in the epoch it begins.
        skip: How many items of the share were taken before.
        fingerprint: That of what is drawn.
        rows: What looks at the dataset; None if nothing does.
        progress: Tells how far the pass has come.
    """

    def __init__(
        self,
        sampler: str,
        epoch: int,
        begins_at: str,
        skip: int,
        fingerprint: PassFingerprint,
        rows: RowsSeen | None,
        progress: Callable[[], PassProgress],
    ) -> None:
        self.sampler: str = sampler
        self.epoch: int = epoch
        self._begins_at, self._skip = begins_at, skip
        self._fingerprint, self._dataset, self._progress = fingerprint, rows, progress
        self._rows: list[Rows] = []  # what is new at each look after the first
        self._seen: Rows | None = None  # the latest look
        self._is_seen_whole = False
        self.restarts: int = 0

    def begin(self, restarts: int) -> None:
        """Record how often this rank had gone back to an epoch that was whole when the pass began."""
        self.restarts = restarts

    @property
    def is_complete(self) -> bool:
        """Whether the pass came to its end."""
        return self._progress().state is PassState.ENDED

    def settle(self) -> None:
        """Keep no more of a pass that is over than what was noted."""
        progress = self._progress()
        if progress.state is not PassState.OPEN:
            self._progress = partial(PassProgress, *progress)

    def observe_dataset(self, peek_items: int) -> None:
        """Look at the dataset, where that is due in the latest pass: the user may change it before the next.

        Args:
            peek_items: How many items a mere peek takes at most.
        """
        items, state = self._progress()
        looks = 0 if self._seen is None else 1 + len(self._rows)
        is_over = state is PassState.ENDED
        is_due = not self._is_seen_whole if is_over else looks < _LOOKS and items - self._skip >= peek_items * looks
        if self._dataset is None or not is_due:
            return
        before, self._seen, self._is_seen_whole = self._seen, self._dataset.now(), is_over
        if before is not None:
            known = {name for rows in self._rows for name in rows}
            steady = self._dataset.steady(before, self._seen)
            self._rows.append({name: row for name, row in steady.items() if name not in known})

    def report(self, peek_items: int, *, is_old: bool = False) -> NotesReport:
        """Return what to tell the other ranks of them.

        Args:
            peek_items: How many items a mere peek takes at most. Nobody compares it: the epoch may begin again.
            is_old: Whether to leave only the last mark: for ranks that are some epochs behind.
        """
        items, state = self._progress()
        is_more = items - self._skip > peek_items or state is PassState.ENDED
        marks = self._fingerprint.prefix_hashes
        first = max(0, len(marks) - 1) if is_old else 0
        return NotesReport(self.epoch, self._begins_at, self.restarts, is_more, first, marks[first:], list(self._rows))


@dataclass(frozen=True, slots=True, order=True)
class NotesMismatch:
    """Where two ranks' passes over one epoch differ.

    Attributes:
        epoch: The epoch.
        count: The orders differ within so many items; None if the datasets do.
        attributes: The attributes of the datasets that differ.
    """

    epoch: int
    count: int | None = None
    attributes: tuple[str, ...] = ()


def notes_mismatch(mine: Sequence[NotesReport], theirs: Sequence[NotesReport]) -> NotesMismatch | None:
    """Return where the passes of two ranks differ, as far as both have come; None if they do not.

    Args:
        mine: This rank's notes.
        theirs: Another rank's.
    """
    known = {notes[:3]: notes for notes in theirs if notes.is_more}
    for ours in mine:
        other = known.get(ours[:3])
        if not ours.is_more or other is None:
            continue
        looks = min(len(ours.rows), len(other.rows))
        seen, theirs_seen = (dict(chain(*(look.items() for look in rows[:looks]))) for rows in (ours.rows, other.rows))
        if names := _differing(seen, theirs_seen):
            return NotesMismatch(ours.epoch, attributes=names)
        first = max(ours.first, other.first)  # as far as both have come
        both = (notes.prefix_hashes[first - notes.first :] for notes in (ours, other))
        for prefix_hash, their_prefix_hash in zip(*both, strict=False):
            if prefix_hash != their_prefix_hash:
                return NotesMismatch(ours.epoch, min(prefix_hash[0], their_prefix_hash[0]))
    return None


def _differing(mine: Rows, theirs: Rows) -> tuple[str, ...]:
    """Return the attributes that show that two datasets have other samples at the same indices.

    Ranks may keep other things than samples in them: losses, counts, seeds. So one that identifies the samples, and is
    the same on both, excuses the others, but for an order in which samples are read, and for names that were the same
    at the patch: somebody has changed these since, in another way on each rank.
    """
    both = [name for name in mine if name in theirs]
    differing = [name for name in both if mine[name].fingerprint != theirs[name].fingerprint]
    changed = [name for name in differing if mine[name].at_first and mine[name].at_first == theirs[name].at_first]
    if any(mine[name].identifies for name in both if name not in differing):
        differing = [name for name in differing if name in changed or (mine[name].is_order and theirs[name].is_order)]
    # What is not one for each sample may be anything, if it was never the same.
    return tuple(name for name in differing if name in changed or (mine[name].is_whole and theirs[name].is_whole))


# The first comparisons, this many, are made whenever they are due, to find early mistakes at once. All later ones may
# take one part in this many of the time: short epochs would have several each.
_FREE = 100
_TIMES_THEIR_COST = 200
# At a pass's end one part in this many: in the last epoch nobody would tell later.
_TIMES_AT_AN_END = 20
# A look at a stream of unknown length may take so many batches.
_LONG_PEEK = 32
# Notes of this many passes are left, for ranks that are epochs behind; of these many in full.
_NOTED, _IN_FULL = 16, 2


class PassMonitor:
    """Compares this rank's passes over one loader with the other ranks'.

    Args:
        peers: Who they are; None if there are none.
        name: What errors call the loader.
        shares_may_differ: Whether one rank's share may have an item more than another's.

    Attributes:
        read_ahead: How the loader takes items.
    """

    def __init__(self, peers: Peers | None = None, name: str = "", *, shares_may_differ: bool = False) -> None:
        self._peers = peers
        self._mailbox: Mailbox[tuple[object, ...]] | None = None if peers is None else Mailbox(peers, "passes")
        self._steps: StepCounts | None = None  # for streams whose end nobody knows before
        self._history = History()
        self._noted: list[PassNotes] = []
        self._restarts = 0
        self._furthest_whole = -1  # the latest epoch that was gone through to its end since the last restart
        self._thread = get_ident()
        self._shares_may_differ = shares_may_differ
        self._compare_order: Callable[[bool], None] = lambda at_end: None
        self._epochs_differ = True
        self._name, self._units = name, ("item", "items")
        self.read_ahead: ReadAhead = ReadAhead()
        self._smallest_share: Callable[[], Callable[[], int | None] | None] = lambda: None
        self._made, self._cost_s, self._ended_s = 0, 0.0, 0.0
        self._exchange()  # so that nobody has to look for this rank's record later

    def set_read_ahead(self, name: str, read_ahead: ReadAhead, smallest_share: Callable[[], int | None]) -> None:
        """Set what errors call the loader and how it takes batches, before its first pass.

        Args:
            name: What errors call it.
            read_ahead: How it takes batches.
            smallest_share: A method that returns how many items that has in an epoch; None if that is not known.
        """
        self._name, self._units = name, ("batch", "batches")
        self.read_ahead = read_ahead
        self._smallest_share = WeakMethod(smallest_share)  # the loader goes when nobody refers to it but this
        self._history.set_peek_items(read_ahead.size)

    def ignore_epochs(self) -> None:
        """Let passes over different epochs count as alike: all have one order, so no sample is lost by them."""
        self._epochs_differ = False

    def also_compare(self, compare_order: Callable[[bool], None]) -> None:
        """Compare, whenever passes are, the orders in which readers read: that is for them to say.

        Args:
            compare_order: Compares them; called with whether a pass has come to its end.
        """
        self._compare_order = compare_order

    def __reduce__(self) -> tuple[type["PassMonitor"], tuple[()]]:
        return PassMonitor, ()  # a copy makes passes of its own, which other ranks need not know about

    @property
    def is_on(self) -> bool:
        """Whether there is anybody to compare with."""
        return self._mailbox is not None

    def choose(self) -> None:
        """Record that the user chose the epoch that comes next."""
        self._history.choose()

    def begin(self, epoch: int, progress: Callable[[], PassProgress], notes: PassNotes | None = None) -> None:
        """Record that a pass begins, and compare.

        Args:
            epoch: The epoch that it is over.
            progress: Tells how far it has come.
            notes: What is noted of it, if anything is.

        Raises:
            RankMismatchError: As ``compare``.
        """
        if self.is_on:
            if self._epochs_differ:
                self._history.begin(epoch, progress, self._long_peek)
            if notes is not None:
                self._note(notes)
            self.compare(epoch)

    def _long_peek(self) -> int:
        """Return how many items a long peek takes at most: half of a share, or some batches if its size is unknown."""
        share = self._smallest_share()
        items = None if share is None else share()
        return self.read_ahead.size * _LONG_PEEK if items is None else max(self.read_ahead.size, items // 2)

    def _note(self, notes: PassNotes) -> None:
        """Keep the notes of a new pass. Who goes back to an epoch that was whole starts again."""
        self._furthest_whole = max(
            [self._furthest_whole, *(before.epoch for before in self._noted if before.is_complete)]
        )
        if notes.epoch <= self._furthest_whole:
            self._restarts, self._furthest_whole = self._restarts + 1, notes.epoch - 1
        notes.begin(self._restarts)
        # A look at an epoch that begins anew, or at a later one, is no pass since the restart.
        kept = [before for before in self._noted if before.restarts < notes.restarts or before.epoch < notes.epoch]
        for before in kept:
            before.settle()
        self._noted = [*kept, notes][-_NOTED:]

    def compare(self, epoch: int, *, at_end: bool = False) -> None:
        """Report to the others how far this rank has come, in this pass and before, and compare with them.

        Args:
            epoch: The epoch of the pass.
            at_end: Whether the pass has come to its end.

        Raises:
            RankMismatchError: A rank left an epoch of which another took more, and continued with a later one; or too
                many ranks take the same share; or they drew or read in different orders, or from different rows.
        """
        times = _TIMES_AT_AN_END if at_end else _TIMES_THEIR_COST
        if not self.is_on or (self._made >= _FREE and perf_counter() - self._ended_s < times * self._cost_s):
            return
        if get_ident() != self._thread:
            # Something reads ahead in a thread of its own, by as much as there was time for.
            self._history.doubt(epoch)
        began_s = perf_counter()
        self._exchange()
        self._compare_order(at_end)
        self._ended_s = perf_counter()
        self._made, self._cost_s = self._made + 1, self._ended_s - began_s

    def steps(self, epoch: int, begins_at: str) -> StepCounts:
        """Return where to leave how many batches this rank is given of a pass whose end nobody knows before."""
        if self._steps is None:
            slack = self.read_ahead.readers if self._shares_may_differ else 0
            self._steps = StepCounts(cast(Peers, self._peers), slack)
        self._steps.begin(epoch, f"{begins_at} ({self._history.attempt})")
        return self._steps

    def compare_ends(self, epoch: int, begins_at: str, batches: int) -> None:
        """Compare how many batches such a pass had; wait a moment for ranks that may be given more.

        Raises:
            RankMismatchError: Another rank was given more.
        """
        if found := self.steps(epoch, begins_at).ranks_given_more(batches):
            peers = cast(Peers, self._peers)
            ranks, most = ranks_text(sorted(found)), max(found.values())
            raise RankMismatchError(
                f"{self._began(peers)}: rank {peers.rank} and {ranks} read different streams. Epoch {epoch} ended "
                f"after {self._counted(batches)} on rank {peers.rank}, and {ranks} had {most} by then. Each rank keeps "
                "its shard of what should be one stream, so samples would be lost and steps would not be equal. "
                f"{ONE_STREAM}"
            )

    def _exchange(self) -> None:
        """Leave this rank's record, and compare it with what the others have left by now."""
        if self._peers is None or self._mailbox is None:
            return
        size, old = self.read_ahead.size, len(self._noted) - _IN_FULL
        if self._noted:
            self._noted[-1].observe_dataset(size)
        notes = [noted.report(size, is_old=number < old) for number, noted in enumerate(self._noted)]
        mine = self._history.record(None if self._peers.share is None else self._peers.share[0], notes)
        others = {rank: PassRecord.of(left) for rank, left in self._mailbox.post_and_read(mine.plain()).items()}
        self._peers.require_fair_shares(others)
        differing = {rank: notes_mismatch(notes, record.notes) for rank, record in others.items()}
        if other_orders := {rank: where for rank, where in differing.items() if where is not None}:
            raise self._other_order(self._peers, other_orders)
        slack = size * self.read_ahead.readers if self._shares_may_differ else 0
        compared = {rank: pass_mismatch(mine, their, size, slack, self._long_peek) for rank, their in others.items()}
        if other_passes := {rank: where for rank, where in compared.items() if where is not None}:
            raise self._other_passes(self._peers, other_passes)

    def _began(self, peers: Peers) -> str:
        return f"Iterating the {self._name} that was patched as number {peers.number}"

    def _counted(self, batches: int) -> str:
        return f"{batches} {self._units[batches != 1]}"

    def _other_order(self, peers: Peers, found: Mapping[int, NotesMismatch]) -> RankMismatchError:
        first = min(found.values(), key=lambda where: where.epoch)
        ranks = ranks_text([rank for rank, where in found.items() if where == first])
        began = self._began(peers)
        if first.count is None:
            return RankMismatchError(
                f"{began}: in epoch {first.epoch}, the datasets of rank {peers.rank} and {ranks} have different "
                f"samples at the same indices: they differ in {', '.join(first.attributes)}. Each rank takes its shard "
                "of other samples, so some would be lost. Change the data alike on every rank: shuffle rows with a "
                "generator that is seeded by the epoch, list files in sorted order, and add the same rows. If only "
                "the content differs, order='seeded' does not compare it."
            )
        return RankMismatchError(
            f"{began}: in epoch {first.epoch}, {self._noted[-1].sampler} gave rank {peers.rank} and {ranks} different "
            f"orders: they differ within the first {first.count} items. Each rank keeps its shard of what should be "
            "one order, so samples would be lost. Make the order the same on every rank: if the sampler learns from "
            "its rank's losses, let every rank learn from all ranks' (see \"Samplers that learn\" in "
            "docs/samplers.md); if it draws from the system's entropy, or another thread draws meanwhile, give it a "
            "generator of its own that is seeded alike; or patch with order='leader', and rank 0 draws for all."
        )

    def _other_passes(self, peers: Peers, found: Mapping[int, PassMismatch]) -> RankMismatchError:
        first = min(found.values())
        ranks = sorted(rank for rank, where in found.items() if where == first)
        behind, further = ([peers.rank], ranks) if first.is_mine else (ranks, [peers.rank])
        took = self._counted(-(-first.items // self.read_ahead.size))
        return RankMismatchError(
            f"{self._began(peers)}: the ranks make different passes, so samples would be lost. "
            f"{ranks_text(behind).capitalize()} took {took} of epoch {first.epoch} and then began epoch "
            f"{first.next_epoch}; {ranks_text(further)} took more of epoch {first.epoch}. Only one rank has iterated "
            "the loader, as 'if rank == 0: next(iter(loader))' does, or has set another epoch. Look at a batch on "
            "every rank, or iterate the unpatched loader, or call loader.set_epoch(N) with the same N on every rank "
            "before the epoch."
        )
