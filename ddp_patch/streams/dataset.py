"""One rank's share of an iterable dataset, which the loader's workers read."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from ddp_patch.compat.private_torch import is_torchs_collating
from ddp_patch.errors import StateError
from ddp_patch.orders.generators import random_generators
from ddp_patch.orders.random_states import EpochCounter
from ddp_patch.sharding.attributes import AttributeProxy
from ddp_patch.sharding.saved_position import NotedBatch
from ddp_patch.streams.reading import tell_epoch
from ddp_patch.streams.shared_state import SharedWorkerState
from ddp_patch.streams.worker import StreamWorker
from ddp_patch.streams.worker_pass import WorkerIterator
from ddp_patch.walks import plain_tensors

__all__ = ["ShardedIterable", "begin_worker"]


T = TypeVar("T")


class ShardedIterable(AttributeProxy, IterableDataset[T]):
    """One rank's share of another iterable dataset's stream.

    By default: in worker j of every rank, ``get_worker_info()`` returns what it would in worker j of
    the unpatched loader. If the dataset asks for it, worker j reads a part of the stream, and keeps this rank's share
    of that part. If it does not ask, every worker reads the same stream, and worker j of k gives every k-th batch of
    this rank's share, from the j-th on.

    ``share="by_worker"``: ``get_worker_info()`` counts all ranks' workers as one loader's, and the dataset
    splits itself.

    Args:
        worker: What reads it.

    Attributes:
        shared: What the main process and the workers report to each other.
    """

    _inner, _kept_as = "dataset", "_dataset"
    # A position in the whole stream is none in this share, so the dataset's state is not this one's.
    _hidden = frozenset({"state_dict", "load_state_dict"})

    def __init__(self, worker: StreamWorker[T]) -> None:
        self._dataset, self._worker = worker.dataset, worker
        self.shared: SharedWorkerState = worker.shared
        self._chosen_epoch: int | None = None
        self._told_epoch: int | None = 0  # so that one that was set before counts
        self._seal()

    @property
    def dataset(self) -> Any:
        """The user's dataset's, as in one process; if it has none, that dataset."""
        return getattr(self._dataset, "dataset", self._dataset)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return partial(self._choose_epoch, found) if name == "set_epoch" and callable(found) else found

    def _choose_epoch(self, tell: Callable[[int], object], epoch: int) -> None:
        """Tell the user's dataset its epoch, whatever it does with it; the next pass is over that epoch."""
        tell(epoch)
        self._chosen_epoch = epoch

    def take_chosen_epoch(self) -> int | None:
        """Return the epoch that the user has chosen since this was last called, by ``set_epoch``; None if none.

        Somebody may have set it past this, on the user's dataset: then the epoch counts that it stores.
        """
        chosen, self._chosen_epoch = self._chosen_epoch, None
        now = self._stored_epoch() if chosen is None else None
        return chosen if now is None or now < 0 or now == self._told_epoch else now

    def tell_epoch(self, epoch: int) -> None:
        """Tell the user's dataset its epoch, if it wants to know."""
        tell_epoch(self._dataset, epoch)
        self._told_epoch = self._stored_epoch()

    def _stored_epoch(self) -> int | None:
        """Return the ``epoch`` of a dataset that takes one, or its first whole number with that word in its name."""
        if not callable(getattr(self._dataset, "set_epoch", None)):
            return None
        stored = (value for name, value in vars(self._dataset).items() if "epoch" in name.lower())
        found = (value for value in (getattr(self._dataset, "epoch", None), *stored) if type(value) is int)
        return next(found, None)

    def require_no_generator(self) -> None:
        """Refuse to save a state where persistent workers draw from generators that the user's dataset holds."""
        if random_generators([self._dataset]):
            raise StateError(
                f"The state of {type(self._dataset).__name__} cannot be saved: it has a random generator, and "
                "persistent workers advance copies of it. Use persistent_workers=False."
            )

    def collate_with_notes(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a ``collate_fn`` with whose batches travels what workers note of them."""
        return partial(_collate_noted, self._worker, collate_fn)

    def __len__(self) -> int:
        return self._worker.share_length()

    def __iter__(self) -> Iterator[T]:
        return WorkerIterator(self._worker)

    def is_read_by(self, worker: StreamWorker[T]) -> bool:
        """Return whether this is what reads it."""
        return self._worker is worker

    def begin_worker(self, number: int, epoch: int, worker_init_fn: Callable[[int], object] | None) -> None:
        """Prepare this worker's copy for pass ``number``; see ``StreamWorker.prepare``."""
        self._worker.prepare(number, epoch, worker_init_fn)


def _collate_noted(worker: StreamWorker[Any], collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """Return a batch, in a ``NotedBatch`` if the pass that read its samples noted something.

    Args:
        worker: What read them.
        collate_fn: The loader's.
        samples: The batch's samples.
    """
    if (giving := worker.giving) is None:
        return collate_fn(samples)
    note = giving.note()  # before the user's function may read on
    # Another dataset of the worker's, which reads this one, may draw.
    info: Any = get_worker_info()
    is_own = info is not None and isinstance(info.dataset, ShardedIterable) and info.dataset.is_read_by(worker)
    giving.before_others(may_draw=not (is_own and _draws_nothing(collate_fn, samples)))
    batch = collate_fn(samples)
    return batch if note is None else NotedBatch(note, batch)


def _draws_nothing(collate_fn: Callable[[Any], Any], samples: Any) -> bool:
    """Return whether a function surely makes a batch without drawing: torch's own, of plain samples."""
    return is_torchs_collating(collate_fn) and plain_tensors(samples) is not None


def begin_worker(worker_init_fn: Callable[[int], object] | None, epochs: EpochCounter, worker_id: int) -> None:
    """Prepare a worker's copy of the sharded dataset, and call the user's ``worker_init_fn``.

    The user's function may call ``get_worker_info()``: it sees the user's dataset, and the worker that will read it.

    Args:
        worker_init_fn: The user's function, or None.
        epochs: Tells for which pass the worker is started, and over which epoch that is.
        worker_id: Which worker it is.
    """
    info: Any = get_worker_info()
    info.dataset.begin_worker(epochs.passes + 1, epochs.upcoming, worker_init_fn)
