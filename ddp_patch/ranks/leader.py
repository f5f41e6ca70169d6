"""Rank 0 draws an epoch, and sends its order to every rank."""

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from ddp_patch.errors import LeaderError
from ddp_patch.ranks.exchange import exchange, require_same
from ddp_patch.ranks.packing import packed, unpacked

__all__ = ["Leader"]


T = TypeVar("T")

_SENDING = "Sending every rank the order of an epoch"


@dataclass(frozen=True, slots=True)
class Leader:
    """Draws an epoch for all members, and sends it piece by piece; each piece is one exchange.

    In an exchange, every rank says which pass it is in, and is answered with the next piece. So each piece reveals a
    rank that is missing or in another pass, and no pass can take a piece that another left unread.

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

    def sent(self, facts: Callable[[], Mapping[str, object]], pieces: Iterator[T]) -> Iterator[T]:
        """Yield, on every rank, the pieces that the leader draws; nothing is taken of other ranks'.

        Args:
            facts: Tells which pass this is.
            pieces: What the leader draws, without end.

        Raises:
            Exception: What drawing raises, on the leader.
            LeaderError: Drawing raised an error on the leader.
            RankMismatchError: A rank is in another pass.
            MissingRanksError: A rank did not arrive in time or is gone.
        """
        while True:
            failure: BaseException | None = None
            try:
                piece = exchange(self.members, _SENDING, facts(), partial(self._next, pieces), self.timeout)
            except LeaderError as error:
                failure = error.__cause__ or error
            if failure is not None:
                raise failure
            yield unpacked(b64decode(piece))  # the keys of users' datasets are any objects

    def _next(self, pieces: Iterator[Any], of_ranks: Mapping[int, Mapping[str, object]]) -> str:
        """Draw the next piece once every rank asks for it."""
        require_same(_SENDING, of_ranks)
        try:
            return b64encode(packed(next(pieces))).decode()
        except Exception as error:
            raise LeaderError(
                f"Rank {self.members[0]} draws for all ranks, and its sampler raised {error!r}, so no rank can "
                "continue. See the error of that rank."
            ) from error
