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

__all__ = ["FIRST_PIECE", "LARGEST_PIECE", "Leader"]


T = TypeVar("T")

# The most items in a message, all ranks' together. An ordinary epoch is one message. A stream of unknown length starts
# with the smaller number, because it may be slow or endless.
LARGEST_PIECE, FIRST_PIECE = 2**20, 2**12

# Each member's items, the note sent with them, and whether they are the last.
_Piece: TypeAlias = tuple[list[list[Any]], Any, bool]

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

    def send(
        self,
        of_all: Iterator[Sequence[Sequence[T]]],
        facts: Mapping[str, object],
        note: Callable[[bool], Any],
        first_piece: int,
        largest_piece: int = LARGEST_PIECE,
    ) -> Iterator[list[T]]:
        """Send every member its share of each piece, and yield this rank's own.

        Args:
            of_all: The stream in parts, each with one sequence for every member.
            facts: Which pass this is.
            note: Returns the note to send with a piece; called with whether the piece is the last.
            first_piece: How many items, all ranks' together, the first message should hold.
            largest_piece: How many items a later message may hold.

        Raises:
            Exception: What drawing the stream raises. The other ranks get a LeaderError.
        """
        pieces = _pieces(of_all, len(self.members), first_piece, largest_piece)
        try:
            for share, _ in self._shares(facts, ((piece, note(is_last), is_last) for piece, is_last in pieces)):
                yield share
            return
        except LeaderError as error:
            failure = error.__cause__ or error
        raise failure

    def receive(self, facts: Mapping[str, object], take_note: Callable[[Any], object]) -> Iterator[list[Any]]:
        """Yield this rank's share of each piece, after passing the piece's note to ``take_note``.

        Raises:
            LeaderError: Drawing raised an error on the first rank, which raises that error itself.
            RankMismatchError: A rank is in another pass.
            MissingRanksError: A rank did not arrive in time or is gone.
        """
        for share, note in self._shares(facts, iter(())):
            take_note(note)
            yield share

    def _shares(self, facts: Mapping[str, object], pieces: Iterator[_Piece]) -> Iterator[tuple[list[Any], Any]]:
        store: Any = default_store()
        is_last = False
        while not is_last:
            base = exchange(self.members, _SENDING, facts, partial(self._next, pieces), self.timeout)
            key = f"{base}/{dist.get_rank()}"
            with store_reached(_SENDING):
                data, keys = joined(store, key, store.get(key))
                for each in keys:
                    store.delete_key(each)
            share, note, is_last = unpacked(data)  # the keys of users' datasets are any objects
            yield share, note

    def _next(self, pieces: Iterator[_Piece], of_ranks: Mapping[int, Mapping[str, object]]) -> str:
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


def _pieces(
    of_all: Iterator[Sequence[Sequence[T]]], count: int, most: int, largest: int
) -> Iterator[tuple[list[list[T]], bool]]:
    """Join parts into pieces of about ``most`` items, doubling up to ``largest``; say with each if it is the last.

    Every piece but the last has equally many items for each member, so all need the next piece at the same step.
    """
    ended = False
    while not ended:
        piece: list[list[T]] = [[] for _ in range(count)]
        while not ended and (sum(map(len, piece)) < most or len(set(map(len, piece))) > 1):
            shares = next(of_all, None)
            ended = shares is None
            for mine, more in zip(piece, shares or (), strict=False):
                mine += more
        yield piece, ended
        most = min(2 * most, largest)
