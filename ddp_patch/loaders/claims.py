"""What a loader shows that is said to be sharded already, so that the ranks can compare it."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from ddp_patch.compat.packages import repeats_over_ranks
from ddp_patch.loaders.contents import chosen_samples, held_by
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.loaders.overlap import hashed
from ddp_patch.loaders.recognition import may_ask_rank, samplers_within, stores_of_world
from ddp_patch.loaders.samples import copy_to_draw, length_of
from ddp_patch.orders.fingerprint import fingerprint, number_of
from ddp_patch.walks import stored

__all__ = ["SENT", "Claim", "claim_of", "split_claim"]

# Plain data, as it travels.
Claim: TypeAlias = Mapping[str, Any]

# How many samples of a copy are looked at, and how many hashes of them a rank sends: the smallest, which are of the
# same samples on every rank, whatever order each draws them in.
_LOOKED_AT: Final = 2**13
SENT: Final = 256

_SETTINGS: Final = ("seed", "shuffle", "drop_last")


def claim_of(facts: LoaderFacts[Any], ranks: int) -> Claim:
    """Return what the ranks compare of a loader that is sharded already.

    torch's ``DistributedSampler`` counts by its settings. Other samplers count by the first samples that a copy gives,
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
    holder, dataset = facts.sharded_by, facts.dataset
    claim: dict[str, Any] = {
        "name": type(holder).__name__,
        "steps": _steps(facts.loader),
        "settings": {},
        "stored": stores_of_world(holder),
        "seed": _seed(holder),
        "data": fingerprint([(one.name, one.fingerprint) for one in chosen_samples(dataset)]),
        "length": facts.dataset_length,
    }
    if isinstance(holder, DistributedSampler):
        found = {name: getattr(holder, name, None) for name in _SETTINGS}
        length = length_of(getattr(holder, "dataset", None), ())
        # Without a shuffle, the seed is of no account.
        seeded = {name: value for name, value in found.items() if name != "seed" or found["shuffle"] is not False}
        claim["settings"] = {**seeded, "samples": length}
    is_torchs = isinstance(holder, DistributedSampler) and type(holder).__iter__ is DistributedSampler.__iter__
    samplers = [*samplers_within(facts.iterated)]
    is_known = is_torchs or any(repeats_over_ranks(type(sampler)) for sampler in samplers)
    if not is_known and any(sampler is holder for sampler in samplers):
        claim |= _first_samples(facts.stream.source, dataset, facts.dataset_length, ranks)
    return claim


def split_claim(facts: LoaderFacts[Any]) -> Claim | None:
    """Return what the ranks compare of an iterable dataset that is to split itself by workers: what it holds."""
    dataset = facts.dataset
    return None if may_ask_rank(dataset) else {"name": type(dataset).__name__, "held": held_by(dataset)}


def _seed(holder: object) -> int | None:
    return next((value for name, value in stored(holder).items() if "seed" in name and type(value) is int), None)


def _steps(loader: Any) -> int | None:
    """Return how many batches a loader says that it has; torch notes that it was asked, and warns of more later."""
    noted = getattr(loader, "_IterableDataset_len_called", None)
    steps = length_of(loader, ())
    if hasattr(loader, "_IterableDataset_len_called"):
        loader._IterableDataset_len_called = noted
    return steps


def _first_samples(sampler: Any, dataset: object, n: int | None, ranks: int) -> dict[str, Any]:
    """Return the hashes of the samples that a copy of a sampler gives first; None if that cannot be told."""
    # An endless sampler begins again after its share.
    wanted = SENT if n is None else min(max(1, n // ranks), _LOOKED_AT)
    samples: list[Any] = []
    sizes = set[int]()
    try:
        with copy_to_draw(sampler, dataset, seeded=False) as drawn:
            for item in islice(iter(drawn), wanted):  # a batch may be empty
                found = _samples_in(item)
                if len(samples) + len(found) > wanted:
                    break  # the batch may be padded
                samples += found
                sizes.add(len(found))
    except Exception:  # noqa: BLE001 - the user's code, run for a check that can be done without
        return {"hashes": None}
    hashes, length = np.unique(hashed([_plain(one) for one in samples])), length_of(sampler, ())
    return {
        "drawn": len(samples),
        "distinct": len(hashes),
        "largest": 1 if len(sizes) == 1 else max(sizes, default=1),
        "gives": None if length is None or len(sizes) != 1 else length * sizes.pop(),
        "is_part": wanted == _LOOKED_AT,
        "hashes": [int(one) for one in hashes[:SENT]],
    }


def _samples_in(item: Any) -> Sequence[Any]:
    """Return the samples that an item of a sampler names: itself, or those that it is a batch of."""
    listed = item.tolist() if isinstance(item, torch.Tensor | np.ndarray | np.generic) else item
    found = listed if isinstance(listed, list) else [listed]
    if not all(map(_is_name, found)):
        raise TypeError("neither indices nor names")
    return found


def _is_name(sample: Any) -> bool:
    parts = sample if type(sample) is tuple else (sample,)
    return all(isinstance(part, int | str | bytes | np.integer) for part in parts)


def _plain(sample: Any) -> int:
    return int(sample) % 2**64 if isinstance(sample, int | np.integer) else number_of([sample])
