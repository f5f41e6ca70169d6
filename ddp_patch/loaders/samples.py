"""What can be learnt of samplers and datasets by looking: nested ones, lengths, first orders."""

import copy
import logging
import pickle
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast

from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp_patch.compat.private_torch import is_torch_batch_sampler, length_not_noted
from ddp_patch.orders.chunks import copy_item, returns_itself, start_iterating
from ddp_patch.orders.digest import COMPARED, fingerprint
from ddp_patch.orders.orders import has_order, order_of, order_parameters
from ddp_patch.orders.random_states import (
    changed_attributes,
    look,
    plain_attributes,
    random_generators,
    seeded_anew,
    set_generator_state,
)
from ddp_patch.walks import held, walk

__all__ = [
    "FirstOrder",
    "copy_to_draw",
    "deep_copy",
    "epochs_in",
    "first_order",
    "inner_samplers",
    "is_one_shot",
    "iterated_by",
    "length_of",
    "nested_samplers",
    "or_unknown",
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
    """Return what a sampler holds as ``.batch_sampler`` and ``.sampler``, or what a wrapper of this package wraps."""
    if (wrapped := getattr(sampler, "_wrapped_sampler", None)) is not None:
        return [wrapped]
    return [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]


def deep_copy(value: V, sharing: Iterable[object]) -> V:
    """Return a deep copy that shares some objects with the original instead of copying them."""
    return copy.deepcopy(value, {id(shared): shared for shared in sharing})


def _epoch_holders(sampler: object) -> Iterator[Any]:
    """Yield those of the nested samplers that have a ``set_epoch``, down to one that goes through epochs by itself.

    Such a sampler says ``sets_nested_epochs = True``: the epochs of the samplers in it are not the user's choice.
    """
    for nested in nested_samplers(sampler):
        if callable(getattr(nested, "set_epoch", None)):
            yield nested
        if getattr(nested, "sets_nested_epochs", False) is True:
            return


def tell_epoch(sampler: object, epoch: int) -> None:
    """Make ``epoch`` the next one of a sampler and of all that it holds."""
    for holder in _epoch_holders(sampler):
        holder.set_epoch(epoch)


def epochs_in(sampler: object, counting: Collection[object] = ()) -> list[int]:
    """Return the epochs of a sampler and of all that it holds, but of those that count them themselves."""
    holders = (one for one in _epoch_holders(sampler) if not any(one is other for other in counting))
    return [epoch for holder in holders if isinstance(epoch := getattr(holder, "epoch", None), int)]


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
        for generator in random_generators(nested_samplers(drawn)):
            set_generator_state(generator, seeded_anew(generator, None))
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
