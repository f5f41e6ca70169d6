"""What every sampler that this package puts into a loader is: a ``DistributedSampler`` that counts epochs."""

import operator
from collections.abc import Mapping
from typing import TypeVar

from torch.utils.data import DistributedSampler

from ddp_patch.agreement import Agreed
from ddp_patch.errors import InvalidOptionError
from ddp_patch.seeding import EpochCounter

__all__ = ["EpochSampler"]

T = TypeVar("T")


class EpochSampler(DistributedSampler[T]):
    """What every sampler that this package puts into a loader has: a plan, an agreement and a count of epochs.

    A ``DistributedSampler``, because every framework recognises a sharded loader by that class.

    Attributes:
        agreed: What the ranks agreed on.
        plan: Which positions are this rank's.
        seed: What every epoch's order is derived from; the same on every rank.
        epochs: Which epoch comes next.
    """

    def __init__(self, agreed: Agreed) -> None:
        # DistributedSampler.__init__ is not called: it fixes the length, once, and so needs one.
        self.agreed = agreed
        self.plan = agreed.plan(agreed.world.rank)
        self.seed = agreed.seed
        self.epochs = EpochCounter()
        # The names by which DistributedSampler's users know these.
        self.num_replicas, self.rank = agreed.world.num_replicas, agreed.world.rank

    def _begin(self, epoch: int, facts: Mapping[str, object], known: Mapping[str, object] | None = None) -> None:
        """Begin an epoch, in step with the other ranks where the user wants that checked."""
        self.agreed.check("Beginning an epoch", {"epoch": epoch, "seed": self.seed, **facts}, known)
        self.epochs.begin(epoch)

    @property
    def epoch(self) -> int:
        """The epoch being drawn, or before the first pass the one that will be."""
        return self.epochs.current

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be drawn.

        Calling it is optional: each pass that draws anything is followed by the next epoch.
        """
        try:
            number = operator.index(epoch)
        except TypeError:
            number = -1
        if number < 0:
            raise InvalidOptionError(
                f"set_epoch({epoch!r}): an epoch is a whole number of at least 0, because its order is derived "
                "from it. Pass the number of the epoch that comes next."
            )
        self.epochs.set(number)
