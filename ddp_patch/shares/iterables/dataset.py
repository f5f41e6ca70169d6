"""One rank's share of an iterable dataset, whose stream is made inside the loader's workers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, repeat
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from torch.utils.data import IterableDataset, get_worker_info

from ddp_patch.compat import WorkerInfo, worker_info_told
from ddp_patch.errors import InvalidOptionError, StateError, UnsupportedLoaderError
from ddp_patch.options import Options
from ddp_patch.plan import Batching, Done, Plan, Rest
from ddp_patch.shares.drawing import require_sure_length, share
from ddp_patch.shares.iterables.board import Board, Ends
from ddp_patch.shares.iterables.first_items import FirstItems
from ddp_patch.shares.iterables.marks import Marker, can_snapshot
from ddp_patch.shares.iterables.reading import Reader, Switching, this_worker
from ddp_patch.shares.iterables.starts import Items, Loaded, Start
from ddp_patch.shares.place import Mark, Place, split
from ddp_patch.shares.steps import require_steps
from ddp_patch.streams.chunks import Chunk, draw
from ddp_patch.streams.fingerprint import Fingerprint
from ddp_patch.streams.generators import generator_states, random_generators, set_generator_states
from ddp_patch.streams.random_states import epoch_states
from ddp_patch.streams.seeding import EpochCounter, Seed, reader_seed

__all__ = ["IterableWorkerInit", "ShardedIterable", "random_holder"]

T = TypeVar("T")


class ShardedIterable(IterableDataset[T]):
    """One rank's share of another iterable dataset's stream.

    ``iterable_sharding="exact"``: worker j of every rank is told what torch tells worker j of the unpatched loader. If
    the dataset asks which worker it is in, worker j reads a part of the stream, and keeps this rank's share of that
    part. If it does not ask, every worker reads the same stream, and worker j of k gives every k-th batch of this
    rank's share, from the j-th on.

    ``iterable_sharding="by_worker"``: the dataset is told that all ranks' workers are workers of one loader, and
    splits itself.

    Args:
        dataset: The dataset that the user gave.
        plan: The rank's share.
        options: What the user chose.
        seed: The seed in force.
        batching: How workers make batches.
        readers: How many workers read it; 1 where the main process does.
        ahead: How many batches each may be ahead of the training loop.

    Attributes:
        dataset: The dataset that the user gave.
        board: What the main process and the workers tell each other.
        ends: How many batches the workers made, with ``iterable_sharding="by_worker"``.
        first_items: Where readers note what they read first, for the ranks to compare; None where nobody does.
    """

    def __init__(
        self,
        dataset: IterableDataset[T],
        plan: Plan,
        options: Options,
        seed: Seed,
        batching: Batching,
        readers: int = 1,
        ahead: int = 2,
    ) -> None:
        self.dataset = dataset
        self._snapshots: bool = can_snapshot(dataset, options)
        self.board: Board = Board(readers, ahead if self._snapshots else None)
        self.ends: Ends = Ends(readers)
        self.first_items: FirstItems | None = None
        self.loaded_at_end: int | None = None  # the epoch of which nothing is left in an iterator that was loaded here
        self._plan = plan
        self._options, self._seed = options, seed
        self._batching = batching
        self._reader = Reader()
        self._first_pass: int | None = None  # that a worker was started for
        self._made_for: int | None = None  # for which worker a worker_init_fn prepared the dataset
        self._resumed: tuple[int, Place] | None = None  # which pass goes on, and from where
        self._tells_rest = True
        self._loads: int = self.board.loads  # how many loaded states this copy knows of

    def __len__(self) -> int:
        before: Done = ()
        skip = 0
        # Persistent workers keep a pass that has come to its end.
        if self._tells_rest and self._resumed is not None and set(self.board.lengths(self._resumed[0])) == {None}:
            before, skip = self._resumed[1].split(self._plan.num_replicas)
        return max(0, len(self._plan.share(len(self._plan.rest(self.stream_length(), before)))) - skip)

    def stream_length(self) -> int:
        """Return the length of the user's dataset; TypeError where it has none."""
        return len(cast(Any, self.dataset))

    def resume(self, number: int, place: Place, *, tells_rest: bool) -> None:
        """Let pass ``number`` begin at a place, in workers that are started from now on.

        Args:
            number: The pass.
            place: Where it begins.
            tells_rest: Whether the length is that of the rest until then, or of the whole epoch.
        """
        self._resumed, self._tells_rest = (number, place), tells_rest
        self._loads = self.board.load()

    def forget(self, number: int | None = None) -> None:
        """Let lengths be told of whole epochs again: if pass ``number`` was resumed, or whichever was."""
        if self._resumed is not None and number in {None, self._resumed[0]}:
            self._resumed = None

    def _start(self, number: int, epoch: int) -> Start:
        """Return where this worker's pass begins."""
        worker, workers = this_worker()
        if self._resumed is None or self._resumed[0] != number:
            return Start(number, epoch, worker if self._made_for is None else self._made_for)
        place = self._resumed[1]
        done, skip = place.split(self._plan.num_replicas)
        if self._options.iterable_sharding == "by_worker":
            # Batches go on with the one whose turn it was.
            return Start(number, epoch, (worker + skip // self._batching.size) % workers, done, skip)
        if place.parts is None:
            mark = place.marks[0] if place.marks else Mark()
            return Start(number, epoch, worker, done, skip, "nothing" if place.is_whole else "stream", mark=mark)
        role = (worker + place.parts.first) % workers
        mark = place.marks[role] if place.marks else Mark()
        done, skip = split(place.parts.done[role], self._plan.num_replicas)
        return Start(number, epoch, role, done, skip, "parts", mark=mark)

    def __getattr__(self, name: str) -> Any:
        # The user's own attributes stay within reach. But a position in the whole stream is none in this share, so
        # the dataset's state is not this one's.
        if name.startswith("__") or name in {"dataset", "state_dict", "load_state_dict"}:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[T]:
        return Items(self._items, self._unbegun, self._note_loaded)

    def _unbegun(self) -> Loaded:
        number = self.board.latest_pass + 1 if self._first_pass is None else self._first_pass
        generators = generator_states([random_holder(self.dataset)])
        return Loaded(self._start(number, epoch=-1), self._seed.value, generators, is_over=False)

    def _note_loaded(self, loaded: Loaded) -> None:
        self.loaded_at_end = loaded.start.epoch if loaded.is_over else None

    def _items(self, items: Items[T]) -> Iterator[T]:
        # This begins when the first item is asked for. By then the main process has begun the epoch. A worker's
        # first pass is the one that it was started for, although others may have begun since.
        number = self._first_pass
        loaded = items.loaded
        if loaded is not None:
            # What the main process loaded, this worker was given by its iterator's state.
            self._loads = self.board.loads
            self._seed.adopt(loaded.seed)
        if number is None:
            number = self.board.latest_pass
            self._require_all_loads()
        self._first_pass = None
        epoch = self.board.epoch_of(number)
        if epoch is None or this_worker()[1] != self.board.readers:
            raise UnsupportedLoaderError(
                f"{type(self.dataset).__name__} cannot be shared here: the patched loader was made anew without its "
                "sampler, which begins each epoch, or with another number of workers; Lightning's predict and "
                "overfit_batches and accelerate's skip_first_batches do so. Iterate the one that "
                "patch_dataloader_to_ddp() returned; restore_loader() lets that go on in an epoch."
            )
        if self._resumed is not None and self._resumed[1].epoch != epoch:
            self.forget(number)
        if self._resumed is not None and self._resumed[0] == number and self._resumed[1].is_begun:
            # In workers too: a loader may have drawn its workers' seed from these generators since.
            set_generator_states([random_holder(self.dataset)], self._resumed[1].held.generators)
        start = self._start(number, epoch) if loaded is None else self._start_of(loaded, number, epoch)
        generators = generator_states([random_holder(self.dataset)])
        with worker_info_told(self._info(start)):
            # Told after that, because it may seed these generators.
            if callable(tell := getattr(self.dataset, "set_epoch", None)):
                tell(epoch)
        if self._options.iterable_sharding == "by_worker":
            return self._by_worker(start)
        if loaded is not None and loaded.is_over:
            return iter(())
        self.loaded_at_end = None
        return self._exact(start, items, generators)

    def _start_of(self, loaded: Loaded, number: int, epoch: int) -> Start:
        """Return where a pass begins that another package's loader resumes."""
        start = replace(loaded.start, number=number, epoch=epoch)
        if loaded.start.epoch not in {-1, epoch} or self._made_for not in {None, start.role}:
            raise StateError(
                f"{type(self.dataset).__name__} cannot go on from the state of its iterator, which is of worker "
                f"{start.role} in epoch {loaded.start.epoch}: this is worker {this_worker()[0]} in epoch {epoch}. Load "
                "the state of the whole loader, and set no other epoch before it goes on."
            )
        self.board.note_offset(number, this_worker()[0], start.offset)
        set_generator_states([random_holder(self.dataset)], loaded.generators)
        return start

    def _require_all_loads(self) -> None:
        """Refuse to go on in a worker that was started before a state was loaded: it has neither place nor seed."""
        if self._loads != self.board.loads:
            raise StateError(
                f"{type(self.dataset).__name__} cannot go on from the state: it was loaded by load_state_dict() while "
                "the loader's persistent workers ran, which know nothing of it. Call restore_loader(loader, state), "
                "which starts new workers, or load the state before the first pass."
            )

    def _info(self, start: Start) -> WorkerInfo | None:
        """Return what the dataset is told of the worker that it is in."""
        reader, readers = self._reader_of(start)
        return self._reader.info(reader, readers, reader_seed(self._seed.value, start.epoch) + reader, self.dataset)

    def _reader_of(self, start: Start) -> tuple[int, int]:
        """Return which worker of how many the dataset is told that it is in."""
        workers = this_worker()[1]
        if self._options.iterable_sharding == "exact":
            return start.role, workers
        return self._plan.rank * workers + start.role, self._plan.num_replicas * workers

    def _drawn(
        self, start: Start, stream: Iterator[T], plan: Plan, length: int, states: Switching, skip: int
    ) -> Iterator[Chunk[T]]:
        """Yield the stream in whole batches, after a first round that shows whether the dataset asks for its worker.

        Up to then all workers draw from the same random states, so that a dataset may shuffle its files and then take
        its own. After it, one that asked draws from states of its worker's own, as in torch.
        """
        size = self._batching.size

        def kept(at: int, items: int) -> slice:
            # The first round is for padding.
            return slice(None) if self._options.verify or not at else plan.part(at, items, length)

        # A batch at a time, which no batch can come without, and no copies: these are samples, not indices.
        rounds = chain([1, (skip - 1) % size or size], repeat(size))
        chunks = draw(stream, states, round_size=plan.num_replicas, rounds=rounds, copies=False, kept=kept)
        first = next(chunks, None)
        asked = self._reader.has_split if first is not None else self._reader.has_asked
        reader, readers = self._reader_of(start)
        if asked and readers > 1:
            states.replace(epoch_states(self._options, self._seed, start.epoch, reader))
        self.board.note_role(start.number, this_worker()[0], start.role if asked else None)
        self._require_one_way(start)
        for chunk in chain([] if first is None else [first], chunks):
            if self._reader.has_split and not asked:
                raise UnsupportedLoaderError(
                    f"{type(self.dataset).__name__} cannot be shared with {readers} workers: it asked "
                    f"get_worker_info() which worker it is in after it had given items without asking, so these came "
                    "from every worker and later ones from one. Call get_worker_info() first in __iter__, or use "
                    "num_workers=0."
                )
            yield chunk

    def _require_one_way(self, start: Start) -> None:
        """Refuse what can be shared neither as one stream nor in parts."""
        name, readers = type(self.dataset).__name__, self.board.readers
        if readers == 1 or self._options.iterable_sharding == "by_worker":
            return
        if len(ways := self.board.ways(start.number)) > 1:
            raise UnsupportedLoaderError(
                f"{name} cannot be shared with {readers} workers: it asked get_worker_info() which worker it is in "
                "in some of them, and not in others, so it is neither one stream nor split into parts. Call it in "
                "every worker, first in __iter__, or use num_workers=0."
            )
        if ways == {"parts"} and self._plan.needs_length:
            raise InvalidOptionError(
                f"layout='contiguous' cannot hold for {name} with num_workers={readers}: it splits itself over its "
                "workers, and how long each one's part is shows only at its end. Use layout='interleaved', or "
                "num_workers=0 or 1."
            )
        if start.counts != "nothing" and {start.counts} != ways:
            counts = {"stream": "one stream, as 0 or 1 workers read it", "parts": f"the parts of {readers} workers"}
            raise StateError(
                f"{name} cannot go on from the state, which counts items of {counts[start.counts]}: with "
                f"num_workers={readers} it is read as {counts[next(iter(ways))]}. Use the num_workers that the state "
                "was taken with."
            )

    def _exact(self, start: Start, items: Items[T], generators: Sequence[Any]) -> Iterator[T]:
        plan, name = self._plan, type(self.dataset).__name__
        worker, workers = this_worker()
        rest = plan.rest_of_stream(self.stream_length, start.before)
        states = self._states(start)
        marker = Marker(self.dataset, self.board, start.number, worker, states if self._snapshots else None)
        before = self._before(start, marker)
        stream = (
            self._opened(start, marker, rest) if before is None else marker.follow(self._resumed_read(start, marker))
        )
        skip = start.skip if before is None else 0
        chunks = self._drawn(start, stream, plan, len(rest), states, skip)
        running = Fingerprint()
        is_verified = self._options.verify and before is None
        if is_verified:
            chunks = running.watching(chunks)

        def at_end(drawn: int) -> None:
            self.board.end(start.number, start.role, drawn, running.hexdigest() if is_verified else None)
            self._require_ends(start)
            require_sure_length(plan, name, "dataset", drawn, len(rest))
            if start.done > plan.rounds(drawn):
                raise StateError(
                    f"{name} cannot go on from the state: {start.done} items of each rank's share were done in it, and "
                    f"the stream ended after {drawn} items of all ranks. Restore it with the dataset that it was taken "
                    "of; one that is its own iterator must be made anew."
                )

        shared = (item for (part,) in share([plan], chunks, len(rest), at_end, before) for item in part)
        size, place = self._batching.size, start.offset

        def standing(*, is_over: bool) -> Loaded:
            mark = start.mark if place == start.offset else self._mark(start, place, marker)
            return Loaded(replace(start, offset=place, mark=mark), self._seed.value, generators, is_over)

        items.standing = partial(standing, is_over=False)
        for item in islice(shared, start.done if before is None else 0, None):
            # Readers of one stream take turns.
            is_mine = self._reader.has_split or place // size % workers == worker
            place += 1
            if is_mine:
                if self._snapshots and place % size == 0:
                    self.board.leave(start.number, worker, place // size, self._snapshot(start, marker))
                yield item
        items.standing = partial(standing, is_over=True)

    def _opened(self, start: Start, marker: Marker, rest: Rest) -> Iterator[T]:
        """Return the rest of the stream, which is read from its beginning."""
        read = marker.watch(self._read(start, marker.begin), start.mark)
        if self.first_items is not None:
            read = self.first_items.watching(start.role, start.number, read)
        return rest.select(read)

    def _resumed_read(self, start: Start, marker: Marker) -> Iterator[T]:
        return self._read(start, partial(marker.begin_at, start.mark.state[0]))

    def _mark(self, start: Start, place: int, marker: Marker) -> Mark:
        """Return what is known of the stream after so many items of this rank's share, counted as ``Start.offset``."""
        taken = sum(ranks * each for ranks, each in start.before) + self._plan.num_replicas * (start.skip + place)
        first = self.board.first(start.number, this_worker()[0], taken)
        return Mark(first or start.mark.first, self._snapshot(start, marker))

    def _snapshot(self, start: Start, marker: Marker) -> tuple[Any, ...]:
        asked = self._reader.has_asked
        with worker_info_told(self._info(start)):
            state = marker.snapshot()
        self._reader.has_asked = asked
        return state

    def _states(self, start: Start) -> Switching:
        return Switching(epoch_states(self._options, self._seed, start.epoch))

    def _read(self, start: Start, begin: Callable[[], Iterator[T]]) -> Iterator[T]:
        return self._reader.read(begin, self._info(start))

    def _before(self, start: Start, marker: Marker) -> Chunk[T] | None:
        """Return the rounds that need not be read again because the dataset says where it stood; None to read them.

        Padding repeats items of the first round, so these are read where there may be padding.
        """
        plan, rounds = self._plan, start.done
        repeats = plan.num_replicas - 1 if plan.uneven == "pad" and rounds else 0
        if not (self._snapshots and start.mark.state) or (repeats and start.before):
            return None
        first: list[T] = []
        if repeats:
            looked_at = max(repeats, 0 if start.mark.first is None else start.mark.first[0])
            with self._states(start):
                first = marker.first(self._read(start, marker.begin), start.mark, looked_at)
        return Chunk(rounds * plan.num_replicas, first)

    def _require_ends(self, start: Start) -> None:
        """Refuse an epoch without steps, and workers that read different streams where all should read one."""
        name, lengths = type(self.dataset).__name__, self.board.lengths(start.number)
        if self.board.ways(start.number) == {"stream"}:
            lengths = list({length for length in lengths if length is not None})
            if len(lengths) > 1:
                raise UnsupportedLoaderError(
                    f"{name} cannot be shared with {self.board.readers} workers: it never asked get_worker_info() "
                    f"which worker it is in, and yet gave {' and '.join(map(str, lengths))} items in two of them. "
                    "Use get_worker_info() to split it, in __iter__, or use num_workers=0."
                )
        if start.is_whole and None not in lengths:
            require_steps(self._plan, self._batching, name, cast("list[int]", lengths), in_batches=False)

    def _by_worker(self, start: Start) -> Iterator[T]:
        chunks = self._drawn(
            start, self._read(start, partial(iter, self.dataset)), Plan(0, 1), 0, self._states(start), start.skip
        )
        items = (item for chunk in chunks for item in chunk.items)
        # The loader asks its workers in turn, so this one made every workers-th of the batches that were done.
        size, role, workers = self._batching.size, start.role, this_worker()[1]
        done = max(0, -(-(start.skip // size - role) // workers)) * size
        skipped = sum(1 for _ in islice(items, done))
        if skipped < done if self._batching.drop_last else skipped <= done - size:
            raise StateError(
                f"{type(self.dataset).__name__} cannot go on from the state: worker {role} of {workers} had only "
                f"{skipped} items before its end, so the workers no longer took turns and which batches were done "
                "cannot be told. Begin the epoch anew, or use iterable_sharding='exact'."
            )
        made = skipped
        for made, item in enumerate(items, skipped + 1):  # noqa: B007 - told after the loop
            yield item
        self.ends.write(role, start.number, self._batching.count(made))

    def begin_worker(self, number: int, epoch: int, worker_init_fn: Callable[[int], object] | None) -> None:
        """Prepare this worker's copy for pass ``number``; call the user's function for the dataset that it knows."""
        self._first_pass = number
        if worker_init_fn is None:
            return
        start = self._start(number, epoch)
        reader, _ = self._reader_of(start)
        with worker_info_told(self._info(start)):
            self._reader.prepare(self.dataset, worker_init_fn, reader)
        if self._reader.has_asked:
            self._made_for = start.role


def random_holder(dataset: object) -> SimpleNamespace:
    """Return what holds a dataset's random generators and nothing else: its own state is a position in it."""
    return SimpleNamespace(generators=random_generators([dataset]))


@dataclass(frozen=True, slots=True)
class IterableWorkerInit:
    """A ``worker_init_fn`` that prepares the sharded dataset in a worker, then calls the user's.

    The user's may split the dataset by ``get_worker_info()``, as torch's documentation shows. So it is told of the
    dataset that the user gave, and of the worker that this dataset is read by.
    """

    worker_init_fn: Callable[[int], object] | None
    epochs: EpochCounter

    def __call__(self, worker_id: int) -> None:
        """Prepare worker ``worker_id``."""
        info: Any = get_worker_info()
        dataset: ShardedIterable[Any] = info.dataset
        dataset.begin_worker(self.epochs.passes + 1, self.epochs.upcoming, self.worker_init_fn)
