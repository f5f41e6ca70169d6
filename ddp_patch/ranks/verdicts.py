"""What ranks' loaders show about each other: whether they are sharded already, and why their orders differ."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ddp_patch.errors import RankMismatchError
from ddp_patch.loaders.contents import Content, FirstSamples, relation_of
from ddp_patch.loaders.recognition import HeldWorld
from ddp_patch.ranks.exchange import by_value, ranks_text

__all__ = ["require_all_shares", "require_same_samples", "why_orders_differ"]


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


def require_same_samples(doing: str, reported: Mapping[int, Sequence[Content]]) -> None:
    """Raise unless the ranks' datasets hold the same samples, as far as all ranks know.

    Attributes of datasets may hold other things than samples, such as random numbers. So one that identifies the
    samples, and is the same on all ranks, proves that the samples are.

    Args:
        doing: What the ranks are doing, for the error.
        reported: What each rank reports about its dataset.
    """
    named = {rank: {content.name: content for content in contents} for rank, contents in reported.items()}
    common = [name for name in next(iter(named.values())) if all(name in contents for contents in named.values())]
    known = [{rank: named[rank][name] for rank in named} for name in common]
    differing = [contents for contents in known if len({content.fingerprint for content in contents.values()}) > 1]
    held = [contents for contents in known if all(content.is_held for content in contents.values())]
    same = [contents for contents in held if contents not in differing]
    if any(all(content.identifies for content in contents.values()) for contents in same):
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


def why_orders_differ(
    orders: Mapping[int, str | None], name: str, ranks: int, reported: Mapping[int, tuple[int, FirstSamples] | None]
) -> str:
    """Return the warning that says why the ranks' orders differ.

    Args:
        orders: A fingerprint of each rank's order.
        name: The class that they come from.
        ranks: How many ranks share.
        reported: Each rank's length of the dataset and first samples, where these can be told.

    Raises:
        RankMismatchError: The streams are parts already.
    """
    parties = by_value(orders)
    listed = " and ".join(ranks_text(members) for members in parties.values())
    known = [report for members in parties.values() if (report := reported[members[0]]) is not None]
    firsts = [first for _, first in known]
    relation = relation_of(firsts, known[0][0], ranks) if len(known) == len(parties) else "unclear"
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
