"""Ranks that have a part of the data each have nothing in common: what they show at the patch, and what they get."""

import json
from collections.abc import Callable, Mapping, Sequence
from math import log2

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.facts import Claim
from ddp_patch.loaders.overlap import FirstSamples, in_common
from ddp_patch.ranks.exchange import by_value, parties_text, ranks_text, who_has_what
from ddp_patch.ranks.mailbox import Mailbox

__all__ = ["MOST", "FirstItems", "bits_against_chance", "common_items", "require_apart", "require_same_held"]

# So many samples in common are chance where only a part of each rank's samples is known.
_BY_CHANCE = 16
# A sampler that draws with replacement from few samples draws each more often.
_OFTEN = 4

_REMEDY = (
    "Pass a loader that one process would use, without what shards it, and it is sharded here. If {name} gives every "
    "rank the same, say is_ddp_aware = False in its class, and it is sharded, too."
)

# So many first samples of each pass are compared.
MOST = 256
# How unlikely chance must be, in bits, before ranks' samples count as the same.
_BITS = 10.0


# ---- what they show at the patch ----


def require_apart(doing: str, claims: Mapping[int, tuple[int, Claim]], *, even: bool = True) -> None:
    """Raise unless ranks that are sharded already make equally many steps, of samples that no other share has.

    Ranks with one share replicate each other, so only shares are compared.

    Args:
        doing: What the ranks are doing, for the error.
        claims: What each rank's share is, and what it shows.
        even: Whether ranks have to make equally many steps.

    Raises:
        RankMismatchError: They do not, or settings differ, or shares have samples in common.
    """
    by_rank = {rank: claim for rank, (_, claim) in claims.items()}
    name = next(iter(by_rank.values()))["name"]
    for setting in next(iter(by_rank.values()))["settings"]:
        values = {rank: claim["settings"].get(setting) for rank, claim in by_rank.items()}
        if len(by_value(values)) > 1 and None not in values.values():
            raise RankMismatchError(
                f"{doing}: each rank's {name} has another {setting}: {_told(values)}, so the shards do not fit "
                f"together, and samples are lost or come twice. Make its {setting} the same on every rank; or pass a "
                f"loader without a {name}, and it is sharded here."
            )
    firsts = [ranks[0] for ranks in by_value({rank: share for rank, (share, _) in claims.items()}).values()]
    if len(firsts) > 1:
        _require_nothing_in_common(doing, name, {rank: by_rank[rank] for rank in firsts})
    steps = {rank: claim["steps"] for rank, claim in by_rank.items()}
    if even and None not in steps.values() and len(by_value(steps)) > 1:
        raise RankMismatchError(
            f"{doing}: the loaders are sharded already by a {name}, in unequal parts: {_told(steps, ' batches')}. "
            "Ranks that synchronise in each step would wait for each other forever. Give every rank equally many "
            f"batches; or pass uneven='keep', if ranks may make unequal steps. {_REMEDY.format(name=name)}"
        )


def require_same_held(doing: str, claims: Mapping[int, Claim]) -> None:
    """Raise RankMismatchError unless the ranks' iterable datasets, which split themselves by workers, hold the same."""
    parties = by_value({rank: claim["held"] for rank, claim in claims.items()})
    if len(parties) > 1:
        name = next(iter(claims.values()))["name"]
        raise RankMismatchError(
            f"{doing}: {name} holds other files or numbers on {parties_text(parties)}. With share='by_worker', it "
            "takes parts of what it holds by the workers of all ranks, so samples would be lost or repeated. Give "
            "it everything on every rank, listed in sorted order; or, if each rank has a part of its own, say "
            "is_ddp_aware = True in its class, and its loader is left as it is. Say is_ddp_aware = False if ranks "
            "differ for another reason."
        )


def _require_nothing_in_common(doing: str, name: str, claims: Mapping[int, Claim]) -> None:
    """Raise if shares have more samples in common than padding, and than they repeat within themselves."""
    if any(claim.get("first") is None for claim in claims.values()) or len({c["data"] for c in claims.values()}) > 1:
        return  # indices of other data mean other samples
    firsts = {rank: FirstSamples(**claim["first"]) for rank, claim in claims.items()}
    common = in_common(firsts)
    # Of batches of one size, the last would be padded, and is not looked at.
    is_even = all(len(first.sizes) < 2 for first in firsts.values())
    padding = len(claims) - 1 if is_even else len(claims) * common.largest
    # Samplers that draw with replacement give two ranks as many in common as either repeats within itself, or twice.
    repeated = sum(first.drawn - first.distinct for first in firsts.values())
    # But all the same samples are no chance, unless they are just the few that a sampler often draws.
    if len({tuple(first.hashes) for first in firsts.values()}) == 1 and all(
        first.distinct > padding and first.drawn < _OFTEN * first.distinct for first in firsts.values()
    ):
        repeated = 0
    chance = _BY_CHANCE if common.looked_at < 1 else 0
    if common.pairs.total() <= padding + chance + 3 * (len(claims) - 1) * repeated:
        return
    ((rank, other), shared) = common.pairs.most_common(1)[0]
    raise RankMismatchError(
        f"{doing}: the loaders are said to be sharded already by a {name}, but {shared} of the first "
        f"{len(common.held[rank])} samples of rank {rank} that were looked at are also rank {other}'s, so ranks train "
        "on the same samples, and others may be lost. A class that only stores its rank, as for a log, shards nothing; "
        "and slices of orders that each rank shuffles with another seed overlap. Pass the same seed on every rank. "
        f"{_REMEDY.format(name=name)}"
    )


def _told(values: Mapping[int, object], unit: str = "") -> str:
    return who_has_what(by_value({rank: f"{value}{unit}" for rank, value in values.items()}))


# ---- what they get ----


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
