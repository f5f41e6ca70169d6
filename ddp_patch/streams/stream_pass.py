"""One pass over an iterable dataset, which workers read: indices without end, and what came of them."""

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, count, repeat
from time import monotonic, sleep
from typing import Any

from ddp_patch.errors import RankMismatchError, StateError
from ddp_patch.plan import Consumed
from ddp_patch.schedule import Part, Schedule, ready_in_turn, turn_after
from ddp_patch.sharding.passes import Pass, PassContext
from ddp_patch.sharding.saved_position import BatchNote, Position, States, StreamSnapshot, split_consumed
from ddp_patch.streams.balanced_rounds import BalancedRounds
from ddp_patch.streams.dataset import StreamWorker
from ddp_patch.streams.stream_marks import StreamDigest

__all__ = ["StreamPass"]


_INDICES = [None] * 1024

# How long a state waits for workers to find the end, where the length says that it has come.
_ENDS_S = 10


class StreamPass(Pass[None]):
    """A pass over an iterable dataset: an index for every item, None, forever. Workers find the end, if there is one.

    Args:
        start: Where it begins.
        context: What all passes over the loader have in common.
        worker: What reads the stream, as the main process has it.
        number: Which pass of the loader it is.
        ahead: How many batches each worker may be ahead of the training loop.
        on_loop_end: Called when the loop has seen the end.
        on_first_batch: Called with the digest, if there is one, when the loop was given a batch.

    Attributes:
        rounds: What it has given, if ranks send each other batches.
        digest: The digest of what is read of it; None if ranks do not compare that.
    """

    def __init__(
        self,
        start: Position,
        context: PassContext,
        worker: StreamWorker[Any],
        number: int,
        ahead: int,
        on_loop_end: Callable[[], object],
        on_first_batch: Callable[[StreamDigest], object],
    ) -> None:
        digest = None if worker.marks is None else worker.marks.of_pass(number)
        super().__init__(start, context, digest)
        self._on_loop_end, self._on_first_batch = on_loop_end, on_first_batch
        self.digest: StreamDigest | None = digest
        self.rounds: BalancedRounds | None = None
        self._splits_itself = worker.splits_itself
        self._worker, self._name, self._shared, self._number = worker, worker.name, worker.shared, number
        # By reader: the notes of how its stream began, and the latest ones of the dataset's states.
        self._starts: dict[int, list[BatchNote]] = defaultdict(list)
        self._states: dict[int, deque[BatchNote]] = defaultdict(partial(deque, maxlen=ahead + 2))

    def deliver(self, note: BatchNote | None = None) -> None:
        """Record that the loop was given a batch; see ``Pass``."""
        super().deliver(note)
        if self.batches_delivered == 1 and self.digest is not None:
            self._on_first_batch(self.digest)
        if note is None:
            return
        if note.first is not None or note.initial_state is not None:
            self._starts[note.worker_index].append(note)
        if note.state is not None:
            self._states[note.worker_index].append(note)

    def _compare(self, batches: int) -> None:
        self._require_one_order()
        super()._compare(batches)

    def _require_one_order(self) -> None:
        """Raise RankMismatchError if this rank's workers should read one stream, and read others."""
        if self.digest is not None and (found := self.digest.workers_differ()) is not None:
            raise RankMismatchError(
                f"{self._name} is read in other orders by worker 0 and worker {found[1]} of one rank: they differ "
                f"within the first {found[0]} items. {self._monitor.why_orders_differ()}"
            )

    def note_end_seen(self) -> None:
        """Record that the training loop has seen the end; see ``Pass``."""
        self._require_one_order()
        super().note_end_seen()
        self._on_loop_end()

    @property
    def has_own_length(self) -> bool:
        """Whether other ranks may have more or fewer batches: where a dataset splits itself, and all are kept.

        Where nobody counts batches, more is asked for than there is once a worker has come to the end.
        """
        return (self._splits_itself and self._plan.uneven == "keep") or self.batches_delivered is None

    @property
    def _is_open_ended(self) -> bool:
        return not self._splits_itself and super()._is_open_ended

    @property
    def likely_length(self) -> int | None:
        """How many items all ranks share in it: as the dataset says, or as was found by its end."""
        said = super().likely_length
        # Before, one rank's workers may have found it and another's not.
        return self.lengths_found()[0] if said is None and self.loop_saw_end else said

    @property
    def batches(self) -> int:
        """How many batches it has given, counted high; see ``Pass``."""
        return super().batches if self.rounds is None else self.rounds.batches_delivered

    def in_rounds(self) -> BalancedRounds:
        """Return what records the rounds in which ranks send each other batches."""
        self.rounds = BalancedRounds()
        return self.rounds

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

    def _chunks(self) -> Iterator[list[None]]:
        return repeat(_INDICES)

    def ends_within(self, items: int) -> bool:
        """Return True: nothing has to be drawn here to know what is left."""
        return True

    def worker_saw_end(self) -> bool:
        """Return whether a worker has come to the end: from then on more is asked for than there is."""
        return any(length is not None for length in self._shared.lengths(self._number))

    @property
    def is_in_parts(self) -> bool:
        """Whether several workers read a part each; False while that is unknown."""
        return not self._splits_itself and self._shared.readers > 1 and self._shared.is_in_parts(self._number)

    @property
    def resumed_elsewhere(self) -> int:
        """How many items were left out because another package's loader resumed within the pass."""
        return self._shared.offset(self._number)

    def lengths_found(self) -> Sequence[int | None]:
        """Return how many items the stream had, or each part of it; None if no worker came to the end."""
        lengths = self._shared.lengths(self._number)
        return lengths if self.is_in_parts else [next((length for length in lengths if length is not None), None)]

    def schedule(self) -> Schedule:
        """Return its batches, of one stream or of the parts that workers read, with the ends that were found so far."""
        lengths = self.lengths_found()
        if not self.is_in_parts:
            length = self.likely_length if lengths[0] is None and self._plan.needs_length else lengths[0]
            return self._schedule_of([Part(self.skip, length)])
        skips = [split_consumed(consumed, self._plan.num_replicas)[1] for consumed in self._parts_before()]
        parts, first = list(map(Part, skips, lengths, count())), self._shared.first_part(self._number)
        return self._schedule_of(parts[first:] + parts[:first])

    def whole_schedule(self) -> Schedule | None:
        """Return its batches if this rank's workers have come to its end, otherwise None."""
        schedule = self.schedule()
        return None if schedule.count is None else schedule

    def _parts_before(self) -> Sequence[Consumed]:
        """Return what was taken of each part before the pass."""
        return self._of_each(self._shared.readers)

    def _of_each(self, parts: int) -> Sequence[Consumed]:
        """Return what was taken of each of so many parts before the pass; nothing where it began an epoch."""
        return self.start.parts if len(self.start.parts) == parts else [()] * parts

    def most_batches(self) -> int | None:
        """Return how many batches the largest share has in it, where every rank knows that; otherwise None."""
        if self.rounds is not None:
            return self.rounds.batches_delivered if self.rounds.is_over else None
        if not self.is_in_parts:
            return super().most_batches()
        return self.schedule().most_batches if self.loop_saw_end else None

    def most_batches_known_here(self, batches: int) -> int | None:
        """Return how many batches the largest share has in it, as far as this rank knows; see ``Pass``."""
        most = self.most_batches()
        if most is not None or self.rounds is not None:
            return most
        by_length = super().most_batches()
        may_end = by_length is not None and batches >= by_length
        # Workers read on while the last batches are used, so the end is found in a moment.
        until = monotonic() + (_ENDS_S if may_end else 0)
        while (most := self.schedule().most_batches) is None and monotonic() < until:
            sleep(0.005)
        if most is None and may_end:
            raise StateError(
                f"{self._name} may have ended after {batches} batches, but not all of its {self._shared.readers} "
                f"workers, which read a part each, have reported that within {_ENDS_S} s. Take the state a step "
                "earlier, or after the pass."
            )
        return most

    def position_at_end(self, states: States) -> Position:
        """Return the position after everything was taken; see ``Pass``."""
        return super().position_at_end(replace(states, streams=self._worker.snapshots_between()))

    def position_at_start(self) -> Position:
        """Return the position where it began, which is within it."""
        return self.start if len(self.start.parts) > 1 else replace(self.position(self.skip), states=self.start.states)

    def position(self, taken: int) -> Position:
        """Return the position after this many items of the share were taken, without what is known of its stream."""
        position = super().position(taken)
        return replace(position, states=replace(position.states, streams=()))

    def _prepared_beyond(self, batches: int) -> int:
        return 0  # what was drawn ahead was drawn in workers

    def position_after(self, batches: int) -> Position:
        """Return the position after this many of its batches; see ``Pass``."""
        if not batches:
            return self.position_at_start()
        position = super().position_after(batches)
        if self._splits_itself:
            return position if self.rounds is None else self._position_of_all(position, self.rounds, batches)
        if self.resumed_elsewhere:
            raise StateError(
                f"The state of {self._name} cannot be saved by a number of batches: the loader's own load_state_dict() "
                "resumed within this pass, and its first batches were not counted here. Use the loader's own "
                "state_dict(), or resume by restore_loader()."
            )
        if self.is_in_parts:
            return self._position_in_parts(position, batches)
        position = self.position(self.schedule().taken(batches)[0])
        before = self.start.states.streams[0] if self.start.states.streams else StreamSnapshot()
        known = self._snapshot_after((batches - 1) % self._shared.readers, batches, before)
        return replace(position, states=replace(position.states, streams=[known]))

    def _position_in_parts(self, position: Position, batches: int) -> Position:
        """Return the position after some batches where workers read a part each."""
        schedule, readers, ranks = self.schedule(), self._shared.readers, self._plan.num_replicas
        if not schedule.are_alike(batches):
            raise StateError(
                f"The state of {self._name} cannot be saved after {batches} batches: with uneven='keep' a worker has "
                "come to its end on some ranks and not on others, so the ranks' workers no longer take the same turns. "
                "Use uneven='pad' or 'drop', or take the state earlier, or at the epoch's end."
            )
        first, taken, made = self._shared.first_part(self._number), schedule.taken(batches), schedule.made(batches)
        marks, consumed, known = self.start.states.streams or [StreamSnapshot()] * readers, [], []
        for part, before in enumerate(self._parts_before()):
            worker = (part - first) % readers
            consumed.append((*split_consumed(before, ranks)[0], (ranks, taken[worker])))
            known.append(self._snapshot_after(worker, made[worker], marks[part % len(marks)]))
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

    def _position_of_all(self, position: Position, rounds: BalancedRounds, batches: int) -> Position:
        """Return the position of all ranks' workers, if ranks send each other batches."""
        made = chain.from_iterable(rounds.made(batches, self._batches_before))
        return replace(position, parts=[((1, count * self._batching.size),) for count in made])

    @cached_property
    def _batches_before(self) -> Sequence[Sequence[int]]:
        """Return how many batches of each rank's workers were taken before the pass, if a dataset splits itself."""
        size, readers, ranks = self._batching.size, self._shared.readers, self._plan.num_replicas
        before = [sum(items for _, items in of_reader) // size for of_reader in self._of_each(readers * ranks)]
        return [before[at : at + readers] for at in range(0, len(before), readers)]

    @property
    def is_done_without_workers(self) -> bool:
        """Whether a loader without workers has found the end of it: it asked for more than there is."""
        if self._worker.loaded_at_end == self.epoch:
            return self.items_taken > self.skip
        end = self.schedule().count
        asked = self._batches_asked() + self._batching.count(self.resumed_elsewhere)
        return end is not None and asked > end
