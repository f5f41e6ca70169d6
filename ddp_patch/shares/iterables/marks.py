"""What a worker records for states: the stream's first items, and the dataset's own state."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, ref

from torch.utils.data import IterableDataset

from ddp_patch.compat.datasets import forget_loaded_state, loses_items_when_loaded
from ddp_patch.errors import StateError
from ddp_patch.options import Options
from ddp_patch.shares.iterables.board import FIRST, Board
from ddp_patch.shares.iterables.reading import Switching
from ddp_patch.shares.place import First, Mark
from ddp_patch.streams.fingerprint import fingerprint
from ddp_patch.streams.generators import generator_states, is_stateful
from ddp_patch.streams.item_hashes import ItemHashes, hashes_if_any

__all__ = ["Marker", "can_snapshot"]

T = TypeVar("T")

# The latest iterator of each dataset in this process: a dataset may give the same one again, which continues.
_LATEST: WeakKeyDictionary[Any, Callable[[], Any]] = WeakKeyDictionary()


def can_snapshot(dataset: object, options: Options) -> bool:
    """Return whether a dataset's own state is the position of a stream that is sharded in this way."""
    return (
        options.iterable_sharding == "exact"
        and not options.needs_length  # otherwise every rank is elsewhere
        and options.agreement != "ambient"
        and is_stateful(dataset)
        and not loses_items_when_loaded(dataset)
    )


class Marker:
    """Records how a worker's stream begins, and the dataset's own state.

    Args:
        dataset: The dataset that the user gave.
        board: Where to record it.
        number: The pass.
        reader: Which worker this is.
        states: The random states that the dataset draws from, if its own state may be taken; otherwise None.
    """

    def __init__(
        self, dataset: IterableDataset[Any], board: Board, number: int, reader: int, states: Switching | None
    ) -> None:
        self._dataset, self._board = dataset, board
        self._number, self._reader = number, reader
        self._states = states
        self._generators = generator_states([dataset]) if states is not None else ()
        self._is_over = self._is_drawn = False

    def begin(self) -> Iterator[Any]:
        """Begin to iterate the dataset; take no states of it if its iterator has one, which is the position then."""
        dataset = cast(Any, self._dataset)
        iterator: Iterator[Any] = iter(dataset)
        self._is_drawn = iterator is dataset or _is_again(dataset, iterator)
        if iterator is not dataset and is_stateful(iterator):
            self._states = None
        return iterator

    def begin_at(self, state: Any) -> Iterator[Any]:
        """Begin to iterate the dataset where its ``state_dict()`` was taken.

        One that is its own iterator may take a state before ``iter()`` or after it, as torchdata's loader gives it.

        Raises:
            StateError: It took it neither time.
        """
        dataset = cast(Any, self._dataset)
        dataset.load_state_dict(state)
        iterator: Any = iter(dataset)
        if iterator is dataset and not self._stands_at(state):
            dataset.load_state_dict(state)
            if not self._stands_at(state):
                raise StateError(
                    f"{type(dataset).__name__} cannot resume from the state: after load_state_dict() and iter(), its "
                    "state_dict() differs from the loaded one. Correct these methods, or leave them out: then its "
                    "stream is read again."
                )
        return cast(Iterator[Any], iterator)

    def _stands_at(self, state: Any) -> bool:
        return fingerprint([cast(Any, self._dataset).state_dict()]) == fingerprint([state])

    def watch(self, items: Iterator[T], mark: Mark) -> Iterator[T]:
        """Pass the items of a stream on that is read from its beginning.

        Raises:
            StateError: It does not begin as it did when a state was taken.
        """
        seen: list[ItemHashes] = []
        for item in items:
            seen.append(hashes_if_any(item))
            first = _first(seen)
            self._board.note_first(self._number, self._reader, first)
            known = mark.first
            if known is not None and known.seen == first.seen and not known.is_again(first, self._is_drawn):
                raise self._other_stream(mark)
            yield item
            if len(seen) == FIRST:
                break
        yield from self.follow(items)

    def first(self, items: Iterator[T], mark: Mark, count: int) -> list[T]:
        """Return this many of the first items of a stream; as ``watch``, raise StateError if it begins otherwise."""
        first = list(islice(self.watch(items, mark), count))
        if len(first) < count:
            raise self._other_stream(mark)
        return first

    def _other_stream(self, mark: Mark) -> StateError:
        count = mark.first.seen if mark.first else 0
        return StateError(
            f"{type(self._dataset).__name__} cannot resume from the state: its first {count} items differ from those "
            "when the state was taken, so the finished ones cannot be skipped. Restore the state with the same "
            "samples in the same order; rebuild a dataset that is its own iterator."
        )

    def follow(self, items: Iterator[T]) -> Iterator[T]:
        """Pass the items of a stream on that is not read from its beginning, or no longer."""
        for item in items:
            forget_loaded_state(self._dataset)
            yield item
            break
        yield from items
        self._is_over = True

    def snapshot(self) -> bytes | None:
        """Return the dataset's own state, pickled; None if that does not contain the stream's position.

        A dataset that drew from random states may have to draw the same again when it begins, or to continue with what
        comes next: its own state does not say which, so its stream is read again. At the end many start again.
        """
        if self._states is None or self._is_over or not self._states.are_unmoved:
            return None
        try:
            if generator_states([self._dataset]) != self._generators:
                return None
            return pickle.dumps(cast(Any, self._dataset).state_dict())
        except Exception:  # noqa: BLE001 - the user's code, without which the stream is read again
            return None


def _is_again(dataset: Any, iterator: Any) -> bool:
    """Return whether a dataset gave the same iterator before; remember it, without keeping it alive if possible."""
    try:
        before = _LATEST.get(dataset)
        try:
            _LATEST[dataset] = ref(iterator)
        except TypeError:  # as some written in C
            _LATEST[dataset] = lambda: iterator
    except TypeError:  # the dataset cannot be hashed
        return False
    return before is not None and before() is iterator


def _first(seen: list[ItemHashes]) -> First:
    wholes, names, numbers = zip(*seen, strict=True)
    return First(len(seen), _digest(wholes), _digest(names), _digest(numbers), len(set(wholes)))


def _digest(hashes: Sequence[int]) -> int:
    return int(fingerprint(hashes)[:15], 16) if all(hashes) else 0
