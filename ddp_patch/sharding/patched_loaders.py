"""The sampler, passes and facts of a patched loader, and how many batches the loader has delivered."""

from typing import Any, cast

from torch.utils.data import DataLoader

from ddp_patch.compat.private_torch import has_own_iteration
from ddp_patch.errors import NotPatchedError, StateError, UnsupportedLoaderError
from ddp_patch.loaders.facts import LoaderFacts, ShardedUnit, look_at
from ddp_patch.loaders.hooks import about_to_use
from ddp_patch.loaders.recognition import require_loader, sharded_by
from ddp_patch.sharding.loader_passes import Passes
from ddp_patch.sharding.sampler import EpochSampler


def batches_delivered(facts: LoaderFacts[Any]) -> int:
    """Return how many batches of the latest pass a patched loader has delivered, as its ``CountedIterator`` counts.

    Raises:
        StateError: The batches were not counted.
    """
    passes, loader = passes_of(facts), facts.loader
    current = passes.epochs.running
    if current is None or not current.batches(facts.batching):
        return 0
    given = current.delivery.batches
    if given is not None and (passes.loader.has_one_iterator or not has_own_iteration(type(loader))):
        return given
    epoch = passes.epochs.counter.current
    raise StateError(
        f"It is not known how many batches of epoch {epoch} the {type(loader).__name__} has given: its "
        "class has its own __iter__, which may fetch batches ahead; or the pass was made by another loader over the "
        "same sampler, or by an iterator that is not torch's, or went on after an error. Pass how many the training "
        "loop has finished: batches_done=step + 1 inside enumerate(loader)."
    )


def patched_sampler(operation: str, loader: object) -> EpochSampler[Any]:
    """Return the sampler that shards a loader; raise NotPatchedError if the sampler is not this package's."""
    require_loader(operation, loader)
    about_to_use(loader)
    return _ours(operation, loader, sharded_by(loader))  # type: ignore[arg-type]  # require_loader checked it


def _ours(operation: str, loader: object, found: object) -> EpochSampler[Any]:
    if not isinstance(found, EpochSampler) and found is not None:
        raise NotPatchedError(
            f"{operation} was given a {type(loader).__name__} that a {type(found).__name__} shards, and not this "
            "package, so nobody counts its batches. Patch the loader that one process would use."
        )
    if not isinstance(found, EpochSampler):
        raise NotPatchedError(
            f"{operation} was given a {type(loader).__name__} that was not patched, so nobody counts its batches. Pass "
            "what patch_dataloader_to_ddp() returned; in a single process without a process group, patch it with "
            "rank=0, num_replicas=1."
        )
    return found


def passes_of(facts: LoaderFacts[Any]) -> Passes[Any]:
    """Return the passes over a patched loader."""
    return cast("EpochSampler[Any]", facts.sharded_by).rank_passes


def patched_facts(operation: str, loader: DataLoader[Any]) -> LoaderFacts[Any]:
    """Return the facts of a patched loader; raise an error if its batches are not its share in order."""
    require_loader(operation, loader)
    about_to_use(loader)
    facts = look_at(loader)
    sampler = _ours(operation, loader, facts.sharded_by)
    if facts.num_workers > 0 and not getattr(loader, "in_order", True):
        raise UnsupportedLoaderError(
            f"{operation} was given a loader with in_order=False, which gives batches as its {facts.num_workers} "
            "workers finish them, so nobody knows which samples a batch has. Use in_order=True."
        )
    if facts.unit is not ShardedUnit.ITERABLE and facts.source is not sampler:
        raise UnsupportedLoaderError(
            f"{operation} was given a loader whose {type(loader.batch_sampler).__name__} makes batches of a sharded "
            "sampler in its own way, so nobody knows how many samples a batch took. Shard whole batches instead: pass "
            "the loader of the original samplers to patch_dataloader_to_ddp()."
        )
    return facts
