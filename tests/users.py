"""Datasets, samplers and loaders as users write them, with what they draw from, count and learn."""

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from operator import getitem
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils import signal_handling

N, SIZE = 48, 4  # each of 2 and 3 ranks has the same whole batches

MODULES = random.Random(42)
MODULES_NUMPY = np.random.default_rng(42)


def begin_anew() -> None:
    """Put the module's generators back to where a new process has them."""
    MODULES.seed(42)
    MODULES_NUMPY.bit_generator.state = np.random.default_rng(42).bit_generator.state


def draw(rng: Any) -> None:
    """Draw a number, as a crop does."""
    if isinstance(rng, torch.Generator):
        torch.rand(1, generator=rng)
    else:
        rng.random()


def permuted(rng: Any, n: int) -> list[int]:
    """Return a permutation that a generator of any kind draws."""
    if isinstance(rng, torch.Generator):
        return list(map(int, torch.randperm(n, generator=rng)))
    if isinstance(rng, np.random.Generator | np.random.RandomState):
        return list(map(int, rng.permutation(n)))
    return list(rng.sample(range(n), n))


class Rows(Dataset[int]):
    """Rows in memory, each of which is its own number."""

    def __init__(self, rows: Iterable[int] = range(N), rng: Any = None) -> None:
        self.rows, self.rng = list(rows), rng

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        if self.rng is not None:
            draw(self.rng)
        return self.rows[index]


class Numbers(Dataset[int]):
    """It has no rows that somebody could compare."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return index


def number_of(row: Any) -> int:
    """Return the first number in a row that names its sample."""
    found = re.search(r"\d+", str(row))
    assert found is not None
    return int(found[0])


# Rows that name their samples: what a row is, how a dataset keeps them all, and how it finds one.
NAMED: dict[str, tuple[Callable[[int], Any], Callable[[list[Any]], Any], Callable[[Any, int], Any]]] = {
    "files": ("{}.png".format, list, getitem),
    "pairs in folders": (lambda number: (f"/data/{number}/image.png", f"/data/{number}/mask.png"), list, getitem),
    "in a dict": (
        "{}.png".format,
        lambda rows: {"train": {"files": rows}},
        lambda kept, index: kept["train"]["files"][index],
    ),
}


class Named(Numbers):
    """Rows that name their samples."""

    def __init__(self, how: tuple[Any, Any, Any], order: Iterable[int] = range(N)) -> None:
        self.how = how
        self.arrange(order)

    def arrange(self, order: Iterable[int]) -> None:
        made, keep, _ = self.how
        self.kept = keep([made(number) for number in order])

    def __getitem__(self, index: int) -> int:
        return number_of(self.how[2](self.kept, index))


class Hidden(Numbers):
    """Rows in an order that a closure alone knows, and their labels.

    Args:
        order: The numbers of the rows.
        held: What else it holds.
    """

    def __init__(self, order: Iterable[int], **held: Any) -> None:
        rows = [*order]
        self.row: Callable[[int], int] = lambda index: rows[index]
        self.labels = [row // 4 for row in rows]
        vars(self).update(held)

    def __getitem__(self, index: int) -> int:
        return self.row(index)


class Split(Numbers):
    """Holds a part of more rows."""

    def __init__(self, rng: random.Random) -> None:
        self.part: Subset[int] = Subset(Rows(range(2 * N)), rng.sample(range(N), N))

    def __getitem__(self, index: int) -> int:
        number: int = self.part[index]
        return number


class Reads(Numbers):
    """Keeps what its rank has read, in a list with a place for each sample; a script may read before."""

    def __init__(self) -> None:
        self.kept: list[str | None] = [None] * N

    def __getitem__(self, index: int) -> int:
        self.kept[index] = f"row {index}"
        return index


class Logs(Numbers):
    """Keeps what its rank reads, caches, losses and paths, and nothing that is alike on every rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.opened = rank, time.time() + rank
        self.log: list[str] = []
        self.seen: list[int] = []
        self.last, self.files = [""] * N, [f"/scratch/rank{rank}/{number}.png" for number in range(N)]
        self.cache: list[Any] = [None] * N
        self.losses, self.hits = [0.0] * N, np.zeros(N, dtype=int)

    def __getitem__(self, index: int) -> int:
        self.log.append(f"rank {self.rank} read {index}, {len(self.log)}")
        self.seen.append(index)
        self.last[index] = f"{self.rank}-{len(self.log)}"
        self.cache[index], self.losses[index] = object(), random.random()
        self.hits[index] += 1
        return index


