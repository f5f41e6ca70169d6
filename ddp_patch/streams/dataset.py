"""What stands in a loader for an iterable dataset, and what each process knows of the stream that it reads."""

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from torch.utils.data import IterableDataset, get_worker_info

from ddp_patch.compat.private_torch import (
    WorkerInfo,
    is_torchs_collating,
    noted_worker_info,
    rank_noted,
    worker_info_told,
)
from ddp_patch.errors import StateError, UnsupportedLoaderError
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.orders.random_states import EpochCounter, Seed, random_generators, reader_seed, set_generator_states
from ddp_patch.plan import Batching, Consumed, Plan, turn_after
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.sharding.sampler import AttributeProxy
from ddp_patch.sharding.saved_state import Position, StreamSnapshot, split_consumed
from ddp_patch.streams.reading import can_snapshot, this_worker
from ddp_patch.streams.shared_state import LARGEST, SharedWorkerState
from ddp_patch.walks import plain_tensors

if TYPE_CHECKING:
    from ddp_patch.streams.worker_pass import WorkerPass

__all__ = ["ShardedIterable", "StreamWorker", "begin_worker", "generators_only", "pickled"]


T = TypeVar("T")

# What a dataset asks of the worker info that differs between workers.
_TELLING = frozenset({"id", "num_workers", "seed"})


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

    def collate_with_notes(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a ``collate_fn`` with whose batches travels what workers note of them."""
        return partial(self._worker.collate, collate_fn)

    def require_no_generator(self) -> None:
        """Refuse to save a state where persistent workers draw from generators that the user's dataset holds."""
        if random_generators([self._dataset]):
            raise StateError(
                f"The state of {type(self._dataset).__name__} cannot be saved: it has a random generator, and "
                "persistent workers advance copies of it. Use persistent_workers=False."
            )

    def __len__(self) -> int:
        return self._worker.share_length()

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
        asked_before_item: Whether an item came after the dataset had asked.
        has_asked_rank: Whether it asked which rank this is, by its first item, or was made another one by a function
            that did.
        is_underway: Whether the dataset was read, and not to its end, here or in the process of which this is a copy.
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
        self.takes_states: bool = can_snapshot(given.dataset, agreed.options)
        self.is_compared: bool = is_compared
        # Whether the next pass reads the same dataset, not a new copy of it.
        self._is_kept = not given.num_workers or getattr(given.loader, "persistent_workers", False)
        keeps_states = self._is_kept and given.num_workers > 0 and self.takes_states
        self.shared: SharedWorkerState = SharedWorkerState(max(1, given.num_workers), keeps_states=keeps_states)
        self.has_asked: bool = False
        self.asked_before_item: bool = False
        self.has_asked_rank: bool = False
        self.is_underway: bool = False
        self.chosen_epoch: int | None = None
        self.giving: WorkerPass[T] | None = None
        self._gave_dataset = False  # somebody reached for the dataset through the worker info
        self._made_for: int | None = None  # for which worker a worker_init_fn prepared the dataset
        self._first_pass: int | None = None  # that a worker was started for
        self._resumed: tuple[int, Position] | None = None  # which pass continues, and from where
        self._counts_rest = True

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

    def unread(self) -> Sequence[Any]:
        """Return the dataset's own state, as the only element, if nobody has read the dataset yet, or to its end."""
        if not self.is_underway and self.takes_states:
            with suppress(Exception):  # the user's code; without a state its stream is read again
                return (copy.deepcopy(cast(Any, self.dataset).state_dict()),)
        return ()

    def end(self, number: int, part: int) -> None:
        """Record that a pass has come to the end of what it reads, as the reader of a part."""
        self.is_underway = False
        for state in self.unread():
            self.shared.keep_state(number, part, pickled(state))

    def snapshots_between(self) -> Sequence[StreamSnapshot]:
        """Return the dataset's own states where the next epoch begins, as far as the main process knows them."""
        if not self._is_kept:
            return ()
        states = self.shared.states(self.shared.latest_pass) if self.shared.latest_pass >= 0 else ()
        # No worker writes one before the first pass, and none where the main process reads.
        written = states or [pickled(state) for state in self.unread()]
        if not any(written):
            return ()
        before = [() if state is None else (pickle.loads(state),) for state in written]  # noqa: S301 - our worker's
        return [StreamSnapshot(initial_state=state) for state in before]

    # ---- where a pass resumes ----

    def resume(self, number: int, position: Position, *, counts_rest: bool) -> None:
        """Let pass ``number`` begin at a position, in workers that are started from now on.

        Args:
            number: The pass.
            position: Where it begins.
            counts_rest: Whether the length is that of the rest until then, or of the whole epoch.
        """
        self._resumed, self._counts_rest = (number, position), counts_rest

    def forget(self, number: int | None = None) -> None:
        """Let ``len()`` count whole epochs again: if pass ``number`` was resumed, or whichever was."""
        if self._resumed is not None and number in {None, self._resumed[0]}:
            self._resumed = None

    def resumed_at(self, number: int) -> Position | None:
        """Return where a pass continues; None if it begins an epoch."""
        return None if self._resumed is None or self._resumed[0] != number else self._resumed[1]

    def share_length(self) -> int:
        """Return how many items this rank takes of the upcoming epoch; TypeError where the dataset has no length."""
        consumed: tuple[Consumed, int] = ((), 0)
        # Persistent workers keep a pass that has come to its end.
        if self._counts_rest and self._resumed is not None and set(self.shared.lengths(self._resumed[0])) == {None}:
            consumed = split_consumed(self._resumed[1].consumed, self.plan.num_replicas)
        return self.plan.remaining(self.stream_length(), *consumed)

    # ---- in a worker ----

    def part_of(self, number: int) -> int:
        """Return whose part this worker reads in a pass: another one's after a resume, as turns go on."""
        worker, workers = this_worker()
        if (position := self.resumed_at(number)) is None:
            return worker if self._made_for is None else self._made_for
        turn = turn_after(self.batches_done(position)) if self.splits_itself else position.turn or 0
        return (worker + turn) % workers

    def batches_done(self, position: Position) -> Sequence[int]:
        """Return how many batches each of this rank's workers has made where the dataset splits itself."""
        workers, size = this_worker()[1], self.batching.size
        if len(position.parts) == 1:  # in an explicit world ranks cannot report which workers have ended
            whole, more = divmod(split_consumed(position.consumed, self.plan.num_replicas)[1] // size, workers)
            return [whole + (worker < more) for worker in range(workers)]
        own = position.parts[self.plan.rank * workers :][:workers]
        return [sum(items for _, items in consumed) // size for consumed in own]

    def told(self, part: int) -> tuple[int, int]:
        """Return which worker of how many the dataset thinks it is in, as the reader of a part."""
        workers = this_worker()[1]
        if self.splits_itself:
            return part + self.plan.rank * workers, workers * self.plan.num_replicas
        return part, workers

    def info(self, part: int, epoch: int) -> WorkerInfo | None:
        """Return what ``get_worker_info()`` returns to the dataset, as the reader of a part; what it asks is noted.

        In the main process that is None, as in torch.
        """
        worker, workers = self.told(part)
        if get_worker_info() is None and workers == 1:
            return None
        seed = reader_seed(self.seed.value, epoch) + worker
        return noted_worker_info(worker, workers, seed, self.dataset, self._note_asked)

    def _note_asked(self, name: str) -> None:
        self.has_asked |= name in _TELLING
        self._gave_dataset |= name == "dataset"

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
        part = self.part_of(number)
        worker, _ = self.told(part)
        asked, asked_rank, before = self.has_asked, self.has_asked_rank, dict(getattr(self.dataset, "__dict__", {}))
        self._gave_dataset = False
        with worker_info_told(self.info(part, epoch)), rank_noted(self.note_rank):
            worker_init_fn(worker)
        after = getattr(self.dataset, "__dict__", {})
        is_changed = before.keys() != after.keys() or any(after[name] is not value for name, value in before.items())
        is_made = self._gave_dataset or is_changed
        self.has_asked, self.has_asked_rank = asked or is_made, asked_rank or (self.has_asked_rank and is_made)
        if self.has_asked:
            self._made_for = part

    def begin(self) -> tuple[int, int]:
        """Begin a pass when its first item is asked for; return its number, and which epoch it is over.

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
        if (position := self.resumed_at(number)) is not None:
            if position.epoch != epoch:
                self.forget(number)
            elif position.is_within_pass:
                # In workers too: a loader may have drawn its workers' seed from these generators since.
                set_generator_states([generators_only(self.dataset)], position.states.generators)
        return number, epoch

    def collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
        """Return a batch, in a ``NotedBatch`` if the pass that read its samples noted something.

        Args:
            collate_fn: The loader's.
            samples: The batch's samples.
        """
        if (giving := self.giving) is None:
            return collate_fn(samples)
        note = giving.note()  # before the user's function may read on
        # Another dataset of the worker's, which reads this one, may draw; torch's own function draws nothing.
        info: Any = get_worker_info()
        is_own = info is not None and getattr(info.dataset, "__dict__", {}).get("_worker") is self
        draws = not (is_own and is_torchs_collating(collate_fn) and plain_tensors(samples) is not None)
        giving.before_others(may_draw=draws)
        batch = collate_fn(samples)
        return batch if note is None else note._replace(batch=batch)


def generators_only(dataset: object) -> SimpleNamespace:
    """Return what holds a dataset's random generators and nothing else: its own state is a position in it."""
    return SimpleNamespace(generators=random_generators([dataset]))


def pickled(state: object) -> bytes | None:
    """Return a dataset's state pickled; None if that cannot be, or is too large."""
    with suppress(Exception):  # the user's objects
        written = pickle.dumps(state)
        return written if len(written) <= LARGEST else None
    return None
