"""Agree with the other ranks on how data is sharded: what the ranks report, how the first rank judges the reports."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import chain, count
from typing import Any, TypeAlias
from uuid import uuid4
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from ddp_patch.compat.private_torch import default_store
from ddp_patch.errors import RankMismatchError, RankMismatchWarning
from ddp_patch.loaders.columns import Column, Verdict, compared
from ddp_patch.loaders.facts import StreamFacts, data_digest
from ddp_patch.loaders.recognition import HeldWorld, error_context
from ddp_patch.options import Options
from ddp_patch.orders.digest import fingerprint
from ddp_patch.orders.random_states import (
    RandomGenerator,
    Seed,
    generator_state,
    loader_seed,
    random_generators,
    set_generator_state,
)
from ddp_patch.positions_and_padding import Plan
from ddp_patch.ranks.claims import Claims, agreed_claims, claims_of_explicit_world
from ddp_patch.ranks.exchange import FEW, by_value, exchange, parties_text, refuse, require_same, who_has_what
from ddp_patch.ranks.world import World

AGREEING = "Agreeing on how data is sharded"

# The description of the loaders in a call for a single loader or sampler.
ONE = "one"

_numbers = count(1)
# A name for each process group's store, chosen by the first rank.
_nonces: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
# How many loaders without a seed were patched, by their ranks and the fingerprints of their streams.
_numbers_of_like: Counter[tuple[int | str, ...]] = Counter()
# How many loaders have a sampler that draws from a generator, by its id. An entry goes with its generator.
_loaders_of: dict[int, tuple[object, int]] = {}


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks agreed on.

    Attributes:
        world: The ranks that share.
        options: The user's options.
        seed: The seed of every epoch's order; the same on every rank.
        number: The number of this agreement, counted on the first rank; identifies the loader.
        loaders_before: How many loaders draw from each generator of the samplers and were patched before.
        claims: The claims by which ranks compare their passes over the loader; None if there are no other ranks.
        place: Where the loader was patched, for errors.
        columns: The names of the dataset's columns that the ranks compare when passes begin.
        why_in_common: Says why ranks may get the same samples, though each should have its own; None if the ranks
            compare no samples.
    """

    world: World
    options: Options
    seed: Seed
    number: int = 0
    loaders_before: Mapping[RandomGenerator, int] = field(default_factory=dict)
    claims: Claims | None = None
    place: str = ""
    columns: Sequence[str] = ()
    why_in_common: Callable[[], str] | None = None

    @property
    def plan(self) -> Plan:
        """The plan that gives this rank its share of the stream."""
        return Plan.of_stream(self.options, self.world.rank, self.world.num_replicas)

    @property
    def batch_plan(self) -> Plan | None:
        """The plan that gives this rank its part of each batch, where batches are divided."""
        return Plan.of_batch(self.options, self.world.rank, self.world.num_replicas)

    def data_digest(self, dataset: object) -> str:
        """Return a digest of what identifies a dataset when a pass begins; empty if the ranks do not compare data."""
        return data_digest(dataset, self.options.fingerprint, self.columns)

    @property
    def data_named(self) -> str:
        """What ``data_digest`` is a digest of, for errors."""
        return "what fingerprint= returns" if callable(self.options.fingerprint) else " or ".join(self.columns)

    @property
    def members(self) -> list[int]:
        """The global ranks that agreed; none in an explicit world."""
        return list(self.world.share_of_rank or ())

    def compare(self, doing: str, facts: Mapping[str, object]) -> None:
        """Compare facts between the ranks; raise RankMismatchError on every rank if they differ.

        Do nothing in an explicit world.

        Args:
            doing: What the ranks are doing, for the error.
            facts: What must be the same on every rank, by name.
        """
        if self.members:
            record = {"patched as": f"number {self.number}", **facts}
            exchange(self.members, doing, record, partial(require_same, doing), self.options.timeout)


