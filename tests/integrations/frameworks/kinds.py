"""The loaders that every framework is given, and the batches that they yield."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

__all__ = ["KINDS", "Batch", "Kind", "features", "tiny_model"]

BATCH_SIZE = 4


@dataclass(frozen=True)
class Batch:
    """The numbers of a batch's samples, and the types of device that a framework moved it to.

    Frameworks move whatever has a method ``to``.
    """

    numbers: list[int]
    moved_to: tuple[str, ...] = ()

    def to(self, device: Any, **options: Any) -> "Batch":
        """Return the batch, moved."""
        return Batch(self.numbers, (*self.moved_to, torch.device(device).type))


@dataclass(frozen=True)
class Kind:
    """A kind of loader, of which one epoch in one process takes every one of ``n`` samples once.

    Attributes:
        name: What the table calls it.
        n: How many samples the dataset has.
        make: Makes the loader.
        is_whole: Whether a batch's numbers are a batch that the user's batch sampler makes; None where torch batches.
        is_weighted: Whether the numbers of some epochs came in an order that the user's weights make likely; None where
            there are none.
    """

    name: str
    n: int
    make: Callable[[], DataLoader[Any]]
    is_whole: Callable[[list[int]], bool] | None = None
    is_weighted: Callable[[list[list[int]]], bool] | None = None


class Pairs(Sampler[list[int]]):
    """Batches of two even and two odd numbers: P x K batches, with none of what torch's BatchSampler takes."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n // BATCH_SIZE

    def __iter__(self) -> Iterator[list[int]]:
        even, odd = (2 * torch.randperm(self.n // 2) + remainder for remainder in (0, 1))
        for first in range(0, self.n // 2, 2):
            yield [*even[first : first + 2].tolist(), *odd[first : first + 2].tolist()]


class Grouped(BatchSampler):
    """Batches of numbers with the same remainder, as batches of images of one aspect ratio are made."""

    def __iter__(self) -> Iterator[list[int]]:
        groups: dict[int, list[int]] = defaultdict(list)
        for number in self.sampler:
            group = groups[number % 3]
            group.append(number)
            if len(group) == self.batch_size:
                yield group[:]
                group.clear()
        yield from (group for group in groups.values() if group)

    def __len__(self) -> int:
        sampler: Any = self.sampler  # torch's type for samplers has no length
        groups = (len(range(remainder, len(sampler), 3)) for remainder in range(3))
        return sum(-(-group // self.batch_size) for group in groups)


def is_pairs(numbers: list[int]) -> bool:
    """Tell whether a batch is two even and two odd numbers."""
    return len(numbers) == BATCH_SIZE and sum(number % 2 for number in numbers) == 2


def is_grouped(numbers: list[int]) -> bool:
    """Tell whether a batch is of one group."""
    return len({number % 3 for number in numbers}) == 1


def loader(n: int, **options: Any) -> DataLoader[Any]:
    """A loader of the numbers below ``n``."""
    if "batch_sampler" not in options:
        options["batch_size"] = BATCH_SIZE
    return DataLoader(range(n), collate_fn=Batch, **options)  # type: ignore[arg-type]  # a range is a dataset


def weighted() -> DataLoader[Any]:
    """Every number once, the large ones mostly first."""
    weights = [float(number**3) for number in range(1, 30)]
    return loader(29, sampler=WeightedRandomSampler(weights, 29, replacement=False))


def is_weighted(epochs: list[list[int]]) -> bool:
    """Tell whether the large numbers came mostly first; without weights the means of both halves are close."""
    halves = [(numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]) for numbers in epochs]
    return mean(mean(first) - mean(second) for first, second in halves) > 8


def grouped() -> DataLoader[Any]:
    """9 batches of 28 numbers."""
    return loader(28, batch_sampler=Grouped(RandomSampler(range(28)), BATCH_SIZE, drop_last=False))


class Stream(IterableDataset[int]):
    """The numbers below ``n`` in an order of their own for each pass."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n).tolist())


KINDS = [
    Kind("`shuffle=True`", 27, partial(loader, 27, shuffle=True)),
    Kind("`WeightedRandomSampler`", 29, weighted, is_weighted=is_weighted),
    Kind("subclass of `BatchSampler`", 28, grouped, is_grouped),
    Kind("own class of batch sampler", 28, lambda: loader(28, batch_sampler=Pairs(28)), is_pairs),
    Kind("`IterableDataset`", 26, lambda: DataLoader(Stream(26), BATCH_SIZE, collate_fn=Batch)),
]


def tiny_model() -> torch.nn.Linear:
    """The model that is trained."""
    return torch.nn.Linear(1, 1)


def features(batch: Batch) -> torch.Tensor:
    """What the model is given of a batch."""
    return torch.tensor(batch.numbers, dtype=torch.float32).unsqueeze(1)
