"""What of a loader is shared: samples or whole batches, as the user says or its samplers ask for."""

from typing import Any, TypeVar

from torch.utils.data import DataLoader

from ddp_patch.compat.samplers import arranges_neighbours
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.facts import Level, LoaderFacts
from ddp_patch.options import Share

__all__ = ["unit_shared"]

L = TypeVar("L", bound=DataLoader[Any])


def unit_shared(facts: LoaderFacts[L], share: Share) -> LoaderFacts[L]:
    """Return the look at a loader with the unit that is shared.

    Items of a loader without automatic batching are shared as they are, whatever ``share`` says: to torch each is one.

    Raises:
        InvalidOptionError: The loader cannot be shared so.
    """
    if facts.sharded_by is not None:
        return facts
    name = facts.stream.name
    match facts.level, share:
        case Level.BATCH, "samples":
            raise InvalidOptionError(
                f"share='samples' cannot hold for a loader with a batch sampler of its own: it would tear the batches "
                f"that {name} makes. Use share='batches', or leave it out."
            )
        case Level.ITERABLE, "batches" if facts.batch_size is not None:
            raise InvalidOptionError(
                f"share='batches' cannot hold for an iterable dataset with batch_size={facts.batch_size}: workers read "
                f"{name} item by item, and each makes batches of its own. Let the dataset yield whole batches and pass "
                "batch_size=None, or leave share out."
            )
        case Level.UNBATCHED, "within_batches":
            raise _not_divisible(name)
        case Level.ITERABLE, "within_batches" if facts.batch_size is None:
            raise _not_divisible(name)
        case Level.SAMPLE, "batches" | "within_batches":
            return facts.in_whole_batches()
        case Level.SAMPLE, "auto" if arranges_neighbours(facts.stream.source):
            return facts.in_whole_batches()
    return facts


def _not_divisible(name: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"share='within_batches' cannot hold for a loader with batch_size=None: to torch each item of {name} is one "
        "whole, even if it holds several samples. Give the loader a batch_size or a batch_sampler, or leave share out."
    )
