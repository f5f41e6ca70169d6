"""Agree with the other ranks on how data is sharded: what they report, how it is judged, what follows."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ddp_patch.errors import InvalidOptionError, LeaderWarning, RankMismatchError
from ddp_patch.loaders.contents import Content
from ddp_patch.loaders.facts import Claim, StreamFacts
from ddp_patch.loaders.overlap import FirstSamples, are_parts
from ddp_patch.loaders.recognition import HeldWorld, error_context
from ddp_patch.options import Options
from ddp_patch.orders.digest import fingerprint
from ddp_patch.orders.random_states import Seed, loader_seed
from ddp_patch.plan import Plan
from ddp_patch.ranks.apart import require_apart, require_same_held
from ddp_patch.ranks.exchange import FEW, by_value, exchange, parties_text, refuse, require_same, who_has_what
from ddp_patch.ranks.leader import Leader
from ddp_patch.ranks.mailbox import Peers, agreed_peers, peers_of_explicit_world
from ddp_patch.ranks.world import World

__all__ = ["ONE", "Agreed", "Subject", "agree", "failures_broadcast"]


AGREEING = "Agreeing on how data is sharded"
TELLING_APART = "Finding out why the ranks' orders differ"

# How a call for a single loader or sampler is described.
ONE = "one"

_numbers = count(1)
# How many loaders without a seed these ranks have patched that had such a stream.
_numbers_of_like: Counter[tuple[int | str, ...]] = Counter()


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks agreed on.

    Attributes:
        world: The ranks that share.
        options: What the user chose, with ``order="auto"`` resolved.
        seed: The seed of every epoch's order; the same on every rank.
        leader: Sends every rank its share, if rank 0 draws for all.
        number: The number of this agreement, counted on the first rank. It identifies the loader.
        peers: The ranks whose passes are compared with this one's; None if there are none.
        place: Where the loader was patched, for errors.
    """

    world: World
    options: Options
    seed: Seed
    leader: "Leader | None" = None
    number: int = 0
    peers: Peers | None = None
    place: str = ""

    def plan(self, rank: int) -> Plan:
        """Return the plan that gives a rank its share of the stream."""
        return Plan.of_stream(self.options, rank, self.world.num_replicas)

    @property
    def batch_plan(self) -> Plan | None:
        """The plan that gives this rank its part of each batch, where batches are divided."""
        return Plan.of_batch(self.options, self.world.rank, self.world.num_replicas)

    def compare(self, doing: str, facts: Mapping[str, object]) -> None:
        """Compare facts between the ranks; raise RankMismatchError on every rank if they differ.

        It does nothing in an explicit world.

        Args:
            doing: What the ranks are doing, for the error.
            facts: What must be the same on every rank, by name.
        """
        if self.world.share_of_rank is None:
            return
        record = {"patched as": f"number {self.number}", **facts}
        exchange(list(self.world.share_of_rank), doing, record, partial(require_same, doing), self.options.timeout)


@dataclass(frozen=True, slots=True)
class Subject:
    """A loader or sampler that ranks agree on.

    Attributes:
        compared: What must be the same on every rank, by name.
        stream: The stream to shard; None if it is sharded already.
        batches_ahead: How many batches the loader's workers prefetch. If ranks synchronise within an epoch, this number
            must be the same on all, or one would wait for others that never come.
        made_for: The rank and the number of ranks that an already sharded loader was made for, if known.
        label: Its name among several loaders; empty for a single one.
        claim: What it shows of being sharded already; None if it is not, or was compared before.
    """

    compared: Mapping[str, object]
    stream: StreamFacts | None
    batches_ahead: int = 0
    made_for: HeldWorld | None = None
    label: str = ""
    claim: Claim | None = None


