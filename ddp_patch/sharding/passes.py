"""One pass over a rank's share of an epoch: its items, its deliveries to the loop, and its positions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.overlap import Sketch
from ddp_patch.positions_and_padding import Batching, Part, Schedule, Sizes, require_steps
from ddp_patch.ranks.pass_facts import MORE_THAN_A_LOOK, BegunPass, Progress, Stage, State, next_count
from ddp_patch.ranks.pass_monitor import PassMonitor
from ddp_patch.sharding.item_sources import ItemSource
from ddp_patch.sharding.saved_state import NotedBatch, Position, States

if TYPE_CHECKING:
    from ddp_patch.sharding.loader_passes import Passes


T = TypeVar("T")


class Items:
    """What a pass knows of its items; the base class knows nothing, for a loader that was sharded already.

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
        """Return how many items all ranks have drawn at least after some batches; None for all items."""
        return None

    def are_all_in(self, batches: int | None) -> bool:
        """Return whether some batches have all items; ``batches`` is None if no iterator counts."""
        return True

    def asked_for(self, state: State) -> tuple[int, int, State]:
        """Return the least and the most batches that were requested, and the state, if no iterator counts batches."""
        return 0, 0, state


class Delivery:
    """The deliveries of a pass to the training loop, and their comparison with the other ranks' deliveries.

    The iterator around torch's records each batch, the end, and an error.

    Args:
        monitor: Compares the passes over the loader.
        items: The items of the pass.

    Attributes:
        state: How far the loop has come: RUNNING; LEFT, if an iterator of the user's ended before the pass; ENDED; or
            FAILED, if the loop got an error instead of a batch, and no batch since.
        batches: How many batches the loop got, without prefetched batches; None if no iterator counts.
        is_interleaved: Whether an iterator of an earlier pass gave batches while this pass was the latest.
        next_comparison: The number of batches after which the ranks compare next.
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
        self._begun = self._monitor.begin(epoch, item, self.progress, self._source.marks, sketch)

    def begin_loop(self) -> None:
        """Record that a loop begins to take batches, which are counted."""
        self.batches = 0
        if self.state is State.FAILED:
            self.state = State.RUNNING

    def add(self, note: NotedBatch | None = None) -> None:
        """Record that the loop gets a batch, with the worker's note. This method is called in each step."""
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
            self._monitor.report_step(begun, delivered)
        if delivered >= self.next_comparison:
            self.compare()

    def note_samples(self, batch: Any) -> None:
        """Record the samples of a batch that the loop is about to be given."""
        if self._begun is not None and self._begun.sketch is not None:
            self._begun.sketch.add_batch(batch)

    def interleave(self) -> None:
        """Record that an iterator of an earlier pass gave a batch."""
        self.is_interleaved = True

    def lose_count(self) -> None:
        """Record that the loop gets batches after an error; which batches is unknown."""
        self.state, self.batches = State.RUNNING, None
        self._report_progress()

    def fail(self) -> None:
        """Record that the loop got an error of the loader's instead of a batch."""
        self.state = State.FAILED
        self._report_progress()
        with suppress(RankMismatchError):  # this rank raises an error already
            self._monitor.compare(self._begun)  # other ranks should not have to wait for the next comparison

    def end(self) -> None:
        """Record that the loop has seen an end: the end of the pass, or earlier the end of an iterator of the user's.

        Raises:
            RankMismatchError: As ``PassMonitor.compare``.
        """
        is_whole = self._items.are_all_in(self.batches)
        self.state = State.ENDED if is_whole else State.LEFT
        self.compare(at_end=True)
        if is_whole:
            if self._begun is not None and self._is_open_ended and self.batches is not None:
                self._monitor.wait_for_end(self._begun, self.batches)
            if self._begun is not None:
                self._monitor.wait_for_beginning(self._begun)
            self._source.note_loop_end()

    def progress(self) -> Progress:
        """Return how many batches the loop got, and how far the pass has come."""
        given, state = self.batches, self.state
        least, most, state = (given, given, state) if given is not None else self._items.asked_for(state)
        slack = None if self._has_own_length else self._items.slack()
        return Progress(least, most, state, slack, self._items.drawn_by_all(least))

    @property
    def _has_own_length(self) -> bool:
        """Whether other ranks may have more or fewer batches in the pass.

        If no iterator counts batches, the loader asks workers for more batches than there are.
        """
        return self._source.has_own_length or (self._source.is_endless and self.batches is None)

    @property
    def _is_open_ended(self) -> bool:
        """Whether another rank's stream may be longer. No rank knows this before the end."""
        return self._source.is_open_ended and not self._has_own_length

    def compare(self, *, at_end: bool = False) -> None:
        """Compare the pass with the other ranks' passes.

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
        """Report how far the pass has come, if another pass has begun since."""
        if self._begun is not None and self._begun.stage is Stage.REPORTS:
            self._begun.report(self.progress())


class RankItems(Items, Generic[T]):
    """This rank's items of a pass, as the source gives them.

    Args:
        start: Where the pass begins.
        passes: The passes over the loader.
        source: The source of the items.
        sizes: Records how many samples each item has, before division; None if no caller needs the sizes.
        divide: Returns this rank's part of an item; None if ranks take whole items.

    Attributes:
        source: As given.
        taken_before: How many items of the epoch all ranks had taken before.
        given: How many items were given.
        drawn: How far the items were drawn: NEW, RUNNING, LEFT or ENDED.
    """

    source: ItemSource[T]

    def __init__(
        self,
        start: Position,
        passes: "Passes[T]",
        source: ItemSource[T],
        sizes: Sizes | None,
        divide: Callable[[T], T] | None,
    ) -> None:
        super().__init__(source)
        self.taken_before: int = start.taken_of_all
        self.given: int = 0
        self.drawn: State = State.ENDED if start.is_ended else State.NEW
        self._start, self._passes, self._sizes, self._divide = start, passes, sizes, divide
        self._run: Iterator[T] = iter(())
        self._has_noted_length = False

    @property
    def taken(self) -> int:
        """How many of the given items were taken."""
        return self.given - length_hint(self._run)

    def runs(self, delivery: Delivery) -> Iterator[Iterator[T]]:
        """Yield the items in runs. The pass begins when the first item is requested.

        Args:
            delivery: The deliveries to the loop. If no iterator counts the loop's batches, the ranks compare the runs.
        """
        self.drawn = State.RUNNING
        try:
            delivery.begin_pass(self._start.epoch, self.taken_before)
            for chunk in self.source.chunks():
                if self.source.length is not None and not self._has_noted_length:
                    self._note_length(self.source.length)
                items = self._own(chunk)
                self.given += len(items)
                self._run = run = iter(items)
                yield from self._compared(run, delivery) if self._passes.monitor.is_on else [run]
            self.drawn = State.ENDED
            self._passes.sampler_states.end(self._start.epoch)
            if delivery.batches is None:
                delivery.compare(at_end=True)
        finally:
            if self.drawn is not State.ENDED:
                self.drawn = State.LEFT

    def _note_length(self, length: int) -> None:
        """Refuse an impossible length, and an epoch without steps.

        Every rank calls this method at the same step, before the items of the incomplete round.
        """
        self._has_noted_length = True
        passes, plan, batching = self._passes, self._passes.plan, self._passes.batching
        passes.note_length(self._start, length)
        if self._start.is_at_epoch_start:  # the rest of an epoch may well have no step
            require_steps(plan, batching, passes.name, [length])

    def _own(self, chunk: Sequence[T]) -> Sequence[T]:
        """Return this rank's part of each item, and record the items' sizes where a caller needs them."""
        items = chunk if self._sizes is None else list(self._sizes.recording(chunk))
        return items if self._divide is None else list(map(self._divide, items))

    def _compared(self, run: Iterator[T], delivery: Delivery) -> Iterator[Iterator[T]]:
        """Cut a run where the ranks compare their progress, as long as no iterator counts the loop's batches."""
        size = self._passes.batching.size
        first = self._passes.loader.batches_ahead * size
        while delivery.batches is None and (moment := first + delivery.next_comparison * size) < self.given:
            yield islice(run, max(0, moment - self.taken))  # a loop that went on after an error may be past it
            if delivery.batches is None:
                delivery.compare()
        yield run

    def draw_rest(self, items: int) -> bool:
        """Draw to the end if at most this many items of the share are left; return whether this is the case.

        The samplers are then in the state after the epoch.
        """
        if self.drawn is State.NEW:  # the pass resumed where nothing was left
            for _ in self.source.chunks():
                pass
        return self.source.ends_within(items)

    # ---- what is known of the items ----

    def slack(self) -> int:
        """Return how many batches more one rank may have than another."""
        return self._passes.slack

    def drawn_by_all(self, batches: int) -> int | None:
        """Return how many items all ranks have drawn at least after some batches; None for all items."""
        if not self.source.is_open_ended:  # all was drawn before the first item was given
            return None
        # Where several workers read a part each, a batch has the items of one part.
        readers = len(self.source.parts(self.taken_before)) if self.source.is_in_parts else 1
        taken = batches // readers * self._passes.batching.size
        return self.taken_before + self._passes.plan.num_replicas * max(0, taken - 1)

    def are_all_in(self, batches: int | None) -> bool:
        """Return whether some batches have all items; ``batches`` is None if no iterator counts."""
        if self.source.is_endless or batches is None:
            return True
        return self.drawn is State.ENDED and batches >= self._passes.batching.count(self.taken)

    def asked_for(self, state: State) -> tuple[int, int, State]:
        """Return the least and the most batches that were requested, and the state, if no iterator counts batches."""
        batching, ahead = self._passes.batching, self._passes.loader.batches_ahead
        least, most = max(0, self.taken // batching.size - ahead), batching.count(self.taken)
        if self.drawn is State.ENDED and not ahead and state is State.RUNNING:
            return most, most, State.ENDED
        return least, most, state


class Pass(Generic[T]):
    """A pass over this rank's share of an epoch, or of the rest of one: its batches, and the positions between them.

    Args:
        start: Where the pass begins.
        passes: The passes over the loader.
        source: The source of the items.
        sizes: Records how many samples each item has, before division; None if no caller needs the sizes.
        divide: Returns this rank's part of an item; None if ranks take whole items.

    Attributes:
        start: Where the pass began.
        source: As given.
        items: This rank's items.
        delivery: The deliveries to the loop.
    """

    def __init__(
        self,
        start: Position,
        passes: "Passes[T]",
        source: ItemSource[T],
        *,
        sizes: Sizes | None = None,
        divide: Callable[[T], T] | None = None,
    ) -> None:
        self.start: Position = start
        self.source: ItemSource[T] = source
        self.items: RankItems[T] = RankItems(start, passes, source, sizes, divide)
        self.delivery: Delivery = Delivery(passes.monitor, self.items)
        self._passes, self._sizes = passes, sizes

    # ---- what the pass is ----

    @property
    def epoch(self) -> int:
        """The epoch of the pass."""
        return self.start.epoch

    @property
    def taken_before(self) -> int:
        """How many items of the epoch all ranks had taken when the pass began. The pass has the rest."""
        return self.items.taken_before

    @property
    def is_ended(self) -> bool:
        """Whether all items were given."""
        return self.items.drawn is State.ENDED

    @property
    def is_over(self) -> bool:
        """Whether no more items will be requested. Persistent workers keep a pass after the loop has seen its end."""
        return self.delivery.state is State.ENDED or self.items.drawn in {State.LEFT, State.ENDED}

    @property
    def likely_length(self) -> int | None:
        """How many items the epoch has: as found, or by the length of the sampler or dataset; None if unknown."""
        if self.source.length is not None:
            return self.source.length
        length = self._passes.length_if_any(self.epoch)
        if length is not None:
            return length
        # Before the end, the workers of one rank may have found the length, and the workers of another may not.
        return self.source.lengths_found()[0] if self.delivery.state is State.ENDED else None

    def batches(self, batching: Batching) -> int:
        """Return how many batches the pass has delivered; with prefetched batches, if no iterator counts."""
        given = self.delivery.batches
        return batching.count(self.items.taken) if given is None else given

    # ---- the batches, as a loader makes them: a sampler may be wrapped before there is a loader ----

    def schedule(self, batching: Batching) -> Schedule:
        """Return the schedule of the batches, with the ends that this rank has found so far."""
        return self._schedule_of(batching, self.source.parts(self.taken_before))

    def whole_schedule(self, batching: Batching) -> Schedule | None:
        """Return the schedule of the batches if this rank has reached the end, otherwise None."""
        if self.source.is_endless:
            schedule = self.schedule(batching)
            return None if schedule.count is None else schedule
        length = self.source.length if self.is_ended else self.likely_length
        # A loop that takes len() batches never asks for the end.
        if length is None or not (
            self.is_ended or self.items.taken >= len(self._passes.plan.share(length, self.taken_before))
        ):
            return None
        return self._schedule_of(batching, [Part(self.taken_before, length)])

    def _schedule_of(self, batching: Batching, parts: Sequence[Part]) -> Schedule:
        plan, batch_plan = self._passes.plan, self._passes.batch_plan
        return Schedule(plan, batching, parts, self._sizes, self.source.sizes, batch_plan)

    def draw_end_after(self, batches: int, batching: Batching, *, on_this_rank: bool = False) -> bool:
        """Draw to the end if nothing is left after this many batches; return whether this is the case.

        Args:
            batches: How many batches.
            batching: How the loader makes batches.
            on_this_rank: Whether the end counts if this rank knows it, even if other ranks may not know it yet.

        Raises:
            StateError: The batches may be the last ones, and this rank cannot know yet.
        """
        # A rank with fewer batches than others knows the end only when its loop has seen the end.
        is_over = self.delivery.state is State.ENDED and batches == self.batches(batching)
        if not is_over:
            most = self._most_batches(batches, batching, on_this_rank=on_this_rank)
            if batches != most:
                return False
        unused = batching.size - 1 if batching.drop_last else 0
        if not self.source.is_endless:  # items that were drawn ahead were drawn in this process
            unused -= self.items.given - batches * batching.size
        # A negative number: more items were given than there are, so the length is wrong.
        return unused >= 0 and (self.is_ended or self.source.ends_within(unused))

    def _most_batches(self, given: int, batching: Batching, *, on_this_rank: bool) -> int | None:
        """Return how many batches the largest share has; None if unknown after this many batches."""
        if self.source.rounds is not None:  # the ranks find the end together
            return None
        length, plan = self.likely_length, self._passes.plan
        left = None if length is None else max(0, length - self.taken_before)
        by_length = None if left is None else batching.count(plan.largest_share(left))
        most = by_length
        if self.source.is_in_parts:
            most = self.schedule(batching).most_batches if self.delivery.state is State.ENDED else None
        if most is None and on_this_rank and self.source.is_endless:
            may_end = by_length is not None and given >= by_length
            most = self.source.most_when_found(partial(self.schedule, batching), given, may_end=may_end)
        return most

    # ---- the position ----

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
            ranks=(start.ranks or plan.num_replicas) if taken else 0,  # until then, other ranks may begin it
            order=self.source.order_up_to(taken) or (),
            states=replace(start.states, streams=()),
        )

    def position_after(self, batches: int, batching: Batching) -> Position:
        """Return the position after this many batches of the pass.

        Raises:
            StateError: No state can describe the position.
        """
        position = self.position(batches * batching.size, batching)
        return self.source.position_after(position, batches, partial(self.schedule, batching))

    def position_at_end(self, states: States) -> Position:
        """Return the position at the end of the epoch, with the samplers' states."""
        return self.start if self.start.is_ended else Position(self.epoch, turn=None, states=states)
