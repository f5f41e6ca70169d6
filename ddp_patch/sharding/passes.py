"""One pass: what the training loop is given of it, and how it ends; of a rank's share its items and positions, too."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddp_patch.loaders.overlap import Sketch
from ddp_patch.orders.chunks import State
from ddp_patch.positions_and_padding import Batching, Part, Schedule, Sizes, require_steps
from ddp_patch.ranks.pass_facts import MORE_THAN_A_LOOK, BegunPass, PassMonitor, Progress, next_count
from ddp_patch.sharding.item_sources import ItemSource
from ddp_patch.sharding.saved_state import NotedBatch, Position, States

if TYPE_CHECKING:
    from ddp_patch.sharding.epochs import Passes

__all__ = ["Pass", "WatchedPass"]


T = TypeVar("T")
R = TypeVar("R")


class WatchedPass:
    """A pass as the training loop is given it, which the ranks compare.

    Args:
        monitor: Compares the passes over the loader.
        source: What is known of its items.

    Attributes:
        source: As given.
        state: What the loop has seen of it: RUNNING; LEFT, when it was told of an end that is none; ENDED; or FAILED,
            when it was given an error of the loader's instead of a batch, and nothing since.
        batches_delivered: How many batches the loop was given, without those that workers fetched ahead; None if
            nobody counts them.
        is_interleaved: Whether an iterator of an earlier pass gave batches while this was the latest one.
    """

    def __init__(self, monitor: PassMonitor, source: ItemSource[Any]) -> None:
        self.source: ItemSource[Any] = source
        self.state: State = State.RUNNING
        self.batches_delivered: int | None = None
        self.is_interleaved: bool = False
        self._monitor = monitor
        self._logged: BegunPass | None = None
        self._next_comparison = 2

    def begin_log(self, epoch: int, begins_at: str, sketch: Sketch | None = None) -> None:
        """Log that it begins: over which epoch, and where in it; and what its sampler notes of it, if that does."""
        marks, of_numbers = self.source.marks, self.source.number_marks
        self._logged = self._monitor.begin(epoch, begins_at, self.progress, marks, sketch, of_numbers)

    def begin_loop(self) -> None:
        """Record that a loop begins to take batches, which are counted."""
        self.batches_delivered = 0
        if self.state is State.FAILED:
            self.state = State.RUNNING

    def deliver(self, note: NotedBatch | None = None) -> None:
        """Record that the loop was given a batch, and what the worker that made it noted. It is called in each step."""
        if note is not None:
            self.source.keep(note._replace(batch=None))
        if self.batches_delivered is None:
            return
        self.batches_delivered = delivered = self.batches_delivered + 1
        if delivered == 1:
            self.source.note_first_batch()
        if (logged := self._logged) is None:
            return
        if logged.is_told:
            self._tell_log()
        if delivered <= MORE_THAN_A_LOOK:
            self._monitor.goes_on(logged)
        if self._is_open_ended:
            self._monitor.give_step(logged, delivered)
        if delivered >= self._next_comparison:
            self._compare()

    def note_samples(self, batch: Any) -> None:
        """Record the samples of a batch that the loop is about to be given."""
        if self._logged is not None and self._monitor.parts is not None:
            self._monitor.parts.note_batch(batch, self._logged.sketch)

    def lose_count(self) -> None:
        """Record that the loop is given batches after an error: nobody knows which."""
        self.state, self.batches_delivered = State.RUNNING, None
        self._tell_log()

    def fail(self) -> None:
        """Record that the loop was given an error of the loader's instead of a batch."""
        self.state = State.FAILED
        self._tell_log()
        self._monitor.report(self._logged)  # the others may not wait for this rank's next comparison

    def end_loop(self) -> None:
        """Record that the loop was told of an end: of the pass, or before it, by an iterator of the user's.

        Raises:
            RankMismatchError: As ``PassMonitor.compare``.
        """
        is_whole = self._is_whole
        self.state = State.ENDED if is_whole else State.LEFT
        self._compare(at_end=True)
        if is_whole:
            if self._logged is not None and self._is_open_ended and self.batches_delivered is not None:
                self._monitor.end_steps(self._logged, self.batches_delivered)
            if self._logged is not None:
                self._monitor.end_whole(self._logged)
            self.source.note_loop_end()

    @property
    def _is_whole(self) -> bool:
        """Whether the loop was given all of it, when it is told of an end."""
        return True

    def progress(self) -> Progress:
        """Return how many batches the loop was given, and what is known of the pass."""
        given = self.batches_delivered or 0
        return Progress(given, given, self.state, self._slack, self._drawn_by_all(given))

    @property
    def _slack(self) -> int | None:
        """How many batches more one rank may have in it than another; None if each has its own number."""
        return None if self._has_own_length else 0

    def _drawn_by_all(self, batches: int) -> int | None:
        """Return how many items all ranks have drawn after so many batches, at least; None if all of them."""
        return None

    @property
    def _has_own_length(self) -> bool:
        """Whether other ranks may have more or fewer batches in it.

        Where nobody counts them, more is asked of workers than there is, once they have come to the end.
        """
        return self.source.has_own_length or (self.source.is_endless and self.batches_delivered is None)

    @property
    def _is_open_ended(self) -> bool:
        """Whether another rank's stream may be longer, and no rank know it before the end."""
        return self.source.is_open_ended and not self._has_own_length

    def _compare(self, *, at_end: bool = False) -> None:
        self._tell_log()
        self.source.require_one_order()
        count = None if at_end else self._next_comparison
        if not at_end:
            self._next_comparison = next_count(max(self._next_comparison, self.batches_delivered or 0))
        self._monitor.compare(self._logged, count)

    def _tell_log(self) -> None:
        """Tell the log how far this has come, where it no longer asks: another pass has begun since."""
        if self._logged is not None and self._logged.is_told:
            self._logged.tell(self.progress())