# What a rank reports of all its loaders, or of one; what the first rank decides on one. As JSON has it.
Report: TypeAlias = Mapping[str, Any]


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
    if world.share_of_rank is None:
        return _agree_alone(world, options, subjects)
    members = list(world.share_of_rank)
    generators = [() if subject.stream is None else subject.stream.generators for subject in subjects]
    is_first = dist.get_rank() == members[0]  # whose states all others take
    report = {
        "nest": nest,
        "common": _common_facts(options, world.share_of_rank),
        "seed": options.seed,
        # Ranks outside the world cannot be asked but may have to draw the same: tensor-parallel ranks in other groups.
        "base_seed": torch.initial_seed() if len(members) == dist.get_world_size() else 0,
        "share": world.rank,
        "loaders": [_report(options, *each, is_first) for each in zip(subjects, generators, strict=True)],
    }
    decisions = exchange(members, AGREEING, report, judge_reports, options.timeout)
    for found, decision in zip(generators, decisions, strict=True):
        for generator, state in zip(found, decision["generators"], strict=True):
            generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
    both = zip(subjects, decisions, strict=True)
    led = {one.label: one.stream for one, decided in both if one.stream is not None and decided["orders_differ"]}
    whys = _why_orders_differ(world, options, led) if led else {}
    for label, why in whys.items() if is_first else ():
        text = f"{label}: {why}" if label else why
        warnings.warn(text, LeaderWarning, stacklevel=4)  # which is where a patch or a wrapper was called
    return [
        _agreed(world, options, agreed_peers(members, decision["number"]), decision, leads=subject.label in led)
        for subject, decision in zip(subjects, decisions, strict=True)
    ]


def _agree_alone(world: World, options: Options, subjects: Sequence[Subject]) -> list[Agreed]:
    """Return the agreements in an explicit world, where no other rank is asked."""
    if options.order == "leader":
        raise InvalidOptionError(
            "order='leader' needs ranks that communicate, and with rank= and num_replicas= they never do. Leave these "
            "out, after torch.distributed.init_process_group(), or leave that out."
        )
    agreed = []
    for subject in subjects:
        with error_context(subject.label):
            peers = peers_of_explicit_world(world.rank, world.num_replicas, subject.compared)
        agreed.append(_agreed(world, options, peers, {"seed": 0, "number": 0}))
    return agreed


def _agreed(world: World, options: Options, peers: Peers | None, decision: Report, *, leads: bool = False) -> Agreed:
    """Return an agreement: with the user's seed, if one was chosen, and ``order="auto"`` resolved."""
    if options.order == "auto":
        options = replace(options, order="leader" if leads else "seeded")
    leader = Leader([*(world.share_of_rank or ())], options.timeout) if options.order == "leader" else None
    seed = Seed(decision["seed"] if options.seed is None else options.seed, is_chosen=options.seed is not None)
    return Agreed(world, options, seed, leader, decision["number"], peers)


def _common_facts(options: Options, members: Mapping[int, int]) -> dict[str, object]:
    """Return the options that must be alike, and which rank takes which share: of many ranks a fingerprint of it."""
    shares = ", ".join(f"rank {rank}: {share}" for rank, share in members.items())
    return {name: getattr(options, name) for name in ("share", "uneven", "order", "layout")} | {
        "seed": "default" if options.seed is None else options.seed,
        "shares": shares if len(members) <= FEW else fingerprint([shares]),
    }


def _report(options: Options, subject: Subject, generators: Sequence[torch.Generator], is_first: bool) -> Report:
    """Return what a rank reports of one loader.

    It has fingerprints of the order of the stream's first items, of the samples that the dataset holds, and of what
    distinguishes the stream from others; and the first rank's states of the user's generators.
    """
    stream = subject.stream
    samples: Sequence[Any] = ()
    if options.order in {"auto", "leader", "scalable"}:
        claimed = () if subject.claim is None else subject.claim.get("samples", ())
        samples = claimed if stream is None else [astuple(content) for content in stream.samples]
    # A computed order cannot be led: where the samples to shuffle differ, nobody can draw for all.
    computed = {"samples to shuffle": stream.order} if stream is not None and options.is_scalable else {}
    return {
        "label": subject.label,
        "compared": {**subject.compared, "generators": len(generators), **computed},
        "order": stream.order if stream is not None and options.order == "auto" else None,
        "samples": samples,
        "stream": fingerprint([] if stream is None else [stream.described]),
        "generators": [each.get_state().numpy().tobytes().hex() for each in generators] if is_first else [],
        "ahead": subject.batches_ahead,
        "made_for": subject.made_for,
        "claim": subject.claim,
    }


