"""Compare how many batches ranks are given of a pass whose end nobody knows before."""

from collections.abc import Mapping
from time import perf_counter, sleep
from typing import NamedTuple

from ddp_patch.ranks.notices import Letters, Peers

__all__ = ["StepCounts"]

# Who comes to the end waits at most so long for ranks that may be given more: with DDP they are a step behind at most.
_MOMENT_S, _AGAIN_S = 1.0, 0.002
# The first steps are all told. Later ones may take one part in so many of the time.
_FREE, _TIMES_THEIR_COST = 1000, 100


class _Count(NamedTuple):
    """How many batches a rank was given.

    Attributes:
        epoch: Of which epoch.
        which: Which pass over it, the same on all ranks.
        batches: How many.
        is_over: Whether there are no more.
    """

    epoch: int
    which: str
    batches: int
    is_over: bool

    @classmethod
    def decoded(cls, text: bytes) -> "_Count":
        epoch, which, batches, is_over = text.decode().split("|")
        return cls(int(epoch), which, int(batches), is_over == "1")

    def may_grow_to(self, mine: "_Count") -> bool:
        """Return whether the rank may still be given as many batches of a pass as this one."""
        return self.epoch < mine.epoch or (self[:2] == mine[:2] and not self.is_over)


class StepCounts:
    """What each rank was given of its latest pass, left in the store in each step, and compared at the end.

    A rank whose stream ends early finds it out only here: the others wait for it in their next collective, and ask for
    nothing more. To leave a count takes no answer of the store's, so no step waits.

    Args:
        peers: The ranks.
        slack: How many batches more one rank may have.
    """

    def __init__(self, peers: Peers, slack: int = 0) -> None:
        self._others, self._slack = peers.others, slack
        self._letters = Letters(peers, "steps")
        self._epoch, self._which = -1, ""
        self._left, self._left_s, self._cost_s = 0, 0.0, 0.0

    def begin(self, epoch: int, which: str) -> None:
        """Record that a pass begins.

        Args:
            epoch: The epoch.
            which: Which pass over it, the same on all ranks.
        """
        self._epoch, self._which = epoch, which

    def leave(self, batches: int) -> None:
        """Leave how many batches this rank was given of the pass. It is called in each step, so it calls little."""
        now_s = perf_counter()
        if self._left >= _FREE and now_s - self._left_s < _TIMES_THEIR_COST * self._cost_s:
            return
        self._letters.leave_at_once(f"{self._epoch}|{self._which}|{batches}|0")
        self._left += 1
        self._left_s = perf_counter()
        self._cost_s = self._left_s - now_s

    def longer(self, batches: int) -> Mapping[int, int]:
        """Return, at the end of the pass, who was given more of it, and how many batches; wait a moment for the others.

        Args:
            batches: How many batches this rank was given.
        """
        mine, until_s = _Count(self._epoch, self._which, batches, True), perf_counter() + _MOMENT_S
        self._letters.leave_at_once(f"{self._epoch}|{self._which}|{batches}|1")
        while True:
            counts = {rank: _Count.decoded(text) for rank, text in self._letters.exchange(None).items()}
            alike = {rank: count.batches for rank, count in counts.items() if count[:2] == mine[:2]}
            found = {rank: given for rank, given in alike.items() if given > batches + self._slack}
            is_open = len(counts) < len(self._others) or any(count.may_grow_to(mine) for count in counts.values())
            if found or not is_open or not self._letters.are_open or perf_counter() > until_s:
                return found
            sleep(_AGAIN_S)