@dataclass(frozen=True, slots=True)
class Subject:
    """A loader or sampler that ranks agree on.

    Attributes:
        compared: What must be the same on every rank, by name.
        stream: The stream to shard; None if the loader is sharded already.
        made_for: The rank and the number of ranks that an already sharded loader was made for, if known.
        label: The loader's name among several loaders; empty for a single loader.
        known: What must be the same on every rank, if all ranks know it, by name.
        columns: The columns of its dataset that the ranks compare.
    """

    compared: Mapping[str, object]
    stream: StreamFacts | None
    made_for: HeldWorld | None = None
    label: str = ""
    known: Mapping[str, object] = field(default_factory=dict)
    columns: Sequence[Column] = ()


# A rank's report of all its loaders, or of one loader; or the first rank's decision on a loader. JSON values.
Report: TypeAlias = Mapping[str, Any]


def agree(world: World, options: Options, subjects: Sequence[Subject], nest: str = ONE) -> list[Agreed]:
    """Compare the ranks and return what they agreed on, for each of several loaders.

    Every rank sends one record for all loaders, and gets the first rank's seeds and generator states. In an explicit
    world, no rank waits for another, and the generators are not changed.

    Args:
        world: The ranks that share.
        options: The user's options.
        subjects: The loaders or samplers that the ranks agree on.
        nest: The structure of the nested loaders, in words, the same on every rank.

    Raises:
        RankMismatchError: The facts or options differ, or a rank refused.
        MissingRanksError: A rank did not arrive in time.
        WorldError: An explicit world has more shares than the process group has ranks.

    Warns:
        RankMismatchWarning: Data differ, but only data that do not tell samples apart. Given on the first rank.
    """
    if world.share_of_rank is None:
        return _agree_alone(world, options, subjects)
    members, drawn_from = list(world.share_of_rank), [*map(_drawn_from, subjects)]
    generators = [() if subject.stream is None else subject.stream.generators for subject in subjects]
    is_first = dist.get_rank() == members[0]  # all other ranks take its states
    report = {
        # These facts are compared first, because other parts of the report may depend on them.
        "alike": {"version of ddp_patch": import_module("ddp_patch").__version__, "loaders": nest},
        "common": _common_facts(options, world.share_of_rank),
        "seed": options.seed,
        # Tensor-parallel ranks in other groups cannot be asked, and may have to draw the same.
        "base_seed": torch.initial_seed() if len(members) == dist.get_world_size() else 0,
        "share": world.rank,
        "loaders": [
            _report(*each, is_first) for each in zip(subjects, generators, _loaders_before(drawn_from), strict=True)
        ],
    }
    decisions = exchange(members, AGREEING, report, judge_reports, options.timeout)
    for found, decision in zip(generators, decisions, strict=True):
        for generator, state in zip(found, decision["generators"], strict=True):
            set_generator_state(generator, state)
    for decision in decisions if is_first else ():
        if decision["likely"]:
            warnings.warn(decision["likely"], RankMismatchWarning, stacklevel=4)
    for generator in chain.from_iterable(drawn_from):
        _count_loader(generator)
    return [
        _agreed(world, options, agreed_claims(members, decision["token"]), decision, found)
        for decision, found in zip(decisions, drawn_from, strict=True)
    ]


def _agree_alone(world: World, options: Options, subjects: Sequence[Subject]) -> list[Agreed]:
    """Return the agreements in an explicit world, without asking other ranks."""
    agreed = []
    for subject in subjects:
        with error_context(subject.label):
            claims = claims_of_explicit_world(world.rank, world.num_replicas, subject.compared)
        agreed.append(_agreed(world, options, claims, {"seed": 0, "number": 0, "loaders_before": (), "columns": ()}))
    return agreed


def _agreed(
    world: World, options: Options, claims: Claims | None, decision: Report, generators: Sequence[RandomGenerator] = ()
) -> Agreed:
    """Return an agreement, with the user's seed if there is one."""
    seed = Seed(decision["seed"] if options.seed is None else options.seed, is_chosen=options.seed is not None)
    before = dict(zip(generators, decision["loaders_before"], strict=True))
    return Agreed(world, options, seed, decision["number"], before, claims, columns=decision["columns"])


