"""An iterable dataset as the source of a pass: indices without end, and what workers found of its items."""

import logging
import pickle
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import count, repeat
from time import monotonic, perf_counter, sleep
from typing import Any, Final

from ddp_patch.compat.packages import order_remedy
from ddp_patch.errors import RankMismatchError, StateError, StreamOrderWarning
from ddp_patch.plan import Consumed, Part, Schedule, ready_in_turn, turn_after
from ddp_patch.sharding.item_sources import ItemSource, Rounds
from ddp_patch.sharding.saved_position import BatchNote, Position, StreamSnapshot, split_consumed
from ddp_patch.streams.dataset import StreamWorker
from ddp_patch.streams.rounds import BalancedRounds
from ddp_patch.streams.shared_state import PARTS
from ddp_patch.streams.stream_marks import StreamDigest

__all__ = ["ONE_STREAM", "SEED", "StreamSource", "faster_by_worker"]


logger: logging.Logger = logging.getLogger("ddp_patch")

# What to do where ranks read different streams, and no package is known to shuffle.
SEED: Final = (
    "Give its shuffle a seed, the same on every rank, as random.Random(epoch) with set_epoch()'s epoch, and sort files"
)

ONE_STREAM: Final = "Skip unreadable items on every rank, or raise an error."

_INDICES = [None] * 1024

# How long a state waits for workers to find the end, where the length says that it has come.
_ENDS_S = 10


def faster_by_worker(name: str, ranks: int, items: int, reading: str = "") -> str:
    """Return what there is to say about a dataset that splits itself, and that every rank reads whole."""
    return (
        f"{name}: each of {ranks} ranks read all {items:,} items{reading}. The dataset splits itself over workers, so "
        "patch_dataloader_to_ddp(loader, share='by_worker') reads each item once. It costs: a saved state is then "
        "restored on as many ranks and workers only, and every pass needs all ranks."
    )


