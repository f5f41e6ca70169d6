"""The sampler of a sharded stream: None instead of indices, and what came of them."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain, compress, cycle
from time import perf_counter
from typing import Any, cast

from torch.utils.data import DataLoader

from ddp_patch.compat.packages import SAMPLE_KEY, order_remedy
from ddp_patch.errors import StateError, StreamOrderWarning
from ddp_patch.loaders.contents import held_by
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.loaders.samples import DatasetEpoch
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.ranks.mailbox import Mailbox, Peers
from ddp_patch.ranks.remedies import ONE_STREAM, SEED
from ddp_patch.sharding.epoch_sampler import EpochSampler
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.sampler_states import SamplerStates
from ddp_patch.sharding.saved_position import OF_BY_WORKER, Position, States
from ddp_patch.streams.dataset import ShardedIterable
from ddp_patch.streams.reading import can_snapshot
from ddp_patch.streams.shared_state import SharedWorkerState
from ddp_patch.streams.stream_marks import StreamDigest
from ddp_patch.streams.stream_source import StreamSource
from ddp_patch.streams.worker import StreamWorker, generators_only

__all__ = ["StreamSampler", "faster_by_worker"]

logger: logging.Logger = logging.getLogger("ddp_patch")


def faster_by_worker(name: str, ranks: int, items: int, reading: str = "") -> str:
    """Return what there is to say about a dataset that splits itself, and that every rank reads whole."""
    return (
        f"{name}: each of {ranks} ranks read all {items:,} items{reading}. The dataset splits itself over workers, so "
        "patch_dataloader_to_ddp(loader, share='by_worker') reads each item once. It costs: a saved state is then "
        "restored on as many ranks and workers only, and every pass needs all ranks."
    )


class _Held:
    """What the ranks' datasets held at the patch.

    Args:
        peers: Who they are.
        mailbox: Where they leave it.
        held: A fingerprint of what this rank's does.
    """

    def __init__(self, peers: Peers, mailbox: Mailbox, held: str) -> None:
        self._mailbox, self._held = mailbox, held
        self._others = [rank for rank in peers.members if rank != peers.rank]
        self._mailbox.post(held, "held")

    @property
    def differs(self) -> bool:
        """Whether another rank's differs."""
        return any(left != self._held.encode() for left in self._mailbox.read_of(self._others, "held").values())


