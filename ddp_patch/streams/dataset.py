"""What stands in a loader for an iterable dataset, what each process knows of its stream, and how that is begun."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary, ref

from torch.utils.data import IterableDataset, get_worker_info

from ddp_patch.compat.private_packages import loses_items_when_loaded
from ddp_patch.compat.private_torch import WorkerInfo, noted_worker_info, rank_noted, worker_info_told
from ddp_patch.errors import StateError, UnsupportedLoaderError
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.orders.digest import fingerprint
from ddp_patch.orders.random_states import (
    EpochCounter,
    Seed,
    is_stateful,
    look,
    random_generators,
    reader_seed,
    set_generator_states,
)
from ddp_patch.positions_and_padding import Batching, Plan, turn_after
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.sharding.saved_state import Position
from ddp_patch.sharding.state_text import as_text
from ddp_patch.sharding.wrapper_attributes import AttributeProxy
from ddp_patch.streams.reports import LARGEST, SharedWorkerState

if TYPE_CHECKING:
    from ddp_patch.streams.worker_pass import WorkerPass

__all__ = [
    "ShardedIterable",
    "StreamWorker",
    "begin_worker",
    "begun_anew",
    "begun_at",
    "generators_only",
    "is_again",
    "tell_epoch",
    "this_worker",
]


T = TypeVar("T")

# What a dataset asks of the worker info that differs between workers; and that by which it can split itself.
_TELLING = frozenset({"id", "num_workers", "seed"})
_SPLITTING = frozenset({"id", "num_workers"})
# The latest iterator of each dataset in this process: a dataset may give the same one again, which continues.
_LATEST_ITERATORS: WeakKeyDictionary[Any, Callable[[], Any]] = WeakKeyDictionary()


class ShardedIterable(AttributeProxy, IterableDataset[T]):
    """One rank's share of another iterable dataset's stream.

    By default: in worker j of every rank, ``get_worker_info()`` returns what it would in worker j of
    the unpatched loader. If the dataset asks for it, worker j reads a part of the stream, and keeps this rank's share
    of that part. If it does not ask, every worker reads the same stream, and worker j of k gives every k-th batch of
    this rank's share, from the j-th on.

    ``share="by_worker"``: ``get_worker_info()`` counts all ranks' workers as one loader's, and the dataset
    splits itself.

    Args:
        worker: What reads it.
    """

    _inner, _kept_as = "dataset", "_dataset"
    # A position in the whole stream is none in this share, so the dataset's state is not this one's.
    _hidden = frozenset({"state_dict", "load_state_dict"})

    def __init__(self, worker: "StreamWorker[T]") -> None:
        self._dataset, self._worker = worker.dataset, worker
        self._seal()

    @property
    def dataset(self) -> Any:
        """The user's dataset's, as in one process; if it has none, that dataset."""
        return getattr(self._dataset, "dataset", self._dataset)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return partial(self._worker.choose_epoch, found) if name == "set_epoch" and callable(found) else found

    def require_no_generator(self) -> None:
        """Refuse to save a state where persistent workers draw from generators that the user's dataset holds."""
        if random_generators([self._dataset]):
            raise StateError(
                f"The state of {type(self._dataset).__name__} cannot be saved: it has a random generator, and "
                "persistent workers advance copies of it. Use persistent_workers=False."
            )

    def __len__(self) -> int:
        return len(self._worker.plan.share(self._worker.stream_length(), self._worker.taken))

    def __iter__(self) -> Iterator[T]:
        from ddp_patch.streams.worker_pass import WorkerPass  # which reads for the worker below

        yield from WorkerPass(self._worker).items()  # which begins when the first item is asked for


def begin_worker(worker_init_fn: Callable[[int], object] | None, epochs: EpochCounter, worker_id: int) -> None:
    """Prepare a worker's copy of the sharded dataset, and call the user's ``worker_init_fn``.

    The user's function may call ``get_worker_info()``: it sees the user's dataset, and the worker that will read it.

    Args:
        worker_init_fn: The user's function, or None.
        epochs: Tells for which pass the worker is started, and over which epoch that is.
        worker_id: Which worker it is.
    """
    info: Any = get_worker_info()
    info.dataset._worker.prepare(epochs.passes + 1, epochs.upcoming, worker_init_fn)


