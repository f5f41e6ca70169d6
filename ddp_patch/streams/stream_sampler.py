"""The sampler of a sharded stream, its passes, and what workers found of the items in each."""

import logging
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, compress, cycle, repeat
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import DataLoader

from ddp_patch.compat.private_packages import SAMPLE_KEY
from ddp_patch.errors import RankMismatchError, RankMismatchWarning, StateError, StreamOrderWarning
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.orders.digest import END
from ddp_patch.positions_and_padding import Part, Schedule
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.ranks.pass_facts import Marks
from ddp_patch.ranks.pass_monitor import Rules
from ddp_patch.ranks.pass_rules import Rule
from ddp_patch.sharding.item_sources import ItemSource, Nothing
from ddp_patch.sharding.loader_passes import LoaderUse, Passes, require_no_failure
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.sharding.sampler_states import DatasetStates
from ddp_patch.sharding.saved_state import RECOGNISED_BY, NotedBatch, Position, States, StreamSnapshot, StreamStart
from ddp_patch.sharding.state_text import from_text
from ddp_patch.streams.dataset import ShardedIterable, StreamWorker, generators_only, tell_epoch
from ddp_patch.streams.reports import BEGUN, COUNTS, ENDED, PARTS, STREAM
from ddp_patch.validation import counted

if TYPE_CHECKING:
    from ddp_patch.streams.even_steps import BalancedRounds

__all__ = ["NAMES", "NUMBERS", "StreamPasses", "StreamSampler", "StreamSource"]


logger: logging.Logger = logging.getLogger("ddp_patch")

# Who waits for less than this for a pass has nothing to gain.
_LONG_S = 1.0

# What to do where ranks read different streams.
_SEED: Final = (
    "Give each of its shuffles a seed, the same on every rank, and sort files (webdataset's shards: detshuffle=True, "
    "seed=0; its samples: .shuffle(1000, seed=0))"
)

_INDICES = [None] * 1024

# The digests of what readers report, at counts and of all.
NAMES, NUMBERS = ("values", "end"), ("numbers", "numbers_end")

# How long a state waits for workers to find the end, where the length says that it has come.
_ENDS_S = 10


def _why_parts_overlap(name: str) -> str:
    """Return what may cause that two ranks read the same with share="by_worker", and what to do."""
    return (
        f"With share='by_worker', {name} splits itself by get_worker_info(), which counts the workers of all ranks; so "
        "it splits by something else besides, or its parts are the same. Let it take what its worker's id and "
        "num_workers say, of one list in the same order on every rank; or leave share out, and each rank keeps its "
        "share of one stream."
    )


