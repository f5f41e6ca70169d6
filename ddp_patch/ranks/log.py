"""The log: the passes that a rank makes over a loader, and what it tells the others of them.

Passes are numbered, looks apart. A pass is left when the next one takes its second batch, or ends. A restored position
begins a new list of passes. ``ranks/rules.py`` compares two ranks' logs.
"""

import json
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import NamedTuple, Protocol

from ddp_patch.orders.chunks import State
from ddp_patch.orders.digest import Mark

__all__ = [
    "MORE_THAN_A_LOOK",
    "VERSION",
    "Entry",
    "Log",
    "LoggedPass",
    "Marks",
    "Progress",
    "Record",
    "State",
    "record_of",
    "text_of",
]

# The version of what ranks leave each other.
VERSION = 3

# So many passes before the latest one are kept whole; of earlier ones a hash.
_KEPT = 16
# Others are told the length of the pass before, and if passes are short, of so many: a rank may be that far ahead.
_TOLD, _SHORT = 4, 99
_A_LOOK = 1  # batch
# A pass that was struck as a look counts again when it is given a batch, up to so many; then it is struck no more.
MORE_THAN_A_LOOK = 2


class Entry(NamedTuple):
    """A pass, as another rank is told of it; see ``LoggedPass`` and ``Progress``."""

    number: int
    epoch: int
    begins_at: str
    others: int | None
    batches: int
    state: State
    is_own: bool
    held: str
    mark: Mark | None


class Record(NamedTuple):
    """What a rank tells the others of its log: plain data.

    Attributes:
        lists: How many lists of passes it has closed, by restoring a position.
        closed: How many passes the last of them had.
        chain: A hash of all passes before the latest one.
        before: How many batches the passes before the latest one had, and how they ended, the last of them first, so
            that a rank that is still in one of these hears of its end. Of one of which others may have had more, 0.
        entry: The latest pass that is more than a look; None before the first.
    """

    lists: int = 0
    closed: int = 0
    chain: str = ""
    before: tuple[tuple[int, State], ...] = ()
    entry: Entry | None = None


def text_of(record: Record) -> str:
    """Return a record as JSON."""
    values: tuple[object, ...] | None = None
    if record.entry is not None:
        *name, is_own, held, mark = record.entry
        values = (*name, int(is_own), held, mark)  # "false" is four bytes more
    return json.dumps([VERSION, *record[:-1], values], separators=(",", ":"))


def record_of(text: bytes | str) -> Record | None:
    """Return the record of which ``text_of`` made text; None if it is anything else, or of another version."""
    try:
        version, lists, closed, chain, told, values = json.loads(text)
        before = tuple((batches, State(state)) for batches, state in told)
        entry = None
        if values is not None:
            number, epoch, begins_at, others, batches, state, is_own, held, mark = values
            entry = Entry(
                number, epoch, begins_at, others, batches, State(state), bool(is_own), held, mark and Mark(*mark)
            )
        numbers = [lists, closed, *(batches for batches, _ in before)]
        numbers += [] if entry is None else [entry.number, entry.epoch, entry.batches, *(entry.mark or ())]
        is_ours = version == VERSION and all(type(number) is int for number in numbers)
    except (ValueError, TypeError):
        return None
    return Record(lists, closed, chain, before, entry) if is_ours else None


class Progress(NamedTuple):
    """How far a pass has come.

    Attributes:
        least: How many batches the loop was given, at least.
        most: How many it was given, at most; they differ where nobody counts what workers fetch ahead.
        state: What is known of it.
        is_own: Whether the number of batches is this rank's own, so that others may have more or fewer.
    """

    least: int
    most: int
    state: State = State.RUNNING
    is_own: bool = False


class Marks(Protocol):
    """The digests of what a pass draws."""

    @property
    def latest(self) -> Mark | None:
        """The one that was made last."""

    @property
    def marks(self) -> Mapping[int, int]:
        """All of them, by how many items they are of."""


class LoggedPass:
    """A pass of this rank, in its log.

    Args:
        epoch: Which epoch it is over.
        begins_at: Where in the epoch it begins.
        progress: Tells how far it has come; asked until the next pass begins, and told after that: one that is let go
            by then ends its sampler's generator, as in one process.
        digest: The digests of what it draws; None if nobody compares that.
        others: How many passes this rank had made over its other loaders when it began; None if that is its own.

    Attributes:
        held: A hash of what the user has changed in the dataset since the patch, as it was when the pass began.
        first: Hashes of its first samples, where each rank has a part of the data.
        last: Those of the batch that came last.
    """

    def __init__(
        self,
        epoch: int,
        begins_at: str,
        progress: Callable[[], Progress],
        digest: Marks | None = None,
        others: int | None = None,
    ) -> None:
        self.epoch: int = epoch
        self.begins_at: str = begins_at
        self.others: int | None = others
        self.digest: Marks | None = digest
        self.held: str = ""
        self.first: list[int] = []
        self.last: list[int] = []
        self.is_told: bool = False  # whether it no longer asks
        self._is_left = False
        self._progress = progress

    @property
    def progress(self) -> Progress:
        """How far it has come; at most to where it was left."""
        return self._progress()

    @property
    def is_look(self) -> bool:
        """Whether it may be no more than a look; an error stands in the place of a batch."""
        given = self.progress
        if given.state is State.FAILED:
            return given.least < _A_LOOK
        return given.least <= _A_LOOK and given.state is State.RUNNING

    def tell(self, given: Progress) -> None:
        """Record how far it has come, from now on, unless it is left."""
        if not self._is_left:
            self._progress = lambda: given
            self.is_told = True

    def leave(self) -> None:
        """Record that the next pass is made."""
        given = self.progress
        if given.state is State.RUNNING:
            given = given._replace(least=given.most, state=State.LEFT)
        self.tell(given)
        self._is_left = True