def _drawn_from(subject: Subject) -> list[RandomGenerator]:
    """Return the generators of a loader's samplers."""
    return [] if subject.stream is None else random_generators(subject.stream.samplers)


def _loaders_before(drawn_from: Sequence[Sequence[RandomGenerator]]) -> list[list[int]]:
    """Return, for each generator of each loader, how many loaders that draw from it come before this loader."""
    more = Counter[int]()
    found: list[list[int]] = []
    for generators in drawn_from:
        found.append([_loaders_of.get(id(each), (each, 0))[1] + more[id(each)] for each in generators])
        more.update(map(id, generators))
    return found


def _count_loader(generator: RandomGenerator) -> None:
    """Count one more loader that draws from a generator."""
    key = id(generator)
    kept, before = _loaders_of.get(key, (generator, 0))
    if not before:
        with suppress(TypeError):  # numpy's generators take no weak references
            kept = ref(generator, lambda _: _loaders_of.pop(key, None) and None)
    _loaders_of[key] = kept, before + 1


def _common_facts(options: Options, members: Mapping[int, int]) -> dict[str, object]:
    """Return the options that must be the same, and each rank's share; for many ranks, a fingerprint of the shares."""
    shares = ", ".join(f"rank {rank}: {share}" for rank, share in members.items())
    return {name: getattr(options, name) for name in ("share", "uneven", "layout")} | {
        "seed": "default" if options.seed is None else options.seed,
        "fingerprint": "a function" if callable(options.fingerprint) else options.fingerprint,
        "shares": shares if len(members) <= FEW else fingerprint([shares]),
    }


def _report(
    subject: Subject, generators: Sequence[RandomGenerator], loaders_before: Sequence[int], is_first: bool
) -> Report:
    """Return what a rank reports of one loader.

    The report has the loader's facts, the columns of its dataset and a fingerprint of its stream. On the first rank, it
    also has the states of the user's generators, and how many loaders draw from them already.
    """
    stream = subject.stream
    return {
        "label": subject.label,
        "compared": {**subject.compared, "generators": len(generators)},
        "columns": subject.columns,
        "stream": fingerprint([] if stream is None else [stream.described]),
        "generators": [*map(generator_state, generators)] if is_first else [],
        "loaders_before": loaders_before if is_first else [],
        "made_for": subject.made_for,
        "known": subject.known,
    }


def judge_reports(reported: Mapping[int, Report]) -> list[Report]:
    """Compare the ranks' loaders, and decide for each loader on the seed, generator states and number for all ranks.

    Raises:
        RankMismatchError: The loaders differ. The seeds of later loaders are as if these loaders had not been patched.
    """
    first = next(iter(reported.values()))
    require_same(AGREEING, {rank: report["alike"] for rank, report in reported.items()})
    by_loader = zip(*(report["loaders"] for report in reported.values()), strict=True)
    loaders = [(of_ranks[0]["label"], dict(zip(reported, of_ranks, strict=True))) for of_ranks in by_loader]
    verdicts = []
    for label, of_ranks in loaders:
        with error_context(label):
            lengths = {rank: one["compared"].get("dataset length") for rank, one in of_ranks.items()}
            columns = {rank: [Column(*told) for told in one["columns"]] for rank, one in of_ranks.items()}
            verdicts.append(require_same_data(columns, lengths))
    facts: dict[int, dict[str, object]] = {rank: {} for rank in reported}
    for label, of_ranks in loaders:
        known_to_all = set.intersection(*({*loader["known"]} for loader in of_ranks.values()))
        for rank, loader in of_ranks.items():
            found = loader["compared"] | {name: fact for name, fact in loader["known"].items() if name in known_to_all}
            facts[rank] |= {f"{label} {name}".strip(): value for name, value in found.items()}
    require_same(AGREEING, {rank: facts[rank] | report["common"] for rank, report in reported.items()})
    shares = {rank: report["share"] for rank, report in reported.items()}
    for label, of_ranks in loaders:
        if all(loader["made_for"] for loader in of_ranks.values()):
            with error_context(label):
                require_all_shares({rank: (shares[rank], (*one["made_for"],)) for rank, one in of_ranks.items()})
    return [
        {**_decide(first, of_ranks), "columns": verdict.kept, "likely": likely_text(label, verdict)}
        for (label, of_ranks), verdict in zip(loaders, verdicts, strict=True)
    ]


