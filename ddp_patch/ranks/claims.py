"""Judge what ranks show of a loader that is sharded already: equally many steps, and samples apart."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.claims import SENT, Claim
from ddp_patch.ranks.exchange import by_value, ranks_text

__all__ = ["require_apart", "require_same_held"]

# So many samples in common are chance where only a part of each rank's samples is known.
_BY_CHANCE = 16
# A sampler that draws with replacement from few samples draws each more often.
_OFTEN = 4

_REMEDY = (
    "Pass a loader that one process would use, without what shards it, and it is sharded here. If {name} gives every "
    "rank the same, say is_ddp_aware = False in its class, and it is sharded, too."
)


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
    _require_same_settings(doing, {rank: claim for rank, (_, claim) in claims.items()})
    firsts: dict[int, tuple[int, Claim]] = {}
    for rank, (share, claim) in claims.items():
        firsts.setdefault(share, (rank, claim))
    by_rank = dict(firsts.values())
    if len(by_rank) > 1:
        _require_nothing_in_common(doing, by_rank)
    if even:
        _require_same_steps(doing, {rank: claim for rank, (_, claim) in claims.items()})


def require_same_held(doing: str, claims: Mapping[int, Claim]) -> None:
    """Raise RankMismatchError unless the ranks' iterable datasets, which split themselves by workers, hold the same."""
    parties = by_value({rank: claim["held"] for rank, claim in claims.items()})
    if len(parties) > 1:
        name = next(iter(claims.values()))["name"]
        listed = " and ".join(map(ranks_text, parties.values()))
        raise RankMismatchError(
            f"{doing}: {name} holds other files or numbers on {listed}. With share='by_worker', it takes parts of what "
            "it holds by the workers of all ranks, so samples would be lost or repeated. Give it everything on every "
            "rank, listed in sorted order; or, if each rank has a part of its own, say is_ddp_aware = True in its "
            "class, and its loader is left as it is. Say is_ddp_aware = False if ranks differ for another reason."
        )


def _require_same_settings(doing: str, claims: Mapping[int, Claim]) -> None:
    """Raise unless the ranks' samplers have the same settings, as far as they show them."""
    name = next(iter(claims.values()))["name"]
    for setting in next(iter(claims.values()))["settings"]:
        values = {rank: claim["settings"].get(setting) for rank, claim in claims.items()}
        if len(by_value(values)) == 1 or None in values.values():
            continue
        what = {"samples": "number of samples", "seed": "seed"}.get(setting, setting)
        follows = {
            "seed": "so the shards are of different permutations",
            "shuffle": "so the shards are of different orders",
            "samples": "so the shards are of different data",
        }.get(setting, "so the ranks make different numbers of steps")
        pass_it = "Build it over the same data" if setting == "samples" else f"Pass the same {setting}= to it"
        raise RankMismatchError(
            f"{doing}: each rank's {name} has another {what}: {_listed(values)}, {follows}: some samples are lost and "
            f"others come twice. {pass_it} on every rank; or pass a loader without a {name}, and it is sharded here."
        )


def _require_same_steps(doing: str, claims: Mapping[int, Claim]) -> None:
    steps = {rank: claim["steps"] for rank, claim in claims.items()}
    if None in steps.values() or len(by_value(steps)) == 1:
        return
    name = next(iter(claims.values()))["name"]
    raise RankMismatchError(
        f"{doing}: the loaders are sharded already by a {name}, in unequal parts: {_listed(steps, 'batches')}. "
        "Ranks that synchronise in each step would wait for each other forever. Give every rank equally many batches; "
        f"or pass uneven='keep', if ranks may make unequal steps. {_REMEDY.format(name=name)}"
    )


def _require_nothing_in_common(doing: str, claims: Mapping[int, Claim]) -> None:
    """Raise if shares have more samples in common than padding, and than they repeat within themselves."""
    if any(claim.get("hashes") is None for claim in claims.values()) or len({c["data"] for c in claims.values()}) > 1:
        return  # indices of other data mean other samples
    # Compare up to the hash that all have sent.
    cut = [claim["hashes"][-1] for claim in claims.values() if claim["distinct"] > SENT]
    last = min(cut, default=2**64)
    holders: defaultdict[int, list[int]] = defaultdict(list)
    for rank, claim in claims.items():
        for one in claim["hashes"]:
            if one <= last:
                holders[one].append(rank)
    again = sum(len(ranks) - 1 for ranks in holders.values())
    largest = max(claim["largest"] for claim in claims.values())
    padding = len(claims) - 1 if largest == 1 else len(claims) * largest
    # Samplers that draw with replacement give two ranks as many in common as either repeats within itself, or twice.
    repeated = sum(claim["drawn"] - claim["distinct"] for claim in claims.values())
    if _are_all_alike(claims, padding):
        repeated = 0
    chance = _BY_CHANCE if cut or any(claim["is_part"] for claim in claims.values()) else 0
    if again <= padding + chance + 3 * (len(claims) - 1) * repeated:
        return
    pairs: Counter[tuple[int, int]] = Counter()
    for ranks in holders.values():
        pairs.update({(ranks[0], other): 1 for other in ranks[1:]})
    (rank, other), common = max(pairs.items(), key=lambda found: (found[1], -found[0][0], -found[0][1]))
    name = claims[rank]["name"]
    looked = sum(one <= last for one in claims[rank]["hashes"])
    raise RankMismatchError(
        f"{doing}: the loaders are said to be sharded already by a {name}, but {common} of the first {looked} samples "
        f"of rank {rank} that were looked at are also rank {other}'s. {_cause(claims, common == looked)} So ranks "
        f"train on the same samples, and others may be lost. {_REMEDY.format(name=name)}"
    )


def _are_all_alike(claims: Mapping[int, Claim], padding: int) -> bool:
    """Return whether all shares have the same samples, which are not just the few that a sampler often draws."""
    same = len({tuple(claim["hashes"]) for claim in claims.values()}) == 1
    return same and all(
        claim["distinct"] > padding and claim["drawn"] < _OFTEN * claim["distinct"] for claim in claims.values()
    )


def _cause(claims: Mapping[int, Claim], is_all: bool) -> str:
    """Return the cause that the claims show."""
    first = next(iter(claims.values()))
    name, seeds = first["name"], {rank: claim.get("seed") for rank, claim in claims.items()}
    gives_all = first["gives"] is not None and first["length"] is not None and first["gives"] >= first["length"]
    if None not in seeds.values() and len(by_value(seeds)) > 1:
        return f"Its seed is {_listed(seeds)}: pass the same seed on every rank."
    if gives_all or is_all:
        stored = " and ".join(first["stored"]) or "is_ddp_aware = True"
        return f"{name} has {stored}, perhaps for a log, and shards nothing: each rank draws what one process would."
    return "Its slices overlap, or are of different orders, as after shuffles with another seed on each rank."


def _listed(values: Mapping[int, Any], unit: str = "") -> str:
    """Return which ranks have which value, the smallest party first."""
    parties = sorted(by_value(values).values(), key=lambda ranks: (len(ranks), ranks[0]))[:16]
    return "; ".join(f"{values[ranks[0]]} {unit}".strip() + f" on {ranks_text(ranks)}" for ranks in parties)
