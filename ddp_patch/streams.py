"""Drawing a sampler: a stream of items in chunks of whole rounds, never a whole epoch."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from typing import TypeVar

__all__ = ["draw"]

T = TypeVar("T")

# How many items may be drawn ahead of the one in use, where a round is smaller: random states are swapped once
# per chunk, and a sampler that adapts while training runs must not be drawn far ahead.
MOST_AHEAD = 4096


def draw(
    iterator: Iterator[T], rng: AbstractContextManager[None], *, round_size: int, ahead: bool
) -> Iterator[list[T]]:
    """Yield the iterator's items in chunks, entering ``rng`` while each is drawn.

    Every chunk is a multiple of ``round_size`` items long but the last, which may be shorter and is never empty.
    Chunks begin with one round, so that the first batch comes at once, and double up to ``MOST_AHEAD`` items.
    They depend on nothing but the position in the stream: every rank draws the same ones at the same step.

    Args:
        iterator: What to draw from. An exception that it raises is raised unchanged, after what it gave before.
        rng: Entered for each chunk.
        round_size: Items in a round: one for each rank.
        ahead: Whether more than one round may be drawn at once.
    """
    most = max(1, MOST_AHEAD // round_size) * round_size if ahead else round_size
    size = round_size
    while True:
        chunk: list[T] = []
        failure: Exception | None = None
        with rng:
            try:
                chunk.extend(islice(iterator, size))  # what came before an exception stays in the list
            except Exception as error:  # noqa: BLE001 - the user's own, raised again below
                failure = error
        if chunk:
            yield chunk
        if failure is not None:
            raise failure
        if len(chunk) < size:
            return
        size = min(2 * size, most)
