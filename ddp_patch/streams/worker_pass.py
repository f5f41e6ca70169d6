"""A worker's pass over its part of a stream, in one of the ways in which a stream is shared."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, Generic, TypeVar, cast

from ddp_patch.compat.private_torch import worker_info_told
from ddp_patch.errors import StateError, UnsupportedLoaderError
from ddp_patch.loaders.recognition import may_ask_rank
from ddp_patch.orders.chunks import Chunk, draw, split_chunks
from ddp_patch.orders.random_states import PrivateRNG
from ddp_patch.plan import Plan, require_steps
from ddp_patch.sharding.balancing import BatchDivider
from ddp_patch.sharding.saved_position import BatchNote, StreamSnapshot, StreamStart
from ddp_patch.streams.reading import AsDataset, DatasetStateTracker, tell_epoch, this_worker
from ddp_patch.streams.shared_state import LARGEST, PARTS, STREAM
from ddp_patch.streams.stream_marks import marked
from ddp_patch.streams.worker import StreamWorker, WorkerPosition, pickled

__all__ = ["WorkerIterator", "WorkerPass"]

T = TypeVar("T")

_KEY = "ddp_patch"
_NOTHING: Any = object()


class WorkerIterator(Iterator[T]):
    """A worker's items in one pass. Nothing is read before the first is asked for.

    torchdata's loader saves and resumes it in the worker by its ``state_dict``, where it would else count items from
    the pass's beginning, and lose some at the second stop.

    Args:
        worker: What reads them.
    """

    def __init__(self, worker: StreamWorker[T]) -> None:
        self._worker = worker
        self._items: Iterator[T] | None = None
        self._loaded: WorkerPosition | None = None
        self._pass: WorkerPass[T] | None = None

    def __next__(self) -> T:
        if self._items is None:
            self._pass = WorkerPass(self._worker, *self._worker.begin(self._loaded))
            self._items = self._pass.items()
        return next(self._items)

    def state_dict(self) -> dict[str, Any]:
        """Return its position, as the only value."""
        if self._pass is not None:
            return {_KEY: self._pass.position().plain()}
        return {_KEY: (self._loaded or self._worker.position_unbegun()).plain()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make it begin where ``state_dict`` was called.

        Raises:
            StateError: It is no such state, or one of another version of this package.
        """
        if _KEY not in state_dict:
            raise StateError(
                f"The state of a worker's iterator has no {_KEY!r}, so it was taken from an unpatched loader. Restore "
                "it with that loader, or take one from the patched loader."
            )
        self._loaded = WorkerPosition.of(state_dict[_KEY])
        self._worker.note_loaded(self._loaded)


