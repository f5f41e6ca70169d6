"""One pass over a rank's share of an epoch: its start, its progress, its end."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import ref

from ddp_patch.orders.chunks import Progress, State
from ddp_patch.plan import Consumed
from ddp_patch.ranks.histories import PassProgress, PassState
from ddp_patch.ranks.notices import StepCounts
from ddp_patch.ranks.pass_monitor import PassMonitor, PassNotes
from ddp_patch.schedule import Sizes, size_of
from ddp_patch.sharding.balancing import Division
from ddp_patch.sharding.held import SamplerState, SamplerStates
from ddp_patch.sharding.position import Position
from ddp_patch.sharding.sources import Source

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Pass"]


T = TypeVar("T")
R = TypeVar("R")

# Ranks compare when 1, 2, 4, ... batches were taken, and then whenever so many more were.
_MOST_STEPS = 32

_KNOWN = {
    State.NOT_BEGUN: PassState.OPEN,
    State.RUNNING: PassState.OPEN,
    State.ENDED: PassState.ENDED,
    State.LEFT: PassState.LEFT,
}


class Pass(Progress, Generic[T]):
    """A pass over this rank's share of an epoch, or of the rest of one. Nobody else writes its state.

    Args:
        start: Where it begins.
        num_replicas: How many ranks share the epoch.
        holders: The objects whose generators the samplers draw from.
        source: How it gets its items.
        monitor: Compares it with the other ranks' passes.
        resumes: Whether it starts at a position that was loaded.
        sizes: Records how many samples each item has; None if nobody needs that.
        division: Returns this rank's part of an item; None if ranks take whole items.
        at_end: Called with how many items all ranks share in it, once that is known and before a rank is given items
            of the incomplete round.
        note: Makes the notes that ranks compare of it, from how it stands; None if they compare none.

    Attributes:
        start: Where it began.
        before: What other numbers of ranks had taken of the epoch; the pass is over the rest.
        sizes: How many samples each item had, before division; None if nobody needs that.
        handed_out: How many batches the training loop was given, without those that workers fetched ahead; None if
            nobody counts them.
        is_exhausted: Whether the loop has seen the end.
        has_failed: Whether the loop was given an error of the loader's instead of a batch, and nothing since.
        is_interleaved: Whether an iterator of an earlier pass gave batches while this was the latest one.
    """

    def __init__(
        self,
        start: Position,
        num_replicas: int,
        holders: SamplerStates,
        source: Source[T],
        monitor: PassMonitor,
        *,
        resumes: bool = False,
        sizes: Sizes | None = None,
        division: Division | None = None,
        at_end: Callable[[int], object] = lambda length: None,
        note: Callable[["Pass[T]"], PassNotes] | None = None,
    ) -> None:
        before, skip = start.split(num_replicas)
        super().__init__(skip)
        self.before: Consumed = before
        self.handed_out: int | None = None
        self.is_exhausted: bool = False
        self.has_failed: bool = False
        self._counter: Callable[[], object] | None = None
        self.is_interleaved: bool = False
        self.source: Source[T] = source
        self._resumes, self._at_end = resumes, at_end
        self.sizes: Sizes | None = sizes
        self._division = division
        self.start: Position = start
        self._num_replicas, self._holders = num_replicas, holders
        self._monitor = monitor
        self._steps, self._surely_taken, self._awaited = 1, skip, 0
        self._snapshots = start.snapshots
        latest = self._snapshots.latest
        if latest is not None and latest[0] and self.before and not skip and not source.is_drawn_at_once:
            # It counts items of another number of ranks' shares.
            self._snapshots = replace(self._snapshots, latest=None)
        self._notes = None if note is None else note(self)
        # Whether another rank's stream may be longer, and no rank know it before the end.
        self._step_counts: StepCounts | None = None
        self._is_unsure = monitor.is_on and source.is_counted and not source.is_drawn_at_once

    @property
    def epoch(self) -> int:
        """Which epoch it is over."""
        return self.start.epoch

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be asked for; persistent workers keep a pass that the loop has seen the end of."""
        return self.is_exhausted or super().is_over

    @property
    def length(self) -> int | None:
        """How many items all ranks share in it, once its end was found."""
        return self.source.length

    @property
    def origins(self) -> "NDArray[np.int64] | None":
        """The positions of this rank's items (or samples of divided batches), without padding and skipped ones.

        They are positions in the stream of one process, in the order in which the items are given. If batches are
        divided, they count from the first that this pass gives. None if they follow from the plan.
        """
        if self._division is not None:
            return self._division.origins(self.sizes or ())
        return None if self.source.origins is None else self.source.origins.places()

    @property
    def begins_at(self) -> str:
        """Where it begins, for the ranks to compare."""
        return " + ".join([*(f"{ranks} x {taken}" for ranks, taken in self.before), str(self.skip)])

    def runs(self) -> Iterator[Iterator[T]]:
        """Yield this rank's items in runs, from when the first is asked for."""
        self.begin()
        try:
            self._monitor.begin(self.epoch, self.progress, self._notes)
            self._begin_generators()
            for part in self.source.parts(self.skip):
                if self.length is not None:
                    self._at_end(self.length)
                run = self.give(self._prepared(part))
                self._catch_up()
                yield from self._compared(run) if self._monitor.is_on else [run]
            self.end()
            self._holders.end(self.epoch)
            self._monitor.compare(self.epoch, at_end=True)
        finally:
            self.leave()

    def draw_to_end(self) -> None:
        """Draw what nobody will ask for, so that the samplers' generators are where the epoch leaves them."""
        self._begin_generators()
        for _ in self.source.parts(self.skip):
            self._catch_up()

    def _compared(self, run: Iterator[R]) -> Iterator[Iterator[R]]:
        """Cut a run where the ranks compare their progress: at first after every batch, then more rarely."""
        read_ahead = self._monitor.read_ahead
        while (moment := self.skip + read_ahead.ahead + self._steps * read_ahead.size) < self.given:
            yield islice(run, moment - self.taken)
            self._steps += min(self._steps, _MOST_STEPS)
            self._awaited = 1  # whoever asks on gets one more
            self._monitor.compare(self.epoch)
            self._awaited = 0
        yield run

    def progress(self) -> PassProgress:
        """Return how many items of the share were surely taken, and the record of the pass."""
        read_ahead, known = self._monitor.read_ahead, _KNOWN[self.state]
        asked = self.taken + self._awaited - self.skip
        taken = self.skip + read_ahead.taken(asked, is_over=self.is_exhausted and self.is_ended)
        if known is PassState.ENDED and read_ahead.ahead and self.handed_out is not None and not self.is_exhausted:
            # Workers were asked for all, and the loop may not have taken it.
            taken = self._in_batches()
            if taken < self.taken:
                known = PassState.OPEN if self._counter is not None and self._counter() is not None else PassState.LEFT
        if self.has_failed:  # other ranks may have been given the batch that the loop asked for here
            taken = max(taken, self._in_batches())
        if not self.source.is_counted:
            return PassProgress(taken, PassState.UNKNOWN)
        if not self.source.ends_elsewhere():
            self._surely_taken = taken
        elif self.handed_out is not None:
            # When a worker finds the end depends on chance, and then more is asked for. Only the batches count.
            self._surely_taken = max(self._surely_taken, self._in_batches())
            known = PassState.ENDED if self.is_exhausted else known
        else:
            known = PassState.ENDED
        return PassProgress(self._surely_taken, known)

    def _in_batches(self) -> int:
        """Return how many items are in the batches that the loop was given, and in one that failed."""
        return min(self.taken, self.skip + ((self.handed_out or 0) + self.has_failed) * self._monitor.read_ahead.size)

    def _prepared(self, part: Sequence[T]) -> Sequence[T]:
        """Record the sizes of the next items and divide them, if asked to."""
        if self.sizes is not None:
            part = [list(item) if isinstance(item, Iterator) else item for item in part]  # type: ignore[misc]  # a batch read into a list
            for item in part:
                self.sizes.add(size_of(item))
        return part if self._division is None else list(map(self._division, part))

    def note_loop(self, counter: object) -> None:
        """Record that a loop begins to take batches, and what counts them: it is gone when the iterator is."""
        self._counter = ref(counter)
        self.note_handed_out(0)

    def note_left(self) -> None:
        """Record that the loop asks for no more batches, though its iterator lives."""
        self._counter = None

    def note_handed_out(self, batches: int | None) -> None:
        """Record how many of its batches the training loop was given; None if that is no longer known."""
        self.handed_out, self.has_failed = batches, False
        if batches and self._is_unsure:
            if self._step_counts is None:
                self._step_counts = self._monitor.steps(self.epoch, self.begins_at)
            self._step_counts.leave(batches)

    def note_failed(self) -> None:
        """Record that the training loop was given an error of the loader's instead of a batch."""
        self.has_failed = True

    def note_exhausted(self) -> None:
        """Record that the training loop has seen the end, and compare if nothing before told that.

        What workers fetched ahead is taken now; and where only they find an end, no index tells of it.

        Raises:
            RankMismatchError: As ``PassMonitor.compare``.
        """
        self.is_exhausted = True
        if self._monitor.read_ahead.ahead or self.source.ends_elsewhere():
            self._monitor.compare(self.epoch, at_end=True)
        if self._is_unsure and self.handed_out is not None:
            self._monitor.compare_ends(self.epoch, self.begins_at, self.handed_out)

    def note_interleaved(self) -> None:
        """Record that an iterator of an earlier pass gave a batch."""
        self.is_interleaved = True

    def _begin_generators(self) -> None:
        """Set a dataset's generators to their states at the first draw: a loader may draw from them before."""
        if not self.source.draws_here or self._holders.is_private:
            return
        if self._snapshots.at_first is not None:
            self._holders.reinstate_generators(self._snapshots.at_first)
        elif not self._resumes and (now := self._holders.generators()) != self.start.held.generators:
            self._snapshots = replace(self._snapshots, at_first=now)
        self._catch_up()

    def _catch_up(self) -> None:
        """Restore the generators once as much is drawn as when the state was taken."""
        latest = self._snapshots.latest
        if latest is not None and self.source.drawn >= latest[0]:
            self._holders.reinstate_generators(latest[1])
            self._snapshots = replace(self._snapshots, latest=None)

    def position(self, taken: int, *, generators: Sequence[Any] = ()) -> Position:
        """Return the position after this many items of the share were taken.

        Args:
            taken: How many, those before the pass included.
            generators: The generators' states, for a state that says how far this rank has drawn.
        """
        latest = (self.given, generators) if generators else None
        return Position(
            self.epoch,
            (*(stint for stint in self.before if stint[1]), (self._num_replicas, taken)),
            self.source.held_before or self.start.held,
            snapshots=replace(self._snapshots, latest=latest),
        )

    def position_at_end(self, held: SamplerState) -> Position:
        """Return the position after everything was taken, when the samplers hold ``held``."""
        return replace(self.position(self.taken), held=self.source.held_after or held, ended=True)

    def ends_within(self, items: int) -> bool:
        """Draw up to the end if it is at most this many items away, and return whether it is; see ``Source``."""
        return self.is_ended or self.source.ends_within(items)
