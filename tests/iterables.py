"""Iterable datasets as users of torch and torchdata write them, by what they make of the worker that reads them."""

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise, starmap
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

__all__ = [
    "UNEQUAL",
    "AsksLate",
    "Goes",
    "HasState",
    "OwnIterator",
    "OwnIteratorWithState",
    "RunPerWorker",
    "RunWithState",
    "SeededByWorker",
    "ShardPerWorker",
    "Shards",
    "SizedShards",
    "SplitByInit",
    "Standing",
    "init_splits",
    "shards_of",
]

UNEQUAL = (2, 14, 0, 7)  # lengths of shards, which hold 23 items together


def shards_of(lengths: Sequence[int]) -> list[range]:
    """Runs of numbers, one after the other."""
    return list(starmap(range, pairwise(accumulate(lengths, initial=0))))


class ShardPerWorker(IterableDataset[int]):
    """Worker j reads shard j. It takes for granted that a worker reads it."""

    def __init__(self, lengths: Sequence[int] = UNEQUAL) -> None:
        self.shards = shards_of(lengths)

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        return iter(self.shards[info.id])


class Standing(IterableDataset[int]):
    """Goes on by its own state."""

    def __init__(self, n: int) -> None:
        self.n, self.place = n, 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[int]:
        while self.place < self.n:
            self.place += 1
            yield self.place
        self.place = 0


class Shards(IterableDataset[int]):
    """A generator without state: worker j of k reads every k-th shard from the j-th on."""

    def __init__(self, lengths: Sequence[int] = UNEQUAL) -> None:
        self.shards = shards_of(lengths)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from chain.from_iterable(self.shards[info.id :: info.num_workers] if info else self.shards)


class SizedShards(Shards):
    """Shards that know how many items they hold together."""

    def __len__(self) -> int:
        return sum(map(len, self.shards))


class RunPerWorker(IterableDataset[int]):
    """Each worker reads a run of its own length, and a main process reads all of them."""

    def __init__(self, lengths: Sequence[int] = UNEQUAL) -> None:
        self.lengths = tuple(lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(self.run())

    def run(self) -> range:
        worker = 0
        if info := get_worker_info():
            worker = info.id
        else:
            self.lengths = (sum(self.lengths),)  # as torchdata's do, for good
        return shards_of(self.lengths)[worker]


class Goes:
    """An iterator over items that tells where it stands."""

    def __init__(self, items: Sequence[int]) -> None:
        self.items, self.at = items, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class RunWithState(RunPerWorker):
    """Its iterator has the state."""

    def __iter__(self) -> Iterator[int]:
        return Goes(self.run())


class HasState(RunPerWorker):
    """A generator over a run, whose state the dataset has."""

    at = 0
    begins = 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.begins = self.begins, 0
        for item in self.run()[self.at :]:
            self.at += 1
            yield item

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins = state["at"]


class OwnIterator(IterableDataset[int]):
    """It is its own iterator, never asks who reads it, and begins anew at each ``iter()`` or goes on."""

    def __init__(self, n: int = sum(UNEQUAL), begins_anew: bool = True) -> None:
        self.n, self.begins_anew, self.at = n, begins_anew, 0

    def __iter__(self) -> Iterator[int]:
        if self.begins_anew:
            self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return self.at - 1


class OwnIteratorWithState(OwnIterator):
    """It goes on from its state at the next ``iter()``."""

    begins = 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.begins = self.begins, 0
        return self

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begins = state["at"]


class SeededByWorker(Shards):
    """Shards that are shuffled with the seed that torch tells the worker."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        items = list(super().__iter__())
        random.Random(info.seed if info else torch.initial_seed()).shuffle(items)
        yield from items


class SplitByInit(IterableDataset[int]):
    """Its ``worker_init_fn`` splits it, as torch's documentation shows; by itself it never asks who reads it."""

    def __init__(self, lengths: Sequence[int] = UNEQUAL) -> None:
        self.shards = shards_of(lengths)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.shards)


def init_splits(worker: int) -> None:
    """Leave a worker's copy of a dataset every k-th shard."""
    info: Any = get_worker_info()
    assert info.id == worker
    info.dataset.shards = info.dataset.shards[worker :: info.num_workers]


class AsksLate(IterableDataset[int]):
    """It asks who reads it when it has given some items."""

    def __init__(self, late: int) -> None:
        self.late = late

    def __iter__(self) -> Iterator[int]:
        yield from range(self.late)
        info = get_worker_info()
        yield from range(self.late + (info.id if info else 0), 23, info.num_workers if info else 1)
