"""Sum a number over the ranks in every step of a pass."""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ddp_patch.ranks.channel import Channel, opened

__all__ = ["StepSums", "opened_sums"]


class _Sum(NamedTuple):
    value: float
    is_over: bool  # whether no rank has a step any more


class StepSums:
    """Sums over the ranks, one a step. Ranks may make different numbers of steps."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def of(self, value: float) -> float:
        """Return the sum of all ranks' values of this step.

        Raises:
            RankMismatchError: A rank broke off or failed.
            MissingRanksError: A rank did not come to this step in time.
        """
        return self._next(value, has_step=True).value

    def finish(self) -> None:
        """Take part in the other ranks' steps until no rank has one."""
        while not self._next(0.0, has_step=False).is_over:
            pass

    def _next(self, value: float, *, has_step: bool) -> _Sum:
        (bits,) = struct.unpack("q", struct.pack("d", value))
        self._channel.say([bits, has_step])
        said = self._channel.heard()
        values = struct.unpack(f"{len(said)}d", struct.pack(f"{len(said)}q", *(row[0] for row in said)))
        self._channel.given += has_step
        return _Sum(sum(values), not any(row[1] for row in said))


@contextmanager
def opened_sums(
    members: Sequence[int], doing: str, facts: Mapping[str, object], timeout: float, stale: list[str]
) -> Iterator[StepSums]:
    """Meet the other ranks, and connect with them for a pass; see ``opened``."""
    with opened(members, doing, facts, timeout, stale) as channel:
        sums = StepSums(channel)
        yield sums
        sums.finish()
