"""Draw on real ranks: processes of a gloo group, which differ in all that processes differ in."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddp_patch.auditing.draw.coding import Coding, Numbers
from ddp_patch.auditing.draw.drawn import Drawn
from ddp_patch.auditing.draw.simulate import Rank
from ddp_patch.auditing.draw.subject import Subject
from ddp_patch.auditing.draw.traits import Traits
from ddp_patch.errors import InvalidOptionError
from ddp_patch.testing import run_ranks

__all__ = ["RealRank", "real_ranks_of"]


@dataclass(frozen=True, slots=True)
class RealRank:
    """Hold what a real rank drew.

    Attributes:
        traits: Describes its loader.
        epochs: What it drew, by epoch number.
        coding: Gave its items their numbers, in its own process.
        digest: A hash of the samples that the dataset below torch's ``Subset`` layers holds in memory; None where it
            holds none, and where no factory makes datasets.
        layers: The indices of that dataset and of each ``Subset`` above it.
    """

    traits: Traits
    epochs: Mapping[int, Drawn]
    coding: Coding
    digest: str | None = None
    layers: Sequence[Numbers] = ()

    @property
    def base(self) -> object:
        """Return what stands for the dataset, which is this process's own."""
        return self

    def epoch(self, number: int, coding: Coding) -> Drawn:
        """Return an epoch, its items in the numbers of another coding."""
        drawn = self.epochs[number]
        return replace(drawn, items=coding.adopt(self.coding, drawn.items).astype(np.int64))


def real_ranks_of(subject: Subject, seeds: Sequence[int], numbers: Sequence[int], timeout: float) -> list[RealRank]:
    """Start a process for every rank, draw epochs there one after the other, and return what each rank drew.

    Args:
        subject: What is audited.
        seeds: For each rank, as which one it is seeded.
        numbers: The epochs to draw.
        timeout: Seconds until every rank must have returned.

    Raises:
        InvalidOptionError: The subject cannot be pickled.
    """
    try:
        pickled = pickle.dumps(subject)
    except Exception as error:
        raise InvalidOptionError(
            f"audit with processes=True sends what it audits to other processes, and pickling {subject.name} raised "
            f"{type(error).__name__}: {error}. Pass a factory that is a function of a module."
        ) from error
    return run_ranks(sampling, len(seeds), pickled, numbers, seeds, timeout=timeout)


def sampling(rank: int, world_size: int, pickled: bytes, numbers: Sequence[int], seeds: Sequence[int]) -> RealRank:
    """Draw epochs on one rank; errors call it by this name."""
    subject: Subject = pickle.loads(pickled)  # noqa: S301 - the parent's own
    coding = Coding()
    one = Rank(lambda: subject.made_for(rank, world_size, is_real=True), subject, seeds[rank])
    epochs = {number: one.epoch(number, coding) for number in numbers}
    if not subject.is_made:
        return RealRank(one.traits, epochs, coding)
    return RealRank(one.traits, epochs, coding, one.digest, one.layers)
