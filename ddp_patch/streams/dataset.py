"""The dataset that replaces an iterable dataset in a loader, and how a process reads it, pass by pass."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar, cast

from torch.utils.data import IterableDataset, get_worker_info

from ddp_patch.compat.private_packages import loses_items_when_loaded
from ddp_patch.compat.private_torch import rank_noted, worker_info_told
from ddp_patch.errors import StateError
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.loaders.recognition import may_ask_rank
from ddp_patch.orders.chunks import Drawn, split_chunks
from ddp_patch.orders.random_states import EpochCounter, is_stateful, random_generators, set_generator_states
from ddp_patch.positions_and_padding import Plan, require_steps
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.sharding.balancing import part_of_batch
from ddp_patch.sharding.saved_state import NotedBatch, Position
from ddp_patch.sharding.values_as_text import from_text
from ddp_patch.sharding.wrapper_attributes import AttributeProxy
from ddp_patch.streams import error_texts
from ddp_patch.streams.dataset_reading import (
    NOTHING,
    RANK,
    DatasetReading,
    PartStart,
    StreamShare,
    this_worker,
    written_state,
)
from ddp_patch.streams.item_names import marked
from ddp_patch.streams.reports import BEGUN, ENDED, PARTS, STREAM, Report, SharedReports

T = TypeVar("T")

# The questions by which a dataset can split itself over workers, and all that tell it which worker it is in.
_SPLITTING = frozenset({"id", "num_workers"})
_TELLING = _SPLITTING | {"seed"}


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

    def __init__(self, reader: "StreamReader[T]") -> None:
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
        resumed, length = self._reader.resumed, len(cast(Any, self._dataset))
        return len(self._reader.share.plan.share(length, resumed.left_out if resumed else 0))

    def __iter__(self) -> Iterator[T]:
        return self._reader.items()


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


def generators_only(dataset: object) -> SimpleNamespace:
    """Return an object with a dataset's random generators, without the dataset's own state, which is a position."""
    return SimpleNamespace(generators=random_generators([dataset]))


# ---- a process that reads ----


class Resumed(NamedTuple):
    """A pass that continues at a position, in readers that are started from now on.

    Attributes:
        number: The number of the pass.
        position: Where the pass continues.
        left_out: How many items of its epoch ``len()`` leaves out.
    """

    number: int
    position: Position
    left_out: int


class StreamReader(Generic[T]):
    """Reads a stream in one process. The main process has one reader, and each of the loader's workers has a copy.

    Args:
        given: The loader that the user gave.
        agreed: What the ranks agreed on.
        is_compared: Whether the ranks compare what is read.

    Attributes:
        dataset: The dataset that the user gave.
        name: The dataset's class, as errors name it.
        share: The rank's share of the dataset.
        shared: The memory in which passes are begun and reported.
        asked: What the dataset asked of its surroundings, in this process or before it was started. The dataset may
            remember the answers, so no question is forgotten.
        resumed: The pass that continues at a position, if there is one.
    """

    def __init__(self, given: LoaderFacts[Any], agreed: Agreed, *, is_compared: bool) -> None:
        self.dataset: IterableDataset[T] = given.dataset
        self.name: str = type(given.dataset).__name__
        is_position = is_stateful(given.dataset) and not loses_items_when_loaded(given.dataset)
        splits_itself = agreed.options.by_worker
        self.share: StreamShare = StreamShare(
            agreed.plan,
            agreed.batch_plan,
            given.batching,
            agreed.seed,
            readers=max(1, given.num_workers),
            splits_itself=splits_itself,
            takes_states=is_position and not splits_itself,
            is_compared=is_compared,
        )
        self.shared: SharedReports = SharedReports(self.share.readers)
        self.asked: set[str] = set()
        self.resumed: Resumed | None = None
        self._chosen_epoch: int | None = None  # which the user told the dataset last, if no pass has begun since
        self._made_for: int | None = None  # the part for which a worker_init_fn prepared the dataset
        self._first_pass: int | None = None  # for which a worker was started
        self._is_underway = False  # the dataset was read, and not to its end, here or before the process was started
        self._latest: ReaderPass[T] | None = None  # the pass that gave the latest item

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_latest": None}  # no pass goes on in a copy

    # ---- the next pass ----

    def choose_epoch(self, tell: Callable[[int], object], epoch: int) -> None:
        """Tell the dataset the epoch that the user chose for the next pass."""
        tell(epoch)
        self._chosen_epoch = epoch

    def take_chosen_epoch(self) -> int | None:
        """Return, once, the epoch that the user has told the dataset; None if there is none."""
        chosen, self._chosen_epoch = self._chosen_epoch, None
        return chosen

    def resume_at(self, resumed: Resumed) -> None:
        """Let a pass continue at a position."""
        self.resumed = resumed

    def forget_resumed(self, number: int | None = None) -> None:
        """Let no pass continue at a position, and ``len()`` count whole epochs again.

        Args:
            number: The pass that was to continue. Default: any pass.
        """
        if self.resumed is not None and number in {None, self.resumed.number}:
            self.resumed = None

    def resumed_at(self, number: int, epoch: int) -> Position | None:
        """Return the position where pass ``number``, over an epoch, continues; None if the pass begins the epoch."""
        if (resumed := self.resumed) is None or (resumed.number, resumed.position.epoch) != (number, epoch):
            return None
        return resumed.position

    def unread_state(self) -> bytes | None:
        """Return the dataset's own state, as text, if it was not read yet, or was read to its end."""
        return None if self._is_underway or not self.share.takes_states else written_state(self.dataset)

    # ---- a pass ----

    def prepare(self, number: int, epoch: int, worker_init_fn: Callable[[int], object] | None) -> None:
        """Prepare this worker for pass ``number``: call the user's function, which may change the dataset.

        If the dataset stays as it was, the function's questions do not count: most functions ask for a number, or a
        rank, to seed a worker.
        """
        self._first_pass = number
        if worker_init_fn is None:
            return
        part = self._start(self.resumed_at(number, epoch)).part
        asked, before = set[str](), dict(getattr(self.dataset, "__dict__", {}))
        info = self.share.worker_info(part, epoch, self.dataset, asked.add)
        with worker_info_told(info), rank_noted(partial(asked.add, RANK)):
            worker_init_fn(self.share.worker_of(part)[0])
        after = getattr(self.dataset, "__dict__", {})
        is_changed = before.keys() != after.keys() or any(after[name] is not value for name, value in before.items())
        if is_changed or "dataset" in asked:
            self.asked, self._made_for = {*_SPLITTING, *({RANK} & asked)}, part

    def _start(self, position: Position | None) -> PartStart:
        """Return where this worker begins at a position, or at the beginning of an epoch."""
        start = self.share.start(position, this_worker()[0])
        return start if position is not None or self._made_for is None else start._replace(part=self._made_for)

    def items(self) -> Iterator[T]:
        """Begin a pass when its first item is requested, and yield the items of this reader."""
        current = self._begin()
        for item in current.items():
            self._latest = current
            yield item
        self._is_underway = False
        if (state := self.unread_state()) is not None:
            current.report.store_state(ENDED, state)

    def _begin(self) -> "ReaderPass[T]":
        """Begin the pass that the main process has begun by now.

        A worker's first pass is the pass for which it was started, although later passes may have begun since.
        """
        begun, self._first_pass = self.shared.begun(self._first_pass), None
        if begun is None or this_worker()[1] != self.share.readers:
            raise error_texts.no_pass_begun(self.name)
        number, epoch = begun
        if (position := self.resumed_at(number, epoch)) is not None and position.is_within_pass:
            # In workers too: a loader may have drawn its workers' seed from these generators since.
            set_generator_states([generators_only(self.dataset)], [state for _, state in position.states.generators])
        start, report = self._start(position), self.shared.report(number, this_worker()[0])
        if not start.taken and not start.known.initial_state and (state := self.unread_state()) is not None:
            report.store_state(BEGUN, state)
            start = start._replace(known=replace(start.known, initial_state=(from_text(state.decode()),)))
        self._is_underway = True
        return ReaderPass(self, number, epoch, start, report)

    def collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
        """Return a batch, in a ``NotedBatch`` if the pass that read its samples notes the dataset's state.

        Args:
            collate_fn: The loader's.
            samples: The batch's samples.
        """
        note = None if self._latest is None else self._latest.note()  # before the user's function may read on
        batch = collate_fn(samples)
        return batch if note is None else note._replace(batch=batch)


