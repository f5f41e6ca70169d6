"""Where workers begin, and how they read a dataset."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeVar

from torch.utils.data import get_worker_info

from ddp_patch.compat.private_torch import WorkerInfo, noted_worker_info, rank_noted, worker_info_told
from ddp_patch.errors import StateError
from ddp_patch.orders.random_states import PrivateRNG
from ddp_patch.plan import Consumed
from ddp_patch.sharding.position import StreamSnapshot

__all__ = ["Reader", "Switching", "WorkerCheckpoint", "WorkerIterator", "WorkerPosition", "this_worker"]


T = TypeVar("T")

_KEY, _VERSION = "ddp_patch", 1


@dataclass(frozen=True, slots=True)
class WorkerPosition:
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
    before: Consumed = ()
    skip: int = 0
    counts: Literal["stream", "parts", "nothing"] = "nothing"
    offset: int = 0
    mark: StreamSnapshot = field(default_factory=StreamSnapshot)

    @property
    def is_whole(self) -> bool:
        """Whether nothing was taken."""
        return not self.done and not any(taken for _, taken in self.before)

    @property
    def done(self) -> int:
        """How many items of this rank's share are done."""
        return self.skip + self.offset


@dataclass(frozen=True, slots=True)
class WorkerCheckpoint:
    """What the iterator of a worker said of itself, and shall resume from.

    Attributes:
        start: Where its pass begins now; its number is that of the pass in which it was said.
        seed: The seed then in force.
        generators: The states of the dataset's random generators when the pass began.
        is_over: Whether nothing was left.
    """

    start: WorkerPosition
    seed: int
    generators: Sequence[Any]
    is_over: bool


class WorkerIterator(Iterator[T]):
    """A worker's items in one pass. Nothing is read before the first is asked for.

    torchdata's loader saves and resumes it in the worker by its ``state_dict``, where it would else count items from
    the pass's beginning, and lose some at the second stop.

    Args:
        begin: Called with the iterator when its first item is asked for. Returns the items.
        progress: Tells where it will begin.
        note: Called with what was loaded.

    Attributes:
        loaded: What was loaded, if anything was.
        progress: Returns its position.
    """

    def __init__(
        self,
        begin: Callable[["WorkerIterator[T]"], Iterator[T]],
        progress: Callable[[], WorkerCheckpoint],
        note: Callable[[WorkerCheckpoint], object],
    ) -> None:
        self._begin, self._note = begin, note
        self._items: Iterator[T] | None = None
        self.loaded: WorkerCheckpoint | None = None
        self.progress: Callable[[], WorkerCheckpoint] = progress

    def __next__(self) -> T:
        if self._items is None:
            self._items = self._begin(self)
        return next(self._items)

    def state_dict(self) -> dict[str, Any]:
        """Return its position, as the only value."""
        loaded = self.loaded if self._items is None and self.loaded is not None else self.progress()
        start = loaded.start
        fields = {
            "version": _VERSION,
            "epoch": start.epoch,
            "role": start.role,
            "before": [list(stint) for stint in start.before],
            "skip": start.skip,
            "counts": start.counts,
            "offset": start.offset,
            "mark": start.mark.plain(),
            "state before": list(start.mark.before),
            "seed": loaded.seed,
            "generators": list(loaded.generators),
            "is_over": loaded.is_over,
        }
        return {_KEY: [[name, value] for name, value in fields.items()]}  # pairs: torchdata takes dicts apart

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make it begin where ``state_dict`` was called.

        Raises:
            StateError: It is no such state, or one of another version of this package.
        """
        if _KEY not in state_dict:
            raise StateError(
                f"The state of a worker's iterator has no {_KEY!r}, so it was taken from an unpatched loader. Restore "
                "it with that loader, or take one from the patched loader."
            )
        kept = state_dict[_KEY]
        fields: dict[str, Any] = (
            dict(kept) if all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in kept) else {}
        )
        if fields.pop("version", None) != _VERSION:
            raise StateError(
                "The state of a worker's iterator was written by another version of ddp_patch, which this one does not "
                "read. Restore it with that version."
            )
        seed, generators, is_over = (fields.pop(name) for name in ("seed", "generators", "is_over"))
        fields["before"] = tuple((ranks, taken) for ranks, taken in fields["before"])
        fields["mark"] = StreamSnapshot.of(fields["mark"], fields.pop("state before"))
        self.loaded = WorkerCheckpoint(WorkerPosition(number=-1, **fields), seed, generators, is_over)
        self._note(self.loaded)


# What a dataset asks of the worker info that differs between workers.
_TELLING = frozenset({"id", "num_workers", "seed"})


def this_worker() -> tuple[int, int]:
    """Return which worker of how many this is; the main process is the only one."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


