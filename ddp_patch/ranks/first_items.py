"""Compare the first samples of ranks that have a part of the data each: they have none in common."""

import json
from collections.abc import Callable, Sequence
from math import log2

from ddp_patch.errors import RankMismatchError
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.mailbox import Mailbox, Peers

__all__ = ["MOST", "FirstItems", "bits_against_chance", "common_items"]

# So many first samples of each pass are compared.
MOST = 256
# How unlikely chance must be, in bits, before ranks' samples count as the same.
_BITS = 10.0


def common_items(mine: Sequence[int], theirs: Sequence[int], ranks: int) -> int:
    """Return how many first items two ranks have in common that should have none; 0 if that may be right.

    Padding repeats an item on each of the other ranks at most. Of parts that are drawn with replacement, or from data
    with duplicates, two items that are the same are as likely within one rank's part as on two ranks.

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
    return common if are_all or bits_against_chance(common - ranks + 1, repeats) > _BITS else 0


def bits_against_chance(common: int, repeats: int) -> float:
    """Return how unlikely it is, in bits, that two ranks have so many in common where these are repeated within one.

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
    """Compares the first samples of this rank's passes over one loader with the other ranks'.

    Args:
        peers: Who they are.
        mailbox: Where they leave each other what is about the loader.
        why: Says why samples may be the same, and what to do.
    """

    def __init__(self, peers: Peers, mailbox: Mailbox, why: Callable[[], str]) -> None:
        self._peers, self._mailbox, self._why = peers, mailbox, why

    def compare(self, name: str, numbers: tuple[int, int], hashes: Sequence[int]) -> None:
        """Leave what came in a pass, and compare it with what others have left of the same pass.

        Args:
            name: What errors call the loader.
            numbers: Which list of passes it is in, and where.
            hashes: Those of its first samples.

        Raises:
            RankMismatchError: Other ranks have the same samples.
        """
        # A rank that is a pass ahead leaves what slower ones compare.
        subject = f"first{numbers[-1] % 2}"
        self._mailbox.post(json.dumps([*numbers, *hashes], separators=(",", ":")), subject)
        for rank, text in self._mailbox.read(subject).items():
            try:
                of_list, number, *theirs = json.loads(text)
                is_same = (of_list, number) == numbers
                found = common_items(hashes, theirs, len(self._peers.members)) if is_same else 0
            except (ValueError, TypeError):  # junk
                continue
            if found:
                told = (
                    f"Iterating the {name}: {found} of the first {len(hashes)} items of rank {self._peers.rank} "
                    f"are also {ranks_text([rank])}'s, though each rank should have a part of its own. {self._why()}"
                )
                self._mailbox.tell(told)
                raise RankMismatchError(told)
