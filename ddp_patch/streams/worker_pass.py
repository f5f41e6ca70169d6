"""A worker's pass over its part of a stream, in one of the ways in which a stream is shared."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from ddp_patch.errors import InvalidOptionError, StateError, UnsupportedLoaderError
from ddp_patch.orders.chunks import Chunk, draw
from ddp_patch.orders.random_states import PrivateRNG, reader_seed
from ddp_patch.plan import Consumed, Plan
from ddp_patch.schedule import require_steps
from ddp_patch.sharding.balancing import BatchDivider
from ddp_patch.sharding.epoch_drawing import require_sure_length, split_chunks
from ddp_patch.sharding.saved_position import BatchNote, StreamSnapshot, StreamStart
from ddp_patch.streams.reading import (
    AsDataset,
    DatasetStateTracker,
    can_snapshot,
    require_split_by_worker,
    this_worker,
)
from ddp_patch.streams.shared_state import LARGEST

if TYPE_CHECKING:
    from ddp_patch.streams.dataset import StreamWorker

__all__ = ["WorkerPass", "WorkerPosition", "pickled"]

T = TypeVar("T")

_VERSION = 1


@dataclass(frozen=True, slots=True)
class WorkerPosition:
    """Where a worker's pass begins, or how far it is, and which worker the dataset thinks it is in.

    Attributes:
        number: The pass.
        epoch: Which epoch it is over; -1 before that is known.
        part: The index of the worker whose part it reads; differs from its own only after a resume.
        consumed_before: What other numbers of ranks took.
        skip: How many items of this rank's share were done when the pass began.
        counts: What the state that is resumed counts: one stream, parts, or nothing.
        offset: How many items this worker has gone through since: another package's loader resumes within the pass.
        snapshot: What is known of the stream there.
        generators: The states of the dataset's random generators when the pass began.
        seed: The seed then in force; None for the present one.
        ended: Whether nothing is left.
    """

    number: int
    epoch: int
    part: int
    consumed_before: Consumed = ()
    skip: int = 0
    counts: Literal["stream", "parts", "nothing"] = "nothing"
    offset: int = 0
    snapshot: StreamSnapshot = field(default_factory=StreamSnapshot)
    generators: Sequence[Any] = ()
    seed: int | None = None
    ended: bool = False

    @property
    def is_at_epoch_start(self) -> bool:
        """Whether nothing was taken."""
        return not self.items_consumed and not any(taken for _, taken in self.consumed_before)

    @property
    def items_consumed(self) -> int:
        """How many items of this rank's share are done."""
        return self.skip + self.offset

    def plain(self) -> list[list[Any]]:
        """Return it as plain values: pairs, because torchdata takes dicts apart."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "number"} | {
            "version": _VERSION,
            "consumed_before": [list(pair) for pair in self.consumed_before],
            "snapshot": self.snapshot.plain(),
            "generators": list(self.generators),
        }
        return [[name, value] for name, value in values.items()]

    @classmethod
    def of(cls, plain: Any) -> "WorkerPosition":
        """Return what ``plain`` made plain values of; it is of no pass yet.

        Raises:
            StateError: Another version of this package did.
        """
        is_paired = all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in plain)
        values: dict[str, Any] = dict(plain) if is_paired else {}
        if values.pop("version", None) != _VERSION:
            raise StateError(
                "The state of a worker's iterator was written by another version of ddp_patch, which this one does not "
                "read. Restore it with that version."
            )
        values["consumed_before"] = tuple((ranks, taken) for ranks, taken in values["consumed_before"])
        values["snapshot"] = StreamSnapshot.of(values["snapshot"])
        return cls(number=-1, **values)


_NOTHING: Any = object()


class WorkerPass(Generic[T]):
    """One worker's pass over an epoch, or over what is left of one.

    Args:
        worker: What all its passes have in common.
        start: Where this one begins.

    Attributes:
        start: As given.
        told_worker_id: Which worker the dataset thinks it is in.
        told_num_workers: How many it thinks there are.
        info: What ``get_worker_info()`` returns to it.
    """

    def __init__(self, worker: "StreamWorker[T]", start: WorkerPosition) -> None:
        self.start: WorkerPosition = start
        self._worker = worker
        self._worker_index, self._workers = this_worker()
        self.told_worker_id: int = start.part
        self.told_num_workers: int = self._workers
        if worker.splits_itself:
            self.told_worker_id += worker.plan.rank * self._workers
            self.told_num_workers *= worker.plan.num_replicas
        seed = reader_seed(worker.seed.value, start.epoch) + self.told_worker_id
        self.info: Any = worker.reader.info(self.told_worker_id, self.told_num_workers, seed, worker.dataset)
        self._states = PrivateRNG(worker.seed.value, start.epoch)
        private = self._states if can_snapshot(worker.dataset, worker.options) else None
        self._tracker = DatasetStateTracker(worker.dataset, private, start.snapshot, start.epoch)
        self._takes_snapshots = private is not None
        self._has_own_states = self._is_over = False
        # What was noted: how the stream began, and the dataset's own state then.
        self._noted: StreamStart | None = None
        self._has_noted_initial_state = not start.snapshot.initial_state
        self._place = start.offset  # how many items of the rank's share this worker has gone through

    def by_worker(self) -> Iterator[T]:
        """Yield the items that the dataset gives this one of all ranks' workers, and note how many batches they make.

        Raises:
            StateError: There are fewer than were done.
        """
        worker, batching, start = self._worker, self._worker.batching, self.start
        stream = self._detecting_split(self._read(partial(iter, worker.dataset)))
        read, note = 0, partial(worker.shared.note_batches, start.number, start.part)
        for length, items in self._drawn(stream, Plan(0, 1), 0, start.skip):
            before, read = read, read + length
            if read > start.skip and read % batching.size == 0:
                note(read // batching.size)
            yield from items if before >= start.skip else items[start.skip - before :]
        if read < start.skip if batching.drop_last else read <= start.skip - batching.size:
            raise StateError(
                f"{worker.name} cannot resume from the state: worker {start.part} of {self._workers} had only "
                f"{read} items before its end, so the workers no longer took turns, and nobody knows which batches "
                "were done. Begin the epoch again, or leave share out."
            )
        note(batching.count(read), is_end=True)

    def exact(self) -> Iterator[T]:
        """Yield this rank's items of the stream, or of this worker's part of it."""
        worker, start, plan = self._worker, self.start, self._worker.plan
        rest = plan.rest_of_stream(worker.stream_length, start.consumed_before)
        skipped = self._skipped_rounds()
        spent_s = worker.reader.spent_s
        if skipped is None:
            skip = start.skip
            read = self._compared(self._tracker.watch(self._read(self._tracker.iterate)))
            stream = rest.select(self._detecting_split(read))
        else:
            skip = 0
            read = self._read(self._tracker.iterate_from_state)
            if start.counts == "parts":
                self._use_own_states()  # the first item, after which all workers do, was read before
            stream = self._detecting_split(self._tracker.follow(read))
        chunks = self._drawn(stream, plan, len(rest), skip)

        def on_end(drawn: int) -> None:
            worker.shared.end(start.number, start.part, drawn, worker.reader.spent_s - spent_s)
            self._require_ends(drawn, len(rest))

        of_rank = (item for (part,) in split_chunks([plan], chunks, len(rest), on_end, skipped) for item in part)
        mine = self._of_worker(islice(of_rank, start.items_consumed if skipped is None else 0, None))
        yield from mine if worker.batch_plan is None else _divided(mine, worker, worker.batch_plan)
        self._is_over = True
        worker.end(start.number, start.part)

    def _compared(self, read: Iterator[T]) -> Iterator[T]:
        """Pass on what is read from the stream's beginning, noting what the ranks compare."""
        marks, start, reader = self._worker.marks, self.start, self._worker.reader
        if marks is None:
            return read
        return marks.watching(start.part, start.number, read, lambda: reader.has_asked_rank)

    def _of_worker(self, of_rank: Iterator[T]) -> Iterator[T]:
        """Yield those of the rank's items that this worker gives."""
        worker, size = self._worker, self._worker.batching.size
        for item in of_rank:
            # Readers of one stream take turns.
            is_mine = worker.reader.asked_before_item or self._place // size % self._workers == self._worker_index
            self._place += 1
            if is_mine:
                worker.give(self)
                yield item

    def note(self) -> BatchNote | None:
        """Return what travels with the batch of which the last item was just given; None if there is nothing new."""
        size, start = self._worker.batching.size, self._start_at(self._place)
        news = None if start == self._noted else start
        state = self._snapshot() if self._takes_snapshots and self._place % size == 0 else None
        before = None if self._has_noted_initial_state else pickled(self.start.snapshot.initial_state[0])
        if state is not None and len(state) > LARGEST:
            self._takes_snapshots, state = False, None
        self._noted, self._has_noted_initial_state = start or self._noted, True
        is_new = news is not None or state is not None or before is not None
        return BatchNote(self._worker_index, -(-self._place // size), news, state, before) if is_new else None

    def _start_at(self, place: int) -> StreamStart | None:
        """Return how the stream began, after this many items of this rank's share."""
        before = sum(ranks * each for ranks, each in self.start.consumed_before)
        return self._tracker.start_after(before + self._worker.plan.num_replicas * (self.start.skip + place))

    def position(self) -> WorkerPosition:
        """Return how far it is."""
        start, snapshot = self.start, self.start.snapshot
        if self._is_over:
            snapshot = StreamSnapshot(initial_state=self._worker.unread())
        elif self._place != start.offset:
            state = self._snapshot()
            states = () if state is None else (pickle.loads(state),)  # noqa: S301 - ours
            snapshot = StreamSnapshot(self._start_at(self._place) or snapshot.first, states, snapshot.initial_state)
        return replace(start, offset=self._place, snapshot=snapshot, seed=self._worker.seed.value, ended=self._is_over)

    def _reading(self, states: AbstractContextManager[None]) -> AsDataset:
        return AsDataset(states, self.info, self._worker.reader)

    def _read(self, begin: Callable[[], Iterator[T]]) -> Iterator[T]:
        return self._worker.reader.read(begin)

    def _detecting_split(self, read: Iterator[T]) -> Iterator[T]:
        """Yield what is read. The first item shows whether the dataset asks which worker it is in.

        Up to then all workers draw from the same random states, so that a dataset may shuffle its files and then take
        its own. After it, one that asked draws from states of its worker's own, as in torch.
        """
        worker, reader, start = self._worker, self._worker.reader, self.start
        first = next(read, _NOTHING)
        asked = self.told_num_workers > 1 and (reader.has_asked if first is _NOTHING else reader.asked_before_item)
        if asked and not self._has_own_states:
            self._use_own_states()
        worker.shared.note_part(start.number, self._worker_index, start.part if asked else None)
        if worker.splits_itself and worker.plan.num_replicas > 1:
            require_split_by_worker(worker.dataset, worker.name, asked=asked, asked_rank=reader.has_asked_rank)
        if not worker.splits_itself and worker.shared.readers > 1:
            self._require_one_way()
        if first is _NOTHING:
            return
        yield first
        if asked or self.told_num_workers == 1:
            yield from read
            return
        for item in read:
            if reader.asked_before_item:
                raise UnsupportedLoaderError(
                    f"{worker.name} cannot be sharded with {self._workers} workers: it asked get_worker_info() "
                    "which worker it is in only after its first items, so these came from every worker and later ones "
                    "from one. Call get_worker_info() first in __iter__, or use num_workers=0."
                )
            yield item

    def _require_one_way(self) -> None:
        """Refuse a dataset that can be sharded neither as one stream nor in parts.

        Raises:
            UnsupportedLoaderError: Some workers read a part, others the whole stream.
            InvalidOptionError: The length of a part would have to be known.
            StateError: The state counts something else.
        """
        name, start, readers = self._worker.name, self.start, self._worker.shared.readers
        if len(ways := self._worker.shared.ways(start.number)) > 1:
            raise UnsupportedLoaderError(
                f"{name} cannot be sharded with {readers} workers: it called get_worker_info() in some workers and "
                "not in others, so it is neither one stream nor split into parts. Call it in every worker, first in "
                "__iter__, or use num_workers=0."
            )
        if ways == {"parts"} and self._worker.plan.needs_length:
            raise InvalidOptionError(
                f"layout='contiguous' does not work with {name} and num_workers={readers}: it splits itself over "
                "its workers, and the length of each part is known only at its end. Use layout='interleaved', or "
                "num_workers=0 or 1."
            )
        if start.counts != "nothing" and {start.counts} != ways:
            counts = {"stream": "one stream, as 0 or 1 workers read it", "parts": f"the parts of {readers} workers"}
            raise StateError(
                f"{name} cannot resume from the state, which counts items of {counts[start.counts]}: with "
                f"num_workers={readers} it is read as {counts[next(iter(ways))]}. Use the num_workers that the "
                "state was taken with."
            )

    def _use_own_states(self) -> None:
        self._has_own_states = True
        self._states.switch_to_worker(self.told_worker_id)

    def _drawn(self, stream: Iterator[T], plan: Plan, length: int, skip: int) -> Iterator[Chunk[T]]:
        """Yield the stream in whole batches: no batch can come without, and states are taken between two."""
        size = self._worker.batching.size

        def kept(at: int, items: int) -> slice:
            # The first round is for padding.
            return plan.slice_of_chunk(at, items, length) if at else slice(None)

        rounds = chain([1, (skip - 1) % size or size], repeat(size))
        try:
            # No copies: these are samples, not indices.
            yield from draw(
                stream,
                partial(self._reading, self._states),
                round_size=plan.num_replicas,
                rounds=rounds,
                copies=False,
                selection=kept,
            )
        finally:
            self.before_others(may_draw=True)

    def before_others(self, *, may_draw: bool) -> None:
        """Let the stream's random states stay in place between batches, unless others may draw: put theirs back then.

        Args:
            may_draw: Whether others may draw before the next batch is read.
        """
        self._states.stays = not may_draw
        if may_draw:
            self._states.put_back()

    def _skipped_rounds(self) -> Chunk[T] | None:
        """Return the rounds that need not be read again because the dataset has a state; None to read them.

        Padding repeats items of the first round, so these are read where there may be padding.
        """
        plan, start, known = self._worker.plan, self.start, self.start.snapshot.first
        repeats = plan.num_replicas - 1 if plan.uneven == "pad" and start.items_consumed else 0
        if not (self._takes_snapshots and start.snapshot.state) or (repeats and start.consumed_before):
            return None
        first: list[T] = []
        if repeats:
            looked_at = max(repeats, 0 if known is None else known.seen)
            with self._reading(PrivateRNG(self._worker.seed.value, start.epoch)):
                first = self._tracker.read_first(self._read(self._tracker.iterate), looked_at)
        return Chunk(start.items_consumed * plan.num_replicas, first)

    def _snapshot(self) -> bytes | None:
        with self._worker.reader.unnoted(self.info):
            return self._tracker.snapshot()

    def _require_ends(self, drawn: int, assumed: int) -> None:
        """Refuse an end that contradicts the other workers', a state or a length, and an epoch without steps."""
        worker, start, shared = self._worker, self.start, self._worker.shared
        lengths = shared.lengths(start.number)
        if shared.is_one_stream(start.number):
            lengths = list({length for length in lengths if length is not None})
            if len(lengths) > 1:
                raise UnsupportedLoaderError(
                    f"{worker.name} cannot be sharded with {shared.readers} workers: it never called "
                    f"get_worker_info(), but gave {' and '.join(map(str, lengths))} items in two of them. Split it by "
                    "get_worker_info() in __iter__, or use num_workers=0."
                )
        if start.is_at_epoch_start and None not in lengths:
            require_steps(worker.plan, worker.batching, worker.name, cast("list[int]", lengths), in_batches=False)
        require_sure_length(worker.plan, worker.name, "dataset", drawn, assumed)
        if start.items_consumed > worker.plan.largest_share(drawn):
            raise StateError(
                f"{worker.name} cannot resume from the state: {start.items_consumed} items of each rank's share were "
                f"done in it, and the stream ended after {drawn} items of all ranks. Restore it with the dataset that "
                "it was taken of; one that is its own iterator must be rebuilt."
            )


def pickled(state: object) -> bytes | None:
    """Return a dataset's state pickled; None if that cannot be, or is too large."""
    with suppress(Exception):  # the user's objects
        written = pickle.dumps(state)
        return written if len(written) <= LARGEST else None
    return None


def _divided(items: Iterator[T], worker: "StreamWorker[T]", batch_plan: Plan) -> Iterator[T]:
    """Yield a rank's samples of each batch that is made of some items."""
    batching, divide = worker.batching, BatchDivider(batch_plan, worker.name)
    while batch := list(islice(items, batching.size)):
        if len(batch) == batching.size or not batching.drop_last:
            yield from divide(batch)
