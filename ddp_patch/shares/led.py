"""How a pass gets its items if the ranks would draw different orders: the leader draws for all and sends them."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, TypeVar

import numpy as np

from ddp_patch.plan import Plan
from ddp_patch.ranks.leader import FIRST_PIECE, LARGEST_PIECE, Leader
from ddp_patch.shares.drawing import Epoch, Stream
from ddp_patch.shares.held import Held
from ddp_patch.shares.origins import Origins
from ddp_patch.shares.sources import Source

__all__ = ["Led"]

T = TypeVar("T")


class Led(Source[T]):
    """Gets this rank's items from the leader; on the leader, draws for all and sends every rank its share.

    Args:
        epoch: The epoch.
        leader: How the ranks communicate.
        turn: Tells which pass this is, to be compared between the ranks.
        plans: Every rank's, in the leader's order.
        held_before: What the samplers held before the pass.
        held_now: Tells what they hold.
        has_length: Whether the sampler says how many items it has.
    """

    length: int | None
    held_before: Held | None
    held_after: Held | None
    origins: Origins | None

    def __init__(
        self,
        epoch: Epoch[T],
        leader: Leader,
        turn: Callable[[], Mapping[str, object]],
        plans: Sequence[Plan],
        held_before: Held,
        held_now: Callable[[], Held],
        *,
        has_length: bool,
    ) -> None:
        self._leader, self._turn, self._plans, self._held_now = leader, turn, plans, held_now
        self._piece_sizes = _piece_sizes(epoch, has_length)
        self._waiting: list[list[int]] = [[] for _ in plans]
        # Begun with its first item: then the leader can report an error to the others.
        self._stream = Stream(epoch, chain(epoch.sampler), note_origins=partial(_wait, self._waiting))
        self.held_before = held_before
        self.origins = None if epoch.dealing is None else Origins()

    def parts(self, skip: int) -> Iterator[Sequence[T]]:
        """Yield what is sent, or on the leader this rank's part of what it draws."""
        shares = self._skipping(skip, self._sent(skip) if self._leader.draws else self._received())
        return shares if self.origins is None else self._noted(self.origins, shares)

    def _sent(self, skip: int) -> Iterator[list[Any]]:
        shares: Iterator[list[list[Any]]] = self._stream.shares(self._plans, skip, self._found)
        if self.origins is not None:
            shares = self._with_origins(shares)
        return self._leader.send(shares, self._turn(), self._note, *self._piece_sizes)

    def _received(self) -> Iterator[list[Any]]:
        return self._leader.receive(self._turn(), self._take_note)

    def _with_origins(self, shares: Iterator[list[list[T]]]) -> Iterator[list[list[tuple[int, T]]]]:
        """Pair each item with the position that it comes from: the others do not see the stream. Padding has -1."""
        for parts in shares:
            paired = []
            for part, waiting in zip(parts, self._waiting, strict=True):
                paired.append(list(zip(chain(waiting, repeat(-1)), part, strict=False)))
                del waiting[: len(part)]
            yield paired

    def _noted(self, origins: Origins, shares: Iterator[Sequence[Any]]) -> Iterator[list[T]]:
        for share in shares:
            origins.add(np.array([place for place, _ in share if place >= 0], np.int64))
            yield [item for _, item in share]

    def _note(self, is_last: bool) -> tuple[Held | None, Held | None, int | None]:
        """Return what the leader sends to the others, so that every rank knows the loader's position."""
        self.held_after = self._held_now() if is_last else None
        return self.held_before, self.held_after, self.length

    def _take_note(self, note: tuple[Held | None, Held | None, int | None]) -> None:
        self.held_before, self.held_after, self.length = note

    def ends_within(self, items: int) -> bool:
        """Return whether the last piece was sent: every rank learns of the end from the leader."""
        return self.held_after is not None


def _wait(of_members: Sequence[list[int]], of_plans: Sequence[Any]) -> None:
    """Keep where the next items of each share come from until these are sent."""
    for waiting, places in zip(of_members, of_plans, strict=True):
        waiting.extend(places.tolist())


def _piece_sizes(epoch: Epoch[Any], has_length: bool) -> tuple[int, int]:
    """Return how many items, all ranks' together, the leader's first message holds, and a later one at most."""
    if epoch.is_one_shot:
        return 1, 1  # which is a round: nothing is drawn ahead
    if epoch.plan.needs_length:
        # All at once: a rank whose run comes late must not wait for steps of the others.
        return sys.maxsize, sys.maxsize
    return LARGEST_PIECE if has_length else FIRST_PIECE, LARGEST_PIECE
