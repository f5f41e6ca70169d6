"""Whether ranks' streams are parts of one dataset, or the same samples in other orders, by a few hashes of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from ddp_patch.loaders.samples import copy_to_draw
from ddp_patch.orders.fingerprint import number_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FirstSamples", "Relation", "first_samples", "hashed", "relation_of"]


# Looking stops here, because a sampler may be slow or endless.
_MOST_SAMPLES, _MOST_SECONDS = 2**18, 1.0
# How many hashes a rank sends at most: 8 KiB.
_MOST_HASHES = 1024
# If streams are drawn independently, how many samples they must be expected to share before sharing none is evidence:
# by chance that happens once in e**20 cases.
_EXPECTED = 20.0
_HASHES = 2**64

Relation: TypeAlias = Literal["parts", "overlapping", "unclear"]


@dataclass(frozen=True, slots=True)
class FirstSamples:
    """The first samples of a rank's stream, in no order.

    Attributes:
        hashes: The smallest hashes of their indices or names, each once, in ascending order.
        is_cut: Whether there are more.
        is_whole: Whether the stream ends with these samples.
        largest: The most samples in an item: 1 where items are indices.
    """

    hashes: Sequence[int]
    is_cut: bool
    is_whole: bool
    largest: int


def first_samples(sampler: Any, dataset: object, n: int | None, ranks: int) -> FirstSamples | None:
    """Return which samples a stream begins with: as many as one rank's share of the dataset.

    Nothing is known of a dataset without a length, or of items other than its indices or names, and lists of them.

    Args:
        sampler: What the stream comes from. A copy of it is drawn from.
        dataset: What the samples come from. It is not copied.
        n: How many samples the dataset has.
        ranks: How many ranks share them.
    """
    if not n:
        return None
    samples: list[Any] = []
    largest, wanted, until = 1, min(-(-n // ranks), _MOST_SAMPLES), monotonic() + _MOST_SECONDS
    try:
        with copy_to_draw(sampler, dataset) as drawn:
            items = iter(drawn)
            batch = _samples_in(next(items, None))
            while batch and len(samples) < wanted and monotonic() < until:
                samples += batch
                largest = max(largest, len(batch))
                batch = _samples_in(next(items, None))
    except Exception:  # noqa: BLE001 - the user's code, run for a better message
        return None
    if not all(isinstance(index, str) or 0 <= index < n for index in samples):
        return None  # numbers that mean something else
    hashes = np.unique(hashed(samples))
    return FirstSamples(hashes[:_MOST_HASHES].tolist(), len(hashes) > _MOST_HASHES, not batch, largest)


def _samples_in(item: Any) -> list[Any]:
    """Return the indices or names that an item of a stream is, or is a list of; none for the end."""
    if item is None:
        return []
    listed = item.tolist() if isinstance(item, torch.Tensor | np.ndarray | np.generic) else item
    found = listed if isinstance(listed, list) else [listed]
    if not all(isinstance(sample, int | str) for sample in found):
        raise TypeError("neither indices nor names")
    return found


def hashed(samples: Sequence[Any]) -> "NDArray[np.uint64]":
    """Return a number below 2**64 for each sample, evenly spread."""
    numbers = [number_of([one]) if isinstance(one, str) else one for one in samples]
    mixed = np.array(numbers, dtype=np.uint64)
    for multiplier in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9):  # splitmix64's
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(multiplier)
    return mixed ^ (mixed >> np.uint64(31))


def relation_of(parties: Sequence[FirstSamples], n: int, ranks: int) -> Relation:
    """Return how the streams of several groups of ranks relate; each group has its own order.

    They are parts if they share no more than padding and either hold all samples between them, or would share many if
    they were drawn independently of each other. Two ranks that shuffle a million samples with a generator each have
    other samples among their first hundred too, so that alone proves nothing.

    Args:
        parties: What each begins with.
        n: How many samples the dataset has.
        ranks: How many ranks share them.

    Examples:
        >>> halves = [FirstSamples([*range(start, 12, 2)], False, True, 1) for start in (0, 1)]
        >>> relation_of(halves, 12, 2), relation_of([halves[0], halves[0]], 12, 2), relation_of(halves, 10**6, 2)
        ('parts', 'overlapping', 'unclear')
    """
    # Compare up to the hash that all parties were asked for.
    last = min((party.hashes[-1] for party in parties if party.is_cut), default=_HASHES - 1)
    held = [{one for one in party.hashes if one <= last} for party in parties]
    taken, together = sum(map(len, held)), len(set().union(*held))
    padding = (ranks - 1) * max(party.largest for party in parties)
    if taken - together > padding or 2 * (taken - together) >= taken:
        return "overlapping"
    if all(party.is_whole for party in parties) and last == _HASHES - 1 and n - together <= padding:
        return "parts"
    looked_at = n * (last + 1) / _HASHES
    expected = sum(len(one) * len(other) for one, other in combinations(held, 2)) / looked_at
    return "parts" if expected >= _EXPECTED else "unclear"
