"""What stands in a loader for an iterable dataset, and a reader's passes over it: which items they give, and report."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import IterableDataset, get_worker_info

from ddp_patch.errors import StateError
from ddp_patch.loaders.recognition import may_ask_rank
from ddp_patch.orders.chunks import Drawn, split_chunks
from ddp_patch.orders.random_states import EpochCounter, random_generators
from ddp_patch.positions_and_padding import Plan, require_steps
from ddp_patch.sharding.balancing import part_of_batch
from ddp_patch.sharding.saved_state import NotedBatch
from ddp_patch.sharding.state_text import from_text
from ddp_patch.sharding.wrapper_attributes import AttributeProxy
from ddp_patch.streams import messages
from ddp_patch.streams.dataset_reading import NOTHING, DatasetReading
from ddp_patch.streams.item_names import marked
from ddp_patch.streams.reader import StreamReader
from ddp_patch.streams.reported_pass import BEGUN, ENDED, PARTS, STREAM
from ddp_patch.streams.stream_share import StreamShare, this_worker

T = TypeVar("T")


class ShardedIterable(AttributeProxy, IterableDataset[T]):
    """One rank's share of another iterable dataset's stream.

    By default, ``get_worker_info()`` returns in worker j of every rank what it returns in worker j of the unpatched
    loader. If the dataset calls it, worker j reads a part of the stream, and keeps this rank's share of the part. If
    not, every worker reads the same stream, and worker j of k gives every k-th batch of this rank's share, from the
    j-th on.

    With ``share="by_worker"``, ``get_worker_info()`` counts all ranks' workers as one loader's, and the dataset splits
    itself.

    Args:
        reader: Reads the dataset.
    """

    _inner, _kept_as = "dataset", "_dataset"
    # The dataset's own state is a position in the whole stream, and not in this share.
    _hidden = frozenset({"state_dict", "load_state_dict"})

    def __init__(self, reader: StreamReader[T]) -> None:
        self._dataset, self._reader = reader.dataset, reader
        self._seal()

    @property
    def dataset(self) -> Any:
        """The ``dataset`` of the user's dataset, as in one process; if it has none, the user's dataset itself."""
        return getattr(self._dataset, "dataset", self._dataset)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return partial(self._reader.choose_epoch, found) if name == "set_epoch" and callable(found) else found

    def require_no_generator(self) -> None:
        """Refuse to save a state where persistent workers draw from generators that the user's dataset holds."""
        if random_generators([self._dataset]):
            raise StateError(
                f"The state of {type(self._dataset).__name__} cannot be saved: it has a random generator, and "
                "persistent workers advance copies of it. Use persistent_workers=False."
            )

    def __len__(self) -> int:
        resumed = self._reader.resumed
        return len(self._reader.share.plan.share(self._reader.length(), resumed.left_out if resumed else 0))

    def __iter__(self) -> Iterator[T]:
        yield from ReaderPass(self._reader).items()  # begins when the first item is asked for


def begin_worker(worker_init_fn: Callable[[int], object] | None, epochs: EpochCounter, worker_id: int) -> None:
    """Prepare a worker's copy of the sharded dataset, and call the user's ``worker_init_fn``.

    ``get_worker_info()`` then shows the user's dataset, and the worker that will read it.

    Args:
        worker_init_fn: The user's function, or None.
        epochs: The passes and epochs when the worker is started, which is for the next pass.
        worker_id: The number of the worker.
    """
    info: Any = get_worker_info()
    info.dataset._reader.prepare(epochs.passes + 1, epochs.upcoming, worker_init_fn)


# ---- a pass ----


