"""What of a rank's loader the judgement needs: plain values, which a real rank can send."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from ddp_patch.auditing.draw.subsets import base_of
from ddp_patch.auditing.report import Units
from ddp_patch.loaders.facts import Level, level_of
from ddp_patch.loaders.nesting import nested_samplers
from ddp_patch.loaders.recognition import samplers_in_use, shards_itself

__all__ = ["Traits", "made_of_batches", "traits_of"]


@dataclass(frozen=True, slots=True)
class Traits:
    """A rank's loader in plain values.

    Attributes:
        units: What is shared.
        is_iterable: Whether its dataset is read, because it has no indices.
        batch_size: How many samples a batch has, as far as the loader or its batch sampler says; else 1.
        num_workers: How many workers it has.
        drops_batch: Whether a last, incomplete batch is left out.
        drops_round: Whether a sampler leaves out the last, incomplete round of ranks.
        sharers: How many of its samplers and its dataset share by themselves.
        dataset_length: How many samples its dataset has; None if it is iterable or does not say.
        base_length: The same of the dataset below torch's ``Subset`` layers.
    """

    units: Units
    is_iterable: bool
    batch_size: int
    num_workers: int
    drops_batch: bool
    drops_round: bool
    sharers: int
    dataset_length: int | None
    base_length: int | None

    @property
    def batchers(self) -> int:
        """How many make batches on a rank, each with a last one of its own: workers that read an iterable dataset."""
        return max(1, self.num_workers) if self.is_iterable else 1


def traits_of(loader: DataLoader[object]) -> Traits:
    """Return a loader's traits."""
    samplers = list(samplers_in_use(loader))
    is_iterable = level_of(loader) is Level.ITERABLE
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return Traits(
        units="batches" if made_of_batches(loader) else "samples",
        is_iterable=is_iterable,
        batch_size=size if isinstance(size, int) and size > 0 else 1,
        num_workers=loader.num_workers,
        drops_batch=loader.drop_last or getattr(loader.batch_sampler, "drop_last", False) is True,
        drops_round=any(getattr(sampler, "drop_last", False) is True for sampler in samplers),
        sharers=sum(map(shards_itself, (*samplers, loader.dataset))),
        dataset_length=None if is_iterable else _length(loader.dataset),
        base_length=None if is_iterable else _length(base_of(loader.dataset)),
    )


def _length(dataset: Any) -> int | None:
    with suppress(Exception):  # a length that cannot be told, for whatever reason, is none
        return len(dataset)
    return None


def made_of_batches(loader: DataLoader[object]) -> bool:
    """Tell whether what is shared are whole batches."""
    if level_of(loader) is Level.UNBATCHED:
        return any(isinstance(sampler, BatchSampler) for sampler in nested_samplers(loader.sampler))
    return level_of(loader) is Level.BATCH
