"""A reader of a stream, of which each process has its own: which pass has begun, and where the reader begins in it."""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar, cast

from torch.utils.data import IterableDataset

from ddp_patch.compat.private_packages import loses_items_when_loaded
from ddp_patch.compat.private_torch import rank_noted, worker_info_told
from ddp_patch.loaders.facts import LoaderFacts
from ddp_patch.orders.random_states import is_stateful, random_generators, set_generator_states
from ddp_patch.ranks.agreement import Agreed
from ddp_patch.sharding.saved_state import NotedBatch, Position
from ddp_patch.sharding.state_text import as_text
from ddp_patch.streams.messages import no_pass_begun
from ddp_patch.streams.reports import LARGEST, SharedReports
from ddp_patch.streams.stream_share import Asked, PartStart, StreamShare, this_worker

T = TypeVar("T")


def tell_epoch(dataset: object, epoch: int) -> None:
    """Tell a dataset its epoch, if it has a method for that."""
    if callable(tell := getattr(dataset, "set_epoch", None)):
        tell(epoch)


def stored_epoch(dataset: object) -> int | None:
    """Return the ``epoch`` of a dataset that takes one, or its first whole number with that word in its name."""
    if not callable(getattr(dataset, "set_epoch", None)):
        return None
    stored = (value for name, value in vars(dataset).items() if "epoch" in name.lower())
    found = (value for value in (getattr(dataset, "epoch", None), *stored) if type(value) is int)
    return next(found, None)


def generators_only(dataset: object) -> SimpleNamespace:
    """Return an object that holds a dataset's random generators, and not its own state, which is a position in it."""
    return SimpleNamespace(generators=random_generators([dataset]))


class Resumed(NamedTuple):
    """A pass that continues at a position, in readers that are started from now on.

    Attributes:
        number: Which pass.
        position: Where it continues.
        left_out: How many items of its epoch ``len()`` leaves out.
    """

    number: int
    position: Position
    left_out: int


