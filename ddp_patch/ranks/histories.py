"""The passes that a rank made over its loader, and how to find contradictions between two ranks. Without a store."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import starmap
from typing import Any, NamedTuple, TypeAlias

from ddp_patch.loaders.contents import Row
from ddp_patch.orders.fingerprint import PrefixHash

__all__ = [
    "History",
    "NotesReport",
    "PassEntry",
    "PassMismatch",
    "PassProgress",
    "PassRecord",
    "PassState",
    "ReadAhead",
    "pass_mismatch",
]

# Returns how many items a long peek takes at most: who takes no more may still be about to choose an epoch.
LongPeek: TypeAlias = Callable[[], int]

# A history holds so many passes, as ``PassMonitor`` keeps notes of: those over the latest epochs.
_MOST_PASSES = 16
# Of so many attempts it says how far they came.
_MOST_ATTEMPTS = 4


class PassState(IntEnum):
    """What is known of a pass."""

    OPEN = 0  # it may continue
    ABANDONED = 1  # broken off before its end
    ENDED = 2  # it came to its end
    UNKNOWN = 3  # how far it came is not known


_STATES = tuple(PassState)


class PassProgress(NamedTuple):
    """How many items of its share a pass took, and what is known of it."""

    items: int
    state: PassState


class PassEntry(NamedTuple):
    """A pass, as other ranks are told of it.

    Attributes:
        epoch: The epoch that it is over.
        items: How many items of its share it took.
        state: What is known of it.
        chosen: Whether ``set_epoch`` chose its epoch.
        attempt: How often the rank had started again before, at an epoch that it had already trained.
        is_withdrawn: Whether another epoch was chosen since: it counts no longer against ranks that chose that, too.
    """

    epoch: int
    items: int
    state: PassState
    chosen: bool
    attempt: int
    is_withdrawn: bool = False

    def exceeds_peek(self, peek_items: int) -> bool:
        """Return whether this is more than a peek that takes so many items."""
        return self.items > peek_items and not self.is_withdrawn

    def exceeds_long_peek(self, long_peek: int) -> bool:
        """Return whether this is surely no long look: it is whole, or takes more than so many items."""
        return self.items > long_peek or (self.items > 0 and self.state is PassState.ENDED)

    def withdrawn(self) -> "PassEntry":
        """Return it as it counts once another epoch was chosen."""
        return self._replace(items=0) if self.state is PassState.UNKNOWN else self._replace(is_withdrawn=True)


class NotesReport(NamedTuple):
    """What a rank reports of its notes of a pass; see ``PassNotes``.

    Attributes:
        epoch: The epoch.
        begins_at: Where in the epoch it begins.
        restarts: How often the rank had gone back to an epoch that was whole.
        is_more: Whether it is more than a peek. Nobody compares that: the epoch may begin again.
        first: The number of the first mark that is left.
        prefix_hashes: After how many items the fingerprint of what was drawn had which value.
        rows: What each look at the dataset after the first showed for the first time, by its name.
    """

    epoch: int
    begins_at: str
    restarts: int
    is_more: bool
    first: int
    prefix_hashes: Sequence[PrefixHash]
    rows: Sequence[Mapping[str, Row]]


class PassRecord(NamedTuple):
    """What a rank reports to the others about its passes.

    Attributes:
        passes: Its latest passes, by epoch, in order.
        since: The epoch from which on all of them are here.
        share: Which share it takes, if the user gave it by rank= and num_replicas=.
        notes: What it noted of its latest passes.
        past_attempts: Its latest attempts that are over, with the last epoch of which each took more than a long peek.
    """

    passes: Mapping[int, PassEntry] = {}
    since: int = 0
    share: int | None = None
    notes: Sequence[NotesReport] = ()
    past_attempts: Sequence[tuple[int, int]] = ()

    def plain(self) -> tuple[object, ...]:
        """Return it as plain values, but for what few datasets show: objects take several times as long to pickle."""
        passes = [(*entry[:2], int(entry.state), *entry[3:]) for entry in self.passes.values()]
        return passes, self.since, self.share, [tuple(noted) for noted in self.notes], self.past_attempts

    @classmethod
    def of(cls, plain: Any) -> "PassRecord":
        """Return what ``plain`` made plain values of."""
        passes, since, share, notes, past_attempts = plain
        made = (PassEntry(epoch, items, _STATES[state], *rest) for epoch, items, state, *rest in passes)
        return cls(
            {entry.epoch: entry for entry in made}, since, share, tuple(starmap(NotesReport, notes)), past_attempts
        )

    def top(self, peek_items: int, attempt: int | None = None) -> int:
        """Return the latest epoch of which more than a peek was taken, in one attempt or in any; -1 if none."""
        made = (entry for entry in self.passes.values() if attempt in {None, entry.attempt})
        return max((entry.epoch for entry in made if entry.exceeds_peek(peek_items)), default=-1)

    def top_beyond_long_peek(self, long_peek: int) -> int:
        """Return the latest epoch of which more than a long peek was taken; -1 if none."""
        return max((epoch for epoch, entry in self.passes.items() if entry.exceeds_long_peek(long_peek)), default=-1)

    def after(self, epoch: int) -> int:
        """Return the epoch of the first pass after one over ``epoch``."""
        return min(later for later in self.passes if later > epoch)

    def chosen_before(self, epoch: int) -> int:
        """Return the latest epoch that ``set_epoch`` chose, up to this one; -1 if there is none."""
        return max((entry.epoch for entry in self.passes.values() if entry.chosen and entry.epoch <= epoch), default=-1)

    def as_seen_by(self, other: "PassRecord") -> "PassRecord":
        """Return it as another rank sees it.

        Withdrawn passes count as abandoned for a rank that did not choose the following epoch. They count, too, where
        only one of both ranks completed the epoch: that one trained.
        """
        if not any(entry.is_withdrawn for entry in self.passes.values()):
            return self
        passes, choice = dict(self.passes), None
        for epoch in reversed(list(self.passes)):
            entry = self.passes[epoch]
            if entry.is_withdrawn:
                is_common = choice is None or other.has_chosen(choice)
                is_whole, theirs = entry.state is PassState.ENDED, other.passes.get(epoch)
                is_other = theirs is not None and theirs.is_withdrawn and (theirs.state is PassState.ENDED) != is_whole
                if is_common and not is_other:
                    seen = entry._replace(items=0, state=PassState.UNKNOWN)
                else:
                    seen = entry._replace(state=PassState.ENDED if is_common and is_whole else PassState.ABANDONED)
                passes[epoch] = seen._replace(is_withdrawn=False)
            choice = epoch if entry.chosen else choice
        return self._replace(passes=passes)

    def has_chosen(self, epoch: int) -> bool:
        """Return whether ``set_epoch`` chose an epoch, as far as that is known."""
        return epoch < self.since or (epoch in self.passes and self.passes[epoch].chosen)


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """How a loader takes the items of a share.

    Attributes:
        size: How many items a batch has.
        ahead: How many items its workers fetch before they are taken.
        drop_last: Whether items that fill no batch are left out.
        readers: How many workers may each read a part, of which one rank may get an item more than another.
    """

    size: int = 1
    ahead: int = 0
    drop_last: bool = False
    readers: int = 1

    def taken(self, asked: int, *, is_over: bool = False) -> int:
        """Return how many items were surely taken when this many were asked for; or also if the loop is over."""
        taken = asked if is_over else max(0, asked - self.ahead)
        return taken - taken % self.size if self.drop_last else taken


class _Pass:
    """A pass of this rank, which may continue."""

    def __init__(self, entry: PassEntry, progress: Callable[[], PassProgress]) -> None:
        self.epoch, self.chosen = entry.epoch, entry.chosen
        self._entry = entry
        self._progress: Callable[[], PassProgress] | None = progress
        self._is_doubtful = False
        self._at_next: int | None = None

    @property
    def entry(self) -> PassEntry:
        """What is known of it now."""
        if self._progress is None:
            return self._entry
        items, state = self._progress()
        return self._entry._replace(items=items, state=PassState.UNKNOWN if self._is_doubtful else state)

    def doubt(self) -> None:
        """Record that it is not known how far it came."""
        self._is_doubtful = True

    def settle(self, next_state: PassState | None) -> None:
        """Record that another pass begins now; keep no more than the numbers of one that is over.

        So is one whose iterator lives, but which stood still while the whole next pass was made.
        """
        entry = self.entry
        if entry.state is not PassState.OPEN:
            self._keep(entry)
        elif self._at_next is None:
            self._at_next = entry.items
        elif next_state is PassState.ENDED and entry.items == self._at_next:
            self._keep(entry._replace(state=PassState.ABANDONED))

    def withdraw(self) -> None:
        """Let it no longer count against ranks that choose the same epoch."""
        self._keep(self.entry.withdrawn())

    def _keep(self, entry: PassEntry) -> None:
        self._entry, self._progress = entry, None


class History:
    """The passes that this rank made over one loader.

    A pass over an epoch replaces what was there of that epoch and of later ones. After ``set_epoch`` or a resume,
    earlier passes no longer count as mismatches, unless another rank completed an epoch that this rank only partly
    read.

    Args:
        peek_items: How many items a mere peek takes at most: a batch.
    """

    def __init__(self, peek_items: int = 1) -> None:
        self._peek_items = peek_items
        self._past_attempts: list[tuple[int, int]] = []
        self._passes: list[_Pass] = []  # by epoch
        self._since = self._attempt = 0
        self._furthest = -1  # the latest epoch of this attempt of which more than a peek was taken
        self._is_chosen = False

    @property
    def attempt(self) -> int:
        """How often this rank has started again at an epoch that it had trained."""
        return self._attempt

    def set_peek_items(self, peek_items: int) -> None:
        """Set how many items a mere peek takes at most, before the first pass."""
        self._peek_items = peek_items

    def choose(self) -> None:
        """Record that the user chose the epoch that comes next."""
        self._is_chosen = True

    def begin(self, epoch: int, progress: Callable[[], PassProgress], long_peek: LongPeek) -> None:
        """Add a pass.

        Args:
            epoch: The epoch that it is over.
            progress: Tells how far it has come.
            long_peek: Returns how many items a peek takes at most that is still no attempt at an epoch that
                nobody chose.
        """
        chosen, self._is_chosen = self._is_chosen, False
        states = [before.entry.state for before in self._passes]
        for before, next_state in zip(self._passes, [*states[1:], None], strict=False):
            before.settle(next_state)
        self._go_back_to(epoch, long_peek)
        for before in reversed(self._passes) if chosen else ():
            if before.chosen:
                break
            before.withdraw()
        entry = PassEntry(epoch, 0, PassState.OPEN, chosen, self._attempt)
        self._passes.append(_Pass(entry, progress))
        if len(self._passes) > _MOST_PASSES:
            del self._passes[0]
            self._since = self._passes[0].epoch

    def doubt(self, epoch: int) -> None:
        """Record that it is not known how far the pass over an epoch came."""
        for known in self._passes:
            if known.epoch == epoch:
                known.doubt()

    def record(self, share: int | None = None, notes: Sequence[NotesReport] = ()) -> PassRecord:
        """Return this rank's history, to be compared, with what it noted of its latest passes."""
        passes = {known.epoch: known.entry for known in self._passes}
        return PassRecord(passes, self._since, share, notes, tuple(self._past_attempts))

    def _go_back_to(self, epoch: int, long_peek: LongPeek) -> None:
        """Drop the passes from an epoch on; if they were more than peeks, this is another attempt."""
        entries = [known.entry for known in self._passes if known.epoch > self._furthest]
        made = [entry for entry in entries if entry.exceeds_peek(self._peek_items)]
        # What nobody chose may have been a peek.
        most = long_peek() if any(not entry.chosen for entry in made) else self._peek_items
        trained = [entry.epoch for entry in made if entry.chosen or entry.exceeds_long_peek(most)]
        self._furthest = max(trained, default=self._furthest)
        if self._furthest >= epoch:
            self._past_attempts = [*self._past_attempts, (self._attempt, self._furthest)][-_MOST_ATTEMPTS:]
            self._attempt, self._furthest = self._attempt + 1, epoch - 1
        self._passes = [known for known in self._passes if known.epoch < epoch]
        self._since = min(self._since, epoch)


