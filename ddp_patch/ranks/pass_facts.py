"""Facts of the passes over a loader, which all ranks claim alike: how each begins, what it draws, where it is over.

Passes are numbered, looks apart. Of pass n the ranks claim one word after 2, 4, 8, ... batches, by counts that follow
from the number of batches alone. A rank whose pass is over after m batches claims its word at the next count. So two
ranks with different lengths meet at one name, whichever comes first:

    ========================  ==========================  ==================================
    rank A                    rank B                      where they meet
    ========================  ==========================  ==================================
    over after 3              given 4, or more            at 4: one is over, the other not
    over after 5              over after 7                at 8: over after other numbers
    over after 5              given 5, so far             nowhere yet
    failed after 3            given 4, then left          at 4, 8, ...: A's word moves on
    over after 3, one more    given 4                     at 4, 8, ...: A's word moves on
    may come on a rank
    ========================  ==========================  ==================================

A pass is left when the next one takes its second batch, or ends. One that a restored position cuts off may have any
length, and looks, of at most one batch, do not count if an epoch is chosen after them, or if they move no order.
"""

import json
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident, main_thread
from typing import Any, Literal, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import PartialPassWarning, RankMismatchError, RankMismatchWarning, StreamLengthWarning
from ddp_patch.loaders.overlap import Sketch
from ddp_patch.orders.chunks import State
from ddp_patch.orders.digest import END
from ddp_patch.ranks.claims import Claims
from ddp_patch.ranks.ends import PATIENCE_S, Ends
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.parts import Parts
from ddp_patch.validation import counted

__all__ = ["MORE_THAN_A_LOOK", "BegunPass", "Marks", "PassMonitor", "Progress", "Rules", "State", "Word", "next_count"]

_A_LOOK = 1  # batch
# A pass that was struck as a look counts again when it is given a batch, up to so many; then it is struck no more.
MORE_THAN_A_LOOK = 2
# Facts are claimed after 2, 4, 8, ... batches, from so many on whenever so many more came, or a quarter of all.
_GAP = 32

# Tells the digests of what a pass draws, by how many items they are of; in the order in which they were made.
Marks: TypeAlias = Callable[[], dict[int, int]]

# How many passes were made over all loaders of some ranks, by the store, who they are, and the thread that made them.
_passes_made: WeakKeyDictionary[Any, Counter[tuple[str, int]]] = WeakKeyDictionary()


def next_count(batches: int) -> int:
    """Return the first count after so many batches at which facts are claimed.

    Examples:
        >>> [next_count(batches) for batches in (0, 2, 3, 32, 63, 64, 128, 1000)]
        [2, 4, 4, 64, 64, 96, 160, 1187]
    """
    count = 2
    while count <= batches:
        count += max(min(count, _GAP), count // 4)
    return count


class Progress(NamedTuple):
    """How far a pass has come.

    Attributes:
        least: How many batches the loop was given, at least.
        most: How many it was given, at most; they differ where nobody counts what workers fetch ahead.
        state: What is known of it.
        slack: How many batches more one rank may have than another; None if each has a number of its own.
        items: How many items all ranks have drawn by then, at least; None if all of the epoch's.
    """

    least: int
    most: int
    state: State = State.RUNNING
    slack: int | None = 0
    items: int | None = None


class Word(NamedTuple):
    """What a rank says of a pass; see ``BegunPass`` and ``Progress``."""

    rank: int
    epoch: int
    begins_at: str
    others: int | None
    held: str = ""
    slack: int | None = 0
    batches: int = 0
    state: State = State.RUNNING
    # The last mark that all ranks have made by then: where, of what was drawn, and of the numbers in that.
    mark: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, text: str) -> "Word | None":
        """Return the word that a rank claimed as text; None if it is anything else."""
        try:
            *facts, state, mark = json.loads(text)
            return cls._make([*facts, State(state), mark and tuple(mark)])
        except (ValueError, TypeError, RecursionError):
            return None


