"""Loaders of the random programs alone: that say they are sharded, split by worker, or cannot read a sample."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import users
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, Sampler, get_worker_info
from users import SIZE, N

__all__ = [
    "CLAIMS",
    "KEEPING",
    "OF_WORKERS",
    "WRONG_CLAIMS",
    "WRONG_OF_WORKERS",
    "AlikeBatches",
    "CroppedByModule",
    "Unreadable",
    "UnreadableStream",
    "iterated",
]


class CroppedByModule(users.Numbers):
    """Some pictures are cropped, others are not."""

    def __getitem__(self, index: int) -> int:
        for _ in range(index % 3):
            users.MODULES.random()
            users.MODULES_NUMPY.random()
        return index


class AlikeBatches(Sampler[list[int]]):
    """Batches of alike losses."""

    def __init__(self) -> None:
        self.losses = [0.0] * N

    def __len__(self) -> int:
        return N // SIZE

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(N), key=self.losses.__getitem__)
        return (order[start : start + SIZE] for start in range(0, N, SIZE))


class Slices(Sampler[int]):
    """Every so many-th index of an epoch's permutation, which ``set_epoch`` chooses."""

    def __init__(self, rank: int, ranks: int, n: int = N) -> None:
        self.rank, self.world_size, self.n, self.epoch = rank, ranks, n, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(self.rank, self.n, self.world_size))

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[self.rank :: self.world_size])


class Stores(Slices):
    """Stores its rank for a log, and gives every rank all, in one order or in the rank's own."""

    def __init__(self, rank: int, ranks: int, *, is_seeded: bool) -> None:
        super().__init__(rank, ranks)
        self.is_seeded = is_seeded

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch) if self.is_seeded else None
        return iter(torch.randperm(N, generator=generator).tolist())


class Part(Dataset[int]):
    """A rank's part of the data, on purpose."""

    is_ddp_aware: ClassVar[bool] = True

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> int:
        return self.numbers[place]


class Listed(IterableDataset[int]):
    """Reads the numbers that it holds; each worker its part."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = list(numbers)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from self.numbers if info is None else self.numbers[info.id :: info.num_workers]


class PartStream(Listed):
    """A rank's part of a stream, on purpose."""

    is_ddp_aware: ClassVar[bool] = True


class IgnoresItsWorker(Listed):
    """Reads all, whichever worker asks."""

    def __iter__(self) -> Iterator[int]:
        yield from self.numbers


class AsksForItsRank(Listed):
    """Reads what is its rank's."""

    def __iter__(self) -> Iterator[int]:
        yield from self.numbers[dist.get_rank() :: dist.get_world_size()]


class _Fails:
    """A dataset of which one sample cannot be read after so many others, whichever process reads."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.countdown = get_context("forkserver").Value("i", 0)
        self.stops = get_context("forkserver").Value("i", 0)

    def fail_after(self, samples: int, *, stops: bool) -> None:
        """Raise after so many: StopIteration, or an error."""
        self.stops.value, self.countdown.value = int(stops), samples + 1

    def read(self, number: int) -> int:
        """Return it, or raise."""
        if self.countdown.value:
            self.countdown.value -= 1
            if not self.countdown.value:
                raise StopIteration if self.stops.value else OSError(f"cannot read {number}")
        return number


class Unreadable(_Fails, users.Numbers):
    """The numbers."""

    def __getitem__(self, index: int) -> int:
        return self.read(index)


class UnreadablePart(_Fails, Part):
    """A rank's part of the data, on purpose."""

    def __getitem__(self, place: int) -> int:
        return self.read(self.numbers[place])


class UnreadableStream(_Fails, Listed):
    """A stream of numbers."""

    def __iter__(self) -> Iterator[int]:
        yield from map(self.read, super().__iter__())