class PassMismatch(NamedTuple):
    """One rank left an epoch and continued to a later one; another took more of it.

    Attributes:
        epoch: The epoch.
        items: How many items the one took of it.
        next_epoch: The epoch that it continued to.
        is_mine: Whether it is this rank that left.
    """

    epoch: int
    items: int
    next_epoch: int
    is_mine: bool


def pass_mismatch(
    mine: PassRecord, theirs: PassRecord, peek_items: int, slack: int, long_peek: LongPeek
) -> PassMismatch | None:
    """Return where the passes of two ranks contradict each other; None if one may only be faster than the other.

    Args:
        mine: This rank's passes.
        theirs: Another rank's.
        peek_items: How many items a mere peek takes at most. It contradicts nothing, because ``set_epoch`` may still
            follow.
        slack: How many items more one rank's share may have.
        long_peek: Returns how many items a peek takes at most where the other rank has chosen an epoch, so that
            this one may be about to.
    """
    found = []
    mine, theirs = mine.as_seen_by(theirs), theirs.as_seen_by(mine)
    for is_mine, behind, further in ((True, mine, theirs), (False, theirs, mine)):
        for entry in further.passes.values():
            # Most passes went alike on both.
            if entry.items > peek_items and behind.passes.get(entry.epoch) != entry:
                less = _went_on(behind, further, entry, peek_items, slack, long_peek)
                less = less or _gone_back(behind, entry, long_peek)
                found += [] if less is None else [PassMismatch(*less, is_mine)]
    return min(found, default=None)


