"""Where a worker's pass begins, and its iterator, which saves its position by torch's Stateful protocol."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ddp_patch.errors import StateError
from ddp_patch.plan import Done
from ddp_patch.shares.place import Mark

__all__ = ["Items", "Loaded", "Start"]

T = TypeVar("T")

_KEY = "ddp_patch"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a worker's pass begins, and which worker the dataset thinks it is in.

    Attributes:
        number: The pass.
        epoch: Which epoch it is over; -1 before that is known.
        role: Which worker of this rank's loader it replaces; another than it is where a pass resumes.
        before: What other numbers of ranks took.
        skip: How many items of this rank's share were done when the pass began.
        counts: What the state that is resumed counts: one stream, parts, or nothing.
        offset: How many items this worker has gone through since: another package's loader resumes within the pass.
        mark: What is known of the stream there.
    """

    number: int
    epoch: int
    role: int
    before: Done = ()
    skip: int = 0
    counts: Literal["stream", "parts", "nothing"] = "nothing"
    offset: int = 0
    mark: Mark = field(default_factory=Mark)

    @property
    def is_whole(self) -> bool:
        """Whether nothing was taken."""
        return not self.done and not any(taken for _, taken in self.before)

    @property
    def done(self) -> int:
        """How many items of this rank's share are done."""
        return self.skip + self.offset


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the iterator of a worker said of itself, and shall resume from.

    Attributes:
        start: Where its pass begins now; its number is that of the pass in which it was said.
        seed: The seed then in force.
        generators: The states of the dataset's random generators when the pass began.
        is_over: Whether nothing was left.
    """

    start: Start
    seed: int
    generators: Sequence[Any]
    is_over: bool


class Items(Iterator[T]):
    """A worker's items in one pass. Nothing is read before the first is asked for.

    torchdata's loader saves and resumes it in the worker by its ``state_dict``, where it would else count items from
    the pass's beginning, and lose some at the second stop.

    Args:
        begin: Called with the iterator when its first item is asked for. Returns the items.
        standing: Tells where it will begin.
        note: Called with what was loaded.

    Attributes:
        loaded: What was loaded, if anything was.
        standing: Returns its position.
    """

    def __init__(
        self,
        begin: Callable[["Items[T]"], Iterator[T]],
        standing: Callable[[], Loaded],
        note: Callable[[Loaded], object],
    ) -> None:
        self._begin, self._note = begin, note
        self._items: Iterator[T] | None = None
        self.loaded: Loaded | None = None
        self.standing: Callable[[], Loaded] = standing

    def __next__(self) -> T:
        if self._items is None:
            self._items = self._begin(self)
        return next(self._items)

    def state_dict(self) -> dict[str, Any]:
        """Return its position, as the only value."""
        loaded = self.loaded if self._items is None and self.loaded is not None else self.standing()
        start = loaded.start
        done = [list(stint) for stint in start.before]
        return {
            # A list, because torchdata takes dicts apart.
            _KEY: [
                *(start.epoch, start.role, done, start.skip, start.counts, start.offset),
                *start.mark.plain(),
                *(loaded.seed, list(loaded.generators), loaded.is_over),
            ]
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make it begin where ``state_dict`` was called.

        Raises:
            StateError: It is no such state.
        """
        if _KEY not in state_dict:
            raise StateError(
                f"The state of a worker's iterator has no {_KEY!r}, so it was taken from an unpatched loader. Restore "
                "it with that loader, or take one from the patched loader."
            )
        epoch, role, done, skip, counts, offset, first, state, seed, generators, is_over = state_dict[_KEY]
        mark = Mark.of((first, state))
        before = tuple((ranks, taken) for ranks, taken in done)
        self.loaded = Loaded(Start(-1, epoch, role, before, skip, counts, offset, mark), seed, generators, is_over)
        self._note(self.loaded)
