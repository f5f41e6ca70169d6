"""Compare the first samples of ranks that have a part of the data each: they have none in common."""

import json
from collections.abc import Callable, Sequence
from math import log2
from typing import Any

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.rows import row_hashes
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.mailbox import Mailbox, Peers

__all__ = ["FirstItems", "bits_against_chance", "common_items"]

# So many first samples of each pass are compared.
_MOST = 256
# How unlikely chance must be, in bits, before ranks' samples count as the same.
_BITS = 10.0


def common_items(mine: Sequence[int], theirs: Sequence[int]) -> tuple[int, int]:
    """Return how many items two ranks have in common, and how many of either are repeated within its own part.

    Args:
        mine: Hashes of one rank's.
        theirs: Hashes of the other's.

    Examples:
        >>> common_items([1, 2, 3, 4], [5, 6, 7, 1]), common_items([1, 2, 2, 4], [3, 4, 1, 4])
        ((1, 0), (2, 2))
    """
    ours, others = set(mine), set(theirs)
    return len(ours & others), len(mine) - len(ours) + len(theirs) - len(others)


def bits_against_chance(common: int, repeats: int) -> float:
    """Return how unlikely it is, in bits, that so many items are the same by chance.

    Of parts that are drawn with replacement, or from data with duplicates, two items that are the same are as likely
    within one rank's part as on two ranks.

    Source: Chernoff's bound of the binomial distribution.

    Examples:
        >>> bits_against_chance(12, 0), bits_against_chance(9, 10), round(bits_against_chance(220, 60))
        (12.0, 0.0, 70)
    """
    if common <= repeats:
        return 0.0
    both = common + repeats
    return both - sum(count * log2(both / count) for count in (common, repeats) if count)


class FirstItems:
    """The first samples of this rank's latest pass over one loader, and the comparison with the other ranks'.

    Args:
        peers: Who they are.
        why: Says why samples may be the same, and what to do.
    """

    def __init__(self, peers: Peers, why: Callable[[], str]) -> None:
        self._peers, self._why = peers, why
        self._mailbox = Mailbox(peers, "first")
        self._pass = -1
        self._hashes: list[int] = []
        self._is_done = True
        # Those of the batch that came last: it may be padding, an item or all of it.
        self._last: list[int] = []
        # How many items were common and repeated: in this pass, by rank; and in all before.
        self._found: dict[int, tuple[int, int]] = {}
        self._before = 0, 0

    def begin(self) -> None:
        """Record that a pass begins."""
        self._pass, self._hashes, self._last, self._is_done = self._pass + 1, [], [], False
        self._before, self._found = self._in_all(), {}

    def add(self, batch: Any) -> None:
        """Record a batch that this rank has read."""
        if len(self._hashes) < _MOST:
            self._hashes += self._last
            self._last = row_hashes(batch, _MOST - len(self._hashes))

    def compare(self, name: str, *, at_end: bool) -> None:
        """Leave what came, and compare it with what others have left.

        Args:
            name: What errors call the loader.
            at_end: Whether the pass has come to its end.

        Raises:
            RankMismatchError: Other ranks have the same samples.
        """
        if self._is_done:
            return
        self._is_done = at_end and len(self._hashes) >= _MOST
        self._mailbox.post(json.dumps([self._pass, *self._hashes], separators=(",", ":")))
        for rank, text in self._mailbox.read().items():
            try:
                number, *theirs = json.loads(text)
                if number != self._pass or not (found := self._too_many(rank, theirs)):
                    continue
            except (ValueError, TypeError):  # junk
                continue
            earlier = f", after {self._before[0]} in earlier passes" if self._before[0] else ""
            told = (
                f"Iterating the {name}: {found} of the first {len(self._hashes)} items of rank {self._peers.rank} "
                f"are also {ranks_text([rank])}'s{earlier}, though each rank should have a part of its own. "
                f"{self._why()}"
            )
            self._mailbox.tell(told)
            raise RankMismatchError(told)

    def _too_many(self, rank: int, theirs: Sequence[int]) -> int:
        """Return how many items of this rank another one has, if they are too many, in this pass and all before."""
        found = self._found[rank] = common_items(self._hashes, theirs)
        return found[0] if bits_against_chance(*self._in_all()) > _BITS else 0

    def _in_all(self) -> tuple[int, int]:
        """Return how many items were common and repeated, in this pass and all before."""
        common, repeats = (sum(numbers) for numbers in zip(self._before, *self._found.values(), strict=True))
        return common, repeats
