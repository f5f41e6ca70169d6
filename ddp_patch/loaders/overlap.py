"""The first samples of ranks' streams, by hashes of their indices or of what batches hold: what they have in common."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_patch.loaders.samples import copy_to_draw

__all__ = ["FirstSamples", "first_samples", "more_in_common_than_chance", "row_hashes"]

# Looking stops here, because a sampler may be endless; and earlier, where the dataset has no length.
_MOST_SAMPLES, _OF_UNKNOWN = 2**16, 256
# How many hashes a rank sends at most, of so many bytes: the smallest, which are of the same samples on every rank.
_MOST_HASHES, _BYTES = 512, 6
# So many bytes of a sample's array are looked at, evenly spread.
_LOOKED_AT = 1024
# So many samples in common are chance where only a part of each rank's samples is known.
_BY_CHANCE = 16
# A sampler that draws with replacement from few samples draws each more often.
_OFTEN = 4
_SCALARS = (str, bytes, int, float, bool, np.generic)


class FirstSamples(NamedTuple):
    """The first samples of a rank's stream, in no order: plain data, as it travels.

    Attributes:
        hashes: The smallest hashes of their indices or names, each once, in ascending order.
        drawn: How many there are.
        distinct: How many of them differ.
        sizes: How many are in an item, each number once: 1 where items are samples, and others where they are batches.
    """

    hashes: Sequence[int]
    drawn: int
    distinct: int
    sizes: Sequence[int]

    @property
    def is_cut(self) -> bool:
        """Whether more samples differ than there are hashes."""
        return self.distinct > len(self.hashes)


def first_samples(sampler: Any, dataset: object, n: int | None, ranks: int) -> FirstSamples | None:
    """Return which samples a stream begins with, at most one rank's share of the dataset; None if that is unknown.

    Args:
        sampler: What the stream comes from. A copy of it draws what the sampler would draw next.
        dataset: What the samples come from. It is not copied.
        n: How many samples the dataset has.
        ranks: How many ranks share them.
    """
    wanted = min(-(-n // ranks), _MOST_SAMPLES) if n else _OF_UNKNOWN
    samples: list[Any] = []
    sizes = set[int]()
    try:
        with copy_to_draw(sampler, dataset) as drawn:
            for item in islice(drawn, wanted):  # a batch may be empty
                batch = _samples_in(item)
                if len(samples) + len(batch) > wanted:
                    break  # it may be padded
                samples += batch
                sizes.add(len(batch))
    except Exception:  # noqa: BLE001 - the user's code, run for a better message
        return None
    hashes = sorted(set(map(_hashed, samples)))
    return FirstSamples(hashes[:_MOST_HASHES], len(samples), len(hashes), sorted(sizes))


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


def more_in_common_than_chance(parties: Mapping[int, FirstSamples]) -> tuple[int, int, int, int] | None:
    """Return two parties, by number, whose samples are the same, how many of these, and how many the first one has.

    None if parties have no more samples in common than padding, and than they repeat within themselves.
    """
    most = 256**_BYTES - 1
    last = min((party.hashes[-1] for party in parties.values() if party.is_cut), default=most)  # that all have sent
    held = {place: [one for one in party.hashes if one <= last] for place, party in parties.items()}
    owner: dict[int, int] = {}  # the first one that has it
    pairs = Counter(
        (who, place) for place, own in held.items() for one in own if (who := owner.setdefault(one, place)) != place
    )
    # Of batches of one size, the last would be padded, and is not looked at.
    is_even = all(len(party.sizes) < 2 for party in parties.values())
    largest = max((size for party in parties.values() for size in party.sizes), default=1)
    padding = len(parties) - 1 if is_even else len(parties) * largest
    # Samplers that draw with replacement give two ranks as many in common as either repeats within itself, or twice.
    repeated = sum(party.drawn - party.distinct for party in parties.values())
    # But all the same samples are no chance, unless they are just the few that a sampler often draws.
    if len({tuple(party.hashes) for party in parties.values()}) == 1 and all(
        party.distinct > padding and party.drawn < _OFTEN * party.distinct for party in parties.values()
    ):
        repeated = 0
    chance = _BY_CHANCE if last < most else 0
    if pairs.total() <= padding + chance + 3 * (len(parties) - 1) * repeated:
        return None
    ((who, other), shared) = pairs.most_common(1)[0]
    return who, other, shared, len(held[who])


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
