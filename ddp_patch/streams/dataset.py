"""One rank's share of an iterable dataset, which the loader's workers read."""

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, Literal, TypeVar, cast

from torch.utils.data import IterableDataset, get_worker_info

from ddp_patch.compat.private_torch import is_torchs_collating, worker_info_told
from ddp_patch.errors import StateError, UnsupportedLoaderError
from ddp_patch.options import Options
from ddp_patch.orders.generators import generator_states, random_generators, set_generator_states
from ddp_patch.orders.random_states import EpochCounter, Seed
from ddp_patch.plan import Batching, Consumed, Plan
from ddp_patch.schedule import made_in_turn, turn_after
from ddp_patch.sharding.sampler_states import AttributeProxy
from ddp_patch.sharding.saved_position import BatchNote, NotedBatch, Position, StreamSnapshot, split_consumed
from ddp_patch.streams.reading import Reader, can_snapshot, tell_epoch, this_worker
from ddp_patch.streams.shared_state import SharedWorkerState
from ddp_patch.streams.stream_marks import StreamMarks
from ddp_patch.streams.worker_pass import WorkerPass, WorkerPosition, pickled
from ddp_patch.walks import plain_tensors

__all__ = ["IterableWorkerInit", "ShardedIterable", "StreamWorker", "WorkerIterator", "generators_only"]


T = TypeVar("T")