class WorkerPass(Generic[T]):
    """One worker's pass over an epoch, or over what is left of one.

    Args:
        worker: What its process knows of the stream.
        number: The pass.
        start: Where it begins.
    """

    def __init__(self, worker: StreamWorker[T], number: int, start: WorkerPosition) -> None:
        self._worker, self._number, self._start = worker, number, start
        self._worker_index, self._workers = this_worker()
        self._report = worker.shared.report(number, start.part)
        self._report["worker"], self._report["offset"] = self._worker_index, start.offset
        self._told_worker, self._told_workers = worker.told(start.part)
        self._info = worker.info(start.part, start.epoch)
        self._states = PrivateRNG(worker.seed.value, start.epoch)
        private = self._states if worker.takes_states else None
        self._tracker = DatasetStateTracker(worker.dataset, private, start.snapshot, start.epoch)
        self._takes_snapshots = worker.takes_states
        self._has_own_states = self._is_over = False
        # What was noted: how the stream began, and the dataset's own state then.
        self._noted: StreamStart | None = None
        self._has_noted_initial_state = not start.snapshot.initial_state
        self._place = start.offset  # how many items of the rank's share this worker has gone through

    def items(self) -> Iterator[T]:
        """Tell the dataset its epoch, and return what this worker gives of it."""
        with worker_info_told(self._info):
            # Told after the generators' states were put back, because it may seed them.
            tell_epoch(self._worker.dataset, self._start.epoch)
        if self._worker.splits_itself:
            self._worker.giving = self
            return self._by_worker()
        return iter(()) if self._start.ended else self._exact()

    def _by_worker(self) -> Iterator[T]:
        """Yield the items that the dataset gives this one of all ranks' workers, and note how many batches they make.

        Raises:
            StateError: There are fewer than were done.
        """
        worker, batching, start = self._worker, self._worker.batching, self._start
        stream = self._detecting_split(worker.reader.read(partial(iter, worker.dataset)))
        read = 0
        for length, items in self._drawn(stream, Plan(0, 1), start.skip):
            before, read = read, read + length
            if read > start.skip and read % batching.size == 0:
                self._report["batches"] = read // batching.size
            yield from items if before >= start.skip else items[start.skip - before :]
        if read < start.skip if batching.drop_last else read <= start.skip - batching.size:
            raise StateError(
                f"{worker.name} cannot resume from the state: worker {start.part} of {self._workers} had only "
                f"{read} items before its end, so the workers no longer took turns, and nobody knows which batches "
                "were done. Begin the epoch again, or leave share out."
            )
        self._report["all_batches"] = batching.count(read)

    def _exact(self) -> Iterator[T]:
        """Yield this rank's items of the stream, or of this worker's part of it."""
        worker, start, plan = self._worker, self._start, self._worker.plan
        skipped = self._skipped_rounds()
        spent_s = worker.reader.spent_s
        if skipped is None:
            read = self._tracker.watch(worker.reader.read(self._tracker.iterate))
            if worker.is_compared and self._report["marks"] < 0:  # else another iterator reads the same
                read = marked(read, self._report)
            before = sum(ranks * each for ranks, each in start.consumed_before)
            stream: Iterator[T] = islice(self._detecting_split(read), before, None)
        else:
            read = worker.reader.read(self._tracker.iterate_from_state)
            if start.counts == "parts":
                self._use_own_states()  # the first item, after which all workers do, was read before
            stream = self._detecting_split(self._tracker.follow(read))
        chunks = self._drawn(stream, plan, start.skip if skipped is None else 0)

        def on_end(drawn: int) -> None:
            self._report["spent_ms"] = round(1000 * (worker.reader.spent_s - spent_s))
            self._report["length"] = drawn
            self._require_ends(drawn)

        of_rank = (item for (part,) in split_chunks([plan], chunks, on_end, skipped) for item in part)
        mine = self._of_worker(islice(of_rank, start.items_consumed if skipped is None else 0, None))
        yield from mine if worker.batch_plan is None else _divided(mine, worker, worker.batch_plan)
        self._is_over = True
        worker.end(self._number, start.part)

    def _of_worker(self, of_rank: Iterator[T]) -> Iterator[T]:
        """Yield those of the rank's items that this worker gives."""
        worker, size = self._worker, self._worker.batching.size
        for item in of_rank:
            # Readers of one stream take turns.
            is_mine = worker.reader.asked_before_item or self._place // size % self._workers == self._worker_index
            self._place += 1
            if is_mine:
                worker.giving = self
                yield item

    def note(self) -> BatchNote | None:
        """Return what travels with the batch of which the last item was just given; None if there is nothing new."""
        if self._worker.splits_itself:
            return None
        size, start = self._worker.batching.size, self._start_at(self._place)
        news = None if start == self._noted else start
        state = self._snapshot() if self._takes_snapshots and self._place % size == 0 else None
        before = None if self._has_noted_initial_state else pickled(self._start.snapshot.initial_state[0])
        if state is not None and len(state) > LARGEST:
            self._takes_snapshots, state = False, None
        self._noted, self._has_noted_initial_state = start or self._noted, True
        is_new = news is not None or state is not None or before is not None
        return BatchNote(self._worker_index, -(-self._place // size), news, state, before) if is_new else None

    def _start_at(self, place: int) -> StreamStart | None:
        """Return how the stream began, after this many items of this rank's share."""
        before = sum(ranks * each for ranks, each in self._start.consumed_before)
        return self._tracker.start_after(before + self._worker.plan.num_replicas * (self._start.skip + place))

    def position(self) -> WorkerPosition:
        """Return how far it is; or where the next pass begins, if this one was over before or cannot be resumed."""
        start, snapshot = self._start, self._start.snapshot
        if start.ended or self._worker.splits_itself:
            return self._worker.position_unbegun()
        if self._is_over:
            snapshot = StreamSnapshot(initial_state=self._worker.unread())
        elif self._place != start.offset:
            state = self._snapshot()
            states = () if state is None else (pickle.loads(state),)  # noqa: S301 - ours
            snapshot = StreamSnapshot(self._start_at(self._place) or snapshot.first, states, snapshot.initial_state)
        return replace(start, offset=self._place, snapshot=snapshot, seed=self._worker.seed.value, ended=self._is_over)

    def _detecting_split(self, read: Iterator[T]) -> Iterator[T]:
        """Yield what is read. The first item shows whether the dataset asks which worker it is in.

        Up to then all workers draw from the same random states, so that a dataset may shuffle its files and then take
        its own. After it, one that asked draws from states of its worker's own, as in torch.
        """
        worker, reader, readers = self._worker, self._worker.reader, self._told_workers
        first = next(read, _NOTHING)
        asked = readers > 1 and (reader.has_asked if first is _NOTHING else reader.asked_before_item)
        if asked and not self._has_own_states:
            self._use_own_states()
        self._report["asked_rank"] = reader.has_asked_rank
        self._report["way"] = PARTS if asked else STREAM
        if worker.splits_itself and worker.plan.num_replicas > 1:
            self._require_split_by_worker(asked=asked)
        if not worker.splits_itself and worker.shared.readers > 1:
            self._require_one_way()
        if first is _NOTHING:
            return
        yield first
        if asked or readers == 1:
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

    def _require_split_by_worker(self, *, asked: bool) -> None:
        """Refuse a dataset that is to split itself over all ranks' workers, and does not, or not by its worker alone.

        One whose class says ``is_ddp_aware = False`` may ask for its rank, as for a log.

        Args:
            asked: Whether it asked which worker it is in, by its first item.

        Raises:
            UnsupportedLoaderError: It does not split itself, or by its rank.
        """
        name = self._worker.name
        if self._worker.reader.has_asked_rank and not may_ask_rank(self._worker.dataset):
            raise UnsupportedLoaderError(
                f"{name} cannot be read with share='by_worker': it asked for its rank by its first item, so it is "
                "sharded already, and sharding it by workers again would lose samples. Let its class say is_ddp_aware "
                "= True, and its loader is left as it is; or False, if it asks for another reason, such as a log."
            )
        if not asked:
            raise UnsupportedLoaderError(
                f"{name} cannot be read with share='by_worker': it gave its first item, and had not asked "
                "get_worker_info() which worker it is in (id, num_workers or seed), so each rank would read all of it. "
                "Leave share out: then each rank keeps its share of the stream."
            )

    def _require_one_way(self) -> None:
        """Refuse a dataset that can be sharded neither as one stream nor in parts.

        Raises:
            UnsupportedLoaderError: Some workers read a part, others the whole stream.
            StateError: The state counts something else.
        """
        name, start, readers = self._worker.name, self._start, self._worker.shared.readers
        if len(ways := self._worker.shared.ways(self._number)) > 1:
            raise UnsupportedLoaderError(
                f"{name} cannot be sharded with {readers} workers: it called get_worker_info() in some workers and "
                "not in others, so it is neither one stream nor split into parts. Call it in every worker, first in "
                "__iter__, or use num_workers=0."
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
        self._states.switch_to_worker(self._told_worker)

    def _drawn(self, stream: Iterator[T], plan: Plan, skip: int) -> Iterator[Chunk[T]]:
        """Yield the stream in whole batches: no batch can come without, and states are taken between two."""
        size, as_dataset = self._worker.batching.size, AsDataset(self._states, self._info, self._worker.reader)

        def kept(at: int, items: int) -> slice:
            # The first round is for padding.
            return plan.slice_of_chunk(items) if at else slice(None)

        rounds = chain([1, (skip - 1) % size or size], repeat(size))
        try:
            # No copies: these are samples, not indices.
            yield from draw(
                stream,
                lambda: as_dataset,
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
        plan, start, known = self._worker.plan, self._start, self._start.snapshot.first
        repeats = plan.num_replicas - 1 if plan.uneven == "pad" and start.items_consumed else 0
        if not (self._takes_snapshots and start.snapshot.state) or (repeats and start.consumed_before):
            return None
        first, reader = list[T](), self._worker.reader
        if repeats:
            looked_at = max(repeats, 0 if known is None else known.seen)
            with AsDataset(PrivateRNG(self._worker.seed.value, start.epoch), self._info, reader):
                first = self._tracker.read_first(reader.read(self._tracker.iterate), looked_at)
        return Chunk(start.items_consumed * plan.num_replicas, first)

    def _snapshot(self) -> bytes | None:
        with self._worker.reader.unnoted(self._info):
            return self._tracker.snapshot()

    def _require_ends(self, drawn: int) -> None:
        """Refuse an end that contradicts the other workers' or a state, and an epoch without steps."""
        worker, start, shared = self._worker, self._start, self._worker.shared
        lengths = shared.lengths(self._number)
        if shared.ways(self._number) == {"stream"}:
            lengths = list({length for length in lengths if length is not None})
            if len(lengths) > 1:
                raise UnsupportedLoaderError(
                    f"{worker.name} cannot be sharded with {shared.readers} workers: it never called "
                    f"get_worker_info(), but gave {' and '.join(map(str, lengths))} items in two of them. Split it by "
                    "get_worker_info() in __iter__, or use num_workers=0."
                )
        if start.is_at_epoch_start and None not in lengths:
            require_steps(worker.plan, worker.batching, worker.name, cast("list[int]", lengths), in_batches=False)
        if start.items_consumed > worker.plan.largest_share(drawn):
            raise StateError(
                f"{worker.name} cannot resume from the state: {start.items_consumed} items of each rank's share were "
                f"done in it, and the stream ended after {drawn} items of all ranks. Restore it with the dataset that "
                "it was taken of; one that is its own iterator must be rebuilt."
            )


def _divided(items: Iterator[T], worker: StreamWorker[T], batch_plan: Plan) -> Iterator[T]:
    """Yield a rank's samples of each batch that is made of some items."""
    batching, divide = worker.batching, BatchDivider(batch_plan, worker.name)
    while batch := list(islice(items, batching.size)):
        if len(batch) == batching.size or not batching.drop_last:
            yield from divide(batch)
