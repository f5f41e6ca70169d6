"""A patched loader inspected: what shares it, and how its batches follow from the items of the stream."""

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from ddp_patch.errors import NotPatchedError, UnsupportedLoaderError
from ddp_patch.loaders.copying import Level, level, require_loader, sharding
from ddp_patch.shares.epochs import EpochSampler

__all__ = ["Batches", "patched_sampler", "require_batches"]


@dataclass(frozen=True, slots=True)
class Batches:
    """How a loader's batches follow from a rank's share.

    Attributes:
        sampler: What shares.
        level: What of the loader was wrapped.
        size: How many items of the share a batch has: samples, or one whole batch.
        drops_last: Whether a last batch of fewer is left out.
    """

    sampler: EpochSampler[Any]
    level: Level
    size: int
    drops_last: bool


def patched_sampler(operation: str, loader: object) -> EpochSampler[Any]:
    """Return what shares a loader; NotPatchedError if nothing of this package does."""
    require_loader(operation, loader)
    found = sharding(loader)  # type: ignore[arg-type]  # a loader, as was just made sure of
    if not isinstance(found, EpochSampler):
        raise NotPatchedError(
            f"{operation} was given a {type(loader).__name__} that was not patched, whose place in an epoch nobody "
            "counts. Pass what patch_dataloader_to_ddp() returned; in a single process without a process group, patch "
            "it with rank=0, num_replicas=1."
        )
    return found


def require_batches(operation: str, loader: DataLoader[Any]) -> Batches:
    """Return how a patched loader's batches follow from the share; raise where they do not follow in order."""
    sampler = patched_sampler(operation, loader)
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        raise UnsupportedLoaderError(
            f"{operation} was given a loader with in_order=False, which gives its batches as its {loader.num_workers} "
            "workers finish them, so which samples a batch holds cannot be told. Use in_order=True."
        )
    batch_sampler: Any = loader.batch_sampler
    match level(loader):
        case Level.SAMPLE if batch_sampler.sampler is sampler:
            return Batches(sampler, Level.SAMPLE, batch_sampler.batch_size, batch_sampler.drop_last)
        case Level.BATCH if batch_sampler is sampler:
            return Batches(sampler, Level.BATCH, 1, drops_last=False)
        case Level.UNBATCHED if loader.sampler is sampler:
            return Batches(sampler, Level.UNBATCHED, 1, drops_last=False)
        case Level.ITERABLE:
            return Batches(sampler, Level.ITERABLE, loader.batch_size or 1, loader.drop_last)
    raise UnsupportedLoaderError(
        f"{operation} was given a loader whose {type(batch_sampler).__name__} makes its batches of a sharded sampler "
        "in a way of its own, so how many samples a batch took cannot be told. Share whole batches: pass the loader of "
        "the original samplers to patch_dataloader_to_ddp()."
    )
