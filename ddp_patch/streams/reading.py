"""How a worker reads a dataset: what the dataset asks, how its stream begins, and its own state."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from time import perf_counter
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, ref

from torch.utils.data import IterableDataset, get_worker_info

from ddp_patch.compat.packages import forget_loaded_state, loses_items_when_loaded
from ddp_patch.compat.private_torch import WorkerInfo, noted_worker_info, rank_noted, worker_info_told
from ddp_patch.errors import StateError
from ddp_patch.options import Options
from ddp_patch.orders.fingerprint import fingerprint, number_of, number_or_zero
from ddp_patch.orders.generators import generator_states, is_stateful
from ddp_patch.orders.random_states import PrivateRNG, look
from ddp_patch.sharding.saved_position import RECOGNISED_BY, StreamSnapshot, StreamStart
from ddp_patch.streams.item_names import name_of

__all__ = [
    "AsDataset",
    "DatasetStateTracker",
    "Reader",
    "can_snapshot",
    "tell_epoch",
    "this_worker",
]


T = TypeVar("T")

# What a dataset asks of the worker info that differs between workers.
_TELLING = frozenset({"id", "num_workers", "seed"})

_END: Any = object()


def this_worker() -> tuple[int, int]:
    """Return which worker of how many this is; the main process is the only one."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def tell_epoch(dataset: object, epoch: int) -> None:
    """Tell a dataset its epoch, if it has a method for that."""
    if callable(tell := getattr(dataset, "set_epoch", None)):
        tell(epoch)


