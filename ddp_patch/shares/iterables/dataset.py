"""One rank's share of an iterable dataset, whose stream is made inside the loader's workers."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ddp_patch.errors import StateError, StreamLengthError, UnsupportedLoaderError
from ddp_patch.loaders.copying import random_generators
from ddp_patch.options import Options
from ddp_patch.plan import Done, Plan
from ddp_patch.ranks.agreement import Agreed, length_of
from ddp_patch.shares.epochs import EpochSampler
from ddp_patch.shares.passes import EpochPass, nothing_left
from ddp_patch.shares.place import Place
from ddp_patch.shares.sources import share
from ddp_patch.streams.chunks import draw
from ddp_patch.streams.fingerprint import fingerprinted
from ddp_patch.streams.seeding import EpochCounter, PrivateRNG

__all__ = ["IterableWorkerInit", "ShardedIterable", "StreamSampler"]

T = TypeVar("T")

# Of so many passes before the latest it is remembered which epoch they are over: iterators may live side by side.
_LATEST = 64


class ShardedIterable(IterableDataset[T]):
    """One rank's share of another iterable dataset's stream.

    ``iterable_sharding="exact"``: every worker reads the whole stream, told that it is the only reader so that a
    dataset which splits itself over workers does not, and keeps this rank's items. Of the batches that these make,
    worker j of k takes the j-th and every k-th after it, so the loader yields the same batches for every number of
    workers.

    ``iterable_sharding="by_worker"``: the dataset is told that all ranks' workers are workers of one loader, and
    splits itself.

    Attributes:
        dataset: The dataset that the user gave.
        tells_rest: Whether its length is that of the rest of an epoch that is gone on with, or of the whole epoch.
    """

    def __init__(
        self, dataset: IterableDataset[T], plan: Plan, options: Options, batch_size: int, drops_last: bool
    ) -> None:
        self.dataset = dataset
        self._plan = plan
        self._options = options
        self._batch_size, self._drops_last = batch_size, drops_last
        self._first_pass: int | None = None
        self._place: tuple[int, Place] | None = None  # which pass goes on from where
        self.tells_rest: bool = True
        self._latest_pass = _shared(1)
        self._epochs = _shared(_LATEST)
        self._ends = _shared(_LATEST, 2)  # of each pass that has come to its end, how many items, and a fingerprint

    def __len__(self) -> int:
        before: Done = ()
        skip = 0
        # Persistent workers keep a pass that has come to its end.
        if self.tells_rest and self._place is not None and self.length_found(self._place[0]) is None:
            before, skip = self._place[1].split(self._plan.num_replicas)
        return max(0, len(self._plan.share(len(self._plan.rest(self.stream_length(), before)))) - skip)

    def stream_length(self) -> int:
        """Return the length of the user's dataset; TypeError where it has none."""
        return len(cast(Any, self.dataset))

    def go_on(self, number: int, place: Place | None) -> None:
        """Let pass ``number`` begin at a place, from workers that are started after this call on."""
        self._place = None if place is None else (number, place)

    def forget(self, number: int) -> None:
        """Let lengths be told of whole epochs again, if pass ``number`` went on from a place."""
        if self._place is not None and self._place[0] == number:
            self._place = None

    def __getattr__(self, name: str) -> Any:
        # The user's own attributes stay within reach; but a position in the whole stream is none in this share, so
        # the dataset's state is not this one's.
        if name.startswith("__") or name in {"dataset", "state_dict", "load_state_dict"}:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.dataset, name)

    def __iter__(self) -> Iterator[T]:
        # A generator: it starts when the first item is asked for, before which the main process has begun the epoch. A
        # worker's first pass is the one that it was started for, although others may have begun since.
        number = int(self._latest_pass) if self._first_pass is None else self._first_pass
        epoch = int(self._epochs[number % _LATEST])
        self._first_pass = None
        if epoch < 0:
            raise UnsupportedLoaderError(
                f"{type(self.dataset).__name__} cannot be shared here: the patched loader was made anew without its "
                "sampler, which begins each epoch, as Lightning's predict and overfit_batches and accelerate's "
                "skip_first_batches do. Iterate the one that patch_dataloader_to_ddp() returned; restore_loader() lets "
                "that go on in an epoch."
            )
        if callable(tell := getattr(self.dataset, "set_epoch", None)):
            tell(epoch)
        goes_on = self._place is not None and (self._place[0], self._place[1].epoch) == (number, epoch)
        before, skip = self._place[1].split(self._plan.num_replicas) if self._place and goes_on else ((), 0)
        if self._place is not None and goes_on and self._place[1].is_begun:
            # Here too: a loader may have drawn its workers' seed from them since.
            self._place[1].held.reinstate_generators([random_holder(self.dataset)])
        if self._options.iterable_sharding == "exact":
            yield from self._exact(epoch, number, before, skip)
        else:
            yield from self._by_worker(epoch, skip)

    def _exact(self, epoch: int, number: int, before: Done, skip: int) -> Iterator[T]:
        is_cut = self._plan.layout == "contiguous"
        rest = self._plan.rest(self.stream_length() if is_cut else sys.maxsize, before)
        stream = rest.select(_read_as(self.reader(0), self.dataset))
        # One round at a time, and no copies: these are samples, not indices, and most are other ranks'.
        chunks = draw(stream, self._rng(epoch), round_size=self._plan.num_replicas, most=1, copies=False)
        if self._options.verify:
            chunks = fingerprinted(chunks, self._plan.num_replicas, partial(self._record_order, number))
        parts = share([self._plan], chunks, len(rest), lambda drawn: self._record_length(number, drawn, len(rest)))
        worker, workers = _this_worker()
        items = (item for (part,) in parts for item in part)
        for place, item in enumerate(islice(items, skip, None)):
            if place // self._batch_size % workers == worker:
                yield item

    def _by_worker(self, epoch: int, skip: int) -> Iterator[T]:
        stream = _read_as(self.reader(skip), self.dataset)
        chunks = draw(stream, self._rng(epoch), round_size=1, most=1, copies=False)
        items = (item for chunk in chunks for item in chunk)
        role, workers = self._role(skip)
        # The loader asks its workers in turn, so of the batches that were done this one made every workers-th.
        done = max(0, -(-(skip // self._batch_size - role) // workers)) * self._batch_size
        skipped = sum(1 for _ in islice(items, done))
        if skipped < done if self._drops_last else skipped <= done - self._batch_size:
            raise StateError(
                f"{type(self.dataset).__name__} cannot go on from the state: worker {role} of {workers} had only "
                f"{skipped} items before its end, so the workers no longer took turns and which batches were done "
                "cannot be told. Begin the epoch anew, or use iterable_sharding='exact'."
            )
        yield from items

    def _role(self, skip: int) -> tuple[int, int]:
        """Which of how many workers' part this worker plays: batches go on with the one whose turn it was."""
        worker, workers = _this_worker()
        return (worker + skip // self._batch_size) % workers, workers

    def _rng(self, epoch: int) -> AbstractContextManager[None]:
        is_ambient = self._options.agreement == "ambient"
        return nullcontext() if is_ambient else PrivateRNG(cast(int, self._options.seed), epoch)

    def reader(self, skip: int) -> torch_worker.WorkerInfo | None:
        """Return who the dataset is told to be read by: nobody's worker, or one of all ranks' workers.

        Args:
            skip: How many of this rank's items are done.
        """
        info = get_worker_info()
        if self._options.iterable_sharding == "exact":
            return None
        worker, workers = self._role(skip)
        return torch_worker.WorkerInfo(
            id=self._plan.rank * workers + worker,
            num_workers=self._plan.num_replicas * workers,
            seed=info.seed if info else torch.initial_seed(),
            dataset=self.dataset,
        )

    def begin(self, number: int, epoch: int) -> None:
        """Let workers know, from the main process, which epoch pass ``number`` is over."""
        self._epochs[number % _LATEST] = epoch
        self._ends[number % _LATEST] = -1
        self._latest_pass[0] = number

    def _record_order(self, number: int, drawn: int, order: str) -> None:
        self._ends[number % _LATEST] = torch.tensor([drawn, int(order[:15], 16)])

    def _record_length(self, number: int, drawn: int, length: int) -> None:
        self._check_runs(drawn, length)
        self._ends[number % _LATEST, 0] = drawn

    def ended(self, number: int) -> dict[str, object]:
        """Return what pass ``number`` has drawn, as facts to compare; nothing if it did not come to its end."""
        drawn, order = self._ends[number % _LATEST].tolist()
        return {"drawn in the epoch before": drawn, "order of the epoch before": order} if order >= 0 else {}

    def length_found(self, number: int) -> int | None:
        """Return how many items pass ``number`` has drawn, if it came to its end."""
        drawn = int(self._ends[number % _LATEST, 0])
        return drawn if drawn >= 0 else None

    def begin_worker(self, number: int, worker_init_fn: Callable[[int], object] | None) -> None:
        """Prepare this worker's copy for pass ``number``; call the user's function for the dataset that it knows."""
        self._first_pass = number
        if worker_init_fn is not None:
            alone = torch_worker.WorkerInfo(id=0, num_workers=1, seed=torch.initial_seed(), dataset=self.dataset)
            goes_on = self._place is not None and self._place[0] == number
            reader = (
                self.reader(self._place[1].split(self._plan.num_replicas)[1] if self._place and goes_on else 0) or alone
            )
            with worker_info(reader):
                worker_init_fn(reader.id)

    def _check_runs(self, drawn: int, length: int) -> None:
        if self._plan.layout == "contiguous" and drawn != length:
            raise StreamLengthError(
                f"{type(self.dataset).__name__} yielded {drawn} items and its len() said {length}. With "
                "layout='contiguous' each rank's run was cut from that length, so this epoch's shares are wrong. "
                "Correct the dataset's __len__, or use layout='interleaved', which needs none."
            )


class StreamSampler(EpochSampler[None]):
    """The index sampler of a sharded iterable dataset: it yields None for ever and says which epoch it is.

    torch puts such a sampler into a loader of an iterable dataset; this one begins the epoch when the loader asks for
    its first batch, and has the ``set_epoch`` that training loops and frameworks call.
    """

    progress: EpochPass | None
    place: Place | None

    def __init__(self, dataset: ShardedIterable[Any], agreed: Agreed, num_workers: int, batch_size: int) -> None:
        facts: dict[str, object] = {
            "dataset": type(dataset.dataset).__qualname__,
            "dataset length": length_of(dataset.dataset),
            "iterable_sharding": agreed.options.iterable_sharding,
        }
        if agreed.options.iterable_sharding == "by_worker":
            # What each worker reads follows from these, so there is no one stream of which others could take a rest.
            facts |= {
                "num_replicas": agreed.world.num_replicas,
                "num_workers": num_workers,
                "batch_size": batch_size,
            }
        super().__init__(agreed, [random_holder(dataset.dataset)], facts)
        self.dataset: ShardedIterable[Any] = dataset
        self._iterated = 0  # the epoch of the latest iterator, drawn from or not

    def _stream_length(self, epoch: int) -> int:
        if self.agreed.options.iterable_sharding == "by_worker":
            raise TypeError("how many items each worker reads is up to the dataset")
        return self.dataset.stream_length()

    def length_found(self) -> int | None:
        """Return how many items the latest pass has drawn, if it came to its end."""
        return self.dataset.length_found(self.epochs.passes)

    def __iter__(self) -> Iterator[None]:
        self._iterated = self.epochs.upcoming
        return self._pass(self._iterated)

    def _pass(self, epoch: int) -> Iterator[None]:
        place = self.place or Place(epoch, held=self._held())
        progress = EpochPass.at(place, self.num_replicas, resumes=self.place is not None)
        if place.is_begun:
            place.held.reinstate_generators(self._holders)  # a loader may have drawn from them since
        # Workers cannot meet; what they have drawn is compared here, in the main process, when the next pass begins.
        self._begin(epoch, {"position": progress.begins_at}, self.dataset.ended(self.epochs.passes))
        number = self.epochs.passes
        self.dataset.begin(number, epoch)
        if self.place is None:
            self.dataset.go_on(0, None)
        self.progress, self.place = progress, None
        # Told here too: where the epoch lies in memory shared with the workers (as in Hugging Face's datasets), theirs
        # then only confirm it. Two workers that change it at once could leave it wrong.
        if callable(tell := getattr(self.dataset.dataset, "set_epoch", None)):
            tell(epoch)
        progress.given = progress.skip
        progress.to_end = nothing_left  # the end is found in workers, if there is one
        try:
            while True:
                progress.given += 1
                yield None
        finally:
            progress.over = True
            self.dataset.forget(number)

    def __len__(self) -> int:
        raise TypeError(f"object of type {type(self).__name__!r} has no len()")  # as torch's endless sampler has none

    def go_to(self, place: Place, *, tells_rest: bool) -> None:
        """Make the next pass go on at a place; see the attribute ``tells_rest``."""
        super().go_to(place, tells_rest=tells_rest)
        self.dataset.go_on(self.epochs.passes + 1, place)
        self.dataset.tells_rest = tells_rest

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be drawn; see ``EpochSampler``."""
        super().set_epoch(epoch)
        if self.place is None:
            self.dataset.go_on(0, None)

    def rest_length(self, progress: EpochPass) -> int | None:
        """How many items all ranks share in a pass: as the dataset says, or as was found by the end of the pass."""
        told = super().rest_length(progress)
        # Before, one rank may know and another not yet.
        return self.length_found() if told is None and progress.over else told

    def _given_after(self, progress: EpochPass, taken: int) -> int:
        return 0  # in workers

    def _place_now(self) -> Place:
        # Other packages' loaders find the place in an epoch by reading it again.
        progress = self.progress
        if self.place is not None:
            return self.place
        if progress is None or progress.epoch != self._iterated:
            return Place(self._iterated, held=self._held())
        return progress.place(self.num_replicas, progress.skip)


@dataclass(frozen=True, slots=True)
class IterableWorkerInit:
    """A ``worker_init_fn`` that prepares the sharded dataset in a worker, then calls the user's.

    The user's may split the dataset by ``get_worker_info()``, as torch's documentation shows; so it is told of the
    dataset that the user gave, and of the worker that this dataset is read by.
    """

    worker_init_fn: Callable[[int], object] | None
    epochs: EpochCounter

    def __call__(self, worker_id: int) -> None:
        """Prepare worker ``worker_id``."""
        info: Any = get_worker_info()
        info.dataset.begin_worker(self.epochs.passes + 1, self.worker_init_fn)


def random_holder(dataset: object) -> SimpleNamespace:
    """Return what holds a dataset's random generators and nothing else: its own state is a position in it."""
    return SimpleNamespace(generators=random_generators([dataset]))


def _this_worker() -> tuple[int, int]:
    """Return which worker of how many this is; the main process is the only one."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def _shared(*shape: int) -> torch.Tensor:
    """A tensor of -1 in memory that the workers share."""
    tensor = torch.full(shape, -1, dtype=torch.int64, device="cpu")
    return tensor.share_memory_()  # type: ignore[no-any-return,no-untyped-call]  # torch leaves it unannotated


def _read_as(info: Any, dataset: Iterable[T]) -> Iterator[T]:
    """Iterate the dataset while ``get_worker_info()`` tells it ``info``."""
    with worker_info(info):
        iterator = iter(dataset)
    while True:
        with worker_info(info):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


@contextmanager
def worker_info(info: Any) -> Iterator[None]:
    """Have ``get_worker_info()`` tell ``info``."""
    # torch has no public way to say which worker this is; get_worker_info() reads this one variable.
    before = torch_worker._worker_info
    torch_worker._worker_info = info
    try:
        yield
    finally:
        torch_worker._worker_info = before
