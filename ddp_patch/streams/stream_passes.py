"""The passes over a sharded stream in the main process: their sampler, and the knowledge of each pass."""

import logging
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, compress, cycle, repeat
from time import monotonic, perf_counter, sleep
from typing import Any

from torch.utils.data import DataLoader

from ddp_patch.errors import RankMismatchError, RankMismatchWarning, StateError, StreamOrderWarning
from ddp_patch.loaders.facts import LoaderFacts
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
from ddp_patch.sharding.saved_state import NotedBatch, Position, States, StreamSnapshot
from ddp_patch.sharding.values_as_text import from_text
from ddp_patch.streams import error_texts
from ddp_patch.streams.dataset import Resumed, ShardedIterable, StreamReader, generators_only
from ddp_patch.streams.dataset_reading import tell_epoch
from ddp_patch.streams.even_steps import BalancedRounds
from ddp_patch.streams.reports import ENDED, NUMBERS, ReportedPass, position_of_parts

logger: logging.Logger = logging.getLogger("ddp_patch")

# A rank that waits less than this in a pass has nothing to gain.
_LONG_S = 1.0

# How long a state waits for readers to report the end, where the length says that it has come.
_ENDS_S = 10

_INDICES = [None] * 1024


class StreamSampler(EpochSampler[None]):
    """The index sampler of a sharded iterable dataset.

    torch puts such a sampler into a loader of an iterable dataset. This sampler begins the epoch when the loader asks
    for its first batch, and has the ``set_epoch`` that training loops and frameworks call.

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
        self.dataset: ShardedIterable[Any] = ShardedIterable(self.rank_passes.reader)

    def __iter__(self) -> Iterator[None]:
        return self.rank_passes.indices()

    def state_dict(self) -> dict[str, Any]:
        """Refuse: the sampler of a stream does not know what readers read."""
        raise StateError(
            f"{type(self).__name__} has no state of its own: workers read what it asks for. Use loader_state(loader) "
            "and restore_loader(loader, state)."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse as well: a loader's readers must begin anew."""
        self.state_dict()

    def __len__(self) -> int:
        raise TypeError(f"object of type {type(self).__name__!r} has no len()")  # as torch's endless sampler has none