@dataclass(eq=False)
class BegunPass:
    """A pass of this rank.

    Attributes:
        word: What is said of it, but for how far it has come: over which epoch it is, where in it it begins, how many
            passes this rank had made over its other loaders, and a digest of the data, if there is one.
        progress: Tells how far it has come, at most to where it was left. It asks the pass until the next one begins;
            from then on the pass tells this, which no longer holds it: a pass that is let go ends its sampler's
            generator, as in one process.
        marks: Tells the digests of what it draws; none if nobody compares that.
        number_marks: Tells those of the numbers in what it draws, where ``marks`` are of names alone.
        sketch: What it was given, where each rank has a part of the data and the ranks compare these; else None.
        number: Its number; None as long as it may be a look.
        is_told: Whether it no longer asks.
        is_left: Whether the next pass is made, so that nothing more is told of it.
        is_said: Whether this rank has said where it was over.
        over: The word of a rank for which it was over sooner, as it may.
    """

    word: Word
    progress: Callable[[], Progress]
    marks: Marks = dict
    number_marks: Marks = dict
    sketch: Sketch | None = None
    number: int | None = None
    is_told: bool = False
    is_left: bool = False
    is_said: bool = False
    over: Word | None = None

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

    def said(self, count: int | None = None) -> Word:
        """Return what is said of it after so many batches, or where it was over."""
        given, marks = self.progress(), self.marks()
        items = None if given.state is State.ENDED else given.items
        # Of an order that is drawn as a whole, the last one, wherever it was made.
        at = next(reversed(marks), END) if items is None else max((at for at in marks if at <= items), default=END)
        return self.word._replace(
            slack=None if self.word.slack is None else given.slack,
            batches=given.most if count is None else count,
            state=given.state,
            mark=(at, marks[at], self.number_marks().get(at, 0))
            if at in marks and (at != END or items is None)
            else None,
        )


# ---- what excludes what ----

Rule: TypeAlias = Literal["passes", "others", "held", "order", "length", "numbers"]


def rule_broken(mine: Word, theirs: Word, marks: dict[int, int], *, has_one_order: bool) -> Rule | None:
    """Return in what two ranks' words of one pass exclude each other; None if they may both be true.

    Args:
        mine: This rank's.
        theirs: The other rank's.
        marks: The digests of what this rank draws in it.
        has_one_order: Whether all epochs have one order, so that it does not matter which one a pass is over.
    """
    if mine.begins_at != theirs.begins_at or (mine.epoch != theirs.epoch and not has_one_order):
        return "passes"
    if None not in {mine.others, theirs.others} and mine.others != theirs.others:
        return "others"
    if mine.held and theirs.held and mine.held != theirs.held:
        return "held"
    if theirs.mark is not None:
        count, value, _ = theirs.mark
        if marks.get(count, value) != value:
            return "order"
    if _is_outgrown(mine, theirs) or _is_outgrown(theirs, mine):
        return "length"
    return None


def _is_outgrown(behind: Word, further: Word) -> bool:
    """Return whether a pass is over on one rank, and longer on another."""
    if behind.slack is None or further.slack is None or behind.state is State.RUNNING:
        return False
    if behind.state is State.FAILED:
        # The others may have been given the batch in place of which the error came; they leave when they hear of it.
        return further.state is State.ENDED and further.batches > behind.batches + 1 + behind.slack
    return further.batches > behind.batches + behind.slack


_LOOK_ALIKE = (
    "Look at a batch on every rank, or iterate the unpatched loader, or call loader.set_epoch(N) with the same N on "
    "every rank before the epoch."
)
_ALL_ITERATE = "Iterate each patched loader on every rank; or, on one rank, the loader that was not patched."
# What a rank did whose pass is over, and what to do.
_OVER = {
    State.LEFT: ("left", f"Let every rank break after the same batch: all-reduce the decision to stop. {_LOOK_ALIKE}"),
    State.ENDED: (
        "came to the end of",
        "Give every rank equally many batches: skip an unreadable item on all of them or raise an error.",
    ),
    State.FAILED: ("was given an error in", "Let the error end the training, or tell all ranks of it."),
}


def _shorter(mine: Word, theirs: Word) -> Word:
    """Return the pass that is over, after fewer batches if both are, of two with different lengths."""
    return min((one for one in (mine, theirs) if one.state is not State.RUNNING), key=lambda one: one.batches)


