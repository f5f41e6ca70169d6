"""What can be learnt of samplers and datasets by looking: nested ones, epochs, lengths, what a copy gives."""

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

__all__ = [
    "copy_to_draw",
    "deep_copy",
    "epochs_in",
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


def epochs_in(sampler: object) -> list[int]:
    """Return the epochs of a sampler and of all that it holds, by their attribute ``epoch``."""
    found = (getattr(holder, "epoch", None) for holder in _epoch_holders(sampler))
    return [epoch for epoch in found if isinstance(epoch, int)]


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


@contextmanager
def copy_to_draw(sampler: object, dataset: object) -> Iterator[Any]:
    """Give a copy to draw from, which draws what the sampler would draw next; the original's generators stay put.

    It shares the dataset, other datasets, modules and loaders with the original.

    Raises:
        TypeError: It has no copy.
    """
    shared = [dataset]
    for nested in nested_samplers(sampler):
        shared += held(nested, lambda part: isinstance(part, Dataset | nn.Module | DataLoader))
    with look(random_generators(nested_samplers(sampler))):  # a copy may share with it what cannot be copied
        copied = deep_copy(sampler, shared)
        if copied is sampler and hasattr(sampler, "__dict__"):  # a range may well be its own copy
            raise TypeError("its copy is the sampler itself")
        yield copied


def is_one_shot(sampler: object, dataset: object) -> bool:
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