class Pass(WatchedPass, Generic[T]):
    """A pass over this rank's share of an epoch, or of the rest of one.

    Args:
        start: Where it begins.
        passes: All passes over the loader, and what these have in common.
        source: How it gets its items.
        sizes: Records how many samples each item has, before division; None if nobody needs that.
        divide: Returns this rank's part of an item; None if ranks take whole items.

    Attributes:
        start: Where it began.
        taken_before: How many items of the epoch all ranks had taken by then; the pass is over the rest.
        items_given: How many items were given.
        drawn: How far its items were asked for: NEW, RUNNING, LEFT or ENDED.
    """

    source: ItemSource[T]

    def __init__(
        self,
        start: Position,
        passes: "Passes[T]",
        source: ItemSource[T],
        *,
        sizes: Sizes | None = None,
        divide: Callable[[T], T] | None = None,
    ) -> None:
        super().__init__(passes.monitor, source)
        self.start: Position = start
        self.taken_before: int = start.taken_of_all
        self.items_given: int = 0
        self._run: Iterator[T] = iter(())
        self.drawn: State = State.ENDED if start.is_ended else State.NEW
        self._passes, self._sizes, self._divide = passes, sizes, divide
        self._has_noted_length = False

    # ---- what it is ----

    @property
    def epoch(self) -> int:
        """Which epoch it is over."""
        return self.start.epoch

    @property
    def items_taken(self) -> int:
        """How many of the items given were taken."""
        return self.items_given - length_hint(self._run)

    @property
    def is_ended(self) -> bool:
        """Whether all items were given."""
        return self.drawn is State.ENDED

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be asked for; persistent workers keep a pass that the loop has seen the end of."""
        return self.state is State.ENDED or self.drawn in {State.LEFT, State.ENDED}

    @property
    def begins_at(self) -> str:
        """Where it begins, for the ranks to compare."""
        return str(self.taken_before)

    @property
    def likely_length(self) -> int | None:
        """How many items the epoch has: as found; or as the sampler or dataset says; or None."""
        if self.source.length is not None:
            return self.source.length
        length = self._passes.length_if_any(self.epoch)
        if length is not None:
            return length
        # Before, one rank's workers may have found it and another's not.
        return self.source.lengths_found()[0] if self.state is State.ENDED else None

    def batches(self, batching: Batching) -> int:
        """Return how many batches it has given; if nobody counts them, with those that workers fetched ahead."""
        return self._batches_asked(batching) if self.batches_delivered is None else self.batches_delivered

    def _batches_asked(self, batching: Batching) -> int:
        return batching.count(self.items_taken)

    # ---- its items ----

    def runs(self) -> Iterator[Iterator[T]]:
        """Yield this rank's items in runs, from when the first is asked for."""
        self.drawn = State.RUNNING
        try:
            self.begin_log(self.epoch, self.begins_at)
            for chunk in self.source.chunks():
                if self.source.length is not None and not self._has_noted_length:
                    self._note_length(self.source.length)
                items = self._own(chunk)
                self.items_given += len(items)
                self._run = run = iter(items)
                yield from self._compared(run) if self._monitor.is_on else [run]
            self.drawn = State.ENDED
            self._passes.sampler_states.end(self.epoch)
            if self.batches_delivered is None:
                self._compare(at_end=True)
        finally:
            if not self.is_ended:
                self.drawn = State.LEFT

    def _note_length(self, length: int) -> None:
        """Refuse a length that cannot be, and an epoch without steps.

        It is called before a rank is given items of the incomplete round, so every rank comes to it at the same step.
        """
        self._has_noted_length = True
        passes, plan, batching = self._passes, self._passes.plan, self._passes.batching
        passes.note_length(self, length)
        if self.start.is_at_epoch_start:  # the rest of one may well have none
            require_steps(plan, batching, passes.name, [length])

    def _own(self, chunk: Sequence[T]) -> Sequence[T]:
        """Return what this rank gets of its items, and record their sizes where somebody needs these."""
        items = chunk if self._sizes is None else list(self._sizes.recording(chunk))
        return items if self._divide is None else list(map(self._divide, items))

    def _compared(self, run: Iterator[R]) -> Iterator[Iterator[R]]:
        """Cut a run where the ranks compare their progress, as long as nobody counts the batches of the loop."""
        size = self._passes.batching.size
        first = self._passes.batches_ahead * size
        while self.batches_delivered is None and (moment := first + self._next_comparison * size) < self.items_given:
            yield islice(run, moment - self.items_taken)
            if self.batches_delivered is None:
                self._compare()
        yield run

    def draw_rest(self, items: int) -> bool:
        """Draw what is left if that is at most this many items of the share, and return whether it is.

        Then the samplers hold what the epoch leaves in them.
        """
        if self.drawn is State.NEW:  # it resumed where nothing was left
            for _ in self.source.chunks():
                pass
        return self.source.ends_within(items)

    # ---- how far it has come ----

    def progress(self) -> Progress:
        """Return how many batches the loop was given, and what is known of the pass."""
        if self.batches_delivered is not None:
            return super().progress()
        passes, state = self._passes, self.state
        asked, most = self.items_taken, self._batches_asked(passes.batching)
        least = max(0, asked // passes.batching.size - passes.batches_ahead)
        if self.is_ended and not passes.batches_ahead and state is State.RUNNING:
            least, state = most, State.ENDED
        return Progress(least, most, state, self._slack, self._drawn_by_all(least))

    @property
    def _slack(self) -> int | None:
        return None if self._has_own_length else self._passes.slack

    def _drawn_by_all(self, batches: int) -> int | None:
        if not self.source.is_open_ended:  # all was drawn before the first item was given
            return None
        # Of several workers' parts each, items are counted in each.
        readers = len(self.source.parts(self.taken_before)) if self.source.is_in_parts else 1
        taken = batches // readers * self._passes.batching.size
        return self.taken_before + self._passes.plan.num_replicas * max(0, taken - 1)

    @property
    def _is_whole(self) -> bool:
        given = self.batches_delivered
        is_whole = self.source.is_endless or given is None
        return is_whole or (self.is_ended and (given or 0) >= self._batches_asked(self._passes.batching))

    # ---- its batches, as a loader makes them: its sampler may have been wrapped before there was one ----

    def schedule(self, batching: Batching) -> Schedule:
        """Return its batches, with the ends that this rank has found so far."""
        return self._schedule_of(batching, self.source.parts(self.taken_before))

    def whole_schedule(self, batching: Batching) -> Schedule | None:
        """Return its batches if this rank has reached its end, otherwise None."""
        if self.source.is_endless:
            schedule = self.schedule(batching)
            return None if schedule.count is None else schedule
        length = self.source.length if self.is_ended else self.likely_length
        # A loop that takes len() batches never asks for the end.
        if length is None or not (
            self.is_ended or self.items_taken >= len(self._passes.plan.share(length, self.taken_before))
        ):
            return None
        return self._schedule_of(batching, [Part(self.taken_before, length)])

    def _schedule_of(self, batching: Batching, parts: Sequence[Part]) -> Schedule:
        plan, batch_plan = self._passes.plan, self._passes.batch_plan
        return Schedule(plan, batching, parts, self._sizes, self.source.sizes, batch_plan)

    def draw_end_after(self, batches: int, batching: Batching, *, on_this_rank: bool = False) -> bool:
        """Draw to the end if nothing is left after this many batches, and return whether it is so.

        Args:
            batches: How many.
            batching: How the loader makes them.
            on_this_rank: Whether it is enough if this rank knows it, though others may not know it yet.

        Raises:
            StateError: They may be all, and this rank cannot know it yet.
        """
        # Only a rank with fewer batches than others can know.
        is_over = self.state is State.ENDED and batches == self.batches(batching)
        if not is_over:
            most = self._most_batches(batches, batching, on_this_rank=on_this_rank)
            if batches != most:
                return False
        unused = batching.size - 1 if batching.drop_last else 0
        if not self.source.is_endless:  # what was drawn ahead of these was drawn in this process
            unused -= self.items_given - batches * batching.size
        # If more were given, the length is wrong.
        return unused >= 0 and (self.is_ended or self.source.ends_within(unused))

    def _most_batches(self, given: int, batching: Batching, *, on_this_rank: bool) -> int | None:
        """Return how many batches the largest share has in it; None if that is not known when so many were given."""
        if self.source.rounds is not None:  # the ranks find the end together
            return None
        length, plan = self.likely_length, self._passes.plan
        left = None if length is None else max(0, length - self.taken_before)
        by_length = None if left is None else batching.count(plan.largest_share(left))
        most = by_length
        if self.source.is_in_parts:
            most = self.schedule(batching).most_batches if self.state is State.ENDED else None
        if most is None and on_this_rank and self.source.is_endless:
            may_end = by_length is not None and given >= by_length
            most = self.source.most_when_found(partial(self.schedule, batching), given, may_end=may_end)
        return most

    # ---- its position ----

    def position(self, items: int, batching: Batching) -> Position:
        """Return the position after this many items of the share were taken in the pass."""
        plan, start, before = self._passes.plan, self.start, self.taken_before
        taken = before + items * plan.num_replicas
        if self.source.length is not None:
            taken = max(before, min(taken, self.source.length))
        return Position(
            self.epoch,
            (taken,),
            steps=start.steps + batching.count(items),
            ranks=start.ranks if before else plan.num_replicas,
            order=self.source.order_up_to(taken) or (),
            states=replace(start.states, streams=()),
        )

    def position_after(self, batches: int, batching: Batching) -> Position:
        """Return the position after this many of its batches.

        Raises:
            StateError: No state can describe it.
        """
        position = self.position(batches * batching.size, batching)
        return self.source.position_after(position, batches, partial(self.schedule, batching))

    def position_at_end(self, states: States) -> Position:
        """Return the position after everything was taken, when the samplers hold ``states``."""
        return self.start if self.start.is_ended else Position(self.epoch, turn=None, states=states)
