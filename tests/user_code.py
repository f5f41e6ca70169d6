"""What users write and do after the patch: datasets, samplers and loaders, and what a rank does before an epoch."""

import os
import random
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler, get_worker_info

N, BATCH = 48, 4
MODULES = random.Random(42)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return index


class Cropped(Numbers):
    def __getitem__(self, index: int) -> int:
        MODULES.random()
        return index


class Rows(Dataset[int]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return int(self.rows[index])


class Permuted(Numbers):
    """Files in the order of an attribute that a user shuffles."""

    def __init__(self) -> None:
        self.files, self.order = [f"{number}.png" for number in range(N)], list(range(N))

    def __getitem__(self, index: int) -> int:
        return self.order[index]


class Annotated(Numbers):
    """Lists its files in an object that it holds."""

    def __init__(self, files: list[int]) -> None:
        self.ann = SimpleNamespace(files=[f"{number}.png" for number in files])

    def __getitem__(self, index: int) -> int:
        return int(self.ann.files[index].removesuffix(".png"))


class Lazy(Numbers):
    """Lists its files when it is first asked for one."""

    files: list[str] | None = None

    def __getitem__(self, index: int) -> int:
        if self.files is None:
            self.files = [f"{number}.png" for number in random.sample(range(N), N)]
        return int(self.files[index].removesuffix(".png"))


class Kept(Numbers):
    """Keeps losses, as a training does, and something that names its samples."""

    def __init__(self) -> None:
        self.names, self.losses = [f"{number}.png" for number in range(N)], [0.0] * N


class Permutes(Sampler[int]):
    """Shuffles with what it is given."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        order = list(range(N))
        self.rng.shuffle(order)
        yield from order


class OfModule(Permutes):
    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        yield from MODULES.sample(range(N), N)


class Counting(Permutes):
    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        yield from random.Random(self.passes).sample(range(N), N)


class Entropy(Counting):
    """Draws on the system's entropy from its second pass on."""

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        rng = random.Random(1) if self.passes == 1 else random.SystemRandom()
        yield from rng.sample(range(N), N)


class Iterates(Counting):
    """Is an iterator, which begins anew with each pass."""

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        self.left = (random.Random(1) if self.passes == 1 else random.SystemRandom()).sample(range(N), N)
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()


class Learning(Permutes):
    """The largest losses first."""

    def __init__(self) -> None:
        self.losses = [0.0] * N

    def __iter__(self) -> Iterator[int]:
        yield from sorted(range(N), key=lambda index: -self.losses[index])


class Alike(Learning):
    """Batches of alike losses."""

    def __len__(self) -> int:
        return N // BATCH

    def __iter__(self) -> Any:
        order = sorted(range(N), key=self.losses.__getitem__)
        yield from (order[start : start + BATCH] for start in range(0, N, BATCH))


class Stream(IterableDataset[int]):
    """A stream of numbers; on rank 1 it may skip one, or end early."""

    def __init__(self, n: int = N, skips: int = -1, ends: int = -1) -> None:
        self.n, self.skips, self.ends = n, skips, ends

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for number in range(0 if info is None else info.id, self.n, 1 if info is None else info.num_workers):
            if number == self.ends:
                return
            if number != self.skips:
                yield number


class ShardsItself(IterableDataset[int]):
    """Gives each rank its own numbers, and asks for the rank when it is read."""

    def __init__(self, ask: Callable[[], int]) -> None:
        self.ask = ask

    def __iter__(self) -> Iterator[int]:
        yield from range(self.ask(), N, dist.get_world_size())


def from_torch() -> int:
    return dist.get_rank()


def from_environment() -> int:
    return int(os.getenv("RANK", "0"))


def listed(batch: list[Any]) -> list[Any]:
    return batch


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    if "batch_sampler" not in options:
        options = {"batch_size": BATCH} | options
    return DataLoader(Numbers() if dataset is None else dataset, collate_fn=listed, **options)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def shuffled(rank: int) -> DataLoader[Any]:
    return loader(shuffle=True, generator=generator())


def with_workers(rank: int) -> DataLoader[Any]:
    return loader(shuffle=True, generator=generator(), num_workers=1)


def persistent(rank: int) -> DataLoader[Any]:
    return loader(shuffle=True, generator=generator(), num_workers=1, persistent_workers=True)


def weighted(rank: int) -> DataLoader[Any]:
    return loader(sampler=WeightedRandomSampler([1.0] * N, N, replacement=False, generator=generator()))


def own_random(rank: int) -> DataLoader[Any]:
    return loader(sampler=Permutes(random.Random(3)))


def counting(rank: int) -> DataLoader[Any]:
    return loader(sampler=Counting())


def in_batches(rank: int) -> DataLoader[Any]:
    sampler = Permutes(random.Random(3))
    return loader(batch_sampler=torch.utils.data.BatchSampler(sampler, BATCH, False))


def validates(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    """Rank 0 alone validates with an unpatched loader that has the same generator."""
    if rank == 0:
        list(DataLoader(Numbers(), batch_size=BATCH, generator=raw.generator, num_workers=1))


def lists_sampler(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    if rank == 0:
        list(raw.batch_sampler)


def looks_and_sets(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    if rank == 0:
        next(iter(loader))
    loader.set_epoch(epoch)


def looks_long_and_sets(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    if rank == 1:
        list(islice(loader, 2))
    loader.set_epoch(epoch)


def looks_and_sets_later(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    if rank == 0:
        next(iter(loader))
    loader.set_epoch(2 * epoch + 3)


def looks_unpatched(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    if rank == 0:
        next(iter(raw))


def looks_unpatched_and_sets(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    looks_unpatched(rank, raw, loader, epoch)
    loader.set_epoch(epoch)


def draws(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    for _ in range(rank):
        raw.sampler.rng.random()


def looks(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    if rank == 0:
        next(iter(loader))


def makes_an_iterator(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    if rank == 0:
        iter(loader)


def shuffles_rows(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    rows = raw.dataset.rows
    if isinstance(rows, torch.Tensor):
        raw.dataset.rows = rows[torch.randperm(len(rows))]
    else:
        random.shuffle(rows)


def shuffles_order(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    random.shuffle(raw.dataset.order)


def shuffles_rows_alike(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    random.Random(epoch).shuffle(raw.dataset.rows)


def grows(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    if epoch:
        raw.dataset.rows += range(len(raw.dataset), len(raw.dataset) + 12 * (1 + rank))


def grows_alike(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    if epoch:
        raw.dataset.rows += range(len(raw.dataset), len(raw.dataset) + 12)


def learns(rank: int, raw: Any, loader: Any, batch: list[int]) -> None:
    sampler = raw.batch_sampler if isinstance(raw.batch_sampler, Alike) else raw.sampler
    for index in batch:
        sampler.losses[index] = random.random()


def learns_alike(rank: int, raw: Any, loader: Any, batch: list[int]) -> None:
    """As if all ranks' losses had been gathered."""
    raw.sampler.losses = [float((index * 7 + sum(raw.sampler.losses)) % 11) for index in range(N)]


def weighs(rank: int, raw: Any, loader: Any, batch: list[int]) -> None:
    weights = raw.sampler.weights.clone()
    weights[batch] = torch.rand(len(batch), dtype=torch.double) + 1.0
    raw.sampler.weights = weights


def keeps_losses(rank: int, raw: Any, loader: Any, batch: list[int]) -> None:
    for index in batch:
        raw.dataset.losses[index] = random.random()


def sets_dataset(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    loader.dataset.n = 24


def nothing(rank: int, raw: Any, loader: Any, epoch: int) -> None:
    pass
