"""Make every rank see the same stream: compare the ranks at the patch and, if the user asks, in every epoch."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from ddp_patch.errors import InvalidOptionError, LeaderWarning
from ddp_patch.loaders.contents import Content
from ddp_patch.loaders.facts import StreamFacts
from ddp_patch.loaders.worlds import HeldWorld
from ddp_patch.options import Agreement, Options
from ddp_patch.plan import Plan
from ddp_patch.ranks.comparison import by_value, require_same
from ddp_patch.ranks.exchange import exchange, refuse
from ddp_patch.ranks.notices import Peers, agreed_peers, given_peers
from ddp_patch.ranks.shards import TELLING_APART, require_all_shares, require_same_samples, why_orders_differ
from ddp_patch.ranks.world import World
from ddp_patch.streams.fingerprint import fingerprint
from ddp_patch.streams.seeding import Seed, loader_seed

if TYPE_CHECKING:
    from ddp_patch.ranks.leader import Leader

__all__ = ["AGREEING", "Agreed", "agree", "refusals_told"]

# With at most this many ranks, an error lists which rank takes which share.
_TOLD_IN_FULL = 16

AGREEING = "Agreeing on how data is shared"
_numbers = count(1)
# How many loaders without a seed these ranks have patched that had such a stream.
_numbers_of_like: Counter[tuple[int | str, ...]] = Counter()


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks agreed on.

    Attributes:
        world: The ranks that share.
        options: What the user chose, with ``agreement="auto"`` resolved.
        seed: The seed of every epoch's order; the same on every rank.
        leader: Sends every rank its share, if rank 0 draws for all.
        number: The number of this agreement, counted on the first rank. It identifies the loader.
        peers: The ranks whose passes are compared with this one's; None if there are none.
    """

    world: World
    options: Options
    seed: Seed
    leader: "Leader | None" = None
    number: int = 0
    peers: Peers | None = None

    def plan(self, rank: int) -> Plan:
        """Return the plan that gives a rank its share of the stream."""
        return Plan.of_stream(self.options, rank, self.world.num_replicas)

    @property
    def division(self) -> Plan | None:
        """The plan that gives this rank its part of each batch, where batches are divided."""
        return Plan.of_batch(self.options, self.world.rank, self.world.num_replicas)

    def check(self, doing: str, facts: Mapping[str, object], known: Mapping[str, object] | None = None) -> None:
        """With ``verify=True``, compare facts between the ranks; raise RankMismatchError on every rank if they differ.

        Args:
            doing: What the ranks are doing, for the error.
            facts: What must be the same on every rank, by name.
            known: What must be the same on all ranks that know it, by name.
        """
        if self.options.verify:
            self.compare(doing, facts, known)

    def compare(self, doing: str, facts: Mapping[str, object], known: Mapping[str, object] | None = None) -> None:
        """Compare facts as ``check`` does, with or without ``verify``; do nothing in an explicit world."""
        if self.world.members is None:
            return
        said = {"meeting": doing, "patched as": f"number {self.number}", **facts}, known or {}
        if "epoch" in facts:
            doing = f"{doing} (epoch {facts['epoch']})"
        exchange(list(self.world.members), doing, said, partial(_confirm, doing), self.options.timeout)


_Said: TypeAlias = tuple[Mapping[str, object], Mapping[str, object]]


def _confirm(doing: str, records: Mapping[int, _Said]) -> dict[int, None]:
    require_same(doing, {rank: facts for rank, (facts, _) in records.items()})
    for name in dict.fromkeys(name for _, known in records.values() for name in known):
        require_same(doing, {rank: {name: known[name]} for rank, (_, known) in records.items() if name in known})
    return dict.fromkeys(records)


