"""One rank's share of an iterable dataset, which the loader's workers read."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from weakref import proxy

from torch.utils.data import IterableDataset, get_worker_info

from ddp_patch.compat.private_torch import worker_info_told
from ddp_patch.errors import StateError, UnsupportedLoaderError
from ddp_patch.options import Options
from ddp_patch.orders.generators import generator_states, random_generators, set_generator_states
from ddp_patch.orders.random_states import EpochCounter, Seed
from ddp_patch.plan import Batching, Consumed, Plan
from ddp_patch.sharding.held import Transparent
from ddp_patch.sharding.position import Position, StreamSnapshot, split
from ddp_patch.sharding.schedule import made_in_turn, turn_after
from ddp_patch.streams.marks import FirstItems, MarksInMemory, can_snapshot
from ddp_patch.streams.reading import Reader, WorkerCheckpoint, WorkerIterator, WorkerPosition, this_worker
from ddp_patch.streams.shared_state import SharedWorkerState
from ddp_patch.streams.worker_pass import LatestGiver, NotingCollate, WorkerConfig, WorkerPass

__all__ = ["IterableWorkerInit", "ShardedIterable", "random_holder"]


T = TypeVar("T")


class ShardedIterable(Transparent, IterableDataset[T]):
    """One rank's share of another iterable dataset's stream.

    ``iterable_sharding="exact"``: in worker j of every rank, ``get_worker_info()`` returns what it would in worker j of
    the unpatched loader. If the dataset asks for it, worker j reads a part of the stream, and keeps this rank's share
    of that part. If it does not ask, every worker reads the same stream, and worker j of k gives every k-th batch of
    this rank's share, from the j-th on.

    ``iterable_sharding="by_worker"``: ``get_worker_info()`` counts all ranks' workers as one loader's, and the dataset
    splits itself.

    Args:
        dataset: The dataset that the user gave.
        plan: The rank's share.
        options: What the user chose.
        seed: The seed in force.
        batching: How workers make batches.
        readers: How many workers read it; 1 where the main process does.
        division: The rank's share of each batch, where batches are divided; the plan then takes all of the stream.

    Attributes:
        shared: What the main process and the workers report to each other.
        chosen_epoch: The epoch that the user has chosen by this object's ``set_epoch``, until a pass begins.
        first_items: Where readers record what they read first, for the ranks to compare; None if nobody does.
        marks: Where they mark what they read to the end, as above.
    """

    _inner, _kept_as = "dataset", "_dataset"
    # A position in the whole stream is none in this share, so the dataset's state is not this one's.
    _hidden = frozenset({"state_dict", "load_state_dict"})

    def __init__(
        self,
        dataset: IterableDataset[T],
        plan: Plan,
        options: Options,
        seed: Seed,
        batching: Batching,
        readers: int = 1,
        *,
        division: Plan | None = None,
    ) -> None:
        self._dataset = dataset
        self.shared: SharedWorkerState = SharedWorkerState(readers)
        self.first_items: FirstItems | None = None
        self.marks: MarksInMemory | None = None
        self.loaded_at_end: int | None = None  # the epoch of which nothing is left in an iterator that was loaded here
        self._plan, self._division = plan, division
        self._options, self._seed = options, seed
        self._batching = batching
        self._reader, self._latest = Reader(), LatestGiver()
        self._was_read = False  # in this process, or in the one from which it was copied
        self._first_pass: int | None = None  # that a worker was started for
        self._made_for: int | None = None  # for which worker a worker_init_fn prepared the dataset
        self._resumed: tuple[int, Position] | None = None  # which pass continues, and from where
        self._tells_rest = True
        self._loads: int = self.shared.loads  # how many loaded states this copy knows of
        self.chosen_epoch: int | None = None
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
        self.chosen_epoch = epoch

    def __len__(self) -> int:
        before: Consumed = ()
        skip = 0
        # Persistent workers keep a pass that has come to its end.
        if self._tells_rest and self._resumed is not None and set(self.shared.lengths(self._resumed[0])) == {None}:
            before, skip = self._resumed[1].split(self._plan.num_replicas)
        return max(0, len(self._plan.share(len(self._plan.rest(self.stream_length(), before)))) - skip)

    def require_no_generator(self) -> None:
        """Refuse to save a state where persistent workers draw from generators that the user's dataset holds."""
        if random_generators([self._dataset]):
            raise StateError(
                f"The state of {type(self._dataset).__name__} cannot be saved: it has a random generator, and "
                "persistent workers advance copies of it. Use persistent_workers=False."
            )

    def stream_length(self) -> int:
        """Return the length of the user's dataset; TypeError where it has none."""
        return len(cast(Any, self._dataset))

    def noting(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a ``collate_fn`` with whose batches travels what workers note of them."""
        return NotingCollate(collate_fn, self._latest)

    def resume(self, number: int, position: Position, *, tells_rest: bool) -> None:
        """Let pass ``number`` begin at a position, in workers that are started from now on.

        Args:
            number: The pass.
            position: Where it begins.
            tells_rest: Whether the length is that of the rest until then, or of the whole epoch.
        """
        self._resumed, self._tells_rest = (number, position), tells_rest
        self._loads = self.shared.load()

    def forget(self, number: int | None = None) -> None:
        """Let ``len()`` count whole epochs again: if pass ``number`` was resumed, or whichever was."""
        if self._resumed is not None and number in {None, self._resumed[0]}:
            self._resumed = None

    def _start(self, number: int, epoch: int) -> WorkerPosition:
        """Return where this worker's pass begins."""
        worker, workers = this_worker()
        if self._resumed is None or self._resumed[0] != number:
            return WorkerPosition(number, epoch, worker if self._made_for is None else self._made_for)
        position = self._resumed[1]
        done, skip = position.split(self._plan.num_replicas)
        if self._options.iterable_sharding == "by_worker":
            batches = self._batches_done(position, workers)
            # Batches continue with the one whose turn it was.
            role = (worker + turn_after(batches)) % workers
            return WorkerPosition(number, epoch, role, skip=batches[role] * self._batching.size)
        if position.parts is None:
            mark = position.marks[0] if position.marks else StreamSnapshot()
            return WorkerPosition(
                number, epoch, worker, done, skip, "nothing" if position.is_whole else "stream", mark=mark
            )
        role = (worker + position.parts.first) % workers
        mark = position.marks[role] if position.marks else StreamSnapshot()
        done, skip = split(position.parts.done[role], self._plan.num_replicas)
        return WorkerPosition(number, epoch, role, done, skip, "parts", mark=mark)

    def _batches_done(self, position: Position, workers: int) -> Sequence[int]:
        """Return how many batches each of this rank's workers has made where the dataset splits itself."""
        if position.parts is None:  # in an explicit world ranks cannot report which workers have ended
            return made_in_turn([None] * workers, position.split(self._plan.num_replicas)[1] // self._batching.size)
        own = position.parts.done[self._plan.rank * workers :][:workers]
        return [sum(items for _, items in done) // self._batching.size for done in own]

    def __iter__(self) -> Iterator[T]:
        return WorkerIterator(self._items, self._unbegun, self._note_loaded)

    def _unbegun(self) -> WorkerCheckpoint:
        number = self.shared.latest_pass + 1 if self._first_pass is None else self._first_pass
        generators = generator_states([random_holder(self._dataset)])
        start = self._start(number, epoch=-1)
        if start.is_whole:
            start = replace(start, mark=replace(start.mark, before=self.unread_state()))
        return WorkerCheckpoint(start, self._seed.value, generators, is_over=False)

    def unread_state(self) -> Sequence[Any]:
        """Return the dataset's own state, as the only element, if nobody has read it yet and it has one."""
        if self._was_read or not can_snapshot(self._dataset, self._options):
            return ()
        with suppress(Exception):  # the user's code; without a state its stream is read again
            return (copy.deepcopy(cast(Any, self._dataset).state_dict()),)
        return ()

    def _note_loaded(self, loaded: WorkerCheckpoint) -> None:
        self.loaded_at_end = loaded.start.epoch if loaded.is_over else None
        if self._first_pass is not None:  # a worker's first batch may come long after another's
            self.shared.note_offset(self._first_pass, this_worker()[0], loaded.start.offset)

    def _items(self, items: WorkerIterator[T]) -> Iterator[T]:
        # This begins when the first item is asked for. By then the main process has begun the epoch. A worker's
        # first pass is the one that it was started for, although others may have begun since.
        number = self._first_pass
        loaded = items.loaded
        if loaded is not None:
            # What the main process loaded, this worker was given by its iterator's state.
            self._loads = self.shared.loads
            self._seed.adopt(loaded.seed)
        if number is None:
            number = self.shared.latest_pass
            self._require_all_loads()
        self._first_pass = None
        epoch = self.shared.epoch_of(number)
        if epoch is None or this_worker()[1] != self.shared.readers:
            raise UnsupportedLoaderError(
                f"{type(self._dataset).__name__} cannot be sharded here: the patched loader was rebuilt without its "
                "sampler, which begins each epoch, or with another number of workers. Lightning's predict and "
                "overfit_batches and accelerate's skip_first_batches do this. Iterate the one that "
                "patch_dataloader_to_ddp() returned; restore_loader() resumes it mid-epoch."
            )
        if self._resumed is not None and self._resumed[1].epoch != epoch:
            self.forget(number)
        if self._resumed is not None and self._resumed[0] == number and self._resumed[1].is_begun:
            # In workers too: a loader may have drawn its workers' seed from these generators since.
            set_generator_states([random_holder(self._dataset)], self._resumed[1].held.generators)
        start = self._start(number, epoch) if loaded is None else self._start_of(loaded, number, epoch)
        generators = generator_states([random_holder(self._dataset)])
        one = self._pass(start, self.unread_state())
        self._was_read = True
        with worker_info_told(one.info):
            # Told after that, because it may seed these generators.
            if callable(tell := getattr(self._dataset, "set_epoch", None)):
                tell(epoch)
        if self._options.iterable_sharding == "by_worker":
            return one.split()
        if loaded is not None and loaded.is_over:
            return iter(())
        self.loaded_at_end = None
        # They hold what reads the dataset. A cycle would keep that open after a pass was left, until it is collected.
        return one.shared(proxy(items), generators, self.first_items, self.marks)

    def _pass(self, start: WorkerPosition, before: Sequence[Any] = ()) -> WorkerPass[T]:
        return WorkerPass(
            WorkerConfig(
                self._dataset,
                self._plan,
                self._division,
                self._options,
                self._seed,
                self._batching,
                self.shared,
                self._reader,
                self._latest,
            ),
            start,
            before,
        )

    def _start_of(self, loaded: WorkerCheckpoint, number: int, epoch: int) -> WorkerPosition:
        """Return where a pass begins that another package's loader resumes."""
        start = replace(loaded.start, number=number, epoch=epoch)
        if loaded.start.epoch not in {-1, epoch} or self._made_for not in {None, start.role}:
            raise StateError(
                f"{type(self._dataset).__name__} cannot resume from the state of its iterator, which is that of worker "
                f"{start.role} in epoch {loaded.start.epoch}: this is worker {this_worker()[0]} in epoch {epoch}. Load "
                "the state of the whole loader, and do not set another epoch before it resumes."
            )
        self.shared.note_offset(number, this_worker()[0], start.offset)
        set_generator_states([random_holder(self._dataset)], loaded.generators)
        return start

    def _require_all_loads(self) -> None:
        """Refuse to continue in a worker that was started before a state was loaded: it lacks position and seed."""
        if self._loads != self.shared.loads:
            raise StateError(
                f"{type(self._dataset).__name__} cannot resume from the state: it was loaded by load_state_dict() "
                "while the loader's persistent workers ran, and they did not get it. Call restore_loader(loader, "
                "state), which starts new workers, or load the state before the first pass."
            )

    def begin_worker(self, number: int, epoch: int, worker_init_fn: Callable[[int], object] | None) -> None:
        """Prepare this worker's copy for pass ``number``; call the user's function for the dataset that it knows."""
        self._first_pass = number
        if worker_init_fn is None:
            return
        one = self._pass(self._start(number, epoch))
        with worker_info_told(one.info):
            self._reader.prepare(self._dataset, worker_init_fn, one.reader)
        if self._reader.has_asked:
            self._made_for = one.start.role


def random_holder(dataset: object) -> SimpleNamespace:
    """Return what holds a dataset's random generators and nothing else: its own state is a position in it."""
    return SimpleNamespace(generators=random_generators([dataset]))


@dataclass(frozen=True, slots=True)
class IterableWorkerInit:
    """A ``worker_init_fn`` that prepares the sharded dataset in a worker, then calls the user's.

    The user's may split the dataset by ``get_worker_info()``, as torch's documentation shows. So that has the user's
    dataset in it, and the worker that reads it.
    """

    worker_init_fn: Callable[[int], object] | None
    epochs: EpochCounter

    def __call__(self, worker_id: int) -> None:
        """Prepare worker ``worker_id``."""
        info: Any = get_worker_info()
        dataset: ShardedIterable[Any] = info.dataset
        dataset.begin_worker(self.epochs.passes + 1, self.epochs.upcoming, self.worker_init_fn)
