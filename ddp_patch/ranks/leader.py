"""Rank 0 draws an epoch, and sends every rank its share."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4

import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import LeaderError
from ddp_patch.ranks.exchange import exchange, joined, require_same, sliced, store_reached
from ddp_patch.ranks.packing import packed, unpacked

__all__ = ["FIRST_PIECE", "LARGEST_PIECE", "Leader", "in_pieces"]


T = TypeVar("T")

# The most items in a message, all ranks' together. An ordinary epoch is one message. A stream of unknown length starts
# with the smaller number, because it may be slow or endless.
LARGEST_PIECE, FIRST_PIECE = 2**20, 2**12

# Each member's items, the note sent with them, and whether they are the last.
Piece: TypeAlias = tuple[list[list[T]], Any, bool]

_SENDING = "Sending every rank its share"


@dataclass(frozen=True, slots=True)
class Leader:
    """Sends each member its share of an epoch, piece by piece; each piece is one exchange.

    In an exchange, every rank says which pass it is in, and hears where in the store its share of the piece is. So each
    piece reveals a rank that is missing or in another pass, and no pass can take a piece that another left unread.

    Attributes:
        members: The global ranks; the first draws.
        timeout: How many seconds they wait for each other.
    """

    members: Sequence[int]
    timeout: float

    @property
    def is_leader(self) -> bool:
        """Whether this rank draws for all."""
        return dist.get_rank() == self.members[0]

    def shares(self, facts: Mapping[str, object], pieces: Iterator[Piece[T]]) -> Iterator[tuple[list[T], Any]]:
        """Yield this rank's share of each piece, and the note sent with it.

        Args:
            facts: Which pass this is.
            pieces: What the leader draws; nothing is taken of other ranks'.

        Raises:
            Exception: What drawing raises, on the leader.
            LeaderError: Drawing raised an error on the leader.
            RankMismatchError: A rank is in another pass.
            MissingRanksError: A rank did not arrive in time or is gone.
        """
        store: Any = default_store()
        is_last = False
        while not is_last:
            failure: BaseException | None = None
            try:
                base = exchange(self.members, _SENDING, facts, partial(self._next, pieces), self.timeout)
            except LeaderError as error:
                failure = error.__cause__ or error
            if failure is not None:
                raise failure
            key = f"{base}/{dist.get_rank()}"
            with store_reached(_SENDING):
                data, keys = joined(store, key, store.get(key))
                for each in keys:
                    store.delete_key(each)
            share, note, is_last = unpacked(data)  # the keys of users' datasets are any objects
            yield share, note

    def _next(self, pieces: Iterator[Piece[T]], of_ranks: Mapping[int, Mapping[str, object]]) -> str:
        """Draw the next piece once every rank asks for it, and return where in the store all ranks' shares are."""
        require_same(_SENDING, of_ranks)
        base, sent = f"ddp_patch/shares/{uuid4().hex}", dict[str, bytes]()
        try:
            shares, note, is_last = next(pieces)
            for rank, own in zip(self.members, shares, strict=True):
                sent |= sliced(f"{base}/{rank}", packed((own, note, is_last)))
        except Exception as error:
            raise LeaderError(
                f"Rank {self.members[0]} draws for all ranks, and its sampler raised {error!r}, so no rank can "
                "continue. See the error of that rank."
            ) from error
        store: Any = default_store()
        store.multi_set([*sent], [*sent.values()])
        return base


def in_pieces(
    of_all: Iterator[Sequence[Sequence[T]]], note: Callable[[bool], Any], count: int, most: int, largest: int
) -> Iterator[Piece[T]]:
    """Join parts of a stream into pieces, doubling up to a largest.

    Every piece but the last has equally many items for each member, so all need the next piece at the same step.

    Args:
        of_all: The stream in parts, each with one sequence for every member.
        note: Returns the note to send with a piece; called with whether the piece is the last.
        count: How many members there are.
        most: About how many items, all ranks' together, the first piece has.
        largest: How many a later one may have.
    """
    ended = False
    while not ended:
        piece: list[list[T]] = [[] for _ in range(count)]
        while not ended and (sum(map(len, piece)) < most or len(set(map(len, piece))) > 1):
            shares = next(of_all, None)
            ended = shares is None
            for mine, more in zip(piece, shares or (), strict=False):
                mine += more
        yield piece, note(ended), ended
        most = min(2 * most, largest)
