"""How a reader reads the user's dataset in one pass, as one process does: which part, and from where."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary, ref

from torch.utils.data import get_worker_info

from ddp_patch.compat.private_packages import forget_loaded_state
from ddp_patch.compat.private_torch import WorkerInfo, noted_worker_info, rank_noted, worker_info_told
from ddp_patch.errors import StateError
from ddp_patch.orders.digest import fingerprint, number_of, number_or_zero
from ddp_patch.orders.random_states import PrivateRNG, Seed, generator_states, is_stateful, look, reader_seed
from ddp_patch.positions_and_padding import Batching, Plan, turn_after
from ddp_patch.sharding.saved_state import RECOGNISED_BY, Position, StreamSnapshot, StreamStart
from ddp_patch.sharding.values_as_text import as_text
from ddp_patch.streams.error_texts import other_stream
from ddp_patch.streams.item_names import ItemNames
from ddp_patch.streams.reports import LARGEST, PARTS, STREAM, Report

T = TypeVar("T")

# Stands for an item where there is none.
NOTHING: Any = object()
# The name of the rank among what a dataset asks; the other names are those of the worker info's attributes.
RANK: Final = "rank"
# The latest iterator of each dataset in this process: a dataset may give the same one again, which continues.
_LATEST_ITERATORS: Final[WeakKeyDictionary[Any, Callable[[], Any]]] = WeakKeyDictionary()


# ---- which part, and where ----


def this_worker() -> tuple[int, int]:
    """Return this worker's number, and the number of workers; the main process is worker 0 of 1."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


class PartStart(NamedTuple):
    """Where a reader's pass begins.

    Attributes:
        part: Which part the reader reads.
        taken: How many items of the part, or of the one stream, all ranks had taken.
        way: Whether these were items of one STREAM, or of PARTS; None if both are possible.
        known: The snapshot of the stream at this position.
    """

    part: int
    taken: int = 0
    way: int | None = None
    known: StreamSnapshot = StreamSnapshot()


