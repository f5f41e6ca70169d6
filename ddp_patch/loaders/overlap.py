"""The first samples of ranks' streams, by hashes of their indices or of what batches hold: what they have in common."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import combinations, islice
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_patch.loaders.samples import copy_to_draw

__all__ = ["Common", "FirstSamples", "are_parts", "first_samples", "in_common", "row_hashes"]

# Looking stops here, because a sampler may be endless; and earlier, where the dataset has no length.
_MOST_SAMPLES, _OF_UNKNOWN = 2**16, 256
# How many hashes a rank sends at most, of so many bytes: the smallest, which are of the same samples on every rank.
_MOST_HASHES, _BYTES = 512, 6
# If streams are drawn independently, how many samples they must be expected to share before sharing none is evidence:
# by chance that happens once in e**20 cases.
_EXPECTED = 20.0
# So many bytes of a sample's array are looked at, evenly spread.
_LOOKED_AT = 1024
_SCALARS = (str, bytes, int, float, bool, np.generic)


@dataclass(frozen=True, slots=True)
class FirstSamples:
    """The first samples of a rank's stream, in no order: plain data, as it travels.

    Attributes:
        hashes: The smallest hashes of their indices or names, each once, in ascending order.
        drawn: How many there are.
        distinct: How many of them differ.
        sizes: How many are in an item, each number once: 1 where items are samples, and others where they are batches.
        rest: How many follow them before the stream ends, none or one batch; None if it goes on.
        are_chosen: Whether they are indices below the dataset's length, or names.
    """

    hashes: Sequence[int]
    drawn: int
    distinct: int
    sizes: Sequence[int]
    rest: int | None
    are_chosen: bool

    @property
    def is_cut(self) -> bool:
        """Whether more samples differ than there are hashes."""
        return self.distinct > len(self.hashes)


def first_samples(
    sampler: Any, dataset: object, n: int | None, ranks: int, *, seeded: bool = True
) -> FirstSamples | None:
    """Return which samples a stream begins with, at most one rank's share of the dataset; None if that is unknown.

    Args:
        sampler: What the stream comes from. A copy of it is drawn from.
        dataset: What the samples come from. It is not copied.
        n: How many samples the dataset has.
        ranks: How many ranks share them.
        seeded: Whether to seed all generators alike; otherwise the copy draws what the sampler would draw next.
    """
    wanted = min(-(-n // ranks), _MOST_SAMPLES) if n else _OF_UNKNOWN
    samples: list[Any] = []
    sizes, rest = set[int](), 0
    try:
        with copy_to_draw(sampler, dataset, seeded=seeded) as drawn:
            items = iter(drawn)
            for item in islice(items, wanted):  # a batch may be empty
                batch = _samples_in(item)
                if len(samples) + len(batch) > wanted:
                    rest = len(batch)  # which may be padded
                    break
                samples += batch
                sizes.add(len(batch))
            ends = next(items, None) is None
    except Exception:  # noqa: BLE001 - the user's code, run for a better message
        return None
    hashes, places = sorted(set(map(_hashed, samples))), range(n or 0)
    are_chosen = all(isinstance(one, str) or one in places for one in samples)
    return FirstSamples(
        hashes[:_MOST_HASHES], len(samples), len(hashes), sorted(sizes), rest if ends else None, are_chosen
    )


def _samples_in(item: Any) -> list[Any]:
    """Return the indices or names that an item of a stream is, or is a list of."""
    listed = item.tolist() if isinstance(item, torch.Tensor | np.ndarray | np.generic) else item
    found = listed if isinstance(listed, list) else [listed]
    parts = (part for sample in found for part in (sample if type(sample) is tuple else (sample,)))
    if not all(isinstance(part, int | str | bytes | np.integer) for part in parts):
        raise TypeError("neither indices nor names")
    return found


def _hashed(sample: Any) -> int:
    return int.from_bytes(blake2b(str(sample).encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest(), "big")


class Common(NamedTuple):
    """What several parties have in common.

    Attributes:
        held: Each party's hashes, up to the last that all have sent.
        looked_at: The part of all hashes that lies up to there.
        largest: The most samples in an item.
        pairs: How many samples each party has in common with the first one that has them.
    """

    held: Mapping[int, Sequence[int]]
    looked_at: float
    largest: int
    pairs: Counter[tuple[int, int]]


def in_common(parties: Mapping[int, FirstSamples]) -> Common:
    """Return what parties, by number, have in common."""
    last = min((party.hashes[-1] for party in parties.values() if party.is_cut), default=256**_BYTES - 1)
    held = {place: [one for one in party.hashes if one <= last] for place, party in parties.items()}
    first: dict[int, int] = {}
    pairs = Counter(
        (who, place) for place, own in held.items() for one in own if (who := first.setdefault(one, place)) != place
    )
    largest = max((size for party in parties.values() for size in party.sizes), default=1)
    return Common(held, (last + 1) / 256**_BYTES, largest, pairs)


def are_parts(parties: Sequence[FirstSamples], n: int, ranks: int) -> bool:
    """Return whether several groups of ranks, each with an order of its own, surely have a part of the data each.

    They do if they share no more than padding, or far less than by chance, and either hold all samples between
    them or would share many if they were drawn independently of each other. Two ranks that shuffle a million samples
    with a generator each have other samples among their first hundred too, so that alone proves nothing.

    Args:
        parties: What each begins with.
        n: How many samples the dataset has.
        ranks: How many ranks share them.

    Examples:
        >>> halves = [FirstSamples([*range(start, 12, 2)], 6, 6, [1], 0, True) for start in (0, 1)]
        >>> are_parts(halves, 12, 2), are_parts([halves[0], halves[0]], 12, 2), are_parts(halves, 10**6, 2)
        (True, False, False)
    """
    if not (n and all(party.are_chosen for party in parties)):
        return False  # numbers that mean something else
    common = in_common(dict(enumerate(parties)))
    counts, again = [len(own) for own in common.held.values()], common.pairs.total()
    expected = sum(one * other for one, other in combinations(counts, 2)) / (n * common.looked_at)
    rests = [party.rest for party in parties if party.rest is not None and not party.is_cut]
    missing = n - (sum(counts) - again) - sum(rests)
    are_all = len(rests) == len(parties) and abs(missing) <= (ranks - 1) * common.largest
    return again <= max(ranks - 1, expected / 4) and (are_all or expected >= _EXPECTED)


def row_hashes(batch: Any, most: int) -> list[int]:
    """Return a hash of 32 bits for each of the first samples in a batch, the same in every process.

    A sample is what a batch has at one place in all of its tensors, arrays and lists of plain values. Its tensors count
    by their bytes. Nothing is known of tensors on accelerators, nor of batches of other objects.

    Args:
        batch: The batch, as a loader gives it.
        most: How many samples to look at.

    Examples:
        >>> row_hashes({"x": torch.eye(3), "name": ["a", "b", "c"]}, most=2) == row_hashes([torch.eye(3)], most=2)
        False
        >>> len(row_hashes((torch.eye(3), [1, 2, 3]), most=9)), row_hashes(object(), most=9)
        (3, [])
        >>> row_hashes(torch.ones(0, 3), most=9)  # an empty batch
        []
    """
    columns = [column for column in _columns(batch) if len(column)]
    if not columns:
        return []
    # Most of what a batch holds has one value for each sample.
    size = Counter(map(len, columns)).most_common(1)[0][0]
    count = min(most, size)
    bytes_of = [_bytes_of(column, count) for column in columns if len(column) == size]
    rows = zip(*bytes_of, strict=True)
    return [int.from_bytes(blake2b(b"\0".join(row), digest_size=4).digest(), "little") for row in rows]


def _columns(value: Any) -> Iterator[Any]:
    """Yield what has one value for each sample."""
    if isinstance(value, torch.Tensor):
        if value.ndim and value.device.type == "cpu" and value.layout == torch.strided and not value.is_nested:
            yield value
    elif isinstance(value, np.ndarray):
        if value.ndim and not value.dtype.hasobject:
            yield value
    elif isinstance(value, list | tuple) and value and all(isinstance(part, _SCALARS) for part in value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _columns(part)


def _bytes_of(column: Any, count: int) -> Sequence[bytes]:
    if isinstance(column, list | tuple):
        return [repr(value).encode("utf-8", "surrogatepass") for value in column[:count]]
    first = column[:count]
    width = prod(first.shape[1:])
    if isinstance(first, torch.Tensor):
        plain = first.detach().resolve_conj().resolve_neg().reshape(count, width).contiguous().view(torch.uint8).numpy()
    else:
        plain = np.ascontiguousarray(first).reshape(count, width).view(np.uint8)
    return [row.tobytes() for row in plain[:, :: max(1, plain.shape[1] // _LOOKED_AT)]]
