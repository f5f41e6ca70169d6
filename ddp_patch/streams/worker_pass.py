"""A worker's pass over its part of a stream, in one of the ways in which a stream is shared."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import IterableDataset

from ddp_patch.compat.private_torch import worker_info_told
from ddp_patch.errors import InvalidOptionError, StateError, UnsupportedLoaderError
from ddp_patch.options import Options
from ddp_patch.orders.chunks import Chunk, draw
from ddp_patch.orders.fingerprint import Fingerprint
from ddp_patch.orders.random_states import Seed, epoch_states, reader_seed
from ddp_patch.plan import Batching, Plan
from ddp_patch.sharding.drawing import require_sure_length, share
from ddp_patch.sharding.position import BatchNote, NotedBatch, StreamSnapshot, StreamStart
from ddp_patch.sharding.schedule import require_steps
from ddp_patch.streams.marks import FirstItems, MarksInMemory, SnapshotWriter, can_snapshot
from ddp_patch.streams.reading import Reader, Switching, WorkerCheckpoint, WorkerIterator, WorkerPosition, this_worker
from ddp_patch.streams.shared_state import SharedWorkerState

__all__ = ["LatestGiver", "NotingCollate", "WorkerConfig", "WorkerPass", "require_one_way", "require_same_ends"]

T = TypeVar("T")


def require_one_way(name: str, shared: SharedWorkerState, start: WorkerPosition, plan: Plan) -> None:
    """Refuse a dataset that can be sharded neither as one stream nor in parts.

    Args:
        name: What errors call the dataset.
        shared: Where workers wrote how they read.
        start: Where the pass of this one begins.
        plan: The rank's share.

    Raises:
        UnsupportedLoaderError: Some workers read a part, others the whole stream.
        InvalidOptionError: The length of a part would have to be known.
        StateError: The state counts something else.
    """
    if shared.readers == 1:
        return
    if len(ways := shared.ways(start.number)) > 1:
        raise UnsupportedLoaderError(
            f"{name} cannot be sharded with {shared.readers} workers: it called get_worker_info() in some workers and "
            "not in others, so it is neither one stream nor split into parts. Call it in every worker, first in "
            "__iter__, or use num_workers=0."
        )
    if ways == {"parts"} and plan.needs_length:
        raise InvalidOptionError(
            f"layout='contiguous' does not work with {name} and num_workers={shared.readers}: it splits itself over "
            "its workers, and the length of each part is known only at its end. Use layout='interleaved', or "
            "num_workers=0 or 1."
        )
    if start.counts != "nothing" and {start.counts} != ways:
        counts = {"stream": "one stream, as 0 or 1 workers read it", "parts": f"the parts of {shared.readers} workers"}
        raise StateError(
            f"{name} cannot resume from the state, which counts items of {counts[start.counts]}: with "
            f"num_workers={shared.readers} it is read as {counts[next(iter(ways))]}. Use the num_workers that the "
            "state was taken with."
        )


def require_same_ends(name: str, shared: SharedWorkerState, number: int) -> Sequence[int | None]:
    """Return how many items the one stream has, or each part, as far as workers came to its end.

    Raises:
        UnsupportedLoaderError: Workers that read one stream found different ends.
    """
    lengths = shared.lengths(number)
    if shared.ways(number) != {"stream"}:
        return lengths
    found = list({length for length in lengths if length is not None})
    if len(found) > 1:
        raise UnsupportedLoaderError(
            f"{name} cannot be sharded with {shared.readers} workers: it never called get_worker_info(), but gave "
            f"{' and '.join(map(str, found))} items in two of them. Split it by get_worker_info() in __iter__, or use "
            "num_workers=0."
        )
    return found


_NOTHING: Any = object()

# The largest state of a dataset, in bytes, that travels with a batch. A stream with larger ones is read again.
_LARGEST = 64 * 1024


class LatestGiver:
    """Which pass gave an item last: the batch that is made next has its items.

    A copy, or one in a new worker, knows of none: no pass goes on there.
    """

    def __init__(self) -> None:
        self._pass: WorkerPass[Any] | None = None

    def give(self, one: "WorkerPass[Any]") -> None:
        """Record that a pass gives an item."""
        self._pass = one

    def note(self) -> BatchNote | None:
        """Return what travels with the batch that is made now."""
        return None if self._pass is None else self._pass.note()

    def __reduce__(self) -> tuple[type["LatestGiver"], tuple[()]]:
        return LatestGiver, ()


@dataclass(frozen=True, slots=True)
class NotingCollate:
    """A ``collate_fn`` that lets what the worker notes travel with the batch, where there is anything to note."""

    collate_fn: Callable[[Any], Any]
    latest: LatestGiver

    def __call__(self, samples: Any) -> Any:
        """Return the batch, in a ``NotedBatch`` if something was noted."""
        note = self.latest.note()  # before the user's function may read on
        batch = self.collate_fn(samples)
        return batch if note is None else NotedBatch(note, batch)


@dataclass(frozen=True, slots=True)
class WorkerConfig(Generic[T]):
    """What all passes of a worker have in common; ``ShardedIterable`` describes it.

    Attributes:
        division: The rank's share of each batch, where batches are divided; otherwise None.
        reader: Tells the dataset which worker it is in.
        latest: Is told which pass gives an item.
    """

    dataset: IterableDataset[T]
    plan: Plan
    division: Plan | None
    options: Options
    seed: Seed
    batching: Batching
    shared: SharedWorkerState
    reader: Reader
    latest: "LatestGiver"

    @property
    def name(self) -> str:
        """What errors call the dataset."""
        return type(self.dataset).__name__


class WorkerPass(Generic[T]):
    """One worker's pass over an epoch, or over what is left of one.

    Args:
        config: What all its passes have in common.
        start: Where this one begins.
        before: The dataset's own state, as the only element, if nobody has read it before.

    Attributes:
        start: As given.
        reader: Which worker the dataset thinks it is in.
        readers: How many workers it thinks there are.
        info: What ``get_worker_info()`` returns to it.
    """

    def __init__(self, config: WorkerConfig[T], start: WorkerPosition, before: Sequence[Any] = ()) -> None:
        self.start: WorkerPosition = start
        self._config = config
        self._worker, self._workers = this_worker()
        self.reader: int = start.role
        self.readers: int = self._workers
        if config.options.iterable_sharding == "by_worker":
            self.reader += config.plan.rank * self._workers
            self.readers *= config.plan.num_replicas
        seed = reader_seed(config.seed.value, start.epoch) + self.reader
        self.info: Any = config.reader.info(self.reader, self.readers, seed, config.dataset)
        self._states = Switching(epoch_states(config.options, config.seed, start.epoch))
        snapshots = can_snapshot(config.dataset, config.options)
        before = start.mark.before or (before if snapshots and start.is_whole else ())
        self._marker = SnapshotWriter(config.dataset, self._states if snapshots else None, before)
        self._has_noted_before = not before or bool(start.mark.before)
        self._takes_snapshots = snapshots
        self._has_own_states = False
        self._noted: StreamStart | None = None
        self._place = start.offset  # how many items of the rank's share this worker has gone through

    def split(self) -> Iterator[T]:
        """Yield the items that the dataset gives this one of all ranks' workers, and write how many batches they make.

        Raises:
            StateError: There are fewer than were done.
        """
        config, size, start = self._config, self._config.batching.size, self.start
        chunks = self._drawn(self._decided(self._read(partial(iter, config.dataset))), Plan(0, 1), 0, start.skip)
        items = (item for chunk in chunks for item in chunk.items)
        skipped = sum(1 for _ in islice(items, start.skip))
        if skipped < start.skip if config.batching.drop_last else skipped <= start.skip - size:
            raise StateError(
                f"{config.name} cannot resume from the state: worker {start.role} of {self._workers} had only "
                f"{skipped} items before its end, so the workers no longer took turns, and nobody knows which batches "
                "were done. Begin the epoch again, or use iterable_sharding='exact'."
            )
        made = skipped
        for made, item in enumerate(items, skipped + 1):  # noqa: B007 - told after the loop
            yield item
        config.shared.end_batches(start.number, start.role, config.batching.count(made))

    def shared(
        self,
        items: WorkerIterator[T],
        generators: Sequence[Any],
        first_items: FirstItems | None,
        marks: MarksInMemory | None = None,
    ) -> Iterator[T]:
        """Yield this rank's items of the stream, or of this worker's part of it.

        Args:
            items: The iterator over them, which has a position.
            generators: The states of the dataset's random generators when the pass began.
            first_items: Where to record what is read first; None if nobody compares it.
            marks: Where to mark what is read to the end; None as above.
        """
        config, start, plan = self._config, self.start, self._config.plan
        rest = plan.rest_of_stream(lambda: len(cast(Any, config.dataset)), start.before)
        before = self._before()
        if before is None:
            skip = start.skip
            read = self._marker.watch(self._read(self._marker.begin), start.mark)
            if first_items is not None:
                read = first_items.watching(start.role, start.number, read, lambda: config.reader.has_asked_rank)
            if marks is not None:
                read = marks.watching(start.role, start.number, read)
            stream = rest.select(self._decided(read))
        else:
            skip = 0
            read = self._read(partial(self._marker.begin_at, start.mark.state[0]))
            if start.counts == "parts":
                self._use_own_states()  # the first item, after which all workers do, was read before
            stream = self._decided(self._marker.follow(read))
        chunks = self._drawn(stream, plan, len(rest), skip)
        running = Fingerprint()
        if is_verified := config.options.verify and before is None:
            chunks = running.watching(chunks)

        def at_end(drawn: int) -> None:
            config.shared.end(start.number, start.role, drawn, running.hexdigest() if is_verified else None)
            self._require_ends(drawn, len(rest))

        of_rank = (item for (part,) in share([plan], chunks, len(rest), at_end, before) for item in part)
        items.progress = partial(self._progress, generators, is_over=False)
        mine = self._of_worker(islice(of_rank, start.done if before is None else 0, None))
        yield from mine if config.division is None else _divided(mine, config.division, config.batching)
        items.progress = partial(self._progress, generators, is_over=True)

    def _of_worker(self, of_rank: Iterator[T]) -> Iterator[T]:
        """Yield those of the rank's items that this worker gives."""
        config, size = self._config, self._config.batching.size
        for item in of_rank:
            # Readers of one stream take turns.
            is_mine = config.reader.has_split or self._place // size % self._workers == self._worker
            self._place += 1
            if is_mine:
                config.latest.give(self)
                yield item

    def note(self) -> BatchNote | None:
        """Return what travels with the batch of which the last item was just given; None if there is nothing new."""
        size, start = self._config.batching.size, self._start_at(self._place)
        news = None if start == self._noted else start
        state = self._snapshot() if self._takes_snapshots and self._place % size == 0 else None
        before = None if self._has_noted_before else _pickled(self._marker.before[0])
        if state is not None and len(state) > _LARGEST:
            self._takes_snapshots, state = False, None
        self._noted, self._has_noted_before = start or self._noted, True
        is_new = news is not None or state is not None or before is not None
        return BatchNote(self._worker, -(-self._place // size), news, state, before) if is_new else None

    def _start_at(self, place: int) -> StreamStart | None:
        """Return how the stream began, after this many items of this rank's share."""
        before = sum(ranks * each for ranks, each in self.start.before)
        return self._marker.start_after(before + self._config.plan.num_replicas * (self.start.skip + place))

    def _progress(self, generators: Sequence[Any], *, is_over: bool) -> WorkerCheckpoint:
        start = self.start
        is_begun = self._place != start.offset
        mark = self._mark(self._place) if is_begun else replace(start.mark, before=self._marker.before)
        return WorkerCheckpoint(
            replace(start, offset=self._place, mark=mark), self._config.seed.value, generators, is_over
        )

    def _read(self, begin: Callable[[], Iterator[T]]) -> Iterator[T]:
        return self._config.reader.read(begin, self.info)

    def _decided(self, read: Iterator[T]) -> Iterator[T]:
        """Yield what is read. The first item shows whether the dataset asks which worker it is in.

        Up to then all workers draw from the same random states, so that a dataset may shuffle its files and then take
        its own. After it, one that asked draws from states of its worker's own, as in torch.
        """
        reader, start = self._config.reader, self.start
        first = next(read, _NOTHING)
        asked = self.readers > 1 and (reader.has_asked if first is _NOTHING else reader.has_split)
        if asked and not self._has_own_states:
            self._use_own_states()
        self._config.shared.note_role(start.number, self._worker, start.role if asked else None)
        if self._config.options.iterable_sharding == "exact":
            require_one_way(self._config.name, self._config.shared, start, self._config.plan)
        if first is _NOTHING:
            return
        yield first
        for item in read:
            if reader.has_split and not asked and self.readers > 1:
                raise UnsupportedLoaderError(
                    f"{self._config.name} cannot be sharded with {self._workers} workers: it asked get_worker_info() "
                    "which worker it is in only after its first items, so these came from every worker and later ones "
                    "from one. Call get_worker_info() first in __iter__, or use num_workers=0."
                )
            yield item

    def _use_own_states(self) -> None:
        config, self._has_own_states = self._config, True
        self._states.replace(epoch_states(config.options, config.seed, self.start.epoch, self.reader))

    def _drawn(self, stream: Iterator[T], plan: Plan, length: int, skip: int) -> Iterator[Chunk[T]]:
        """Yield the stream in whole batches: no batch can come without, and states are taken between two."""
        size = self._config.batching.size

        def kept(at: int, items: int) -> slice:
            # The first round is for padding.
            return slice(None) if self._config.options.verify or not at else plan.part(at, items, length)

        rounds = chain([1, (skip - 1) % size or size], repeat(size))
        # No copies: these are samples, not indices.
        return draw(stream, self._states, round_size=plan.num_replicas, rounds=rounds, copies=False, kept=kept)

    def _before(self) -> Chunk[T] | None:
        """Return the rounds that need not be read again because the dataset has a state; None to read them.

        Padding repeats items of the first round, so these are read where there may be padding.
        """
        plan, start = self._config.plan, self.start
        repeats = plan.num_replicas - 1 if plan.uneven == "pad" and start.done else 0
        if not (self._takes_snapshots and start.mark.state) or (repeats and start.before):
            return None
        first: list[T] = []
        if repeats:
            looked_at = max(repeats, 0 if start.mark.first is None else start.mark.first.seen)
            with epoch_states(self._config.options, self._config.seed, start.epoch):
                first = self._marker.first(self._read(self._marker.begin), start.mark, looked_at)
        return Chunk(start.done * plan.num_replicas, first)

    def _mark(self, place: int) -> StreamSnapshot:
        """Return what is known about the stream after this many items of this rank's share."""
        start = self.start
        state = self._snapshot()
        states = () if state is None else (pickle.loads(state),)  # noqa: S301 - ours
        return StreamSnapshot(self._start_at(place) or start.mark.first, states, self._marker.before)

    def _snapshot(self) -> bytes | None:
        reader = self._config.reader
        asked = reader.has_asked
        with worker_info_told(self.info):
            state = self._marker.snapshot()
        reader.has_asked = asked
        return state

    def _require_ends(self, drawn: int, assumed: int) -> None:
        """Refuse an end that contradicts the other workers', a state or a length, and an epoch without steps."""
        config, start = self._config, self.start
        lengths = require_same_ends(config.name, config.shared, start.number)
        if start.is_whole and None not in lengths:
            require_steps(config.plan, config.batching, config.name, cast("list[int]", lengths), in_batches=False)
        require_sure_length(config.plan, config.name, "dataset", drawn, assumed)
        if start.done > config.plan.rounds(drawn):
            raise StateError(
                f"{config.name} cannot resume from the state: {start.done} items of each rank's share were done in it, "
                f"and the stream ended after {drawn} items of all ranks. Restore it with the dataset that it was taken "
                "of; one that is its own iterator must be rebuilt."
            )


def _pickled(state: object) -> bytes | None:
    """Return a dataset's state pickled; None if that cannot be, or is too large."""
    with suppress(Exception):  # the user's objects
        pickled = pickle.dumps(state)
        return pickled if len(pickled) <= _LARGEST else None
    return None


def _divided(items: Iterator[T], division: Plan, batching: Batching) -> Iterator[T]:
    """Yield a rank's samples of each batch that is made of some items."""
    while batch := list(islice(items, batching.size)):
        if len(batch) == batching.size or not batching.drop_last:
            yield from (batch[place] for place in chain(*division.divide(len(batch))))
