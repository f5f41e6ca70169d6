"""Find how many samples a stream has, and in which order, without using it up."""

import logging
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, cast

from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp_patch.compat.torch_loaders import is_torch_batch_sampler
from ddp_patch.loaders.nesting import deep_copy, nested_samplers
from ddp_patch.streams.chunks import begun, own, returns_itself
from ddp_patch.streams.fingerprint import COMPARED, fingerprint
from ddp_patch.streams.generators import plain_attributes, random_generators, torch_generators, unmoved
from ddp_patch.streams.orders import has_order, order_of, order_parameters
from ddp_patch.streams.random_states import PrivateRNG

__all__ = [
    "FirstOrder",
    "copy_to_draw",
    "first_order",
    "first_order_of_iterator",
    "is_one_shot",
    "length_of",
    "or_unknown",
]

logger: logging.Logger = logging.getLogger("ddp_patch")

# How many items of an iterator are drawn twice to see whether it starts again. A prime: streams hardly repeat with such
# a period.
_TRIED = 17


def length_of(source: Any, samplers: Iterable[object]) -> int | None:
    """Return the length of a sampler or dataset, as it says; None if it does not say."""
    try:
        # Some samplers draw to compute it.
        with PrivateRNG(seed=0, epoch=0), unmoved(random_generators(samplers)):
            return len(source)
    except Exception:  # noqa: BLE001 - the user's code, which an unpatched loader may never call
        return None


def or_unknown(length: int | None) -> int | str:
    """Return a length as ranks compare it and states keep it."""
    return "unknown" if length is None else length


class FirstOrder(NamedTuple):
    """What a sampler's first items show.

    Attributes:
        fingerprint: Their fingerprint; None if that is not known.
        counted: The attributes that drawing them has changed, by the position of their holder among the nested
            samplers, and name.
    """

    fingerprint: str | None
    counted: frozenset[tuple[int, str]] = frozenset()


def first_order(sampler: object, dataset: object = None) -> FirstOrder:
    """Return what the first items show that a sampler would give.

    The sampler must be one that can be started again. The items are drawn from a copy, which shares datasets and
    modules with the original, under the same random states on every rank. torch's own samplers count by their
    parameters.
    """
    if isinstance(sampler, IterableDataset):
        logger.info("The order of an iterable dataset is not compared between ranks: reading it would use it up.")
        return FirstOrder(None)
    if (parameters := order_parameters(sampler)) is not None:
        return FirstOrder(fingerprint(parameters))
    try:
        with copy_to_draw(sampler, dataset) as drawn:
            if has_order(drawn):
                order = order_of(drawn, epoch=0)
                return FirstOrder(fingerprint(order.at(range(min(order.length, COMPARED)))))
            before = _attributes(drawn)
            told = fingerprint(islice(map(own, drawn), COMPARED))
            return FirstOrder(told, _changed(before, _attributes(drawn)))
    except Exception as error:  # noqa: BLE001 - the user's code, run for a check that can be done without
        logger.info(
            "The order of %s is not compared between ranks: drawing a copy of it raised %s: %s",
            type(sampler).__name__,
            type(error).__name__,
            error,
        )
        return FirstOrder(None)


def first_order_of_iterator(sampler: object, dataset: object) -> FirstOrder:
    """Return what the first items of a copy of an iterator show: which attributes it changes, and not their order."""
    logger.info("The order of an iterator is not compared between ranks: drawing it would use it up.")
    if returns_itself(sampler):
        return FirstOrder(None)
    try:
        with copy_to_draw(sampler, dataset) as drawn:
            before = _attributes(drawn)
            _first_items(drawn)
            return FirstOrder(None, _changed(before, _attributes(drawn)))
    except Exception:  # noqa: BLE001 - as in ``first_order``
        return FirstOrder(None)


def _attributes(sampler: object) -> list[dict[str, Any]]:
    return list(map(plain_attributes, nested_samplers(sampler)))


def _changed(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> frozenset[tuple[int, str]]:
    return frozenset(
        (place, name)
        for place, (was, now) in enumerate(zip(before, after, strict=True))
        for name, value in now.items()
        if name not in was or was[name] != value
    )


@contextmanager
def copy_to_draw(sampler: object, dataset: object) -> Iterator[Any]:
    """Give a copy to draw from, under the same random states on every rank; the original's generators stay put."""
    originals = random_generators(nested_samplers(sampler))
    # A copy may share with the original what cannot be copied: a function, with the generators that it draws from.
    with PrivateRNG(seed=0, epoch=0), unmoved(originals):
        drawn = _copied(sampler, dataset)
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
        with PrivateRNG(seed=0, epoch=0), unmoved(random_generators(nested_samplers(sampler))):
            tried = _copied(sampler, dataset)
            with unmoved(random_generators(nested_samplers(tried))):
                first = _first_items(tried)
            return not first or first != _first_items(tried)
    except Exception as error:  # noqa: BLE001 - the user's code, run for a check that can be done without
        logger.info("%s counts as one-shot: a copy of it raised %r", type(sampler).__name__, error)
        return True


def _first_items(sampler: Any) -> list[bytes]:
    """Begin a sampler, and return its first items, pickled: they may be of any class."""
    with PrivateRNG(seed=0, epoch=0):
        return [pickle.dumps(own(item)) for item in islice(begun(sampler), _TRIED)]


def _copied(sampler: Any, dataset: object) -> Any:
    """Return a copy of a sampler to draw from; raise TypeError where there is none."""
    copied = deep_copy(sampler, sharing=_not_copied(sampler, dataset))
    if copied is sampler and hasattr(sampler, "__dict__"):  # a range may well be its own copy
        raise TypeError("its copy is the sampler itself")
    return copied


def _not_copied(sampler: object, dataset: object) -> Iterator[object]:
    """Yield what a copy of the sampler shares with it: datasets, modules and loaders."""
    yield dataset
    for nested in nested_samplers(sampler):
        for value in getattr(nested, "__dict__", {}).values():
            parts = value if isinstance(value, list | tuple) else [value]
            yield from (part for part in parts if isinstance(part, Dataset | nn.Module | DataLoader))
