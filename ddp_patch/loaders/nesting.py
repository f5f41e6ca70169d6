"""Samplers that hold other samplers."""

from collections.abc import Iterator

__all__ = ["epoch_holders", "nested_samplers", "tell_epoch"]


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


def epoch_holders(sampler: object) -> Iterator[object]:
    """Yield those of the nested samplers that have a ``set_epoch``, down to one that goes through epochs by itself.

    Such a sampler says ``sets_nested_epochs = True``: what it tells the samplers that it holds is not the user's word.
    """
    for nested in nested_samplers(sampler):
        if callable(getattr(nested, "set_epoch", None)):
            yield nested
        if getattr(nested, "sets_nested_epochs", False) is True:
            return


def tell_epoch(sampler: object, epoch: int) -> None:
    """Make ``epoch`` the next one of a sampler and of all that it holds."""
    for holder in epoch_holders(sampler):
        holder.set_epoch(epoch)  # type: ignore[attr-defined]  # it has one
