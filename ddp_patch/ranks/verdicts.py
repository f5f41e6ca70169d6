"""What the first rank concludes from all ranks' reports about their loaders."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeAlias

import torch

from ddp_patch.loaders.contents import Content
from ddp_patch.loaders.nests import told_at
from ddp_patch.loaders.worlds import HeldWorld
from ddp_patch.ranks.comparison import by_value, require_same
from ddp_patch.ranks.shards import require_all_shares, require_same_samples
from ddp_patch.streams.seeding import loader_seed

__all__ = ["AGREEING", "Record", "Told", "Verdict", "judge"]

AGREEING = "Agreeing on how data is sharded"
_numbers = count(1)
# How many loaders without a seed these ranks have patched that had such a stream.
_numbers_of_like: Counter[tuple[int | str, ...]] = Counter()


@dataclass(frozen=True, slots=True)
class Record:
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
    records: Sequence[Record]


@dataclass(frozen=True, slots=True)
class Verdict:
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


_OfOneLoader: TypeAlias = Mapping[int, Record]


def judge(told: Mapping[int, Told]) -> dict[int, tuple[Verdict, ...]]:
    """Compare the ranks' loaders, and decide for each what is used on all ranks.

    Raises:
        RankMismatchError: They differ. No seed counts as given then.
    """
    require_same(AGREEING, {rank: {"loaders": said.nest} for rank, said in told.items()})
    by_rank = (said.records for said in told.values())
    loaders = [dict(zip(told, records, strict=True)) for records in zip(*by_rank, strict=True)]
    for records in loaders:
        with told_at(_place(records)):
            require_same_samples(AGREEING, {rank: record.samples for rank, record in records.items()})
    require_same(AGREEING, {rank: _facts(said) for rank, said in told.items()})
    for records in loaders:
        with told_at(_place(records)):
            _require_alike(records)
    return dict.fromkeys(told, tuple(map(_verdict, loaders)))


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


def _verdict(records: _OfOneLoader) -> Verdict:
    first = next(iter(records.values()))
    seed = _own_seed(list(records), first) if first.seed is None else first.seed
    return Verdict(seed, first.generators, _differing_orders(records), next(_numbers))


def _own_seed(members: Sequence[int], first: Record) -> int:
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
