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
        iterator: What to draw from. An exception that it raises is raised unchanged, after the whole rounds that it
            gave before.
        rng: Entered for each chunk.
        round_size: Items in a round: one for each rank.
        most: How many samples may be drawn at once, where a round has fewer; an item is one, a batch as many as it has.
        copies: Whether an item that its source may change afterwards is copied.
    """
    largest = max(1, most // round_size) * round_size
    size, is_plain, ended = round_size, not copies, False
    while not ended:
        chunk: list[T] = []
        failure: Exception | None = None
        with rng:
            try:  # what comes before an exception stays in the chunk
                if is_plain:
                    chunk.extend(islice(iterator, size))
                    ended = len(chunk) < size
                else:
                    ended = _extend_by_rounds(chunk, iterator, size, round_size, most)
            except Exception as error:  # noqa: BLE001 - the user's own, raised again below
                failure = error
                del chunk[len(chunk) - len(chunk) % round_size :]  # an incomplete round means the end
        if chunk:
            yield chunk
        if failure is not None:
            raise failure
        if chunk and isinstance(chunk[0], _IMMUTABLE):
            is_plain = True  # a stream of indices needs no copies
        size = min(2 * size, largest)


def _extend_by_rounds(chunk: list[T], iterator: Iterator[T], size: int, round_size: int, most: int) -> bool:
    """Add copies of up to ``size`` items, of up to ``most`` samples, to the chunk; tell whether the end was met."""
    samples = latest = 0
    while len(chunk) < size and samples + latest <= most:
        before = len(chunk)
        chunk.extend(map(own, islice(iterator, round_size)))
        if len(chunk) - before < round_size:
            return True
        latest = sum(map(_samples, chunk[before:]))
        samples += latest
    return False


def _samples(item: Any) -> int:
    """How many samples an item is: as many as a batch has, and at least one."""
    try:
        return max(1, len(item))
    except TypeError:  # no batch, but a key
        return 1


def own(item: Any) -> Any:
    """Return a batch or key as it is now, out of reach of a sampler that uses the same object for the next one.

    Containers are copied, with what they contain; a tensor is cloned, an iterator is read into a list; anything else is
    the object itself.
    """
    if type(item) is list and item and isinstance(item[0], _IMMUTABLE) and isinstance(item[-1], _IMMUTABLE):
        return item[:]  # a batch of indices, as most are, needs no look at each
    match item:
        case torch.Tensor():
            return item.clone()
        case Iterator():
            return [own(part) for part in item]
        case list() if type(item) is list:
            return [own(part) for part in item]
        case tuple() if type(item) is tuple:
            return tuple(map(own, item))
        case dict() if type(item) is dict:
            return {key: own(value) for key, value in item.items()}
        case list() | dict() | set() | bytearray() | deque() | array() | np.ndarray():
            return copy.copy(item)
    return item
