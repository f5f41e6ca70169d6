"""Read batches by parts: each rank reads its own samples of a batch, and the ranks send their samples to each other.

Every rank reads the first batches of a loader whole. If the script waits for them, one batch is read in both ways.
Later batches are read by parts if both were the same, no random number was drawn, and sending took less time than it
saves. Every rank then makes the batch of all samples, by the loader's own ``collate_fn``.
"""

import copyreg
import io
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import get_worker_info

from ddp_patch.orders.random_states import GlobalState
from ddp_patch.running.alike import asking_alone
from ddp_patch.running.autopatching import unpatched
from ddp_patch.running.lockstep import Lockstep
from ddp_patch.running.trees import PLAIN, leaves_of

_MEASURED = 3  # batches are timed, after the first one of each worker
_LEAST_S = 1e-2  # shorter waits are not worth a trial


@dataclass
class Read:
    """A batch that is read by parts, before and after this rank has read its samples.

    Attributes:
        indices: The indices of the whole batch.
        own: Where the indices of this rank begin and end.
        is_tried: Whether the whole batch is read, too, to compare both.
        sent: The samples of this rank, pickled.
        batch: The whole batch, if it was read.
        why: Why the batch cannot be read by parts.
        before: The state of random numbers before, if this process reads and not a worker.
    """

    indices: list[Any]
    own: tuple[int, int]
    is_tried: bool
    sent: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    batch: Any = None
    why: str = ""
    before: GlobalState | None = None

    @unpatched()  # a module that the dataset calls is called another number of times on each rank
    def read(self, read: Callable[[list[Any]], Any], whole: Callable[[list[Any]], Any], dataset: Any) -> "Read":
        """Read the samples of this rank, in a worker if there are workers.

        Args:
            read: Reads the samples of some indices.
            whole: Reads the batch of some indices.
            dataset: The dataset.
        """
        before, held = GlobalState.capture().copied(), _held(dataset)
        self.before = None if get_worker_info() else before
        if self.is_tried:
            self.batch = whole(self.indices)
            self.why = _why_whole(before, held, dataset)
        if self.why:
            return self  # a dataset that changes shall not change twice
        try:
            with asking_alone():
                samples = read(self.indices[slice(*self.own)])
            self.sent = torch.frombuffer(bytearray(_dumped(samples)), dtype=torch.uint8)
            self.why = _why_whole(before, held, dataset)
            if type(samples) is not list:
                self.why = "its dataset returns no list of samples"
        except Exception as error:  # noqa: BLE001 - reading the whole batch will raise it on every rank
            self.why = f"a sample raises {type(error).__name__}, or cannot be sent"
        return self


def _why_whole(before: GlobalState, held: list[Any], dataset: Any) -> str:
    """Return what reading has changed: then every rank has to read all samples."""
    if GlobalState.capture().values() != before.values():
        return "reading draws random numbers"
    return "" if _held(dataset) == held else "its dataset changes when it is read"


