"""Judge what ranks show of a loader that is sharded already: equally many steps, and samples apart."""

from collections.abc import Mapping

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.facts import Claim
from ddp_patch.loaders.overlap import FirstSamples, in_common
from ddp_patch.ranks.exchange import by_value, parties_text, who_has_what

__all__ = ["require_apart", "require_same_held"]

# So many samples in common are chance where only a part of each rank's samples is known.
_BY_CHANCE = 16
# A sampler that draws with replacement from few samples draws each more often.
_OFTEN = 4

# What follows where samplers differ in a setting, and what to do.
_SETTINGS = {
    "seed": ("the shards are of different permutations", "Pass the same {}= to it"),
    "shuffle": ("the shards are of different orders", "Pass the same {}= to it"),
    "number of samples": ("the shards are of different data", "Build it over the same data"),
    "drop_last": ("the ranks make different numbers of steps", "Pass the same {}= to it"),
}

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
    by_rank = {rank: claim for rank, (_, claim) in claims.items()}
    name = next(iter(by_rank.values()))["name"]
    _require_same_settings(doing, name, by_rank)
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


def _require_same_settings(doing: str, name: str, claims: Mapping[int, Claim]) -> None:
    """Raise unless the ranks' samplers have the same settings, as far as they show them."""
    for setting in next(iter(claims.values()))["settings"]:
        values = {rank: claim["settings"].get(setting) for rank, claim in claims.items()}
        if len(by_value(values)) == 1 or None in values.values():
            continue
        follows, pass_it = _SETTINGS[setting]
        raise RankMismatchError(
            f"{doing}: each rank's {name} has another {setting}: {_told(values)}, so {follows}: some samples are lost "
            f"and others come twice. {pass_it.format(setting)} on every rank; or pass a loader without a {name}, and "
            "it is sharded here."
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
    looked = len(common.held[rank])
    raise RankMismatchError(
        f"{doing}: the loaders are said to be sharded already by a {name}, but {shared} of the first {looked} samples "
        f"of rank {rank} that were looked at are also rank {other}'s. {_cause(name, claims, shared == looked)} So "
        f"ranks train on the same samples, and others may be lost. {_REMEDY.format(name=name)}"
    )


def _cause(name: str, claims: Mapping[int, Claim], is_all: bool) -> str:
    """Return the cause that the claims show."""
    first, seeds = next(iter(claims.values())), {rank: claim["seed"] for rank, claim in claims.items()}
    if None not in seeds.values() and len(by_value(seeds)) > 1:
        return f"Its seed is {_told(seeds)}: pass the same seed on every rank."
    if first["gives_all"] or is_all:
        stored = " and ".join(first["stored"]) or "is_ddp_aware = True"
        return f"{name} has {stored}, perhaps for a log, and shards nothing: each rank draws what one process would."
    return "Its slices overlap, or are of different orders, as after shuffles with another seed on each rank."


def _told(values: Mapping[int, object], unit: str = "") -> str:
    return who_has_what(by_value({rank: f"{value}{unit}" for rank, value in values.items()}))
