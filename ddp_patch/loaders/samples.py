"""What can be learnt of samplers and datasets by looking: nested ones, lengths, first orders, and first samples."""

import copy
import logging
import pickle
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import combinations, islice
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp_patch.compat.private_torch import is_torch_batch_sampler, length_not_noted
from ddp_patch.orders.chunks import copy_item, returns_itself, start_iterating
from ddp_patch.orders.digest import COMPARED, fingerprint, number_of
from ddp_patch.orders.orders import has_order, order_of, order_parameters
from ddp_patch.orders.random_states import (
    changed_attributes,
    look,
    plain_attributes,
    random_generators,
    torch_generators,
)
from ddp_patch.walks import held, walk

__all__ = [
    "Common",
    "FirstOrder",
    "FirstSamples",
    "NestedEpochs",
    "are_parts",
    "copy_to_draw",
    "deep_copy",
    "first_order",
    "first_samples",
    "in_common",
    "inner_samplers",
    "is_one_shot",
    "iterated_by",
    "length_of",
    "nested_samplers",
    "or_unknown",
    "row_hashes",
    "steps_of",
    "tell_epoch",
]


V = TypeVar("V")


def iterated_by(loader: Any) -> Any:
    """Return what a loader iterates: its batch sampler, or its sampler if it has none.

    Beside a batch sampler of the user's, ``loader.sampler`` is a default that torch never draws from.
    """
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def nested_samplers(sampler: object) -> Iterator[object]:
    """Yield a sampler and all that it holds as ``.sampler`` or ``.batch_sampler``, from the outside in."""
    return walk(sampler, inner_samplers)


def inner_samplers(sampler: object) -> list[Any]:
    """Return what a sampler holds as ``.batch_sampler`` and ``.sampler``; None for what it lacks.

    A wrapper of this package shows what it wraps as the user's loader does: its ``.sampler`` may be one further in.
    """
    return [getattr(sampler, name, None) for name in ("batch_sampler", "_wrapped_sampler", "sampler")]


def deep_copy(value: V, sharing: Iterable[object]) -> V:
    """Return a deep copy that shares some objects with the original instead of copying them."""
    return copy.deepcopy(value, {id(shared): shared for shared in sharing})


def _epoch_holders(sampler: object) -> Iterator[Any]:
    """Yield those of the nested samplers that have a ``set_epoch``."""
    return (nested for nested in nested_samplers(sampler) if callable(getattr(nested, "set_epoch", None)))


def tell_epoch(sampler: object, epoch: int) -> None:
    """Make ``epoch`` the next one of a sampler and of all that it holds."""
    for holder in _epoch_holders(sampler):
        holder.set_epoch(epoch)


class NestedEpochs:
    """The epochs of a sampler and of all that it holds, which a user may set past the sampler that wraps it.

    Args:
        sampler: The sampler.
        counting: Those of them that count their epochs themselves: whoever draws from one sets none.
    """

    def __init__(self, sampler: object, counting: Collection[object] = ()) -> None:
        self._sampler, self._counting = sampler, counting
        self._told = self._now()

    def tell(self, epoch: int) -> None:
        """Make ``epoch`` the next one of all."""
        tell_epoch(self._sampler, epoch)
        self._told = self._now()

    def set_by_user(self) -> int | None:
        """Return the epoch that somebody has set since, if any."""
        changed = (now for now, told in zip(self._now(), self._told, strict=False) if now != told)
        return next(changed, None)

    def _now(self) -> list[int]:
        holders = (one for one in _epoch_holders(self._sampler) if not any(one is other for other in self._counting))
        epochs = (getattr(holder, "epoch", None) for holder in holders)
        return [epoch for epoch in epochs if isinstance(epoch, int)]


logger: logging.Logger = logging.getLogger("ddp_patch")

# How many items of an iterator are drawn twice to see whether it starts again. A prime: streams hardly repeat with such
# a period.
_TRIED = 17


def length_of(source: Any, samplers: Iterable[object]) -> int | None:
    """Return the length of a sampler or dataset, as it says; None if it does not say."""
    try:
        # Some samplers draw to compute it.
        with look(random_generators(samplers), seed=0):
            return len(source)
    except Exception:  # noqa: BLE001 - the user's code, which an unpatched loader may never call
        return None


def steps_of(loader: DataLoader[Any]) -> int | None:
    """Return how many batches a loader says that it has; None if it does not say."""
    with length_not_noted(loader):
        return length_of(loader, ())


def or_unknown(length: int | None) -> int | str:
    """Return a length as ranks compare it and states keep it."""
    return "unknown" if length is None else length


class FirstOrder(NamedTuple):
    """What a sampler's first items show.

    Attributes:
        fingerprint: Their fingerprint; None if that is not known.
        counted: The attributes that drawing them has changed, by the position of their holder among the nested
            samplers, and name.
        counts_epochs: The positions of samplers whose ``epoch`` drawing has changed: they count epochs themselves.
    """

    fingerprint: str | None
    counted: frozenset[tuple[int, str]] = frozenset()
    counts_epochs: frozenset[int] = frozenset()