class Reading:
    """Decides how the batches of a loader are read.

    Args:
        lockstep: The exchanges with the other ranks.
        loader: The loader, as errors name it.
        decided: Called with the decision, in words.
    """

    def __init__(self, lockstep: Lockstep, loader: str, decided: Callable[[str], object]) -> None:
        self._lockstep, self._doing, self._decided = lockstep, f"reads a batch of {loader}", decided
        self._way = "whole"  # then "tried", and "by parts"
        self._waits: list[float] = []
        self._wait = 0.0

    def indices(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the indices of each batch, or a ``Read`` where a batch is read by parts."""
        rank, ranks = self._lockstep.rank, self._lockstep.ranks
        for batch in batches:
            if self._way == "whole":
                yield batch
                continue
            is_tried, n = self._way == "tried", len(batch)
            self._way = "whole" if is_tried else self._way  # until it is judged
            yield Read([*batch], (n * rank // ranks, n * (rank + 1) // ranks), is_tried)

    def batch(self, read: Any, waited: float, workers: int, made: Callable[[Any], Any], again: Any) -> Any:
        """Return the batch that the script gets.

        Args:
            read: The batch, or a ``Read``.
            waited: How many seconds the script has waited.
            workers: The number of workers.
            made: Makes a batch of samples.
            again: Reads the batch of some indices in this process.
        """
        if threading.current_thread() is not threading.main_thread():  # where ranks exchange nothing
            self._way, self._waits = "whole", [0.0] * (max(1, workers) + _MEASURED)
            return read if not isinstance(read, Read) else self._whole(read, again)
        if isinstance(read, Read):
            return self._tried(read, made) if read.is_tried else self._by_parts(read, made, again)
        self._waits.append(waited)
        if len(self._waits) == max(1, workers) + _MEASURED:
            last = self._waits[-_MEASURED:]
            # Batches of workers come together. Else the machine may have done something else meanwhile.
            self._wait = self._mean(sum(last) / _MEASURED if workers else min(last))
            self._way = "tried" if self._wait > _LEAST_S else self._way
        return read

    def _mean(self, seconds: float) -> float:
        return float(sum(self._lockstep.gathered(seconds))) / self._lockstep.ranks

    def _tried(self, read: Read, made: Callable[[Any], Any]) -> Any:
        """Decide by a batch that was read in both ways."""
        self._lockstep.meet(self._doing)  # so that nobody waits for another rank to send
        why, began = read.why, time.perf_counter()
        samples = self._of_all(read)
        if samples is None:
            why = why or "another rank cannot send its samples"
        elif not _are_same(made(samples), read.batch):
            why = "its samples are not the same on every rank, or not when they were sent"
        cost = self._mean(time.perf_counter() - began)
        why = self._lockstep.agreed(why)
        saved = self._wait * (1 - 1 / self._lockstep.ranks)
        if not why and cost > saved:
            why = f"sending would take {1e3 * cost:.0f} ms, and save {1e3 * saved:.0f} ms"
        self._way = "whole" if why else "by parts"
        self._decided(f"whole on every rank ({why})" if why else "by parts")
        return read.batch

    def _of_all(self, read: Read) -> list[Any] | None:
        """Return the samples of all ranks; None if a rank has none to send."""
        own = read.sent[:0] if read.why else read.sent
        of_ranks = self._lockstep.gather(self._doing, own) or []
        if not all(map(len, of_ranks)):
            return None
        return [sample for each in of_ranks for sample in pickle.loads(bytes(each.numpy()))]  # noqa: S301 - a rank's

    def _by_parts(self, read: Read, made: Callable[[Any], Any], again: Callable[[list[Any]], Any]) -> Any:
        samples = self._of_all(read)
        return self._whole(read, again) if samples is None else made(samples)

    @staticmethod
    def _whole(read: Read, again: Callable[[list[Any]], Any]) -> Any:
        """Read a batch whole after all, as every rank does."""
        if read.before is not None:
            read.before.install()
        return again(read.indices) if read.batch is None else read.batch


def _unpickled(data: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _reduced(tensor: torch.Tensor) -> Any:
    """Return how to pickle a tensor: by its bytes, in a hundredth of the time that torch takes."""
    if tensor.requires_grad or tensor.is_cuda or tensor.layout != torch.strided:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return _unpickled, (flat.numpy().tobytes(), tensor.dtype, tensor.shape)


def _dumped(value: Any) -> bytes:
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduced}
    pickler.dump(value)
    return file.getvalue()


def _are_same(some: Any, others: Any) -> bool:
    """Return whether two batches are equal."""
    a, b = leaves_of(some), leaves_of(others)
    leaves_are = (type(x) is type(y) and _dumped(x) == _dumped(y) for x, y in zip(a, b, strict=False))
    return type(some) is type(others) and len(a) == len(b) and all(leaves_are)


def _held(dataset: Any) -> list[Any]:
    """Return the plain attributes of a dataset and of those in it, and the lengths of its lists."""
    found: list[Any] = []
    while hasattr(dataset, "__dict__"):
        for value in vars(dataset).values():
            found += [value] if type(value) in PLAIN else [len(value)] if type(value) in {list, dict, set} else []
        dataset = vars(dataset).get("dataset")
    return found
