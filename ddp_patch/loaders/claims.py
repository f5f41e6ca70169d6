"""What a loader shows that is said to be sharded already, so that the ranks can compare it."""

from collections.abc import Mapping
from dataclasses import asdict, astuple
from typing import Any, TypeAlias

from torch.utils.data import DistributedSampler

from ddp_patch.compat.packages import repeats_over_ranks
from ddp_patch.loaders.contents import chosen_samples, held_by
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.loaders.overlap import first_samples
from ddp_patch.loaders.recognition import may_ask_rank, samplers_within
from ddp_patch.loaders.samples import length_of, steps_of
from ddp_patch.orders.fingerprint import fingerprint

__all__ = ["Claim", "claim_of", "split_claim"]

# Plain data, as it travels.
Claim: TypeAlias = Mapping[str, Any]


def claim_of(facts: LoaderFacts[Any], ranks: int) -> Claim:
    """Return what the ranks compare of a loader that is sharded already.

    torch's ``DistributedSampler`` counts by its settings, and by the samples of its dataset, which must be the same on
    all ranks. Other samplers count by the first samples that a copy gives,
    as many as are one rank's share. It draws from the random states as they are, as the loader will.

    Args:
        facts: The loader.
        ranks: How many ranks share its samples.

    Examples:
        >>> from ddp_patch.loaders.facts import look_at
        >>> from torch.utils.data import DataLoader
        >>> sampler = DistributedSampler(range(10), num_replicas=2, rank=1, seed=7)
        >>> claim = claim_of(look_at(DataLoader(range(10), batch_size=2, sampler=sampler)), 2)
        >>> claim["steps"], claim["settings"]["seed"]
        (3, 7)
    """
    holder, dataset, n = facts.sharded_by, facts.dataset, facts.dataset_length
    samples = chosen_samples(dataset)
    claim: dict[str, Any] = {
        "name": type(holder).__name__,
        "steps": steps_of(facts.loader),
        "settings": {},
        "data": fingerprint([(one.name, one.fingerprint) for one in samples]),
        "samples": [],
    }
    if isinstance(holder, DistributedSampler):
        claim["samples"] = [astuple(one) for one in samples]
        # Without a shuffle, the seed is of no account.
        names = ("seed", "shuffle", "drop_last")[1 if getattr(holder, "shuffle", None) is False else 0 :]
        claim["settings"] = {name: getattr(holder, name, None) for name in names}
        claim["settings"]["number of samples"] = length_of(getattr(holder, "dataset", None), ())
    samplers = [*samplers_within(facts.iterated)]
    is_known = any(repeats_over_ranks(type(sampler)) for sampler in samplers) or (
        isinstance(holder, DistributedSampler) and type(holder).__iter__ is DistributedSampler.__iter__
    )
    if not is_known and any(sampler is holder for sampler in samplers):
        first = first_samples(facts.stream.source, dataset, n, ranks, seeded=False)
        claim["first"] = first and asdict(first)
    return claim


def split_claim(facts: LoaderFacts[Any]) -> Claim | None:
    """Return what the ranks compare of an iterable dataset that is to split itself by workers: what it holds."""
    dataset = facts.dataset
    return None if may_ask_rank(dataset) else {"name": type(dataset).__name__, "held": held_by(dataset)}
