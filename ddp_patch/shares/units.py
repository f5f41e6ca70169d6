"""Decide what is sharded: samples or whole batches, as the user says or the samplers need."""

from typing import Any, TypeVar

from torch.utils.data import DataLoader

from ddp_patch.compat.samplers import arranges_neighbours
from ddp_patch.errors import InvalidOptionError
from ddp_patch.loaders.facts import Level, LoaderFacts
from ddp_patch.options import Share

__all__ = ["unit_shared"]

L = TypeVar("L", bound=DataLoader[Any])


def unit_shared(facts: LoaderFacts[L], share: Share) -> LoaderFacts[L]:
    """Return the facts about a loader with the unit that is sharded.

    With ``batch_size=None``, items are sharded as they are, whatever ``share`` says: torch does not look into them.

    Raises:
        InvalidOptionError: The loader cannot be sharded in this way.
    """
    if facts.sharded_by is not None:
        return facts
    name = facts.stream.name
    match facts.level, share:
        case Level.BATCH, "samples":
            raise InvalidOptionError(
                f"share='samples' does not work with a batch sampler of your own: it would split the batches that "
                f"{name} makes. Use share='batches', or leave it out."
            )
        case Level.ITERABLE, "batches" if facts.batch_size is not None:
            raise InvalidOptionError(
                f"share='batches' does not work with an iterable dataset and batch_size={facts.batch_size}: workers "
                f"read {name} item by item, and each makes its own batches. Let the dataset yield whole batches and "
                "pass batch_size=None, or leave share out."
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
        f"share='within_batches' does not work with batch_size=None: torch does not look into the items of {name}, "
        "even if each has several samples. Give the loader a batch_size or a batch_sampler, or leave share out."
    )
