"""Agree with the other ranks on how data is sharded: what they report, how it is judged, what follows."""

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

from ddp_patch.errors import InvalidOptionError, LeaderWarning, RankMismatchError
from ddp_patch.loaders.contents import Content, FirstSamples, relation_of
from ddp_patch.loaders.facts import StreamFacts
from ddp_patch.loaders.recognition import HeldWorld, error_context
from ddp_patch.options import Agreement, Options
from ddp_patch.orders.fingerprint import fingerprint
from ddp_patch.orders.random_states import Seed, loader_seed
from ddp_patch.plan import Plan
from ddp_patch.ranks.exchange import by_value, exchange, ranks_text, refuse, require_same
from ddp_patch.ranks.notices import Peers, agreed_peers, given_peers
from ddp_patch.ranks.world import World

if TYPE_CHECKING:
    from ddp_patch.ranks.leader import Leader

__all__ = [
    "AGREEING",
    "ONE",
    "TELLING_APART",
    "Agreed",
    "Decision",
    "RankReport",
    "Subject",
    "Told",
    "agree",
    "failures_broadcast",
    "judge",
    "require_all_shares",
    "require_same_samples",
    "why_each_differs",
    "why_orders_differ",
]


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


def require_same_samples(doing: str, reported: Mapping[int, Sequence[Content]]) -> None:
    """Raise unless the ranks' datasets hold the same samples, as far as all ranks know.

    Attributes of datasets may hold other things than samples, such as random numbers. So one that identifies the
    samples, and is the same on all ranks, proves that the samples are.

    Args:
        doing: What the ranks are doing, for the error.
        reported: What each rank reports about its dataset.
    """
    named = {rank: {content.name: content for content in contents} for rank, contents in reported.items()}
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
    reported: Mapping[int, Mapping[str, tuple[int, FirstSamples] | None]],
) -> dict[int, dict[str, str]]:
    """Return for each rank the warnings that ``why_orders_differ`` has, by the names of the loaders.

    Args:
        asked: The loaders whose orders differ, by their names: these orders, and the class that they come from.
        ranks: How many ranks share.
        reported: What each rank reports about these loaders, by their names.

    Raises:
        RankMismatchError: The streams of a loader are parts already.
    """
    whys = {}
    for place, (orders, name) in asked.items():
        with error_context(place):
            whys[place] = why_orders_differ(orders, name, ranks, {rank: said[place] for rank, said in reported.items()})
    return dict.fromkeys(reported, whys)


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
    relation = _relation([reported[members[0]] for members in parties.values()], ranks)
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


AGREEING = "Agreeing on how data is sharded"
_numbers = count(1)
# How many loaders without a seed these ranks have patched that had such a stream.
_numbers_of_like: Counter[tuple[int | str, ...]] = Counter()


@dataclass(frozen=True, slots=True)
class RankReport:
    """What each rank reports about one loader.

    Attributes:
        place: Its name among several loaders; empty for a single one.
        compared: What must be the same on every rank, by name.
        order: A fingerprint of the stream's first items; None if unknown.
        samples: Fingerprints of the samples that the dataset holds, as far as they are known.
        stream: A fingerprint of what distinguishes the loader's stream from others.
        seed: The seed that was chosen, if one was.
        base_seed: What the seed follows from if none was chosen.
        generators: The states of the user's generators.
        synchronises: Whether the ranks synchronise in every epoch.
        ahead: How many batches the loader's workers prefetch.
        share: Which shard this rank takes.
        made_for: For which rank of how many the loader is sharded already; None if unknown.
    """

    place: str
    compared: Mapping[str, object]
    order: str | None
    samples: Sequence[Content]
    stream: str
    seed: int | None
    base_seed: int
    generators: Sequence[torch.Tensor]
    synchronises: bool
    ahead: int
    share: int
    made_for: HeldWorld | None


