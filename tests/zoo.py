"""The kinds of loader that the contract, and real ranks, are tried on.

A kind's ``make`` builds the loader as a user would, from ambient randomness that the caller has seeded in any way.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

N = 23  # a prime: no world size but 1 divides it


class Indices(Dataset[Any]):
    """Item i is i."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return index


class Drawn(Sampler[int]):
    """Draws N indices with a function of the global random states, one by one or all at once."""

    def __init__(self, draw: Callable[[], int], lazily: bool) -> None:
        self.draw, self.lazily = draw, lazily

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        drawn = (self.draw() for _ in range(N))
        return drawn if self.lazily else iter(list(drawn))


def by_torch() -> int:
    return int(torch.randint(N, ()))


def by_numpy() -> int:
    return int(np.random.randint(N))


def by_numpy_normal() -> int:
    return int(np.random.randn() * 100) % N  # leaves half of a pair of normals behind


def by_python() -> int:
    return random.randrange(N)


def by_all() -> int:
    return (by_torch() + by_numpy() + by_python()) % N


class EpochSeeded(Sampler[int]):
    """Shuffles by a generator of its own, as samplers with ``set_epoch`` do."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(N).tolist())


class PKBatches(Sampler[list[int]]):
    """Batches of 2 labels x 2 instances, drawn from numpy's global generator."""

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(7):
            labels = np.random.choice(5, 2, replace=False)
            yield [int(label + 5 * i) for label in labels for i in np.random.choice(4, 2, replace=False)]


class Reversed(Sampler[list[int]]):
    """A batch sampler that holds another, which holds a sampler: two levels of nesting."""

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler = batch_sampler

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return reversed(list(self.batch_sampler))


def seeded_generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def loader(batch_size: int | None = 4, **options: Any) -> DataLoader[Any]:
    if "batch_sampler" not in options:
        options["batch_size"] = batch_size
    return DataLoader(Indices(), collate_fn=as_it_is, **options)


def as_it_is(batch: Any) -> Any:
    return batch


def drawn(draw: Callable[[], int], lazily: bool) -> Callable[[], DataLoader[Any]]:
    return lambda: loader(sampler=Drawn(draw, lazily))


@dataclass(frozen=True)
class Kind:
    """One kind of loader."""

    name: str
    make: Callable[[], DataLoader[Any]]
    shuffles: bool = True
    batches: bool = False  # whole batches are shared


KINDS = [
    Kind("sequential", loader, shuffles=False),
    Kind("sequential, drop_last", lambda: loader(drop_last=True), shuffles=False),
    Kind("shuffle", lambda: loader(shuffle=True)),
    Kind("shuffle, generator", lambda: loader(shuffle=True, generator=seeded_generator())),
    Kind("random with replacement", lambda: loader(sampler=RandomSampler(Indices(), replacement=True, num_samples=70))),
    Kind("random, num_samples", lambda: loader(sampler=RandomSampler(Indices(), num_samples=N + 6))),
    Kind("subset", lambda: loader(sampler=SubsetRandomSampler(range(3, 20)))),
    Kind("weighted", lambda: loader(sampler=WeightedRandomSampler(range(1, N + 1), num_samples=31))),
    Kind(
        "weighted, sampler's generator",
        lambda: loader(sampler=WeightedRandomSampler(range(1, N + 1), 31, generator=seeded_generator())),
    ),
    Kind("torch, lazily", drawn(by_torch, lazily=True)),
    Kind("torch, at once", drawn(by_torch, lazily=False)),
    Kind("numpy, lazily", drawn(by_numpy, lazily=True)),
    Kind("numpy, at once", drawn(by_numpy, lazily=False)),
    Kind("numpy normals, lazily", drawn(by_numpy_normal, lazily=True)),
    Kind("random, lazily", drawn(by_python, lazily=True)),
    Kind("random, at once", drawn(by_python, lazily=False)),
    Kind("all three, lazily", drawn(by_all, lazily=True)),
    Kind("own set_epoch", lambda: loader(sampler=EpochSeeded())),
    Kind("batch sampler of torch's", lambda: loader(batch_sampler=BatchSampler(RandomSampler(Indices()), 4, False))),
    Kind("P x K batches", lambda: loader(batch_sampler=PKBatches()), batches=True),
    Kind(
        "nested batch samplers",
        lambda: loader(batch_sampler=Reversed(BatchSampler(EpochSeeded(), 4, drop_last=True))),
        batches=True,
    ),
    Kind("no batches", lambda: loader(batch_size=None, sampler=RandomSampler(Indices()))),
    Kind(
        "batches as samples",
        lambda: loader(batch_size=None, sampler=BatchSampler(SequentialSampler(Indices()), 4, False)),
        shuffles=False,
        batches=True,
    ),
]
BY_NAME = {kind.name: kind for kind in KINDS}


def units(kind: Kind, loader: Any) -> list[Any]:
    """One epoch as what was shared: items, or whole batches; after checking that len() told the number of steps."""
    steps = [tuple(batch) if isinstance(batch, list) else batch for batch in loader]
    assert len(loader) == len(steps)
    if kind.batches or loader.batch_sampler is None:
        return steps
    return [item for batch in steps for item in batch]


def seed_ambient(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def draw_ambient(times: int = 1) -> list[tuple[float, float, float]]:
    """Draw as other code of a training script does."""
    return [(float(torch.rand(())), float(np.random.randn()), random.gauss(0, 1)) for _ in range(times)]
