"""Drawing a sampler: a stream of items in chunks of whole rounds, never a whole epoch."""

import copy
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

__all__ = ["MOST_AHEAD", "draw", "own"]

T = TypeVar("T")

# How many samples may be drawn ahead of the one in use, where a round has fewer: random states are swapped once per
# chunk, and a sampler that adapts while training runs must not be drawn far ahead.
MOST_AHEAD = 8192

# Of so many lists in a row, all different objects, it is taken that the sampler makes a new one for each batch.
_NEW_LISTS = 64

_IMMUTABLE = (int, float, str, bytes, np.generic)


def draw(
    iterator: Iterator[T],
    rng: AbstractContextManager[None],
    *,
    round_size: int,
    most: int = MOST_AHEAD,
    copies: bool = True,
) -> Iterator[list[T]]:
    """Yield the iterator's items in chunks, entering ``rng`` while each is drawn.

    Every chunk is a multiple of ``round_size`` items long but the last, which may be shorter and is never empty.
    Chunks begin with one round, so that the first batch comes at once, and double up to ``most`` samples.
    They depend on nothing but the stream: every rank draws the same ones at the same step.

    Args:
        iterator: What to draw from. An exception that it raises is raised unchanged, after what it gave before.
        rng: Entered for each chunk.
        round_size: Items in a round: one for each rank.
        most: How many samples may be drawn at once, where a round has fewer; an item is one, a batch as many as it has.
        copies: Whether an item that its source may change afterwards is copied.
    """
    size = round_size
    while True:
        chunk: list[T] = []
        failure: Exception | None = None
        with rng:
            try:
                if copies:
                    copies = _may_be_reused(_extend_by_copies(chunk, islice(iterator, size)))
                else:
                    chunk.extend(islice(iterator, size))  # what came before an exception stays in the list
            except Exception as error:  # noqa: BLE001 - the user's own, raised again below
                failure = error
        if chunk:
            yield chunk
        if failure is not None:
            raise failure
        if len(chunk) < size:
            return
        size = min(2 * size, max(1, most * size // _samples(chunk) // round_size) * round_size)


def _extend_by_copies(chunk: list[T], items: Iterator[T]) -> list[T]:
    """Add copies of the items to the chunk; return the items themselves."""
    originals = []
    for item in items:
        chunk.append(own(item))
        originals.append(item)
    return originals


def _may_be_reused(items: list[Any]) -> bool:
    """Tell whether a sampler that gave these may give one of the same objects, changed, again."""
    if items and isinstance(items[0], _IMMUTABLE):
        return False  # a stream of indices
    # While all are held, no two that are new can be one object.
    are_lists = all(type(item) is list and (not item or isinstance(item[0], _IMMUTABLE)) for item in items)
    return not are_lists or len({id(item) for item in items}) < max(_NEW_LISTS, len(items))


def _samples(chunk: list[Any]) -> int:
    """How many samples the items are: as many as a batch has, else one each."""
    if not isinstance(chunk[0], list | tuple):
        return len(chunk)
    return max(1, sum(len(item) if isinstance(item, list | tuple) else 1 for item in chunk))


def own(item: Any) -> Any:
    """Return a batch or key as it is now, out of reach of a sampler that uses the same object for the next one.

    Containers are copied, with what they contain; a tensor is cloned, an iterator is read into a list; anything else is
    the object itself.
    """
    match item:
        case torch.Tensor():
            return item.clone()
        case Iterator():
            return [own(part) for part in item]
        case list() if type(item) is list:
            # A batch of indices, as most are, needs no look at each.
            return item[:] if item and isinstance(item[0], _IMMUTABLE) else [own(part) for part in item]
        case tuple() if type(item) is tuple:
            return tuple(map(own, item))
        case dict() if type(item) is dict:
            return {key: own(value) for key, value in item.items()}
        case list() | dict() | set() | bytearray() | deque() | array() | np.ndarray():
            return copy.copy(item)
    return item
