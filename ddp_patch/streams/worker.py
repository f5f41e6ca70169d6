"""What a process knows of a stream that it reads: the rank's share, where passes begin, what was read before."""

import copy
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

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
from ddp_patch.orders.generators import generator_states, random_generators, set_generator_states
from ddp_patch.orders.random_states import Seed, reader_seed
from ddp_patch.plan import Batching, Consumed, Plan, made_in_turn, turn_after
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.sharding.saved_position import NotedBatch, Position, StreamSnapshot, split_consumed
from ddp_patch.streams.reading import can_snapshot, tell_epoch
from ddp_patch.streams.shared_state import LARGEST, SharedWorkerState
from ddp_patch.walks import plain_tensors

if TYPE_CHECKING:
    from ddp_patch.streams.worker_pass import WorkerPass

__all__ = ["StreamWorker", "WorkerPosition", "generators_only", "pickled", "this_worker"]

T = TypeVar("T")

_VERSION = 1

_UNKNOWN = StreamSnapshot()

# What a dataset asks of the worker info that differs between workers.
_TELLING = frozenset({"id", "num_workers", "seed"})


def this_worker() -> tuple[int, int]:
    """Return which worker of how many this is; the main process is the only one."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


@dataclass(frozen=True, slots=True)
class WorkerPosition:
    """Where a worker's pass begins, or how far it is, and which worker the dataset thinks it is in.

    Attributes:
        epoch: Which epoch it is over; -1 before that is known.
        part: The index of the worker whose part it reads; differs from its own only after a resume.
        consumed_before: What other numbers of ranks took.
        skip: How many items of this rank's share were done when the pass began.
        counts: What the state that is resumed counts: one stream, parts, or nothing.
        offset: How many items this worker has gone through since: another package's loader resumes within the pass.
        snapshot: What is known of the stream there.
        generators: The states of the dataset's random generators when the pass began.
        seed: The seed then in force; None for the present one.
        ended: Whether nothing is left.
    """

    epoch: int
    part: int
    consumed_before: Consumed = ()
    skip: int = 0
    counts: Literal["stream", "parts", "nothing"] = "nothing"
    offset: int = 0
    snapshot: StreamSnapshot = _UNKNOWN
    generators: Sequence[Any] = ()
    seed: int | None = None
    ended: bool = False

    @property
    def is_at_epoch_start(self) -> bool:
        """Whether nothing was taken."""
        return not self.items_consumed and not self.taken_before

    @property
    def taken_before(self) -> int:
        """How many items of the stream other numbers of ranks took, all of them together."""
        return sum(ranks * each for ranks, each in self.consumed_before)

    @property
    def items_consumed(self) -> int:
        """How many items of this rank's share are done."""
        return self.skip + self.offset

    def plain(self) -> list[list[Any]]:
        """Return it as plain values: pairs, because torchdata takes dicts apart."""
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {
            "version": _VERSION,
            "consumed_before": [list(pair) for pair in self.consumed_before],
            "snapshot": self.snapshot.plain(),
            "generators": list(self.generators),
        }
        return [[name, value] for name, value in values.items()]

    @classmethod
    def of(cls, plain: Any) -> "WorkerPosition":
        """Return what ``plain`` made plain values of.

        Raises:
            StateError: Another version of this package did.
        """
        is_paired = all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in plain)
        values: dict[str, Any] = dict(plain) if is_paired else {}
        if values.pop("version", None) != _VERSION:
            raise StateError(
                "The state of a worker's iterator was written by another version of ddp_patch, which this one does not "
                "read. Restore it with that version."
            )
        values["consumed_before"] = tuple((ranks, taken) for ranks, taken in values["consumed_before"])
        values["snapshot"] = StreamSnapshot.of(values["snapshot"])
        return cls(**values)


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
        loaded_end: Where the iterator stands that was loaded in this process, if nothing is left there.
        giving: Which pass gave an item last: the next batch has its items.
    """

    def __init__(self, given: LoaderFacts[Any], agreed: Agreed, *, is_compared: bool = False) -> None:
        self.dataset: IterableDataset[T] = given.dataset
        self.plan: Plan = agreed.plan(agreed.world.rank)
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
        self._gave_dataset = False  # somebody reached for the dataset through the worker info
        self._made_for: int | None = None  # for which worker a worker_init_fn prepared the dataset
        self._first_pass: int | None = None  # that a worker was started for
        self._is_underway = False  # read, and not to its end, in this process or the one from which it was copied
        self.loaded_end: WorkerPosition | None = None
        self.giving: WorkerPass[T] | None = None
        self._resumed: tuple[int, Position] | None = None  # which pass continues, and from where
        self._counts_rest = True
        self._loads = self.shared.loads  # how many loaded states this copy knows of
        self._chosen_epoch: int | None = None
        self._told_epoch: int | None = 0  # so that one that was set before counts
        self._said = set[str]()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "giving": None}  # no pass goes on in a copy

    @property
    def name(self) -> str:
        """What errors call the dataset."""
        return type(self.dataset).__name__

    def stream_length(self) -> int:
        """Return the length of the user's dataset; TypeError where it has none."""
        return len(cast(Any, self.dataset))

    def unread(self) -> Sequence[Any]:
        """Return the dataset's own state, as the only element, if nobody has read the dataset yet, or to its end."""
        if not self._is_underway and self.takes_states:
            with suppress(Exception):  # the user's code; without a state its stream is read again
                return (copy.deepcopy(cast(Any, self.dataset).state_dict()),)
        return ()

    # ---- in the main process ----

    def may_say(self, what: str) -> bool:
        """Return whether to say something now: on one rank, once for each loader."""
        is_first = what not in self._said and (self.batch_plan or self.plan).rank == 0
        self._said.add(what)
        return is_first

    def choose_epoch(self, tell: Callable[[int], object], epoch: int) -> None:
        """Tell the dataset an epoch of the user's, whatever it does with it; the next pass is over that epoch."""
        tell(epoch)
        self._chosen_epoch = epoch

    def take_chosen_epoch(self) -> int | None:
        """Return the epoch that the user has chosen since this was last called, by ``set_epoch``; None if none.

        Somebody may have set it past this, on the user's dataset: then the epoch counts that it stores.
        """
        chosen, self._chosen_epoch = self._chosen_epoch, None
        now = self._stored_epoch() if chosen is None else None
        return chosen if now is None or now < 0 or now == self._told_epoch else now

    def tell_epoch(self, epoch: int) -> None:
        """Tell the dataset its epoch, if it wants to know."""
        tell_epoch(self.dataset, epoch)
        self._told_epoch = self._stored_epoch()

    def _stored_epoch(self) -> int | None:
        """Return the ``epoch`` of a dataset that takes one, or its first whole number with that word in its name."""
        if not callable(getattr(self.dataset, "set_epoch", None)):
            return None
        stored = (value for name, value in vars(self.dataset).items() if "epoch" in name.lower())
        found = (value for value in (getattr(self.dataset, "epoch", None), *stored) if type(value) is int)
        return next(found, None)

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

    # ---- where it reads ----

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
        part = self._start(number, epoch).part
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

    def begin(self, loaded: WorkerPosition | None) -> tuple[int, WorkerPosition]:
        """Begin a pass when its first item is asked for. By then the main process has begun the epoch.

        Args:
            loaded: Where another package's loader resumes it, if it does.

        Returns:
            The pass, and where it begins.
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
        start = self._start(number, epoch) if loaded is None else self._start_of(loaded, epoch)
        start = self._with_unread(replace(start, generators=generator_states([generators_only(self.dataset)])))
        self._is_underway, self.loaded_end = True, start if start.ended else None
        return number, start

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
            return WorkerPosition(epoch, worker if self._made_for is None else self._made_for)
        if self.splits_itself:
            batches = self._batches_done(position, workers)
            # Batches continue with the one whose turn it was.
            part = (worker + turn_after(batches)) % workers
            return WorkerPosition(epoch, part, skip=batches[part] * self.batching.size)
        parts, snapshots = position.parts, position.states.streams or [_UNKNOWN]
        part = (worker + (position.turn or 0)) % workers
        before, skip = split_consumed(parts[part % len(parts)], self.plan.num_replicas)
        counts: Literal["stream", "parts", "nothing"]
        counts = "parts" if len(parts) > 1 else "nothing" if position.is_at_epoch_start else "stream"
        return WorkerPosition(epoch, part, before, skip, counts, snapshot=snapshots[part % len(snapshots)])

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
        loaded = self.loaded_end.snapshot.initial_state if self.loaded_end is not None else ()
        known = loaded or self.unread()
        return replace(start, snapshot=replace(start.snapshot, initial_state=known)) if known else start

    def end(self, number: int, part: int) -> None:
        """Record that a pass has come to the end of what it reads, as the reader of a part."""
        self._is_underway = False
        for state in self.unread():
            self.shared.keep_state(number, part, pickled(state))

    # ---- batches ----

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
        return batch if note is None else NotedBatch(note, batch)

    # ---- where another package's loader resumes ----

    def position_unbegun(self) -> WorkerPosition:
        """Return where the next pass begins."""
        number = self.shared.latest_pass + 1 if self._first_pass is None else self._first_pass
        generators = generator_states([generators_only(self.dataset)])
        start = replace(self._start(number, epoch=-1), generators=generators, seed=self.seed.value)
        return self._with_unread(start)

    def note_loaded(self, loaded: WorkerPosition) -> None:
        """Record where another package's loader resumes, before it begins there."""
        self.loaded_end = loaded if loaded.ended else None
        if self._first_pass is not None:  # a worker's first batch may come long after another's
            self.shared.report(self._first_pass, loaded.part)["offset"] = loaded.offset

    def _start_of(self, loaded: WorkerPosition, epoch: int) -> WorkerPosition:
        """Return where a pass begins that another package's loader resumes."""
        if loaded.epoch not in {-1, epoch} or self._made_for not in {None, loaded.part}:
            raise StateError(
                f"{self.name} cannot resume from the state of its iterator, which is that of worker {loaded.part} in "
                f"epoch {loaded.epoch}: this is worker {this_worker()[0]} in epoch {epoch}. Load the state of the "
                "whole loader, and do not set another epoch before it resumes."
            )
        set_generator_states([generators_only(self.dataset)], loaded.generators)
        return replace(loaded, epoch=epoch)


def generators_only(dataset: object) -> SimpleNamespace:
    """Return what holds a dataset's random generators and nothing else: its own state is a position in it."""
    return SimpleNamespace(generators=random_generators([dataset]))


def pickled(state: object) -> bytes | None:
    """Return a dataset's state pickled; None if that cannot be, or is too large."""
    with suppress(Exception):  # the user's objects
        written = pickle.dumps(state)
        return written if len(written) <= LARGEST else None
    return None