_KEY = "ddp_patch"


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

    Attributes:
        shared: What the main process and the workers report to each other.
    """

    _inner, _kept_as = "dataset", "_dataset"
    # A position in the whole stream is none in this share, so the dataset's state is not this one's.
    _hidden = frozenset({"state_dict", "load_state_dict"})

    def __init__(self, worker: "StreamWorker[T]") -> None:
        self._dataset, self._worker = worker.dataset, worker
        self.shared: SharedWorkerState = worker.shared
        self._chosen_epoch: int | None = None
        self._seal()

    @property
    def dataset(self) -> Any:
        """The user's dataset's, as in one process; if it has none, that dataset."""
        return getattr(self._dataset, "dataset", self._dataset)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return partial(self._choose_epoch, found) if name == "set_epoch" and callable(found) else found

    def _choose_epoch(self, tell: Callable[[int], object], epoch: int) -> None:
        """Tell the user's dataset its epoch, whatever it does with it; the next pass is over that epoch."""
        tell(epoch)
        self._chosen_epoch = epoch

    def take_chosen_epoch(self) -> int | None:
        """Return the epoch that the user has chosen by ``set_epoch`` since this was last called; None if none."""
        chosen, self._chosen_epoch = self._chosen_epoch, None
        return chosen

    def require_no_generator(self) -> None:
        """Refuse to save a state where persistent workers draw from generators that the user's dataset holds."""
        if random_generators([self._dataset]):
            raise StateError(
                f"The state of {type(self._dataset).__name__} cannot be saved: it has a random generator, and "
                "persistent workers advance copies of it. Use persistent_workers=False."
            )

    def collate_with_notes(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a ``collate_fn`` with whose batches travels what workers note of them."""
        return partial(_collate_noted, self._worker, collate_fn)

    def __len__(self) -> int:
        return self._worker.share_length()

    def __iter__(self) -> Iterator[T]:
        return WorkerIterator(self._worker)

    def is_read_by(self, worker: "StreamWorker[T]") -> bool:
        """Return whether this is what reads it."""
        return self._worker is worker

    def begin_worker(self, number: int, epoch: int, worker_init_fn: Callable[[int], object] | None) -> None:
        """Prepare this worker's copy for pass ``number``; see ``StreamWorker.prepare``."""
        self._worker.prepare(number, epoch, worker_init_fn)


class WorkerIterator(Iterator[T]):
    """A worker's items in one pass. Nothing is read before the first is asked for.

    torchdata's loader saves and resumes it in the worker by its ``state_dict``, where it would else count items from
    the pass's beginning, and lose some at the second stop.

    Args:
        worker: What reads them.
    """

    def __init__(self, worker: "StreamWorker[T]") -> None:
        self._worker = worker
        self._items: Iterator[T] | None = None
        self._loaded: WorkerPosition | None = None
        self._position: Callable[[], WorkerPosition] = worker.position_unbegun

    def __next__(self) -> T:
        if self._items is None:
            self._items, self._position = self._worker.begin(self._loaded)
        return next(self._items)

    def state_dict(self) -> dict[str, Any]:
        """Return its position, as the only value."""
        loaded = self._loaded if self._items is None else None
        return {_KEY: (loaded or self._position()).plain()}

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


class StreamWorker(Generic[T]):
    """Reads a rank's share of an iterable dataset: in the main process, or as a copy in each of the loader's workers.

    Args:
        dataset: The dataset that the user gave.
        plan: The rank's share.
        options: What the user chose.
        seed: The seed in force.
        batching: How workers make batches.
        shared: What the main process and the workers report to each other.
        batch_plan: The rank's share of each batch, where batches are divided; the plan then takes all of the stream.
        marks: Where to mark what is read, for the ranks to compare; None if nobody does.
        is_kept: Whether the next pass reads the same dataset, not a new copy of it.

    Attributes:
        reader: Tells the dataset which worker it is in.
        loaded_at_end: The epoch of which nothing is left in an iterator that was loaded in this process.
    """

    def __init__(
        self,
        dataset: IterableDataset[T],
        plan: Plan,
        options: Options,
        seed: Seed,
        batching: Batching,
        shared: SharedWorkerState,
        *,
        batch_plan: Plan | None = None,
        marks: StreamMarks | None = None,
        is_kept: bool = False,
    ) -> None:
        self.dataset: IterableDataset[T] = dataset
        self.plan: Plan = plan
        self.options: Options = options
        self.seed: Seed = seed
        self.batching: Batching = batching
        self.shared: SharedWorkerState = shared
        self.batch_plan: Plan | None = batch_plan
        self.marks: StreamMarks | None = marks
        self.is_kept: bool = is_kept
        self.reader: Reader = Reader()
        self.loaded_at_end: int | None = None
        self._resumed: tuple[int, Position] | None = None  # which pass continues, and from where
        self._counts_rest = True
        self._loads: int = shared.loads  # how many loaded states this copy knows of
        self._is_underway = False  # read, and not to its end, in this process or the one from which it was copied
        self._upcoming: Sequence[Any] = ()  # the dataset's own state in which the next pass begins, if one was loaded
        self._first_pass: int | None = None  # that a worker was started for
        self._made_for: int | None = None  # for which worker a worker_init_fn prepared the dataset
        self._giving: WorkerPass[T] | None = None  # which pass gave an item last: the next batch has its items

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_giving": None}  # no pass goes on in a copy

    @property
    def name(self) -> str:
        """What errors call the dataset."""
        return type(self.dataset).__name__

    @property
    def splits_itself(self) -> bool:
        """Whether the dataset splits itself over all ranks' workers; else each rank keeps its share of what comes."""
        return self.options.by_worker

    def stream_length(self) -> int:
        """Return the length of the user's dataset; TypeError where it has none."""
        return len(cast(Any, self.dataset))

    # ---- in the main process ----

    def share_length(self) -> int:
        """Return how many items this rank takes of the upcoming epoch; TypeError where the dataset has no length."""
        consumed: tuple[Consumed, int] = ((), 0)
        # Persistent workers keep a pass that has come to its end.
        if self._counts_rest and self._resumed is not None and set(self.shared.lengths(self._resumed[0])) == {None}:
            consumed = split_consumed(self._resumed[1].consumed, self.plan.num_replicas)
        return self.plan.remaining(self.stream_length(), *consumed)

    def resume(self, number: int, position: Position, *, counts_rest: bool) -> None:
        """Let pass ``number`` begin at a position, in workers that are started from now on.

        Args:
            number: The pass.
            position: Where it begins.
            counts_rest: Whether the length is that of the rest until then, or of the whole epoch.
        """
        self._resumed, self._counts_rest = (number, position), counts_rest
        self._loads = self.shared.load()

    def forget(self, number: int | None = None) -> None:
        """Let ``len()`` count whole epochs again: if pass ``number`` was resumed, or whichever was."""
        if self._resumed is not None and number in {None, self._resumed[0]}:
            self._resumed = None

    # ---- in a worker ----

    def prepare(self, number: int, epoch: int, worker_init_fn: Callable[[int], object] | None) -> None:
        """Prepare this worker for pass ``number``; call the user's function for the dataset that it knows."""
        self._first_pass = number
        if worker_init_fn is None:
            return
        upcoming = WorkerPass(self, self._start(number, epoch))
        with worker_info_told(upcoming.info):
            self.reader.prepare(self.dataset, worker_init_fn, upcoming.told_worker_id)
        if self.reader.has_asked:
            self._made_for = upcoming.start.part

    def begin(self, loaded: WorkerPosition | None) -> tuple[Iterator[T], Callable[[], WorkerPosition]]:
        """Begin a pass when its first item is asked for. By then the main process has begun the epoch.

        Args:
            loaded: Where another package's loader resumes it, if it does.

        Returns:
            The items, and what tells how far they are.
        """
        # A worker's first pass is the one that it was started for, although others may have begun since.
        number, self._first_pass = self._first_pass, None
        if loaded is not None:
            # What the main process loaded, this worker was given by its iterator's state.
            self._loads = self.shared.loads
            if loaded.seed is not None:
                self.seed.adopt(loaded.seed)
        if number is None:
            number = self.shared.latest_pass
            self._require_all_loads()
        epoch = self._epoch_of(number)
        self._restore_generators(number, epoch)
        start = self._start(number, epoch) if loaded is None else self._start_of(loaded, number, epoch)
        start = self._with_unread(replace(start, generators=generator_states([generators_only(self.dataset)])))
        self._is_underway, self._upcoming = True, start.snapshot.initial_state if start.ended else ()
        begun = WorkerPass(self, start)
        with worker_info_told(begun.info):
            # Told after that, because it may seed these generators.
            tell_epoch(self.dataset, epoch)
        if self.splits_itself:
            self._giving = begun
            return begun.by_worker(), self.position_unbegun
        if start.ended:
            return iter(()), self.position_unbegun
        self.loaded_at_end = None
        return begun.exact(), begun.position

    def _epoch_of(self, number: int) -> int:
        """Return which epoch a pass is over; refuse a loader whose epochs nobody begins."""
        epoch = self.shared.epoch_of(number)
        if epoch is None or this_worker()[1] != self.shared.readers:
            raise UnsupportedLoaderError(
                f"{self.name} cannot be sharded here: the patched loader was rebuilt without its "
                "sampler, which begins each epoch, or with another number of workers. Lightning's predict and "
                "overfit_batches and accelerate's skip_first_batches do this. Iterate the one that "
                "patch_dataloader_to_ddp() returned; restore_loader() resumes it mid-epoch."
            )
        return epoch

    def _require_all_loads(self) -> None:
        """Refuse to continue in a worker that was started before a state was loaded: it lacks position and seed."""
        if self._loads != self.shared.loads:
            raise StateError(
                f"{self.name} cannot resume from the state: it was loaded by load_state_dict() "
                "while the loader's persistent workers ran, and they did not get it. Call restore_loader(loader, "
                "state), which starts new workers, or load the state before the first pass."
            )

    def _resumed_at(self, number: int) -> Position | None:
        """Return where a pass continues; None if it begins an epoch."""
        return None if self._resumed is None or self._resumed[0] != number else self._resumed[1]

    def _restore_generators(self, number: int, epoch: int) -> None:
        """Put back the dataset's generators where a pass continues; forget a position in another epoch."""
        if (position := self._resumed_at(number)) is None:
            return
        if position.epoch != epoch:
            self.forget(number)
        elif position.is_within_pass:
            # In workers too: a loader may have drawn its workers' seed from these generators since.
            set_generator_states([generators_only(self.dataset)], position.states.generators)

    def _start(self, number: int, epoch: int) -> WorkerPosition:
        """Return where this worker's pass begins."""
        worker, workers = this_worker()
        if (position := self._resumed_at(number)) is None:
            return WorkerPosition(number, epoch, worker if self._made_for is None else self._made_for)
        if self.splits_itself:
            batches = self._batches_done(position, workers)
            # Batches continue with the one whose turn it was.
            part = (worker + turn_after(batches)) % workers
            return WorkerPosition(number, epoch, part, skip=batches[part] * self.batching.size)
        parts, streams = position.parts, position.states.streams
        part = (worker + (position.turn or 0)) % workers
        before, skip = split_consumed(parts[part % len(parts)], self.plan.num_replicas)
        counts: Literal["stream", "parts", "nothing"]
        counts = "parts" if len(parts) > 1 else "nothing" if position.is_at_epoch_start else "stream"
        known = streams[part % len(streams)] if streams else StreamSnapshot()
        return WorkerPosition(number, epoch, part, before, skip, counts, snapshot=known)

    def _batches_done(self, position: Position, workers: int) -> Sequence[int]:
        """Return how many batches each of this rank's workers has made where the dataset splits itself."""
        if len(position.parts) == 1:  # in an explicit world ranks cannot report which workers have ended
            taken = split_consumed(position.consumed, self.plan.num_replicas)[1]
            return made_in_turn([None] * workers, taken // self.batching.size)
        own = position.parts[self.plan.rank * workers :][:workers]
        return [sum(items for _, items in consumed) // self.batching.size for consumed in own]

    def _with_unread(self, start: WorkerPosition) -> WorkerPosition:
        """Return a position with the dataset's own state where an epoch begins, if that is known."""
        if not start.is_at_epoch_start or start.snapshot.initial_state:
            return start
        return replace(start, snapshot=replace(start.snapshot, initial_state=self._upcoming or self.unread()))

    def unread(self) -> Sequence[Any]:
        """Return the dataset's own state, as the only element, if nobody has read the dataset yet, or to its end."""
        if not self._is_underway and can_snapshot(self.dataset, self.options):
            with suppress(Exception):  # the user's code; without a state its stream is read again
                return (copy.deepcopy(cast(Any, self.dataset).state_dict()),)
        return ()

    def end(self, number: int, part: int) -> None:
        """Record that a pass has come to the end of what it reads, as the worker of a part."""
        self._is_underway = False
        for state in self.unread():
            self.shared.keep_state(number, part, pickled(state))

    def snapshots_between(self) -> Sequence[StreamSnapshot]:
        """Return the dataset's own states where the next epoch begins, as far as the main process knows them."""
        if not self.is_kept:
            return ()
        states = self.shared.states(self.shared.latest_pass) if self.shared.latest_pass >= 0 else ()
        # No worker writes one before the first pass, and none where the main process reads.
        written = states or [pickled(state) for state in self.unread()]
        if not any(written):
            return ()
        before = [() if state is None else (pickle.loads(state),) for state in written]  # noqa: S301 - our worker's
        return [StreamSnapshot(initial_state=state) for state in before]

    # ---- another package's loader, and what travels with batches ----

    def position_unbegun(self) -> WorkerPosition:
        """Return where the next pass begins."""
        number = self.shared.latest_pass + 1 if self._first_pass is None else self._first_pass
        generators = generator_states([generators_only(self.dataset)])
        start = replace(self._start(number, epoch=-1), generators=generators, seed=self.seed.value)
        return self._with_unread(start)

    def note_loaded(self, loaded: WorkerPosition) -> None:
        """Record where another package's loader resumes, before it begins there."""
        self.loaded_at_end = loaded.epoch if loaded.ended else None
        self._upcoming = loaded.snapshot.initial_state if loaded.ended else ()
        if self._first_pass is not None:  # a worker's first batch may come long after another's
            self.shared.note_offset(self._first_pass, this_worker()[0], loaded.offset)

    def _start_of(self, loaded: WorkerPosition, number: int, epoch: int) -> WorkerPosition:
        """Return where a pass begins that another package's loader resumes."""
        if loaded.epoch not in {-1, epoch} or self._made_for not in {None, loaded.part}:
            raise StateError(
                f"{self.name} cannot resume from the state of its iterator, which is that of worker {loaded.part} in "
                f"epoch {loaded.epoch}: this is worker {this_worker()[0]} in epoch {epoch}. Load the state of the "
                "whole loader, and do not set another epoch before it resumes."
            )
        self.shared.note_offset(number, this_worker()[0], loaded.offset)
        set_generator_states([generators_only(self.dataset)], loaded.generators)
        return replace(loaded, number=number, epoch=epoch)

    def give(self, giving: WorkerPass[T]) -> None:
        """Record that a pass gives an item."""
        self._giving = giving

    def note(self) -> BatchNote | None:
        """Return what travels with the batch that is made now; None if there is nothing to note."""
        return self._giving.note() if self._giving is not None and not self.splits_itself else None

    def before_collating(self, collate_fn: Callable[[Any], Any], samples: Any) -> None:
        """Let the stream's random states stay in place in a worker whose batches are surely made without drawing."""
        if self._giving is not None:
            info: Any = get_worker_info()
            # Another dataset of the worker's, which reads this one, may draw.
            is_own = info is not None and isinstance(info.dataset, ShardedIterable) and info.dataset.is_read_by(self)
            self._giving.before_others(may_draw=not (is_own and _draws_nothing(collate_fn, samples)))


def _collate_noted(worker: StreamWorker[Any], collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """Return a batch, in a ``NotedBatch`` if the worker that read its samples noted something.

    Args:
        worker: What read them.
        collate_fn: The loader's.
        samples: The batch's samples.
    """
    note = worker.note()  # before the user's function may read on
    worker.before_collating(collate_fn, samples)
    batch = collate_fn(samples)
    return batch if note is None else NotedBatch(note, batch)


def _draws_nothing(collate_fn: Callable[[Any], Any], samples: Any) -> bool:
    """Return whether a function surely makes a batch without drawing: torch's own, of plain samples."""
    return is_torchs_collating(collate_fn) and plain_tensors(samples) is not None


def generators_only(dataset: object) -> SimpleNamespace:
    """Return what holds a dataset's random generators and nothing else: its own state is a position in it."""
    return SimpleNamespace(generators=random_generators([dataset]))


@dataclass(frozen=True, slots=True)
class IterableWorkerInit:
    """A ``worker_init_fn`` that prepares the sharded dataset in a worker, then calls the user's.

    The user's function may call ``get_worker_info()``; it is shown the user's dataset, and the worker that will read
    it.
    """

    worker_init_fn: Callable[[int], object] | None
    epochs: EpochCounter

    def __call__(self, worker_id: int) -> None:
        """Prepare worker ``worker_id``."""
        info: Any = get_worker_info()
        dataset: ShardedIterable[Any] = info.dataset
        dataset.begin_worker(self.epochs.passes + 1, self.epochs.upcoming, self.worker_init_fn)