# Loaders that are sharded already, by how: made from the rank and the number of ranks.
CLAIMS: dict[str, Callable[..., Any]] = {
    "a DistributedSampler": lambda rank, ranks, **how: users.loader(sampler=_torchs(rank, ranks), **how),
    "slices": lambda rank, ranks, **how: users.loader(sampler=Slices(rank, ranks), **how),
    "sharded batches": lambda rank, ranks, **how: users.loader(
        batch_sampler=BatchSampler(_torchs(rank, ranks), SIZE, False), **how
    ),
    "a part on purpose": lambda rank, ranks, **how: users.loader(Part(range(rank, N, ranks)), shuffle=True, **how),
    "an unreadable part": lambda rank, ranks, **how: users.loader(
        UnreadablePart(range(rank, N, ranks)), shuffle=True, **how
    ),
    "a part of a stream": lambda rank, ranks, **how: users.loader(PartStream(range(rank, N, ranks)), **how),
}
WRONG_CLAIMS: dict[str, Callable[..., Any]] = {
    "another seed": lambda rank, ranks, **how: users.loader(sampler=_torchs(rank, ranks, seed=117 + 17 * rank), **how),
    "batches of another seed": lambda rank, ranks, **how: users.loader(
        batch_sampler=BatchSampler(_torchs(rank, ranks, seed=117 + 17 * rank), SIZE, False), **how
    ),
    "unequal slices": lambda rank, ranks, **how: users.loader(sampler=Slices(rank, ranks, N + 1), **how),
    "a stored rank": lambda rank, ranks, **how: users.loader(sampler=Stores(rank, ranks, is_seeded=False), **how),
    "a stored rank, seeded": lambda rank, ranks, **how: users.loader(
        sampler=Stores(rank, ranks, is_seeded=True), **how
    ),
    "all on purpose": lambda rank, ranks, **how: users.loader(Part(range(N)), shuffle=True, **how),
    "parts that overlap": lambda rank, ranks, **how: users.loader(
        Part(range(rank * 3, rank * 3 + N // ranks)), shuffle=True, **how
    ),
    "unequal parts": lambda rank, ranks, **how: users.loader(Part(_fewer(rank, ranks)), **how),
    "all of a stream": lambda rank, ranks, **how: users.loader(PartStream(range(N)), **how),
    "unequal parts of a stream": lambda rank, ranks, **how: users.loader(PartStream(_fewer(rank, ranks)), **how),
}
# Loaders for share="by_worker".
OF_WORKERS: dict[str, Callable[..., Any]] = {
    "by worker": lambda rank, ranks, **how: users.loader(users.Stream(), **how),
    "by worker, listed": lambda rank, ranks, **how: users.loader(Listed(range(N)), **how),
    "by worker, unreadable": lambda rank, ranks, **how: users.loader(UnreadableStream(range(N)), **how),
}
WRONG_OF_WORKERS: dict[str, Callable[..., Any]] = {
    "ignores its worker": lambda rank, ranks, **how: users.loader(IgnoresItsWorker(range(N)), **how),
    "other files": lambda rank, ranks, **how: users.loader(Listed(_turned(range(N), 5 * rank)), **how),
    "split by hand": lambda rank, ranks, **how: users.loader(Listed(range(rank, N, ranks)), **how),
    "split by its rank": lambda rank, ranks, **how: users.loader(AsksForItsRank(range(N)), **how),
}


def _torchs(rank: int, ranks: int, seed: int = 7) -> DistributedSampler[Any]:
    return DistributedSampler(users.Numbers(), ranks, rank, seed=seed)


def _fewer(rank: int, ranks: int) -> range:
    """Return a rank's part, of which rank 0's has a batch less."""
    return range(rank, N, ranks)[: N // ranks - SIZE * (not rank)]


def _turned(numbers: Sequence[int], by: int) -> list[int]:
    return [*numbers[by:], *numbers[:by]]


class _Prefetcher:
    """Takes a loader's batches, as many trainers do, and refers to itself; it may be a batch ahead of the loop."""

    def __init__(self, loader: Iterable[Any], *, is_ahead: bool) -> None:
        self.batches, self.is_ahead = iter(loader), is_ahead
        self.take = self.taken  # a bound method in an attribute: a cycle
        self.ready = [self.take()] if is_ahead else []

    def taken(self) -> Any:
        return next(self.batches, None)

    def __iter__(self) -> Iterator[Any]:
        while True:
            batch = self.ready.pop() if self.ready else self.take()
            if batch is None:
                return
            if self.is_ahead:
                self.ready.append(self.take())
            yield batch


def _in_a_thread(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield a loader's batches, which another thread reads a batch ahead."""
    with ThreadPoolExecutor(1) as pool:
        batches = pool.submit(iter, loader).result()
        ready = pool.submit(next, batches, None)
        while (batch := ready.result()) is not None:
            ready = pool.submit(next, batches, None)
            yield batch


# How a training loop holds the iterator of its pass: by nothing else; in a cycle; a batch ahead; for ever; in a thread.
KEEPING = ("", "cycle", "ahead", "kept", "thread")


def iterated(loader: Iterable[Any], keeping: str, kept: list[Any]) -> Iterable[Any]:
    """Return what a training loop iterates.

    Args:
        loader: The loader.
        keeping: How, one of ``KEEPING``.
        kept: Holds iterators for ever.
    """
    match keeping:
        case "cycle" | "ahead":
            return _Prefetcher(loader, is_ahead=keeping == "ahead")
        case "kept":
            kept.append(running := iter(loader))
            return running
        case "thread":
            return _in_a_thread(loader)
    return loader