class Log:
    """The passes that this rank makes over one loader.

    Attributes:
        has_one_order: Whether all epochs have one order, so that it does not matter which one a pass is over.
        lists: How many lists of passes were closed.
        settled: How many passes of this list are more than looks, or come before one that is.
    """

    def __init__(self) -> None:
        self.has_one_order: bool = False
        self.lists: int = 0
        self.settled: int = 0
        self._closed, self._first = 0, 0
        self._passes: list[LoggedPass] = []  # from number ``_first`` on
        self._chains = [""]

    def begin(self, begun: LoggedPass) -> None:
        """Add a pass."""
        if self.has_one_order:
            self.strike_looks()
        for made in self._passes[self.settled - self._first - 1 :] if self._passes else ():
            made.tell(made.progress)
        self._passes.append(begun)

    def goes_on(self, begun: LoggedPass) -> None:
        """Add a pass again that was struck, and that goes on all the same."""
        if not any(known is begun for known in self._passes):
            if self.has_one_order:  # a look within it had struck it
                self.strike_looks()
            self._passes.append(begun)

    def strike_looks(self) -> None:
        """Strike the looks at the list's end: an epoch is chosen."""
        while self._first + len(self._passes) > self.settled and self._passes[-1].is_look:
            self._passes.pop()

    def close(self) -> None:
        """Begin a new list: a position is restored."""
        self._closed, self.lists = self._first + len(self._passes), self.lists + 1
        self._passes, self._chains, self._first, self.settled = [], [""], 0, 0

    def settle(self) -> int:
        """Find out which passes are left, and which are more than looks; return how many more of these there are."""
        before, count = self.settled, len(self._passes)
        last = next((place for place in reversed(range(count)) if not self._passes[place].is_look), -1)
        self.settled = max(before, self._first + last + 1)
        for number in range(max(before - 1, self._first), self.settled - 1):
            self._passes[number - self._first].leave()
        for number in range(before, self.settled):
            made = self._passes[number - self._first]
            name = ("" if self.has_one_order else made.epoch, made.begins_at, made.others)
            self._chains.append(blake2b(repr((self._chains[-1], name)).encode(), digest_size=4).hexdigest())
        surplus = max(0, self.settled - self._first - _KEPT)
        self._first += surplus
        del self._passes[:surplus]
        return self.settled - before

    def entry(self, number: int) -> Entry | None:
        """Return a pass as others are told of it; None if it is no longer kept."""
        if number < self._first:
            return None
        made = self.made(number)
        given = made.progress
        batches = given.least if given.state is State.RUNNING else given.most
        mark = None if made.digest is None else made.digest.latest
        name = number, made.epoch, made.begins_at, made.others
        return Entry(*name, batches, given.state, given.is_own, made.held, mark)

    @property
    def latest(self) -> LoggedPass | None:
        """The latest pass that is more than a look; None before the first."""
        return self._passes[self.settled - self._first - 1] if self.settled else None

    def chain(self, number: int) -> str:
        """Return the hash of all passes before one."""
        return self._chains[number]

    def made(self, number: int) -> LoggedPass:
        """Return a pass that is kept."""
        return self._passes[number - self._first]

    def number_of(self, known: LoggedPass) -> int:
        """Return which pass of this list it is; -1 if it is no longer kept."""
        found = (place for place, made in enumerate(self._passes, self._first) if made is known)
        return next(found, -1)

    def may_reach(self, theirs: Record) -> bool:
        """Return whether another rank's record may still contradict what this rank does from now on."""
        if theirs.lists != self.lists or theirs.entry is None:
            return theirs.lists > self.lists
        return theirs.entry.number >= self.settled - 1

    def record(self) -> Record:
        """Return what the others are told."""
        latest = self.settled - 1
        before = tuple(_length(self.entry(number)) for number in reversed(range(latest)[-_TOLD:]))
        before = before if max(before, default=(0,))[0] <= _SHORT else before[:1]
        entry = self.entry(latest) if self.settled else None
        return Record(self.lists, self._closed, self._chains[max(0, latest)], before, entry)


def _length(made: Entry | None) -> tuple[int, State]:
    """Return how many batches a pass had, and how it ended; none if that says nothing of another rank's."""
    return (0, State.RUNNING) if made is None or made.is_own else (made.batches, made.state)
