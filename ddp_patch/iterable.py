"""One rank's share of an iterable dataset, whose stream is made inside the loader's workers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from ddp_patch.agreement import Agreed
from ddp_patch.epoch_sampler import EpochSampler
from ddp_patch.errors import StreamLengthError
from ddp_patch.fingerprint import fingerprinted
from ddp_patch.options import Options
from ddp_patch.plan import Plan
from ddp_patch.seeding import EpochCounter, PrivateRNG
from ddp_patch.sharing import share
from ddp_patch.streams import draw

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
    """

    def __init__(self, dataset: IterableDataset[T], plan: Plan, options: Options, batch_size: int) -> None:
        self.dataset = dataset
        self._plan = plan
        self._options = options
        self._batch_size = batch_size
        self._first_pass: int | None = None
        self._latest_pass = _shared(1)
        self._epochs = _shared(_LATEST)
        self._ends = _shared(_LATEST, 2)  # of each pass that has come to its end, how many items, and a fingerprint

    def __len__(self) -> int:
        return len(self._plan.share(self._stream_length()))

    def _stream_length(self) -> int:
        return len(cast(Any, self.dataset))  # TypeError where the dataset has no length, as from the dataset itself

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
        if callable(tell := getattr(self.dataset, "set_epoch", None)):
            tell(epoch)
        yield from self._exact(epoch, number) if self._options.iterable_sharding == "exact" else self._by_worker(epoch)

    def _exact(self, epoch: int, number: int) -> Iterator[T]:
        stream = _read_as(self.reader(), self.dataset)
        # One round at a time, and no copies: these are samples, not indices, and most are other ranks'.
        chunks = draw(stream, self._rng(epoch), round_size=self._plan.num_replicas, most=1, copies=False)
        if self._options.verify:
            chunks = fingerprinted(chunks, self._plan.num_replicas, partial(self._record_end, number))
        length = self._stream_length() if self._plan.layout == "contiguous" else 0
        parts = share([self._plan], chunks, length, lambda drawn: self._check_runs(drawn, length))
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for place, item in enumerate(item for (part,) in parts for item in part):
            if place // self._batch_size % workers == worker:
                yield item

    def _by_worker(self, epoch: int) -> Iterator[T]:
        chunks = draw(_read_as(self.reader(), self.dataset), self._rng(epoch), round_size=1, most=1, copies=False)
        yield from (item for chunk in chunks for item in chunk)

    def _rng(self, epoch: int) -> AbstractContextManager[None]:
        is_ambient = self._options.agreement == "ambient"
        return nullcontext() if is_ambient else PrivateRNG(cast(int, self._options.seed), epoch)

    def reader(self) -> torch_worker.WorkerInfo | None:
        """Return who the dataset is told to be read by: nobody's worker, or one of all ranks' workers."""
        info = get_worker_info()
        if self._options.iterable_sharding == "exact":
            return None
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
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

    def _record_end(self, number: int, drawn: int, order: str) -> None:
        self._ends[number % _LATEST] = torch.tensor([drawn, int(order[:15], 16)])

    def ended(self, number: int) -> dict[str, object]:
        """Return what pass ``number`` has drawn, as facts to compare; nothing if it did not come to its end."""
        drawn, order = self._ends[number % _LATEST].tolist()
        return {"drawn in the epoch before": drawn, "order of the epoch before": order} if drawn >= 0 else {}

    def begin_worker(self, number: int, worker_init_fn: Callable[[int], object] | None) -> None:
        """Prepare this worker's copy for pass ``number``; call the user's function for the dataset that it knows."""
        self._first_pass = number
        if worker_init_fn is not None:
            alone = torch_worker.WorkerInfo(id=0, num_workers=1, seed=torch.initial_seed(), dataset=self.dataset)
            reader = self.reader() or alone
            with _worker_info(reader):
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

    def __init__(self, dataset: ShardedIterable[Any], agreed: Agreed) -> None:
        super().__init__(agreed)
        self.dataset: ShardedIterable[Any] = dataset
        self._iterated = 0  # the epoch of the latest iterator, drawn from or not

    def __iter__(self) -> Iterator[None]:
        self._iterated = self.epochs.upcoming
        return self._pass(self._iterated)

    def _pass(self, epoch: int) -> Iterator[None]:
        # Workers cannot meet; what they have drawn is compared here, in the main process, when the next pass begins.
        self._begin(epoch, {}, self.dataset.ended(self.epochs.passes))
        self.dataset.begin(self.epochs.passes, epoch)
        # Told here too: where the epoch lies in memory shared with the workers (as in Hugging Face's datasets), theirs
        # then only confirm it. Two workers that change it at once could leave it wrong.
        if callable(tell := getattr(self.dataset.dataset, "set_epoch", None)):
            tell(epoch)
        while True:
            yield None

    def __len__(self) -> int:
        raise TypeError(f"object of type {type(self).__name__!r} has no len()")  # as torch's endless sampler has none

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch; ``torchdata``'s loader finds the place in it by reading it again."""
        return {"epoch": self._iterated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the epoch in which a ``state_dict`` was taken the next one."""
        self.set_epoch(state_dict["epoch"])


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


def _shared(*shape: int) -> torch.Tensor:
    """A tensor of -1 in memory that the workers share."""
    tensor = torch.full(shape, -1, dtype=torch.int64, device="cpu")
    return tensor.share_memory_()  # type: ignore[no-any-return,no-untyped-call]  # torch leaves it unannotated


def _read_as(info: Any, dataset: Iterable[T]) -> Iterator[T]:
    """Iterate the dataset while ``get_worker_info()`` tells it ``info``."""
    with _worker_info(info):
        iterator = iter(dataset)
    while True:
        with _worker_info(info):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


@contextmanager
def _worker_info(info: Any) -> Iterator[None]:
    # torch has no public way to say which worker this is; get_worker_info() reads this one variable.
    before = torch_worker._worker_info
    torch_worker._worker_info = info
    try:
        yield
    finally:
        torch_worker._worker_info = before
