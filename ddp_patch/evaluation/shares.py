"""What a rank got in a pass or in a step, as its schedule says: how many rows, which are padding, where each goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit
from ddp_patch.orders.chunks import State
from ddp_patch.positions_and_padding import Schedule
from ddp_patch.sharding.loader_passes import batches_into_pass
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.patched_loaders import batches_delivered, passes_of
from ddp_patch.validation import counted

__all__ = ["Array", "Misfit", "RankShare", "places_of", "share_of_pass", "share_of_step"]

Array: TypeAlias = "np.ndarray[Any, Any]"

# More than a batch has: where whole batches are shared, a key counts so many for each batch before.
_ROWS_OF_A_BATCH = 2**24


class Misfit(Exception):  # noqa: N818 - it says what the outputs do not fit, and is no error to users
    """Says why outputs cannot be those of a rank."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """What a rank got. A row is of a sample.

    Attributes:
        at: What was called, and for which pass or step.
        keys: The keys of the rows that are not padding: sorted by them, all ranks' are in the stream's order. Where
            whole batches are shared, they also say whose batch it is.
        real: Which rows are not padding.
        sizes: How many samples each batch has, padding included.
        is_whole: Whether whole batches are shared.
        takes_lists: Whether outputs may be a list with one entry per batch.
        sample: What a sample is called.
        schedule: The batches of the pass.
    """

    at: str
    keys: Array
    real: Array
    sizes: Array
    is_whole: bool
    takes_lists: bool
    sample: str
    schedule: Schedule

    @property
    def samples(self) -> int:
        """How many samples there are, padding included."""
        return int(self.sizes.sum())

    def expected(self) -> str:
        """Say how many rows the outputs may have."""
        if not len(self.sizes):
            return "none, since this rank got no batch"
        return f"{self.samples}, one per {self.sample}" + ", or a list with one entry per batch" * self.takes_lists

    def batch_sizes(self, keys: Array) -> list[int]:
        """Return how many samples each of the unpatched loader's batches has, by all ranks' keys."""
        schedule = self.schedule
        if schedule.batch_plan is not None:
            return [record.samples_of_all or 0 for record in schedule.records()]
        places = keys if len(schedule.parts) > 1 else np.arange(len(keys))
        numbers = keys // _ROWS_OF_A_BATCH if self.is_whole else places // schedule.batching.size
        sizes: list[int] = np.unique(numbers, return_counts=True)[1].tolist()
        return sizes


def share_of_pass(facts: LoaderFacts[Any]) -> RankShare:
    """Return what this rank got in the latest pass over a patched loader.

    Raises:
        Misfit: There is none, or it is not over.
    """
    current, at = _latest_pass("gather_in_order", facts)
    schedule = current.whole_schedule(facts.batching)
    if schedule is None or batches_into_pass(passes_of(facts)):
        raise Misfit(f"stopped in the middle of epoch {current.epoch}; gather_step() gathers a step")
    return _share(f"{at}, of {counted(schedule.length, 'item')}", facts, schedule)


def share_of_step(facts: LoaderFacts[Any], step: int | None = None) -> RankShare:
    """Return what this rank got in the step that its loop is in.

    Args:
        facts: The patched loader.
        step: Which step of the pass that is, from 0; None for the latest that the loader has given.

    Raises:
        Misfit: That is not known, or other ranks may make no such step.
    """
    current, at = _latest_pass("gather_step", facts)
    number = batches_delivered(facts) - 1 if step is None else step
    if number < 0:
        raise Misfit("got no batch of the loader yet")
    if current.delivery.state is State.ENDED and step is None:
        raise Misfit(f"called it after the loop: epoch {current.epoch} is over")
    schedule = current.schedule(facts.batching)
    if schedule.plan.uneven == "keep" and schedule.plan.num_replicas > 1:
        raise Misfit(
            "cannot gather step by step with uneven='keep', by which some ranks may have a step less and would not "
            "come; use gather_in_order() after the loop, or uneven='pad'"
        )
    return _share(f"{at}, in step {number + 1}", facts, schedule, number)


def _latest_pass(operation: str, facts: LoaderFacts[Any]) -> tuple[Pass[Any], str]:
    """Return the latest pass, and what is called for it; refuse one whose batches are not known."""
    passes = passes_of(facts)
    current = passes.epochs.latest
    if current is None:
        raise Misfit("made no pass over the loader, and got no batch of it")
    if current.delivery.is_interleaved:
        raise Misfit(
            "used two iterators of the loader at once, so it is unknown which of them the outputs belong to; finish "
            "one before the next begins"
        )
    begins = f" from {current.taken_before} on" if current.taken_before else ""
    return current, f"{operation}() of patched loader {passes.agreed.number} for epoch {current.epoch}{begins}"


def _share(at: str, facts: LoaderFacts[Any], schedule: Schedule, step: int | None = None) -> RankShare:
    """Return what a rank got in a step; without one, in the pass."""
    records = [*schedule.records()] if step is None else [schedule.record(step)]
    is_whole = facts.unit is ShardedUnit.BATCH and schedule.batch_plan is None
    sample = "item" if facts.unit is ShardedUnit.UNBATCHED else "sample"
    sizes = np.array([record.samples for record in records], np.int64)
    # Batches of one sample are the samples. Of an empty batch, no row would tell where it was.
    has_batches = bool(sizes.all()) if facts.unit is ShardedUnit.BATCH else facts.batching.size > 1
    takes_lists = step is None and sample == "sample" and has_batches
    # Each part's padding comes at its own end, in the midst of what other workers give.
    own, row = np.array([one.real_samples for one in records], np.int64), _row_in_batch(sizes)
    real = np.flatnonzero(row < np.repeat(own, sizes))
    runs = [np.arange(run.start, run.stop, run.step) for run in schedule.keys(records)]
    keys = np.concatenate([np.empty(0, np.int64), *runs])
    if is_whole:
        own = own[[bool(one.real_items) for one in records]]
        keys = np.repeat(keys * _ROWS_OF_A_BATCH, own) + _row_in_batch(own)
    return RankShare(at, keys, real, sizes, is_whole, takes_lists, sample, schedule)


def _row_in_batch(sizes: Array) -> Array:
    """Return which row of its batch each row is, of batches of these sizes."""
    rows: Array = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rows


def places_of(keys: Sequence[Array]) -> list[Array]:
    """Return where each rank's rows go, of which no two have the same key: behind those with smaller ones.

    Examples:
        >>> [places.tolist() for places in places_of([np.array([0, 1, 8]), np.array([9, 5])])]
        [[0, 1, 3], [4, 2]]
    """
    of_all = np.concatenate(keys)
    places = of_all - of_all.min(initial=of_all[0] if len(of_all) else 0)
    if places.max(initial=0) >= len(places):
        places[np.argsort(of_all)] = np.arange(len(of_all))
    return np.split(places, np.cumsum([*map(len, keys)])[:-1])