# Each returns the epoch of which a rank took less although it continued, with how much it took, and to where. Where
# only one of two ranks has chosen an epoch, the other may be about to: what it did without that no longer counts then,
# unless it was more than a long peek. tests/unit/test_histories.py has a table of cases, with what contradicts what.


def _went_on(
    behind: PassRecord, other: PassRecord, further: PassEntry, peek_items: int, slack: int, long_peek: LongPeek
) -> tuple[int, int, int] | None:
    """Return where a rank broke off or left out an epoch of which another took more."""
    epoch, own = further.epoch, behind.passes.get(further.epoch)
    if own is None:
        is_less, top = epoch >= behind.since, behind.top(peek_items, further.attempt)
    else:
        is_known = own.state is PassState.ABANDONED and further.state is not PassState.UNKNOWN
        is_less = is_known and own.attempt == further.attempt and further.items > own.items + slack
        top = behind.top(peek_items)
    if not is_less or epoch >= top:
        return None
    next_epoch, chosen = behind.after(epoch), other.chosen_before(epoch)
    goes_on = further.chosen or behind.chosen_before(next_epoch) == chosen or further.exceeds_long_peek(long_peek())
    has_left = own is None or behind.chosen_before(epoch) == chosen or epoch < behind.top_beyond_long_peek(long_peek())
    return (epoch, 0 if own is None else own.items, next_epoch) if goes_on and has_left else None


def _gone_back(behind: PassRecord, further: PassEntry, long_peek: LongPeek) -> tuple[int, int, int] | None:
    """Return where a rank started again before it came to an epoch of which another took more."""
    top = dict(behind.past_attempts).get(further.attempt)
    if top is None or further.epoch <= top or further.state is PassState.UNKNOWN:
        return None
    if not further.chosen and not further.exceeds_long_peek(long_peek()):
        return None
    again = min((entry.epoch for entry in behind.passes.values() if entry.attempt > further.attempt), default=top)
    return further.epoch, 0, again