@dataclass(frozen=True, slots=True)
class Told:
    """What each rank reports.

    Attributes:
        nest: A description of its loaders.
        common: What must be the same on every rank for all of its loaders, by name.
        records: One for each loader.
    """

    nest: str
    common: Mapping[str, object]
    records: Sequence[RankReport]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the first rank concludes about one loader.

    Attributes:
        seed: The loader's own seed.
        generators: The states of the first rank's generators.
        orders: The ranks' orders where they differ; else empty.
        number: The number of this agreement.
    """

    seed: int
    generators: Sequence[torch.Tensor]
    orders: Mapping[int, str | None]
    number: int


_OfOneLoader: TypeAlias = Mapping[int, RankReport]


def judge(reported: Mapping[int, Told]) -> dict[int, tuple[Decision, ...]]:
    """Compare the ranks' loaders, and decide for each what is used on all ranks.

    Raises:
        RankMismatchError: They differ. No seed counts as given then.
    """
    require_same(AGREEING, {rank: {"loaders": said.nest} for rank, said in reported.items()})
    by_rank = (said.records for said in reported.values())
    loaders = [dict(zip(reported, records, strict=True)) for records in zip(*by_rank, strict=True)]
    for records in loaders:
        with error_context(_place(records)):
            require_same_samples(AGREEING, {rank: record.samples for rank, record in records.items()})
    require_same(AGREEING, {rank: _facts(said) for rank, said in reported.items()})
    for records in loaders:
        with error_context(_place(records)):
            _require_alike(records)
    return dict.fromkeys(reported, tuple(map(_verdict, loaders)))


def _place(records: _OfOneLoader) -> str:
    return next(iter(records.values())).place


def _facts(said: Told) -> dict[str, object]:
    """Return everything that must be the same on every rank, by names that include the loader's."""
    facts = {
        f"{record.place} {name}".strip(): value for record in said.records for name, value in record.compared.items()
    }
    return facts | dict(said.common)


def _require_alike(records: _OfOneLoader) -> None:
    """Raise RankMismatchError if the ranks' loaders are sharded in ways that do not fit, or prefetch differently."""
    held = {rank: (record.share, record.made_for) for rank, record in records.items() if record.made_for is not None}
    if len(held) == len(records):
        require_all_shares(AGREEING, held)
    if _differing_orders(records) or any(record.synchronises for record in records.values()):
        require_same(AGREEING, {rank: {"batches fetched ahead": record.ahead} for rank, record in records.items()})


def _verdict(records: _OfOneLoader) -> Decision:
    first = next(iter(records.values()))
    seed = _own_seed(list(records), first) if first.seed is None else first.seed
    return Decision(seed, first.generators, _differing_orders(records), next(_numbers))


def _own_seed(members: Sequence[int], first: RankReport) -> int:
    """Return a seed for one loader alone, so that no two loaders of these ranks have the same order.

    Count per group and stream: tensor-parallel ranks in another group must come to the same seed, even if only one of
    the groups has patched, say, a loader for validation before.
    """
    loader: tuple[int | str, ...] = (*members, first.stream)
    _numbers_of_like[loader] += 1
    return loader_seed(first.base_seed, first.stream, _numbers_of_like[loader])


def _differing_orders(records: _OfOneLoader) -> Mapping[int, str | None]:
    orders = {rank: record.order for rank, record in records.items()}
    parties = by_value(orders)
    return {} if None in parties or len(parties) == 1 else orders


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
    reported = Told(nest, _chosen(options) | _sharing(world.members), records)
    verdicts: Sequence[Decision] = exchange(members, AGREEING, reported, judge, options.timeout)
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


def _record(world: World, options: Options, subject: Subject, found: Sequence[torch.Generator]) -> RankReport:
    stream = subject.stream
    return RankReport(
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
    world: World, options: Options, subjects: Sequence[Subject], verdicts: Sequence[Decision]
) -> dict[str, str]:
    """Return why the ranks' orders of some loaders differ, by their names. Only then ranks exchange a second time."""
    differing = {
        subject.place: (verdict.orders, subject.stream)
        for subject, verdict in zip(subjects, verdicts, strict=True)
        if subject.stream is not None and verdict.orders
    }
    if not differing:
        return {}
    reported = {place: stream.first_samples(world.num_replicas) for place, (_, stream) in differing.items()}
    asked = {place: (orders, stream.name) for place, (orders, stream) in differing.items()}
    judge_orders = partial(why_each_differs, asked, world.num_replicas)
    whys: dict[str, str] = exchange(list(world.members or ()), TELLING_APART, reported, judge_orders, options.timeout)
    return whys


def _agreed_alone(world: World, options: Options, subject: Subject) -> Agreed:
    """Return the agreement in an explicit world, where no other rank is asked."""
    with error_context(subject.place):
        peers = given_peers(world.rank, world.num_replicas, subject.compared)
    return Agreed(world, replace(options, agreement=_settled(options, False)), _seed(options, 0), peers=peers)


def _agreed(world: World, options: Options, verdict: Decision) -> Agreed:
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
def failures_broadcast(world: World | None, doing: str = AGREEING) -> Iterator[None]:
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