def judge_reports(reported: Mapping[int, Report]) -> list[Report]:
    """Compare the ranks' loaders, and decide for each what is used on all ranks: seed, generators, order, number.

    Raises:
        RankMismatchError: They differ. No seed counts as given then.
    """
    first = next(iter(reported.values()))
    require_same(AGREEING, {rank: {"loaders": report["nest"]} for rank, report in reported.items()})
    by_loader = zip(*(report["loaders"] for report in reported.values()), strict=True)
    loaders = [(of_ranks[0]["label"], dict(zip(reported, of_ranks, strict=True))) for of_ranks in by_loader]
    for label, of_ranks in loaders:
        with error_context(label):
            require_same_samples({rank: [Content(*told) for told in one["samples"]] for rank, one in of_ranks.items()})
    facts: dict[int, dict[str, object]] = {rank: {} for rank in reported}
    for label, of_ranks in loaders:
        for rank, loader in of_ranks.items():
            facts[rank] |= {f"{label} {name}".strip(): value for name, value in loader["compared"].items()}
    require_same(AGREEING, {rank: facts[rank] | report["common"] for rank, report in reported.items()})
    shares = {rank: report["share"] for rank, report in reported.items()}
    for label, of_ranks in loaders:
        with error_context(label):
            _require_that_fit(shares, first["common"], of_ranks)
    return [_decide(first, of_ranks) for _, of_ranks in loaders]


def _require_that_fit(shares: Mapping[int, int], common: Report, of_ranks: Mapping[int, Report]) -> None:
    """Raise RankMismatchError if the ranks' loaders are sharded in ways that do not fit, or prefetch differently."""
    if all(loader["made_for"] for loader in of_ranks.values()):
        require_all_shares({rank: (shares[rank], (*loader["made_for"],)) for rank, loader in of_ranks.items()})
    claims: dict[int, Claim] = {rank: loader["claim"] for rank, loader in of_ranks.items() if loader["claim"]}
    if len(claims) == len(of_ranks) and all("held" in claim for claim in claims.values()):
        require_same_held(AGREEING, claims)
    elif len(claims) == len(of_ranks):
        of_shares = {rank: (shares[rank], claim) for rank, claim in claims.items()}
        require_apart(AGREEING, of_shares, even=common["uneven"] != "keep")
    if _orders_differ(of_ranks) or common["order"] == "leader":
        require_same(AGREEING, {rank: {"batches fetched ahead": loader["ahead"]} for rank, loader in of_ranks.items()})


def _decide(first: Report, of_ranks: Mapping[int, Report]) -> Report:
    seed, loader = first["seed"], next(iter(of_ranks.values()))
    if seed is None:
        # No two loaders of these ranks may have the same order. Count per group and stream: tensor-parallel ranks in
        # another group must come to the same seed, even if only one of the groups has patched another loader before.
        like = (*of_ranks, loader["stream"])
        _numbers_of_like[like] += 1
        seed = loader_seed(first["base_seed"], loader["stream"], _numbers_of_like[like])
    differ = _orders_differ(of_ranks)
    return {"seed": seed, "generators": loader["generators"], "orders_differ": differ, "number": next(_numbers)}


def _orders_differ(of_ranks: Mapping[int, Report]) -> bool:
    orders = {loader["order"] for loader in of_ranks.values()}
    return None not in orders and len(orders) > 1


def _why_orders_differ(world: World, options: Options, led: Mapping[str, StreamFacts]) -> dict[str, str]:
    """Return why the ranks' orders of some loaders differ, by their names: the ranks meet a second time."""
    record = {}
    for label, stream in led.items():
        first = stream.first_samples(world.num_replicas)
        record[label] = stream.order, first and (first[0], astuple(first[1]))

    def judge(reported: Mapping[int, Report]) -> dict[str, str]:
        whys = {}
        for label, stream in led.items():
            orders, firsts = ({rank: told[label][place] for rank, told in reported.items()} for place in (0, 1))
            samples = {rank: first and (first[0], FirstSamples(*first[1])) for rank, first in firsts.items()}
            with error_context(label):
                whys[label] = why_orders_differ(orders, stream.name, world.num_replicas, samples)
        return whys

    whys: dict[str, str] = exchange([*(world.share_of_rank or ())], TELLING_APART, record, judge, options.timeout)
    return whys