class StreamSampler(EpochSampler[None]):
    """The index sampler of a sharded iterable dataset.

    torch puts such a sampler into a loader of an iterable dataset. This one begins the epoch when the loader asks for
    its first batch, and has the ``set_epoch`` that training loops and frameworks call.

    Args:
        given: The loader that the user gave.
        agreed: What the ranks agreed on.

    Attributes:
        dataset: The sharded dataset.
    """

    rank_passes: "StreamPasses"
    _unit: str = "items of a stream"

    def __init__(self, given: LoaderFacts[Any], agreed: Agreed) -> None:
        super().__init__(StreamPasses(given, agreed))
        self.dataset: ShardedIterable[Any] = self.rank_passes.dataset

    def __iter__(self) -> Iterator[None]:
        return self.rank_passes.indices()

    def state_dict(self) -> dict[str, Any]:
        """Refuse: the sampler of a stream does not know what workers read."""
        raise StateError(
            f"{type(self).__name__} has no state of its own: workers read what it asks for. Use loader_state(loader) "
            "and restore_loader(loader, state)."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse, likewise: a loader's workers must begin anew."""
        self.state_dict()

    def __len__(self) -> int:
        raise TypeError(f"object of type {type(self).__name__!r} has no len()")  # as torch's endless sampler has none


class StreamPasses(Passes[None]):
    """The passes over an iterable dataset.

    Args:
        given: The loader that the user gave.
        agreed: What the ranks agreed on.

    Attributes:
        worker: What reads the stream; the loader's workers have copies of it.
        dataset: The sharded dataset.
        ahead: How many batches each worker may be ahead of the training loop.
    """

    def __init__(self, given: LoaderFacts[Any], agreed: Agreed) -> None:
        facts: dict[str, object] = {
            **{name: given.described[name] for name in ("dataset", "dataset length")},
            "split": "by_worker" if agreed.options.by_worker else "exact",
        }
        if agreed.options.by_worker:
            # What each worker reads follows from these, so there is no one stream of which others could take a rest.
            numbers = {"num_replicas": agreed.world.num_replicas, "num_workers": given.num_workers}
            facts |= {**numbers, "batch_size": given.batch_size or 1}
        states = DatasetStates(generators_only(given.dataset))
        name, claims = type(given.dataset).__name__, agreed.claims
        is_compared = not agreed.options.by_worker and claims is not None and claims.read_one_stream
        why: dict[Rule, Callable[[], str]] = {"data": lambda: agreed.data_named}
        if is_compared:
            why |= {"order": self._why_streams_differ, "numbers": self.why_numbers_differ}
        rules = Rules(why=why, data_digest=lambda: agreed.data_digest(given.dataset))
        why_in_common = partial(_why_parts_overlap, name) if agreed.options.by_worker else None
        super().__init__(name, LoaderUse.of(given), agreed, given.batching, states, facts, rules, why_in_common)
        self.worker: StreamWorker[Any] = StreamWorker(given, agreed, is_compared=is_compared)
        self.dataset: ShardedIterable[Any] = ShardedIterable(self.worker)
        self._workers = given.num_workers
        # Whether these read the same datasets in the next pass, not new copies of the one here.
        self._are_kept: bool = getattr(given.loader, "persistent_workers", False)
        self.ahead: int = getattr(given.loader, "prefetch_factor", None) or 2
        self._told_epoch: int | None = 0  # so that one that was set on the dataset before counts

    def stream_length(self, epoch: int) -> int:
        """Return how many items the stream has; raise TypeError where nobody knows."""
        if self.worker.splits_itself:
            raise TypeError("the dataset decides how many items each worker reads")
        return self.worker.stream_length()

    @contextmanager
    def iterator_context(self, loader: DataLoader[Any]) -> Iterator[None]:
        """While entered, the loader makes an iterator, whose workers are started for the upcoming epoch."""
        self._follow_dataset()
        with super().iterator_context(loader):
            yield

    def _follow_dataset(self) -> None:
        """Let an epoch that somebody has set on the dataset be the next one, by the loader's ``set_epoch`` or past it.

        What the dataset stores counts, if that has changed: somebody has set it on the user's own dataset.
        """
        chosen, self.worker.chosen_epoch = self.worker.chosen_epoch, None
        now = self._stored_epoch() if chosen is None else None
        epoch = chosen if now is None or now < 0 or now == self._told_epoch else now
        if epoch is not None and epoch != self.epochs.upcoming:
            self.choose(epoch)

    def _stored_epoch(self) -> int | None:
        """Return the ``epoch`` of a dataset that takes one, or its first whole number with that word in its name."""
        dataset = self.worker.dataset
        if not callable(getattr(dataset, "set_epoch", None)):
            return None
        stored = (value for name, value in vars(dataset).items() if "epoch" in name.lower())
        found = (value for value in (getattr(dataset, "epoch", None), *stored) if type(value) is int)
        return next(found, None)

    def noting(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a ``collate_fn`` with whose batches travels what workers note of them."""
        return partial(self.worker.collate, collate_fn)

    def may_say(self, what: str) -> bool:
        """Return whether to say something now: on one rank, once for each loader."""
        return self.is_first(what) and (self.batch_plan or self.plan).rank == 0

    def indices(self) -> Iterator[None]:
        """Return an index for each item of the upcoming epoch, forever."""
        require_no_failure(self)
        self._follow_dataset()
        if self.batch_plan is None:
            return self._indices()
        # The last ones of a batch of one process, as many as this rank gets: taking them counts the whole batch.
        taken = self.indices_per_batch
        return compress(self._indices(), cycle([False] * (self.batching.size - taken) + [True] * taken))

    @property
    def indices_per_batch(self) -> int:
        """How many indices make workers give one of this rank's batches, where it is full."""
        size = self.batching.size
        return size if self.batch_plan is None else sum(map(len, self.batch_plan.divide(size)))

    def _indices(self) -> Iterator[None]:
        # Ask again: others may have begun an epoch, or set one, since this iterator was made.
        epoch = self.epochs.upcoming
        number = self.epochs.counter.passes + 1
        resumed = self.epochs.position or self.worker.resumed_at(number, epoch)
        start = resumed or Position(epoch, states=self.snapshot(epoch))
        if start.is_within_pass:
            # A loader may have drawn from them since.
            self.sampler_states.restore(epoch, start.states)
        if start.is_ended:
            self.epochs.begin(Pass(start, self, Nothing()))
            self.worker.taken = 0
            return
        source = StreamSource(start, self, number)
        current = Pass(start, self, source)
        self.worker.shared.begin(number, epoch)
        if resumed is None:
            self.forget_resumed()
        self.epochs.begin(current)
        # Told here too. Where the epoch lies in memory shared with the workers (as in Hugging Face's datasets), theirs
        # then only confirm it: two workers that change it at once could leave it wrong.
        tell_epoch(self.worker.dataset, epoch)
        self._told_epoch = self._stored_epoch()
        try:
            yield from chain.from_iterable(current.items.runs(current.delivery))
        finally:
            self.forget_resumed(number)

    def _why_streams_differ(self) -> str:
        """Return what may cause that ranks read different streams, and what to do."""
        is_split = self.epochs.latest is not None and self.epochs.latest.source.is_in_parts  # it asks for its worker
        by_worker = " If each worker shuffles its own part, share='by_worker' will do." if is_split else ""
        return (
            f"Each rank keeps its shard of what should be one stream of {self.worker.name}, so samples are lost. "
            f"{_SEED}.{by_worker} Let it give every rank everything, and skip unreadable items on every rank or none. "
            f"If only augmentation, or the folder of the files, differs, give items a string {SAMPLE_KEY!r}. If it "
            "gives each rank its own part on purpose, set is_ddp_aware = True in its class: its loader is left as it "
            "is."
        )

    def why_numbers_differ(self) -> str:
        """Return the two explanations of items that differ in numbers alone, and how to tell which is right."""
        return (
            "Either each augments or masks its items by itself, and nothing is lost; or each reads its own order, of "
            f"which each rank keeps its shard, and samples are lost. Give each item of {self.worker.name} a string "
            f"{SAMPLE_KEY!r} that names it, to know which: it alone counts then, and another order is an error. "
            f"{_SEED}. "
            "If nothing is lost, ignore this RankMismatchWarning, or seed the augmentation alike."
        )

    def resume_at(self, position: Position, *, counts_rest: bool) -> None:
        """Make the next pass resume at a position; see the attribute ``counts_rest``."""
        super().resume_at(position, counts_rest=counts_rest)
        self.worker.resumed = self.epochs.counter.passes + 1, position.or_next_epoch()
        self.worker.taken = position.taken_of_all if counts_rest else 0

    def forget_resumed(self, number: int | None = None) -> None:
        """Let ``len()`` count whole epochs again: if pass ``number`` was resumed, or whichever was."""
        worker = self.worker
        if worker.resumed is not None and number in {None, worker.resumed[0]}:
            worker.resumed, worker.taken = None, 0

    def choose(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be drawn."""
        super().choose(epoch)
        resumed = self.worker.resumed
        if self.epochs.position is None and resumed is not None and resumed[1].epoch != self.epochs.upcoming:
            self.forget_resumed()

    def require_fits(self, position: Position) -> None:
        """Raise StateError if the state counts the items of other workers."""
        parts = len(position.taken)
        if parts not in {0, 1, self.worker.shared.readers} and not self.worker.splits_itself:
            raise StateError(
                f"{self.worker.name} cannot resume from the state, which counts the items of {parts} workers that "
                f"each read a part: this loader has num_workers={self._workers}. Use num_workers={parts}; the "
                "number of ranks may change."
            )

    def snapshot(self, epoch: int) -> States:
        """Return what the dataset holds now: its generators, and its own states where the next epoch begins."""
        worker, latest = self.worker, self.worker.shared.latest_pass
        before: list[Sequence[Any]] = []
        if self._are_kept and latest >= 0:  # these go on from where they ended
            before = worker.shared.states(latest, ENDED)
        elif (self._are_kept or not self._workers) and (written := worker.unread()) is not None:
            before = [(from_text(written.decode()),)]
        streams = [StreamSnapshot(initial_state=state) for state in before]
        return replace(super().snapshot(epoch), streams=streams if any(before) else ())


class StreamSource(ItemSource[None]):
    """An index for every item, None, forever. Workers read the items, and find the end if there is one.

    Args:
        start: Where the pass begins.
        passes: All passes over the loader.
        number: Which of these it is.

    Attributes:
        rounds: What the pass has given, if ranks send each other batches.
    """

    is_endless: bool = True
    is_open_ended: bool
    has_own_length: bool
    rounds: "BalancedRounds | None"

    def __init__(self, start: Position, passes: "StreamPasses", number: int) -> None:
        worker = passes.worker
        self.is_open_ended = not worker.splits_itself
        self.has_own_length = worker.splits_itself and worker.plan.uneven == "keep"
        self._start, self._worker, self._plan, self._readers = start, worker, worker.plan, worker.shared.readers
        self._passes, self._number, self._began_s = passes, number, perf_counter()
        # The latest notes, by reader.
        self._notes: dict[int, deque[NotedBatch]] = defaultdict(partial(deque, maxlen=passes.ahead + 2))

    def chunks(self) -> Iterator[Sequence[None]]:
        """Yield indices; what was taken before, workers leave out."""
        return repeat(_INDICES)

    def ends_within(self, items: int) -> bool:
        """Return True: nothing has to be drawn here to know what is left."""
        return True

    # ---- what workers tell ----

    def keep(self, note: NotedBatch) -> None:
        """Keep what the worker noted whose batch the loop is given."""
        self._notes[note.worker_index].append(note)

    def _reported(self, what: str) -> list[Any]:
        """Return one of the values that each worker reports of the pass; -1 where it is not known."""
        return self._worker.shared.reported(self._number, what)

    def note_first_batch(self) -> None:
        """Say that the ranks compare no more than the number of the items, if nothing is told of those read so far."""
        if max(self._reported("marks")) > 0 and max(self._reported("is_told")) < 1:
            self._tell_of_names("its items have no string, number or tensor in memory")

    def _tell_of_names(self, why: str) -> None:
        """Say once, on one rank, that the ranks cannot compare the items that were read.

        Warns:
            StreamOrderWarning: They cannot.
        """
        if self._worker.is_compared and self._passes.may_say("unnamed"):
            warnings.warn(
                f"The ranks cannot compare in which order they read {self._worker.name}: {why}. If each rank reads its "
                f"own order, samples are lost. {_SEED}. To let the ranks compare, give each item a string that names "
                "it. If they read one order, ignore this StreamOrderWarning.",
                StreamOrderWarning,
                stacklevel=2,
            )

    def note_loop_end(self) -> None:
        """Say that all items have one name, if so; and if reading took most of a pass, what would read less."""
        if max(self._reported("read")) > 1 and max(self._reported("is_told")) == 1:
            self._tell_of_names("all of its items have the same strings and numbers")
        self._passes.forget_resumed(self._number)  # persistent workers keep the sampler's iterator, which has no end
        ranks, lengths = self._plan.num_replicas, self._worker.shared.lengths(self._number)
        spent_s, took_s = max(self._reported("spent_ms")) / 1000, perf_counter() - self._began_s
        is_whole = self._start.is_at_epoch_start and None not in lengths
        # by_worker divides no batches.
        reads_too_much = is_whole and ranks > 1 and self.is_in_parts and self._worker.batch_plan is None
        if reads_too_much and spent_s > max(took_s / 2, _LONG_S) and self._passes.may_say("by_worker"):
            logger.warning(
                f"{self._worker.name}: each of {ranks} ranks read all {sum(filter(None, lengths)):,} items, and waited "
                f"for them for {spent_s:.1f} of {took_s:.1f} s. The dataset splits itself over workers, so "
                "patch_dataloader_to_ddp(loader, share='by_worker') reads each item once. It costs: a saved state is "
                "then restored on as many ranks and workers only, and every pass needs all ranks."
            )

    def _digests(self, of: tuple[str, str]) -> list[tuple[list[int], int | None]]:
        """Return the marks of each worker, and the digest of all that it read, or None before its end."""
        # The ends first, and how many marks there are before these: what they tell of was written before.
        read, ends, made, values = map(self._reported, ("read", of[1], "marks", of[0]))
        return [
            (of_reader[: max(0, count)], end if length >= 0 else None)
            for of_reader, count, length, end in zip(values, made, read, ends, strict=True)
        ]

    @property
    def marks(self) -> Marks:
        """What tells the digests of names that workers have reported."""
        return partial(self._marks, NAMES)

    @property
    def number_marks(self) -> Marks:
        """What tells those of numbers."""
        return partial(self._marks, NUMBERS)

    def _marks(self, of: tuple[str, str]) -> dict[int, int]:
        """Return the digests of all workers by their counts; none before it is known whether they read parts.

        Where they do, that of all at a count is the hash of theirs. Where a part ended before a count, its end counts:
        so it differs from that of a stream that goes on. Of one stream, all have the same digest.
        """
        if len(ways := self._worker.shared.ways(self._number)) != 1:
            return {}
        digests = [
            marks if end is None else marks + [end] * (len(COUNTS) + 1 - len(marks)) for marks, end in self._digests(of)
        ]
        values = max(digests, key=len) if ways == {STREAM} else map(hash, zip(*digests, strict=False))
        return dict(zip((*COUNTS, END), values, strict=False))

    def workers_differ(self, of: tuple[str, str] = NAMES) -> tuple[int, int] | None:
        """Return where workers that read one stream differ: the count, and which one has others than worker 0."""
        if self._worker.shared.ways(self._number) != {STREAM}:
            return None
        (first, first_end), *others = self._digests(of)
        for worker, (marks, end) in enumerate(others, 1):
            differ = (count for count, one, other in zip(COUNTS, first, marks, strict=False) if one != other)
            if (count := next(differ, None)) is not None:
                return count, worker
            if None not in {first_end, end} and first_end != end:
                return int(self._reported("read")[0]), worker
        return None

    def require_one_order(self) -> None:
        """Raise RankMismatchError if this rank's workers should read one stream, and read others.

        Warns:
            RankMismatchWarning: They read items of the same names and with other numbers.
        """
        name, seen = (
            self._worker.name,
            "by worker 0 and worker {1} of one rank: they differ within the first {0} items. ",
        )
        if (found := self.workers_differ()) is not None:
            why = self._passes.monitor.rules.why_broken("order")
            raise RankMismatchError(f"{name} is read in other orders {seen.format(*found)}{why}")
        if (found := self.workers_differ(NUMBERS)) is not None and self._passes.may_say("numbers"):
            text = f"{name} is read with other numbers {seen.format(*found)}{self._passes.why_numbers_differ()}"
            warnings.warn(text, RankMismatchWarning, stacklevel=2)

    @property
    def is_in_parts(self) -> bool:  # type: ignore[override]  # what workers find
        """Whether several workers read a part each; False while that is unknown."""
        worker = self._worker
        return not worker.splits_itself and self._readers > 1 and worker.shared.ways(self._number) == {PARTS}

    def lengths_found(self) -> Sequence[int | None]:
        """Return how many items the stream had, or each worker's part of it; None if nobody came to the end."""
        lengths = self._worker.shared.lengths(self._number)
        return lengths if self.is_in_parts else [next((length for length in lengths if length is not None), None)]

    def parts(self, taken: int) -> Sequence[Part]:
        """Return what the pass is over: one stream, or workers' parts, from the one whose turn is first."""
        lengths = self.lengths_found()
        if not self.is_in_parts:
            return [Part(taken, lengths[0])]
        of_each = self._of_each()
        return [Part(of_each[part], length, part) for part, length in zip(self._turns, lengths, strict=True)]

    @property
    def _turns(self) -> Sequence[int]:
        """Whose part each worker reads: after the first one's, each reads the next."""
        parts = enumerate(self._reported("part"))
        first = next(((part - worker) % self._readers for worker, part in parts if part >= 0), 0)
        return [(first + worker) % self._readers for worker in range(self._readers)]

    def most_when_found(self, schedule: Callable[[], Schedule], batches: int, *, may_end: bool) -> int | None:
        """Wait for workers to find the end, and return how many batches the largest share then has; None if unknown."""
        # Workers read on while the last batches are used, so the end is found in a moment.
        until = monotonic() + (_ENDS_S if may_end else 0)
        while (most := schedule().most_batches) is None and monotonic() < until:
            sleep(0.005)
        if most is None and may_end:
            raise StateError(
                f"{self._worker.name} may have ended after {counted(batches, 'batch')}, but not all of its "
                f"{self._readers} workers, which read a part each, have reported that within {_ENDS_S} s. Take the "
                "state a step earlier, or after the pass."
            )
        return most

    def batches_made(self) -> Sequence[int]:
        """Return how many batches each worker of a dataset that splits itself made; -1 for those that may make more."""
        return self._reported("batches")

    # ---- positions ----

    def _of_each(self, ranks: int = 1) -> Sequence[int]:
        """Return how many items were taken before the pass of the part of each worker of some ranks."""
        parts = self._readers * ranks
        return self._start.taken if len(self._start.taken) == parts else [0] * parts

    def position_after(self, position: Position, batches: int, schedule: Callable[[], Schedule]) -> Position:
        """Return the position after this many batches.

        Raises:
            StateError: No state can describe it.
        """
        if not batches:
            return self._start if len(self._start.taken) > 1 else replace(position, states=self._start.states)
        if self._worker.splits_itself:
            return self._position_of_all(position, batches)
        found, in_parts = schedule(), self.is_in_parts
        if in_parts and not found.are_alike(batches):
            raise StateError(
                f"The state of {self._worker.name} cannot be saved after {counted(batches, 'batch')}: with "
                "uneven='keep' a worker has come to its end on some ranks and not on others, so the ranks' workers no "
                "longer take the same turns. Use uneven='pad' or 'drop', or take the state earlier, or at the "
                "epoch's end."
            )
        # One stream is one part, at which the workers take turns.
        turns = self._turns if in_parts else [0]
        now, made = found.taken(batches), found.made(batches)
        began, taken, known = self._start.states.streams or [StreamSnapshot()], list[int](), list[StreamSnapshot]()
        for part in range(len(turns)):
            turn = turns.index(part)
            reader = turn if in_parts else (batches - 1) % self._readers
            taken.append(now[turn])
            known.append(self._snapshot_after(reader, made[turn], taken[part], began[part % len(began)]))
        # The worker after the last one: every rank knows that one, and not yet whether it has come to its end.
        upcoming = turns[(found.record(batches - 1).part + 1) % len(turns)]
        return replace(position, taken=taken, turn=upcoming, states=replace(position.states, streams=known))

    def _snapshot_after(self, worker: int, batches: int, taken: int, previous: StreamSnapshot) -> StreamSnapshot:
        """Return what is known of a worker's stream after some batches of it; ``previous``, when the pass began."""
        if not batches:
            return previous
        first = self._start_seen(worker, taken) or previous.first
        states = [note.state for note in self._notes[worker] if note.batches == batches]
        initial_state = self._worker.shared.states(self._number, BEGUN)[worker] or previous.initial_state
        return StreamSnapshot(first, tuple(from_text(state.decode()) for state in states), initial_state)

    def _start_seen(self, worker: int, read: int) -> StreamStart | None:
        """Return what the first items of a worker's stream are, of so many that were read; None if nobody looked."""
        if (seen := min(RECOGNISED_BY, read, self._reported("seen")[worker])) < 1:
            return None
        value, whole = (None if part < 0 else part for part in self._reported("starts")[worker][seen - 1])
        return StreamStart(seen, value, whole)

    def _position_of_all(self, position: Position, batches: int) -> Position:
        """Return the position of all ranks' workers, if ranks send each other batches."""
        if self.rounds is None:
            return position
        size, readers = self._worker.batching.size, self._readers
        before = [taken // size for taken in self._of_each(self._plan.num_replicas)]
        made = self.rounds.made(batches, [before[at : at + readers] for at in range(0, len(before), readers)])
        return replace(position, taken=[count * size for count in made])