def mismatch_text(name: str, number: int, rule: Rule, words: tuple[Word, Word], why: str) -> str:
    """Return what all ranks are told: what was seen, and what to do.

    Args:
        name: What errors call the loader.
        number: That of the pass.
        rule: What differs.
        words: What this rank says, and what the other one does.
        why: What differs, and what to do, where the ranks draw different orders; what their datasets hold otherwise.
    """
    mine, theirs = words
    here, there = (ranks_text([word.rank]) for word in words)
    if rule == "passes":
        each = f"{_what(mine)} on {here}, and over {_what(theirs)} on {there}"
        seen = f"the ranks make different passes: pass {number} is over {each}"
        remedy = f"{_LOOK_ALIKE} Restore a state on every rank or on none."
    elif rule == "order":
        count = END if theirs.mark is None else theirs.mark[0]
        within = f"within the first {counted(count, 'item')}" if count != END else "or orders of different lengths"
        seen, remedy = f"in epoch {mine.epoch}, {here} and {there} draw different orders, {within}", why
    elif rule == "length":
        behind = _shorter(mine, theirs)
        who, others = (here, there) if behind is mine else (there, here)
        did, remedy = _OVER[behind.state]
        batches = counted(behind.batches, "batch")
        seen = f"{who} {did} epoch {behind.epoch} after {batches}; {others} took more of it"
    elif rule == "others":
        seen = (
            f"when pass {number} over it began, the ranks had made different numbers of passes over their other "
            f"loaders: {mine.others} on {here}; {theirs.others} on {there}"
        )
        remedy = _ALL_ITERATE
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


def _what(word: Word) -> str:
    return f"epoch {word.epoch}" + ("" if word.begins_at == "0" else f" from item {word.begins_at}")


