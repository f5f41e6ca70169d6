"""Make every rank see the same stream: compare the ranks at the patch and, if the user asks, in every epoch."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from ddp_patch.errors import InvalidOptionError, LeaderWarning
from ddp_patch.loaders.facts import StreamFacts
from ddp_patch.loaders.nests import told_at
from ddp_patch.loaders.worlds import HeldWorld
from ddp_patch.options import Agreement, Options
from ddp_patch.plan import Plan
from ddp_patch.ranks.comparison import require_same
from ddp_patch.ranks.exchange import exchange, refuse
from ddp_patch.ranks.notices import Peers, agreed_peers, given_peers
from ddp_patch.ranks.shards import TELLING_APART, why_each_differs
from ddp_patch.ranks.verdicts import AGREEING, Record, Told, Verdict, judge
from ddp_patch.ranks.world import World
from ddp_patch.streams.fingerprint import fingerprint
from ddp_patch.streams.seeding import Seed

if TYPE_CHECKING:
    from ddp_patch.ranks.leader import Leader

__all__ = ["ONE", "Agreed", "Subject", "agree", "refusals_told"]

# How a call for a single loader or sampler is described.
ONE = "one"

# With at most this many ranks, an error lists which rank takes which share.
_TOLD_IN_FULL = 16


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
class Subject:
    """A loader or sampler that ranks agree on.

    Attributes:
        compared: What must be the same on every rank, by name.
        stream: The stream to shard; None if it is sharded already.
        batches_ahead: How many batches the loader's workers prefetch. If ranks synchronise within an epoch, this number
            must be the same on all, or one would wait for others that never come.
        made_for: The rank and the number of ranks that an already sharded loader was made for, if known.
        place: Its name among several loaders; empty for a single one.
    """

    compared: Mapping[str, object]
    stream: StreamFacts | None
    batches_ahead: int = 0
    made_for: HeldWorld | None = None
    place: str = ""


def agree(world: World, options: Options, subjects: Sequence[Subject], nest: str = ONE) -> list[Agreed]:
    """Compare the ranks and return what they agreed on, for each of several loaders.

    Every rank sends one record for all, and gets the first rank's seeds and generator states. In an explicit world, no
    rank waits for another and the generators stay as they are.

    Args:
        world: The ranks that share.
        options: What the user chose.
        subjects: What they agree on.
        nest: A description of the loaders, the same on every rank.

    Raises:
        RankMismatchError: The facts or options differ, or a rank refused.
        MissingRanksError: A rank did not arrive in time.
        InvalidOptionError: An option needs ranks that communicate.
        WorldError: An explicit world has more shares than the process group has ranks.
    """
    if world.members is None:
        _refuse_communication(options)
        return [_agreed_alone(world, options, subject) for subject in subjects]
    members = list(world.members)
    generators = [() if subject.stream is None else subject.stream.generators for subject in subjects]
    records = [_record(world, options, *each) for each in zip(subjects, generators, strict=True)]
    told = Told(nest, _chosen(options) | _sharing(world.members), records)
    verdicts: Sequence[Verdict] = exchange(members, AGREEING, told, judge, options.timeout)
    for found, verdict in zip(generators, verdicts, strict=True):
        for generator, state in zip(found, verdict.generators, strict=True):
            generator.set_state(state)
    whys = _why_orders_differ(world, options, subjects, verdicts)
    for place, why in whys.items():
        if dist.get_rank() == members[0]:
            text = f"{place}: {why}" if place else why
            warnings.warn(text, LeaderWarning, stacklevel=4)  # which is where a patch or a wrapper was called
    return [
        _agreed(world, replace(options, agreement=_settled(options, subject.place in whys)), verdict)
        for subject, verdict in zip(subjects, verdicts, strict=True)
    ]


def _record(world: World, options: Options, subject: Subject, found: Sequence[torch.Generator]) -> Record:
    stream = subject.stream
    return Record(
        place=subject.place,
        compared={**subject.compared, "generators": len(found)},
        order=stream.order if stream is not None and options.agreement == "auto" else None,
        samples=stream.samples if stream is not None and options.agreement in {"auto", "leader"} else (),
        stream=fingerprint([] if stream is None else [stream.described]),
        seed=options.seed,
        base_seed=_base_seed(world),
        generators=[generator.get_state() for generator in found],
        synchronises=options.verify or options.agreement == "leader",
        ahead=subject.batches_ahead,
        share=world.rank,
        made_for=subject.made_for,
    )


def _why_orders_differ(
    world: World, options: Options, subjects: Sequence[Subject], verdicts: Sequence[Verdict]
) -> dict[str, str]:
    """Return why the ranks' orders of some loaders differ, by their names. Only then ranks exchange a second time."""
    differing = {
        subject.place: (verdict.orders, subject.stream)
        for subject, verdict in zip(subjects, verdicts, strict=True)
        if subject.stream is not None and verdict.orders
    }
    if not differing:
        return {}
    told = {place: stream.first_samples(world.num_replicas) for place, (_, stream) in differing.items()}
    asked = {place: (orders, stream.name) for place, (orders, stream) in differing.items()}
    judge_orders = partial(why_each_differs, asked, world.num_replicas)
    whys: dict[str, str] = exchange(list(world.members or ()), TELLING_APART, told, judge_orders, options.timeout)
    return whys