class StreamReader(Generic[T]):
    """Reads a stream in one process. The main process has one, and each of the loader's workers a copy of it.

    Args:
        given: The loader that the user gave.
        agreed: What the ranks agreed on.
        is_compared: Whether the ranks compare what is read.

    Attributes:
        dataset: The dataset that the user gave.
        share: The rank's share of it.
        shared: The memory in which passes are begun and reported.
        asked: What the dataset asked, in this process or before it was started.
        resumed: The pass that continues at a position, if one does.
        is_underway: Whether the dataset was read, and not to its end, in this process or before it was started.
        note: Returns the note of the batch that ends with the latest item; None before the first item.
    """

    def __init__(self, given: LoaderFacts[Any], agreed: Agreed, *, is_compared: bool) -> None:
        self.dataset: IterableDataset[T] = given.dataset
        is_position = is_stateful(given.dataset) and not loses_items_when_loaded(given.dataset)
        splits_itself = agreed.options.by_worker
        self.share: StreamShare = StreamShare(
            agreed.plan,
            agreed.batch_plan,
            given.batching,
            agreed.seed,
            readers=max(1, given.num_workers),
            splits_itself=splits_itself,
            takes_states=is_position and not splits_itself,
            is_compared=is_compared,
        )
        self.shared: SharedReports = SharedReports(self.share.readers)
        self.asked: Asked = Asked()
        self.resumed: Resumed | None = None
        self.is_underway: bool = False
        self.note: Callable[[], NotedBatch | None] | None = None
        self._chosen_epoch: int | None = None  # which the user told the dataset last, if no pass has begun since
        self._made_for: int | None = None  # the part for which a worker_init_fn prepared the dataset
        self._first_pass: int | None = None  # for which a worker was started

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "note": None}  # no pass goes on in a copy

    @property
    def name(self) -> str:
        """The class of the dataset, as errors name it."""
        return type(self.dataset).__name__

    def length(self) -> int:
        """Return the length of the user's dataset; TypeError where it has none."""
        return len(cast(Any, self.dataset))

    def choose_epoch(self, tell: Callable[[int], object], epoch: int) -> None:
        """Tell the dataset an epoch of the user's, over which the next pass is."""
        tell(epoch)
        self._chosen_epoch = epoch

    def take_chosen_epoch(self) -> int | None:
        """Return the epoch that the user told the dataset since this was called last; None if there is none."""
        chosen, self._chosen_epoch = self._chosen_epoch, None
        return chosen

    # ---- the dataset's own state ----

    def written_state(self) -> bytes | None:
        """Return the dataset's own state now, as text; None if it has none, or one that is too large or no text."""
        with suppress(Exception):  # the user's code; without a state its stream is read again
            written = as_text(cast(Any, self.dataset).state_dict()).encode()
            return written if len(written) <= LARGEST else None
        return None

    def unread_state(self) -> bytes | None:
        """Return the dataset's own state, as text, if it was not read yet, or was read to its end."""
        return None if self.is_underway or not self.share.takes_states else self.written_state()

    # ---- a pass ----

    def resumed_at(self, number: int, epoch: int) -> Position | None:
        """Return the position where pass ``number``, over an epoch, continues; None if the pass begins the epoch."""
        if (resumed := self.resumed) is None or (resumed.number, resumed.position.epoch) != (number, epoch):
            return None
        return resumed.position

    def _start(self, position: Position | None) -> PartStart:
        """Return where this worker begins at a position, or at the beginning of an epoch."""
        start = self.share.start(position, this_worker()[0])
        return start if position is not None or self._made_for is None else start._replace(part=self._made_for)

    def prepare(self, number: int, epoch: int, worker_init_fn: Callable[[int], object] | None) -> None:
        """Prepare this worker for pass ``number``: call the user's function, which may make the dataset another one.

        If the dataset stays as it was, the function's questions do not count: most functions ask for a number, or a
        rank, to seed a worker.
        """
        self._first_pass = number
        if worker_init_fn is None:
            return
        part = self._start(self.resumed_at(number, epoch)).part
        asked, before = Asked(), dict(getattr(self.dataset, "__dict__", {}))
        with worker_info_told(self.share.worker_info(part, epoch, self.dataset, asked)), rank_noted(asked.note_rank):
            worker_init_fn(self.share.worker_of(part)[0])
        after = getattr(self.dataset, "__dict__", {})
        is_changed = before.keys() != after.keys() or any(after[name] is not value for name, value in before.items())
        if is_changed or asked.dataset:
            self.asked, self._made_for = Asked(worker=True, may_split=True, rank=asked.rank), part

    def begin(self) -> tuple[int, int, PartStart]:
        """Begin a pass when its first item is asked for; return its number, its epoch, and where this worker begins.

        By then the main process has begun the pass. A worker's first pass is the one for which it was started, although
        later ones may have begun since.
        """
        number, self._first_pass = self._first_pass, None
        begun = self.shared.begun(number)
        if begun is None or this_worker()[1] != self.share.readers:
            raise no_pass_begun(self.name)
        number, epoch = begun
        if (position := self.resumed_at(number, epoch)) is not None and position.is_within_pass:
            # In workers too: a loader may have drawn its workers' seed from these generators since.
            set_generator_states([generators_only(self.dataset)], [state for _, state in position.states.generators])
        return number, epoch, self._start(position)

    def collate(self, collate_fn: Callable[[Any], Any], samples: Any) -> Any:
        """Return a batch, in a ``NotedBatch`` if the pass that read its samples notes the dataset's state.

        Args:
            collate_fn: The loader's.
            samples: The batch's samples.
        """
        note = None if self.note is None else self.note()  # before the user's function may read on
        batch = collate_fn(samples)
        return batch if note is None else note._replace(batch=batch)