def first_order(sampler: object, dataset: object = None, *, is_one_shot: bool = False) -> FirstOrder:
    """Return what the first items show that a sampler would give.

    The items are drawn from a copy, which shares datasets and modules with the original, under the same random states
    on every rank. torch's own samplers count by their parameters. Of a sampler that gives its items once, the order is
    not known; a copy still shows which attributes it changes.

    Args:
        sampler: The sampler.
        dataset: What the samples come from. It is not copied.
        is_one_shot: Whether the sampler gives its items once.
    """
    if isinstance(sampler, IterableDataset):
        logger.info("The order of an iterable dataset is not compared between ranks: reading it would use it up.")
        return FirstOrder(None)
    if is_one_shot:
        logger.info("The order of an iterator is not compared between ranks: drawing it would use it up.")
        if returns_itself(sampler):
            return FirstOrder(None)
    elif (parameters := order_parameters(sampler)) is not None:
        return FirstOrder(fingerprint(parameters))
    try:
        with copy_to_draw(sampler, dataset) as drawn:
            if has_order(drawn):
                order = order_of(drawn, epoch=0)
                return FirstOrder(fingerprint(order.at(range(min(order.length, COMPARED)))))
            before = list(map(plain_attributes, nested_samplers(drawn)))
            epochs = [getattr(nested, "epoch", None) for nested in nested_samplers(drawn)]
            items = list(map(copy_item, islice(start_iterating(drawn), _TRIED if is_one_shot else COMPARED)))
            after = enumerate(zip(nested_samplers(drawn), before, strict=True))
            counted = ((place, name) for place, (nested, was) in after for name in changed_attributes(nested, was))
            now = enumerate(zip(nested_samplers(drawn), epochs, strict=True))
            counts_epochs = (place for place, (nested, was) in now if getattr(nested, "epoch", None) != was)
            print_of_items = None if is_one_shot else fingerprint(items)
            return FirstOrder(print_of_items, frozenset(counted), frozenset(counts_epochs))
    except Exception as error:  # noqa: BLE001 - the user's code, run for a check that can be done without
        if not is_one_shot:
            logger.info(
                "The order of %s is not compared between ranks: drawing a copy of it raised %s: %s",
                type(sampler).__name__,
                type(error).__name__,
                error,
            )
        return FirstOrder(None)


@contextmanager
def copy_to_draw(sampler: object, dataset: object, *, seeded: bool = True) -> Iterator[Any]:
    """Give a copy to draw from, under the same random states on every rank; the original's generators stay put.

    Args:
        sampler: The sampler.
        dataset: What the samples come from. It is not copied.
        seeded: Whether to seed all generators alike; otherwise the copy draws what the sampler would draw next.
    """
    # A copy may share with the original what cannot be copied.
    with look(random_generators(nested_samplers(sampler)), seed=0 if seeded else None):
        drawn = _copied(sampler, dataset)
        if not seeded:
            yield drawn
            return
        for generator in torch_generators(nested_samplers(drawn)):
            generator.manual_seed(0)
        yield drawn


def is_one_shot(sampler: object, dataset: object = None) -> bool:
    """Return whether a sampler is an iterator that gives its items once, as a generator does.

    An iterator's own ``__iter__`` may start again, as lhotse's samplers do. A copy shows it: begun twice, it gives the
    same items twice. Where that cannot be seen, the iterator counts as one-shot. torch's ``BatchSampler`` counts
    as what it makes batches of.
    """
    if is_torch_batch_sampler(type(sampler)):
        return is_one_shot(cast(Any, sampler).sampler, dataset)
    if not isinstance(sampler, Iterator) or isinstance(sampler, IterableDataset):
        return False
    if returns_itself(sampler):
        return True
    try:
        with copy_to_draw(sampler, dataset) as tried:
            with look(random_generators(nested_samplers(tried))):
                first = _first_items(tried)
            return not first or first != _first_items(tried)
    except Exception as error:  # noqa: BLE001 - the user's code, run for a check that can be done without
        logger.info("%s counts as one-shot: a copy of it raised %r", type(sampler).__name__, error)
        return True


def _first_items(sampler: Any) -> list[bytes]:
    """Begin a sampler, and return its first items, pickled: they may be of any class."""
    with look(seed=0):
        return [pickle.dumps(copy_item(item)) for item in islice(start_iterating(sampler), _TRIED)]


def _copied(sampler: Any, dataset: object) -> Any:
    """Return a copy of a sampler to draw from, which shares datasets, modules and loaders; TypeError if it has none."""
    shared = [dataset]
    for nested in nested_samplers(sampler):
        shared += held(nested, lambda part: isinstance(part, Dataset | nn.Module | DataLoader))
    copied = deep_copy(sampler, shared)
    if copied is sampler and hasattr(sampler, "__dict__"):  # a range may well be its own copy
        raise TypeError("its copy is the sampler itself")
    return copied


# ---- the first samples of ranks' streams, by hashes, and what they have in common ----

# Looking stops here, because a sampler may be endless; and earlier, where the dataset has no length.
_MOST_SAMPLES, _OF_UNKNOWN = 2**16, 256
# How many hashes a rank sends at most, of so many bytes: the smallest, which are of the same samples on every rank.
_MOST_HASHES, _BYTES = 512, 6
# If streams are drawn independently, how many samples they must be expected to share before sharing none is evidence:
# by chance that happens once in e**20 cases.
_EXPECTED = 20.0
# About so many numbers of a sample's array are looked at, evenly spread.
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
    by some of their numbers. Nothing is known of tensors on accelerators, nor of batches of other objects.

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
    of_all = [column for column in columns if len(column) == size]
    return [number_of(map(partial(_looked_at, place), of_all)) % 2**32 for place in range(min(most, size))]


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


def _looked_at(place: int, column: Any) -> Any:
    """Return some of what a column has at a place."""
    value = column[place]
    if not isinstance(value, torch.Tensor | np.ndarray):
        return value
    flat = value.reshape(-1)
    return flat[:: max(1, len(flat) // _LOOKED_AT)]
