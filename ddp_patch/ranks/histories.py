"""The passes that a rank made over its loader, and how to find contradictions between two ranks. Without a store."""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

__all__ = ["Contradiction", "History", "PassProgress", "PassRecord", "PassState", "ReadAhead", "Run", "contradiction"]

# A record holds at most this many runs, and a history at most this many passes that may still continue.
_MOST_RUNS = 32
# Of so many attempts it says how far they came.
_MOST_LEFT = 4


class PassState(IntEnum):
    """What is known of a pass."""

    OPEN = 0  # it may continue
    LEFT = 1  # broken off before its end
    ENDED = 2  # it came to its end
    UNKNOWN = 3  # how far it came is not known
    WITHDRAWN = 4  # an epoch was chosen since: it counts no longer against ranks that chose it too
    WHOLE = 5  # withdrawn, but it had come to its end, so it was no look


_WITHDRAWN = frozenset({PassState.WITHDRAWN, PassState.WHOLE})


class PassProgress(NamedTuple):
    """How many items of its share a pass took, and what is known of it."""

    items: int
    state: PassState


class Run(NamedTuple):
    """Passes over consecutive epochs that went alike: a training of a thousand epochs is one run.

    Attributes:
        epoch: The first pass's epoch.
        passes: How many passes there are.
        items: How many items each took.
        state: What is known of each.
        chosen: Whether ``set_epoch`` chose each pass's epoch.
        attempt: How often the rank had started again before, at an epoch that it had already trained.
    """

    epoch: int
    passes: int
    items: int
    state: PassState
    chosen: bool
    attempt: int

    @property
    def last(self) -> int:
        """The last pass's epoch."""
        return self.epoch + self.passes - 1

    def is_more_than(self, look: int) -> bool:
        """Return whether these are more than looks that take so many items."""
        return self.items > look and self.state not in _WITHDRAWN

    def is_longer_than(self, long_look: int) -> bool:
        """Return whether these are surely no long looks: they are whole, or take more than so many items."""
        return self.items > long_look or (self.items > 0 and self.state is PassState.ENDED)

    def followed_by(self, run: "Run") -> bool:
        """Return whether another run continues where this one ends, alike in all else."""
        return run.epoch == self.last + 1 and run[2:] == self[2:]


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What a rank reports to the others about its passes.

    Attributes:
        runs: Its passes, by epoch.
        since: The epoch from which on all of them are here.
        share: Which share it takes, if the user gave it by rank= and num_replicas=.
        notes: What it noted of its latest passes, encoded; see ``PassNotes``.
        left: Its latest attempts that are over, with the last epoch of which each took more than a long look.
    """

    runs: Sequence[Run] = ()
    since: int = 0
    share: int | None = None
    notes: Sequence[Sequence[Any]] = ()
    left: Sequence[tuple[int, int]] = ()

    def encoded(self) -> str:
        """Return it as a short text."""
        return json.dumps([self.since, self.share, self.runs, self.notes, self.left], separators=(",", ":"))

    @classmethod
    def decoded(cls, text: str | bytes) -> "PassRecord":
        """Return what ``encoded`` made a text of."""
        since, share, runs, notes, left = json.loads(text)
        decoded = [Run(*run)._replace(state=PassState(run[3])) for run in runs]
        return cls(decoded, since, share, notes or (), tuple((attempt, top) for attempt, top in left))

    def top(self, look: int, attempt: int | None = None) -> int:
        """Return the latest epoch of which more than a look was taken, in one attempt or in any; -1 if none."""
        tops = (run.last for run in self.runs if run.is_more_than(look) and attempt in {None, run.attempt})
        return max(tops, default=-1)

    def top_of_long(self, long_look: int) -> int:
        """Return the latest epoch of which more than a long look was taken; -1 if none."""
        return max((run.last for run in self.runs if run.is_longer_than(long_look)), default=-1)

    def after(self, epoch: int) -> int:
        """Return the epoch of the first pass after one over ``epoch``."""
        return min(max(run.epoch, epoch + 1) for run in self.runs if run.last > epoch)

    def chosen_before(self, epoch: int) -> int:
        """Return the latest epoch that ``set_epoch`` chose, up to this one; -1 if there is none."""
        return max((min(run.last, epoch) for run in self.runs if run.chosen and run.epoch <= epoch), default=-1)

    def seen_by(self, other: "PassRecord") -> "PassRecord":
        """Return it with passes that were withdrawn as left, if another rank did not choose what came after them.

        They count, too, where one rank went through the epoch and the other through a part of it: the one trained.
        """
        runs: list[Run] = []
        choice = None
        for run in reversed(self.runs):
            if run.state in _WITHDRAWN:
                is_common = choice is None or other.has_chosen(choice)
                counts = not is_common or other.withdrew(run.last, _WITHDRAWN - {run.state})
                state = PassState.ENDED if is_common and run.state is PassState.WHOLE else PassState.LEFT
                run = run._replace(state=state) if counts else run._replace(items=0, state=PassState.UNKNOWN)
            choice = run.epoch if run.chosen else choice
            runs.append(run)
        return replace(self, runs=runs[::-1])

    def has_chosen(self, epoch: int) -> bool:
        """Return whether ``set_epoch`` chose an epoch, as far as that is known."""
        return epoch < self.since or any(run.chosen and run.epoch <= epoch <= run.last for run in self.runs)

    def withdrew(self, epoch: int, states: Collection[PassState]) -> bool:
        """Return whether a pass over an epoch was withdrawn, in one of these states."""
        return any(run.state in states and run.epoch <= epoch <= run.last for run in self.runs)

    def first_lacking(self, epochs: Run) -> int:
        """Return the first epoch of a run that has no pass here; one past its last if all have."""
        epoch = max(epochs.epoch, self.since)
        for run in self.runs:
            if run.epoch <= epoch <= run.last:
                epoch = run.last + 1
        return min(epoch, epochs.last + 1)


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
    """A pass that may still continue."""

    def __init__(self, epoch: int, progress: Callable[[], PassProgress], chosen: bool, attempt: int) -> None:
        self.epoch, self.chosen, self.attempt = epoch, chosen, attempt
        self.is_doubtful = False
        self._progress: Callable[[], PassProgress] | PassProgress = progress
        self._at_next: int | None = None

    @property
    def progress(self) -> PassProgress:
        """How far it has come."""
        told = self._progress() if callable(self._progress) else self._progress
        return told._replace(state=PassState.UNKNOWN) if self.is_doubtful else told

    @property
    def run(self) -> Run:
        """The pass as a run of one."""
        return Run(self.epoch, 1, *self.progress, self.chosen, self.attempt)

    @property
    def is_open(self) -> bool:
        """Whether it may continue."""
        return self.progress.state is PassState.OPEN

    def settle(self, next_state: PassState | None) -> None:
        """Record that another pass begins now; keep no more than the numbers of one that is over.

        So is one whose iterator lives, but which stood still while the whole next pass was made.
        """
        told = self.progress
        if told.state is not PassState.OPEN:
            self._progress = told
        elif self._at_next is None:
            self._at_next = told.items
        elif next_state is PassState.ENDED and told.items == self._at_next:
            self._progress = told._replace(state=PassState.LEFT)

    def withdraw(self) -> None:
        """Let it no longer count against ranks that choose the same epoch."""
        self._progress = _withdrawn(self.progress)


class History:
    """The passes that this rank made over one loader.

    A pass over an epoch replaces what was there of that epoch and of later ones. What the rank did of its own accord
    before it chose an epoch, by ``set_epoch`` or by resuming, no longer counts: the choice sets right what it skipped;
    but for a part of an epoch through which another rank went.

    Args:
        look: How many items a mere look takes at most: a batch.
    """

    def __init__(self, look: int = 1) -> None:
        self.look: int = look
        self._left: list[tuple[int, int]] = []
        self._settled: list[Run] = []
        self._open: list[_Pass] = []
        self._since = self._attempt = 0
        self._furthest = -1  # the latest epoch of this attempt of which more than a look was taken
        self._is_chosen = False

    @property
    def attempt(self) -> int:
        """How often this rank has started again at an epoch that it had trained."""
        return self._attempt

    def choose(self) -> None:
        """Record that the user chose the epoch that comes next."""
        self._is_chosen = True

    def begin(
        self, epoch: int, progress: Callable[[], PassProgress], long_look: Callable[[], int] | None = None
    ) -> None:
        """Add a pass.

        Args:
            epoch: The epoch that it is over.
            progress: Tells how far it has come.
            long_look: Returns how many items a look takes at most that is still no attempt at an epoch that nobody
                chose. Default: as many as a look.
        """
        chosen, self._is_chosen = self._is_chosen, False
        self._settle()
        self._go_back_to(epoch, long_look)
        if chosen:
            self._withdraw()
        self._open.append(_Pass(epoch, progress, chosen, self._attempt))

    def doubt(self, epoch: int) -> None:
        """Record that it is not known how far the pass over an epoch came."""
        for one in self._open:
            one.is_doubtful |= one.epoch == epoch

    def record(self, share: int | None = None, notes: Sequence[Sequence[Any]] = ()) -> PassRecord:
        """Return this rank's history, to be compared, with what it noted of its latest passes."""
        runs = _joined([*self._settled, *(one.run for one in self._open)])
        return PassRecord(runs, self._since, share, notes, tuple(self._left))

    def _settle(self) -> None:
        states = [one.progress.state for one in self._open]
        for one, next_state in zip(self._open, [*states[1:], None], strict=False):
            one.settle(next_state)
        while self._open and (not self._open[0].is_open or len(self._open) > _MOST_RUNS):
            one = self._open.pop(0)
            one.is_doubtful |= one.is_open
            self._settled.append(one.run)
        self._settled = _joined(self._settled)
        if len(self._settled) > _MOST_RUNS:
            del self._settled[:-_MOST_RUNS]
            self._since = self._settled[0].epoch

    def _go_back_to(self, epoch: int, long_look: Callable[[], int] | None) -> None:
        """Drop the passes from an epoch on; if they were more than looks, this is another attempt."""
        made = [run for run in self.record().runs if run.is_more_than(self.look) and run.last > self._furthest]
        # What nobody chose may have been a look.
        most = long_look() if long_look and any(not run.chosen for run in made) else self.look
        self._furthest = max(
            (run.last for run in made if run.chosen or run.is_longer_than(most)), default=self._furthest
        )
        if self._furthest >= epoch:
            self._left = [*self._left, (self._attempt, self._furthest)][-_MOST_LEFT:]
            self._attempt, self._furthest = self._attempt + 1, epoch - 1
        kept = [run._replace(passes=min(run.passes, epoch - run.epoch)) for run in self._settled]
        self._settled = [run for run in kept if run.passes > 0]
        self._open = [one for one in self._open if one.epoch < epoch]
        self._since = min(self._since, epoch)

    def _withdraw(self) -> None:
        """Let the passes no longer count that were made since an epoch was chosen for the last time."""
        for one in reversed(self._open):
            if one.chosen:
                return
            one.withdraw()
        first = max((place for place, run in enumerate(self._settled, 1) if run.chosen), default=0)
        self._settled[first:] = [run._replace(**_withdrawn(run)._asdict()) for run in self._settled[first:]]


