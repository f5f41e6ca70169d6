"""Describe a rank's loader in plain values, which a real rank can send to the process that judges."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler

from ddp_patch.auditing.draw.samples import base_of
from ddp_patch.auditing.epoch_report import Units
from ddp_patch.compat.datasets import is_interleaved, is_split_by_node
from ddp_patch.loaders.facts import Level, LoaderFacts
from ddp_patch.loaders.recognition import nested_datasets, shards_itself
from ddp_patch.shares.epochs import EpochSampler

__all__ = ["Traits", "divides_batches", "length_of", "made_of_batches", "traits_of"]


@dataclass(frozen=True, slots=True)
class Traits:
    """Describe a rank's loader.

    Attributes:
        units: Whether ranks shard samples or whole batches.
        is_iterable: Whether the dataset is iterable, so that it is read and has no indices.
        batch_size: Samples in a batch, where the loader or its batch sampler says so; otherwise 1.
        num_workers: The loader's workers.
        keeps_workers: Whether they live on from epoch to epoch.
        num_shards: In how many pieces an iterable dataset says that its workers may share it; None if it does not say.
        may_be_split: Whether Hugging Face's ``split_dataset_by_node()`` has split the dataset, or may have, which its
            ``interleave_datasets()`` hides.
        divides_batches: Whether each rank takes a part of every batch of one process.
        drops_batch: Whether the loader leaves out a last, incomplete batch.
        drops_round: Whether a sampler leaves out the last, incomplete round of ranks.
        sharers: How many of the loader's samplers and its dataset shard by themselves.
        dataset_length: Samples in the dataset; None where it is iterable or has no length.
        base_length: Samples in the dataset below torch's ``Subset`` layers; None as above.
    """

    units: Units
    is_iterable: bool
    batch_size: int
    num_workers: int
    keeps_workers: bool
    num_shards: int | None
    may_be_split: bool
    divides_batches: bool
    drops_batch: bool
    drops_round: bool
    sharers: int
    dataset_length: int | None
    base_length: int | None

    @property
    def batchers(self) -> int:
        """Return how many parts of a rank make batches, each with a last one of its own.

        Each worker makes its own batches of an iterable dataset. Elsewhere the rank's one batch sampler makes them.
        """
        return max(1, self.num_workers) if self.is_iterable else 1


def traits_of(facts: LoaderFacts[Any]) -> Traits:
    """Return the traits of a loader that was looked at."""
    samplers, batches = facts.samplers, None if facts.level is Level.UNBATCHED else facts.iterated
    is_iterable = facts.level is Level.ITERABLE
    size = facts.batch_size or getattr(batches, "batch_size", None)
    return Traits(
        units="batches" if made_of_batches(facts) else "samples",
        is_iterable=is_iterable,
        batch_size=size if isinstance(size, int) and size > 0 else 1,
        num_workers=facts.num_workers,
        keeps_workers=facts.loader.persistent_workers,
        num_shards=_num_shards(facts.dataset) if is_iterable else None,
        may_be_split=is_iterable and not isinstance(facts.sharded_by, EpochSampler) and _may_be_split(facts.dataset),
        divides_batches=divides_batches(facts),
        drops_batch=facts.drop_last or getattr(batches, "drop_last", False) is True,
        drops_round=any(getattr(sampler, "drop_last", False) is True for sampler in samplers),
        sharers=sum(map(shards_itself, (*samplers, facts.dataset))),
        dataset_length=None if is_iterable else facts.dataset_length,
        base_length=None if is_iterable else length_of(base_of(facts.dataset)),
    )


def _may_be_split(dataset: Any) -> bool:
    return is_interleaved(dataset) or any(map(is_split_by_node, nested_datasets(dataset)))


def _num_shards(dataset: Any) -> int | None:
    with suppress(Exception):
        found = dataset.num_shards
        return found if isinstance(found, int) else None
    return None


def length_of(sized: Any) -> int | None:
    """Return ``len(sized)``; None where it raises, for whatever reason."""
    with suppress(Exception):
        return len(sized)
    return None


def divides_batches(facts: LoaderFacts[Any]) -> bool:
    """Tell whether each rank takes a part of every batch of one process."""
    return isinstance(facts.sharded_by, EpochSampler) and facts.sharded_by.agreed.options.divides_batches


def made_of_batches(facts: LoaderFacts[Any]) -> bool:
    """Tell whether ranks shard whole batches of this loader."""
    if divides_batches(facts):
        return False
    if facts.level is Level.UNBATCHED:
        return any(isinstance(sampler, BatchSampler) for sampler in facts.stream.samplers)
    return facts.level is Level.BATCH
