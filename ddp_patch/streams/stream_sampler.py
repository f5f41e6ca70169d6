"""The sampler of a sharded stream: None instead of indices, and what came of them."""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain, compress, cycle
from time import perf_counter
from typing import Any
from weakref import ref

from torch.utils.data import DataLoader

from ddp_patch.compat.packages import SAMPLE_KEY, order_remedy
from ddp_patch.errors import RankMismatchError, StateError, StreamOrderWarning
from ddp_patch.loaders.contents import held_by
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.loaders.samples import DatasetEpoch
from ddp_patch.orders.digest import END, Mark
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.mailbox import Mailbox, Peers
from ddp_patch.ranks.remedies import ONE_STREAM, SEED
from ddp_patch.sharding.epoch_sampler import EpochSampler
from ddp_patch.sharding.sampler_states import SamplerStates
from ddp_patch.sharding.saved_position import Position
from ddp_patch.streams.dataset import ShardedIterable, StreamWorker, generators_only
from ddp_patch.streams.reading import can_snapshot
from ddp_patch.streams.shared_state import SharedWorkerState
from ddp_patch.streams.stream_marks import StreamDigest, StreamMarks
from ddp_patch.streams.stream_pass import StreamPass

__all__ = ["StreamSampler", "faster_by_worker"]

logger: logging.Logger = logging.getLogger("ddp_patch")


def faster_by_worker(name: str, ranks: int, items: int, reading: str = "") -> str:
    """Return what there is to say about a dataset that splits itself, and that every rank reads whole."""
    return (
        f"{name}: each of {ranks} ranks read all {items:,} items{reading}. The dataset splits itself over workers, so "
        "share='by_worker' would read each item once."
    )


class _Comparer:
    """Compares the digests of a rank's latest passes with the other ranks'.

    Args:
        peers: Who they are.
        sampler: The stream's.
    """

    def __init__(self, peers: Peers, sampler: "StreamSampler") -> None:
        self._rank, self._sampler = peers.rank, ref(sampler)
        self._began = f"Iterating the loader that was patched as number {peers.number}"
        self._mailbox: Mailbox[tuple[str, bool, dict[str, Mark]]] = Mailbox(peers, "orders")
        self._digests: dict[str, StreamDigest | Mark] = {}
        self._whole: Counter[str] = Counter()

    def begin(self, digest: StreamDigest, name: str) -> None:
        """Record that a pass begins, and what all ranks call it."""
        for known, before in self._digests.items():
            if known.startswith(f"{name} (") and _latest(before, END):
                self._whole[name] = max(self._whole[name], int(known.removeprefix(f"{name} (")[:-1]) + 1)
        for known, before in list(self._digests.items())[:-1]:
            if isinstance(before, StreamDigest):
                self._digests[known] = before.latest or Mark(0, 0)
        self._digests[f"{name} ({self._whole[name]})"] = digest
        self._digests = dict(list(self._digests.items())[-16:])

    def compare(self, at_end: bool = True) -> None:
        """Leave the latest marks, and compare with what the others have left by now."""
        if (sampler := self._sampler()) is None:
            return
        asked, name = False, sampler.worker.name
        for digest in self._digests.values():
            asked = asked or (isinstance(digest, StreamDigest) and digest.asked_rank)
            if isinstance(digest, StreamDigest) and (found := digest.workers_differ()) is not None:
                raise RankMismatchError(
                    f"{self._began}: worker 0 and worker {found[1]}, both of rank {self._rank}, read the stream of "
                    f"{name} in different orders: they differ within the first {found[0]} items. Samples would be "
                    f"lost. {sampler.why_streams_differ(asked_rank=False, held_differs=False)}"
                )
        mine = {known: mark for known, digest in self._digests.items() if (mark := _latest(digest))}
        left = self._mailbox.post_and_read((sampler.held, asked, mine))
        for rank, (held, has_asked, theirs) in left.items():
            for known, mark in theirs.items():
                value = None if known not in self._digests else _at(self._digests[known], mark[0])
                if value not in {None, mark[1]}:
                    why = sampler.why_streams_differ(asked_rank=asked or has_asked, held_differs=held != sampler.held)
                    where = "before they end" if mark[0] == END else f"within the first {mark[0]} items"
                    raise RankMismatchError(
                        f"{self._began}: rank {self._rank} and {ranks_text([rank])} read different streams of {name}: "
                        f"in {known.rpartition(' (')[0]} they differ {where}. Each rank keeps its shard of what should "
                        f"be one stream, so samples would be lost. {why}"
                    )


def _latest(digest: StreamDigest | Mark, count: int | None = None) -> Mark | None:
    mark = digest.latest if isinstance(digest, StreamDigest) else digest
    return mark if mark is not None and count in {None, mark.count} else None