class StreamPasses(Passes[None]):
    """The passes over an iterable dataset.

    Args:
        given: The loader that the user gave.
        agreed: What the ranks agreed on.

    Attributes:
        reader: Reads the stream in this process; the loader's workers have copies of it.
        sends_batches: Whether ranks that have batches left send some to ranks that have none.
        ahead: How many batches each worker may be ahead of the training loop.
    """

    def __init__(self, given: LoaderFacts[Any], agreed: Agreed) -> None:
        facts: dict[str, object] = {
            **{name: given.described[name] for name in ("dataset", "dataset length")},
            "split": "by_worker" if agreed.options.by_worker else "exact",
        }
        if agreed.options.by_worker:
            # What each worker reads follows from these numbers: there is no one stream whose rest could be shared.
            numbers = {"num_replicas": agreed.world.num_replicas, "num_workers": given.num_workers}
            facts |= {**numbers, "batch_size": given.batch_size or 1}
        states = DatasetStates(generators_only(given.dataset))
        name, claims = type(given.dataset).__name__, agreed.claims
        is_compared = not agreed.options.by_worker and claims is not None and claims.read_one_stream
        why: dict[Rule, Callable[[], str]] = {"data": lambda: agreed.data_named}
        if is_compared:
            why |= {"order": self._why_streams_differ, "numbers": partial(error_texts.why_numbers_differ, name)}
        rules = Rules(why=why, data_digest=lambda: agreed.data_digest(given.dataset))
        why_in_common = partial(error_texts.why_parts_overlap, name) if agreed.options.by_worker else None
        super().__init__(name, LoaderUse.of(given), agreed, given.batching, states, facts, rules, why_in_common)
        self.reader: StreamReader[Any] = StreamReader(given, agreed, is_compared=is_compared)
        is_alone = agreed.world.share_of_rank is None or agreed.world.num_replicas == 1
        self.sends_batches: bool = agreed.options.by_worker and not (is_alone or self.loader.has_one_iterator)
        self._workers = given.num_workers
        # Whether workers read the same datasets in the next pass, not new copies of the one here.
        self._are_kept: bool = getattr(given.loader, "persistent_workers", False)
        self.ahead: int = getattr(given.loader, "prefetch_factor", None) or 2
        self._seen_epoch: int | None = 0  # so that an epoch that was set on the dataset before counts

    def stream_length(self, epoch: int) -> int:
        """Return how many items the stream has; raise TypeError if unknown."""
        if self.reader.share.splits_itself:
            raise TypeError("the dataset decides how many items each worker reads")
        dataset: Any = self.reader.dataset
        return len(dataset)

    @contextmanager
    def iterator_context(self, loader: DataLoader[Any]) -> Iterator[None]:
        """While entered, the loader makes an iterator, whose workers are started for the upcoming epoch."""
        self._follow_dataset()
        with super().iterator_context(loader):
            yield

    def _follow_dataset(self) -> None:
        """Choose the epoch that the user has set, on the loader's dataset or on the user's own dataset.

        The epoch that the user's own dataset stores counts if it has changed.
        """
        chosen = self.reader.take_chosen_epoch()
        now = _stored_epoch(self.reader.dataset) if chosen is None else None
        epoch = chosen if now is None or now < 0 or now == self._seen_epoch else now
        if epoch is not None and epoch != self.epochs.upcoming:
            self.choose(epoch)

    def noting(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a ``collate_fn`` whose batches may have notes: see ``StreamReader.collate``."""
        return partial(self.reader.collate, collate_fn)

    def may_say(self, what: str) -> bool:
        """Return whether to warn of something now: on one rank, once for each loader."""
        return self.is_first(what) and (self.batch_plan or self.plan).rank == 0

    def warn_of_names(self, why: str) -> None:
        """Warn once, on one rank, that the ranks cannot compare the items that were read."""
        if self.reader.share.is_compared and self.may_say("unnamed"):
            warnings.warn(error_texts.cannot_be_named(self.name, why), StreamOrderWarning, stacklevel=2)

    # ---- passes ----

    def indices(self) -> Iterator[None]:
        """Return an index for each item of the upcoming epoch, forever."""
        require_no_failure(self)
        self._follow_dataset()
        if self.batch_plan is None:
            return self._indices()
        # Of each batch of one process, this rank gets the last indices, as many as its part has, so the whole batch
        # counts.
        taken = self.indices_per_batch
        return compress(self._indices(), cycle([False] * (self.batching.size - taken) + [True] * taken))

    @property
    def indices_per_batch(self) -> int:
        """How many indices a full batch of this rank needs."""
        size = self.batching.size
        return size if self.batch_plan is None else sum(map(len, self.batch_plan.divide(size)))

    def _indices(self) -> Iterator[None]:
        # Ask again, because another iterator may have begun an epoch since, or the user may have set one.
        epoch, reader = self.epochs.upcoming, self.reader
        number = self.epochs.counter.passes + 1
        resumed = self.epochs.position or reader.resumed_at(number, epoch)
        start = resumed or Position(epoch, states=self.snapshot(epoch))
        if start.is_within_pass:
            # A loader may have drawn from the dataset's generators since.
            self.sampler_states.restore(epoch, start.states)
        if start.is_ended:
            self.epochs.begin(Pass(start, self, Nothing()))
            reader.resume_at(Resumed(number, start.or_next_epoch(), left_out=0))
            return
        current = Pass(start, self, StreamSource(start, self, number))
        reader.shared.begin(number, epoch)
        if resumed is None:
            reader.forget_resumed()
        self.epochs.begin(current)
        # In this process, too. If the epoch lies in memory shared with the workers (as in Hugging Face's datasets),
        # workers then only confirm the epoch: two workers that change it at once could leave it wrong.
        tell_epoch(reader.dataset, epoch)
        self._seen_epoch = _stored_epoch(reader.dataset)
        try:
            yield from chain.from_iterable(current.items.runs(current.delivery))
        finally:
            reader.forget_resumed(number)

    def _why_streams_differ(self) -> str:
        """Return why ranks may read different streams, and what to do."""
        latest = self.epochs.latest
        is_in_parts = latest is not None and latest.source.is_in_parts  # the dataset asks for its worker
        return error_texts.why_streams_differ(self.name, is_in_parts=is_in_parts)

    def resume_at(self, position: Position, *, counts_rest: bool) -> None:
        """Make the next pass resume at a position; see ``Epochs.counts_rest``."""
        super().resume_at(position, counts_rest=counts_rest)
        left_out = position.taken_of_all if counts_rest else 0
        self.reader.resume_at(Resumed(self.epochs.counter.passes + 1, position.or_next_epoch(), left_out))

    def choose(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be drawn."""
        super().choose(epoch)
        resumed = self.reader.resumed
        if self.epochs.position is None and resumed is not None and resumed.position.epoch != self.epochs.upcoming:
            self.reader.forget_resumed()

    def require_fits(self, position: Position) -> None:
        """Raise StateError if the state counts the items of another number of readers."""
        parts, share = len(position.taken), self.reader.share
        if parts not in {0, 1, share.readers} and not share.splits_itself:
            raise error_texts.of_other_readers(self.name, parts, self._workers)

    def snapshot(self, epoch: int) -> States:
        """Return the states of the dataset's generators, and its own states where the next epoch begins."""
        reader, before = self.reader, list[Sequence[Any]]()
        if self._are_kept and (begun := reader.shared.begun()) is not None:  # workers go on from where they ended
            reported = reader.shared.reported(begun[0])
            before = [reported.state_of(place, ENDED) for place in range(reader.share.readers)]
        elif (self._are_kept or not self._workers) and (written := reader.unread_state()) is not None:
            before = [(from_text(written.decode()),)]
        streams = [StreamSnapshot(initial_state=state) for state in before]
        return replace(super().snapshot(epoch), streams=streams if any(before) else ())


def _stored_epoch(dataset: object) -> int | None:
    """Return the ``epoch`` of a dataset with ``set_epoch``, or its first whole number whose name contains "epoch"."""
    if not callable(getattr(dataset, "set_epoch", None)):
        return None
    stored = (value for name, value in vars(dataset).items() if "epoch" in name.lower())
    found = (value for value in (getattr(dataset, "epoch", None), *stored) if type(value) is int)
    return next(found, None)


class StreamSource(ItemSource[None]):
    """Endless indices, which are None: readers read the items, and find the end if there is one.

    The main process knows a pass by the readers' reports, and by the notes that travel with batches.

    Args:
        start: Where the pass begins.
        passes: All passes over the loader.
        number: The number of this pass.

    Attributes:
        rounds: The rounds in which ranks send each other batches; None if each rank delivers its own batches.
    """

    is_endless: bool = True
    is_open_ended: bool
    has_own_length: bool
    rounds: BalancedRounds | None

    def __init__(self, start: Position, passes: StreamPasses, number: int) -> None:
        splits_itself = passes.reader.share.splits_itself
        self.is_open_ended = not splits_itself
        self.has_own_length = splits_itself and passes.plan.uneven == "keep"
        self.rounds = BalancedRounds() if passes.sends_batches else None
        self._start, self._passes, self._number, self._began_s = start, passes, number, perf_counter()
        # The latest notes, by reader.
        self._notes: dict[int, deque[NotedBatch]] = defaultdict(partial(deque, maxlen=passes.ahead + 2))

    def chunks(self) -> Iterator[Sequence[None]]:
        """Yield indices; readers leave out the items that were taken before."""
        return repeat(_INDICES)

    def ends_within(self, items: int) -> bool:
        """Return True, because nothing has to be drawn here."""
        return True

    def keep(self, note: NotedBatch) -> None:
        """Keep the note of a batch that the loop gets."""
        self._notes[note.worker_index].append(note)

    # ---- what readers have reported by now ----

    @property
    def reported(self) -> ReportedPass:
        """The readers' reports of the pass."""
        return self._passes.reader.shared.reported(self._number)

    @property
    def is_in_parts(self) -> bool:  # type: ignore[override]  # readers report it
        """Whether several readers read a part each; False while that is unknown."""
        return self.reported.is_in_parts

    def lengths_found(self) -> Sequence[int | None]:
        """Return how many items the stream, or each reader's part, has; None if no reader came to the end."""
        return self.reported.lengths_found

    def parts(self, taken: int) -> Sequence[Part]:
        """Return the parts of the pass: one stream, or readers' parts, beginning with the part whose turn is first."""
        return self.reported.parts(taken, self._start.taken)

    def most_when_found(self, schedule: Callable[[], Schedule], batches: int, *, may_end: bool) -> int | None:
        """Wait for readers to find the end, and return how many batches the largest share then has; None if unknown."""
        # Readers read on while the last batches are used, so the end is found in a moment.
        until = monotonic() + (_ENDS_S if may_end else 0)
        while (most := schedule().most_batches) is None and monotonic() < until:
            sleep(0.005)
        if most is None and may_end:
            raise error_texts.unknown_ends(self._passes.name, batches, self._passes.reader.share.readers, _ENDS_S)
        return most

    # ---- what ranks, and this rank's readers, compare ----

    @property
    def marks(self) -> Marks:
        """What returns the digests of names and of numbers that readers have reported."""

        def marks() -> dict[int, tuple[int, int]]:
            reported = self.reported
            names, numbers = reported.digests(), reported.digests(NUMBERS)
            return {count: (value, numbers.get(count, 0)) for count, value in names.items()}

        return marks

    def require_one_order(self) -> None:
        """Raise RankMismatchError if this rank's readers read different streams instead of one.

        Warns:
            RankMismatchWarning: The readers' items have the same names and different numbers.
        """
        reported, name = self.reported, self._passes.name
        if (found := reported.readers_differ()) is not None:
            why = self._passes.monitor.rules.why_broken("order")
            raise RankMismatchError(error_texts.readers_differ(name, "in other orders", *found, why))
        if (found := reported.readers_differ(NUMBERS)) is not None and self._passes.may_say("numbers"):
            why = error_texts.why_numbers_differ(name)
            text = error_texts.readers_differ(name, "with other numbers", *found, why)
            warnings.warn(text, RankMismatchWarning, stacklevel=2)

    def note_first_batch(self) -> None:
        """Warn that the ranks compare only the number of items, if no item so far has a name."""
        if self.reported.names_nothing:
            self._passes.warn_of_names("its items have no string, number or tensor in memory")

    def note_loop_end(self) -> None:
        """Warn if all items have one name. If reading took most of a pass, log a way to read less."""
        reported, passes = self.reported, self._passes
        if reported.names_all_alike:
            passes.warn_of_names("all of its items have the same strings and numbers")
        passes.reader.forget_resumed(self._number)  # persistent workers keep an iterator, which has no end
        ranks, took_s = passes.plan.num_replicas, perf_counter() - self._began_s
        is_whole = self._start.is_at_epoch_start and None not in reported.lengths
        # by_worker divides no batches.
        reads_too_much = is_whole and ranks > 1 and reported.is_in_parts and passes.batch_plan is None
        if reads_too_much and reported.spent_s > max(took_s / 2, _LONG_S) and passes.may_say("by_worker"):
            items = sum(filter(None, reported.lengths))
            logger.warning(error_texts.reads_too_much(passes.name, ranks, items, reported.spent_s, took_s))

    # ---- positions ----

    def position_after(self, position: Position, batches: int, schedule: Callable[[], Schedule]) -> Position:
        """Return the position after this many batches.

        Raises:
            StateError: No state can describe the position.
        """
        start, share, name = self._start, self._passes.reader.share, self._passes.name
        if not batches:
            return start if len(start.taken) > 1 else replace(position, states=start.states)
        if not share.splits_itself:
            return position_of_parts(position, start, batches, schedule(), self.reported, self._notes, name)
        if self.rounds is None:
            return position
        parts = share.readers * share.plan.num_replicas
        before = start.taken if len(start.taken) == parts else [0] * parts
        return replace(position, taken=self.rounds.items_taken(batches, before, share.batching.size))