# ---- a pass ----


class ReaderPass(Generic[T]):
    """One reader's pass over an epoch, or over what is left of one.

    Args:
        reader: The reader.
        number: Which pass.
        epoch: The epoch.
        start: Where the reader begins.
        report: What the reader reports of the pass.

    Attributes:
        report: As given.
    """

    def __init__(self, reader: StreamReader[T], number: int, epoch: int, start: PartStart, report: Report) -> None:
        self.report: Report = report
        self._reader, self._share, self._number, self._start = reader, reader.share, number, start
        self._reading: DatasetReading[T] = DatasetReading(
            reader.dataset, reader.share, epoch, start, reader.asked, report
        )
        self._place = 0  # how many items of the rank's share the reader has gone through
        self._takes_turns = not self._share.splits_itself  # readers of one stream give its batches in turn

    def items(self) -> Iterator[T]:
        """Read the dataset, and yield this rank's items of the stream, or of this reader's part of it."""
        share = self._share
        read, first = self._reading.begin()
        if first is None and share.is_compared and self.report["marks"] < 0:  # else another iterator reads this pass
            read = marked(read, self.report)
        plan = Plan(0, 1) if share.splits_itself else share.plan  # a part belongs to one rank
        # Whole batches, because states are taken between two batches.
        rounds = chain([1, share.batching.size - 1 or 1], repeat(share.batching.size))
        stream, taken = self._detecting_split(read), self._start.taken
        # These are samples, not indices, so they need no copies.
        drawn = Drawn(stream, self._reading.entered, plan, taken=taken, first=first, rounds=rounds, copies=False)
        own = self._of_reader(split_chunks(plan, drawn, self._note_end))
        return own if share.batch_plan is None else _divided(own, share, share.batch_plan, self._reader.name)

    def _of_reader(self, of_rank: Iterator[list[T]]) -> Iterator[T]:
        """Yield the items of the rank's share that this reader delivers. Each list lies within one batch."""
        size, readers, index = self._share.batching.size, self._share.readers, this_worker()[0]
        for items in of_rank:
            if self._takes_turns and self._place // size % readers != index:
                self._place += len(items)
                continue
            for item in items:
                self._place += 1
                yield item

    def note(self) -> NotedBatch | None:
        """Return the note of the batch whose last item was just yielded: the dataset's state, if known."""
        batches, over = divmod(self._place, self._share.batching.size)
        state = None if over or self._share.splits_itself else self._reading.state_now()
        return None if state is None else NotedBatch(this_worker()[0], batches, state)

    def _note_end(self, length: int) -> None:
        """Report where the stream ended; refuse an end that contradicts the other readers' or a state.

        Args:
            length: How many items the stream, or this reader's part of it, has.

        Raises:
            UnsupportedLoaderError: Readers read different streams.
            StateError: The state counts more items than the stream has.
            NoStepsError: A rank would make no step in the epoch.
        """
        share, name, taken, report = self._share, self._reader.name, self._start.taken, self.report
        if share.splits_itself:
            if length < taken if share.batching.drop_last else length <= taken - share.batching.size:
                raise error_texts.part_ended_before_state(name, self._start.part, share.readers, length)
            report["batches"] = share.batching.count(max(0, length - taken))
            return
        report["spent_ms"] = round(1000 * self._reading.spent_s)
        report["length"] = length
        reported = self._reader.shared.reported(self._number)
        lengths = reported.lengths
        if reported.ways == {STREAM}:
            lengths = list({*lengths} - {None})
            if len(lengths) > 1:
                raise error_texts.split_in_part(name, share.readers, error_texts.ends_differ(lengths))
        if not taken and None not in lengths:
            require_steps(share.plan, share.batching, name, cast("list[int]", lengths))
        if taken > length:
            raise error_texts.ended_before_state(name, taken, length)

    # ---- whether the dataset splits itself ----

    def _detecting_split(self, read: Iterator[T]) -> Iterator[T]:
        """Yield what is read. The first item shows whether the dataset asks which worker it is in.

        Up to the first item, all readers draw from the same random states. After this item, a dataset that asked draws
        from its worker's own states.
        """
        asked, (_, workers) = self._reader.asked, self._share.worker_of(self._start.part)
        first = next(read, NOTHING)
        is_part = workers > 1 and not asked.isdisjoint(_TELLING)
        if is_part:
            self._reading.use_own_states()
        if not self._share.splits_itself:
            self._takes_turns = not is_part
            if is_part:
                self.report["part"] = self._start.part
            self.report["way"] = PARTS if is_part else STREAM
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
            if asked and not asked.isdisjoint(_TELLING):
                raise error_texts.split_in_part(self._reader.name, self._share.readers, error_texts.ASKED_LATE)
            yield item

    def _require_split_by_worker(self) -> None:
        """Refuse a dataset that does not split itself over all ranks' workers, or splits itself by its rank, too.

        A dataset whose class says ``is_ddp_aware = False`` may ask for its rank, as for a log.
        """
        asked, name = self._reader.asked, self._reader.name
        if RANK in asked and not may_ask_rank(self._reader.dataset):
            raise error_texts.asked_for_rank(name)
        if asked.isdisjoint(_SPLITTING):
            raise error_texts.asked_for_too_little(name)

    def _require_one_way(self) -> None:
        """Refuse a dataset that is neither one stream nor split into parts, and a state of the other kind."""
        if (readers := self._share.readers) == 1:
            return
        name, counted, ways = self._reader.name, self._start.way, self._reader.shared.reported(self._number).ways
        if len(ways) > 1:
            raise error_texts.split_in_part(name, readers, error_texts.ASKED_IN_SOME)
        if counted is not None and {counted} != ways:
            raise error_texts.counted_otherwise(name, readers, are_parts=counted == PARTS)


def _divided(items: Iterator[T], share: StreamShare, batch_plan: Plan, name: str) -> Iterator[T]:
    """Yield a rank's samples of each batch that is made of some items."""
    batching = share.batching
    while batch := list(islice(items, batching.size)):
        if len(batch) == batching.size or not batching.drop_last:
            yield from part_of_batch(batch, batch_plan, name)
