"""A rank's share of a pass or a step, from its schedule: how many rows, which are padding, where each row goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit
from ddp_patch.positions_and_padding import Schedule
from ddp_patch.ranks.pass_facts import State
from ddp_patch.sharding.loader_passes import batches_into_pass
from ddp_patch.sharding.passes import Pass
from ddp_patch.sharding.patched_loaders import batches_delivered, passes_of
from ddp_patch.validation import counted

Array: TypeAlias = "np.ndarray[Any, Any]"

# A number above the rows of any batch. If whole batches are shared, a row's key is its batch's number times this
# number, plus the row's place in the batch.
_ROWS_OF_A_BATCH = 2**24


class Misfit(Exception):  # noqa: N818 - no error that users see
    """Raised with the reason why outputs cannot be a rank's."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """A rank's share of a pass or a step. Each sample has a row.

    Attributes:
        at: The call, and its pass or step, in words.
        keys: The keys of the rows that are not padding. Sorted by key, all ranks' rows are in the stream's order. Where
            whole batches are shared, a key also contains the batch's number.
        real: Which rows are not padding.
        sizes: How many samples each batch has, padding included.
        is_whole: Whether whole batches are shared.
        takes_lists: Whether outputs may be a list with one entry per batch.
        sample: The word for a sample in errors.
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
        """How many samples the share has, padding included."""
        return int(self.sizes.sum())

    def expected(self) -> str:
        """Return in words how many rows the outputs may have."""
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
    """Return this rank's share of the latest pass over a patched loader.

    Raises:
        Misfit: There is no pass, or it is not over.
    """
    current, at = _latest_pass("gather_in_order", facts)
    schedule = current.whole_schedule(facts.batching)
    if schedule is None or batches_into_pass(passes_of(facts)):
        raise Misfit(f"stopped in the middle of epoch {current.epoch}; gather_step() gathers a step")
    return _share(f"{at}, of {counted(schedule.length, 'item')}", facts, schedule)


def share_of_step(facts: LoaderFacts[Any], step: int | None = None) -> RankShare:
    """Return this rank's share of its loop's present step.

    Args:
        facts: The patched loader.
        step: The number of the step in the pass, from 0; None for the latest batch that the loader has delivered.

    Raises:
        Misfit: The step is not known, or other ranks may not make it.
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
    """Return the latest pass, and the call in words; refuse a pass whose batches are not known."""
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
    """Return this rank's share of a step; without a step, of the pass."""
    records = [*schedule.records()] if step is None else [schedule.record(step)]
    is_whole = facts.unit is ShardedUnit.BATCH and schedule.batch_plan is None
    sample = "item" if facts.unit is ShardedUnit.UNBATCHED else "sample"
    sizes = np.array([record.samples for record in records], np.int64)
    # A list of batches of one sample is a list of samples. An empty batch has no row to show its position.
    has_batches = bool(sizes.all()) if facts.unit is ShardedUnit.BATCH else facts.batching.size > 1
    takes_lists = step is None and sample == "sample" and has_batches
    # Each part's padding comes at the end of the part, between the batches of other workers.
    own, row = np.array([one.real_samples for one in records], np.int64), _row_in_batch(sizes)
    real = np.flatnonzero(row < np.repeat(own, sizes))
    runs = [np.arange(run.start, run.stop, run.step) for run in schedule.keys(records)]
    keys = np.concatenate([np.empty(0, np.int64), *runs])
    if is_whole:
        own = own[[bool(one.real_items) for one in records]]
        keys = np.repeat(keys * _ROWS_OF_A_BATCH, own) + _row_in_batch(own)
    return RankShare(at, keys, real, sizes, is_whole, takes_lists, sample, schedule)


def _row_in_batch(sizes: Array) -> Array:
    """Return the number of each row within its batch, for batches of these sizes."""
    rows: Array = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rows


def places_of(keys: Sequence[Array]) -> list[Array]:
    """Return the positions of each rank's rows among all rows, in the order of the keys, which are all different.

    Examples:
        >>> [places.tolist() for places in places_of([np.array([0, 1, 8]), np.array([9, 5])])]
        [[0, 1, 3], [4, 2]]
    """
    of_all = np.concatenate(keys)
    places = of_all - of_all.min(initial=of_all[0] if len(of_all) else 0)
    if places.max(initial=0) >= len(places):
        places[np.argsort(of_all)] = np.arange(len(of_all))
    return np.split(places, np.cumsum([*map(len, keys)])[:-1])