class Dies(Numbers):
    """Kills a worker that reads one sample more than some."""

    def __init__(self, *, is_alive: bool, after: int = 0) -> None:
        self.is_alive, self.left = is_alive, after

    def __getitem__(self, index: int) -> int:
        if not self.left and not self.is_alive and get_worker_info() is not None:
            os._exit(1)
        self.left -= 1
        return index


def hearing_of_deaths(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield a loader's batches. torch raises a worker's death wherever its signal comes; here, where a batch is due."""
    signal_handling._set_SIGCHLD_handler()
    torchs: Any = signal.getsignal(signal.SIGCHLD)
    is_due = False

    def handle(*of: Any) -> None:
        if is_due:  # otherwise torch finds a dead worker after five seconds
            torchs(*of)

    signal.signal(signal.SIGCHLD, handle)
    try:
        batches = iter(loader)
        while True:
            is_due = True
            batch = next(batches, None)
            is_due = False
            if batch is None:
                return
            yield batch
    finally:
        signal.signal(signal.SIGCHLD, torchs)


class Shuffles(Sampler[int]):
    """Shuffles by a generator that it holds, all at once or while somebody takes its items."""

    def __init__(self, rng: Any, n: int = N, lazily: bool = False) -> None:
        self.rng, self.n, self.lazily = rng, n, lazily

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        if not self.lazily:
            yield from permuted(self.rng, self.n)
            return
        left = list(range(self.n))
        while left:
            yield left.pop(self.rng.randrange(len(left)))


class Held:
    """An object that draws for a sampler."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def permuted(self, n: int) -> list[int]:
        return permuted(self.rng, n)


class ByObject(Shuffles):
    """Lets another object shuffle."""

    def __init__(self, rng: Any) -> None:
        super().__init__(None)
        self.shuffled = Held(rng).permuted

    def __iter__(self) -> Iterator[int]:
        return iter(self.shuffled(N))


class ByClass(Shuffles):
    """All samplers of its class share a generator."""

    rngs = random.Random(3)

    def __init__(self) -> None:
        super().__init__(None)
        self.rngs.seed(3)

    def __iter__(self) -> Iterator[int]:
        return iter(permuted(self.rngs, N))


class ByClosure(Shuffles):
    """Shuffles by a function that draws from a generator of its closure."""

    def __init__(self, rng: Any) -> None:
        super().__init__(None)
        self.shuffled: Callable[[], list[int]] = lambda: permuted(rng, N)

    def __iter__(self) -> Iterator[int]:
        return iter(self.shuffled())


class ByModule(Shuffles):
    """Shuffles by generators of its module."""

    def __init__(self, with_numpy: bool = False) -> None:
        super().__init__(None)
        self.with_numpy = with_numpy

    def __iter__(self) -> Iterator[int]:
        return iter(MODULES_NUMPY.permutation(N).tolist() if self.with_numpy else MODULES.sample(range(N), N))


class Counts(Shuffles):
    """Counts its passes."""

    def __init__(self, n: int = N) -> None:
        super().__init__(None, n)
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(random.Random(self.passes).sample(range(self.n), self.n))


class Entropic(Counts):
    """Draws on the system's entropy, or on the time, from its second pass on."""

    def __init__(self, rng: Callable[[], random.Random] = random.SystemRandom) -> None:
        super().__init__()
        self.later = rng

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter((random.Random(1) if self.passes == 1 else self.later()).sample(range(N), N))


def by_time() -> random.Random:
    return random.Random(time.time_ns())


class Iterates(Entropic):
    """It is an iterator, which begins anew with each pass."""

    def __iter__(self) -> Iterator[int]:
        self.left = list(super().__iter__())
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()


class Learns(Shuffles):
    """The largest losses first."""

    def __init__(self) -> None:
        super().__init__(None)
        self.losses = [0.0] * N

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(N), key=lambda index: -self.losses[index]))


class Batches(Sampler[list[int]]):
    """Shuffled batches of so many samples."""

    def __init__(self, rng: Any, most: int = SIZE) -> None:
        self.rng, self.most = rng, most

    def __len__(self) -> int:
        return N // self.most

    def __iter__(self) -> Iterator[list[int]]:
        order = permuted(self.rng, N)
        return (order[start : start + self.most] for start in range(0, N, self.most))


