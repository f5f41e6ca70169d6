"""How a worker reads the user's dataset: what get_worker_info() returns, and which random states it uses."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from ddp_patch.compat.torch_groups import rank_noted
from ddp_patch.compat.torch_workers import WorkerInfo, noted_worker_info, worker_info_told
from ddp_patch.streams.random_states import PrivateRNG

__all__ = ["Reader", "Switching", "this_worker"]

T = TypeVar("T")

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
        has_asked_rank: Whether it asked which rank this is, by its first item.
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

        That it asked for its number says nothing: most functions do so to seed a worker.
        """
        before, asked = dict(_attributes(dataset)), self.has_asked
        self._has_dataset = False
        worker_init_fn(worker)
        after = _attributes(dataset)
        is_changed = before.keys() != after.keys() or any(after[name] is not value for name, value in before.items())
        self.has_asked = asked or self._has_dataset or is_changed

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
