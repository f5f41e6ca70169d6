"""One pass over a rank's share of an epoch. It owns its position: what was given, what is left, how it ends."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from ddp_patch.orders.chunks import IterationProgress
from ddp_patch.plan import Batching, Consumed, Plan
from ddp_patch.ranks.log import MORE_THAN_A_LOOK, LoggedPass, Marks, Progress
from ddp_patch.ranks.pass_monitor import PassMonitor
from ddp_patch.ranks.records import State
from ddp_patch.schedule import Part, Schedule, Sizes
from ddp_patch.sharding.balancing import BatchDivider
from ddp_patch.sharding.item_sources import ItemSource
from ddp_patch.sharding.sampler_states import SamplerStates
from ddp_patch.sharding.saved_position import BatchNote, Position, States, split_consumed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Pass", "PassContext", "SamplerPass"]


T = TypeVar("T")
R = TypeVar("R")

# What a dataset holds is looked at after each of so many first batches, and at the end: reading may change it.
_READS = 2


@dataclass(frozen=True, slots=True)
class PassContext:
    """What all passes over a loader have in common.

    Attributes:
        plan: Which positions of the stream are this rank's.
        batching: How the loader makes batches of its items.
        batch_plan: The rank's share of each batch, where batches are divided; otherwise None.
        sampler_states: The objects whose generators the samplers draw from.
        monitor: Compares the passes with the other ranks'.
        batches_ahead: How many batches the loader's workers fetch before they are taken.
        stream_length: Returns how many items the whole stream has in an epoch, as its sampler or dataset says; None if
            that is not known.
    """

    plan: Plan
    batching: Batching
    batch_plan: Plan | None
    sampler_states: SamplerStates
    monitor: PassMonitor
    batches_ahead: int
    stream_length: Callable[[int], int | None]


class Pass(IterationProgress, Generic[T]):
    """A pass over this rank's share of an epoch, or of the rest of one. It changes by its methods alone.

    Args:
        start: Where it begins.
        context: What all passes over the loader have in common.
        digest: The digests of what it draws, for the ranks to compare; None if they compare none.

    Attributes:
        start: Where it began.
        consumed_before: What other numbers of ranks had taken of the epoch; the pass is over the rest.
        batches_delivered: How many batches the training loop was given, without those that workers fetched ahead;
            None if nobody counts them.
        loop_saw_end: Whether the loop has seen the end.
        has_failed: Whether the loop was given an error of the loader's instead of a batch, and nothing since.
        is_cut_short: Whether the loop was told of an end that is none.
        is_interleaved: Whether an iterator of an earlier pass gave batches while this was the latest one.
        sizes: How many samples each item had, before division; None if nobody needs that.
    """

    sizes: Sizes | None = None

    def __init__(
        self,
        start: Position,
        context: PassContext,
        digest: Marks | None = None,
    ) -> None:
        before, skip = split_consumed(start.consumed, context.plan.num_replicas)
        super().__init__(skip)
        self.start: Position = start
        self.consumed_before: Consumed = before
        self.batches_delivered: int | None = None
        self.loop_saw_end: bool = False
        self.has_failed: bool = False
        self.is_cut_short: bool = False
        self.is_interleaved: bool = False
        self._plan, self._batching, self._batch_plan = context.plan, context.batching, context.batch_plan
        self._sampler_states, self._monitor = context.sampler_states, context.monitor
        self._batches_ahead, self._stream_length = context.batches_ahead, context.stream_length
        self._digest = digest
        self._logged: LoggedPass | None = None
        self._next_comparison = 2

    # ---- what differs between samplers and workers ----

    @property
    def length(self) -> int | None:
        """How many items all ranks share in it, once its end was found; None if another rank may not have found it."""
        return None

    @property
    def has_own_length(self) -> bool:
        """Whether other ranks may have more or fewer batches in it."""
        return False

    @property
    def is_drawn_at_once(self) -> bool:
        """Whether the whole epoch is drawn before the first item is given."""
        return False

    @property
    def origins(self) -> "NDArray[np.int64] | None":
        """The positions of this rank's items (or samples of divided batches), without padding and skipped ones.

        They are positions in the stream of one process, in the order in which the items are given. If batches are
        divided, they count from the first that this pass gives. None if they follow from the plan.
        """
        return None

    @property
    def sizes_of_all(self) -> Sizes | None:
        """How many samples each item of all ranks has; None if this rank does not see them, or nobody needs that."""
        return None

    def _chunks(self) -> Iterator[Sequence[T]]:
        """Yield this rank's items in order, but for those taken before, in parts; some may be empty."""
        raise NotImplementedError

    def ends_within(self, items: int) -> bool:
        """Draw up to the end if it is at most this many items of the share away, and return whether it is.

        Then the samplers hold what the epoch leaves in them. Return False, too, where one rank would know and another
        not.
        """
        raise NotImplementedError

    @property
    def resumed_elsewhere(self) -> int:
        """How many items it leaves out because another package's loader resumed within it."""
        return 0

    def worker_saw_end(self) -> bool:
        """Return whether the end was found elsewhere, so that the number of items given says nothing."""
        return False

    # ---- what it is ----

    @property
    def epoch(self) -> int:
        """Which epoch it is over."""
        return self.start.epoch

    @property
    def is_inactive(self) -> bool:
        """Whether nothing more will be asked for; persistent workers keep a pass that the loop has seen the end of."""
        return self.loop_saw_end or super().is_inactive

    @property
    def begins_at(self) -> str:
        """Where it begins, for the ranks to compare."""
        return " + ".join([*(f"{ranks} x {taken}" for ranks, taken in self.consumed_before), str(self.skip)])

    @property
    def likely_length(self) -> int | None:
        """How many items all ranks share in it: as found; or as the sampler or dataset says; or None."""
        if self.length is not None:
            return self.length
        length = self._stream_length(self.epoch)
        return None if length is None else len(self._plan.rest(length, self.consumed_before))

    @property
    def batches(self) -> int:
        """How many batches it has given; if nobody counts them, with those that workers fetched ahead."""
        return self._batches_asked() if self.batches_delivered is None else self.batches_delivered

    def _batches_asked(self) -> int:
        return self._batching.count(self.items_taken - self.skip)

    def set_batching(self, batching: Batching) -> None:
        """Record how a loader makes batches of its items, whose sampler was wrapped before there was a loader."""
        self._batching = batching

    # ---- its progress ----

    def runs(self) -> Iterator[Iterator[T]]:
        """Yield this rank's items in runs, from when the first is asked for."""
        self.begin()
        try:
            whole = self.most_batches
            self._logged = self._monitor.begin(self.epoch, self.begins_at, self.progress, self._digest, whole)
            for chunk in self._chunks():
                run = self.give(chunk)
                yield from self._compared(run) if self._monitor.is_on else [run]
            self.end()
            self._sampler_states.end(self.epoch)
            if self.batches_delivered is None:
                self._tell_log()
                self._monitor.compare(at_end=True)
        finally:
            self.abandon()

    def _compared(self, run: Iterator[R]) -> Iterator[Iterator[R]]:
        """Cut a run where the ranks compare their progress, as long as nobody counts the batches of the loop."""
        size, first = self._batching.size, self.skip + self._batches_ahead * self._batching.size
        while self.batches_delivered is None and (moment := first + self._next_comparison * size) < self.items_given:
            yield islice(run, moment - self.items_taken)
            if self.batches_delivered is None:
                self._tell_log()
                self._compare(self._next_comparison)
        yield run

    def _tell_log(self) -> None:
        """Tell the log how far this has come, where it no longer asks: another pass has begun since."""
        if self._logged is not None and self._logged.is_told:
            self._logged.tell(self.progress())

    def _compare(self, batches: int) -> None:
        self._next_comparison = self._monitor.next_comparison(batches)
        self._monitor.compare()

    def progress(self) -> Progress:
        """Return how many batches the loop was given, and what is known of the pass."""
        state = State.FAILED if self.has_failed else State.LEFT if self.is_cut_short else State.RUNNING
        if self.loop_saw_end:
            state = State.ENDED
        if (given := self.batches_delivered) is not None:
            return Progress(given, given, state, self.has_own_length)
        asked = max(0, self.items_taken - self.skip)
        least = max(0, asked // self._batching.size - self._batches_ahead)
        if self.is_ended and not self._batches_ahead and state is State.RUNNING:
            least, state = self._batches_asked(), State.ENDED
        return Progress(least, self._batches_asked(), state, self.has_own_length)

    # ---- what the training loop was given ----

    def note_loop(self) -> None:
        """Record that a loop begins to take batches, which are counted."""
        self.batches_delivered, self.has_failed = 0, False

    def deliver(self, note: BatchNote | None = None) -> None:
        """Record that the loop was given a batch, and what the worker that made it noted. It is called in each step."""
        if self.batches_delivered is None:
            return
        self.batches_delivered = delivered = self.batches_delivered + 1
        if (logged := self._logged) is None:
            return
        if logged.is_told:
            self._tell_log()
        if delivered <= MORE_THAN_A_LOOK:
            self._monitor.goes_on(logged)
        if delivered <= _READS:
            self._monitor.note_read(logged)
        if self._is_open_ended:
            self._monitor.give_step(logged, delivered)
        if delivered >= self._next_comparison:
            self._compare(delivered)

    def lose_count(self) -> None:
        """Record that the loop is given batches after an error: nobody knows which."""
        self.has_failed, self.batches_delivered = False, None
        self._tell_log()

    @property
    def _is_open_ended(self) -> bool:
        """Whether another rank's stream may be longer, and no rank know it before the end."""
        return not (self.is_drawn_at_once or self.has_own_length)

    def note_failed(self) -> None:
        """Record that the training loop was given an error of the loader's instead of a batch."""
        self.has_failed = True
        self._tell_log()

    def note_end_seen(self) -> None:
        """Record that the training loop has seen the end, and compare.

        Raises:
            RankMismatchError: As ``PassMonitor.compare``.
        """
        self.loop_saw_end = True
        self._tell_log()
        if self._logged is not None:
            self._monitor.note_read(self._logged)
        self._monitor.compare(at_end=True)
        if self._logged is not None and self._is_open_ended and self.batches_delivered is not None:
            self._monitor.end_steps(self._logged, self.batches_delivered)

    def note_stopped(self) -> None:
        """Record that the loop was told of an end: of the pass, or none, where a dataset raised StopIteration.

        Raises:
            RankMismatchError: As above.
        """
        if self._is_whole():
            self.note_end_seen()
        else:
            self.is_cut_short = True
            self._tell_log()
            self._monitor.compare(at_end=True)

    def _is_whole(self) -> bool:
        """Return whether the loop was given all batches, as far as this rank can tell."""
        return True

    def note_interleaved(self) -> None:
        """Record that an iterator of an earlier pass gave a batch."""
        self.is_interleaved = True

    # ---- its batches and its position ----

    def schedule(self) -> Schedule:
        """Return its batches, with the ends that this rank has found so far."""
        found = self.length
        length = self.likely_length if found is None and self._plan.needs_length else found
        return self._schedule_of([Part(self.skip, length, least_items=self.items_given)])

    def whole_schedule(self) -> Schedule | None:
        """Return its batches if this rank has reached its end, otherwise None."""
        length = self.length if self.is_ended else self.likely_length
        # A loop that takes len() batches never asks for the end.
        if length is None or not (self.is_ended or self.items_taken >= len(self._plan.share(length))):
            return None
        return self._schedule_of([Part(self.skip, length)])

    def _schedule_of(self, parts: Sequence[Part]) -> Schedule:
        return Schedule(self._plan, self._batching, parts, self.sizes, self.sizes_of_all, self._batch_plan)

    def most_batches(self) -> int | None:
        """Return how many batches the largest share has in it if every rank knows that; otherwise None."""
        return Schedule(self._plan, self._batching, [Part(self.skip, self.likely_length)]).most_batches

    def most_batches_known_here(self, batches: int) -> int | None:
        """Return how many batches the largest share has in it, as far as this rank knows; None if it does not.

        Args:
            batches: How many were given. Where workers find the end, these are asked whether they are all.
        """
        return self.most_batches()

    def is_over_after(self, batches: int, *, on_this_rank: bool = False) -> bool:
        """Return whether nothing is left after this many batches, as every rank knows; or, ``on_this_rank``, this one.

        Raises:
            StateError: They may be all, and this rank cannot know it yet.
        """
        is_over = self.loop_saw_end and batches == self.batches  # only a rank with fewer batches than others can know
        if not is_over and batches != (self.most_batches_known_here(batches) if on_this_rank else self.most_batches()):
            return False
        # If more were given, the length is wrong.
        unused = (self._batching.size - 1 if self._batching.drop_last else 0) - self._prepared_beyond(batches)
        return unused >= 0 and self.ends_within(unused)

    def _prepared_beyond(self, batches: int) -> int:
        """Return how many items of the share were given beyond so many batches."""
        return self.items_given - self.skip - batches * self._batching.size

    def position(self, taken: int) -> Position:
        """Return the position after this many items of the share were taken."""
        consumed: Consumed = (*(pair for pair in self.consumed_before if pair[1]), (self._plan.num_replicas, taken))
        return Position(self.epoch, (consumed,), states=self.start.states)

    def position_after(self, batches: int) -> Position:
        """Return the position after this many of its batches.

        Raises:
            StateError: No state can describe it.
        """
        return self.position(self.skip + batches * self._batching.size)

    def position_at_end(self, states: States) -> Position:
        """Return the position after everything was taken, when the samplers hold ``states``."""
        return replace(self.position(self.items_taken), states=states, turn=None)


class SamplerPass(Pass[T]):
    """A pass over a sampler, whose items are drawn in this process or come from the leader.

    Args:
        start: As in ``Pass``, and so are ``context`` and ``digest``.
        context: As above.
        source: How it gets its items.
        sizes: Records how many samples each item has; None if nobody needs that.
        divide: Returns this rank's part of an item; None if ranks take whole items.
        on_length_known: Called with how many items all ranks share in it, once that is known and before a rank is given
            items of the incomplete round.

    Attributes:
        source: As given.
    """

    def __init__(
        self,
        start: Position,
        context: PassContext,
        source: ItemSource[T],
        *,
        sizes: Sizes | None,
        divide: BatchDivider | None,
        on_length_known: Callable[[int], object],
        digest: Marks | None,
    ) -> None:
        super().__init__(start, context, digest)
        self.source: ItemSource[T] = source
        self.sizes = sizes
        self._divide, self._on_length_known = divide, on_length_known

    @property
    def length(self) -> int | None:
        """How many items all ranks share in it, once its end was found."""
        return self.source.length

    @property
    def is_drawn_at_once(self) -> bool:
        """Whether the whole epoch is drawn before the first item is given."""
        return self.source.is_drawn_at_once

    @property
    def sizes_of_all(self) -> Sizes | None:
        """How many samples each item of all ranks has; None if this rank does not see them, or nobody needs that."""
        return self.source.sizes

    @property
    def origins(self) -> "NDArray[np.int64] | None":
        """The positions of this rank's items, or samples, in the stream of one process; see ``Pass``."""
        if self._divide is not None:
            return self._divide.origins(self.sizes or ())
        return None if self.source.origins is None else self.source.origins.positions()

    def _chunks(self) -> Iterator[Sequence[T]]:
        for chunk in self.source.chunks(self.skip):
            if self.length is not None:
                self._on_length_known(self.length)
            part = chunk if self.sizes is None else list(self.sizes.recording(chunk))
            yield part if self._divide is None else list(map(self._divide, part))

    def _is_whole(self) -> bool:
        given = self.batches_delivered
        return given is None or (self.is_ended and given >= self._batches_asked())

    def draw_to_end(self) -> None:
        """Draw what nobody will ask for, so that the samplers' generators are where the epoch leaves them."""
        for _ in self.source.chunks(self.skip):
            pass

    def ends_within(self, items: int) -> bool:
        """Draw up to the end if it is at most this many items away, and return whether it is; see ``Pass``."""
        return self.is_ended or self.source.ends_within(items)

    def position(self, taken: int) -> Position:
        """Return the position after this many items of the share were taken."""
        found = super().position(taken)
        return replace(found, states=self.source.snapshot_before or found.states)

    def position_at_end(self, states: States) -> Position:
        """Return the position after everything was taken, when the samplers hold ``states``."""
        return super().position_at_end(self.source.snapshot_after or states)