@contextmanager
def failures_broadcast(world: World | None, doing: str = AGREEING) -> Iterator[None]:
    """Report to the other ranks if this one raises first, so that they don't wait for it."""
    try:
        yield
    except Exception as error:
        if world is not None and world.share_of_rank is not None:
            refuse(list(world.share_of_rank), doing, error)
        raise


def require_all_shares(held: Mapping[int, tuple[int, HeldWorld]]) -> None:
    """Raise unless the loaders, which are sharded already, were made for these ranks, each share equally often.

    Args:
        held: Which shard each rank takes, and the rank and number of ranks that its loader was made for.
    """
    by_place = dict(held.values())
    taken, ranks = Counter(by_place.values()), next(iter(by_place.values()))[1]
    is_covered = taken.keys() == {(rank, ranks) for rank in range(ranks)} and len(set(taken.values())) == 1
    if is_covered and all(by_place[place] == world for place, world in held.values()):
        return
    parties = by_value({member: f"rank {rank} of {ranks}" for member, (_, (rank, ranks)) in held.items()})
    raise RankMismatchError(
        f"{AGREEING}: the loaders are sharded already, but not for these {len(by_place)} ranks. They were made for "
        f"{who_has_what(parties)}, so some samples would be lost or repeated. Build each rank's sampler or dataset for "
        "its own rank, or pass the process_group= or device_mesh= that it was made for."
    )


def require_same_samples(reported: Mapping[int, Sequence[Content]]) -> None:
    """Raise unless the ranks' datasets hold the same samples, as far as all ranks know.

    Attributes of datasets may hold other things than samples, such as random numbers. So one that identifies the
    samples, and is the same on all ranks, proves that the samples are.

    Args:
        reported: What each rank reports about its dataset.
    """
    named = {rank: {content.name: content for content in contents} for rank, contents in reported.items()}
    common = [name for name in next(iter(named.values())) if all(name in contents for contents in named.values())]
    differing = [name for name in common if len({contents[name].fingerprint for contents in named.values()}) > 1]
    held = {name for name in common if all(contents[name].is_held for contents in named.values())}
    if any(all(contents[name].identifies for contents in named.values()) for name in held.difference(differing)):
        differing = [name for name in differing if name not in held]
    if not differing:
        return
    prints = {rank: tuple(contents[name].fingerprint for name in differing) for rank, contents in named.items()}
    raise RankMismatchError(
        f"{AGREEING}: the datasets of {parties_text(by_value(prints))} have different samples at the same indices: "
        f"they differ in {', '.join(differing)}. Each rank would take a shard of its own part only, and the rest would "
        "be lost. Patch a loader of the whole dataset: without split_dataset_by_node(), shard() or "
        "data[rank::world_size], and with random_split(), shuffle(), listed files and random data made alike on every "
        "rank. If you want each rank to have its own part, leave out a DistributedSampler, and say is_ddp_aware = True "
        "in the dataset's class: its loader is left as it is. If only the content differs, order='seeded' does not "
        "compare it."
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
    parties, mark = by_value(orders), f"say is_ddp_aware = True in {name}, and its loader is left as it is"
    listed, known = parties_text(parties), [told for one, *_ in parties.values() if (told := reported[one])]
    if len(known) == len(parties) and are_parts([one for _, one in known], known[0][0], ranks):
        raise RankMismatchError(
            f"The samplers of {listed} are sharded already: {name} gives each rank other samples, with none in common "
            f"but padding. Sharding them again would lose most samples. Build {name} for one process and patch that; "
            f"or, if you want each rank to have its own part, {mark}."
        )
    return (
        f"{listed.capitalize()} would draw different orders: the sampler has a random generator of its own that is "
        "seeded by rank, holds data (weights, indices) that differ, or follows the order of a set or of files; or it "
        "is sharded already, which its first samples do not show, and then most samples are lost. From now on rank 0 "
        "draws each epoch and sends every rank its share, about 1 / num_replicas of the indices, at the epoch's "
        f"start. Make the sampler's order the same on every rank; or, if it is sharded, {mark}."
    )
