"""Compare the first samples of ranks that have a part of the data each: they have none in common."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.rows import row_hashes
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.mailbox import Mailbox, Peers

__all__ = ["FirstItems", "common_items"]

# So many first samples of each pass are compared.
_MOST = 256


def common_items(mine: Sequence[int], theirs: Sequence[int], ranks: int) -> int:
    """Return how many first items two ranks have in common that should have none; 0 if that may be right.

    Padding repeats an item on each of the other ranks at most. What one rank repeats within its own part, such as what
    is drawn with replacement, may be repeated on another as well.

    Args:
        mine: Hashes of one rank's.
        theirs: Hashes of the other's.
        ranks: How many ranks share the data.

    Examples:
        >>> common_items([1, 2, 3, 4], [5, 6, 7, 1], ranks=2), common_items([1, 2, 3, 4], [3, 4, 1, 2], ranks=2)
        (0, 4)
        >>> common_items([7, 7, 7, 7], [7, 7, 7, 7], ranks=2)
        0
    """
    ours, others = set(mine), set(theirs)
    common = len(ours & others)
    repeats = len(mine) - len(ours) + len(theirs) - len(others)
    are_all = common == min(len(ours), len(others)) > 1 and not repeats
    return common if are_all or common > ranks - 1 + 2 * repeats else 0


class FirstItems:
    """The first samples of this rank's latest pass over one loader, and the comparison with the other ranks'.

    Args:
        peers: Who they are.
        mailbox: Where they leave each other what is about the loader.
        why: Says why samples may be the same, and what to do.
    """

    def __init__(self, peers: Peers, mailbox: Mailbox, why: Callable[[], str]) -> None:
        self._peers, self._mailbox, self._why = peers, mailbox, why
        self._pass = -1
        self._hashes: list[int] = []
        self._is_done = True

    def begin(self) -> None:
        """Record that a pass begins."""
        self._pass, self._hashes, self._is_done = self._pass + 1, [], False

    def add(self, batch: Any) -> None:
        """Record a batch that this rank has read."""
        if len(self._hashes) < _MOST:
            self._hashes += row_hashes(batch, _MOST - len(self._hashes))

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
        self._mailbox.post(json.dumps([self._pass, *self._hashes], separators=(",", ":")), "first")
        for rank, text in self._mailbox.read("first").items():
            try:
                number, *theirs = json.loads(text)
                found = common_items(self._hashes, theirs, len(self._peers.members)) if number == self._pass else 0
            except (ValueError, TypeError):  # junk
                continue
            if found:
                told = (
                    f"Iterating the {name}: {found} of the first {len(self._hashes)} items of rank {self._peers.rank} "
                    f"are also {ranks_text([rank])}'s, though each rank should have a part of its own. {self._why()}"
                )
                self._mailbox.tell(told)
                raise RankMismatchError(told)
