"""A stream that comes in chunks, cut into the shares of one rank or of several: the plan applied to what was drawn."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ddp_patch.plan import Plan

__all__ = ["share"]

T = TypeVar("T")


def share(
    plans: Sequence[Plan], chunks: Iterable[list[T]], length: int, at_end: Callable[[int], None]
) -> Iterator[list[list[T]]]:
    """Yield each plan's items of a stream, chunk by chunk, then their padding.

    Args:
        plans: Which positions are whose; of one world.
        chunks: The stream, in chunks of whole rounds; only the last may be shorter.
        length: The stream's length, for ``layout="contiguous"``; interleaved, its end is found and not predicted.
        at_end: Called with the number of items that came: before any padding, and before the items of an incomplete
            round, so that every rank knows the end when some come to it.
    """
    kept = plans[0].num_replicas - 1  # padding repeats the stream's first items, and never more than these
    first: list[T] = []
    drawn, ended = 0, False
    for chunk in chunks:
        first += chunk[: kept - len(first)]
        start, drawn = drawn, drawn + len(chunk)
        if ended := len(chunk) % plans[0].num_replicas > 0:
            at_end(drawn)
        yield [chunk[plan.part(start, len(chunk), length)] for plan in plans]
    if not ended:
        at_end(drawn)
    yield [[first[position % drawn] for position in plan.padding(drawn)] for plan in plans]