class ReaderPass(Generic[T]):
    """One reader's pass over an epoch, or over what is left of one.

    Args:
        reader: Knows which pass has begun.
    """

    def __init__(self, reader: StreamReader[T]) -> None:
        self._reader, self._share = reader, reader.share
        self._number, epoch, start = reader.begin()
        self._index, _ = this_worker()
        self._report = reader.shared.report(self._number, self._index)
        if not start.taken and not start.known.initial_state and (state := reader.unread_state()) is not None:
            self._report.store_state(BEGUN, state)
            start = start._replace(known=replace(start.known, initial_state=(from_text(state.decode()),)))
        reader.is_underway = True
        self._start, self._reading = start, DatasetReading(reader, epoch, start, self._report)
        self._place = 0  # how many items of the rank's share the reader has gone through
        self._takes_turns = not self._share.splits_itself  # readers of one stream give its batches in turn

    # ---- what it gives ----

    def items(self) -> Iterator[T]:
        """Read the dataset, and yield this rank's items of the stream, or of this reader's part of it."""
        reader, share = self._reader, self._share
        first = self._reading.begin()
        read = self._reading.from_beginning() if first is None else self._reading.from_state()
        if first is None and share.is_compared and self._report["marks"] < 0:  # else another iterator reads the same
            read = marked(read, self._report)
        plan = Plan(0, 1) if share.splits_itself else share.plan  # a part is of one rank
        # Whole batches: none can come without, and states are taken between two.
        rounds = chain([1, share.batching.size - 1 or 1], repeat(share.batching.size))
        stream, taken = self._detecting_split(read), self._start.taken
        # These are samples, not indices, so they need no copies.
        drawn = Drawn(stream, lambda: self._reading, plan, taken=taken, first=first, rounds=rounds, copies=False)
        own = self._of_reader(chain.from_iterable(split_chunks(plan, drawn, self._note_end)))
        yield from own if share.batch_plan is None else _divided(own, share, share.batch_plan, reader.name)
        reader.is_underway = False
        if (state := reader.unread_state()) is not None:
            self._report.store_state(ENDED, state)

    def _of_reader(self, of_rank: Iterator[T]) -> Iterator[T]:
        """Yield those of the rank's items that this reader gives."""
        size, readers = self._share.batching.size, self._share.readers
        for item in of_rank:
            is_own = not self._takes_turns or self._place // size % readers == self._index
            self._place += 1
            if is_own:
                self._reader.note = self._note
                yield item

    def _note(self) -> NotedBatch | None:
        """Return what travels with the batch of which the last item was just given: the dataset's state, if known."""
        batches, over = divmod(self._place, self._share.batching.size)
        state = None if over or self._share.splits_itself else self._reading.state_now()
        return None if state is None else NotedBatch(self._index, batches, state)

    def _note_end(self, length: int) -> None:
        """Report where the stream ended; refuse an end that contradicts the other readers' or a state.

        Args:
            length: How many items the stream, or this reader's part of it, has.

        Raises:
            UnsupportedLoaderError: Readers read other streams.
            StateError: More was taken than there is.
            NoStepsError: A rank would make no step in the epoch.
        """
        share, name, taken, report = self._share, self._reader.name, self._start.taken, self._report
        if share.splits_itself:
            if length < taken if share.batching.drop_last else length <= taken - share.batching.size:
                raise messages.part_ended_before_state(name, self._start.part, share.readers, length)
            report["batches"] = share.batching.count(max(0, length - taken))
            return
        report["spent_ms"] = round(1000 * self._reading.spent_s)
        report["length"] = length
        reported = self._reader.shared.reported(self._number)
        lengths = reported.lengths
        if reported.ways == {STREAM}:
            lengths = list({*lengths} - {None})
            if len(lengths) > 1:
                raise messages.split_in_part(name, share.readers, messages.ends_differ(lengths))
        if not taken and None not in lengths:
            require_steps(share.plan, share.batching, name, cast("list[int]", lengths))
        if taken > length:
            raise messages.ended_before_state(name, taken, length)

    # ---- whether the dataset splits itself ----

    def _detecting_split(self, read: Iterator[T]) -> Iterator[T]:
        """Yield what is read. The first item shows whether the dataset asks which worker it is in.

        Up to then all readers draw from the same random states. After it, a dataset that asked draws from states of its
        worker's own.
        """
        asked, (_, workers) = self._reader.asked, self._share.worker_of(self._start.part)
        first = next(read, NOTHING)
        is_part = workers > 1 and asked.worker
        if is_part:
            self._reading.use_own_states()
        if not self._share.splits_itself:
            self._takes_turns = not is_part
            if is_part:
                self._report["part"] = self._start.part
            self._report["way"] = PARTS if is_part else STREAM
            self._require_one_way()
        elif self._share.plan.num_replicas > 1:
            self._require_split_by_worker()
        if first is NOTHING:
            return
        yield first
        if is_part or workers == 1:
            yield from read
            return
        for item in read:
            if asked.worker:
                raise messages.split_in_part(self._reader.name, self._share.readers, messages.ASKED_LATE)
            yield item

    def _require_split_by_worker(self) -> None:
        """Refuse a dataset that is to split itself over all ranks' workers, and does not, or not by its worker alone.

        A dataset whose class says ``is_ddp_aware = False`` may ask for its rank, as for a log.
        """
        asked, name = self._reader.asked, self._reader.name
        if asked.rank and not may_ask_rank(self._reader.dataset):
            raise messages.asked_for_rank(name)
        if not asked.may_split:
            raise messages.asked_for_too_little(name)

    def _require_one_way(self) -> None:
        """Refuse a dataset that is neither one stream nor split into parts, and a state that counts the other."""
        if (readers := self._share.readers) == 1:
            return
        name, counted, ways = self._reader.name, self._start.way, self._reader.shared.reported(self._number).ways
        if len(ways) > 1:
            raise messages.split_in_part(name, readers, messages.ASKED_IN_SOME)
        if counted is not None and {counted} != ways:
            raise messages.counted_otherwise(name, readers, are_parts=counted == PARTS)


def _divided(items: Iterator[T], share: StreamShare, batch_plan: Plan, name: str) -> Iterator[T]:
    """Yield a rank's samples of each batch that is made of some items."""
    batching = share.batching
    while batch := list(islice(items, batching.size)):
        if len(batch) == batching.size or not batching.drop_last:
            yield from part_of_batch(batch, batch_plan, name)
