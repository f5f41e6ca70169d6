"""A rank's passes over a loader: their numbers, and what it says of each: the beginning, the progress, the end.

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
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from ddp_patch.loaders.overlap import Sketch
from ddp_patch.orders.chunks import State
from ddp_patch.orders.digest import END

__all__ = [
    "A_LOOK",
    "MORE_THAN_A_LOOK",
    "Beginning",
    "BegunPass",
    "Digests",
    "Marks",
    "PassNumbers",
    "Progress",
    "Stage",
    "State",
    "Word",
    "next_count",
]

# A pass of at most so many batches may be a look.
A_LOOK = 1
# A pass that was struck as a look counts again when it is given a batch, up to so many; then it is struck no more.
MORE_THAN_A_LOOK = 2
# Facts are claimed after 2, 4, 8, ... batches, from so many on whenever so many more came, or a quarter of all.
_GAP = 32

# Returns the digests of what a pass draws, by how many items they are of; in the order in which they were made.
Marks: TypeAlias = Callable[[], dict[int, int]]


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
        state: What is known of the pass.
        slack: How many batches more one rank may have than another; None if each has a number of its own.
        items: How many items all ranks have drawn by then, at least; None if all of the epoch's.
    """

    least: int
    most: int
    state: State = State.RUNNING
    slack: int | None = 0
    items: int | None = None


class Beginning(NamedTuple):
    """How a pass begins.

    Attributes:
        epoch: The epoch that the pass is over.
        item: How many items of the epoch were taken before.
        other_passes: How many passes the rank had made over its other loaders; None if the ranks do not compare that.
        data: A digest of the data; empty if the ranks do not compare it.
    """

    epoch: int
    item: int = 0
    other_passes: int | None = None
    data: str = ""


class Word(NamedTuple):
    """What a rank says of a pass.

    Attributes:
        rank: The rank.
        begins: How the pass begins.
        slack: As in ``Progress``.
        batches: After how many batches the rank says it, or the pass was over.
        state: As in ``Progress``.
        mark: The last count of items that all ranks have drawn by then; and the digests there, of the items and of the
            numbers in them.
    """

    rank: int
    begins: Beginning
    slack: int | None = 0
    batches: int = 0
    state: State = State.RUNNING
    mark: tuple[int, int, int] | None = None

    def as_text(self) -> str:
        """Return the text that the rank claims."""
        return json.dumps(self, separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> "Word | None":
        """Return the word that a rank claimed as text; None if it is anything else."""
        try:
            rank, begins, slack, batches, state, mark = json.loads(text)
            return cls(rank, Beginning._make(begins), slack, batches, State(state), mark and tuple(mark))
        except (ValueError, TypeError, RecursionError):
            return None


class Digests(NamedTuple):
    """The digests of what a pass draws. None is there if the ranks do not compare that.

    Attributes:
        items: Those of all that is drawn; of the names in it, where it has names.
        numbers: Those of the numbers beside names.
    """

    items: Marks = dict
    numbers: Marks = dict


class Stage(IntEnum):
    """Who knows how far a pass has come: the pass is asked; it reports that itself; or the next pass is made."""

    ASKED = 0
    REPORTS = 1
    LEFT = 2


@dataclass(eq=False)
class BegunPass:
    """A pass of this rank.

    Attributes:
        word: What is said of the pass, but for how far it has come.
        progress: Returns how far the pass has come, at most to where it was left. It asks the pass until the next one
            begins. From then on the pass reports its progress here, and is no longer held: a pass that is let go ends
            its sampler's generator, as in one process.
        digests: The digests of what the pass draws.
        sketch: What the pass was given, where each rank has a part of the data and the ranks compare these; else None.
        number: The number of the pass; None as long as it may be a look.
        stage: Who knows how far the pass has come.
        is_said: Whether this rank has claimed where the pass was over.
        over: The word of a rank for which the pass was over sooner, as it may be.
    """

    word: Word
    progress: Callable[[], Progress]
    digests: Digests = Digests()  # noqa: RUF009 - it cannot be changed
    sketch: Sketch | None = None
    number: int | None = None
    stage: Stage = Stage.ASKED
    is_said: bool = False
    over: Word | None = None

    @property
    def is_look(self) -> bool:
        """Whether the pass may be no more than a look; an error stands in the place of a batch."""
        given = self.progress()
        if given.state is State.FAILED:
            return given.least < A_LOOK
        return given.least <= A_LOOK and given.state is State.RUNNING

    def report(self, given: Progress) -> None:
        """Record how far the pass has come, from now on, unless it is left."""
        if self.stage is not Stage.LEFT:
            self.progress = lambda: given
            self.stage = Stage.REPORTS

    def leave(self) -> None:
        """Record that the next pass is made."""
        given = self.progress()
        if given.state is State.RUNNING:
            given = given._replace(least=given.most, state=State.LEFT)
        self.report(given)
        self.stage = Stage.LEFT

    def said(self, count: int | None = None) -> Word:
        """Return what is said of the pass after so many batches, or where it was over."""
        given, marks = self.progress(), self.digests.items()
        items = None if given.state is State.ENDED else given.items
        # Of an order that is drawn as a whole, the last one, wherever it was made.
        at = next(reversed(marks), END) if items is None else max((at for at in marks if at <= items), default=END)
        return self.word._replace(
            slack=None if self.word.slack is None else given.slack,
            batches=given.most if count is None else count,
            state=given.state,
            mark=(at, marks[at], self.digests.numbers().get(at, 0))
            if at in marks and (at != END or items is None)
            else None,
        )


class PassNumbers:
    """Numbers the passes over a loader that are more than looks.

    A pass is left when the next one takes its second batch, or ends. A pass that a restored position cuts off may have
    any length. Looks, of at most one batch, are struck if an epoch is chosen after them, or if they move no order.

    Args:
        forgets_looks: Whether looks are struck where the next pass begins, too.
    """

    def __init__(self, *, forgets_looks: bool = False) -> None:
        self.next: int = 0  # the number that comes next
        self._forgets_looks = forgets_looks
        self._passes: list[BegunPass] = []  # the latest one that is more than a look, and those after it

    def add(self, begun: BegunPass) -> None:
        """Add a pass that begins."""
        if self._forgets_looks:
            self.strike_looks()
        for made in self._passes:
            made.report(made.progress())
        self._passes.append(begun)

    def goes_on(self, begun: BegunPass) -> None:
        """Add a pass again that was struck, and that goes on all the same."""
        if begun.number is None and begun not in self._passes:
            if self._forgets_looks:  # a look within it had struck it
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

    def settle(self) -> tuple[list[BegunPass], list[BegunPass]]:
        """Number the passes that are more than looks; return those that have a number now, and those that are left."""
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
