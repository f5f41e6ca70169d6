"""A rank's share of a stream: which part each reader reads and where, and what the dataset is told there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from ddp_patch.compat.private_torch import WorkerInfo, noted_worker_info
from ddp_patch.orders.random_states import Seed, reader_seed
from ddp_patch.positions_and_padding import Batching, Plan, turn_after
from ddp_patch.sharding.saved_state import Position, StreamSnapshot
from ddp_patch.streams.reports import PARTS, STREAM


def this_worker() -> tuple[int, int]:
    """Return the number of this worker, and of all workers; the main process is the only one of its rank."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


class PartStart(NamedTuple):
    """Where a reader's pass begins.

    Attributes:
        part: Which part the reader reads.
        taken: How many items of the part, or of the one stream, all ranks had taken.
        way: Whether these were items of one STREAM, or of PARTS; None if both are possible.
        known: What is known of the stream there.
    """

    part: int
    taken: int = 0
    way: int | None = None
    known: StreamSnapshot = StreamSnapshot()


@dataclass(frozen=True, slots=True)
class StreamShare:
    """This rank's share of an iterable dataset's stream, which its readers give. It is the same in all processes.

    Attributes:
        plan: The rank's share.
        batch_plan: The rank's share of each batch, where batches are divided; the plan then takes all of the stream.
        batching: How readers make batches.
        seed: The seed in force.
        readers: How many processes of this rank read the dataset.
        splits_itself: Whether the dataset splits itself over all ranks' readers; else each rank keeps its share of what
            the dataset gives.
        takes_states: Whether the dataset's own state is a position in the stream.
        is_compared: Whether the ranks compare what is read.
    """

    plan: Plan
    batch_plan: Plan | None
    batching: Batching
    seed: Seed
    readers: int
    splits_itself: bool = False
    takes_states: bool = False
    is_compared: bool = False

    def worker_of(self, part: int) -> tuple[int, int]:
        """Return the number that the worker info shows to the reader of a part, and the number of all workers.

        Examples:
            >>> seed, batching = Seed(0, is_chosen=True), Batching(4, drop_last=False)
            >>> [StreamShare(Plan(1, 2), None, batching, seed, 3, splits).worker_of(2) for splits in (False, True)]
            [(2, 3), (5, 6)]
        """
        if self.splits_itself:
            return part + self.plan.rank * self.readers, self.readers * self.plan.num_replicas
        return part, self.readers

    def worker_info(
        self, part: int, epoch: int, dataset: Any, note: Callable[[str], object] = lambda _: None
    ) -> WorkerInfo | None:
        """Return the worker info that the dataset sees as the reader of a part; None in the main process.

        Args:
            part: Which part.
            epoch: The epoch.
            dataset: The dataset.
            note: Called with the name of each attribute that is read.
        """
        worker, workers = self.worker_of(part)
        if get_worker_info() is None and workers == 1:
            return None
        return noted_worker_info(worker, workers, reader_seed(self.seed.value, epoch) + worker, dataset, note)

    def start(self, position: Position | None, reader: int) -> PartStart:
        """Return where a reader begins at a position; if there is none, at the beginning of its part.

        The first reader goes on with the part whose turn is next, the second one with the part after that.
        """
        if position is None:
            return PartStart(reader)
        if self.splits_itself:
            before = self._batches_before(position)
            part = (reader + turn_after(before)) % self.readers
            return PartStart(part, before[part] * self.batching.size)
        part = (reader + (position.turn or 0)) % self.readers
        taken, known = position.taken or (0,), position.states.streams or (StreamSnapshot(),)
        way = PARTS if len(taken) > 1 else None if position.is_at_epoch_start else STREAM
        return PartStart(part, taken[part % len(taken)], way, known[part % len(known)])

    def _batches_before(self, position: Position) -> Sequence[int]:
        """Return how many batches each of this rank's readers has made, if the dataset splits itself."""
        readers, size = self.readers, self.batching.size
        if len(position.taken) <= 1:  # in an explicit world ranks cannot report which readers have ended
            whole, more = divmod(sum(position.taken) // self.plan.num_replicas // size, readers)
            return [whole + (reader < more) for reader in range(readers)]
        return [taken // size for taken in position.taken[self.plan.rank * readers :][:readers]]
