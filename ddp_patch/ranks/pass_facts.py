"""A rank's passes over a loader: their numbers, and the word that the rank claims of each: beginning, progress, end.

A look is a pass of at most one batch that is not counted; all other passes are numbered. Of each pass, ranks claim a
word after 2, 4, 8, ... batches: the counts follow from the number of batches alone. A rank whose pass is over after m
batches claims its word at the next count. So two ranks with different lengths claim the same fact, whichever comes
first:

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
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from ddp_patch.loaders.overlap import Sketch
from ddp_patch.orders.digest import END

# How many batches a look has at most.
A_LOOK = 1
# A pass that was removed as a look is added again at a further batch. From this many batches on, a pass is no look.
MORE_THAN_A_LOOK = 2
# Facts are claimed after 2, 4, 8, ... batches; later after 32 more batches, or a quarter more, if this is larger.
_GAP = 32

# Returns the marks of a pass, in the order of storing: by the count of drawn items, the digest of the items (of their
# names, if they have names), and the digest of the numbers beside the names.
Marks: TypeAlias = Callable[[], dict[int, tuple[int, int]]]


def next_count(batches: int) -> int:
    """Return the first count after ``batches`` at which facts are claimed.

    Examples:
        >>> [next_count(batches) for batches in (0, 2, 3, 32, 63, 64, 128, 1000)]
        [2, 4, 4, 64, 64, 96, 160, 1187]
    """
    count = 2
    while count <= batches:
        count += max(min(count, _GAP), count // 4)
    return count


class State(IntEnum):
    """The states of a pass, with the numbers by which ranks compare them."""

    NEW = 4  # no batch was asked for
    RUNNING = 0
    LEFT = 1  # the loop has stopped before the end
    ENDED = 2  # the loop has seen the end
    FAILED = 3  # the loop got an error instead of a batch


class Progress(NamedTuple):
    """The progress of a pass.

    Attributes:
        least: How many batches were delivered to the loop, at least.
        most: How many batches were delivered, at most; more than ``least`` if prefetched batches are not told apart.
        state: The state of the pass.
        slack: How many more batches one rank may have than another; None if each rank may have any number.
        items: How many items all ranks have drawn by then, at least; None for all items of the epoch.
    """

    least: int
    most: int
    state: State = State.RUNNING
    slack: int | None = 0
    items: int | None = None


class Word(NamedTuple):
    """The facts that a rank claims about a pass.

    Attributes:
        rank: The rank.
        epoch: The epoch that the pass is over.
        item: How many items of the epoch were taken before the pass.
        other_passes: How many passes the rank had begun over its other loaders; None if the ranks do not compare this
            number.
        data: A digest of the data when the pass began; empty if the ranks do not compare it.
        slack: As in ``Progress``.
        batches: The number of batches at which the rank claims the word, or at which the pass was over.
        state: As in ``Progress``.
        mark: The latest mark that all ranks have drawn by then: its count, the digest of the items, and the digest of
            the numbers in the items.
    """

    rank: int
    epoch: int
    item: int = 0
    other_passes: int | None = None
    data: str = ""
    slack: int | None = 0
    batches: int = 0
    state: State = State.RUNNING
    mark: tuple[int, int, int] | None = None

    def as_text(self) -> str:
        """Return the text of the claim."""
        return json.dumps(self, separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> "Word | None":
        """Return the word that a rank claimed as text; None if the text is no word."""
        try:
            word = cls._make(json.loads(text))
            mark = None if word.mark is None else (*word.mark,)
            return word._replace(state=State(word.state), mark=mark)
        except (ValueError, TypeError, RecursionError):
            return None


class Stage(IntEnum):
    """How the progress of a pass is known: the pass is asked; the pass reports it; or the pass was left."""

    ASKED = 0
    REPORTS = 1
    LEFT = 2


@dataclass(eq=False)
class BegunPass:
    """A pass that this rank has begun.

    Attributes:
        word: The word about the pass, without its progress.
        progress: Returns the progress of the pass, at most to where it was left. The function asks the pass until the
            next pass begins. From then on the pass reports its progress, and is not referred to: when a pass is
            deleted, its sampler's generator ends, as in one process.
        marks: The marks of the pass; no marks if the ranks do not compare drawn items.
        sketch: The samples of the pass, if the ranks compare the parts of the data that each has; else None.
        number: The number of the pass; None while the pass may be a look.
        stage: How the progress of the pass is known.
        is_said: Whether this rank has claimed the end of the pass.
        over: The word of a rank on which the pass was over sooner without a mismatch.
    """

    word: Word
    progress: Callable[[], Progress]
    marks: Marks = dict
    sketch: Sketch | None = None
    number: int | None = None
    stage: Stage = Stage.ASKED
    is_said: bool = False
    over: Word | None = None

    @property
    def is_look(self) -> bool:
        """Whether the pass may be a look; an error counts as a batch."""
        given = self.progress()
        if given.state is State.FAILED:
            return given.least < A_LOOK
        return given.least <= A_LOOK and given.state is State.RUNNING

    def report(self, given: Progress) -> None:
        """Store the progress of the pass, unless the pass was left."""
        if self.stage is not Stage.LEFT:
            self.progress = lambda: given
            self.stage = Stage.REPORTS

    def leave(self) -> None:
        """Store that the pass was left, because the next pass is numbered."""
        given = self.progress()
        if given.state is State.RUNNING:
            given = given._replace(least=given.most, state=State.LEFT)
        self.report(given)
        self.stage = Stage.LEFT

    def said(self, count: int | None = None) -> Word:
        """Return the word about the pass after ``count`` batches, or about its end."""
        given, marks = self.progress(), self.marks()
        items = None if given.state is State.ENDED else given.items
        # If all of the order is drawn, the latest mark, whatever its count.
        at = next(reversed(marks), END) if items is None else max((at for at in marks if at <= items), default=END)
        return self.word._replace(
            slack=None if self.word.slack is None else given.slack,
            batches=given.most if count is None else count,
            state=given.state,
            mark=(at, *marks[at]) if at in marks and (at != END or items is None) else None,
        )


class PassNumbers:
    """Numbers the passes over a loader, without looks.

    A pass is left when the next pass takes its second batch, or ends. A pass that a restored position cuts off may have
    any length. Looks are removed if ``set_epoch`` follows, or if a look does not change the next pass's order.

    Args:
        forgets_looks: Whether looks are also removed when the next pass begins.
    """

    def __init__(self, *, forgets_looks: bool = False) -> None:
        self.next: int = 0  # the next pass's number
        self._forgets_looks = forgets_looks
        self._passes: list[BegunPass] = []  # the latest numbered pass, and the passes after it

    def add(self, begun: BegunPass) -> None:
        """Add a pass that begins."""
        if self._forgets_looks:
            self.strike_looks()
        for made in self._passes:
            made.report(made.progress())
        self._passes.append(begun)

    def goes_on(self, begun: BegunPass) -> None:
        """Add a pass again that was removed as a look, but takes a further batch."""
        if begun.number is None and begun not in self._passes:
            if self._forgets_looks:  # a look within the pass had removed it
                self.strike_looks()
            self._passes.append(begun)

    def strike_looks(self) -> None:
        """Remove the looks after the latest numbered pass, because an epoch was chosen."""
        while self._passes and self._passes[-1].number is None and self._passes[-1].is_look:
            self._passes.pop()

    def cut_off(self) -> None:
        """Let the running passes have any length, because a position is restored."""
        self.strike_looks()
        for made in self._passes:
            made.word = made.word._replace(slack=None)

    def settle(self) -> tuple[list[BegunPass], list[BegunPass]]:
        """Number the passes that are no looks; return the newly numbered passes, and the passes that were left."""
        more_than_looks = (at for at, one in enumerate(self._passes) if one.number is not None or not one.is_look)
        last = max(more_than_looks, default=-1)
        settled, self._passes = self._passes[: last + 1], self._passes[max(0, last) :]
        numbered = [begun for begun in settled if begun.number is None]
        for begun in numbered:
            begun.number, self.next = self.next, self.next + 1
        left = settled[:-1]
        for begun in left:
            begun.leave()
        return numbered, left
