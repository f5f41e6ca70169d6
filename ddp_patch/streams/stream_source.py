"""What the main process knows of a pass over a stream: what readers report, and what they note with batches."""

import logging
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING

from ddp_patch.errors import RankMismatchError, RankMismatchWarning, StreamOrderWarning
from ddp_patch.positions_and_padding import Part, Schedule
from ddp_patch.ranks.pass_facts import Marks
from ddp_patch.sharding.item_sources import ItemSource
from ddp_patch.sharding.saved_state import NotedBatch, Position
from ddp_patch.streams import messages
from ddp_patch.streams.even_rounds import BalancedRounds, position_of_rounds
from ddp_patch.streams.reported_pass import NUMBERS, ReportedPass, position_of_parts

if TYPE_CHECKING:
    from ddp_patch.streams.stream_sampler import StreamPasses


logger: logging.Logger = logging.getLogger("ddp_patch")

# A rank that waits for less than this for a pass has nothing to gain.
_LONG_S = 1.0

# How long a state waits for readers to report the end, where the length says that it has come.
_ENDS_S = 10

_INDICES = [None] * 1024


class StreamSource(ItemSource[None]):
    """An index for every item, None, forever. Readers read the items, and find the end if there is one.

    Args:
        start: Where the pass begins.
        passes: All passes over the loader.
        number: Which of these it is.

    Attributes:
        rounds: The rounds in which ranks send each other batches; None if each gives its own.
    """

    is_endless: bool = True
    is_open_ended: bool
    has_own_length: bool
    rounds: BalancedRounds | None

    def __init__(self, start: Position, passes: "StreamPasses", number: int) -> None:
        reader = passes.reader
        self._share, self._shared, self._name = reader.share, reader.shared, reader.name
        self.is_open_ended = not self._share.splits_itself
        self.has_own_length = self._share.splits_itself and self._share.plan.uneven == "keep"
        self._start, self._passes, self._number, self._began_s = start, passes, number, perf_counter()
        # The latest notes, by reader.
        self._notes: dict[int, deque[NotedBatch]] = defaultdict(partial(deque, maxlen=passes.ahead + 2))

    def chunks(self) -> Iterator[Sequence[None]]:
        """Yield indices; readers leave out the items that were taken before."""
        return repeat(_INDICES)

    def ends_within(self, items: int) -> bool:
        """Return True: nothing has to be drawn here to know what is left."""
        return True

    def keep(self, note: NotedBatch) -> None:
        """Keep the note of a batch that the loop is given."""
        self._notes[note.worker_index].append(note)

    # ---- what readers have reported by now ----

    @property
    def reported(self) -> ReportedPass:
        """What the readers have reported of the pass."""
        return self._shared.reported(self._number)

    @property
    def is_in_parts(self) -> bool:  # type: ignore[override]  # readers report it
        """Whether several readers read a part each; False while that is unknown."""
        return self.reported.is_in_parts

    def lengths_found(self) -> Sequence[int | None]:
        """Return how many items the stream has, or each reader's part of it; None where no reader came to the end."""
        return self.reported.lengths_found

    def parts(self, taken: int) -> Sequence[Part]:
        """Return what the pass is over: one stream, or readers' parts, from the one whose turn is first."""
        return self.reported.parts(taken, self._start.taken)

    def most_when_found(self, schedule: Callable[[], Schedule], batches: int, *, may_end: bool) -> int | None:
        """Wait for readers to find the end, and return how many batches the largest share then has; None if unknown."""
        # Readers read on while the last batches are used, so the end is found in a moment.
        until = monotonic() + (_ENDS_S if may_end else 0)
        while (most := schedule().most_batches) is None and monotonic() < until:
            sleep(0.005)
        if most is None and may_end:
            raise messages.unknown_ends(self._name, batches, self._share.readers, _ENDS_S)
        return most

    # ---- what ranks, and this rank's readers, compare ----

    @property
    def marks(self) -> Marks:
        """What returns the digests of names that readers have reported."""
        return lambda: self.reported.digests()

    @property
    def number_marks(self) -> Marks:
        """What returns the digests of numbers."""
        return lambda: self.reported.digests(NUMBERS)

    def require_one_order(self) -> None:
        """Raise RankMismatchError if this rank's readers should read one stream, and read others.

        Warns:
            RankMismatchWarning: They read items of the same names and with other numbers.
        """
        reported = self.reported
        if (found := reported.readers_differ()) is not None:
            why = self._passes.monitor.rules.why_broken("order")
            raise RankMismatchError(messages.readers_differ(self._name, "in other orders", *found, why))
        if (found := reported.readers_differ(NUMBERS)) is not None and self._passes.may_say("numbers"):
            why = messages.why_numbers_differ(self._name)
            text = messages.readers_differ(self._name, "with other numbers", *found, why)
            warnings.warn(text, RankMismatchWarning, stacklevel=2)

    def note_first_batch(self) -> None:
        """Warn that the ranks compare no more than the number of the items, if nothing names those read so far."""
        if self.reported.names_nothing:
            _warn_of_names(self._passes, "its items have no string, number or tensor in memory")

    def note_loop_end(self) -> None:
        """Warn if all items have one name; and if reading took most of a pass, log what would read less."""
        reported, share = self.reported, self._share
        if reported.names_all_alike:
            _warn_of_names(self._passes, "all of its items have the same strings and numbers")
        self._passes.forget_resumed(self._number)  # persistent workers keep the sampler's iterator, which has no end
        ranks, took_s = share.plan.num_replicas, perf_counter() - self._began_s
        is_whole = self._start.is_at_epoch_start and None not in reported.lengths
        # by_worker divides no batches.
        reads_too_much = is_whole and ranks > 1 and reported.is_in_parts and share.batch_plan is None
        if reads_too_much and reported.spent_s > max(took_s / 2, _LONG_S) and self._passes.may_say("by_worker"):
            items = sum(filter(None, reported.lengths))
            logger.warning(messages.reads_too_much(self._name, ranks, items, reported.spent_s, took_s))

    # ---- positions ----

    def position_after(self, position: Position, batches: int, schedule: Callable[[], Schedule]) -> Position:
        """Return the position after this many batches.

        Raises:
            StateError: No state can describe it.
        """
        start, share = self._start, self._share
        if not batches:
            return start if len(start.taken) > 1 else replace(position, states=start.states)
        if not share.splits_itself:
            return position_of_parts(position, start, batches, schedule(), self.reported, self._notes, self._name)
        if self.rounds is None:
            return position
        parts = share.readers * share.plan.num_replicas
        before = start.taken if len(start.taken) == parts else [0] * parts
        return position_of_rounds(position, batches, self.rounds, before, share.readers, share.batching.size)


def _warn_of_names(passes: "StreamPasses", why: str) -> None:
    """Warn once, on one rank, that the ranks cannot compare the items that were read."""
    if passes.reader.share.is_compared and passes.may_say("unnamed"):
        warnings.warn(messages.cannot_be_named(passes.name, why), StreamOrderWarning, stacklevel=2)