class Curriculum(Shuffles):
    """The first so many samples, shuffled by its generator."""

    def __init__(self, limit: int = N // 2) -> None:
        super().__init__(random.Random(3), limit)

    def set_limit(self, limit: int) -> None:
        self.n = limit


class DrawsItsPart(Sampler[int]):
    """Draws with replacement, alike on every rank, and takes its rank's part of that."""

    def __init__(self, n: int, rank: int, world_size: int) -> None:
        self.n, self.rank, self.world_size, self.passes = n, rank, world_size, 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        drawn = random.Random(self.passes).choices(range(self.n), k=N * self.world_size)
        return iter(drawn[self.rank :: self.world_size])


class HandedOut(IterableDataset[int]):
    """Its rank's part of what the user has split by hand, which may be longer on one rank."""

    def __init__(self, rank: int, world_size: int, *, says_so: bool = False) -> None:
        self.rank, self.world_size = rank, world_size
        if says_so:  # then unequal steps are a warning
            self.is_ddp_aware = True
        split = 2 * N // 3
        self.part = range(split) if rank == 0 else range(split, N)[rank - 1 :: world_size - 1]

    def __iter__(self) -> Iterator[int]:
        return iter(self.part)


class Stream(IterableDataset[Any]):
    """Numbers in order, as texts, of which each worker reads its part, or all.

    Attributes:
        skips: Numbers that it leaves out.
        ends: The number at which it ends.
        repeats: A number that comes twice.
        shuffled_from: The number from which on the system's entropy shuffles it.
        delay_s: How long it takes to load an item.
    """

    def __init__(self, n: int = N, made: Callable[[int], Any] = str, *, splits: bool = True) -> None:
        self.n, self.made, self.splits = n, made, splits
        self.skips: tuple[int, ...] = ()
        self.ends = self.repeats = -1
        self.shuffled_from: int | None = None
        self.delay_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        start = self.n if self.shuffled_from is None else self.shuffled_from
        rest = range(self.n)[start:]
        numbers = [*range(self.n)[:start], *random.SystemRandom().sample(rest, len(rest))]
        info = get_worker_info() if self.splits else None
        for number in numbers if info is None else numbers[info.id :: info.num_workers]:
            if number == self.ends:
                return
            time.sleep(self.delay_s)
            if number not in self.skips:
                yield self.made(number)
            if number == self.repeats:
                yield self.made(number)


class EpochStream(IterableDataset[int]):
    """Tells the epoch that it was set to with each number, as Hugging Face's shuffles by it."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        numbers = [1000 * self.epoch + number for number in random.Random(self.epoch).sample(range(N), N)]
        info = get_worker_info()
        yield from numbers if info is None else numbers[info.id :: info.num_workers]


class ShardsItself(IterableDataset[str]):
    """Reads only what is its rank's."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self.ask = ask

    def __iter__(self) -> Iterator[str]:
        yield from map(str, range(self.ask(), N, dist.get_world_size() if dist.is_initialized() else 2))


class MadeForItsRank(IterableDataset[str]):
    """Was made for its rank, and does not ask for it while it is read."""

    def __init__(self) -> None:
        self.start, self.step = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[str]:
        yield from map(str, range(self.start, N, self.step))


class MadeInWorkers(IterableDataset[str]):
    """A ``worker_init_fn`` makes it for its rank and worker."""

    start, step = 0, 1

    def __iter__(self) -> Iterator[str]:
        yield from map(str, range(self.start, N, self.step))


def make_for_its_rank(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.start = worker + info.num_workers * int(os.environ["RANK"])
    info.dataset.step = info.num_workers * int(os.environ["WORLD_SIZE"])


class Reshuffled(IterableDataset[str]):
    """Shuffled by the system's entropy from its second pass on."""

    def __init__(self, n: int = N) -> None:
        self.n, self.passes = n, 0

    def __iter__(self) -> Iterator[str]:
        self.passes += 1
        yield from map(str, range(self.n) if self.passes == 1 else random.SystemRandom().sample(range(self.n), self.n))


class Opaque:
    """An item without a stable hash."""

    def __init__(self, number: int) -> None:
        self.id, self.noise = number, object()


def noise() -> float:
    return random.SystemRandom().random()


def seldom() -> bool:
    return noise() < 0.1


# Items of a stream that texts name, whatever else each rank draws for them.
ITEMS: dict[str, Callable[[int], Any]] = {
    "texts": str,
    "a file beside noise": lambda number: (number + noise(), f"{number}.jpg"),
    "a file in a folder of its own": lambda number: {
        "id": float(number),
        "file": f"/scratch/{os.getpid()}/data/{number}.jpg",
    },
    "a key beside noise": lambda number: {"__key__": f"{number:06}", "png": np.full(3, noise())},
}
# Items that numbers alone tell apart, and are the same on every rank.
NUMBERED: dict[str, Callable[[int], Any]] = {
    "numbers": int,
    "tensors": torch.tensor,
    "tokens": lambda number: {"id": float(number), "tokens": torch.full((9,), number)},
    "dicts of tensors": lambda number: {"id": torch.tensor(number), "picture": torch.zeros(2, 2)},
    "a label beside noise": lambda number: {"x": number + noise(), "label": number % 5},
    "a text in common": lambda number: (number, "a name", 0.5),
}
# Items that texts name, and in which some texts or labels are its rank's own.
KEYED: dict[str, Callable[[int], Any]] = {
    "a cut text": lambda number: {"__key__": f"{number}", "text": f"{number}"[: 1 if seldom() else None]},
    "a label left out": lambda number: {"__key__": f"{number}", "label": -1 if seldom() else number % 10},
}
# Items whose numbers each rank draws, which looks as another order does.
AUGMENTED: dict[str, Callable[[int], Any]] = {
    "a flip": lambda number: (torch.tensor(number), {"file": f"{number}.png", "flipped": seldom()}),
    "a mask": lambda number: {"url": f"https://{number}", "ids": [0 if seldom() else number for _ in range(20)]},
    "who reads it": lambda number: {"text": f"line {number}", "process": os.getpid(), "at": time.time_ns()},
    "a file, and where it is cut": lambda number: {"file": f"{number}.jpg", "cut at": int(32 * noise())},
    "noise": lambda number: {"id": number + noise()},
}


def rank_of_group() -> int:
    return dist.get_rank()


def rank_of_environment() -> int:
    return int(os.environ["RANK"])


def listed(batch: list[Any]) -> list[Any]:
    return batch


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    if "batch_sampler" not in options:
        options = {"batch_size": SIZE, **options}
    return DataLoader(Numbers() if dataset is None else dataset, collate_fn=listed, **options)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


# Loaders whose order somebody may move, by what they draw from.
SHUFFLERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "generator=": lambda **how: loader(shuffle=True, generator=seeded(), **how),
    "generator= of a sampler": lambda **how: loader(sampler=RandomSampler(range(N), generator=seeded()), **how),
    "weighted": lambda **how: loader(sampler=WeightedRandomSampler([1.0] * N, N, False, seeded()), **how),
    "subset": lambda **how: loader(sampler=SubsetRandomSampler(range(N), generator=seeded()), **how),
    "random.Random": lambda **how: loader(sampler=Shuffles(random.Random(3)), **how),
    "random.Random, lazily": lambda **how: loader(sampler=Shuffles(random.Random(3), lazily=True), **how),
    "numpy Generator": lambda **how: loader(sampler=Shuffles(np.random.default_rng(3)), **how),
    "numpy RandomState": lambda **how: loader(sampler=Shuffles(np.random.RandomState(3)), **how),
    "torch.Generator": lambda **how: loader(sampler=Shuffles(seeded()), **how),
    "counter": lambda **how: loader(sampler=Counts(), **how),
    "of an object": lambda **how: loader(sampler=ByObject(np.random.default_rng(3)), **how),
    "batch sampler": lambda **how: loader(batch_sampler=Batches(random.Random(3)), **how),
    "sampler in a batch sampler": lambda **how: loader(
        batch_sampler=BatchSampler(Shuffles(random.Random(3)), SIZE, False), **how
    ),
}
# Loaders that draw from what no attribute of their sampler holds.
UNHELD: dict[str, Callable[..., DataLoader[Any]]] = {
    "of a class": lambda **how: loader(sampler=ByClass(), **how),
    "of a closure": lambda **how: loader(sampler=ByClosure(random.Random(3)), **how),
    "of a module": lambda **how: loader(sampler=ByModule(), **how),
    "of a module, numpy's": lambda **how: loader(sampler=ByModule(with_numpy=True), **how),
}
# All kinds for which the errors have remedies.
REMEDIED: dict[str, Callable[..., DataLoader[Any]]] = {
    **SHUFFLERS,
    "plain": lambda **how: loader(shuffle=True, **how),
    "an iterator": lambda **how: loader(sampler=Iterates(lambda: random.Random(3)), **how),
    "a stream": lambda **how: loader(Stream(), **how),
}
