"""The log: the passes that a rank makes over a loader, what it tells the others of them, and what contradicts it.

Passes are numbered, looks apart. A pass is left when the next one takes its second batch, or ends. One that a restored
position cuts off may have any length.

Ranks are fast and slow, and nobody waits. So a rule holds however old the other rank's record is: what it says of a
pass can only grow. Two ranks' logs contradict each other by six rules; ``n`` is the number of a pass.

    (a) Pass n has one epoch and one beginning on all ranks.
    (b) Where two ranks have come as far in pass n, they have the same digest.
    (c) A pass that one rank has left, or that has ended there, is not longer on another.
    (d) Looks, of at most one batch, do not count if an epoch is chosen after them, or if they move no order.
    (e) When pass n began, all ranks had made equally many passes over their other loaders.
    (f) When pass n began, the columns by which all ranks know their data were the same.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ddp_patch.loaders.overlap import Sketch
from ddp_patch.orders.chunks import State
from ddp_patch.orders.digest import END
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.validation import counted

__all__ = [
    "MORE_THAN_A_LOOK",
    "VERSION",
    "Difference",
    "Entry",
    "LoggedPass",
    "Marks",
    "Progress",
    "Record",
    "State",
    "have_other_numbers",
    "mismatch_text",
    "record_of",
    "rule_broken",
    "shorter",
    "text_of",
]

# The version of what ranks leave each other.
VERSION = 8

_A_LOOK = 1  # batch
# A pass that was struck as a look counts again when it is given a batch, up to so many; then it is struck no more.
MORE_THAN_A_LOOK = 2

# Tells the digests of what a pass draws, by how many items they are of; in the order in which they were made.
Marks: TypeAlias = Callable[[], dict[int, int]]


class Entry(NamedTuple):
    """A pass, as another rank is told of it; see ``LoggedPass`` and ``Progress``."""

    number: int
    epoch: int
    begins_at: str
    others: int | None
    batches: int
    state: State
    is_own: bool
    held: str = ""
    mark: tuple[int, int, int] | None = None  # where the last one was made, of names and of numbers
    sketch: tuple[int, ...] = ()


# What a rank tells the others of its log: the last passes that are more than looks, the latest at the end.
Record: TypeAlias = Sequence[Entry]


def text_of(record: Record) -> str:
    """Return a record as JSON."""
    return json.dumps([VERSION, *record], separators=(",", ":"))


def record_of(text: bytes | str) -> Record | None:
    """Return the record of which ``text_of`` made text; None if it is anything else, or of another version."""
    try:
        version, *passes = json.loads(text)
        told = [
            Entry._make([*name, State(state), is_own, held, mark and tuple(mark), tuple(sketch)])
            for *name, state, is_own, held, mark, sketch in passes
        ]
    except (ValueError, TypeError, RecursionError):
        return None
    return told if version == VERSION else None


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


@dataclass(eq=False)
class LoggedPass:
    """A pass of this rank, in its log.

    Attributes:
        epoch: Which epoch it is over.
        begins_at: Where in the epoch it begins.
        progress: Tells how far it has come, at most to where it was left. It asks the pass until the next one begins;
            from then on the pass tells the log, which no longer holds it: a pass that is let go ends its sampler's
            generator, as in one process.
        marks: Tells the digests of what it draws; none if nobody compares that.
        others: How many passes this rank had made over its other loaders when it began; None if that is its own.
        sketch: What it was given, where each rank has a part of the data and the ranks compare these; else None.
        is_own: Whether its length is this rank's own, in any case: a restored position may have cut it off.
        held: A digest of the data when it began; empty if nobody compares that, or nothing was there to compare.
        number_marks: Tells the digests of the numbers in what it draws, where names alone say what it is.
        is_told: Whether it no longer asks.
        is_left: Whether the next pass is made, so that nothing more is told of it.
    """

    epoch: int
    begins_at: str
    progress: Callable[[], Progress]
    marks: Marks = dict
    others: int | None = None
    sketch: Sketch | None = None
    is_own: bool = False
    held: str = ""
    number_marks: Marks = dict
    is_told: bool = False
    is_left: bool = False

    @property
    def is_look(self) -> bool:
        """Whether it may be no more than a look; an error stands in the place of a batch."""
        given = self.progress()
        if given.state is State.FAILED:
            return given.least < _A_LOOK
        return given.least <= _A_LOOK and given.state is State.RUNNING

    def tell(self, given: Progress) -> None:
        """Record how far it has come, from now on, unless it is left."""
        if not self.is_left:
            self.progress = lambda: given
            self.is_told = True

    def leave(self) -> None:
        """Record that the next pass is made."""
        given = self.progress()
        if given.state is State.RUNNING:
            given = given._replace(least=given.most, state=State.LEFT)
        self.tell(given)
        self.is_left = True

    def entry(self, number: int) -> Entry:
        """Return it as others are told of it, as pass ``number``."""
        given = self.progress()
        batches = given.least if given.state is State.RUNNING else given.most
        name, last = (number, self.epoch, self.begins_at, self.others), next(reversed(self.marks().items()), None)
        mark = None if last is None else (*last, self.number_marks().get(last[0], 0))
        hashes = () if self.sketch is None else tuple(self.sketch.hashes)
        return Entry(*name, batches, given.state, given.is_own or self.is_own, self.held, mark, hashes)


# ---- what contradicts what ----

Rule: TypeAlias = Literal["passes", "others", "held", "order", "length", "numbers"]


class Difference(NamedTuple):
    """How two ranks' logs contradict each other.

    Attributes:
        rule: What differs: (a) ``passes``, (e) ``others``, (f) what datasets ``held``, (b) ``order`` or (c) ``length``;
            or ``numbers`` of items alone, which breaks no rule.
        mine: This rank's pass.
        theirs: The other rank's.
    """

    rule: Rule
    mine: Entry
    theirs: Entry


def shorter(found: Difference) -> Entry:
    """Return the pass that is over, after fewer batches if both are, of two with different lengths."""
    over = [one for one in (found.mine, found.theirs) if one.state is not State.RUNNING]
    return min(over, key=lambda one: one.batches)


def rule_broken(own: Entry, other: Entry, marks: Marks, slack: int, *, has_one_order: bool) -> Rule | None:
    """Return which rule two ranks' entries of one pass break; None if one rank may only be faster than the other.

    Args:
        own: This rank's.
        other: The other rank's.
        marks: Tells all digests of what this rank draws in it.
        slack: How many batches more one rank may have.
        has_one_order: Whether all epochs have one order, so that it does not matter which one a pass is over.
    """
    if own.begins_at != other.begins_at or (own.epoch != other.epoch and not has_one_order):
        return "passes"
    if None not in {own.others, other.others} and own.others != other.others:
        return "others"
    if own.held and other.held and own.held != other.held:
        return "held"
    if other.mark is not None:
        count, value, _ = other.mark
        if marks().get(count, value) != value:
            return "order"
    return "length" if _is_outgrown(own, other, slack) or _is_outgrown(other, own, slack) else None


def have_other_numbers(other: Entry, number_marks: Marks) -> bool:
    """Return whether another rank's items differ from this one's in their numbers alone, as far as both have come."""
    if other.mark is None:
        return False
    count, _, value = other.mark
    return number_marks().get(count, value) != value


def _is_outgrown(behind: Entry, further: Entry, slack: int) -> bool:
    """Return whether a pass is over on one rank, and longer on another."""
    if behind.is_own or further.is_own or behind.state is State.RUNNING:
        return False
    if behind.state is State.FAILED:
        # The others may have been given the batch in place of which the error came; they leave when they hear of it.
        return further.state is State.ENDED and further.batches > behind.batches + 1 + slack
    return further.batches > behind.batches + slack


# ---- what the ranks are told ----

_LOOK_ALIKE = (
    "Look at a batch on every rank, or iterate the unpatched loader, or call loader.set_epoch(N) with the same N on "
    "every rank before the epoch."
)
# What a rank did whose pass is over, and what to do.
_OVER = {
    State.LEFT: ("left", f"Let every rank break after the same batch: all-reduce the decision to stop. {_LOOK_ALIKE}"),
    State.ENDED: (
        "came to the end of",
        "Give every rank equally many batches: skip an unreadable item on all of them or raise an error.",
    ),
    State.FAILED: ("was given an error in", "Let the error end the training, or tell all ranks of it."),
}


def mismatch_text(name: str, ranks: tuple[int, int], found: Difference, why: str) -> str:
    """Return what all ranks are told: what was seen, and what to do.

    Args:
        name: What errors call the loader.
        ranks: The rank that found it, and the one that contradicts it.
        found: How they contradict each other, as far as they have come.
        why: What differs, and what to do, where the ranks draw different orders; what their datasets hold otherwise.
    """
    here, there = (ranks_text([rank]) for rank in ranks)
    rule, mine, theirs = found
    if rule == "passes":
        each = f"{_what(mine)} on {here}, and over {_what(theirs)} on {there}"
        seen = f"the ranks make different passes: pass {mine.number} is over {each}"
        remedy = f"{_LOOK_ALIKE} Restore a state on every rank or on none."
    elif rule == "order":
        count = END if theirs.mark is None else theirs.mark[0]
        within = f"within the first {counted(count, 'item')}" if count != END else "or orders of different lengths"
        seen, remedy = f"in epoch {mine.epoch}, {here} and {there} draw different orders, {within}", why
    elif rule == "length":
        behind, who, others = (mine, here, there) if shorter(found) is mine else (theirs, there, here)
        did, remedy = _OVER[behind.state]
        batches = counted(behind.batches, "batch")
        seen = f"{who} {did} epoch {behind.epoch} after {batches}; {others} took more of it"
    elif rule == "others":
        seen = (
            f"when pass {mine.number} over it began, the ranks had made different numbers of passes over their other "
            f"loaders: {mine.others} on {here}; {theirs.others} on {there}"
        )
        remedy = "Iterate each patched loader on every rank; or, on one rank, the loader that was not patched."
    elif rule == "numbers":
        seen = f"in epoch {mine.epoch}, {here} and {there} read items of the same names and with other numbers"
        remedy = why
    else:
        seen = f"in epoch {mine.epoch}, the datasets of {here} and {there} differ at the same indices, in {why}"
        remedy = (
            "Make changes of the data alike on every rank: seed shuffles by the epoch, and sort files. If these may "
            "differ, pass fingerprint= a function of the dataset that returns what names its samples, or "
            "fingerprint=None to compare no data."
        )
    lost = "" if rule in {"order", "numbers"} else ", so samples would be lost"  # which ``why`` says
    return f"Iterating the {name}: {seen}{lost}. {remedy}"


def _what(entry: Entry) -> str:
    return f"epoch {entry.epoch}" + ("" if entry.begins_at == "0" else f" from item {entry.begins_at}")