def why_parts_overlap(name: str) -> str:
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
        ahead: How many batches each worker may be ahead of the training loop.

    Attributes:
        worker: What reads the stream; the loader's workers have copies of it.
        dataset: The sharded dataset.
    """

    _unit: str = "items of a stream"

    def __init__(self, given: LoaderFacts[Any], agreed: Agreed, ahead: int) -> None:
        facts: dict[str, object] = {
            **{name: given.described[name] for name in ("dataset", "dataset length")},
            "split": "by_worker" if agreed.options.by_worker else "exact",
        }
        if agreed.options.by_worker:
            # What each worker reads follows from these, so there is no one stream of which others could take a rest.
            numbers = agreed.world.num_replicas, given.num_workers, given.batch_size or 1
            facts |= dict(zip(OF_BY_WORKER, numbers, strict=True))
        super().__init__(agreed, SamplerStates([generators_only(given.dataset)], is_private=False), facts)
        is_kept = not given.num_workers or getattr(given.loader, "persistent_workers", False)
        takes_states = can_snapshot(given.dataset, agreed.options)
        keeps_states = is_kept and given.num_workers > 0 and takes_states
        peers, mailbox, self._held = agreed.peers, self.monitor.mailbox, None
        if not agreed.options.by_worker and peers is not None and mailbox is not None and peers.read_one_stream:
            self._held = _Held(peers, mailbox, held_by(given.dataset))
            self.monitor.why_orders_differ = self._why_streams_differ
        if agreed.options.by_worker:
            self.monitor.expect_parts(partial(why_parts_overlap, type(given.dataset).__name__))
        self.worker: StreamWorker[Any] = StreamWorker(
            given.dataset,
            self.plan,
            agreed.seed,
            given.batching,
            SharedWorkerState(max(1, given.num_workers), keeps_states=keeps_states),
            batch_plan=agreed.batch_plan,
            splits_itself=agreed.options.by_worker,
            takes_states=takes_states,
            is_compared=self._held is not None,
            is_kept=is_kept,
        )
        self.dataset: ShardedIterable[Any] = ShardedIterable(self.worker)
        self._workers, self._batching, self._ahead = given.num_workers, given.batching, ahead
        self._dataset_epoch = DatasetEpoch(given.dataset)
        self._has_advised = self._batch_plan is not None  # which by_worker cannot do
        self._has_warned = False
        self._iterated = 0  # the epoch of the latest iterator, drawn from or not

    def _stream_length(self, epoch: int) -> int:
        if self.worker.splits_itself:
            raise TypeError("the dataset decides how many items each worker reads")
        return self.worker.stream_length()

    def collate_with_notes(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a ``collate_fn`` with whose batches travels what their workers note; see ``EpochSampler``."""
        return self.dataset.collate_with_notes(collate_fn)

    def iterator_context(self, loader: DataLoader[Any]) -> AbstractContextManager[object]:
        """Return what to enter while a loader makes an iterator; its workers are started for the upcoming epoch."""
        self._follow_dataset()
        return super().iterator_context(loader)

    def _follow_dataset(self) -> None:
        """Let an epoch that somebody has set on the dataset be the next one."""
        chosen = self.dataset.take_chosen_epoch()
        epoch = self._dataset_epoch.set_by_user() if chosen is None else chosen
        if epoch is not None and epoch != self.epochs.upcoming:
            self.set_epoch(epoch)

    def __iter__(self) -> Iterator[None]:
        self._require_no_failure()
        self._follow_dataset()
        self._iterated = self.epochs.upcoming
        return self._indices() if self._batch_plan is None else compress(self._indices(), cycle(self._takes))

    @property
    def indices_per_batch(self) -> int:
        """How many indices make workers give one of this rank's batches, where it is full."""
        return sum(self._takes)

    @property
    def _takes(self) -> Sequence[bool]:
        """Whether to pass on the index of each item of a full batch of one process.

        Only the last ones of a batch, as many as this rank gets, so that taking them counts the whole batch.
        """
        size = self._batching.size
        taken = size if self._batch_plan is None else sum(map(len, self._batch_plan.divide(size)))
        return [False] * (size - taken) + [True] * taken

    def _indices(self) -> Iterator[None]:
        # Ask again: others may have begun an epoch, or set one, since this iterator was made.
        epoch = self._iterated = self.epochs.upcoming
        number = self.epochs.passes + 1
        start = self.position or self._start_of_epoch(epoch)
        source = StreamSource(
            start,
            self.worker,
            number,
            self._ahead,
            why_orders_differ=self.monitor.why_orders_differ,
            on_loop_end=partial(self._finish, start, number, perf_counter()),
            on_first_batch=self._say_if_unnamed,
        )
        current = Pass(start, self._pass_context(), source, source.digest)
        if start.is_within_pass:
            # A loader may have drawn from them since.
            self._sampler_states.restore_generators(start.states.generators)
        self.epochs.begin(epoch)
        self.worker.shared.begin(number, epoch)
        if self.position is None:
            self.worker.forget()
        self._note_begun(current, takes_position=True)
        # Told here too. Where the epoch lies in memory shared with the workers (as in Hugging Face's datasets), theirs
        # then only confirm it: two workers that change it at once could leave it wrong.
        self._dataset_epoch.tell(epoch)
        try:
            yield from chain.from_iterable(current.runs())
        finally:
            self.worker.forget(number)

    def _say_if_unnamed(self, digest: StreamDigest) -> None:
        """Say once, on one rank, that the ranks cannot compare the items that were read.

        Warns:
            StreamOrderWarning: None of them has a name.
        """
        if self._has_warned or self.rank or not digest.is_unnamed:
            return
        self._has_warned = True
        warnings.warn(
            f"The ranks cannot compare in which order they read {self.worker.name}: its items have no string and no "
            "whole number that names them, and tensors and floats may be augmented. If each rank reads its own order, "
            f"samples are lost. {order_remedy(self.worker.dataset) or SEED}. To let the ranks compare, give each item "
            "a string or a whole number that names it. If they read one order, ignore this StreamOrderWarning.",
            StreamOrderWarning,
            stacklevel=2,
        )

    def _why_streams_differ(self) -> str:
        """Return what may cause that ranks read different streams, and what to do."""
        name, remedy, source = self.worker.name, order_remedy(self.worker.dataset) or SEED, self._source
        seen = ""
        if source is not None and source.digest is not None and source.digest.asked_rank:
            seen = f"{name} asked which rank it is on, while it was read or its worker was prepared. "
        elif self._held is not None and self._held.differs:
            seen = f"What {name} holds differs between ranks since it was made. "
        if seen:
            seen += (
                "Set is_ddp_aware = True in its class if it is sharded already, and gives each rank other samples: its "
                "loader is then left as it is. Or let it give every rank everything. If it only shuffles: "
            )
        by_worker = ""
        if source is not None and source.is_in_parts:  # it asks for its worker
            by_worker = "Pass share='by_worker', if each worker shuffles what it takes by get_worker_info(). Or: "
        return (
            f"Each rank keeps its shard of what should be one stream of {name}, so samples would be lost. {seen}"
            f"{by_worker}{remedy}. {ONE_STREAM} If only augmentation differs, seed it alike, or give items a string "
            f"that names them, with the key {SAMPLE_KEY!r}."
        )

    def _finish(self, start: Position, number: int, began_s: float) -> None:
        """Say once what would be faster."""
        if not self._has_advised and self.rank == 0 and start.is_at_epoch_start:
            self._has_advised = True
            self._advise(number, perf_counter() - began_s)

    def _advise(self, number: int, took_s: float) -> None:
        """Say what would be faster than a pass that took so long: as a warning, if it was reading for most of it."""
        shared, lengths = self.worker.shared, self.worker.shared.lengths(number)
        if self.worker.splits_itself or self.num_replicas == 1 or not shared.is_in_parts(number) or None in lengths:
            return
        spent_s, level, reading = shared.most_spent_s(number), logging.INFO, ""
        if spent_s > took_s / 2:
            level, reading = logging.WARNING, f", and waited for them for {spent_s:.1f} of {took_s:.1f} s"
        logger.log(level, faster_by_worker(self.worker.name, self.num_replicas, sum(filter(None, lengths)), reading))

    def __len__(self) -> int:
        raise TypeError(f"object of type {type(self).__name__!r} has no len()")  # as torch's endless sampler has none

    def resume_at(self, position: Position, *, counts_rest: bool) -> None:
        """Make the next pass resume at a position; see the attribute ``counts_rest``."""
        super().resume_at(position, counts_rest=counts_rest)
        self.worker.resume(self.epochs.passes + 1, position, counts_rest=counts_rest)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be drawn; see ``EpochSampler``."""
        super().set_epoch(epoch)
        if self.position is None:
            self.worker.forget()

    def read(self, state: Any) -> Position:
        """Return the position that a state describes; raise StateError unless this loader has it."""
        position = super().read(state)
        parts = len(position.parts)
        if parts not in {1, self.worker.shared.readers} and not self.worker.splits_itself:
            raise StateError(
                f"{self.worker.name} cannot resume from the state, which counts the items of {parts} workers that "
                f"each read a part: this loader has num_workers={self._workers}. Use num_workers={parts}; the "
                "number of ranks may change."
            )
        return position

    @property
    def _source(self) -> StreamSource | None:
        return None if self.latest is None else cast(StreamSource, self.latest.source)

    def sampler_snapshot(self) -> States:
        """Return what the dataset holds now: its generators, and its own states where the next epoch begins."""
        return replace(super().sampler_snapshot(), streams=self.worker.snapshots_between())

    def _start_of_epoch(self, epoch: int) -> Position:
        return Position(epoch, states=self.sampler_snapshot())

    def _position_now(self) -> Position:
        # Other packages' loaders find the position in an epoch by reading it again.
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
        end, count = current.schedule(self._batching).count, self._batching.count
        return end is not None and count(current.items_taken - current.skip) + count(current.resumed_elsewhere) > end
