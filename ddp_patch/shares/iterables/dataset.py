"""One rank's share of an iterable dataset, whose stream is made inside the loader's workers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ddp_patch.compat import made_worker_info, worker_info_told
from ddp_patch.errors import StateError, UnsupportedLoaderError
from ddp_patch.options import Options
from ddp_patch.plan import Batching, Done, Plan
from ddp_patch.shares.drawing import require_sure_length, share
from ddp_patch.shares.iterables.workers import Board, Ends, read_as, this_worker
from ddp_patch.shares.place import Place
from ddp_patch.shares.steps import require_steps
from ddp_patch.streams.chunks import draw
from ddp_patch.streams.fingerprint import Fingerprint
from ddp_patch.streams.generators import random_generators, set_generator_states
from ddp_patch.streams.random_states import epoch_states
from ddp_patch.streams.seeding import EpochCounter, Seed

__all__ = ["IterableWorkerInit", "ShardedIterable", "random_holder"]

T = TypeVar("T")


class _Start(NamedTuple):
    """Where a pass begins: what other numbers of ranks took, and how many items of this rank's share are done."""

    before: Done = ()
    skip: int = 0


class ShardedIterable(IterableDataset[T]):
    """One rank's share of another iterable dataset's stream.

    ``iterable_sharding="exact"``: every worker reads the whole stream and keeps this rank's items. It is told that it
    is the only reader, so that a dataset which splits itself over workers does not. Worker j of k takes every k-th
    batch from the j-th on, so the loader yields the same batches for every number of workers.

    ``iterable_sharding="by_worker"``: the dataset is told that all ranks' workers are workers of one loader, and
    splits itself.

    Attributes:
        dataset: The dataset that the user gave.
        board: What the main process and the workers tell each other.
        ends: How many batches the workers made, with ``iterable_sharding="by_worker"``.
    """

    def __init__(
        self, dataset: IterableDataset[T], plan: Plan, options: Options, seed: Seed, batching: Batching, workers: int
    ) -> None:
        self.dataset = dataset
        self.board: Board = Board()
        self.ends: Ends = Ends(workers)
        self._plan = plan
        self._options, self._seed = options, seed
        self._batching = batching
        self._first_pass: int | None = None  # that a worker was started for
        self._resumed: tuple[int, Place] | None = None  # which pass goes on, and from where
        self._tells_rest = True
        self._loads: int = self.board.loads  # how many loaded states this copy knows of

    def __len__(self) -> int:
        start = _Start()
        # Persistent workers keep a pass that has come to its end.
        if self._tells_rest and self._resumed is not None and self.board.length(self._resumed[0]) is None:
            start = self._start(self._resumed[0])
        return max(0, len(self._plan.share(len(self._plan.rest(self.stream_length(), start.before)))) - start.skip)

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

    def _start(self, number: int) -> _Start:
        """Return where a pass begins."""
        if self._resumed is None or self._resumed[0] != number:
            return _Start()
        return _Start(*self._resumed[1].split(self._plan.num_replicas))

    def __getattr__(self, name: str) -> Any:
        # The user's own attributes stay within reach. But a position in the whole stream is none in this share, so
        # the dataset's state is not this one's.
        if name.startswith("__") or name in {"dataset", "state_dict", "load_state_dict"}:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[T]:
        # A generator starts when its first item is asked for. By then the main process has begun the epoch. A worker's
        # first pass is the one that it was started for, although others may have begun since.
        number = self._first_pass
        if number is None:
            number = self.board.latest_pass
            self._require_all_loads()
        self._first_pass = None
        epoch = self.board.epoch_of(number)
        if epoch is None:
            raise UnsupportedLoaderError(
                f"{type(self.dataset).__name__} cannot be shared here: the patched loader was made anew without its "
                "sampler, which begins each epoch, as Lightning's predict and overfit_batches and accelerate's "
                "skip_first_batches do. Iterate the one that patch_dataloader_to_ddp() returned; restore_loader() lets "
                "that go on in an epoch."
            )
        if self._resumed is not None and self._resumed[1].epoch != epoch:
            self.forget(number)
        if self._resumed is not None and self._resumed[0] == number and self._resumed[1].is_begun:
            # In workers too: a loader may have drawn its workers' seed from these generators since.
            set_generator_states([random_holder(self.dataset)], self._resumed[1].held.generators)
        # Told after that, because it may seed these generators.
        if callable(tell := getattr(self.dataset, "set_epoch", None)):
            tell(epoch)
        start = self._start(number)
        is_exact = self._options.iterable_sharding == "exact"
        yield from self._exact(epoch, number, start) if is_exact else self._by_worker(epoch, number, start)

    def _require_all_loads(self) -> None:
        """Refuse to go on in a worker that was started before a state was loaded: it has neither place nor seed."""
        if self._loads != self.board.loads:
            raise StateError(
                f"{type(self.dataset).__name__} cannot go on from the state: it was loaded by load_state_dict() while "
                "the loader's persistent workers ran, which know nothing of it. Call restore_loader(loader, state), "
                "which starts new workers, or load the state before the first pass."
            )

    def _exact(self, epoch: int, number: int, start: _Start) -> Iterator[T]:
        rest = self._plan.rest_of_stream(self.stream_length, start.before)
        stream = rest.select(read_as(None, self.dataset))
        # One round at a time, and no copies: these are samples, not indices, and most are other ranks'.
        rng = epoch_states(self._options, self._seed, epoch)
        chunks = draw(stream, rng, round_size=self._plan.num_replicas, copies=False)
        running = Fingerprint()
        if self._options.verify:
            chunks = running.watching(chunks)

        def at_end(drawn: int) -> None:
            if not any(taken for _, taken in start.before) and not start.skip:
                require_steps(self._plan, self._batching, type(self.dataset).__name__, drawn, in_batches=False)
            if self._options.verify:
                self.board.end_verified(number, drawn, running.hexdigest())
            require_sure_length(self._plan, type(self.dataset).__name__, "dataset", drawn, len(rest))
            self.board.end(number, drawn)

        worker, workers = this_worker()
        items = (item for (part,) in share([self._plan], chunks, len(rest), at_end) for item in part)
        for place, item in enumerate(islice(items, start.skip, None)):
            if place // self._batching.size % workers == worker:
                yield item

    def _by_worker(self, epoch: int, number: int, start: _Start) -> Iterator[T]:
        stream = read_as(self._reader(start.skip), self.dataset)
        chunks = draw(stream, epoch_states(self._options, self._seed, epoch), round_size=1, copies=False)
        items = (item for chunk in chunks for item in chunk.items)
        role, workers = self._role(start.skip)
        # The loader asks its workers in turn, so this one made every workers-th of the batches that were done.
        size = self._batching.size
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
        self.ends.write(role, number, self._batching.count(made))

    def _role(self, skip: int) -> tuple[int, int]:
        """Return which of how many workers' part this worker plays: batches go on with the one whose turn it was."""
        worker, workers = this_worker()
        return (worker + skip // self._batching.size) % workers, workers

    def _reader(self, skip: int) -> Any:
        """Return which of all ranks' workers the dataset is told to be read by, when ``skip`` items are done."""
        info = get_worker_info()
        role, workers = self._role(skip)
        seed = info.seed if info else torch.initial_seed()
        readers = self._plan.num_replicas * workers
        return made_worker_info(self._plan.rank * workers + role, readers, seed, self.dataset)

    def begin_worker(self, number: int, worker_init_fn: Callable[[int], object] | None) -> None:
        """Prepare this worker's copy for pass ``number``; call the user's function for the dataset that it knows."""
        self._first_pass = number
        if worker_init_fn is not None:
            if self._options.iterable_sharding == "exact":
                reader = made_worker_info(0, 1, torch.initial_seed(), self.dataset)
            else:
                reader = self._reader(self._start(number).skip)
            with worker_info_told(reader):
                worker_init_fn(reader.id)


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
        dataset.begin_worker(self.epochs.passes + 1, self.worker_init_fn)
