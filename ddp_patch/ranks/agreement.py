"""Make every rank see the same stream: compare the ranks at the patch and, if the user asks, in every epoch."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
import torch.distributed as dist

from ddp_patch.errors import InvalidOptionError, LeaderWarning, RankMismatchError
from ddp_patch.loaders.facts import StreamFacts
from ddp_patch.options import Agreement, Options
from ddp_patch.plan import Plan
from ddp_patch.ranks.comparison import by_value, ranks_text, require_same
from ddp_patch.ranks.exchange import exchange, refuse
from ddp_patch.ranks.notices import Peers, agreed_peers, given_peers
from ddp_patch.ranks.world import World
from ddp_patch.streams.fingerprint import fingerprint

if TYPE_CHECKING:
    from ddp_patch.ranks.leader import Leader

__all__ = ["AGREEING", "Agreed", "agree", "refusals_told"]

# With at most this many ranks, an error lists which rank takes which share.
_TOLD_IN_FULL = 16

AGREEING = "Agreeing on how data is shared"
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks agreed on.

    Attributes:
        world: The ranks that share.
        options: The options, with rank 0's seed and ``agreement="auto"`` resolved.
        leader: Sends every rank its share, if rank 0 draws for all.
        number: The number of this agreement, counted on the first rank. It identifies the loader.
        peers: The ranks whose passes are compared with this one's; None if there are none.
    """

    world: World
    options: Options
    leader: "Leader | None" = None
    number: int = 0
    peers: Peers | None = None

    @property
    def seed(self) -> int:
        """The seed of every epoch's order."""
        return cast(int, self.options.seed)

    def plan(self, rank: int) -> Plan:
        """Return the plan that gives a rank its share."""
        return Plan(rank, self.world.num_replicas, self.options.uneven, self.options.layout)

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
    samples: str | None  # a fingerprint of the samples that a dataset's subset holds; None if unknown
    seed: int
    generators: Sequence[torch.Tensor]
    meets: bool  # whether the ranks meet in every epoch
    ahead: int


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What rank 0 concludes from the records."""

    seed: int
    generators: Sequence[torch.Tensor]
    disagreement: str  # which ranks would draw different orders; empty if none would
    number: int


def agree(
    world: World,
    options: Options,
    compared: Mapping[str, object],
    stream: StreamFacts | None,
    *,
    batches_ahead: int = 0,
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
        stacklevel: How many calls above this one the user's code is, for a warning.

    Raises:
        RankMismatchError: The facts or options differ, or a rank refused.
        MissingRanksError: A rank did not arrive in time.
        InvalidOptionError: An option needs ranks that communicate.
        WorldError: An explicit world has more shares than the process group has ranks.
    """
    if world.members is None:
        _refuse_communication(options)
        seed = _default_seed(world) if options.seed is None else options.seed
        peers = given_peers(world.rank, world.num_replicas, compared)
        return Agreed(world, replace(options, seed=seed, agreement=_settled(options, "")), peers=peers)
    found = [] if stream is None else stream.generators
    record = _Record(
        compared={**compared, **_chosen(options), **_sharing(world.members), "generators": len(found)},
        order=stream.order if stream is not None and options.agreement == "auto" else None,
        samples=stream.samples if stream is not None and options.agreement in {"auto", "leader"} else None,
        seed=_default_seed(world) if options.seed is None else options.seed,
        generators=[generator.get_state() for generator in found],
        meets=options.verify or options.agreement == "leader",
        ahead=batches_ahead,
    )
    members = list(world.members)
    verdict: _Verdict = exchange(members, AGREEING, record, _judge, options.timeout)
    for generator, state in zip(found, verdict.generators, strict=True):
        generator.set_state(state)
    if verdict.disagreement and dist.get_rank() == members[0]:
        warnings.warn(verdict.disagreement, LeaderWarning, stacklevel=stacklevel)
    options = replace(options, seed=verdict.seed, agreement=_settled(options, verdict.disagreement))
    peers = agreed_peers(members, verdict.number)
    return Agreed(world, options, _leader(members, options), verdict.number, peers)


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


def _default_seed(world: World) -> int:
    """Return the default seed: torch's own, or 0 if the world may not include all ranks.

    Ranks outside the world cannot be asked but may have to draw the same: tensor-parallel ranks in other groups. 0 is
    the default of ``torch.utils.data.DistributedSampler``.
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
            f"{asked} has the ranks communicate, and in a world given by rank= and num_replicas= nothing is sent. "
            "Leave these out, after torch.distributed.init_process_group(), or leave that out."
        )


def _chosen(options: Options) -> dict[str, object]:
    names = ("uneven", "layout", "agreement", "scalable_shuffle", "verify", "iterable_sharding")
    given = {name: getattr(options, name) for name in names}
    return given | {"seed": "default" if options.seed is None else options.seed}


def _sharing(members: Mapping[int, int]) -> dict[str, object]:
    """Return which rank takes which share: listed for few ranks, a fingerprint for many."""
    text = ", ".join(f"rank {rank}: {share}" for rank, share in members.items())
    return {"shares": text if len(members) <= _TOLD_IN_FULL else fingerprint([text])}


def _judge(records: Mapping[int, _Record]) -> dict[int, _Verdict]:
    _require_same_samples({rank: record.samples for rank, record in records.items()})
    require_same(AGREEING, {rank: record.compared for rank, record in records.items()})
    first = next(iter(records.values()))
    disagreement = _disagreement({rank: record.order for rank, record in records.items()})
    if disagreement or first.meets:
        require_same(AGREEING, {rank: {"batches fetched ahead": said.ahead} for rank, said in records.items()})
    return dict.fromkeys(records, _Verdict(first.seed, first.generators, disagreement, next(_numbers)))


def _require_same_samples(samples: Mapping[int, str | None]) -> None:
    parties = by_value(samples)
    if None in parties or len(parties) == 1:
        return
    listed = " and ".join(ranks_text(ranks) for ranks in parties.values())
    raise RankMismatchError(
        f"{AGREEING}: the datasets of {listed} hold different samples, as the indices of a Subset or the first and "
        "last rows of a Hugging Face dataset tell. Each rank would take a share of its own part only, and the rest "
        "would be lost. Patch a loader of the whole dataset: without split_dataset_by_node() or shard(), and with "
        "random_split() or shuffle() seeded alike on every rank. If only the rows' content differs, agreement='seeded' "
        "does not look."
    )


def _disagreement(orders: Mapping[int, str | None]) -> str:
    parties = by_value(orders)
    if None in parties or len(parties) == 1:
        return ""
    listed = " and ".join(ranks_text(ranks) for ranks in parties.values()).capitalize()
    return (
        f"{listed} would draw different orders, whatever the global random states: the sampler has "
        "a random generator of its own that is seeded by rank, or follows the order of a set or of files. From now on "
        "rank 0 draws each epoch and sends every rank its share, about 1 / num_replicas of the indices, at the "
        "epoch's start. Make the sampler's order the same on every rank to do without."
    )
