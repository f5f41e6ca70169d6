"""The sampler of a sharded stream: None instead of indices, and what came of them."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain, compress, count, cycle
from time import monotonic, sleep
from typing import Any, cast

from torch.utils.data import DataLoader

from ddp_patch.errors import StateError
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.loaders.samples import DatasetEpoch
from ddp_patch.plan import Batching, Consumed
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.ranks.order_guard import EndGuard, OrderGuard
from ddp_patch.schedule import Part, Schedule
from ddp_patch.sharding.epochs import EpochSampler
from ddp_patch.sharding.held import SamplerStates
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.position import PartsDone, Position, StreamSnapshot, split
from ddp_patch.sharding.sources import Source
from ddp_patch.streams.balanced_parts import Balance
from ddp_patch.streams.dataset import ShardedIterable, random_holder
from ddp_patch.streams.marks import FirstItems, MarksInMemory
from ddp_patch.streams.shared_state import SharedWorkerState

__all__ = ["ReadByWorkers", "StreamSampler", "source_of"]


_INDICES = [None] * 1024


class ReadByWorkers(Source[None]):
    """Gives an index for every item that workers read: None, forever. Workers find the end, if there is one.

    Args:
        shared: Where they write it.
        number: Which pass it is.
        is_counted: Whether ranks take equally much; they do where each reads the whole dataset.
    """

    draws_here: bool = False
    is_counted: bool

    def __init__(self, shared: SharedWorkerState, number: int, is_counted: bool) -> None:
        self._shared, self._number = shared, number
        self.is_counted = is_counted

    def parts(self, skip: int) -> Iterator[list[None]]:
        """Yield indices without end."""
        while True:
            yield _INDICES

    def ends_within(self, items: int) -> bool:
        """Return True: nothing has to be drawn here to know what is left."""
        return True

    def ends_elsewhere(self) -> bool:
        """Return whether a worker has come to the end: from then on more is asked for than there is."""
        return any(length is not None for length in self._shared.lengths(self._number))

    @property
    def is_in_parts(self) -> bool:
        """Whether several workers read a part each; False while that is unknown."""
        return self.is_counted and self._shared.readers > 1 and self._shared.ways(self._number) == {"parts"}

    @property
    def first_part(self) -> int:
        """Whose part the first worker reads."""
        return self._shared.first_role(self._number)

    def lengths_found(self) -> Sequence[int | None]:
        """Return how many items the stream had, or each part of it; None if no worker came to the end."""
        lengths = self._shared.lengths(self._number)
        return lengths if self.is_in_parts else [next((length for length in lengths if length is not None), None)]

    def mark(self, reader: int, batches: int, done: Consumed, before: StreamSnapshot) -> StreamSnapshot:
        """Return what is known of a reader's stream.

        Args:
            reader: Which worker it is.
            batches: How many batches of it were made in this pass.
            done: What was taken of it then.
            before: What was known of it when the pass began.
        """
        if not batches:
            return before
        first = self._shared.first(self._number, reader, sum(ranks * taken for ranks, taken in done))
        return StreamSnapshot(first or before.first, self._shared.snapshot(self._number, reader, batches))

    @property
    def left_out(self) -> int:  # type: ignore[override]  # it follows from what workers wrote
        """How many items were left out because another package's loader resumed within the pass."""
        return self._shared.offset(self._number)


def source_of(current: Pass[Any]) -> ReadByWorkers:
    """Return the source of a pass over an iterable dataset."""
    return cast(ReadByWorkers, current.source)


# How long a state waits for workers to find the end, where the length says that it has come.
_ENDS_S = 10


def _done_of_parts(current: Pass[Any], readers: int) -> Sequence[Consumed]:
    """Return what was taken of each part before a pass."""
    return [()] * readers if current.start.parts is None else current.start.parts.done


