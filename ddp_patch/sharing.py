"""One rank's share of a stream that comes in chunks: the plan applied to what was drawn."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ddp_patch.plan import Plan

__all__ = ["share"]

T = TypeVar("T")


def share(plan: Plan, chunks: Iterable[list[T]], length: int, at_end: Callable[[int], None]) -> Iterator[list[T]]:
    """Yield this rank's items of a stream, chunk by chunk, then its padding.

    Args:
        plan: Which positions are this rank's.
        chunks: The stream, in chunks of whole rounds; only the last may be shorter.
        length: The stream's length, for ``layout="contiguous"``; interleaved, its end is found and not predicted.
        at_end: Called with the number of items that came, before any padding.
    """
    first: list[T] = []  # padding repeats the stream's first items, and never more than these
    drawn = 0
    for chunk in chunks:
        first += chunk[: plan.num_replicas - 1 - len(first)]
        yield chunk[plan.part(drawn, len(chunk), length)]
        drawn += len(chunk)
    at_end(drawn)
    yield [first[position % drawn] for position in plan.padding(drawn)]
