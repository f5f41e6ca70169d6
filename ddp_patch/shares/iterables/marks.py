"""What a worker notes of the stream that it reads, for states: how it begins, where the dataset says it stands."""

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ddp_patch.compat import forget_loaded_state, loses_items_when_loaded
from ddp_patch.errors import StateError
from ddp_patch.options import Options
from ddp_patch.shares.held import is_stateful
from ddp_patch.shares.iterables.board import FIRST, Board
from ddp_patch.shares.iterables.reading import Switching
from ddp_patch.shares.place import Mark
from ddp_patch.streams.fingerprint import Fingerprint, fingerprint
from ddp_patch.streams.generators import generator_states

__all__ = ["Marker", "can_snapshot"]

T = TypeVar("T")


def can_snapshot(dataset: object, options: Options) -> bool:
    """Tell whether a dataset's own state says where a stream stands that is shared in this way."""
    return (
        options.iterable_sharding == "exact"
        and options.layout == "interleaved"  # else every rank stands elsewhere
        and options.agreement != "ambient"
        and is_stateful(dataset)
        and not loses_items_when_loaded(dataset)
    )


class Marker:
    """Notes how the stream begins that a worker reads, and tells what the dataset says of where it stands.

    Args:
        dataset: The dataset that the user gave.
        board: Where to note it.
        number: The pass.
        reader: Which worker this is.
        states: The random states that the dataset draws from, if its own state may be taken; else None.
    """

    def __init__(
        self, dataset: IterableDataset[Any], board: Board, number: int, reader: int, states: Switching | None
    ) -> None:
        self._dataset, self._board = dataset, board
        self._number, self._reader = number, reader
        self._states = states
        self._generators = generator_states([dataset]) if states is not None else ()
        self._is_over = False

    def begin(self) -> Iterator[Any]:
        """Begin to iterate the dataset; take no states of it if its iterator has one, which then tells the place."""
        dataset = cast(Any, self._dataset)
        iterator: Iterator[Any] = iter(dataset)
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
                    f"{type(dataset).__name__} cannot go on from the state: after load_state_dict() and iter(), its "
                    "state_dict() is another one than was loaded. Correct these methods, or leave them out: then its "
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
        is_strict = isinstance(self._dataset, Iterator)
        running = Fingerprint()
        for count, item in enumerate(items, start=1):
            running.add([item if is_strict else _outline(item)])
            digest = int(running.hexdigest()[:15], 16)
            self._board.note_first(self._number, self._reader, count, digest)
            if mark.first is not None and mark.first[0] == count and mark.first[1] != digest:
                raise self._other_stream(mark)
            yield item
            if count == FIRST:
                break
        yield from self.follow(items)

    def first(self, items: Iterator[T], mark: Mark, count: int) -> list[T]:
        """Return so many of the first items of a stream; as ``watch``, raise StateError if it begins otherwise."""
        first = list(islice(self.watch(items, mark), count))
        if len(first) < count:
            raise self._other_stream(mark)
        return first

    def _other_stream(self, mark: Mark) -> StateError:
        count = mark.first[0] if mark.first else 0
        return StateError(
            f"{type(self._dataset).__name__} cannot go on from the state: its stream does not begin with the {count} "
            "items that it began with when the state was taken, so what was done of it cannot be left out. Restore "
            "the state with the same samples in the same order; make a dataset anew that is its own iterator."
        )

    def follow(self, items: Iterator[T]) -> Iterator[T]:
        """Pass the items of a stream on that is not read from its beginning, or no longer."""
        for item in items:
            forget_loaded_state(self._dataset)
            yield item
            break
        yield from items
        self._is_over = True

    def snapshot(self) -> tuple[Any, ...]:
        """Return the dataset's own state as the only element; none where that does not tell where the stream stands.

        A dataset that drew from random states may have to draw the same again when it begins, or to go on with what
        comes next: its own state does not say which, so its stream is read again. At the end many begin anew.
        """
        if self._states is None or self._is_over or not self._states.are_unmoved:
            return ()
        try:
            if generator_states([self._dataset]) != self._generators:
                return ()
            return (pickle.loads(pickle.dumps(cast(Any, self._dataset).state_dict())),)  # noqa: S301 - a copy of it
        except Exception:  # noqa: BLE001 - the user's code, without which the stream is read again
            return ()


def _outline(item: Any) -> Any:
    """Return what stays of an item when it is augmented in another way: no floats, no contents of tensors."""
    match item:
        case float() | complex() | np.floating() | np.complexfloating() | torch.Tensor() | np.ndarray():
            return type(item).__name__
        case Mapping():
            return {key: _outline(value) for key, value in item.items()}
        case list() | tuple():
            return [_outline(part) for part in item]
        case _ if is_dataclass(item) and not isinstance(item, type):
            return [_outline(getattr(item, field.name)) for field in fields(item)]
    return item
