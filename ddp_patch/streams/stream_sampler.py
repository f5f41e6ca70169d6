"""The sampler of a sharded stream: None instead of indices, and what came of them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain, compress, cycle
from typing import Any, cast

from torch.utils.data import DataLoader

from ddp_patch.compat.packages import SAMPLE_KEY, order_remedy
from ddp_patch.errors import StateError
from ddp_patch.loaders.contents import held_by
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.sharding.epochs import Passes
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.sampler import EpochSampler
from ddp_patch.sharding.sampler_states import SamplerStates
from ddp_patch.sharding.saved_position import Position, States
from ddp_patch.streams.dataset import ShardedIterable
from ddp_patch.streams.stream_source import ONE_STREAM, SEED, StreamSource
from ddp_patch.streams.worker import StreamWorker, generators_only

__all__ = ["StreamSampler"]


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
        super().__init__(StreamPasses(type(self).__name__, given, agreed))
        self.dataset: ShardedIterable[Any] = self.rank_passes.dataset

    def __iter__(self) -> Iterator[None]:
        return self.rank_passes.indices()

    def __len__(self) -> int:
        raise TypeError(f"object of type {type(self).__name__!r} has no len()")  # as torch's endless sampler has none


class StreamPasses(Passes[None]):
    """The passes over an iterable dataset.

    Args:
        wrapper: The class of the sampler that shards it.
        given: The loader that the user gave.
        agreed: What the ranks agreed on.

    Attributes:
        worker: What reads the stream; the loader's workers have copies of it.
        dataset: The sharded dataset.
    """

    def __init__(self, wrapper: str, given: LoaderFacts[Any], agreed: Agreed) -> None:
        facts: dict[str, object] = {
            **{name: given.described[name] for name in ("dataset", "dataset length")},
            "split": "by_worker" if agreed.options.by_worker else "exact",
        }
        if agreed.options.by_worker:
            # What each worker reads follows from these, so there is no one stream of which others could take a rest.
            numbers = {"num_replicas": agreed.world.num_replicas, "num_workers": given.num_workers}
            facts |= {**numbers, "batch_size": given.batch_size or 1}
        states = SamplerStates([generators_only(given.dataset)], is_private=False)
        super().__init__(type(given.dataset).__name__, wrapper, agreed, given.batching, states, facts)
        peers, mailbox = agreed.peers, self.monitor.mailbox
        self._held: str | None = None  # a fingerprint of what the dataset held at the patch
        if not agreed.options.by_worker and peers is not None and mailbox is not None and peers.read_one_stream:
            self._held = held_by(given.dataset)
            mailbox.post(self._held, "held")
            self.monitor.why_orders_differ = self._why_streams_differ
        if agreed.options.by_worker:
            self.monitor.expect_parts(partial(_why_parts_overlap, type(given.dataset).__name__))
        self.worker: StreamWorker[Any] = StreamWorker(given, agreed, is_compared=self._held is not None)
        self.dataset: ShardedIterable[Any] = ShardedIterable(self.worker)
        self._workers = given.num_workers
        # How many batches each worker may be ahead of the training loop.
        self._ahead = getattr(given.loader, "prefetch_factor", None) or 2
        self._iterated = 0  # the epoch of the latest iterator, drawn from or not

    def stream_length(self, epoch: int) -> int:
        if self.worker.splits_itself:
            raise TypeError("the dataset decides how many items each worker reads")
        return self.worker.stream_length()

    def iterator_context(self, loader: DataLoader[Any]) -> AbstractContextManager[object]:
        """Return what to enter while a loader makes an iterator; its workers are started for the upcoming epoch."""
        self._follow_dataset()
        return super().iterator_context(loader)

    def _follow_dataset(self) -> None:
        """Let an epoch that somebody has set on the dataset be the next one."""
        epoch = self.worker.take_chosen_epoch()
        if epoch is not None and epoch != self.epochs.upcoming:
            self.choose(epoch)

    def indices(self) -> Iterator[None]:
        """Return an index for each item of the upcoming epoch, forever."""
        self.require_no_failure()
        self._follow_dataset()
        self._iterated = self.epochs.upcoming
        return self._indices() if self.batch_plan is None else compress(self._indices(), cycle(self._takes))

    @property
    def indices_per_batch(self) -> int:
        """How many indices make workers give one of this rank's batches, where it is full."""
        return sum(self._takes)

    @property
    def _takes(self) -> Sequence[bool]:
        """Whether to pass on the index of each item of a full batch of one process.

        Only the last ones of a batch, as many as this rank gets, so that taking them counts the whole batch.
        """
        size = self.batching.size
        taken = size if self.batch_plan is None else sum(map(len, self.batch_plan.divide(size)))
        return [False] * (size - taken) + [True] * taken

    def _indices(self) -> Iterator[None]:
        # Ask again: others may have begun an epoch, or set one, since this iterator was made.
        epoch = self._iterated = self.epochs.upcoming
        number = self.epochs.passes + 1
        start = self.position or self._start_of_epoch(epoch)
        source = StreamSource(start, self.worker, number, self._ahead, self.monitor.why_orders_differ)
        current = Pass(start, self, source, source.digest)
        if start.is_within_pass:
            # A loader may have drawn from them since.
            self.sampler_states.restore_generators(start.states.generators)
        self.epochs.begin(epoch)
        self.worker.shared.begin(number, epoch)
        if self.position is None:
            self.worker.forget()
        self._note_begun(current, takes_position=True)
        # Told here too. Where the epoch lies in memory shared with the workers (as in Hugging Face's datasets), theirs
        # then only confirm it: two workers that change it at once could leave it wrong.
        self.worker.tell_epoch(epoch)
        try:
            yield from chain.from_iterable(current.runs())
        finally:
            self.worker.forget(number)

    def _why_streams_differ(self) -> str:
        """Return what may cause that ranks read different streams, and what to do."""
        name, remedy, source = self.worker.name, order_remedy(self.worker.dataset) or SEED, self._source
        seen = ""
        if source is not None and source.digest is not None and source.digest.asked_rank:
            seen = f"{name} asked which rank it is on, while it was read or its worker was prepared. "
        elif self._held_differs:
            seen = f"What {name} holds differs between ranks since it was made. "
        if seen:
            seen += (
                "Set is_ddp_aware = True in its class if it is sharded already, and gives each rank other samples: its "
                "loader is then left as it is. Or let it give every rank everything. If it only shuffles: "
            )
        by_worker = ""
        if source is not None and source.is_in_parts:  # it asks for its worker
            by_worker = "Pass share='by_worker' if each worker shuffles its own. Or: "
        return (
            f"Each rank keeps its shard of what should be one stream of {name}, so samples are lost. {seen}"
            f"{by_worker}{remedy}. {ONE_STREAM} If only augmentation differs, give items a string {SAMPLE_KEY!r}."
        )

    @property
    def _held_differs(self) -> bool:
        """Whether another rank's dataset held something else at the patch."""
        peers, mailbox, held = self.agreed.peers, self.monitor.mailbox, self._held
        if peers is None or mailbox is None or held is None:
            return False
        others = [rank for rank in peers.members if rank != peers.rank]
        return any(left != held.encode() for left in mailbox.read_of(others, "held").values())

    def resume_at(self, position: Position, *, counts_rest: bool) -> None:
        """Make the next pass resume at a position; see the attribute ``counts_rest``."""
        super().resume_at(position, counts_rest=counts_rest)
        self.worker.resume(self.epochs.passes + 1, position, counts_rest=counts_rest)

    def choose(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be drawn."""
        super().choose(epoch)
        if self.position is None:
            self.worker.forget()

    def require_fits(self, position: Position) -> None:
        """Raise StateError if the state counts the items of other workers."""
        parts = len(position.parts)
        if parts not in {1, self.worker.shared.readers} and not self.worker.splits_itself:
            raise StateError(
                f"{self.worker.name} cannot resume from the state, which counts the items of {parts} workers that "
                f"each read a part: this loader has num_workers={self._workers}. Use num_workers={parts}; the "
                "number of ranks may change."
            )

    @property
    def _source(self) -> StreamSource | None:
        return None if self.latest is None else cast(StreamSource, self.latest.source)

    def snapshot(self) -> States:
        """Return what the dataset holds now: its generators, and its own states where the next epoch begins."""
        return replace(super().snapshot(), streams=self.worker.snapshots_between())

    def _start_of_epoch(self, epoch: int) -> Position:
        return Position(epoch, states=self.snapshot())

    def position_now(self) -> Position:
        """Return where the pass began: other packages' loaders find the position in an epoch by reading it again."""
        if self.position is not None:
            return self.position
        current, source = self.latest, self._source
        if current is None or source is None or current.epoch != self._iterated:
            return self._start_of_epoch(self._iterated)
        if not self._workers and self._is_done_without_workers(current):
            return self._start_of_epoch(current.epoch + 1)
        return source.position_at_start(current.position(current.skip))

    def _is_done_without_workers(self, current: Pass[None]) -> bool:
        """Return whether a loader without workers has found the end of a pass: it asked for more than there is."""
        if self.worker.loaded_end is not None and self.worker.loaded_end.epoch == current.epoch:
            return current.items_taken > current.skip
        end, count = current.schedule(self.batching).count, self.batching.count
        return end is not None and count(current.items_taken - current.skip) + count(current.resumed_elsewhere) > end
