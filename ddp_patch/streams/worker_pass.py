"""A worker's pass over its part of a stream: how it reads the dataset, what it gives, and what travels with batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain, islice, repeat
from time import perf_counter
from typing import Any, Generic, TypeVar, cast

from ddp_patch.compat.private_packages import forget_loaded_state
from ddp_patch.compat.private_torch import rank_noted, worker_info_told
from ddp_patch.errors import StateError, UnsupportedLoaderError
from ddp_patch.loaders.recognition import may_ask_rank
from ddp_patch.orders.chunks import Drawn, split_chunks
from ddp_patch.orders.digest import number_of, number_or_zero
from ddp_patch.orders.random_states import PrivateRNG, generator_states, is_stateful
from ddp_patch.positions_and_padding import Plan, require_steps
from ddp_patch.sharding.balancing import part_of_batch
from ddp_patch.sharding.saved_state import RECOGNISED_BY, NotedBatch, Position, StreamSnapshot, StreamStart
from ddp_patch.sharding.state_text import from_text
from ddp_patch.streams.dataset import StreamWorker, begun_anew, begun_at, is_again, tell_epoch, this_worker
from ddp_patch.streams.reports import BEGUN, ENDED, PARTS, STREAM, ItemNames, marked
from ddp_patch.validation import counted

__all__ = ["WorkerPass"]

T = TypeVar("T")

_NOTHING: Any = object()


class WorkerPass(AbstractContextManager[None], Generic[T]):
    """One worker's pass over an epoch, or over what is left of one. It reads.

    It is entered while the dataset is read, once for each batch: the dataset then draws from the epoch's random states,
    and sees the worker info of the unpatched loader.

    Args:
        worker: What its process knows of the stream.
    """

    def __init__(self, worker: StreamWorker[T]) -> None:
        self._worker = worker
        self._number, self._epoch, position = worker.begin()
        self._worker_index, self._workers = this_worker()
        self._part = worker.part_of(position)
        # How many items of its part were taken before the pass; what is known of the stream there; and whether a state
        # counts one stream or parts.
        self._taken = 0
        self._known = StreamSnapshot()
        self._counts: int | None = None
        if position is not None:
            self._resume(position)
        self._report = worker.shared.report(self._number, self._worker_index)
        is_first = not self._taken and not self._known.initial_state
        if is_first and (state := worker.unread()) is not None:
            worker.shared.keep_state(self._report, self._worker_index, BEGUN, state)
            self._known = replace(self._known, initial_state=(from_text(state.decode()),))
        worker.is_underway = True
        self._told = worker.told(self._part)  # asked here: what is asked while the dataset is read counts as its own
        self._info = worker.info(self._part, self._epoch)
        self._telling = worker_info_told(self._info)
        self._states = PrivateRNG(worker.seed.value, self._epoch, name=worker.name)
        self._has_own_states = False  # not those that all workers begin with
        self._spent_s = 0.0  # in the dataset
        self._is_at_end = False  # the dataset has no more items
        self._place = 0  # how many items of the rank's share this worker has gone through
        self._reads_part = False  # and not the one stream that all workers read
        self._is_drawn = False  # the stream may have been read before
        # Whether the dataset's own state is its position, and the states of its generators when the pass began.
        self._has_state = worker.takes_states
        self._generators = generator_states([worker.dataset]) if worker.takes_states else ()

    def _resume(self, position: Position) -> None:
        """Begin where a state was taken."""
        if self._worker.splits_itself:
            self._taken = self._worker.batches_done(position)[self._part] * self._worker.batching.size
            return
        parts, snapshots = position.taken or (0,), position.states.streams
        self._taken = parts[self._part % len(parts)]
        self._counts = PARTS if len(parts) > 1 else None if position.is_at_epoch_start else STREAM
        self._known = snapshots[self._part % len(snapshots)] if snapshots else StreamSnapshot()

    def __enter__(self) -> None:
        self._telling.__enter__()  # first: a torch without that raises
        self._states.__enter__()
        self._began_s = perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._spent_s += perf_counter() - self._began_s
        self._states.__exit__(None, None, None)
        self._telling.__exit__()

    # ---- what it gives ----

    def items(self) -> Iterator[T]:
        """Tell the dataset its epoch, and yield this rank's items of the stream, or of this worker's part of it."""
        worker = self._worker
        plan = Plan(0, 1) if worker.splits_itself else worker.plan  # a part is of one rank
        with worker_info_told(self._info):
            # Told after the generators' states were put back, because it may seed them.
            tell_epoch(worker.dataset, self._epoch)
        first = self._first_items()
        if first is None:
            read = self._from_beginning()
            if worker.is_compared and self._report["marks"] < 0:  # else another iterator reads the same
                read = marked(read, self._report)
            stream = self._detecting_split(read)
        else:
            if self._counts == PARTS:
                self._use_own_states()  # the first item, after which all workers do, was read before
            read = self._read(partial(begun_at, worker.dataset, *self._known.state))
            stream = self._detecting_split(self._followed(read))
        # Whole batches: none can come without, and states are taken between two.
        rounds = chain([1, worker.batching.size - 1 or 1], repeat(worker.batching.size))
        # These are samples, not indices.
        drawn = Drawn(stream, lambda: self, plan, taken=self._taken, first=first, rounds=rounds, copies=False)
        mine = self._of_worker(chain.from_iterable(split_chunks(plan, drawn, self._note_end)))
        yield from mine if worker.batch_plan is None else _divided(mine, worker, worker.batch_plan)
        worker.is_underway = False
        if (state := worker.unread()) is not None:
            worker.shared.keep_state(self._report, self._worker_index, ENDED, state)

    def _note_end(self, drawn: int) -> None:
        """Report where the stream ended; refuse an end that contradicts the other workers' or a state.

        Args:
            drawn: How many items the stream, or this worker's part of it, has.

        Raises:
            UnsupportedLoaderError: Workers read other streams.
            StateError: More was done than there is.
            NoStepsError: A rank would make no step in the epoch.
        """
        worker, plan = self._worker, self._worker.plan
        if worker.splits_itself:
            self._note_batches(drawn)
            return
        self._report["spent_ms"] = round(1000 * self._spent_s)
        self._report["length"] = drawn
        lengths = worker.shared.lengths(self._number)  # of all workers
        if worker.shared.ways(self._number) == {STREAM}:
            lengths = list({length for length in lengths if length is not None})
            if len(lengths) > 1:
                raise self._odd_split(
                    f"it never called get_worker_info(), but gave {' and '.join(map(str, lengths))} items in two"
                )
        if not self._taken and None not in lengths:
            require_steps(plan, worker.batching, worker.name, cast("list[int]", lengths))
        if self._taken > drawn:
            raise StateError(
                f"{worker.name} cannot resume from the state: {counted(self._taken, 'item')} of the stream were taken "
                f"in it, and the stream ended after {counted(drawn, 'item')}. Restore it with the dataset that it was "
                "taken of; one that is its own iterator must be rebuilt."
            )

    def _note_batches(self, drawn: int) -> None:
        """Report how many batches this one of all ranks' workers makes; refuse an end before what was done."""
        worker, batching, taken = self._worker, self._worker.batching, self._taken
        if drawn < taken if batching.drop_last else drawn <= taken - batching.size:
            raise StateError(
                f"{worker.name} cannot resume from the state: worker {self._part} of {self._workers} had only "
                f"{counted(drawn, 'item')} before its end, so the workers no longer took turns, and nobody knows which "
                "batches were done. Begin the epoch again, or leave share out."
            )
        self._report["batches"] = batching.count(max(0, drawn - taken))

    def _of_worker(self, of_rank: Iterator[T]) -> Iterator[T]:
        """Yield those of the rank's items that this worker gives."""
        worker, size = self._worker, self._worker.batching.size
        for item in of_rank:
            # Readers of one stream take turns.
            is_mine = (
                self._reads_part or worker.splits_itself or self._place // size % self._workers == self._worker_index
            )
            self._place += 1
            if is_mine:
                worker.giving = self
                yield item

    def note(self) -> NotedBatch | None:
        """Return what travels with the batch of which the last item was just given, if anything does."""
        batches, over = divmod(self._place, self._worker.batching.size)
        state = None if over or self._worker.splits_itself else self._snapshot()
        return None if state is None else NotedBatch(self._worker_index, batches, state)

    def _detecting_split(self, read: Iterator[T]) -> Iterator[T]:
        """Yield what is read. The first item shows whether the dataset asks which worker it is in.

        Up to then all workers draw from the same random states, so that a dataset may shuffle its files and then take
        its own. After it, one that asked draws from states of its worker's own, as in torch.
        """
        worker, readers = self._worker, self._told[1]
        first = next(read, _NOTHING)
        asked = self._reads_part = readers > 1 and worker.has_asked
        if asked:
            self._report["part"] = self._part
            self._use_own_states()
        self._report["way"] = asked
        if worker.splits_itself and worker.plan.num_replicas > 1:
            self._require_split_by_worker(asked=asked and worker.may_split)
        if not worker.splits_itself and worker.shared.readers > 1:
            self._require_one_way()
        if first is _NOTHING:
            return
        yield first
        if asked or readers == 1:
            yield from read
            return
        for item in read:
            if worker.has_asked:
                raise self._odd_split(
                    "it asked get_worker_info() which worker it is in only after its first items, so these came from "
                    "every worker and later ones from one"
                )
            yield item

    def _use_own_states(self) -> None:
        if not self._has_own_states:
            self._has_own_states = True
            self._states.switch_to_worker(self._told[0])

    def _odd_split(self, what: str) -> UnsupportedLoaderError:
        return UnsupportedLoaderError(
            f"{self._worker.name} cannot be sharded with {self._workers} workers: {what}. Call get_worker_info() first "
            "in __iter__, in every worker, and split the items by it; or use num_workers=0."
        )

    def _require_split_by_worker(self, *, asked: bool) -> None:
        """Refuse a dataset that is to split itself over all ranks' workers, and does not, or not by its worker alone.

        One whose class says ``is_ddp_aware = False`` may ask for its rank, as for a log.
        """
        name = self._worker.name
        if self._worker.has_asked_rank and not may_ask_rank(self._worker.dataset):
            raise UnsupportedLoaderError(
                f"{name} cannot be read with share='by_worker': it asked for its rank by its first item, so it is "
                "sharded already, and sharding it by workers again would lose samples. Let it split itself by "
                "get_worker_info() alone, which counts the workers of all ranks. If it asks for another reason, such "
                "as a log, say is_ddp_aware = False in its class; if it should go on to shard itself, say True: its "
                "loader is left as it is."
            )
        if not asked:
            raise UnsupportedLoaderError(
                f"{name} cannot be read with share='by_worker': it gave its first item, and had not asked "
                "get_worker_info() which worker it is in (id or num_workers), so each rank would read all of it. "
                "Leave share out: then each rank keeps its share of the stream."
            )

    def _require_one_way(self) -> None:
        """Refuse a dataset that is neither one stream nor split into parts, and a state that counts the other."""
        name, readers, ways = self._worker.name, self._workers, self._worker.shared.ways(self._number)
        if len(ways) > 1:
            raise self._odd_split("it called get_worker_info() in some of them and not in others")
        if self._counts is not None and {self._counts} != ways:
            counts = {STREAM: "one stream, as 0 or 1 workers read it", PARTS: f"the parts of {readers} workers"}
            raise StateError(
                f"{name} cannot resume from the state, which counts items of {counts[self._counts]}: with "
                f"num_workers={readers} it is read as {counts[next(iter(ways))]}. Use the num_workers that the "
                "state was taken with."
            )

    def _first_items(self) -> list[T] | None:
        """Return the first items, if those that were taken need not be read again because the dataset has a state.

        Padding repeats the stream's first items, so these are read where there may be padding.
        """
        plan = self._worker.plan
        repeats = plan.num_replicas - 1 if plan.uneven == "pad" and self._taken else 0
        if not (self._has_state and self._known.state):
            return None
        first = list[T]()
        if repeats:
            known = self._known.first
            with self:
                first = list(islice(self._from_beginning(), max(repeats, 0 if known is None else known.seen)))
            if len(first) < repeats:
                raise self._other_stream()
            self._states = PrivateRNG(self._worker.seed.value, self._epoch, name=self._worker.name)
        return first

    # ---- how it reads the dataset ----

    def _from_beginning(self) -> Iterator[T]:
        """Yield all items; refuse a stream that begins with others than when the state was taken.

        Raises:
            StateError: It does.
        """
        seen: list[tuple[bytes | None, int]] = []
        names = ItemNames(may_move=True)
        known = self._known.first
        items = self._read(self._begun_anew)
        for item in items:
            seen.append((names.name_of(item), number_or_zero(item)))
            first = _start_of(seen)
            self._report["starts"][first.seen - 1] = [-1 if part is None else part for part in first[1:]]
            self._report["seen"] = first.seen
            if known is not None and known.seen == first.seen and not known.is_again(first, self._is_drawn):
                raise self._other_stream()
            yield item
            if len(seen) == RECOGNISED_BY:
                break
        yield from self._followed(items)

    def _begun_anew(self) -> Iterator[T]:
        """Begin the dataset; take no states of it if its iterator has one, which is the position then."""
        dataset: Any = self._worker.dataset
        iterator, items = begun_anew(dataset, self._known.initial_state, self._epoch)
        self._is_drawn = iterator is dataset or is_again(dataset, iterator)
        if iterator is not dataset and is_stateful(iterator):
            self._has_state = False
        return items

    def _read(self, begin: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Yield the items of what ``begin()`` begins, by ``next()`` alone; note who asks for the rank by the first."""
        with rank_noted(self._worker.note_rank):
            iterator = begin()
            item = next(iterator, _NOTHING)
        while item is not _NOTHING:
            yield item
            item = next(iterator, _NOTHING)

    def _followed(self, items: Iterator[T]) -> Iterator[T]:
        """Yield what is not read from the beginning, or no longer."""
        for item in items:
            forget_loaded_state(self._worker.dataset)
            yield item
            break
        yield from items
        self._is_at_end = True

    def _other_stream(self) -> StateError:
        first = self._known.first
        return StateError(
            f"{self._worker.name} cannot resume from the state: its first {first.seen if first else 0} items differ "
            "from those when the state was taken, so the finished ones cannot be skipped. Restore the state with the "
            "same samples in the same order; rebuild a dataset that is its own iterator."
        )

    def _snapshot(self) -> bytes | None:
        """Return the dataset's own state, as text; None if that does not contain the stream's position.

        A dataset that drew from random states may have to draw the same again when it begins, or to continue with what
        comes next: its own state does not say which, so its stream is read again. At the end many start again.
        """
        worker = self._worker
        if not self._has_state or self._is_at_end or not self._states.drew_nothing:
            return None
        asked = worker.has_asked  # what it asks for its state does not count
        with worker_info_told(self._info):
            if generator_states([worker.dataset]) != self._generators:
                return None
            state = worker.written_state()
        worker.has_asked = asked
        self._has_state = state is not None
        return state


def _start_of(seen: Sequence[tuple[bytes | None, int]]) -> StreamStart:
    """Return how a stream begins, by the names and hashes of its first items."""
    names, hashes = zip(*seen, strict=True)
    value = None if None in names else number_of(names)
    return StreamStart(len(seen), value, number_of(hashes) if len(set(hashes)) >= min(2, len(seen)) else None)


def _divided(items: Iterator[T], worker: StreamWorker[T], batch_plan: Plan) -> Iterator[T]:
    """Yield a rank's samples of each batch that is made of some items."""
    batching = worker.batching
    while batch := list(islice(items, batching.size)):
        if len(batch) == batching.size or not batching.drop_last:
            yield from part_of_batch(batch, batch_plan, worker.name)
