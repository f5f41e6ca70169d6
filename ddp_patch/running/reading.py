"""What a loader reads where ranks share the reading: all of a batch, or the samples of it that are this rank's.

It runs where torch reads: in the main process, or in a worker.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from ddp_patch.compat.private_torch import replace_worker_dataset
from ddp_patch.orders.random_states import GlobalState, generator_states, is_users
from ddp_patch.ranks.packing import packed
from ddp_patch.running.alike import each_for_itself
from ddp_patch.running.trees import tensors_in
from ddp_patch.walks import SCALARS, first_parts, stored, walk

__all__ = ["Part", "Reader", "Request", "Requests", "Trial", "Way", "as_it_is", "begin_worker", "bounds", "own_numbers"]

# What is read of a batch: all of it; all of it, to find out what its parts would be; or a part.
Way: TypeAlias = Literal["whole", "trial", "part"]


class Request(NamedTuple):
    """What to read of one batch.

    Attributes:
        way: All of it, or a part.
        indices: Which samples, as the sampler gave them.
        ranks: Into how many parts it would be divided.
        key: What a part's own random numbers follow from.
    """

    way: Way
    indices: Any
    ranks: int
    key: tuple[int, ...]


class Part(NamedTuple):
    """The samples of a part, as bytes, and whether random numbers were drawn for them."""

    data: torch.Tensor
    drew: bool


class Trial(NamedTuple):
    """A whole batch, and what its parts would be.

    Attributes:
        batch: The batch.
        why: Why it cannot be read by parts; nothing if that was not seen.
        parts: The samples of each rank's part, as bytes.
        drew: Whether random numbers were drawn for the samples.
        numbers: The random states before ``collate_fn``.
        seconds: What it took: to read the samples, to make bytes of them, ``collate_fn``.
    """

    batch: Any
    why: str
    parts: Sequence[torch.Tensor]
    drew: bool
    numbers: GlobalState | None
    seconds: tuple[float, float, float]


def bounds(n: int, ranks: int) -> list[int]:
    """Return where the parts of a batch of n samples begin, and where the last one ends.

    Examples:
        >>> bounds(8, 3)
        [0, 3, 6, 8]
    """
    each, more = divmod(n, ranks)
    return [rank * each + min(rank, more) for rank in range(ranks + 1)]


def as_it_is(data: Any) -> Any:
    """Return what the reader has made of a request: the ``collate_fn`` of the loader that it is read by."""
    return data


def begin_worker(init: Callable[[int], object] | None, worker: int) -> None:
    """Begin a worker as the script's ``worker_init_fn`` does, which is to see the script's dataset."""
    replace_worker_dataset(get_worker_info().dataset.dataset)  # type: ignore[union-attr]  # it is a reader's
    if init is not None:
        init(worker)


class Requests:
    """Stands for a batch sampler, which it iterates as the loader would: makes a request of each batch.

    Args:
        batches: The batch sampler.
        request: Makes the request.

    Attributes:
        asked: What was requested in the latest pass, and not taken yet.
    """

    def __init__(self, batches: Iterable[Any], request: Callable[[Any], Request]) -> None:
        self.asked: deque[Request] = deque()
        self._batches, self._request = batches, request

    def __iter__(self) -> Iterator[Request]:
        self.asked = deque()
        return self._requests(iter(self._batches), self.asked)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # or it raises what that raises

    def _requests(self, batches: Iterator[Any], asked: deque[Request]) -> Iterator[Request]:
        for batch in batches:
            asked.append(self._request(batch))
            yield asked[-1]


class Reader:
    """Stands for a dataset: it is given requests in place of indices.

    Args:
        dataset: The dataset.
        collate: The loader's ``collate_fn``.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self.dataset: Any = dataset
        self._collate = collate

    def __getitems__(self, request: Request) -> Any:
        """Return a whole batch, a trial or a part."""
        if request.way == "whole":
            return self._collate(self._samples(request.indices))
        if request.way == "trial":
            return self._trial(request)
        with own_numbers(request.key) as has_drawn, each_for_itself():
            samples = self._samples(request.indices)
            return Part(_bytes(samples), has_drawn())

    def _samples(self, indices: Any) -> Any:
        """Return samples as torch reads them."""
        together = getattr(self.dataset, "__getitems__", None)
        return together(indices) if together else [self.dataset[index] for index in indices]

    def _trial(self, request: Request) -> Trial:
        at_first, kept = GlobalState.capture().values(), _kept(self.dataset)
        collate_kept, begun = _kept(self._collate), time.perf_counter()
        samples = self._samples(request.indices)
        read = time.perf_counter()
        why = "its dataset keeps count of what is read" if _kept(self.dataset) != kept else ""
        if type(samples) is not list or len(samples) != len(request.indices):
            why = why or "its dataset reads batches"
        elif any(tensor.requires_grad or tensor.device.type != "cpu" for tensor in tensors_in(samples, objects=True)):
            why = why or "its samples have gradients, or are on a device"
        parts = list[torch.Tensor]()
        try:
            at = bounds(0 if why else len(samples), request.ranks)
            parts += [_bytes(samples[begin:end]) for begin, end in pairwise(at)]
        except Exception as error:  # noqa: BLE001 - whatever a sample of the user's raises
            why = f"its samples cannot be sent: {type(error).__name__}: {error}"
        sent, numbers = time.perf_counter(), GlobalState.capture().copied()
        batch = self._collate(samples)
        seconds = read - begun, sent - read, time.perf_counter() - sent
        if _kept(self._collate) != collate_kept:
            why = why or "its collate_fn keeps count"
        if get_worker_info() is not None and GlobalState.capture().values() != numbers.values():
            why = why or "its collate_fn draws random numbers in workers"
        drew = numbers.values() != at_first
        # What a worker has drawn from is no matter in the main process.
        return Trial(batch, why, parts, drew, None if get_worker_info() else numbers, seconds)


def _bytes(samples: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed(samples)), dtype=torch.uint8)


@contextmanager
def own_numbers(key: tuple[int, ...]) -> Iterator[Callable[[], bool]]:
    """Let the global generators draw from a stream of a key while entered; yield what tells whether any was drawn from.

    Args:
        key: What the stream follows from.
    """
    before, own = GlobalState.capture(), GlobalState.seeded(np.random.SeedSequence(key))
    at_first = own.values()
    own.install()
    try:
        yield lambda: GlobalState.capture().values() != at_first
    finally:
        before.install()


def _kept(holder: object) -> list[object]:
    """Return what counts in an object and in what it holds: numbers, strings, sizes of lists, random states.

    A dict that grows is a cache, as it is where something appears that was None: what each rank keeps for itself.
    """

    def parts(each: object) -> list[Any]:
        return [part for value in stored(each).values() for part in first_parts(value) if _may_count(part)]

    found = list[object]()
    for each in walk(getattr(holder, "__self__", holder), parts):
        values = stored(each)
        found += [(name, value) for name, value in values.items() if type(value) in SCALARS and value is not None]
        found += [(name, len(value)) for name, value in values.items() if isinstance(value, list | set | deque)]
        found += generator_states([each])
    return found


def _may_count(value: object) -> bool:
    return (
        type(value) not in SCALARS
        and not isinstance(value, torch.Tensor)
        and (isinstance(value, Dataset) or (is_users(value) and hasattr(value, "__dict__")))
    )
