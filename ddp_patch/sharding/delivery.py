"""What the training loop was given of a pass: batches, an end, an error; and what the ranks compare of these."""

from typing import Any

from ddp_patch.loaders.overlap import Sketch
from ddp_patch.orders.chunks import State
from ddp_patch.ranks.pass_facts import MORE_THAN_A_LOOK, BegunPass, Digests, Progress, Stage, next_count
from ddp_patch.ranks.pass_monitor import PassMonitor
from ddp_patch.sharding.item_sources import ItemSource
from ddp_patch.sharding.saved_state import NotedBatch


class Items:
    """What is known of the items of a pass: nothing, where a loader was sharded before.

    Args:
        source: The source of the items.

    Attributes:
        source: As given.
    """

    def __init__(self, source: ItemSource[Any]) -> None:
        self.source: ItemSource[Any] = source

    def slack(self) -> int:
        """Return how many batches more one rank may have than another."""
        return 0

    def drawn_by_all(self, batches: int) -> int | None:
        """Return how many items all ranks have drawn after so many batches, at least; None if all of them."""
        return None

    def are_all_in(self, batches: int | None) -> bool:
        """Return whether so many batches have all items; None stands for batches that no iterator counts."""
        return True

    def asked_for(self, state: State) -> tuple[int, int, State]:
        """Return the least and most batches that were asked for, and the state, where no iterator counts batches."""
        return 0, 0, state


class Delivery:
    """What the training loop was given of a pass, and what the ranks compare of these batches.

    The iterator around torch's records each batch, the end, and an error.

    Args:
        monitor: Compares the passes over the loader.
        items: What is known of the pass's items.

    Attributes:
        state: What the loop has seen of the pass: RUNNING; LEFT, when an iterator of the user's ended before the pass;
            ENDED; or FAILED, when the loop was given an error instead of a batch, and no batch since.
        batches: How many batches the loop was given, without those that workers fetched ahead; None if no iterator
            counts them.
        is_interleaved: Whether an iterator of an earlier pass gave batches while this pass was the latest.
        next_comparison: After how many batches the ranks are compared.
    """

    def __init__(self, monitor: PassMonitor, items: Items) -> None:
        self.state: State = State.RUNNING
        self.batches: int | None = None
        self.is_interleaved: bool = False
        self.next_comparison: int = 2
        self._items, self._source = items, items.source
        self._monitor = monitor
        self._begun: BegunPass | None = None

    def begin_pass(self, epoch: int, item: int = 0, sketch: Sketch | None = None) -> None:
        """Record that the pass begins: over which epoch, at which item, and with which notes of its sampler, if any."""
        digests = Digests(self._source.marks, self._source.number_marks)
        self._begun = self._monitor.begin(epoch, item, self.progress, digests, sketch)

    def begin_loop(self) -> None:
        """Record that a loop begins to take batches, which are counted."""
        self.batches = 0
        if self.state is State.FAILED:
            self.state = State.RUNNING

    def add(self, note: NotedBatch | None = None) -> None:
        """Record that the loop was given a batch, with the worker's note. This is called in each step."""
        if note is not None:
            self._source.keep(note._replace(batch=None))
        if self.batches is None:
            return
        self.batches = delivered = self.batches + 1
        if delivered == 1:
            self._source.note_first_batch()
        if (begun := self._begun) is None:
            return
        if begun.stage is Stage.REPORTS:
            begun.report(self.progress())
        if delivered <= MORE_THAN_A_LOOK:
            self._monitor.numbers.goes_on(begun)
        if self._is_open_ended:
            self._monitor.give_step(begun, delivered)
        if delivered >= self.next_comparison:
            self.compare()

    def note_samples(self, batch: Any) -> None:
        """Record the samples of a batch that the loop is about to be given."""
        if self._begun is not None and self._monitor.parts is not None:
            self._monitor.parts.note_batch(batch, self._begun.sketch)

    def interleave(self) -> None:
        """Record that an iterator of an earlier pass gave a batch."""
        self.is_interleaved = True

    def lose_count(self) -> None:
        """Record that the loop is given batches after an error: it is not known which batches."""
        self.state, self.batches = State.RUNNING, None
        self._report_progress()

    def fail(self) -> None:
        """Record that the loop was given an error of the loader's instead of a batch."""
        self.state = State.FAILED
        self._report_progress()
        self._monitor.report(self._begun)  # other ranks should not have to wait for this rank's next comparison

    def end(self) -> None:
        """Record that the loop has seen an end: the pass's, or before it the end of an iterator of the user's.

        Raises:
            RankMismatchError: As ``PassMonitor.compare``.
        """
        is_whole = self._items.are_all_in(self.batches)
        self.state = State.ENDED if is_whole else State.LEFT
        self.compare(at_end=True)
        if is_whole:
            if self._begun is not None and self._is_open_ended and self.batches is not None:
                self._monitor.end_steps(self._begun, self.batches)
            if self._begun is not None:
                self._monitor.end_whole(self._begun)
            self._source.note_loop_end()

    def progress(self) -> Progress:
        """Return how many batches the loop was given, and what is known of the pass."""
        given, state = self.batches, self.state
        least, most, state = (given, given, state) if given is not None else self._items.asked_for(state)
        slack = None if self._has_own_length else self._items.slack()
        return Progress(least, most, state, slack, self._items.drawn_by_all(least))

    @property
    def _has_own_length(self) -> bool:
        """Whether other ranks may have more or fewer batches in the pass.

        Where no iterator counts batches, workers that have come to the end are asked for more than there is.
        """
        return self._source.has_own_length or (self._source.is_endless and self.batches is None)

    @property
    def _is_open_ended(self) -> bool:
        """Whether another rank's stream may be longer, which no rank knows before the end."""
        return self._source.is_open_ended and not self._has_own_length

    def compare(self, *, at_end: bool = False) -> None:
        """Compare the pass with the other ranks'.

        Raises:
            RankMismatchError: As ``PassMonitor.compare``.
        """
        self._report_progress()
        self._source.require_one_order()
        count = None if at_end else self.next_comparison
        if not at_end:
            self.next_comparison = next_count(max(self.next_comparison, self.batches or 0))
        self._monitor.compare(self._begun, count)

    def _report_progress(self) -> None:
        """Report how far the pass has come, where nobody asks it any more: another pass has begun since."""
        if self._begun is not None and self._begun.stage is Stage.REPORTS:
            self._begun.report(self.progress())
