"""Rank 0 draws for all and sends every rank its share."""

import pickle
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ddp_patch.errors import LeaderError, MissingRanksError, RankMismatchError
from ddp_patch.world import World

__all__ = ["FIRST_PIECE", "LARGEST_PIECE", "Leader"]

T = TypeVar("T")

# How many items a message may hold, all ranks' together: an ordinary epoch is one message. A stream of unknown length
# begins with the smaller number, because it may be slow or without end.
LARGEST_PIECE, FIRST_PIECE = 2**20, 2**12

_MORE, _LAST, _FAILED = "more", "last", "failed"


class Leader:
    """A group of its own, of gloo, over which the first rank of a world sends each what is its.

    Its own, so that its messages cannot mix with the training's; of gloo, so that indices need no accelerator and keys
    of any type can be sent, whatever the training's backend is. Every message says which pass it belongs to, so a rank
    that is in another one is told, and takes nothing that is not its.
    """

    def __init__(self, world: World, timeout: float) -> None:
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.first, *_ = self.members = list(world.members or ())
        try:
            self.group = self._new_group()
        except RuntimeError as error:  # torch has no narrower one
            raise MissingRanksError(
                f"The ranks {self.members} could not form a group, over which rank {self.first} is to send each its "
                f"share: one is gone, or they are in different numbers of process groups ({error}). Look for a rank "
                "that has ended, or make the same groups on all of them before."
            ) from error

    def _new_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            self.members,
            backend="gloo",
            timeout=timedelta(seconds=self.timeout),
            # For when only some ranks call this. torch then names the group by how many groups a rank is in, which must
            # be the same on each; where all ranks call, it need not.
            use_local_synchronization=len(self.members) < dist.get_world_size(),
            sort_ranks=False,  # the first member is the group's rank 0
        )
        return group

    def send(self, of_all: Iterator[Sequence[Sequence[T]]], turn: object, first_piece: int) -> Iterator[list[T]]:
        """Send every member its share of each piece; yield this rank's own.

        Args:
            of_all: The stream in parts, each with one sequence for every member.
            turn: Which pass this is.
            first_piece: How many items, all ranks' together, the first message is to hold.
        """
        pieces = _pieces(of_all, len(self.members), first_piece)
        while True:
            try:
                shares, is_last = next(pieces)
                sent = [pickle.dumps(share) for share in shares]
            except Exception as error:
                self._scatter([(turn, _FAILED, repr(error))] * len(self.members))
                raise
            self._scatter([(turn, _LAST if is_last else _MORE, share) for share in sent])
            yield shares[0]
            if is_last:
                return

    def receive(self, turn: object) -> Iterator[list[T]]:
        """Yield this rank's share of each piece that is sent.

        Raises:
            LeaderError: Drawing raised on the first rank, where that error itself is raised.
            RankMismatchError: The first rank is in another pass.
            MissingRanksError: A rank did not come in time or is gone.
        """
        while True:
            sent_turn, kind, content = self._scatter(None)
            if sent_turn != turn:
                raise RankMismatchError(
                    f"Rank {self.rank} begins {turn} and rank {self.first}, which draws for all, is in {sent_turn}: "
                    "one of them has iterated the loader where the other has not. Iterate it on every rank alike."
                )
            if kind == _FAILED:
                raise LeaderError(
                    f"Rank {self.first}, which draws for all, could not: its sampler raised {content}. See its error; "
                    "no other rank can go on."
                )
            yield pickle.loads(content)  # noqa: S301 - our own first rank's
            if kind == _LAST:
                return

    def _scatter(self, messages: list[Any] | None) -> Any:
        received: list[Any] = [None]
        try:
            dist.scatter_object_list(received, messages, group=self.group, group_src=0)
        except RuntimeError as error:  # gloo has no narrower one
            raise MissingRanksError(
                f"Rank {self.rank} waited up to {self.timeout:g} s for rank {self.first} to send every rank its "
                f"share, and a rank did not come or is gone ({error}). Look for what the other ranks do instead (an "
                "error, fewer steps), or pass a longer timeout=."
            ) from error
        return received[0]


def _pieces(of_all: Iterator[Sequence[Sequence[T]]], members: int, most: int) -> Iterator[tuple[list[list[T]], bool]]:
    """Join parts into pieces of about ``most`` items, twice as many each time, and tell which piece is the last."""
    ended = False
    while not ended:
        piece: list[list[T]] = [[] for _ in range(members)]
        size = 0
        while size < most and not ended:
            shares = next(of_all, None)
            ended = shares is None
            for mine, more in zip(piece, shares or (), strict=False):
                mine += more
                size += len(more)
        yield piece, ended
        most = max(most, min(2 * most, LARGEST_PIECE))
