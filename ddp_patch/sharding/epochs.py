"""The epochs of one loader: which comes next, which pass is the latest, and where the next pass resumes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddp_patch.errors import InvalidOptionError
from ddp_patch.orders.random_states import EpochCounter
from ddp_patch.sharding.saved_state import Position
from ddp_patch.validation import as_index

if TYPE_CHECKING:
    from ddp_patch.sharding.passes import Pass


T = TypeVar("T")


def epoch_number(epoch: object) -> int:
    """Return the number of an epoch that somebody chooses.

    Raises:
        InvalidOptionError: It is no whole number, or a negative one.
    """
    number = as_index(epoch)
    if number is None or number < 0:
        raise InvalidOptionError(
            f"set_epoch({epoch!r}): an epoch is a whole number of at least 0, because its order is derived "
            "from it. Pass the number of the epoch that comes next."
        )
    return number


class Epochs(Generic[T]):
    """Which epoch of a loader comes next, which pass is the latest, and where the next pass resumes.

    Attributes:
        counter: The numbers of the epochs and passes, which workers are told, too.
        latest: The latest pass, if there was one since an epoch was chosen.
        position: Where the next pass resumes, if a state was loaded for it.
        counts_rest: Whether lengths count the rest of a resumed epoch, rather than the whole epoch.
        was_chosen: Whether somebody has chosen the next epoch, and no pass has begun since.
    """

    def __init__(self) -> None:
        self.counter: EpochCounter = EpochCounter()
        self.latest: Pass[T] | None = None
        self.position: Position | None = None
        self.counts_rest: bool = True
        self.was_chosen: bool = False
        self._counts_next = False  # whether an iterator that counts batches is about to begin a pass
        self._beginning: Position | None = None  # where a pass begins, while its sampler is begun

    def __getstate__(self) -> dict[str, Any]:
        # A running pass cannot be copied.
        return {**self.__dict__, "latest": None}

    @property
    def upcoming(self) -> int:
        """The epoch that comes next."""
        return self.counter.upcoming

    @property
    def running(self) -> Pass[T] | None:
        """The latest pass, unless a state was restored since, or another pass is about to begin."""
        return self.latest if self.known_position is None else None

    @property
    def known_position(self) -> Position | None:
        """Where the pass begins that is about to begin, or the next one resumes; None if neither is so."""
        return self._beginning or self.position

    def choose(self, epoch: int) -> None:
        """Make an epoch the next one. If it already is, a position that was loaded stays."""
        if epoch != self.upcoming:
            self.position = None
        self.latest, self.was_chosen = None, True
        self.counter.current = self.counter.upcoming = epoch

    def cut_off(self) -> None:
        """Forget the latest pass: a position is restored."""
        self.latest = None

    def resume_at(self, position: Position, *, counts_rest: bool) -> None:
        """Make the next pass, over the epoch that was chosen, resume at a position."""
        self.position, self.counts_rest = position, counts_rest

    def begin(self, current: Pass[T]) -> None:
        """Make a pass the latest one, which begins to draw; it takes the position that was loaded."""
        self.counter.current, self.counter.upcoming = current.epoch, current.epoch + 1
        self.counter.passes += not current.start.is_ended  # of one that gives nothing, workers are told nothing
        self.latest, self.position, self.was_chosen = current, None, False
        if self._counts_next:
            self._counts_next = False
            current.delivery.begin_loop()

    def go_on(self, current: Pass[T]) -> None:
        """Make a pass the latest one again, because the loop was given a batch of it after a ``set_epoch``.

        Lightning starts an epoch's workers before it says which epoch it is.
        """
        if self.position is None:
            self.latest = current

    @contextmanager
    def counting(self, counts: bool = True) -> Iterator[None]:
        """While entered, a pass that begins is one whose batches are counted, though its iterator has given none yet.

        A signal's handler, or the user's dataset, may ask for the position meanwhile.
        """
        self._counts_next = counts
        try:
            yield
        finally:
            self._counts_next = False

    @contextmanager
    def beginning(self, start: Position) -> Iterator[None]:
        """While entered, the position is where the pass begins: a sampler that is begun draws already."""
        self._beginning = start
        try:
            yield
        finally:
            self._beginning = None

    def counted_by_len(self) -> tuple[int, int]:
        """Return what ``len()`` counts: an epoch, and how many items of it were taken before.

        If a position was loaded, this is about the next pass, which resumes there; otherwise about the running one.
        """
        current, taken = self.latest, 0
        if self.position is not None:
            epoch, taken = self.position.epoch, self.position.taken_of_all
        elif current is None or current.is_over:
            epoch = self.counter.current
        else:
            epoch, taken = current.epoch, current.taken_before
        return epoch, taken if self.counts_rest else 0