class Reader:
    """Reads a dataset, answers its ``get_worker_info()``, and records whether it asked.

    Attributes:
        has_asked: Whether it has. It may remember the answer, so this stays true in later passes.
        asked_before_item: Whether an item came after the dataset had asked.
        has_asked_rank: Whether it asked which rank this is, by its first item, or was made another one by a function
            that did.
        spent_s: How many seconds its items took.
    """

    def __init__(self) -> None:
        self.has_asked: bool = False
        self.asked_before_item: bool = False
        self.has_asked_rank: bool = False
        self.spent_s: float = 0.0
        self._has_dataset = False  # whether somebody reached for the dataset through the worker info

    def info(self, worker: int, workers: int, seed: int, dataset: Any) -> WorkerInfo | None:
        """Return what ``get_worker_info()`` returns to the dataset; in the main process torch returns None."""
        if get_worker_info() is None and workers == 1:
            return None
        return noted_worker_info(worker, workers, seed, dataset, self._note)

    def prepare(self, dataset: Any, worker_init_fn: Callable[[int], object], worker: int) -> None:
        """Call the user's ``worker_init_fn``, and note whether it made the dataset another one for this worker.

        That it asked for its number, or for its rank, says nothing: most functions do so to seed a worker.
        """
        before, asked, asked_rank = dict(getattr(dataset, "__dict__", {})), self.has_asked, self.has_asked_rank
        self._has_dataset = False
        with rank_noted(self._note_rank):
            worker_init_fn(worker)
        after = getattr(dataset, "__dict__", {})
        is_changed = before.keys() != after.keys() or any(after[name] is not value for name, value in before.items())
        is_made = self._has_dataset or is_changed
        self.has_asked = asked or is_made
        self.has_asked_rank = asked_rank or (self.has_asked_rank and is_made)

    def read(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterate a dataset, which ``begin()`` begins. It is to be read in ``AsDataset``."""
        with rank_noted(self._note_rank):
            iterator = begin()
            item = next(iterator, _END)
        while item is not _END:
            self.asked_before_item |= self.has_asked
            yield item
            item = next(iterator, _END)

    @contextmanager
    def unnoted(self, info: WorkerInfo | None) -> Iterator[None]:
        """While entered, ``get_worker_info()`` returns ``info``, and that the dataset asks does not count."""
        asked = self.has_asked
        with worker_info_told(info):
            yield
        self.has_asked = asked

    def _note_rank(self) -> None:
        self.has_asked_rank = True

    def _note(self, name: str) -> None:
        self.has_asked |= name in _TELLING
        self._has_dataset |= name == "dataset"


class AsDataset(AbstractContextManager[None]):
    """Entered, again and again, while a dataset is read: it draws from an epoch's states, and has its own worker info.

    It is a class because that is entered faster than a function, and it is for each batch.

    Args:
        states: The random states.
        info: What ``get_worker_info()`` returns to it.
        reader: What reads it, which counts the seconds.
    """

    def __init__(self, states: AbstractContextManager[None], info: WorkerInfo | None, reader: Reader) -> None:
        self._states, self._told, self._reader = states, worker_info_told(info), reader

    def __enter__(self) -> None:
        self._told.__enter__()  # first: a torch without that raises
        self._states.__enter__()
        self._began_s = perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._reader.spent_s += perf_counter() - self._began_s
        self._states.__exit__(None, None, None)
        self._told.__exit__()


# The latest iterator of each dataset in this process: a dataset may give the same one again, which continues.
_LATEST_ITERATORS: WeakKeyDictionary[Any, Callable[[], Any]] = WeakKeyDictionary()


def can_snapshot(dataset: object, options: Options) -> bool:
    """Return whether a dataset's own state is the position of a stream that is sharded in this way."""
    return (
        not options.by_worker
        and not options.needs_length  # otherwise every rank is elsewhere
        and is_stateful(dataset)
        and not loses_items_when_loaded(dataset)
    )


class DatasetStateTracker:
    """Records how a worker's stream begins, and takes the dataset's own state.

    Args:
        dataset: The dataset that the user gave.
        states: The random states that the dataset draws from, if its own state may be taken; otherwise None.
        known: What is known of the stream where it begins, or of that which is to be continued.
        epoch: Which epoch it is of.

    Attributes:
        start: What the first items that were read are; None if the stream was not read from its beginning.
    """

    def __init__(
        self, dataset: IterableDataset[Any], states: PrivateRNG | None, known: StreamSnapshot, epoch: int
    ) -> None:
        self.start: StreamStart | None = None
        self._dataset, self._states, self._known, self._epoch = dataset, states, known, epoch
        self._generators = generator_states([dataset]) if states is not None else ()
        self._is_over = self._is_drawn = False

    def iterate(self) -> Iterator[Any]:
        """Begin to iterate the dataset; take no states of it if its iterator has one, which is the position then."""
        dataset = cast(Any, self._dataset)
        is_moved = self._known.initial_state and not self._stands_at(*self._known.initial_state)  # it was read since
        if is_moved:
            # Its state may have random states, from which the epoch does not draw. One that takes a state only once it
            # is iterated begins anew by itself.
            with look(), suppress(Exception):
                dataset.load_state_dict(*self._known.initial_state)
            tell_epoch(dataset, self._epoch)  # the state may have the epoch before
        iterator: Iterator[Any] = iter(dataset)
        self._is_drawn = iterator is dataset or _is_again(dataset, iterator)
        if iterator is not dataset and is_stateful(iterator):
            self._states = None
        return _anew_if_empty(dataset, iterator) if is_moved else iterator

    def iterate_from_state(self) -> Iterator[Any]:
        """Begin to iterate the dataset where its ``state_dict()`` was taken that is to be continued.

        If the dataset is its own iterator, load before ``iter()`` and, if that had no effect, again after it.

        Raises:
            StateError: It took it neither time.
        """
        dataset, (state,) = cast(Any, self._dataset), self._known.state
        refused: Exception | None = None
        try:
            dataset.load_state_dict(state)
        except Exception as error:  # noqa: BLE001 - the user's, which may have nothing yet to put the state into
            refused = error
        iterator: Any = iter(dataset)
        if refused is not None and iterator is not dataset:
            raise refused
        if iterator is dataset and not self._stands_at(state):
            dataset.load_state_dict(state)
            if not self._stands_at(state):
                raise StateError(
                    f"{type(dataset).__name__} cannot resume from the state: after load_state_dict() and iter(), its "
                    "state_dict() differs from the loaded one. Correct these methods, or leave them out: then its "
                    "stream is read again."
                )
        return cast(Iterator[Any], iterator)

    def _stands_at(self, state: Any) -> bool:
        try:
            return fingerprint([cast(Any, self._dataset).state_dict()]) == fingerprint([state])
        except Exception:  # noqa: BLE001 - the user's, which may tell a state only once it is iterated
            return False

    def watch(self, items: Iterator[T]) -> Iterator[T]:
        """Pass the items of a stream on that is read from its beginning.

        Raises:
            StateError: It does not begin as it did when a state was taken.
        """
        seen: list[tuple[bytes | None, int]] = []
        for item in items:
            seen.append((name_of(item), number_or_zero(item)))
            first = self.start = _start_of(seen)
            known = self._known.first
            if known is not None and known.seen == first.seen and not known.is_again(first, self._is_drawn):
                raise self._other_stream()
            yield item
            if len(seen) == RECOGNISED_BY:
                break
        yield from self.follow(items)

    def read_first(self, items: Iterator[T], count: int) -> list[T]:
        """Return this many of the first items of a stream; as ``watch``, raise StateError if it begins otherwise."""
        first = list(islice(self.watch(items), count))
        if len(first) < count:
            raise self._other_stream()
        return first

    def _other_stream(self) -> StateError:
        count = self._known.first.seen if self._known.first else 0
        return StateError(
            f"{type(self._dataset).__name__} cannot resume from the state: its first {count} items differ from those "
            "when the state was taken, so the finished ones cannot be skipped. Restore the state with the same "
            "samples in the same order; rebuild a dataset that is its own iterator."
        )

    def follow(self, items: Iterator[T]) -> Iterator[T]:
        """Pass the items of a stream on that is not read from its beginning, or no longer."""
        for item in items:
            forget_loaded_state(self._dataset)
            yield item
            break
        yield from items
        self._is_over = True

    def start_after(self, items: int) -> StreamStart | None:
        """Return what the first items are, if exactly ``min(8, items)`` were read; otherwise None."""
        start = self.start
        return start if start is not None and start.seen == min(RECOGNISED_BY, items) else None

    def snapshot(self) -> bytes | None:
        """Return the dataset's own state, pickled; None if that does not contain the stream's position.

        A dataset that drew from random states may have to draw the same again when it begins, or to continue with what
        comes next: its own state does not say which, so its stream is read again. At the end many start again.
        """
        if self._states is None or self._is_over or not self._states.drew_nothing:
            return None
        try:
            if generator_states([self._dataset]) != self._generators:
                return None
            return pickle.dumps(cast(Any, self._dataset).state_dict())
        except Exception:  # noqa: BLE001 - the user's code, without which the stream is read again
            return None


def _anew_if_empty(dataset: Any, iterator: Iterator[T]) -> Iterator[T]:
    """Yield the items of a dataset that was given a state; if that was of its end, those after that."""
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
    """Return whether a dataset gave the same iterator before; remember it, without keeping it alive if possible."""
    try:
        before = _LATEST_ITERATORS.get(dataset)
        try:
            _LATEST_ITERATORS[dataset] = ref(iterator)
        except TypeError:  # as some written in C
            _LATEST_ITERATORS[dataset] = lambda: iterator
    except TypeError:  # the dataset cannot be hashed
        return False
    return before is not None and before() is iterator


def _start_of(seen: Sequence[tuple[bytes | None, int]]) -> StreamStart:
    """Return how a stream begins, by the names and hashes of its first items."""
    names, hashes = zip(*seen, strict=True)
    value = None if None in names else number_of(names)
    return StreamStart(len(seen), value, number_of(hashes) if len(set(hashes)) >= min(2, len(seen)) else None)
