"""Why every rank sees the same stream: compared at the patch, and every epoch where the user asks for it."""

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddp_patch.errors import InvalidOptionError, LeaderWarning, RankMismatchError
from ddp_patch.loaders.contents import chosen_samples, spread
from ddp_patch.loaders.copying import generators, random_generators
from ddp_patch.loaders.nesting import nested_samplers
from ddp_patch.options import Agreement, Options
from ddp_patch.plan import Plan
from ddp_patch.ranks.comparison import by_value, ranks_text, require_same
from ddp_patch.ranks.exchange import exchange, refuse
from ddp_patch.ranks.leader import Leader
from ddp_patch.ranks.world import World
from ddp_patch.streams.chunks import own
from ddp_patch.streams.fingerprint import COMPARED, fingerprint
from ddp_patch.streams.orders import has_order, order_of
from ddp_patch.streams.seeding import PrivateRNG, unmoved

__all__ = [
    "Agreed",
    "Proposal",
    "agree",
    "describe",
    "length_of",
    "refusals_told",
    "require_length",
    "sample_order",
]

logger: logging.Logger = logging.getLogger("ddp_patch")

# Of so many ranks an error lists who takes which share.
_TOLD_IN_FULL = 16

AGREEING = "Agreeing on how data is shared"
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks agreed on.

    Attributes:
        world: The ranks that share.
        options: The options, with rank 0's seed and with what ``agreement="auto"`` came to.
        leader: How rank 0 sends every rank its share, where it draws for all.
        number: Which of the agreements this is, counted on the first rank: it tells one loader from another.
    """

    world: World
    options: Options
    leader: Leader | None = None
    number: int = 0

    @property
    def seed(self) -> int:
        """The seed that every epoch's order is derived from."""
        return cast(int, self.options.seed)

    def plan(self, rank: int) -> Plan:
        """The share of a rank."""
        return Plan(rank, self.world.num_replicas, self.options.uneven, self.options.layout)

    def check(self, doing: str, facts: Mapping[str, object], known: Mapping[str, object] | None = None) -> None:
        """With ``verify=True``, compare facts between the ranks: RankMismatchError on every rank if they differ.

        Args:
            doing: What the ranks are about.
            facts: What every rank must say, by name.
            known: What is compared between those ranks only that say it.
        """
        if self.options.verify:
            self.compare(doing, facts, known)

    def compare(self, doing: str, facts: Mapping[str, object], known: Mapping[str, object] | None = None) -> None:
        """Compare facts between the ranks, as ``check`` does, where they communicate at all."""
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
class Proposal:
    """What one rank has to say of its loader before it is shared.

    Attributes:
        facts: What must be the same on every rank, by name.
        sampler: What the stream comes from, or None where there is nothing to compare.
        holders: What may hold a ``torch.Generator`` of the user's.
        dataset: The dataset, which is never copied.
        ahead: How many batches the loader's workers fetch ahead. The same on every rank where the ranks meet in an
            epoch: else one would wait for the others where these do not come yet.
    """

    facts: Mapping[str, object]
    sampler: object
    holders: Sequence[object]
    dataset: object = None
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class _Record:
    """What each rank says of itself."""

    facts: Mapping[str, object]
    order: str | None  # a fingerprint of the stream's first items, or None where there is none
    samples: str | None  # a fingerprint of which samples the dataset was cut down to, or None where it cannot be told
    seed: int
    generators: Sequence[torch.Tensor]
    meets: bool  # whether the ranks will meet in every epoch
    ahead: int


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What rank 0 makes of the records."""

    seed: int
    generators: Sequence[torch.Tensor]
    disagreement: str  # which ranks would draw different orders; empty where none would
    number: int


def agree(world: World, options: Options, proposal: Proposal, stacklevel: int = 3) -> Agreed:
    """Compare the ranks, and return what they agreed on.

    Every rank sends one small record, and gets the first rank's seed and the states of its generators. In a world that
    was given explicitly nothing is sent: the generators stay as they are.

    Args:
        world: The ranks that share.
        options: What the user chose.
        proposal: What this rank has to say.
        stacklevel: How many calls above this one the user's is, for a warning.

    Raises:
        RankMismatchError: The facts or options differ, or a rank refused.
        MissingRanksError: A rank did not come in time.
        InvalidOptionError: An option needs ranks that communicate.
    """
    if world.members is None:
        _refuse_communication(options)
        seed = _default_seed(world) if options.seed is None else options.seed
        return Agreed(world, replace(options, seed=seed, agreement=_settled(options, "")))
    found = generators(proposal.holders)
    record = _Record(
        facts={**proposal.facts, **_facts(options), **_sharing(world.members), "generators": len(found)},
        order=sample_order(proposal.sampler, proposal.dataset) if options.agreement == "auto" else None,
        samples=chosen_samples(proposal.dataset) if options.agreement in {"auto", "leader"} else None,
        seed=_default_seed(world) if options.seed is None else options.seed,
        generators=[generator.get_state() for generator in found],
        meets=options.verify or options.agreement == "leader",
        ahead=proposal.ahead,
    )
    members = list(world.members)
    verdict: _Verdict = exchange(members, AGREEING, record, _judge, options.timeout)
    for generator, state in zip(found, verdict.generators, strict=True):
        generator.set_state(state)
    if verdict.disagreement and dist.get_rank() == members[0]:
        warnings.warn(verdict.disagreement, LeaderWarning, stacklevel=stacklevel)
    options = replace(options, seed=verdict.seed, agreement=_settled(options, verdict.disagreement))
    leader = Leader(members, options.timeout) if options.agreement == "leader" else None
    return Agreed(world, options, leader, verdict.number)


@contextmanager
def refusals_told(world: World | None, doing: str = AGREEING) -> Iterator[None]:
    """When this rank raises before it comes to where all meet, tell the others, who will wait for it there."""
    try:
        yield
    except Exception as error:
        if world is not None and world.members is not None:
            refuse(list(world.members), doing, error)
        raise


def _default_seed(world: World) -> int:
    """The seed where none is given: torch's own, or 0 in a world that is not, or not known to be, all ranks.

    The ranks outside may have to draw the same (tensor-parallel ranks, in groups of their own) and are not asked. 0 is
    ``torch.utils.data.DistributedSampler``'s.
    """
    is_whole = world.members is not None and len(world.members) == dist.get_world_size()
    return torch.initial_seed() if is_whole else 0


def _settled(options: Options, disagreement: str) -> Agreement:
    """What "auto" comes to."""
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


def _facts(options: Options) -> dict[str, object]:
    names = ("uneven", "layout", "agreement", "scalable_shuffle", "verify", "iterable_sharding")
    given = {name: getattr(options, name) for name in names}
    return given | {"seed": "default" if options.seed is None else options.seed}


def _sharing(members: Mapping[int, int]) -> dict[str, object]:
    """Who takes which share, told in full where that is short."""
    text = ", ".join(f"rank {rank}: {share}" for rank, share in members.items())
    return {"shares": text if len(members) <= _TOLD_IN_FULL else fingerprint([text])}


def describe(sampler: object) -> dict[str, object]:
    """Return what can be told of a sampler and all nested in it without drawing: their classes and its length."""
    kinds = " over ".join(type(nested).__qualname__ for nested in nested_samplers(sampler))
    return {"sampler": kinds, "stream length": length_of(sampler)}


def length_of(source: object) -> int | str:
    """Return the length of a sampler or dataset, or "unknown"."""
    try:
        # Some samplers draw to tell it.
        with PrivateRNG(seed=0, epoch=0), unmoved(random_generators(nested_samplers(source))):
            return len(source)  # type: ignore[arg-type]  # TypeError where it has none
    except Exception:  # noqa: BLE001 - the user's code, which an unpatched loader may never call
        return "unknown"


def require_length(options: Options, world: World, name: str, length: object) -> None:
    """Refuse to cut a stream of unknown length into runs."""
    if options.layout == "contiguous" and not isinstance(length, int):
        raise InvalidOptionError(
            f"layout='contiguous' cuts a stream into one run for each of {world.num_replicas} ranks, for which its "
            f"length must be known, and {name} has no len(). Give it a __len__, or use layout='interleaved', which "
            "needs none."
        )


def _judge(records: Mapping[int, _Record]) -> dict[int, _Verdict]:
    _require_same_samples({rank: record.samples for rank, record in records.items()})
    require_same(AGREEING, {rank: record.facts for rank, record in records.items()})
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


def sample_order(sampler: object, dataset: object = None) -> str | None:
    """Return a fingerprint of the first items that the sampler would give, or None where that cannot be told.

    They are drawn from a copy, which shares datasets and modules with the original, under the same random states on
    every rank; torch's own samplers are told by their parameters.
    """
    if sampler is None:
        return None
    if isinstance(sampler, IterableDataset):
        logger.info("The order of an iterable dataset is not compared between ranks: reading it would use it up.")
        return None
    if (parameters := _parameters(sampler)) is not None:
        return fingerprint(parameters)
    if isinstance(sampler, Iterator):
        logger.info("The order of an iterator is not compared between ranks: drawing it would use it up.")
        return None
    originals = random_generators(nested_samplers(sampler))
    try:
        # A copy may share with the original what cannot be copied: a function, with the generators that it draws from.
        with PrivateRNG(seed=0, epoch=0), unmoved(originals):
            drawn = copy.deepcopy(sampler, _kept(sampler, dataset))
            if drawn is sampler and hasattr(sampler, "__dict__"):  # a range may well be its own copy
                raise TypeError("its copy is the sampler itself")
            for generator in generators(nested_samplers(drawn)):
                generator.manual_seed(0)
            if has_order(drawn):
                order = order_of(drawn, epoch=0)
                return fingerprint(order.at(range(min(order.length, COMPARED))))
            return fingerprint(islice(map(own, drawn), COMPARED))  # type: ignore[call-overload]  # an iterable
    except Exception as error:  # noqa: BLE001 - the user's code, run for a check that can be done without
        logger.info(
            "The order of %s is not compared between ranks: drawing a copy of it raised %s: %s",
            type(sampler).__name__,
            type(error).__name__,
            error,
        )
        return None


def _kept(sampler: object, dataset: object) -> dict[int, object]:
    """What a copy of the sampler shares with it, as ``copy.deepcopy`` wants it."""
    values = [value for nested in nested_samplers(sampler) for value in getattr(nested, "__dict__", {}).values()]
    held = [part for value in values for part in (value if isinstance(value, list | tuple) else [value])]
    shared = [value for value in held if isinstance(value, Dataset | nn.Module | DataLoader)]
    return {id(kept): kept for kept in (dataset, *shared)}


def _parameters(sampler: Any) -> list[object] | None:
    """What the order of torch's own samplers follows from, given the same random states; None for any other."""
    if type(sampler) is SequentialSampler:
        return ["sequential"]
    if type(sampler) is RandomSampler:
        return ["random", sampler.replacement, sampler.num_samples, sampler.generator is None]
    if type(sampler) is SubsetRandomSampler:
        return ["subset", *spread(sampler.indices)]
    if type(sampler) is WeightedRandomSampler:
        return ["weighted", sampler.replacement, sampler.num_samples, *spread(sampler.weights)]
    return None