def _at(digest: StreamDigest | Mark, count: int) -> int | None:
    if isinstance(digest, StreamDigest):
        return digest.at(count)
    return digest.value if digest.count == count else None


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
        held: A fingerprint of what the user's dataset held at the patch.
    """

    latest: StreamPass | None
    position: Position | None

    def __init__(self, given: LoaderFacts[Any], agreed: Agreed, ahead: int) -> None:
        facts: dict[str, object] = {
            **{name: given.described[name] for name in ("dataset", "dataset length")},
            "split": "by_worker" if agreed.options.by_worker else "exact",
        }
        if agreed.options.by_worker:
            # What each worker reads follows from these, so there is no one stream of which others could take a rest.
            facts |= {
                "num_replicas": agreed.world.num_replicas,
                "num_workers": given.num_workers,
                "batch_size": given.batch_size or 1,
            }
        super().__init__(agreed, SamplerStates([generators_only(given.dataset)], is_private=False), facts)
        is_kept = not given.num_workers or getattr(given.loader, "persistent_workers", False)
        keeps_states = is_kept and given.num_workers > 0 and can_snapshot(given.dataset, agreed.options)
        peers, shared = agreed.peers, SharedWorkerState(max(1, given.num_workers), keeps_states=keeps_states)
        marks, self.held = None, ""
        if not agreed.options.by_worker and peers is not None and peers.read_one_stream:
            marks, self.held = StreamMarks(shared), held_by(given.dataset)
        self.worker: StreamWorker[Any] = StreamWorker(
            given.dataset,
            self.plan,
            agreed.options,
            agreed.seed,
            given.batching,
            shared,
            batch_plan=agreed.batch_plan,
            marks=marks,
            is_kept=is_kept,
        )
        self.dataset: ShardedIterable[Any] = ShardedIterable(self.worker)
        self._comparer = None if marks is None or peers is None else _Comparer(peers, self)
        if self._comparer is not None:
            self.monitor.also_compare(self._comparer.compare)
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
        on_loop_end = partial(self._finish, start, number, perf_counter())
        current = StreamPass(
            start,
            self._pass_context(self._batching),
            self.worker,
            number,
            self._ahead,
            on_loop_end,
            self._say_if_unnamed,
        )
        if start.is_within_pass:
            self._sampler_states.restore_generators(
                start.sampler_snapshot.generators
            )  # a loader may have drawn from them since
        # Workers cannot communicate, so what they drew is compared here. A loop that takes len() batches sees no end.
        self._begin(epoch, {"position": current.begins_at}, self.worker.shared.facts(self.epochs.passes))
        self.worker.shared.begin(number, epoch)
        if self.worker.marks is not None:
            self.worker.marks.begin(number)
        if self._comparer is not None and current.digest is not None:
            self._comparer.begin(current.digest, f"epoch {epoch} from {current.begins_at}")
        if self.position is None:
            self.worker.forget()
        self.latest, self.position = current, None
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

    def why_streams_differ(self, *, asked_rank: bool, held_differs: bool) -> str:
        """Return what may cause that ranks read different streams, and what to do.

        Args:
            asked_rank: Whether the dataset of one of them asked which rank it is on.
            held_differs: Whether their datasets held different things at the patch.
        """
        name, remedy = self.worker.name, order_remedy(self.worker.dataset) or SEED
        seen = "asked which rank it is on while it was read or its worker was prepared" if asked_rank else ""
        if held_differs and not asked_rank:
            seen = "holds something else on each rank since it was made"
        by_worker = " Or use share='by_worker', where each worker reads a part of its own."
        is_in_parts = self.latest is not None and self.latest.is_in_parts  # it asks for its worker
        causes = [
            f"{name} {seen}. Set is_ddp_aware = True in its class if it is sharded already, and gives each rank other "
            "samples: its loader is then returned unchanged. Or let it give every rank everything."
            if seen
            else "",
            f"{'If it only shuffles: ' if seen else ''}{remedy}.",
            f"{ONE_STREAM}{by_worker if is_in_parts else ''}",
            "If only augmentation differs, seed it alike, or give items a string that names them: numbers are then not "
            f"compared, and nothing else of a dict with the key {SAMPLE_KEY!r}.",
        ]
        return " ".join(filter(None, causes))

    def _finish(self, start: Position, number: int, began_s: float) -> None:
        """Compare what workers drew, with ``verify=True``; say once what would be faster."""
        if self.plan.uneven != "keep":  # the loops of all ranks see the end at the same step
            self.agreed.verify("Ending an epoch", {"epoch": start.epoch}, self.worker.shared.facts(number))
        if not self._has_advised and self.rank == 0 and start.is_at_epoch_start:
            self._has_advised = True
            if (advice := self._advice(number, perf_counter() - began_s)) is not None:
                logger.info(advice)

    def _advice(self, number: int, took_s: float) -> str | None:
        """Return what would be faster than a pass that took so long; None if nothing is known to be."""
        shared, lengths = self.worker.shared, self.worker.shared.lengths(number)
        if self.worker.splits_itself or self.num_replicas == 1 or not shared.is_in_parts(number) or None in lengths:
            return None
        spent_s = shared.most_spent_s(number)
        reading = f", and waited for them for {spent_s:.1f} of {took_s:.1f} s" if spent_s > took_s / 2 else ""
        return faster_by_worker(self.worker.name, self.num_replicas, sum(filter(None, lengths)), reading)

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
        parts = () if position.parts is None or self.worker.splits_itself else position.parts.consumed
        if parts and len(parts) != self.worker.shared.readers:
            raise StateError(
                f"{self.worker.name} cannot resume from the state, which counts the items of {len(parts)} workers that "
                f"each read a part: this loader has num_workers={self._workers}. Use num_workers={len(parts)}; the "
                "number of ranks may change."
            )
        return position

    def _start_of_epoch(self, epoch: int) -> Position:
        return Position(
            epoch, sampler_snapshot=self.sampler_snapshot(), stream_snapshots=self.worker.snapshots_between()
        )

    def _position_now(self) -> Position:
        # Other packages' loaders find the position in an epoch by reading it again.
        if self.position is not None:
            return self.position
        current = self.latest
        if current is None or current.epoch != self._iterated:
            return self._start_of_epoch(self._iterated)
        if not self._workers and current.is_done_without_workers:
            return self._start_of_epoch(current.epoch + 1)
        return replace(
            current.position(current.skip), parts=current.start.parts, stream_snapshots=current.start.stream_snapshots
        )
