"""What stands in a loader for an iterable dataset: one rank's share of it, and its items in a pass."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from ddp_patch.errors import StateError
from ddp_patch.orders.generators import random_generators
from ddp_patch.orders.random_states import EpochCounter
from ddp_patch.sharding.sampler import AttributeProxy
from ddp_patch.streams.worker import StreamWorker, WorkerPosition
from ddp_patch.streams.worker_pass import WorkerPass

__all__ = ["ShardedIterable", "begin_worker"]


T = TypeVar("T")

_KEY = "ddp_patch"


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
    """

    _inner, _kept_as = "dataset", "_dataset"
    # A position in the whole stream is none in this share, so the dataset's state is not this one's.
    _hidden = frozenset({"state_dict", "load_state_dict"})

    def __init__(self, worker: StreamWorker[T]) -> None:
        self._dataset, self._worker = worker.dataset, worker
        self._seal()

    @property
    def dataset(self) -> Any:
        """The user's dataset's, as in one process; if it has none, that dataset."""
        return getattr(self._dataset, "dataset", self._dataset)

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return partial(self._worker.choose_epoch, found) if name == "set_epoch" and callable(found) else found

    def collate_with_notes(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a ``collate_fn`` with whose batches travels what workers note of them."""
        return partial(self._worker.collate, collate_fn)

    def require_no_generator(self) -> None:
        """Refuse to save a state where persistent workers draw from generators that the user's dataset holds."""
        if random_generators([self._dataset]):
            raise StateError(
                f"The state of {type(self._dataset).__name__} cannot be saved: it has a random generator, and "
                "persistent workers advance copies of it. Use persistent_workers=False."
            )

    def __len__(self) -> int:
        return self._worker.share_length()

    def __iter__(self) -> Iterator[T]:
        return WorkerIterator(self._worker)


def begin_worker(worker_init_fn: Callable[[int], object] | None, epochs: EpochCounter, worker_id: int) -> None:
    """Prepare a worker's copy of the sharded dataset, and call the user's ``worker_init_fn``.

    The user's function may call ``get_worker_info()``: it sees the user's dataset, and the worker that will read it.

    Args:
        worker_init_fn: The user's function, or None.
        epochs: Tells for which pass the worker is started, and over which epoch that is.
        worker_id: Which worker it is.
    """
    info: Any = get_worker_info()
    info.dataset._worker.prepare(epochs.passes + 1, epochs.upcoming, worker_init_fn)


class WorkerIterator(Iterator[T]):
    """A worker's items in one pass. Nothing is read before the first is asked for.

    torchdata's loader saves and resumes it in the worker by its ``state_dict``, where it would else count items from
    the pass's beginning, and lose some at the second stop.

    Args:
        worker: What reads them.
    """

    def __init__(self, worker: StreamWorker[T]) -> None:
        self._worker = worker
        self._items: Iterator[T] | None = None
        self._loaded: WorkerPosition | None = None
        self._pass: WorkerPass[T] | None = None

    def __next__(self) -> T:
        if self._items is None:
            self._pass = WorkerPass(self._worker, *self._worker.begin(self._loaded))
            self._items = self._pass.items()
        return next(self._items)

    def state_dict(self) -> dict[str, Any]:
        """Return its position, as the only value."""
        if self._pass is not None:
            return {_KEY: self._pass.position().plain()}
        return {_KEY: (self._loaded or self._worker.position_unbegun()).plain()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make it begin where ``state_dict`` was called.

        Raises:
            StateError: It is no such state, or one of another version of this package.
        """
        if _KEY not in state_dict:
            raise StateError(
                f"The state of a worker's iterator has no {_KEY!r}, so it was taken from an unpatched loader. Restore "
                "it with that loader, or take one from the patched loader."
            )
        self._loaded = WorkerPosition.of(state_dict[_KEY])
        self._worker.note_loaded(self._loaded)
