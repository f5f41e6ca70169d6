"""The sampler of a sharded stream, and its passes: in the main process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, compress, cycle
from typing import Any

from torch.utils.data import DataLoader

from ddp_patch.errors import StateError
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.ranks.pass_monitor import Rules
from ddp_patch.ranks.pass_rules import Rule
from ddp_patch.sharding.item_sources import Nothing
from ddp_patch.sharding.loader_passes import LoaderUse, Passes, require_no_failure
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.sharding.sampler_states import DatasetStates
from ddp_patch.sharding.saved_state import Position, States, StreamSnapshot
from ddp_patch.sharding.state_text import from_text
from ddp_patch.streams import messages
from ddp_patch.streams.dataset import ShardedIterable
from ddp_patch.streams.reader import Resumed, StreamReader, generators_only, stored_epoch, tell_epoch
from ddp_patch.streams.reported_pass import ENDED
from ddp_patch.streams.stream_source import StreamSource


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
            why |= {"order": self._why_streams_differ, "numbers": partial(messages.why_numbers_differ, name)}
        rules = Rules(why=why, data_digest=lambda: agreed.data_digest(given.dataset))
        why_in_common = partial(messages.why_parts_overlap, name) if agreed.options.by_worker else None
        super().__init__(name, LoaderUse.of(given), agreed, given.batching, states, facts, rules, why_in_common)
        self.reader: StreamReader[Any] = StreamReader(given, agreed, is_compared=is_compared)
        self._workers = given.num_workers
        # Whether workers read the same datasets in the next pass, not new copies of the one here.
        self._are_kept: bool = getattr(given.loader, "persistent_workers", False)
        self.ahead: int = getattr(given.loader, "prefetch_factor", None) or 2
        self._seen_epoch: int | None = 0  # so that an epoch counts that was set on the dataset before

    def stream_length(self, epoch: int) -> int:
        """Return how many items the stream has; raise TypeError where nobody knows."""
        if self.reader.share.splits_itself:
            raise TypeError("the dataset decides how many items each worker reads")
        return self.reader.length()

    @contextmanager
    def iterator_context(self, loader: DataLoader[Any]) -> Iterator[None]:
        """While entered, the loader makes an iterator, whose workers are started for the upcoming epoch."""
        self._follow_dataset()
        with super().iterator_context(loader):
            yield

    def _follow_dataset(self) -> None:
        """Choose the epoch that the user has set, by the loader's dataset or on their own one.

        The epoch that their own dataset stores counts if it has changed.
        """
        chosen = self.reader.take_chosen_epoch()
        now = stored_epoch(self.reader.dataset) if chosen is None else None
        epoch = chosen if now is None or now < 0 or now == self._seen_epoch else now
        if epoch is not None and epoch != self.epochs.upcoming:
            self.choose(epoch)

    def noting(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a ``collate_fn`` whose batches may have notes: see ``StreamReader.collate``."""
        return partial(self.reader.collate, collate_fn)

    def may_say(self, what: str) -> bool:
        """Return whether to warn of something now: on one rank, once for each loader."""
        return self.is_first(what) and (self.batch_plan or self.plan).rank == 0

    def indices(self) -> Iterator[None]:
        """Return an index for each item of the upcoming epoch, forever."""
        require_no_failure(self)
        self._follow_dataset()
        if self.batch_plan is None:
            return self._indices()
        # The last indices of a batch of one process, as many as this rank gets: to take them counts the whole batch.
        taken = self.indices_per_batch
        return compress(self._indices(), cycle([False] * (self.batching.size - taken) + [True] * taken))

    @property
    def indices_per_batch(self) -> int:
        """How many indices make workers give one of this rank's batches, where it is full."""
        size = self.batching.size
        return size if self.batch_plan is None else sum(map(len, self.batch_plan.divide(size)))

    def _indices(self) -> Iterator[None]:
        # Ask again: another iterator may have begun an epoch, or the user set one, since this one was made.
        epoch = self.epochs.upcoming
        number = self.epochs.counter.passes + 1
        resumed = self.epochs.position or self.reader.resumed_at(number, epoch)
        start = resumed or Position(epoch, states=self.snapshot(epoch))
        if start.is_within_pass:
            # A loader may have drawn from the dataset's generators since.
            self.sampler_states.restore(epoch, start.states)
        if start.is_ended:
            self.epochs.begin(Pass(start, self, Nothing()))
            if (known := self.reader.resumed) is not None:
                self.reader.resumed = known._replace(left_out=0)
            return
        source = StreamSource(start, self, number)
        current = Pass(start, self, source)
        self.reader.shared.begin(number, epoch)
        if resumed is None:
            self.forget_resumed()
        self.epochs.begin(current)
        # In this process, too. Where the epoch lies in memory shared with the workers (as in Hugging Face's datasets),
        # they then only confirm it: two workers that change it at once could leave it wrong.
        tell_epoch(self.reader.dataset, epoch)
        self._seen_epoch = stored_epoch(self.reader.dataset)
        try:
            yield from chain.from_iterable(current.items.runs(current.delivery))
        finally:
            self.forget_resumed(number)

    def _why_streams_differ(self) -> str:
        """Return what may cause that ranks read different streams, and what to do."""
        latest = self.epochs.latest
        is_in_parts = latest is not None and latest.source.is_in_parts  # the dataset asks for its worker
        return messages.why_streams_differ(self.name, is_in_parts=is_in_parts)

    def resume_at(self, position: Position, *, counts_rest: bool) -> None:
        """Make the next pass resume at a position; see ``Epochs.counts_rest``."""
        super().resume_at(position, counts_rest=counts_rest)
        left_out = position.taken_of_all if counts_rest else 0
        self.reader.resumed = Resumed(self.epochs.counter.passes + 1, position.or_next_epoch(), left_out)

    def forget_resumed(self, number: int | None = None) -> None:
        """Let no pass continue at a position, and ``len()`` count whole epochs again.

        Args:
            number: Only if this pass was to continue. Default: whichever was.
        """
        resumed = self.reader.resumed
        if resumed is not None and number in {None, resumed.number}:
            self.reader.resumed = None

    def choose(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be drawn."""
        super().choose(epoch)
        resumed = self.reader.resumed
        if self.epochs.position is None and resumed is not None and resumed.position.epoch != self.epochs.upcoming:
            self.forget_resumed()

    def require_fits(self, position: Position) -> None:
        """Raise StateError if the state counts the items of another number of readers."""
        parts, share = len(position.taken), self.reader.share
        if parts not in {0, 1, share.readers} and not share.splits_itself:
            raise messages.of_other_readers(self.name, parts, self._workers)

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
