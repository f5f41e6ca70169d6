"""Draw a sampler in chunks of whole rounds, never a whole epoch at once."""

import copy
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import islice
from types import WrapperDescriptorType
from typing import Any, TypeVar

import numpy as np
import torch

__all__ = ["MOST_AHEAD", "begun", "draw", "own", "returns_itself"]

T = TypeVar("T")

# How many samples may be drawn ahead of the one in use, unless a round has more. Large chunks swap random states less
# often, but a sampler that adapts during training must not be drawn far ahead.
MOST_AHEAD = 8192

_IMMUTABLE = (int, float, str, bytes, np.generic)


def returns_itself(iterator: object) -> bool:
    """Tell whether ``iter(iterator)`` surely does nothing: it is written in C, as a generator's or a list's is."""
    return isinstance(getattr(type(iterator), "__iter__", None), WrapperDescriptorType)


def begun(iterable: Iterable[T]) -> Iterator[T]:
    """Begin an iterable, and return what draws from it by ``next()`` alone.

    ``for``, ``islice`` and ``chain`` call ``iter()`` on what they draw from, and a sampler that is its own iterator may
    begin anew at every such call: each of lhotse's does.
    """
    iterator = iter(iterable)
    return iterator if returns_itself(iterator) else _by_next(iterator)


def _by_next(iterator: Iterator[T]) -> Iterator[T]:
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item


def draw(
    iterator: Iterator[T],
    rng: AbstractContextManager[None],
    *,
    round_size: int,
    most: int = MOST_AHEAD,
    copies: bool = True,
) -> Iterator[list[T]]:
    """Yield the iterator's items in chunks, entering ``rng`` while drawing each.

    Every chunk's length is a multiple of ``round_size``, except that the last may be shorter; none is empty. The first
    chunk is one round, so that the first batch comes at once; each next one is twice as long, up to ``most`` samples.
    Chunks depend only on the stream, so every rank draws the same ones at the same step.

    Args:
        iterator: What to draw from, as ``begun`` returns it. If it raises an exception, the whole rounds that came
            before are yielded first, and then the exception is raised unchanged.
        rng: Entered for each chunk.
        round_size: Items in a round: one for each rank.
        most: The most samples to draw at once, unless a round has more. An index is one sample, a batch as many as it
            holds.
        copies: Whether to copy items that their source may change later.
    """
    largest = max(1, most // round_size) * round_size
    size, is_plain, ended = round_size, not copies, False
    while not ended:
        chunk: list[T] = []
        failure: Exception | None = None
        with rng:
            try:  # keep what comes before an exception
                if is_plain:
                    chunk.extend(islice(iterator, size))
                    ended = len(chunk) < size
                else:
                    ended = _extend_by_rounds(chunk, iterator, size, round_size, most)
            except Exception as error:  # noqa: BLE001 - the user's own, raised again below
                failure = error
                del chunk[len(chunk) - len(chunk) % round_size :]  # an incomplete round would mean the end
        if chunk:
            yield chunk
        if failure is not None:
            raise failure
        if chunk and isinstance(chunk[0], _IMMUTABLE):
            is_plain = True  # a stream of indices needs no copies
        size = min(2 * size, largest)


def _extend_by_rounds(chunk: list[T], iterator: Iterator[T], size: int, round_size: int, most: int) -> bool:
    """Add copies of up to ``size`` items, of up to ``most`` samples, to the chunk; return whether the stream ended."""
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
    """Return how many samples an item is: a batch's length, or 1 for an empty batch or a key."""
    try:
        return max(1, len(item))
    except TypeError:  # a key, not a batch
        return 1


def own(item: Any) -> Any:
    """Return a copy of a batch or key, because its sampler may reuse the object for the next one.

    Copy containers with their contents, clone tensors, read iterators into lists; return anything else as it is.
    """
    if type(item) is list and item and isinstance(item[0], _IMMUTABLE) and isinstance(item[-1], _IMMUTABLE):
        return item[:]  # most batches hold plain indices: don't look at each
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