class StreamSource(ItemSource[None]):
    """An index for every item, None, forever. Workers read the items, and find the end if there is one.

    Args:
        start: Where the pass begins.
        worker: What reads the stream, as the main process has it.
        number: Which pass of the loader it is.
        ahead: How many batches each worker may be ahead of the training loop.
        why_orders_differ: Says what may cause that workers read other orders, and what to do.
        may_say: Returns whether to say something now: on one rank, once for each loader.

    Attributes:
        rounds: What the pass has given, if ranks send each other batches.
        digest: The digest of what is read; None if ranks do not compare that.
    """

    is_endless: bool = True
    is_open_ended: bool
    has_own_length: bool
    rounds: Rounds | None

    def __init__(
        self,
        start: Position,
        worker: StreamWorker[Any],
        number: int,
        ahead: int,
        why_orders_differ: Callable[[], str],
        may_say: Callable[[str], bool],
    ) -> None:
        self.digest: StreamDigest | None = StreamDigest(worker.shared, number) if worker.is_compared else None
        self.is_open_ended = not worker.splits_itself
        self.has_own_length = worker.splits_itself and worker.plan.uneven == "keep"
        self._start, self._worker, self._shared, self._number = start, worker, worker.shared, number
        self._plan, self._batch_size = worker.plan, worker.batching.size
        self._why_orders_differ, self._may_say, self._began_s = why_orders_differ, may_say, perf_counter()
        # By reader: the notes of how its stream began, and the latest ones of the dataset's states.
        self._starts: dict[int, list[BatchNote]] = defaultdict(list)
        self._states: dict[int, deque[BatchNote]] = defaultdict(partial(deque, maxlen=ahead + 2))

    def chunks(self, skip: int) -> Iterator[Sequence[None]]:
        """Yield indices; what was taken before, workers leave out."""
        return repeat(_INDICES)

    def ends_within(self, items: int) -> bool:
        """Return True: nothing has to be drawn here to know what is left."""
        return True

    # ---- what workers tell ----

    def keep(self, note: BatchNote) -> None:
        """Keep what the worker noted whose batch the loop is given."""
        if note.first is not None or note.initial_state is not None:
            self._starts[note.worker_index].append(note)
        if note.state is not None:
            self._states[note.worker_index].append(note)

    def note_first_batch(self) -> None:
        """Say once, on one rank, that the ranks cannot compare the items that were read.

        Warns:
            StreamOrderWarning: None of them has a name.
        """
        if self.digest is not None and self.digest.is_unnamed and self._may_say("unnamed"):
            warnings.warn(
                f"The ranks cannot compare in which order they read {self._worker.name}: its items have no string and "
                "no whole number that names them, and tensors and floats may be augmented. If each rank reads its own "
                f"order, samples are lost. {order_remedy(self._worker.dataset) or SEED}. To let the ranks compare, "
                "give each item a string or a whole number that names it. If they read one order, ignore this "
                "StreamOrderWarning.",
                StreamOrderWarning,
                stacklevel=2,
            )

    def note_loop_end(self) -> None:
        """Say once, on one rank, if something would be faster."""
        ranks, lengths = self._plan.num_replicas, self._shared.lengths(self._number)
        is_known = self._start.is_at_epoch_start and self._worker.batch_plan is None  # which by_worker cannot divide
        if is_known and self._may_say("advice") and ranks > 1 and self.is_in_parts and None not in lengths:
            spent_s, took_s = (
                max(self._shared.reported(self._number, "spent_ms")) / 1000,
                perf_counter() - self._began_s,
            )
            level, reading = logging.INFO, ""
            if spent_s > took_s / 2:
                level, reading = logging.WARNING, f", and waited for them for {spent_s:.1f} of {took_s:.1f} s"
            logger.log(level, faster_by_worker(self._worker.name, ranks, sum(filter(None, lengths)), reading))

    def require_one_order(self) -> None:
        """Raise RankMismatchError if this rank's workers should read one stream, and read others."""
        if self.digest is not None and (found := self.digest.workers_differ()) is not None:
            raise RankMismatchError(
                f"{self._worker.name} is read in other orders by worker 0 and worker {found[1]} of one rank: they "
                f"differ within the first {found[0]} items. {self._why_orders_differ()}"
            )

    @property
    def is_in_parts(self) -> bool:  # type: ignore[override]  # what workers find
        """Whether several workers read a part each; False while that is unknown."""
        shared = self._shared
        return not self._worker.splits_itself and shared.readers > 1 and shared.ways(self._number) == {PARTS}

    def lengths_found(self) -> Sequence[int | None]:
        """Return how many items the stream had, or each part of it; None if no worker came to the end."""
        lengths = self._shared.lengths(self._number)
        return lengths if self.is_in_parts else [next((length for length in lengths if length is not None), None)]

    def parts(self, skip: int, given: int) -> Sequence[Part]:
        """Return what the pass is over: one stream, or workers' parts, from the one whose turn is first."""
        lengths = self.lengths_found()
        if not self.is_in_parts:
            return [Part(skip, lengths[0])]
        skips = [split_consumed(consumed, self._plan.num_replicas)[1] for consumed in self._of_each()]
        parts, first = list(map(Part, skips, lengths, count())), self._shared.first_part(self._number)
        return parts[first:] + parts[:first]

    def most_when_found(self, schedule: Callable[[], Schedule], batches: int, *, may_end: bool) -> int | None:
        """Wait for workers to find the end, and return how many batches the largest share then has; None if unknown."""
        # Workers read on while the last batches are used, so the end is found in a moment.
        until = monotonic() + (_ENDS_S if may_end else 0)
        while (most := schedule().most_batches) is None and monotonic() < until:
            sleep(0.005)
        if most is None and may_end:
            raise StateError(
                f"{self._worker.name} may have ended after {batches} batches, but not all of its "
                f"{self._shared.readers} workers, which read a part each, have reported that within {_ENDS_S} s. Take "
                "the state a step earlier, or after the pass."
            )
        return most

    # ---- rounds of all ranks' batches ----

    def batches_made(self) -> Sequence[int]:
        """Return how many batches each worker of a dataset that splits itself made; -1 for those that may make more."""
        return [made if is_end else -1 for made, is_end in zip(*self._shared.batches_noted(self._number), strict=True)]

    def batches_ready(self, received: int) -> int:
        """Return how many batches can be had without waiting until a worker has read their items; the end is one too.

        Args:
            received: How many have come from the workers.
        """
        made, are_over = self._shared.batches_noted(self._number)
        of_pass = [max(0, made[part] - before) for part, before in self._turns]
        return ready_in_turn(of_pass, [are_over[part] for part, _ in self._turns]) + all(are_over) - received

    @cached_property
    def _turns(self) -> Sequence[tuple[int, int]]:
        """This rank's parts in the order of their turns, and how many batches of each were taken before the pass."""
        before = self._batches_before[self._plan.rank]
        first = turn_after(before)
        return [*enumerate(before)][first:] + [*enumerate(before)][:first]

    @cached_property
    def _batches_before(self) -> Sequence[Sequence[int]]:
        """How many batches of each rank's workers were taken before the pass, if a dataset splits itself."""
        readers = self._shared.readers
        consumed = self._of_each(self._plan.num_replicas)
        before = [sum(items for _, items in of_reader) // self._batch_size for of_reader in consumed]
        return [before[at : at + readers] for at in range(0, len(before), readers)]

    # ---- positions ----

    def _of_each(self, ranks: int = 1) -> Sequence[Consumed]:
        """Return what was taken before the pass of the part of each worker of some ranks."""
        parts = self._shared.readers * ranks
        return self._start.parts if len(self._start.parts) == parts else [()] * parts

    def position_after(self, position: Position, batches: int, schedule: Callable[[], Schedule]) -> Position:
        """Return the position after this many batches.

        Raises:
            StateError: No state can describe it.
        """
        if not batches:
            return self._start if len(self._start.parts) > 1 else replace(position, states=self._start.states)
        if self._worker.splits_itself:
            return self._position_of_all(position, batches)
        if self.is_in_parts:
            return self._position_in_parts(position, batches, schedule())
        ranks = self._plan.num_replicas
        consumed = [*position.parts[0][:-1], (ranks, schedule().taken(batches)[0])]
        before = self._start.states.streams[0] if self._start.states.streams else StreamSnapshot()
        known = self._snapshot_after((batches - 1) % self._shared.readers, batches, before)
        return replace(position, parts=[consumed], states=replace(position.states, streams=[known]))

    def _position_in_parts(self, position: Position, batches: int, schedule: Schedule) -> Position:
        """Return the position after some batches where workers read a part each."""
        readers, ranks = self._shared.readers, self._plan.num_replicas
        if not schedule.are_alike(batches):
            raise StateError(
                f"The state of {self._worker.name} cannot be saved after {batches} batches: with uneven='keep' a "
                "worker has come to its end on some ranks and not on others, so the ranks' workers no longer take the "
                "same turns. Use uneven='pad' or 'drop', or take the state earlier, or at the epoch's end."
            )
        first, taken, made = self._shared.first_part(self._number), schedule.taken(batches), schedule.made(batches)
        began, consumed, known = self._start.states.streams or [StreamSnapshot()] * readers, [], []
        for part, before in enumerate(self._of_each()):
            worker = (part - first) % readers
            consumed.append((*split_consumed(before, ranks)[0], (ranks, taken[worker])))
            known.append(self._snapshot_after(worker, made[worker], began[part % len(began)]))
        # The worker after the last one: every rank knows that one, and not yet whether it has come to its end.
        upcoming = (first + schedule.record(batches - 1).part + 1) % readers
        return replace(position, parts=consumed, turn=upcoming, states=replace(position.states, streams=known))

    def _snapshot_after(self, worker: int, batches: int, previous: StreamSnapshot) -> StreamSnapshot:
        """Return what is known of a worker's stream after some batches of it; ``previous``, when the pass began."""
        if not batches:
            return previous
        first, at_first = previous.first, previous.initial_state
        for note in self._starts[worker]:
            first = note.first if note.first is not None and note.batches <= batches else first
            at_first = at_first if note.initial_state is None else (pickle.loads(note.initial_state),)  # noqa: S301 - our worker's
        states = [note.state for note in self._states[worker] if note.batches == batches and note.state]
        return StreamSnapshot(first, tuple(map(pickle.loads, states)), at_first)

    def _position_of_all(self, position: Position, batches: int) -> Position:
        """Return the position of all ranks' workers, if ranks send each other batches."""
        if not isinstance(self.rounds, BalancedRounds):
            return position
        made = self.rounds.made(batches, self._batches_before)
        return replace(position, parts=[((1, count * self._batch_size),) for count in made])