# ---- this rank's passes ----


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What holds for the passes over a loader.

    Attributes:
        name: Tells what errors call the loader.
        has_one_order: Whether all epochs have one order, so that it does not matter which one a pass is over.
        forgets_looks: Whether looks are struck where the next pass begins.
        has_own_lengths: Whether ranks may have any number of batches in a pass.
        only_warns_of_lengths: Whether the user says that the loader is sharded: parts of unequal length are a warning.
        why_orders_differ: Says what differs, and what to do, where the ranks draw different orders.
        why_numbers_differ: Says what may differ, and how to tell, where items have the same names and other numbers.
        data_digest: Returns a digest of the data when a pass begins; empty if nobody compares that.
        data_named: What that is of, for errors.
        is_begun_by_all: Whether each rank has a share of a pass, which all begin.
    """

    name: Callable[[], str] = lambda: "loader"
    has_one_order: bool = False
    forgets_looks: bool = False
    has_own_lengths: bool = False
    only_warns_of_lengths: bool = False
    why_orders_differ: Callable[[], str] = lambda: ""
    why_numbers_differ: Callable[[], str] = lambda: ""
    data_digest: Callable[[], str] = str
    data_named: str = ""
    is_begun_by_all: bool = False


class PassMonitor:
    """Numbers this rank's passes over one loader, claims their facts, and raises where another rank's word counts.

    Args:
        claims: Where the ranks claim; None if there is nobody to compare with.
        rules: What holds for the loader.
        parts: Compares the ranks' samples, where each has a part of the data; None if it has not.

    Attributes:
        claims, rules, parts: As given.
        ends: Compares where passes end.
    """

    def __init__(self, claims: Claims | None = None, rules: Rules | None = None, parts: Parts | None = None) -> None:
        self.claims: Claims | None = claims
        self.rules: Rules = Rules() if rules is None else rules
        self.parts: Parts | None = parts
        self.ends: Ends = Ends()
        self._passes: list[BegunPass] = []  # the latest one that is more than a look, and those after it
        self._settled = 0  # how many passes are more than looks, or come before one that is
        self._thread = get_ident()
        # How many passes this rank has made over this loader, and over others before it came.
        self._made_here = 0 if (made := self._made_by_all) is None else made[self._whose]
        self._has_warned = self._has_warned_of_numbers = False

    def __reduce__(self) -> tuple[type["PassMonitor"], tuple[()]]:
        return PassMonitor, ()  # a copy makes passes of its own, which other ranks need not know about

    @property
    def is_on(self) -> bool:
        """Whether there is anybody to compare with."""
        return self.claims is not None

    @property
    def _whose(self) -> tuple[str, int]:
        return "" if self.claims is None else self.claims.group, self._thread

    @property
    def _made_by_all(self) -> Counter[tuple[str, int]] | None:
        """How many passes this rank has made over all loaders that it compares; None once the process group is gone."""
        is_open = self.claims is not None and self.claims.is_open
        return _passes_made.setdefault(default_store(), Counter()) if is_open else None

    def begin(
        self,
        epoch: int,
        begins_at: str,
        progress: Callable[[], Progress],
        marks: Marks = dict,
        sketch: Sketch | None = None,
        number_marks: Marks = dict,
    ) -> BegunPass | None:
        """Note that a pass begins; return None if there is nobody to compare with.

        Args:
            epoch: The epoch that it is over.
            begins_at: Where in the epoch it begins.
            progress: Tells how far it has come.
            marks: Tells the digests of what it draws; none if nobody compares that.
            sketch: What its sampler notes of it, if that does.
            number_marks: Tells the digests of the numbers in what it draws, where ``marks`` are of names alone.
        """
        if self.claims is None:
            return None
        # In another thread something reads ahead, by as much as there was time for.
        is_own, made = self.rules.has_own_lengths or get_ident() != self._thread, self._made_by_all
        others = None if is_own or made is None else made[self._whose] - self._made_here
        held, slack = self.rules.data_digest(), None if is_own else 0
        word = Word(self.claims.rank, epoch, begins_at, others, held, slack)
        sketch = self.parts.sketch(sketch) if self.parts is not None else None
        begun = BegunPass(word, progress, marks, number_marks, sketch)
        self.add(begun)
        return begun

    def add(self, begun: BegunPass) -> None:
        """Add a pass that begins."""
        if self.rules.forgets_looks:
            self.strike_looks()
        for made in self._passes:
            made.tell(made.progress())
        self._passes.append(begun)

    def goes_on(self, begun: BegunPass) -> None:
        """Add a pass again that was struck, and that goes on all the same."""
        if begun.number is None and begun not in self._passes:
            if self.rules.forgets_looks:  # a look within it had struck it
                self.strike_looks()
            self._passes.append(begun)

    def strike_looks(self) -> None:
        """Strike the looks at the end: an epoch is chosen."""
        while self._passes and self._passes[-1].number is None and self._passes[-1].is_look:
            self._passes.pop()

    def cut_off(self) -> None:
        """Let the passes that run have any length: a position is restored."""
        self.strike_looks()
        for made in self._passes:
            made.word = made.word._replace(slack=None)

    def settle(self) -> None:
        """Find out which passes are left, and which are more than looks; number these, and say what is over."""
        more_than_looks = (at for at, one in enumerate(self._passes) if one.number is not None or not one.is_look)
        last = max(more_than_looks, default=-1)
        settled, self._passes = self._passes[: last + 1], self._passes[max(0, last) :]
        for begun in settled:
            if begun.number is None:
                begun.number = self._settled
                self._settled += 1
                self._count(begun)
        for begun in settled[:-1]:
            begun.leave()
            self._say_over(begun)

    # ---- passes whose end nobody knows before ----

    def give_step(self, begun: BegunPass, batches: int) -> None:
        """Leave that this rank was given so many batches of such a pass, if that is due."""
        if self.claims is not None:
            self.ends.give_step(self.claims, self._step(begun), batches)

    def end_steps(self, begun: BegunPass, batches: int) -> None:
        """Compare how many batches such a pass had; wait a moment for ranks that may be given more.

        Raises:
            RankMismatchError: Another rank was given more.
        """
        slack = begun.progress().slack or 0
        if self.claims is not None and self.ends.is_short(self.claims, self._step(begun), batches, slack):
            self._raise(
                f"Iterating the {self.rules.name()}: epoch {begun.word.epoch} ended after {counted(batches, 'batch')} "
                f"on rank {self.claims.rank}, and others were given more. {self.rules.why_orders_differ()}",
                is_length=True,
            )

    def end_whole(self, begun: BegunPass) -> None:
        """Compare who has begun a pass of which this rank was given all; wait a moment for those that have not.

        Raises:
            RankMismatchError: One of them never will.

        Warns:
            PartialPassWarning: Some have not, so what follows of the pass is about a part of the data.
        """
        claims, number, made = self.claims, begun.number, self._made_by_all
        is_compared = self.rules.is_begun_by_all and begun.word.slack == begun.progress().slack == 0
        if claims is None or number is None or not is_compared or self.ends.all_begun >= number:
            return
        if claims.has_failed and not claims.put(f"begun/{claims.rank}", f"{number}"):
            return  # others may know as little of this rank as it does of them
        is_main = made is not None and self._thread == main_thread().ident
        missing, why = self.ends.missing(claims, number, made[self._whose] if made is not None and is_main else None)
        if not missing:
            return
        seen = (
            f"Iterating the {self.rules.name()}: {ranks_text([claims.rank])} was given its whole share of epoch "
            f"{begun.word.epoch}, and {ranks_text(missing)} of {len(claims.members)}"
        )
        if why:
            self._raise(f"{seen} never began that pass: {why}. So samples would be lost. {_ALL_ITERATE}")
        warnings.warn(
            f"{seen} had not begun that pass {PATIENCE_S:g} s later: they iterate another loader, or nothing. So what "
            f"follows of it is about a part of the data. {_ALL_ITERATE}",
            PartialPassWarning,
            stacklevel=2,
        )

    def _step(self, begun: BegunPass) -> str:
        """Return the same text for a pass on every rank."""
        number = self._settled if begun.number is None else begun.number
        return f"{number}.{begun.word.epoch} from {begun.word.begins_at}"

    # ---- claiming ----

    def _count(self, begun: BegunPass) -> None:
        """Count a pass that has begun, for all loaders; and tell the others."""
        claims, made, number = self.claims, self._made_by_all, begun.number
        if claims is None or made is None or number is None:
            return
        if not (begun.progress().slack or begun.word.slack is None):
            made[self._whose] += 1
            self._made_here += 1
        claims.put(f"begun/{claims.rank}", f"{number}")
        if self._thread == main_thread().ident:
            claims.put(f"/made/{claims.rank}", f"{made[self._whose]}")
        if claims.add(f"{number}/begun", 1) == len(claims.members):
            claims.tell(number)

    def compare(self, begun: BegunPass | None, count: int | None = None) -> None:
        """Claim what this rank knows of a pass and those before it, and hear what others have found.

        Args:
            begun: The pass.
            count: After how many batches; None where it is over.

        Raises:
            RankMismatchError: Another rank's word excludes this one's, or a rank has found that.
        """
        if self.claims is None:
            return
        self.settle()
        if begun is not None and begun.number is not None and not begun.is_left:
            if begun.progress().state is not State.RUNNING:
                self._say_over(begun)
            elif count is not None:
                self._say(begun, count, begun.said(count))
            if self.parts is not None:
                self.parts.compare(self.claims, begun.number, begun.sketch, count, self._raise)
        self.ends.all_begun = self.claims.hear()
        self.claims.forget_passes(self.ends.all_begun - 2)

    def report(self, begun: BegunPass | None) -> None:
        """Say how far this rank has come in a pass, and raise nothing: it was given an error already."""
        with suppress(RankMismatchError):
            self.compare(begun)

    def _say(self, begun: BegunPass, count: int, word: Word) -> Word | None:
        """Claim a word of a pass at a count; return that of another rank, if that counts."""
        claims, number = self.claims, begun.number
        if claims is None or number is None:
            return None
        text = json.dumps(word, separators=(",", ":"))
        theirs = Word.of(found) if (found := claims.claim(f"{number}/{count}", text)) != text else None
        for other in (begun.over, theirs):
            if other is not None and other.rank != word.rank:
                self._judge(begun, number, word, other)
        if theirs is not None and theirs.state is not State.RUNNING:
            begun.over = theirs
        return theirs

    def _say_over(self, begun: BegunPass) -> None:
        """Claim where a pass was over, at the next count; or after that, where another may go on to there."""
        if begun.is_said:
            return
        begun.is_said, word = True, begun.said()
        count = next_count(word.batches)
        while word.slack is not None and (theirs := self._say(begun, count, word)) is not None:
            if theirs.state is not State.RUNNING:
                break
            count = next_count(count)

    def _judge(self, begun: BegunPass, number: int, mine: Word, theirs: Word) -> None:
        """Raise RankMismatchError, and leave it for all, if two ranks' words exclude each other."""
        rule = rule_broken(mine, theirs, begun.marks(), has_one_order=self.rules.has_one_order)
        if rule is None:
            self._compare_numbers(begun, number, mine, theirs)
            return
        why = self.rules.data_named if rule == "held" else self.rules.why_orders_differ()
        is_unequal = rule == "length" and _shorter(mine, theirs).state is State.ENDED
        self._raise(mismatch_text(self.rules.name(), number, rule, (mine, theirs), why), is_length=is_unequal)

    def _compare_numbers(self, begun: BegunPass, number: int, mine: Word, theirs: Word) -> None:
        """Warn, once, if two ranks' items differ in their numbers alone: harmless programs do that, too."""
        at, _, value = theirs.mark or (0, 0, 0)
        if begun.number_marks().get(at, value) != value and not self._has_warned_of_numbers:
            self._has_warned_of_numbers = True
            why = self.rules.why_numbers_differ()
            text = mismatch_text(self.rules.name(), number, "numbers", (mine, theirs), why)
            warnings.warn(text, RankMismatchWarning, stacklevel=2)

    def _raise(self, text: str, *, is_length: bool = False) -> None:
        """Raise a mismatch, and leave it for all; or only warn, once, where the user says that lengths are right."""
        if not (is_length and self.rules.only_warns_of_lengths):
            if self.claims is not None:
                self.claims.tell(text)
            raise RankMismatchError(text)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(text, StreamLengthWarning, stacklevel=2)