def _withdrawn(progress: PassProgress | Run) -> PassProgress:
    if progress.state is PassState.UNKNOWN:
        return PassProgress(0, PassState.UNKNOWN)
    return PassProgress(
        progress.items, PassState.WHOLE if progress.state in {PassState.ENDED, PassState.WHOLE} else PassState.WITHDRAWN
    )


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Join runs that follow each other."""
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].followed_by(run):
            joined[-1] = joined[-1]._replace(passes=joined[-1].passes + run.passes)
        else:
            joined.append(run)
    return joined


class Contradiction(NamedTuple):
    """One rank left an epoch and continued to a later one; another took more of it.

    Attributes:
        epoch: The epoch.
        items: How many items the one took of it.
        following: The epoch that it continued to.
        is_mine: Whether it is this rank that left.
    """

    epoch: int
    items: int
    following: int
    is_mine: bool


def contradiction(
    mine: PassRecord, theirs: PassRecord, look: int, slack: int = 0, long_look: Callable[[], int] | None = None
) -> Contradiction | None:
    """Return where the passes of two ranks contradict each other; None if one may only be faster than the other.

    Args:
        mine: This rank's passes.
        theirs: Another rank's.
        look: How many items a mere look takes at most. It contradicts nothing, because ``set_epoch`` may still follow.
        slack: How many items more one rank's share may have.
        long_look: Returns how many items a look takes at most where the other rank has chosen an epoch, so that this
            one may be about to. Default: as many as a look.
    """
    at_most = (lambda: look) if long_look is None else long_look
    found = []
    mine, theirs = mine.seen_by(theirs), theirs.seen_by(mine)
    for is_mine, behind, further in ((True, mine, theirs), (False, theirs, mine)):
        for run in further.runs:
            if run.items > look:
                left = _broken_off(behind, further, run, look, slack, at_most)
                left = left or _skipped(behind, further, run, look, at_most) or _gone_back(behind, run, at_most)
                found += [] if left is None else [Contradiction(*left, is_mine)]
    return min(found, default=None)


# Each returns the epoch of which a rank took less although it continued, with how much it took, and to where. Where
# only one of two ranks has chosen an epoch, the other may be about to: what it did without that no longer counts then,
# unless it was more than a long look.


def _broken_off(
    behind: PassRecord, other: PassRecord, further: Run, look: int, slack: int, long_look: Callable[[], int]
) -> tuple[int, int, int] | None:
    """Return the first epoch of a run that a rank broke off earlier."""
    top = behind.top(look)
    for run in behind.runs:
        epoch = max(run.epoch, further.epoch)
        is_left = (
            run.state is PassState.LEFT and further.state is not PassState.UNKNOWN and run.attempt == further.attempt
        )
        if is_left and further.items > run.items + slack and epoch <= min(run.last, further.last, top - 1):
            following, chosen = behind.after(epoch), other.chosen_before(epoch)
            goes_on = further.chosen or behind.chosen_before(following) == chosen or further.is_longer_than(long_look())
            has_left = behind.chosen_before(epoch) == chosen or epoch < behind.top_of_long(long_look())
            if goes_on and has_left:
                return epoch, run.items, following
    return None


def _skipped(
    behind: PassRecord, other: PassRecord, further: Run, look: int, long_look: Callable[[], int]
) -> tuple[int, int, int] | None:
    """Return the first epoch of a run that a rank left out."""
    epoch = behind.first_lacking(further)
    if epoch > further.last or epoch >= behind.top(look, further.attempt):
        return None
    following = behind.after(epoch)
    is_alike = further.chosen or behind.chosen_before(following) == other.chosen_before(epoch)
    return (epoch, 0, following) if is_alike or further.is_longer_than(long_look()) else None


def _gone_back(behind: PassRecord, further: Run, long_look: Callable[[], int]) -> tuple[int, int, int] | None:
    """Return the first epoch of a run before which a rank started again."""
    top = dict(behind.left).get(further.attempt)
    if top is None or further.last <= top or further.state is PassState.UNKNOWN:
        return None
    if not further.chosen and not further.is_longer_than(long_look()):
        return None
    again = min((run.epoch for run in behind.runs if run.attempt > further.attempt), default=top)
    return max(further.epoch, top + 1), 0, again