def _decide(first: Report, of_ranks: Mapping[int, Report]) -> Report:
    seed, loader = first["seed"], next(iter(of_ranks.values()))
    if seed is None:
        # No two loaders of these ranks may have the same order. Count loaders per group and stream: tensor-parallel
        # ranks in another group must come to the same seed, even if only one of the groups has patched another loader
        # before.
        like = (*of_ranks, loader["stream"])
        _numbers_of_like[like] += 1
        seed = loader_seed(first["base_seed"], loader["stream"], _numbers_of_like[like])
    # A later process group may have the same store. The nonce keeps the claims of both groups apart.
    nonce = _nonces.setdefault(default_store(), uuid4().hex[:8])
    number = next(_numbers)
    taken = {name: loader[name] for name in ("generators", "loaders_before")}
    return {"seed": seed, **taken, "number": number, "token": f"{nonce}/{number}"}


@contextmanager
def failures_broadcast(world: World | None, doing: str = AGREEING) -> Iterator[None]:
    """While entered, report an error of this rank to the other ranks, so that they don't wait for this rank."""
    try:
        yield
    except Exception as error:
        if world is not None and world.share_of_rank is not None:
            refuse(list(world.share_of_rank), doing, error)
        raise


def require_all_shares(held: Mapping[int, tuple[int, HeldWorld]]) -> None:
    """Raise an error unless the sharded loaders were made for these ranks, each share equally often.

    Args:
        held: The shard that each rank takes, and the rank and number of ranks that its loader was made for.
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


def require_same_data(reported: Mapping[int, Sequence[Column]], lengths: Mapping[int, object] | None = None) -> Verdict:
    """Compare the columns of the ranks' datasets; raise an error if columns differ that tell samples apart.

    Args:
        reported: The columns of each rank's dataset.
        lengths: How many samples each rank says that it has.
    """
    verdict = compared(reported)
    if not verdict.certain:
        return verdict
    prints = {
        rank: tuple(column.digest for column in columns if column.name in verdict.certain)
        for rank, columns in reported.items()
    }
    of_length = by_value(lengths or {})
    found = "samples at the same indices" if len(of_length) < 2 else f"lengths ({who_has_what(of_length)})"
    raise RankMismatchError(
        f"{AGREEING}: the datasets of {parties_text(by_value(prints))} have different {found}: they differ in "
        f"{', '.join(verdict.certain)}. Each rank would take a shard of its own part only, and the rest would be lost. "
        "Patch a loader of the whole dataset: without split_dataset_by_node(), shard() or data[rank::world_size], and "
        "with random_split(), shuffle(), listed files and random data made alike on every rank. If you want each rank "
        "to have its own part, leave out a DistributedSampler, and say is_ddp_aware = True in the dataset's class: its "
        "loader is left as it is. If these may differ, pass fingerprint= a function of the dataset that returns what "
        "names its samples, or fingerprint=None to compare no data."
    )


def likely_text(label: str, verdict: Verdict) -> str:
    """Return a warning about columns that differ and do not tell samples apart; empty if there are none."""
    if not verdict.likely:
        return ""
    return (
        f"{label + ': ' if label else ''}{AGREEING}: the ranks' datasets differ in {', '.join(verdict.likely)}, which "
        "does not tell samples apart, and nothing that does is the same on all ranks. Either each rank may have its "
        "own (noise, a cache), and nothing is lost; or the ranks have other samples at the same indices, and samples "
        "are lost. Pass fingerprint= a function of the dataset that returns what names its samples, such as its files, "
        "to know which: if these differ, that is an error. Pass fingerprint=None if nothing is lost."
    )