class StreamSampler(EpochSampler[None]):
    """The index sampler of a sharded iterable dataset.

    torch puts such a sampler into a loader of an iterable dataset. This one begins the epoch when the loader asks for
    its first batch, and has the ``set_epoch`` that training loops and frameworks call.

    Attributes:
        balance: What the latest pass has given, if ranks send each other batches.
    """

    latest: Pass[None] | None
    position: Position | None
    balance: Balance | None

    def __init__(self, dataset: ShardedIterable[Any], given: LoaderFacts[Any], agreed: Agreed) -> None:
        facts: dict[str, object] = {
            **{name: given.described[name] for name in ("dataset", "dataset length")},
            "iterable_sharding": agreed.options.iterable_sharding,
        }
        if agreed.options.iterable_sharding == "by_worker":
            # What each worker reads follows from these, so there is no one stream of which others could take a rest.
            facts |= {
                "num_replicas": agreed.world.num_replicas,
                "num_workers": given.num_workers,
                "batch_size": given.batch_size or 1,
            }
        super().__init__(agreed, SamplerStates([random_holder(dataset.dataset)], is_private=False), facts)
        self.dataset: ShardedIterable[Any] = dataset
        self._workers, self._batching = given.num_workers, given.batching
        peers = agreed.peers
        if agreed.options.iterable_sharding == "exact" and peers is not None and peers.read_one_stream:
            dataset.first_items = FirstItems(dataset.shared.readers)
            guard = OrderGuard(peers, dataset.dataset, dataset.first_items, self._read_one_stream)
            self.monitor.orders = [guard.compare]
            if not agreed.options.verify:  # which compares all when the next epoch begins, where every rank raises
                dataset.marks = MarksInMemory(dataset.shared.readers)
                self.monitor.orders.append(EndGuard(peers, dataset.dataset, dataset.marks).compare)
        self.balance: Balance | None = None
        self._dataset_epoch = DatasetEpoch(dataset.dataset)
        self._iterated = 0  # the epoch of the latest iterator, drawn from or not

    def _stream_length(self, epoch: int) -> int:
        if self.agreed.options.iterable_sharding == "by_worker":
            raise TypeError("the dataset decides how many items each worker reads")
        return self.dataset.stream_length()

    def _read_one_stream(self, number: int) -> bool:
        """Return whether all workers read the same stream in a pass; False while that is unknown."""
        return self.dataset.shared.ways(number) == {"stream"}

    def beginning(self, loader: DataLoader[Any]) -> AbstractContextManager[object]:
        """Return what to enter while a loader makes an iterator; its workers are started for the upcoming epoch."""
        self._follow_dataset()
        return super().beginning(loader)

    def _follow_dataset(self) -> None:
        """Let an epoch that somebody has set on the dataset be the next one."""
        chosen, self.dataset.chosen_epoch = self.dataset.chosen_epoch, None
        epoch = self._dataset_epoch.set_by_user() if chosen is None else chosen
        if epoch is not None and epoch != self.epochs.upcoming:
            self.set_epoch(epoch)

    def __iter__(self) -> Iterator[None]:
        self._follow_dataset()
        self._iterated = self.epochs.upcoming
        return self._indices() if self._division is None else compress(self._indices(), cycle(self._takes))

    @property
    def indices_per_batch(self) -> int:
        """How many indices make workers give one of this rank's batches, where it is full."""
        return sum(self._takes)

    @property
    def _takes(self) -> Sequence[bool]:
        """Whether to pass on the index of each item of a full batch of one process.

        The last ones, as many as this rank gets: when they are taken, the whole batch is counted.
        """
        size = self._batching.size
        taken = size if self._division is None else sum(map(len, self._division.divide(size)))
        return [False] * (size - taken) + [True] * taken

    def _indices(self) -> Iterator[None]:
        # Ask again: others may have begun an epoch, or set one, since this iterator was made.
        epoch = self._iterated = self.epochs.upcoming
        number = self.epochs.passes + 1
        is_exact = self.agreed.options.iterable_sharding == "exact"
        source = ReadByWorkers(self.dataset.shared, number, is_exact)
        start = self.position or Position(epoch, held=self.held())
        current = Pass(start, self.plan.num_replicas, self._holders, source, self.monitor)
        if start.is_begun:
            self._holders.reinstate_generators(start.held.generators)  # a loader may have drawn from them since
        # Workers cannot communicate. What they drew is compared here, in the main process, when the next pass begins.
        self._begin(epoch, {"position": current.begins_at}, self.dataset.shared.facts(self.epochs.passes))
        self.dataset.shared.begin(number, epoch)
        for noted in (self.dataset.first_items, self.dataset.marks):
            if noted is not None:
                noted.begin(number, f"epoch {epoch} from {current.begins_at}")
        if self.position is None:
            self.dataset.forget()
        self.latest, self.position, self.balance = current, None, None
        # Told here too. Where the epoch lies in memory shared with the workers (as in Hugging Face's datasets), theirs
        # then only confirm it: two workers that change it at once could leave it wrong.
        self._dataset_epoch.tell(epoch)
        try:
            yield from chain.from_iterable(current.runs())
        finally:
            self.dataset.forget(number)

    def __len__(self) -> int:
        raise TypeError(f"object of type {type(self).__name__!r} has no len()")  # as torch's endless sampler has none

    def go_to(self, position: Position, *, tells_rest: bool) -> None:
        """Make the next pass resume at a position; see the attribute ``tells_rest``."""
        super().go_to(position, tells_rest=tells_rest)
        self.dataset.resume(self.epochs.passes + 1, position, tells_rest=tells_rest)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be drawn; see ``EpochSampler``."""
        super().set_epoch(epoch)
        if self.position is None:
            self.dataset.forget()

    def pass_length(self, current: Pass[Any]) -> int | None:
        """Return how many items all ranks share in a pass: as the dataset says, or as was found by its end."""
        told = super().pass_length(current)
        # Before, one rank may know and another not.
        return source_of(current).lengths_found()[0] if told is None and current.is_over else told

    def schedule(self, current: Pass[Any], batching: Batching) -> Schedule:
        """Return the batches of a pass, of one stream or of the parts that workers read; see ``EpochSampler``."""
        source = source_of(current)
        lengths = source.lengths_found()
        if not source.is_in_parts:
            return self._schedule_of(current, batching, [self._part(current, lengths[0])])
        skips = [split(done, self.plan.num_replicas)[1] for done in _done_of_parts(current, len(lengths))]
        parts, first = list(map(Part, skips, lengths, count())), source.first_part
        return self._schedule_of(current, batching, parts[first:] + parts[:first])

    def schedule_of_whole(self, current: Pass[Any], batching: Batching) -> Schedule | None:
        """Return the batches of a pass if this rank's workers have come to its end, otherwise None."""
        schedule = self.schedule(current, batching)
        return None if schedule.count is None else schedule

    def most_batches(self, current: Pass[Any], batching: Batching) -> int | None:
        """Return how many batches the largest share has in a pass, where every rank knows that; otherwise None."""
        if self.balance is not None:
            return self.balance.given if self.balance.is_over else None
        if not source_of(current).is_in_parts:
            return super().most_batches(current, batching)
        return self.schedule(current, batching).most if current.is_over else None

    def most_found(self, current: Pass[Any], batching: Batching, batches: int) -> int | None:
        """Return how many batches the largest share has in a pass, as far as this rank knows; see ``EpochSampler``."""
        most = self.most_batches(current, batching)
        if most is not None or self.balance is not None:
            return most
        by_length = super().most_batches(current, batching)
        may_end = by_length is not None and batches >= by_length
        # Workers read on while the last batches are used, so the end is found in a moment.
        until = monotonic() + (_ENDS_S if may_end else 0)
        while (most := self.schedule(current, batching).most) is None and monotonic() < until:
            sleep(0.005)
        if most is None and may_end:
            raise StateError(
                f"{type(self.dataset.dataset).__name__} may have ended after {batches} batches, but not all of its "
                f"{self.dataset.shared.readers} workers, which read a part each, have reported that within {_ENDS_S} "
                "s. Take the state a step earlier, or after the pass."
            )
        return most

    def position_after(self, current: Pass[Any], batching: Batching, batches: int) -> Position:
        """Return the position after this many batches of a pass."""
        position, source = super().position_after(current, batching, batches), source_of(current)
        if not batches:
            return replace(position, parts=current.start.parts, marks=current.start.marks)
        if not source.is_counted:
            return position if self.balance is None else self._position_of_all(current, position, self.balance, batches)
        self._require_own_pass(source)
        schedule = self.schedule(current, batching)
        readers, marks = self.dataset.shared.readers, current.start.marks or [StreamSnapshot()] * len(schedule.parts)
        if not source.is_in_parts:
            position = current.position(schedule.taken(batches)[0])
            return replace(position, marks=[source.mark((batches - 1) % readers, batches, position.done, marks[0])])
        if not schedule.are_alike(batches):
            raise StateError(
                f"The state of {type(self.dataset.dataset).__name__} cannot be saved after {batches} batches: with "
                "uneven='keep' a worker has come to its end on some ranks and not on others, so the ranks' workers no "
                "longer take the same turns. Use uneven='pad' or 'drop', or take the state earlier, or at the epoch's "
                "end."
            )
        first, taken, made = source.first_part, schedule.taken(batches), schedule.made(batches)
        done, known = [], []
        for role, before in enumerate(_done_of_parts(current, readers)):
            reader = (role - first) % readers
            done.append((*split(before, self.plan.num_replicas)[0], (self.plan.num_replicas, taken[reader])))
            known.append(source.mark(reader, made[reader], done[-1], marks[role]))
        # The worker after the last one: every rank knows that one, and not yet whether it has come to its end.
        upcoming = (first + schedule.record(batches - 1).part + 1) % readers
        return replace(position, parts=PartsDone(upcoming, done), marks=known)

    def given_batches(self, current: Pass[Any], batching: Batching) -> int:
        """Return how many batches a pass has given, counted high; see ``EpochSampler``."""
        return super().given_batches(current, batching) if self.balance is None else self.balance.given

    def _position_of_all(self, current: Pass[Any], position: Position, balance: Balance, batches: int) -> Position:
        """Return the position of all ranks' workers, if ranks send each other batches."""
        size, readers = self._batching.size, self.dataset.shared.readers
        done = [()] * (readers * self.num_replicas) if current.start.parts is None else current.start.parts.done
        before = [sum(items for _, items in of_reader) // size for of_reader in done]
        of_ranks = [before[at : at + readers] for at in range(0, len(before), readers)]
        made = chain.from_iterable(balance.made(batches, of_ranks))
        return replace(position, parts=PartsDone(0, [((1, count * size),) for count in made]))

    def _require_own_pass(self, source: ReadByWorkers) -> None:
        """Refuse to count batches of a pass that another package's loader resumed in the workers."""
        if source.left_out:
            raise StateError(
                f"The state of {type(self.dataset.dataset).__name__} cannot be saved by a number of batches: the "
                "loader's own load_state_dict() resumed within this pass, and its first batches were not counted here. "
                "Use the loader's own state_dict(), or resume by restore_loader()."
            )

    def read(self, state: Any) -> Position:
        """Return the position that a state describes; raise StateError unless this loader has it."""
        position, readers = super().read(state), self.dataset.shared.readers
        if self.agreed.options.iterable_sharding == "by_worker":
            return position
        if position.parts is not None and len(position.parts.done) != readers:
            raise StateError(
                f"{type(self.dataset.dataset).__name__} cannot resume from the state, which counts the items of "
                f"{len(position.parts.done)} workers that each read a part: this loader has num_workers={self._workers}"
                f". Use num_workers={len(position.parts.done)}; the number of ranks may change."
            )
        return position

    def given_after(self, current: Pass[Any], taken: int) -> int:
        """Return 0: what was drawn ahead was drawn in workers."""
        return 0

    def _position_now(self) -> Position:
        # Other packages' loaders find the position in an epoch by reading it again.
        if self.position is not None:
            return self.position
        current = self.latest
        if current is None or current.epoch != self._iterated:
            return Position(self._iterated, held=self.held())
        if self._is_done(current):
            return Position(current.epoch + 1, held=self.held())
        return replace(current.position(current.skip), parts=current.start.parts, marks=current.start.marks)

    def _is_done(self, current: Pass[Any]) -> bool:
        """Return whether a loader without workers has found the end of a pass: it asked for more than there is."""
        if self._workers:
            return False
        if self.dataset.loaded_at_end == current.epoch:
            return current.taken > current.skip
        batching, source = self._batching, source_of(current)
        count = self.schedule(current, batching).count
        asked = batching.count(current.taken - current.skip) + batching.count(source.left_out)
        return count is not None and asked > count
