"""Compare the first samples of ranks that have a part of the data each: they have none in common."""

import json
from collections.abc import Callable, Sequence
from math import log2

from ddp_patch.errors import RankMismatchError
from ddp_patch.ranks.exchange import ranks_text
from ddp_patch.ranks.mailbox import Mailbox

__all__ = ["MOST", "FirstItems", "bits_against_chance", "common_items"]

# So many first samples of each pass are compared.
MOST = 256
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
    """Compares the first samples of this rank's passes over one loader with the other ranks'.

    Args:
        mailbox: Where they leave each other what is about the loader.
        why: Says why samples may be the same, and what to do.
    """

    def __init__(self, mailbox: Mailbox, why: Callable[[], str]) -> None:
        self._mailbox, self._why = mailbox, why
        self._numbers = (-1, -1)
        # How many items were common and repeated: in this pass, by rank; and in all before.
        self._found: dict[int, tuple[int, int]] = {}
        self._before = 0, 0

    def compare(self, name: str, numbers: tuple[int, int], hashes: Sequence[int]) -> None:
        """Leave what came in a pass, and compare it with what others have left of the same pass.

        Args:
            name: What errors call the loader.
            numbers: Which list of passes it is in, and where.
            hashes: Those of its first samples.

        Raises:
            RankMismatchError: Other ranks have the same samples.
        """
        if numbers != self._numbers:
            self._before, self._found, self._numbers = self._in_all(), {}, numbers
        # A rank that is a pass ahead leaves what slower ones compare.
        subject = f"first{numbers[-1] % 2}"
        self._mailbox.post(json.dumps([*numbers, *hashes], separators=(",", ":")), subject)
        for rank, text in self._mailbox.read(subject).items():
            try:
                of_list, number, *theirs = json.loads(text)
                if (of_list, number) == numbers:
                    self._compare(name, hashes, rank, theirs)
            except (ValueError, TypeError):  # junk
                continue

    def _compare(self, name: str, hashes: Sequence[int], rank: int, theirs: Sequence[int]) -> None:
        found, _ = self._found[rank] = common_items(hashes, theirs)
        if not found or bits_against_chance(*self._in_all()) <= _BITS:
            return
        earlier = f", after {self._before[0]} in earlier passes" if self._before[0] else ""
        told = (
            f"Iterating the {name}: {found} of the first {len(hashes)} items of rank {self._mailbox.peers.rank} are "
            f"also {ranks_text([rank])}'s{earlier}, though each rank should have a part of its own. {self._why()}"
        )
        self._mailbox.tell(told)
        raise RankMismatchError(told)

    def _in_all(self) -> tuple[int, int]:
        """Return how many items were common and repeated, in this pass and all before."""
        common, repeats = (sum(numbers) for numbers in zip(self._before, *self._found.values(), strict=True))
        return common, repeats