@dataclass(frozen=True, slots=True)
class _Record:
    """What each rank reports about itself."""

    compared: Mapping[str, object]
    order: str | None  # a fingerprint of the stream's first items; None if unknown
    samples: Sequence[Content]  # fingerprints of the samples that the dataset holds, as far as they are known
    stream: str  # a fingerprint of what tells the loader's stream from others'
    seed: int | None
    base_seed: int  # what the seed follows from if none was chosen
    generators: Sequence[torch.Tensor]
    meets: bool  # whether the ranks meet in every epoch
    ahead: int
    share: int  # this rank's place among those that share
    made_for: HeldWorld | None  # for which rank of how many the loader is sharded already; None if unknown


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What rank 0 concludes from the records."""

    seed: int
    generators: Sequence[torch.Tensor]
    orders: Mapping[int, str | None]  # the ranks' orders where they differ; else empty
    number: int


def agree(
    world: World,
    options: Options,
    compared: Mapping[str, object],
    stream: StreamFacts | None,
    *,
    batches_ahead: int = 0,
    made_for: HeldWorld | None = None,
    stacklevel: int = 3,
) -> Agreed:
    """Compare the ranks and return what they agreed on.

    Every rank sends one small record, and gets the first rank's seed and generator states. In an explicit world, no
    rank waits for another and the generators stay as they are.

    Args:
        world: The ranks that share.
        options: What the user chose.
        compared: What must be the same on every rank, by name.
        stream: The stream to shard; None if it is sharded already.
        batches_ahead: How many batches the loader's workers prefetch. If ranks meet within an epoch, this number must
            be the same on all, or one would wait for others that never come.
        made_for: The rank and the number of ranks that a loader which is sharded already was made for, if known.
        stacklevel: How many calls above this one the user's code is, for a warning.

    Raises:
        RankMismatchError: The facts or options differ, or a rank refused.
        MissingRanksError: A rank did not arrive in time.
        InvalidOptionError: An option needs ranks that communicate.
        WorldError: An explicit world has more shares than the process group has ranks.
    """
    if world.members is None:
        _refuse_communication(options)
        peers = given_peers(world.rank, world.num_replicas, compared)
        return Agreed(world, replace(options, agreement=_settled(options, "")), _seed(options, 0), peers=peers)
    found = [] if stream is None else stream.generators
    record = _Record(
        compared={**compared, **_chosen(options), **_sharing(world.members), "generators": len(found)},
        order=stream.order if stream is not None and options.agreement == "auto" else None,
        samples=stream.samples if stream is not None and options.agreement in {"auto", "leader"} else (),
        stream=fingerprint([] if stream is None else [stream.described]),
        seed=options.seed,
        base_seed=_base_seed(world),
        generators=[generator.get_state() for generator in found],
        meets=options.verify or options.agreement == "leader",
        ahead=batches_ahead,
        share=world.rank,
        made_for=made_for,
    )
    members = list(world.members)
    verdict: _Verdict = exchange(members, AGREEING, record, _judge, options.timeout)
    for generator, state in zip(found, verdict.generators, strict=True):
        generator.set_state(state)
    disagreement = ""
    if stream is not None and verdict.orders:  # seldom, so only then do the ranks meet once more
        judge = partial(why_orders_differ, verdict.orders, stream.name, world.num_replicas)
        disagreement = exchange(
            members, TELLING_APART, stream.first_samples(world.num_replicas), judge, options.timeout
        )
    if disagreement and dist.get_rank() == members[0]:
        warnings.warn(disagreement, LeaderWarning, stacklevel=stacklevel)
    options = replace(options, agreement=_settled(options, disagreement))
    seed, peers = _seed(options, verdict.seed), agreed_peers(members, verdict.number)
    return Agreed(world, options, seed, _leader(members, options), verdict.number, peers)


def _seed(options: Options, default: int) -> Seed:
    chosen = options.seed
    return Seed(default if chosen is None else chosen, is_chosen=chosen is not None)


def _leader(members: Sequence[int], options: Options) -> "Leader | None":
    if options.agreement != "leader":
        return None
    from ddp_patch.ranks.leader import Leader  # most trainings do without

    return Leader(members, options.timeout)


@contextmanager
def refusals_told(world: World | None, doing: str = AGREEING) -> Iterator[None]:
    """Tell the other ranks if this one raises before they all meet, so that they don't wait for it."""
    try:
        yield
    except Exception as error:
        if world is not None and world.members is not None:
            refuse(list(world.members), doing, error)
        raise


def _base_seed(world: World) -> int:
    """Return what the seeds of all loaders follow from: torch's own seed, or 0 if the world may not have all ranks.

    Ranks outside the world cannot be asked but may have to draw the same: tensor-parallel ranks in other groups.
    """
    is_whole = world.members is not None and len(world.members) == dist.get_world_size()
    return torch.initial_seed() if is_whole else 0


def _settled(options: Options, disagreement: str) -> Agreement:
    """Return the agreement, with "auto" resolved."""
    if options.agreement != "auto":
        return options.agreement
    return "leader" if disagreement else "seeded"


def _refuse_communication(options: Options) -> None:
    asked = "agreement='leader'" if options.agreement == "leader" else "verify=True" if options.verify else None
    if asked is not None:
        raise InvalidOptionError(
            f"{asked} has the ranks communicate, and in a world given by rank= and num_replicas= none waits for "
            "another. Leave these out, after torch.distributed.init_process_group(), or leave that out."
        )


def _chosen(options: Options) -> dict[str, object]:
    names = ("uneven", "layout", "agreement", "scalable_shuffle", "verify", "iterable_sharding", "share")
    given = {name: getattr(options, name) for name in names}
    return given | {"seed": "default" if options.seed is None else options.seed}


def _sharing(members: Mapping[int, int]) -> dict[str, object]:
    """Return which rank takes which share: listed for few ranks, a fingerprint for many."""
    text = ", ".join(f"rank {rank}: {share}" for rank, share in members.items())
    return {"shares": text if len(members) <= _TOLD_IN_FULL else fingerprint([text])}


def _judge(records: Mapping[int, _Record]) -> dict[int, _Verdict]:
    require_same_samples(AGREEING, {rank: record.samples for rank, record in records.items()})
    require_same(AGREEING, {rank: record.compared for rank, record in records.items()})
    held = {rank: (record.share, record.made_for) for rank, record in records.items() if record.made_for is not None}
    if len(held) == len(records):
        require_all_shares(AGREEING, held)
    first = next(iter(records.values()))
    orders = _differing({rank: record.order for rank, record in records.items()})
    if orders or first.meets:
        require_same(AGREEING, {rank: {"batches fetched ahead": said.ahead} for rank, said in records.items()})
    seed = _own_seed(list(records), first) if first.seed is None else first.seed
    return dict.fromkeys(records, _Verdict(seed, first.generators, orders, next(_numbers)))


def _own_seed(members: Sequence[int], first: _Record) -> int:
    """Return a seed for one loader alone, so that no two loaders of these ranks have the same order.

    Count per group and stream: tensor-parallel ranks in another group must come to the same seed, even if only one of
    the groups has patched, say, a loader for validation before.
    """
    loader: tuple[int | str, ...] = (*members, first.stream)
    _numbers_of_like[loader] += 1
    return loader_seed(first.base_seed, first.stream, _numbers_of_like[loader])


def _differing(orders: Mapping[int, str | None]) -> Mapping[int, str | None]:
    parties = by_value(orders)
    return {} if None in parties or len(parties) == 1 else orders