class StreamWorker(Generic[T]):
    """What a process knows of the stream: the main process, and each of the loader's workers in a copy of its own.

    Args:
        given: The loader that the user gave.
        agreed: What the ranks agreed on.
        is_compared: Whether the ranks compare what is read.

    Attributes:
        dataset: The dataset that the user gave.
        plan: The rank's share.
        batch_plan: The rank's share of each batch, where batches are divided; the plan then takes all of the stream.
        seed: The seed in force.
        batching: How workers make batches.
        splits_itself: Whether the dataset splits itself over all ranks' workers; else each rank keeps its share of what
            comes.
        takes_states: Whether the dataset's own state is a position in the stream.
        is_compared: As given.
        shared: What the main process and the workers tell each other.
        has_asked: Whether the dataset has asked which worker it is in. It may remember the answer, so that stays true.
        may_split: Whether it has asked for its number, or how many there are; and not for its seed alone.
        has_asked_rank: Whether it asked which rank this is, by its first item, or was made another one by a function
            that did.
        is_underway: Whether the dataset was read, and not to its end, here or in the process of which this is a copy.
        resumed: Which pass continues, in workers that are started from now on, and where; None if none does.
        taken: How many items were taken of the epoch whose rest ``len()`` counts.
        chosen_epoch: The epoch that the user told the dataset last, if no pass has begun since.
        giving: Which pass gave an item last: the next batch has its items.
    """

    def __init__(self, given: LoaderFacts[Any], agreed: Agreed, *, is_compared: bool) -> None:
        self.dataset: IterableDataset[T] = given.dataset
        self.plan: Plan = agreed.plan
        self.batch_plan: Plan | None = agreed.batch_plan
        self.seed: Seed = agreed.seed
        self.batching: Batching = given.batching
        self.splits_itself: bool = agreed.options.by_worker
        is_position = is_stateful(given.dataset) and not loses_items_when_loaded(given.dataset)
        self.takes_states: bool = is_position and not self.splits_itself
        self.is_compared: bool = is_compared
        self.shared: SharedWorkerState = SharedWorkerState(max(1, given.num_workers))
        self.resumed: tuple[int, Position] | None = None
        self.taken: int = 0
        self.has_asked: bool = False
        self.may_split: bool = False
        self.has_asked_rank: bool = False
        self.is_underway: bool = False
        self.chosen_epoch: int | None = None
        self.giving: WorkerPass[T] | None = None
        self._made_for: int | None = None  # for which worker a worker_init_fn prepared the dataset
        self._first_pass: int | None = None  # that a worker was started for

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "giving": None}  # no pass goes on in a copy

    @property
    def name(self) -> str:
        """What errors call the dataset."""
        return type(self.dataset).__name__

    def stream_length(self) -> int:
        """Return the length of the user's dataset; TypeError where it has none."""
        return len(cast(Any, self.dataset))

    def choose_epoch(self, tell: Callable[[int], object], epoch: int) -> None:
        """Tell the dataset an epoch of the user's, whatever it does with it; the next pass is over that epoch."""
        tell(epoch)
        self.chosen_epoch = epoch

    def written_state(self) -> bytes | None:
        """Return the dataset's own state now, as text; None if it has none, or one that is too large or no text."""
        with suppress(Exception):  # the user's code; without a state its stream is read again
            written = as_text(cast(Any, self.dataset).state_dict()).encode()
            return written if len(written) <= LARGEST else None
        return None

    def unread(self) -> bytes | None:
        """Return the dataset's own state, as text, if nobody has read the dataset yet, or somebody has to its end."""
        return None if self.is_underway or not self.takes_states else self.written_state()

    def resumed_at(self, number: int, epoch: int) -> Position | None:
        """Return where pass ``number``, over an epoch, continues; None if it begins that epoch."""
        resumed, position = self.resumed or (None, None)
        return position if number == resumed and position is not None and position.epoch == epoch else None

    # ---- in a worker ----

    def part_of(self, position: Position | None) -> int:
        """Return whose part this worker reads from a position on: another one's after a resume, as turns go on."""
        worker, workers = this_worker()
        if position is None:
            return worker if self._made_for is None else self._made_for
        turn = turn_after(self.batches_done(position)) if self.splits_itself else position.turn or 0
        return (worker + turn) % workers

    def batches_done(self, position: Position) -> Sequence[int]:
        """Return how many batches each of this rank's workers has made where the dataset splits itself."""
        workers, size = this_worker()[1], self.batching.size
        if len(position.taken) <= 1:  # in an explicit world ranks cannot report which workers have ended
            whole, more = divmod(sum(position.taken) // self.plan.num_replicas // size, workers)
            return [whole + (worker < more) for worker in range(workers)]
        return [taken // size for taken in position.taken[self.plan.rank * workers :][:workers]]

    def told(self, part: int) -> tuple[int, int]:
        """Return which worker of how many the dataset thinks it is in, as the reader of a part."""
        workers = this_worker()[1]
        if self.splits_itself:
            return part + self.plan.rank * workers, workers * self.plan.num_replicas
        return part, workers

    def info(self, part: int, epoch: int, note: Callable[[str], object] | None = None) -> WorkerInfo | None:
        """Return what ``get_worker_info()`` returns to the dataset, as the reader of a part; None in the main process.

        Args:
            part: Which part.
            epoch: The epoch.
            note: Called with the name of each attribute that somebody reads. Default: what the dataset asks is noted.
        """
        worker, workers = self.told(part)
        if get_worker_info() is None and workers == 1:
            return None
        seed = reader_seed(self.seed.value, epoch) + worker
        return noted_worker_info(worker, workers, seed, self.dataset, note or self._note_asked)

    def _note_asked(self, name: str) -> None:
        self.has_asked |= name in _TELLING
        self.may_split |= name in _SPLITTING

    def note_rank(self) -> None:
        """Record that somebody asks which rank this is."""
        self.has_asked_rank = True

    def prepare(self, number: int, epoch: int, worker_init_fn: Callable[[int], object] | None) -> None:
        """Prepare this worker for pass ``number``: call the user's function, which may make the dataset another one.

        That it asked for its number, or for its rank, says nothing: most functions do so to seed a worker.
        """
        self._first_pass = number
        if worker_init_fn is None:
            return
        part = self.part_of(self.resumed_at(number, epoch))
        worker, _ = self.told(part)
        asked, before = set[str](), dict(getattr(self.dataset, "__dict__", {}))
        with worker_info_told(self.info(part, epoch, asked.add)), rank_noted(partial(asked.add, "rank")):
            worker_init_fn(worker)
        after = getattr(self.dataset, "__dict__", {})
        is_changed = before.keys() != after.keys() or any(after[name] is not value for name, value in before.items())
        if is_changed or "dataset" in asked:
            self.has_asked = self.may_split = True
            self.has_asked_rank, self._made_for = "rank" in asked, part

    def begin(self) -> tuple[int, int, Position | None]:
        """Begin a pass when its first item is asked for; return its number, its epoch, and where in that it continues.

        By then the main process has begun the epoch. A worker's first pass is the one that it was started for, although
        others may have begun since.
        """
        number, self._first_pass = self._first_pass, None
        if number is None:
            number = self.shared.latest_pass
        epoch = self.shared.epoch_of(number)
        if epoch is None or this_worker()[1] != self.shared.readers:
            raise UnsupportedLoaderError(
                f"{self.name} cannot be sharded here: the patched loader was rebuilt without its "
                "sampler, which begins each epoch, or with another number of workers. Lightning's predict and "
                "overfit_batches and accelerate's skip_first_batches do this. Iterate the one that "
                "patch_dataloader_to_ddp() returned; restore_loader() resumes it mid-epoch."
            )
        if (position := self.resumed_at(number, epoch)) is not None and position.is_within_pass:
            # In workers too: a loader may have drawn its workers' seed from these generators since.
            set_generator_states([generators_only(self.dataset)], [state for _, state in position.states.generators])
        return number, epoch, position

    def collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
        """Return a batch, in a ``NotedBatch`` if the pass that read its samples noted something.

        Args:
            collate_fn: The loader's.
            samples: The batch's samples.
        """
        if (giving := self.giving) is None:
            return collate_fn(samples)
        note = giving.note()  # before the user's function may read on
        batch = collate_fn(samples)
        return batch if note is None else note._replace(batch=batch)


def generators_only(dataset: object) -> SimpleNamespace:
    """Return what holds a dataset's random generators and nothing else: its own state is a position in it."""
    return SimpleNamespace(generators=random_generators([dataset]))


def this_worker() -> tuple[int, int]:
    """Return which worker of how many this is; the main process is the only one."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def tell_epoch(dataset: object, epoch: int) -> None:
    """Tell a dataset its epoch, if it has a method for that."""
    if callable(tell := getattr(dataset, "set_epoch", None)):
        tell(epoch)


# ---- how a dataset is begun: anew, or where its own state was taken ----


def begun_anew(dataset: Any, initial_state: Sequence[Any], epoch: int) -> tuple[Iterator[Any], Iterator[Any]]:
    """Begin a dataset where an epoch begins; return its iterator, and what to read.

    Args:
        dataset: The dataset.
        initial_state: Its own state where the epoch begins, as the only element, if that is known.
        epoch: The epoch.
    """
    is_moved = initial_state and not _stands_at(dataset, *initial_state)  # it was read since
    if is_moved:
        # Its state may have random states, from which the epoch does not draw. One that takes a state only once it is
        # iterated begins anew by itself.
        with look(), suppress(Exception):
            dataset.load_state_dict(*initial_state)
        tell_epoch(dataset, epoch)  # the state may have the epoch before
    iterator: Iterator[Any] = iter(dataset)
    return iterator, _anew_if_empty(dataset, iterator) if is_moved else iterator


def begun_at(dataset: Any, state: Any) -> Iterator[Any]:
    """Begin a dataset where its own state was taken.

    If it is its own iterator, load the state before ``iter()`` and, if that had no effect, again after it.

    Raises:
        StateError: It took it neither time.
    """
    refused: Exception | None = None
    try:
        dataset.load_state_dict(state)
    except Exception as error:  # noqa: BLE001 - the user's, which may have nothing yet to put the state into
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
    except Exception:  # noqa: BLE001 - the user's, which may tell a state only once it is iterated
        return False


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


def is_again(dataset: Any, iterator: Any) -> bool:
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
