"""Samplers inside other samplers: find them, copy them together, and set their epochs."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = [
    "DatasetEpoch",
    "NestedEpochs",
    "deep_copy",
    "iterated_by",
    "nested_samplers",
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
    waiting, seen = [sampler], set[int]()
    while waiting:
        found = waiting.pop(0)
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        waiting += [getattr(found, name, None) for name in ("batch_sampler", "sampler")]


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


class DatasetEpoch:
    """The epoch of a dataset that has a ``set_epoch``, which a user may call as well.

    Args:
        dataset: The dataset. What it stores of its epoch is its ``epoch``, as in Hugging Face's, or the first attribute
            with that word in its name that is a whole number.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._tell = getattr(dataset, "set_epoch", None)
        self._told: int | None = 0  # so that one that was set before counts

    def tell(self, epoch: int) -> None:
        """Tell the dataset its epoch, if it wants to know."""
        if callable(self._tell):
            self._tell(epoch)
            self._told = self._now()

    def set_by_user(self) -> int | None:
        """Return the epoch that somebody has set since it was told one, if any."""
        now = self._now()
        return None if now is None or now < 0 or now == self._told else now

    def _now(self) -> int | None:
        if not callable(self._tell):
            return None
        stored = (value for name, value in vars(self._dataset).items() if "epoch" in name.lower())
        found = (value for value in (getattr(self._dataset, "epoch", None), *stored) if type(value) is int)
        return next(found, None)


class NestedEpochs:
    """The epochs of a sampler and of all that it holds, which a user may set past the sampler that wraps it."""

    def __init__(self, sampler: object) -> None:
        self._sampler = sampler
        self._told = self._now()

    def tell(self, epoch: int) -> None:
        """Make ``epoch`` the next one of all."""
        tell_epoch(self._sampler, epoch)
        self._told = self._now()

    def set_by_user(self) -> int | None:
        """Return the epoch that somebody has set since, if any."""
        changed = (now for now, told in zip(self._now(), self._told, strict=False) if now != told)
        return next(changed, None)

    @contextmanager
    def told(self, epoch: int, otherwise: int) -> Iterator[None]:
        """Set all to an epoch while entered; restore each afterwards, or set ``otherwise`` if it had none."""
        before = [(holder, getattr(holder, "epoch", None)) for holder in _epoch_holders(self._sampler)]
        tell_epoch(self._sampler, epoch)
        try:
            yield
        finally:
            for holder, number in before:
                holder.set_epoch(number if isinstance(number, int) else otherwise)

    def _now(self) -> list[int]:
        epochs = (getattr(holder, "epoch", None) for holder in _epoch_holders(self._sampler))
        return [epoch for epoch in epochs if isinstance(epoch, int)]