class Reader:
    """Reads a dataset, answers its ``get_worker_info()``, and records whether it asked.

    Attributes:
        has_asked: Whether it has. It may remember the answer, so this stays true in later passes.
        has_split: Whether an item came after it had.
        has_asked_rank: Whether it asked which rank this is, by its first item, or was made another one by a function
            that did.
    """

    def __init__(self) -> None:
        self.has_asked: bool = False
        self.has_split: bool = False
        self.has_asked_rank: bool = False
        self._has_dataset = False  # whether somebody reached for the dataset through the worker info

    def info(self, worker: int, workers: int, seed: int, dataset: Any) -> WorkerInfo | None:
        """Return what ``get_worker_info()`` returns to the dataset; in the main process torch returns None."""
        if get_worker_info() is None and workers == 1:
            return None
        return noted_worker_info(worker, workers, seed, dataset, self._note)

    def prepare(self, dataset: Any, worker_init_fn: Callable[[int], object], worker: int) -> None:
        """Call the user's ``worker_init_fn``, and note whether it made the dataset another one for this worker.

        That it asked for its number, or for its rank, says nothing: most functions do so to seed a worker.
        """
        before, asked, asked_rank = dict(_attributes(dataset)), self.has_asked, self.has_asked_rank
        self._has_dataset = False
        with rank_noted(self._note_rank):
            worker_init_fn(worker)
        after = _attributes(dataset)
        is_changed = before.keys() != after.keys() or any(after[name] is not value for name, value in before.items())
        is_made = self._has_dataset or is_changed
        self.has_asked = asked or is_made
        self.has_asked_rank = asked_rank or (self.has_asked_rank and is_made)

    def read(self, begin: Callable[[], Iterator[Any]], info: WorkerInfo | None) -> Iterator[Any]:
        """Iterate a dataset, which ``begin()`` begins; ``get_worker_info()`` returns ``info`` while its code runs."""
        with worker_info_told(info), rank_noted(self._note_rank):
            iterator = begin()
        noting: AbstractContextManager[None] = rank_noted(self._note_rank)
        while True:
            with worker_info_told(info), noting:
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            noting = nullcontext()
            self.has_split |= self.has_asked
            yield item

    def _note_rank(self) -> None:
        self.has_asked_rank = True

    def _note(self, name: str) -> None:
        self.has_asked |= name in _TELLING
        self._has_dataset |= name == "dataset"


def _attributes(dataset: object) -> dict[str, Any]:
    return getattr(dataset, "__dict__", {})


class Switching(AbstractContextManager[None]):
    """Random states that may be replaced by others between two uses.

    Args:
        states: What to enter at first.
    """

    def __init__(self, states: AbstractContextManager[Any]) -> None:
        self._states = states
        self._is_entered = self._moved = False

    def replace(self, states: AbstractContextManager[Any]) -> None:
        """Use others from now on, at once where the ones before are entered."""
        if was_entered := self._is_entered:
            self.__exit__(None, None, None)
        self._moved = not self.are_unmoved
        self._states = states
        if was_entered:
            self.__enter__()

    @property
    def are_unmoved(self) -> bool:
        """Whether nothing was drawn from any of them."""
        return not self._moved and (not isinstance(self._states, PrivateRNG) or self._states.is_unmoved)

    def __enter__(self) -> None:
        self._states.__enter__()
        self._is_entered = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._is_entered = False
        return self._states.__exit__(kind, error, trace)
