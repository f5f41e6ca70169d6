"""What the ranks conclude about loaders that are sharded already, or look like it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.contents import Content
from ddp_patch.loaders.nests import told_at
from ddp_patch.loaders.overlap import FirstSamples, relation_of
from ddp_patch.loaders.worlds import HeldWorld
from ddp_patch.ranks.comparison import by_value, ranks_text

__all__ = ["TELLING_APART", "require_all_shares", "require_same_samples", "why_each_differs", "why_orders_differ"]

TELLING_APART = "Finding out why the ranks' orders differ"

_MARK = "say is_ddp_aware = True in {name}, and its loader is returned unchanged"
_LEADS = (
    "From now on rank 0 draws each epoch and sends every rank its share, about 1 / num_replicas of the indices, at the "
    "epoch's start. "
)


def require_all_shares(doing: str, held: Mapping[int, tuple[int, HeldWorld]]) -> None:
    """Raise unless the loaders, which are sharded already, were made for these ranks, each share equally often.

    Args:
        doing: What the ranks are doing, for the error.
        held: Which shard each rank takes, and the rank and number of ranks that its loader was made for.
    """
    by_place = dict(held.values())
    taken, ranks = Counter(by_place.values()), next(iter(by_place.values()))[1]
    is_alike = all(by_place[place] == world for place, world in held.values())
    is_covered = taken.keys() == {(rank, ranks) for rank in range(ranks)} and len(set(taken.values())) == 1
    if is_alike and is_covered:
        return
    listed = "; ".join(
        f"rank {rank} of {ranks} on {ranks_text(members)}"
        for (rank, ranks), members in by_value({member: world for member, (_, world) in held.items()}).items()
    )
    raise RankMismatchError(
        f"{doing}: the loaders are sharded already, but not for these {len(by_place)} ranks. They were made for "
        f"{listed}, so some samples would be lost or repeated. Build each rank's sampler or dataset for its own rank, "
        "or pass the process_group= or device_mesh= that it was made for."
    )


def require_same_samples(doing: str, told: Mapping[int, Sequence[Content]]) -> None:
    """Raise unless the ranks' datasets hold the same samples, as far as all ranks know.

    Attributes of datasets may hold other things than samples, such as random numbers. So one that identifies the
    samples, and is the same on all ranks, proves that the samples are.

    Args:
        doing: What the ranks are doing, for the error.
        told: What each rank reports about its dataset.
    """
    named = {rank: {content.name: content for content in contents} for rank, contents in told.items()}
    known = [{rank: named[rank][name] for rank in named} for name in _common(named)]
    differing = [contents for contents in known if len({one.fingerprint for one in contents.values()}) > 1]
    held = [contents for contents in known if all(one.is_held for one in contents.values())]
    if any(contents not in differing and all(one.identifies for one in contents.values()) for contents in held):
        differing = [contents for contents in differing if contents not in held]
    if not differing:
        return
    prints = {rank: tuple(contents[rank].fingerprint for contents in differing) for rank in named}
    listed = " and ".join(ranks_text(ranks) for ranks in by_value(prints).values())
    names = ", ".join(next(iter(contents.values())).name for contents in differing)
    raise RankMismatchError(
        f"{doing}: the datasets of {listed} have different samples at the same indices: they differ in {names}. Each "
        "rank would take a shard of its own part only, and the rest would be lost. Patch a loader of the whole "
        "dataset: without split_dataset_by_node(), shard() or data[rank::world_size], and with random_split(), "
        "shuffle(), listed files and random data made alike on every rank. If you want each rank to have its own part, "
        "say is_ddp_aware = True in the dataset's class, and its loader is returned unchanged. If only the content "
        "differs, agreement='seeded' does not compare it."
    )


def _common(named: Mapping[int, Mapping[str, Content]]) -> list[str]:
    first, *others = named.values()
    return [name for name in first if all(name in other for other in others)]


def why_each_differs(
    asked: Mapping[str, tuple[Mapping[int, str | None], str]],
    ranks: int,
    told: Mapping[int, Mapping[str, tuple[int, FirstSamples] | None]],
) -> dict[int, dict[str, str]]:
    """Return for each rank the warnings that ``why_orders_differ`` has, by the names of the loaders.

    Args:
        asked: The loaders whose orders differ, by their names: these orders, and the class that they come from.
        ranks: How many ranks share.
        told: What each rank reports about these loaders, by their names.

    Raises:
        RankMismatchError: The streams of a loader are parts already.
    """
    whys = {}
    for place, (orders, name) in asked.items():
        with told_at(place):
            whys[place] = why_orders_differ(orders, name, ranks, {rank: said[place] for rank, said in told.items()})
    return dict.fromkeys(told, whys)


def why_orders_differ(
    orders: Mapping[int, str | None], name: str, ranks: int, told: Mapping[int, tuple[int, FirstSamples] | None]
) -> str:
    """Return the warning that says why the ranks' orders differ.

    Args:
        orders: A fingerprint of each rank's order.
        name: The class that they come from.
        ranks: How many ranks share.
        told: Each rank's length of the dataset and first samples, where these can be told.

    Raises:
        RankMismatchError: The streams are parts already.
    """
    parties = by_value(orders)
    listed = " and ".join(ranks_text(members) for members in parties.values())
    relation = _relation([told[members[0]] for members in parties.values()], ranks)
    mark = _MARK.format(name=name)
    if relation == "parts":
        raise RankMismatchError(
            f"The samplers of {listed} are sharded already: {name} gives each rank other samples, with none in common "
            f"but padding. Sharding them again would lose most samples. Build {name} for one process and patch that; "
            f"or, if you want each rank to have its own part, {mark}."
        )
    own = "has a random generator of its own that is seeded by rank, or follows the order of a set or of files"
    if relation == "overlapping":
        cause = f"the sampler {own}. {_LEADS}Make the sampler's order the same on every rank to do without."
    else:
        cause = (
            f"{name} either {own}, or is sharded already, and then most samples are lost from now on. Its first "
            f"samples do not show which. {_LEADS}Make the sampler's order the same on every rank; or, if it is "
            f"sharded, {mark}."
        )
    return f"{listed.capitalize()} would draw different orders: {cause}"


def _relation(parties: Sequence[tuple[int, FirstSamples] | None], ranks: int) -> str:
    known = [party for party in parties if party is not None]
    return relation_of([first for _, first in known], known[0][0], ranks) if len(known) == len(parties) else "unclear"