def _agreed_alone(world: World, options: Options, subject: Subject) -> Agreed:
    """Return the agreement in an explicit world, where no other rank is asked."""
    with told_at(subject.place):
        peers = given_peers(world.rank, world.num_replicas, subject.compared)
    return Agreed(world, replace(options, agreement=_settled(options, False)), _seed(options, 0), peers=peers)


def _agreed(world: World, options: Options, verdict: Verdict) -> Agreed:
    members = list(world.members or ())
    seed, peers = _seed(options, verdict.seed), agreed_peers(members, verdict.number)
    return Agreed(world, options, seed, _leader(members, options), verdict.number, peers)


def _seed(options: Options, default: int) -> Seed:
    chosen = options.seed
    return Seed(default if chosen is None else chosen, is_chosen=chosen is not None)


def _leader(members: Sequence[int], options: Options) -> "Leader | None":
    if options.agreement != "leader":
        return None
    from ddp_patch.ranks.leader import Leader  # most trainings do not need it

    return Leader(members, options.timeout)


@contextmanager
def refusals_told(world: World | None, doing: str = AGREEING) -> Iterator[None]:
    """Report to the other ranks if this one raises first, so that they don't wait for it."""
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


def _settled(options: Options, orders_differ: bool) -> Agreement:
    """Return the agreement, with "auto" resolved."""
    if options.agreement != "auto":
        return options.agreement
    return "leader" if orders_differ else "seeded"


def _refuse_communication(options: Options) -> None:
    asked = "agreement='leader'" if options.agreement == "leader" else "verify=True" if options.verify else None
    if asked is not None:
        raise InvalidOptionError(
            f"{asked} needs ranks that communicate, and with rank= and num_replicas= they never do. Leave these out, "
            "after torch.distributed.init_process_group(), or leave that out."
        )


def _chosen(options: Options) -> dict[str, object]:
    names = ("uneven", "layout", "agreement", "scalable_shuffle", "verify", "iterable_sharding", "share")
    given = {name: getattr(options, name) for name in names}
    return given | {"seed": "default" if options.seed is None else options.seed}


def _sharing(members: Mapping[int, int]) -> dict[str, object]:
    """Return which rank takes which share: listed for few ranks, a fingerprint for many."""
    text = ", ".join(f"rank {rank}: {share}" for rank, share in members.items())
    return {"shares": text if len(members) <= _TOLD_IN_FULL else fingerprint([text])}
