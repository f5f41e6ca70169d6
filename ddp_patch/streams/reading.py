"""How a dataset is begun in a pass: anew, or where its own state was taken; and by what its stream is recognised."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, ref

from torch.utils.data import get_worker_info

from ddp_patch.compat.packages import loses_items_when_loaded
from ddp_patch.errors import StateError
from ddp_patch.options import Options
from ddp_patch.orders.digest import fingerprint, number_of
from ddp_patch.orders.random_states import is_stateful, look
from ddp_patch.sharding.saved_state import StreamStart

__all__ = ["begun_anew", "begun_at", "can_snapshot", "is_again", "start_of", "tell_epoch", "this_worker"]


T = TypeVar("T")

# The latest iterator of each dataset in this process: a dataset may give the same one again, which continues.
_LATEST_ITERATORS: WeakKeyDictionary[Any, Callable[[], Any]] = WeakKeyDictionary()


def this_worker() -> tuple[int, int]:
    """Return which worker of how many this is; the main process is the only one."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def tell_epoch(dataset: object, epoch: int) -> None:
    """Tell a dataset its epoch, if it has a method for that."""
    if callable(tell := getattr(dataset, "set_epoch", None)):
        tell(epoch)


def can_snapshot(dataset: object, options: Options) -> bool:
    """Return whether a dataset's own state is the position of a stream that is sharded in this way."""
    return not options.by_worker and is_stateful(dataset) and not loses_items_when_loaded(dataset)


def begun_anew(dataset: Any, initial_state: Sequence[Any], epoch: int) -> tuple[Iterator[Any], Iterator[Any]]:
    """Begin a dataset where an epoch begins; return its iterator, and what to read.

    Args:
        dataset: The dataset.
        initial_state: Its own state where the epoch begins, as the only element, if that is known.
        epoch: The epoch.
    """
    is_moved = initial_state and not _stands_at(dataset, *initial_state)  # it was read since
    if is_moved:
        # Its state may have random states, from which the epoch does not draw. One that takes a state only once it is
        # iterated begins anew by itself.
        with look(), suppress(Exception):
            dataset.load_state_dict(*initial_state)
        tell_epoch(dataset, epoch)  # the state may have the epoch before
    iterator: Iterator[Any] = iter(dataset)
    return iterator, _anew_if_empty(dataset, iterator) if is_moved else iterator


def begun_at(dataset: Any, state: Any) -> Iterator[Any]:
    """Begin a dataset where its own state was taken.

    If it is its own iterator, load the state before ``iter()`` and, if that had no effect, again after it.

    Raises:
        StateError: It took it neither time.
    """
    refused: Exception | None = None
    try:
        dataset.load_state_dict(state)
    except Exception as error:  # noqa: BLE001 - the user's, which may have nothing yet to put the state into
        refused = error
    iterator = iter(dataset)
    if refused is not None and iterator is not dataset:
        raise refused
    if iterator is dataset and not _stands_at(dataset, state):
        dataset.load_state_dict(state)
        if not _stands_at(dataset, state):
            raise StateError(
                f"{type(dataset).__name__} cannot resume from the state: after load_state_dict() and iter(), its "
                "state_dict() differs from the loaded one. Correct these methods, or leave them out: then its "
                "stream is read again."
            )
    return cast(Iterator[Any], iterator)


def _stands_at(dataset: Any, state: Any) -> bool:
    try:
        return fingerprint([dataset.state_dict()]) == fingerprint([state])
    except Exception:  # noqa: BLE001 - the user's, which may tell a state only once it is iterated
        return False


def _anew_if_empty(dataset: Any, iterator: Iterator[T]) -> Iterator[T]:
    """Yield the items of a dataset that was given a state; if that was of its end, those after that."""
    is_empty = True
    for _ in range(2):
        with suppress(StopIteration):
            while True:  # by next() alone: iter() might begin its own iterator anew
                item = next(iterator)
                is_empty = False
                yield item
        if not is_empty:
            return
        iterator = iter(dataset)


def is_again(dataset: Any, iterator: Any) -> bool:
    """Return whether a dataset gave the same iterator before; remember it, without keeping it alive if possible."""
    try:
        before = _LATEST_ITERATORS.get(dataset)
        try:
            _LATEST_ITERATORS[dataset] = ref(iterator)
        except TypeError:  # as some written in C
            _LATEST_ITERATORS[dataset] = lambda: iterator
    except TypeError:  # the dataset cannot be hashed
        return False
    return before is not None and before() is iterator


def start_of(seen: Sequence[tuple[bytes | None, int]]) -> StreamStart:
    """Return how a stream begins, by the names and hashes of its first items."""
    names, hashes = zip(*seen, strict=True)
    value = None if None in names else number_of(names)
    return StreamStart(len(seen), value, number_of(hashes) if len(set(hashes)) >= min(2, len(seen)) else None)