@dataclass(frozen=True, slots=True)
class StreamShare:
    """This rank's share of an iterable dataset's stream, delivered by readers. All processes have the same share.

    Attributes:
        plan: The rank's share.
        batch_plan: The rank's share of each batch, where batches are divided; the plan then takes all of the stream.
        batching: How readers make batches.
        seed: The seed of every epoch's order.
        readers: How many processes of this rank read the dataset.
        splits_itself: Whether the dataset splits itself over all ranks' readers; else each rank keeps its share of what
            the dataset gives.
        takes_states: Whether the dataset's own state is a position in the stream.
        is_compared: Whether the ranks compare what is read.
    """

    plan: Plan
    batch_plan: Plan | None
    batching: Batching
    seed: Seed
    readers: int
    splits_itself: bool = False
    takes_states: bool = False
    is_compared: bool = False

    def worker_of(self, part: int) -> tuple[int, int]:
        """Return the number that the worker info shows to the reader of a part, and the number of all workers.

        Examples:
            >>> seed, batching = Seed(0, is_chosen=True), Batching(4, drop_last=False)
            >>> [StreamShare(Plan(1, 2), None, batching, seed, 3, splits).worker_of(2) for splits in (False, True)]
            [(2, 3), (5, 6)]
        """
        if self.splits_itself:
            return part + self.plan.rank * self.readers, self.readers * self.plan.num_replicas
        return part, self.readers

    def worker_info(
        self, part: int, epoch: int, dataset: Any, note: Callable[[str], object] = lambda _: None
    ) -> WorkerInfo | None:
        """Return the worker info that the dataset sees as the reader of a part; None in the main process.

        Args:
            part: Which part.
            epoch: The epoch.
            dataset: The dataset.
            note: Called with the name of each attribute that is read.
        """
        worker, workers = self.worker_of(part)
        if get_worker_info() is None and workers == 1:
            return None
        return noted_worker_info(worker, workers, reader_seed(self.seed.value, epoch) + worker, dataset, note)

    def start(self, position: Position | None, reader: int) -> PartStart:
        """Return where a reader begins at a position; if there is none, at the beginning of its part.

        The first reader goes on with the part whose turn is next, the second one with the part after that.
        """
        if position is None:
            return PartStart(reader)
        if self.splits_itself:
            before = self._batches_before(position)
            part = (reader + turn_after(before)) % self.readers
            return PartStart(part, before[part] * self.batching.size)
        part = (reader + (position.turn or 0)) % self.readers
        taken, known = position.taken or (0,), position.states.streams or (StreamSnapshot(),)
        way = PARTS if len(taken) > 1 else None if position.is_at_epoch_start else STREAM
        return PartStart(part, taken[part % len(taken)], way, known[part % len(known)])

    def _batches_before(self, position: Position) -> Sequence[int]:
        """Return how many batches each of this rank's readers has made, if the dataset splits itself."""
        readers, size = self.readers, self.batching.size
        if len(position.taken) <= 1:  # in an explicit world ranks cannot report which readers have ended
            whole, more = divmod(sum(position.taken) // self.plan.num_replicas // size, readers)
            return [whole + (reader < more) for reader in range(readers)]
        return [taken // size for taken in position.taken[self.plan.rank * readers :][:readers]]


# ---- the dataset ----


def tell_epoch(dataset: object, epoch: int) -> None:
    """Tell a dataset its epoch, if it has a method for that."""
    if callable(tell := getattr(dataset, "set_epoch", None)):
        tell(epoch)


def written_state(dataset: Any) -> bytes | None:
    """Return a dataset's present state, as text; None if there is none, or if it is too large or cannot be written."""
    with suppress(Exception):  # the user's code; without a state its stream is read again
        written = as_text(dataset.state_dict()).encode()
        return written if len(written) <= LARGEST else None
    return None


class DatasetReading(Generic[T]):
    """Reads a dataset in one pass, and returns the dataset's own state where that is a position in the stream.

    Args:
        dataset: The dataset.
        share: The rank's share of the dataset.
        epoch: The epoch.
        start: Where the reader begins.
        asked: Collects the names of the attributes that the dataset asks for.
        report: Takes a description of the first items.

    Attributes:
        spent_s: How many seconds the dataset took.
    """

    def __init__(
        self, dataset: Any, share: StreamShare, epoch: int, start: PartStart, asked: set[str], report: Report
    ) -> None:
        self.spent_s: float = 0.0
        self._dataset, self._share, self._epoch, self._start = dataset, share, epoch, start
        self._asked, self._report = asked, report
        self._info = worker_info_told(share.worker_info(start.part, epoch, dataset, asked.add))
        self._states = self._new_states()
        self._is_drawn = False  # the stream may have been read before
        # The states of the dataset's generators when the pass began; None if the dataset's own state is no position.
        self._generators = generator_states([dataset]) if share.takes_states else None

    def _new_states(self) -> PrivateRNG:
        return PrivateRNG(self._share.seed.value, self._epoch, name=type(self._dataset).__name__)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """While entered, once for each batch, show the dataset the unpatched loader's worker info and epoch's states.

        All readers begin with the same states, so that a dataset may shuffle its files and then take its part.
        """
        with self._info, self._states:  # the info first, because a torch without this context raises an error
            began_s = perf_counter()
            try:
                yield
            finally:
                self.spent_s += perf_counter() - began_s

    def use_own_states(self) -> None:
        """Let the dataset draw from states of its worker's own from now on, as in torch."""
        self._states.switch_to_worker(self._share.worker_of(self._start.part)[0])

    # ---- from where ----

    def begin(self) -> tuple[Iterator[T], list[T] | None]:
        """Tell the dataset its epoch; return its items, and the first ones if it goes on from its own state.

        Padding repeats the first items, so they are read where there may be padding.
        """
        plan, start = self._share.plan, self._start
        with self._info:
            # Told after the generators' states were put back, because it may seed them.
            tell_epoch(self._dataset, self._epoch)
        if self._generators is None or not start.known.state:
            return self._from_beginning(), None
        first = list[T]()
        if plan.uneven == "pad" and start.taken and (repeats := plan.num_replicas - 1):
            seen = 0 if start.known.first is None else start.known.first.seen
            with self.entered():
                first = list(islice(self._from_beginning(), max(repeats, seen)))
            if len(first) < repeats:
                raise other_stream(type(self._dataset).__name__, seen)
            self._states = self._new_states()
        if start.way == PARTS:
            self.use_own_states()  # after the first item, which was read before, all readers use their own states
        return self._followed(self._read(partial(_begun_at, self._dataset, *start.known.state))), first

    def _from_beginning(self) -> Iterator[T]:
        """Yield all items, and report the first ones.

        Raises:
            StateError: The first items differ from the first items when the state was taken.
        """
        seen: list[tuple[bytes | None, int]] = []
        names, known = ItemNames(may_move=True), self._start.known.first
        items = self._read(self._begun_anew)
        for item in items:
            seen.append((names.name_of(item), number_or_zero(item)))
            first = _start_of(seen)
            self._report["starts"][first.seen - 1] = [-1 if part is None else part for part in first[1:]]
            self._report["seen"] = first.seen
            if known is not None and known.seen == first.seen and not known.is_again(first, self._is_drawn):
                raise other_stream(type(self._dataset).__name__, known.seen)
            yield item
            if len(seen) == RECOGNISED_BY:
                break
        yield from self._followed(items)

    def _begun_anew(self) -> Iterator[T]:
        """Begin the dataset for an epoch. If its iterator has a state, the dataset's own state is no position."""
        dataset, initial_state = self._dataset, self._start.known.initial_state
        is_moved = initial_state and not _stands_at(dataset, *initial_state)  # the dataset was read since
        if is_moved:
            # Its state may have random states, from which the epoch does not draw. A dataset that takes a state only
            # once it is iterated begins anew by itself.
            with look(), suppress(Exception):
                dataset.load_state_dict(*initial_state)
            tell_epoch(dataset, self._epoch)  # the state may have the epoch before
        iterator: Iterator[T] = iter(dataset)
        self._is_drawn = iterator is dataset or _is_again(dataset, iterator)
        if iterator is not dataset and is_stateful(iterator):
            self._generators = None
        return _anew_if_empty(dataset, iterator) if is_moved else iterator

    def _read(self, begin: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Yield the items of what ``begin()`` begins, by ``next()`` alone; note if the first one needs the rank."""
        with rank_noted(partial(self._asked.add, RANK)):
            iterator = begin()
            item = next(iterator, NOTHING)
        while item is not NOTHING:
            yield item
            item = next(iterator, NOTHING)

    def _followed(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items after a dataset's state, or after those by which the stream is recognised."""
        for item in items:
            forget_loaded_state(self._dataset)
            yield item
            break
        yield from items
        self._generators = None  # at the end many datasets start again

    def state_now(self) -> bytes | None:
        """Return the dataset's own state, as text; None if the state is no position in the stream.

        A dataset that drew from random states may have to draw the same again when it begins, or to go on drawing: its
        own state does not say which, so its stream is read again.
        """
        if self._generators is None or not self._states.drew_nothing:
            return None
        # What the dataset asks for its state does not count.
        with worker_info_told(self._share.worker_info(self._start.part, self._epoch, self._dataset)):
            if generator_states([self._dataset]) != self._generators:
                return None
            state = written_state(self._dataset)
        if state is None:
            self._generators = None
        return state


def _start_of(seen: Sequence[tuple[bytes | None, int]]) -> StreamStart:
    """Return how a stream begins, by the names and hashes of its first items."""
    names, hashes = zip(*seen, strict=True)
    value = None if None in names else number_of(names)
    return StreamStart(len(seen), value, number_of(hashes) if len(set(hashes)) >= min(2, len(seen)) else None)


# ---- how the dataset is begun: where its own state was taken, or anew ----


def _begun_at(dataset: Any, state: Any) -> Iterator[Any]:
    """Begin a dataset where its own state was taken.

    If the dataset is its own iterator, load the state before ``iter()`` and, if that had no effect, again after it.

    Raises:
        StateError: The dataset took the state neither time.
    """
    refused: Exception | None = None
    try:
        dataset.load_state_dict(state)
    except Exception as error:  # noqa: BLE001 - the user's dataset may have nothing yet to put the state into
        refused = error
    iterator = iter(dataset)
    if refused is not None and iterator is not dataset:
        raise refused
    if iterator is dataset and not _stands_at(dataset, state):
        dataset.load_state_dict(state)
        if not _stands_at(dataset, state):
            raise StateError(
                f"{type(dataset).__name__} cannot resume from the state: after load_state_dict() and iter(), its "
                "state_dict() differs from the loaded one. Correct these methods, or leave them out: then its "
                "stream is read again."
            )
    return cast(Iterator[Any], iterator)


def _stands_at(dataset: Any, state: Any) -> bool:
    try:
        return fingerprint([dataset.state_dict()]) == fingerprint([state])
    except Exception:  # noqa: BLE001 - the user's dataset may have a state only once it is iterated
        return False


def _anew_if_empty(dataset: Any, iterator: Iterator[T]) -> Iterator[T]:
    """Yield the items after a loaded state; if the state is of the stream's end, yield the next pass's items."""
    is_empty = True
    for _ in range(2):
        with suppress(StopIteration):
            while True:  # by next() alone: iter() might begin its own iterator anew
                item = next(iterator)
                is_empty = False
                yield item
        if not is_empty:
            return
        iterator = iter(dataset)


def _is_again(dataset: Any, iterator: Any) -> bool:
    """Return whether a dataset returned this iterator before; store the iterator, weakly referenced if possible."""
    try:
        before = _LATEST_ITERATORS.get(dataset)
        try:
            _LATEST_ITERATORS[dataset] = ref(iterator)
        except TypeError:  # as an iterator written in C may raise
            _LATEST_ITERATORS[dataset] = lambda: iterator
    except TypeError:  # the dataset cannot be hashed
        return False
    return before is not None and before() is iterator
