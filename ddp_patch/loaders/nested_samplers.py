"""Read nested samplers, epochs and lengths of samplers and datasets, and draw from copies of samplers."""

import copy
import logging
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar, cast

from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp_patch.compat.private_torch import is_torch_batch_sampler, length_not_noted
from ddp_patch.orders.chunks import copy_item, returns_itself, start_iterating
from ddp_patch.orders.random_states import look, random_generators
from ddp_patch.walks import held, walk

V = TypeVar("V")


def iterated_by(loader: Any) -> Any:
    """Return the batch sampler that a loader iterates, or its sampler if it has no batch sampler.

    Beside a batch sampler of the user's, ``loader.sampler`` is a default that torch never draws from.
    """
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def nested_samplers(sampler: object) -> Iterator[object]:
    """Yield a sampler and all samplers in its ``.sampler`` or ``.batch_sampler``, from the outside in."""
    return walk(sampler, inner_samplers)


def inner_samplers(sampler: object) -> list[Any]:
    """Return a sampler's ``.batch_sampler`` and ``.sampler``, or the sampler in a wrapper of this package."""
    if (wrapped := getattr(sampler, "_wrapped_sampler", None)) is not None:
        return [wrapped]
    return [getattr(sampler, name, None) for name in ("batch_sampler", "sampler")]


def deep_copy(value: V, sharing: Iterable[object]) -> V:
    """Return a deep copy that shares some objects with the original instead of copying them."""
    return copy.deepcopy(value, {id(shared): shared for shared in sharing})


def _epoch_holders(sampler: object) -> Iterator[Any]:
    """Yield the nested samplers with a ``set_epoch``, down to a sampler that goes through epochs by itself.

    A sampler with ``sets_nested_epochs = True`` goes through epochs by itself: it chooses the epochs of the samplers in
    it.
    """
    for nested in nested_samplers(sampler):
        if callable(getattr(nested, "set_epoch", None)):
            yield nested
        if getattr(nested, "sets_nested_epochs", False) is True:
            return


def tell_epoch(sampler: object, epoch: int) -> None:
    """Call ``set_epoch`` of a sampler and of all samplers in it."""
    for holder in _epoch_holders(sampler):
        holder.set_epoch(epoch)


def epochs_in(sampler: object) -> list[int]:
    """Return the epochs of a sampler and of all samplers in it, by their attribute ``epoch``."""
    found = (getattr(holder, "epoch", None) for holder in _epoch_holders(sampler))
    return [epoch for epoch in found if isinstance(epoch, int)]


logger: logging.Logger = logging.getLogger("ddp_patch")

# How many items of an iterator are drawn twice to check whether it starts again. The number is prime, because streams
# seldom repeat after a prime number of items.
_TRIED = 17


def length_of(source: Any, samplers: Iterable[object]) -> int | None:
    """Return ``len()`` of a sampler or dataset; None if it has no length."""
    try:
        # Some samplers draw to compute their length.
        with look(random_generators(samplers), seed=0):
            return len(source)
    except Exception:  # noqa: BLE001 - the user's code, which an unpatched loader may never call
        return None


def steps_of(loader: DataLoader[Any]) -> int | None:
    """Return ``len()`` of a loader, its number of batches; None if it has no length."""
    with length_not_noted(loader):
        return length_of(loader, ())


def or_unknown(length: int | None) -> int | str:
    """Return a length in the form that ranks compare and states store."""
    return "unknown" if length is None else length


@contextmanager
def copy_to_draw(sampler: object, dataset: object) -> Iterator[Any]:
    """Yield a copy that draws what the sampler would draw next, without moving the sampler's generators.

    The copy shares the dataset, other datasets, modules and loaders with the sampler.

    Raises:
        TypeError: The sampler cannot be copied.
    """
    shared = [dataset]
    for nested in nested_samplers(sampler):
        shared += held(nested, lambda part: isinstance(part, Dataset | nn.Module | DataLoader))
    with look(random_generators(nested_samplers(sampler))):  # the copy may share generators that cannot be copied
        copied = deep_copy(sampler, shared)
        if copied is sampler and hasattr(sampler, "__dict__"):  # a range may well be its own copy
            raise TypeError("its copy is the sampler itself")
        yield copied


def is_one_shot(sampler: object, dataset: object) -> bool:
    """Return whether a sampler is an iterator that yields its items only once, as a generator does.

    An iterator's own ``__iter__`` may start again, as lhotse's samplers do. To find out, a copy is begun twice and must
    yield the same items twice. An iterator without a copy counts as one-shot. torch's ``BatchSampler`` counts as the
    sampler in it.
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
    except Exception as error:  # noqa: BLE001 - the user's code, in a check that is not essential
        logger.info("%s counts as one-shot: a copy of it raised %r", type(sampler).__name__, error)
        return True


def _first_items(sampler: Any) -> list[bytes]:
    """Begin a sampler, and return its first items, pickled, because they may be of any class."""
    with look(seed=0):
        return [pickle.dumps(copy_item(item)) for item in islice(start_iterating(sampler), _TRIED)]
