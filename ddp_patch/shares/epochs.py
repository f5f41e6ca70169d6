"""What every sampler that this package puts into a loader is: a ``DistributedSampler`` that counts epochs."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch.utils.data import DistributedSampler

from ddp_patch.errors import InvalidOptionError, StateError
from ddp_patch.plan import Plan
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.shares.passes import EpochPass
from ddp_patch.shares.place import Held, Place, plain_attributes, read_state
from ddp_patch.streams.seeding import EpochCounter

__all__ = ["EpochSampler"]

T = TypeVar("T")


class EpochSampler(DistributedSampler[T]):
    """What every sampler that this package puts into a loader has: a plan, an agreement, a count of epochs, a place.

    A ``DistributedSampler``, because every framework recognises a sharded loader by that class.

    Attributes:
        agreed: What the ranks agreed on.
        plan: Which positions are this rank's.
        seed: What every epoch's order is derived from; the same on every rank.
        epochs: Which epoch comes next.
        progress: How far the latest pass has come, if there was one in this epoch.
        place: Where the next pass goes on, if a state was loaded for it.
        tells_rest: Whether lengths are told of the rest of an epoch that is gone on with, or of the whole epoch.
        tells_sizes: Whether passes that begin keep how many samples their items have.
    """

    tells_sizes = False

    def __init__(self, agreed: Agreed, holders: Sequence[object], facts: Mapping[str, object]) -> None:
        # DistributedSampler.__init__ is not called: it fixes the length, once, and so needs one.
        self.agreed = agreed
        self.plan: Plan = agreed.plan(agreed.world.rank)
        self.seed: int = agreed.seed
        self.epochs: EpochCounter = EpochCounter()
        # The names by which DistributedSampler's users know these.
        self.num_replicas: int = agreed.world.num_replicas
        self.rank: int = agreed.world.rank
        self.progress: EpochPass | None = None
        self.place: Place | None = None
        self.tells_rest: bool = True
        self._holders = holders  # what may hold random generators, or a state of its own
        self._at_first = plain_attributes(holders)
        options = agreed.options
        self._facts = {
            **facts,
            "seed": self.seed,
            "uneven": options.uneven,
            "layout": options.layout,
            "scalable_shuffle": options.scalable_shuffle,
        }

    def _begin(self, epoch: int, facts: Mapping[str, object], known: Mapping[str, object] | None = None) -> None:
        """Begin an epoch, in step with the other ranks where the user wants that checked."""
        self.agreed.check("Beginning an epoch", {"epoch": epoch, "seed": self.seed, **facts}, known)
        self.epochs.begin(epoch)

    def __getstate__(self) -> dict[str, Any]:
        # A copy begins a pass of its own; one that runs cannot be copied.
        return {**self.__dict__, "progress": None}

    def _held(self) -> Held:
        return Held.by(self._holders, self._at_first)

    def _stream_length(self, epoch: int) -> int:
        """How many items the stream has; TypeError, or whatever the user's code raises, where that is not known."""
        raise NotImplementedError

    def _length_if_any(self, epoch: int) -> int | None:
        try:
            return self._stream_length(epoch)
        except Exception:  # noqa: BLE001 - the user's code, which an unpatched loader may never call
            return None

    def rest_length(self, progress: EpochPass) -> int | None:
        """How many items all ranks share in a pass: found, or as the sampler says, or None."""
        if progress.length is not None:
            return progress.length
        length = self._length_if_any(progress.epoch)
        return None if length is None else len(self.plan.rest(length, progress.before))

    @property
    def epoch(self) -> int:
        """The epoch being drawn, or before the first pass the one that will be."""
        return self.epochs.current

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be drawn.

        Calling it is optional: each pass that draws anything is followed by the next epoch. A place that was loaded
        is kept where it is in that epoch.
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
        if number != self.epochs.upcoming:
            self.place = None
        self.progress = None
        self.epochs.set(number)

    def _current(self) -> EpochPass:
        """The pass that lengths are told of: the one to come, where it goes on from a place, or the one in progress."""
        if self.place is not None:
            now = EpochPass.at(self.place, self.num_replicas, resumes=True)
        elif self.progress is None or self.progress.over:
            now = EpochPass(epoch=self.epochs.current)
        else:
            now = self.progress
        return now if self.tells_rest else EpochPass(epoch=now.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands: torch's Stateful protocol, by which other packages save and resume.

        The state is the same on every rank, and can be loaded where there are more or fewer of them.
        """
        return self._place_now().state(self._facts)

    def _place_now(self) -> Place:
        progress = self.progress
        if progress is None or (progress.resumes and self.place is not None):
            return self.place or Place(self.epochs.upcoming, held=self._held())
        now = self._held()
        if progress.ended:
            return progress.end(self.num_replicas, now)
        return progress.place(self.num_replicas, progress.taken, now if now.generators else None)

    def state_after(self, batches: int, size: int, drops_last: bool) -> dict[str, Any]:
        """Return the state after so many batches of the latest pass.

        Args:
            batches: How many batches are done.
            size: How many items of this rank's share a batch has.
            drops_last: Whether a last batch of fewer is left out.

        Raises:
            InvalidOptionError: The pass has not given so many.
            StateError: No state can be told.
        """
        self._refuse_ambient("told")
        progress = self.progress if self.place is None else None
        taken = 0 if progress is None else progress.taken - progress.skip
        taken = taken // size if drops_last else -(-taken // size)
        if batches > taken:
            raise InvalidOptionError(
                f"batches_done={batches}, and the pass in progress has given {taken}. Pass how many of its batches the "
                "training loop has finished, counted from the beginning of this pass."
            )
        if progress is None:
            return self.state_dict()
        length = self.rest_length(progress)
        if length is not None:
            left = self.plan.rounds(length) - progress.skip
            is_last = batches == (left // size if drops_last else -(-left // size))
            # Where more was given the length is wrong.
            more = self._given_after(progress, progress.skip + batches * size)
            unused = (size - 1 if drops_last else 0) - more
            if is_last and unused >= 0 and progress.is_at_end(unused):
                return progress.end(self.num_replicas, self._held()).following().state(self._facts)
        return progress.place(self.num_replicas, progress.skip + batches * size).state(self._facts)

    def _given_after(self, progress: EpochPass, taken: int) -> int:
        """How many items of the share were drawn beyond so many."""
        return progress.given - taken

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next pass go on where a ``state_dict`` was taken.

        Lengths stay those of whole epochs, as torchdata's do: who saves and resumes by this protocol counts from the
        epoch's beginning.

        Raises:
            StateError: It is damaged, newer than this package, or of another loader; then nothing has changed.
        """
        self.go_to(self.read(state_dict), tells_rest=False)

    def read(self, state: Any) -> Place:
        """Return the place that a state tells, which must be one in this loader."""
        self._refuse_ambient("restored")
        place = read_state(state, self._facts, self._holders)
        length = self._sure_length(place.epoch)
        for number, (ranks, taken) in enumerate(place.done if length is not None else ()):
            left = len(self.plan.rest(length or 0, place.done[:number]))
            if taken > Plan(0, ranks, self.plan.uneven, self.plan.layout).rounds(left):
                raise StateError(
                    f"The state is damaged: {ranks} ranks took {taken} items each in it, and only {left} items were "
                    "left for them. Pass what loader_state(), or state_dict(), returned, as it was saved."
                )
        return place

    def _sure_length(self, epoch: int) -> int | None:
        """How many items the stream has, where that can be relied on."""
        return None

    def go_to(self, place: Place, *, tells_rest: bool) -> None:
        """Make the next pass go on at a place; see the attribute ``tells_rest``."""
        place.held.reinstate(self._holders, self._at_first)
        self.set_epoch(place.epoch)  # also to samplers whose own state told of the epoch before
        self.place, self.tells_rest = place, tells_rest

    def _refuse_ambient(self, what: str) -> None:
        if self.agreed.options.agreement == "ambient":
            raise StateError(
                f"A state cannot be {what} with agreement='ambient': the order then follows from the global random "
                "states, which training moves. Use agreement='auto' or 'seeded'."
            )
