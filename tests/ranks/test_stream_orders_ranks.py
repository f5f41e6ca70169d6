"""The order in which ranks read an iterable dataset, compared without waiting: what is found, and what is honest."""

import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from messages import assert_tells
from quick import run_ranks
from torch.utils.data import DataLoader, IterableDataset
from zoo import as_it_is, seed_ambient

from ddp_patch import patch_dataloader_to_ddp

N = 400


class Stream(IterableDataset[Any]):
    """Yields items in an order that a generator draws, each then augmented.

    Args:
        n: How many; None for ever.
        order: Makes the generator that shuffles, by the epoch; None to leave them in order.
        item: Makes the i-th item; it may draw from a generator of its own that nobody has seeded.
    """

    def __init__(
        self,
        item: Callable[[int, random.Random], Any],
        order: Callable[[int], random.Random] | None = None,
        n: int | None = N,
    ) -> None:
        self.item, self.order, self.n = item, order, n
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        own = random.Random()
        indices = count() if self.n is None else range(self.n)
        for index in indices if self.order is None else shuffled(indices, self.order(self.epoch)):
            yield self.item(index, own)


def shuffled(indices: Any, rng: random.Random) -> Iterator[int]:
    """As a buffer of 100 does."""
    held: list[int] = []
    for index in indices:
        held.append(index)
        if len(held) > 100:
            yield held.pop(rng.randrange(len(held)))
    rng.shuffle(held)
    yield from held


def unseeded(epoch: int) -> random.Random:
    return random.Random()


def by_time(epoch: int) -> random.Random:
    return random.Random(time.time_ns())


def by_pid(epoch: int) -> random.Random:
    return random.Random(os.getpid())


def by_epoch(epoch: int) -> random.Random:
    return random.Random(epoch)


def by_ambient(epoch: int) -> random.Random:
    return random.Random(int(torch.randint(2**40, ())))


def number(index: int, own: random.Random) -> Any:
    return index


def text(index: int, own: random.Random) -> Any:
    return f"sample {index}"


def row(index: int, own: random.Random) -> Any:
    return {"x": torch.full((3,), float(index)), "label": index % 5}


def noisy_row(index: int, own: random.Random) -> Any:
    return {"x": torch.full((3,), index + own.random()), "label": index % 5}


def noisy_named(index: int, own: random.Random) -> Any:
    return torch.full((3,), index + own.random()), f"{index}.jpg"


def noisy_keyed(index: int, own: random.Random) -> Any:
    return {"__key__": f"{index:06}", "png": np.full(3, index + own.random())}


def noisy(index: int, own: random.Random) -> Any:
    return torch.full((3,), index + own.random())


def flipped(index: int, own: random.Random) -> Any:
    return torch.tensor([index, own.random() < 0.5]), index % 3


def flipped_pairs(index: int, own: random.Random) -> Any:
    """Each comes twice, and is flipped or not each time."""
    return torch.tensor([index % (N // 2), own.random() < 0.5]), index % 7


def timed(index: int, own: random.Random) -> Any:
    return {"text": f"line {index}", "read at": time.time()}


def alike(index: int, own: random.Random) -> Any:
    return torch.zeros(3), 1


def classes(index: int, own: random.Random) -> Any:
    return index % 2


def drawn(index: int, own: random.Random) -> Any:
    """Drawn again and again from a few, as synthetic data are."""
    return torch.tensor(own.randrange(300))


class Opaque:
    def __init__(self, value: float) -> None:
        self.value = value


def opaque(index: int, own: random.Random) -> Any:
    return Opaque(index + own.random())


class Case(NamedTuple):
    """A dataset, and what the ranks find: "" for nothing."""

    make: Callable[[], IterableDataset[Any]]
    found: str


FOUND = "RankMismatchError"
WARNED = "StreamOrderWarning"

CASES = {
    # Each rank draws an order of its own.
    "whole numbers, unseeded": Case(lambda: Stream(number, unseeded), FOUND),
    "whole numbers, by time": Case(lambda: Stream(number, by_time), FOUND),
    "whole numbers, by process": Case(lambda: Stream(number, by_pid), FOUND),
    "strings, unseeded": Case(lambda: Stream(text, unseeded), FOUND),
    "rows, unseeded": Case(lambda: Stream(row, unseeded), FOUND),
    "rows, unseeded, endless": Case(lambda: Stream(row, unseeded, n=None), FOUND),
    "few rows, unseeded": Case(lambda: Stream(row, unseeded, n=24), FOUND),
    "names kept, augmented, unseeded": Case(lambda: Stream(noisy_named, unseeded), FOUND),
    "keys kept, augmented, unseeded": Case(lambda: Stream(noisy_keyed, unseeded), FOUND),
    # It may be so.
    "labels kept, augmented, unseeded": Case(lambda: Stream(noisy_row, unseeded), WARNED),
    "augmented, unseeded": Case(lambda: Stream(noisy, unseeded), WARNED),
    "classes, unseeded": Case(lambda: Stream(classes, unseeded), WARNED),
    # It is not so, and cannot be told.
    "augmented": Case(lambda: Stream(noisy), WARNED),
    "drawn from a few": Case(lambda: Stream(drawn), WARNED),
    # All ranks draw the same order.
    "in order": Case(lambda: Stream(row), ""),
    "by epoch": Case(lambda: Stream(row, by_epoch), ""),
    "by the global generators": Case(lambda: Stream(row, by_ambient), ""),
    "strings, by epoch": Case(lambda: Stream(text, by_epoch), ""),
    "endless": Case(lambda: Stream(row, by_epoch, n=None), ""),
    "labels kept, augmented": Case(lambda: Stream(noisy_row, by_epoch), ""),
    "names kept, augmented": Case(lambda: Stream(noisy_named, by_epoch), ""),
    "keys kept, augmented": Case(lambda: Stream(noisy_keyed), ""),
    "flipped": Case(lambda: Stream(flipped, by_epoch), ""),
    "flipped pairs": Case(lambda: Stream(flipped_pairs), ""),
    "timed": Case(lambda: Stream(timed), ""),
    "all alike": Case(lambda: Stream(alike, unseeded), ""),
    "two classes": Case(lambda: Stream(classes, by_epoch), ""),
    "objects": Case(lambda: Stream(opaque, unseeded), ""),
    "none": Case(lambda: Stream(row, unseeded, n=0), ""),
    "one": Case(lambda: Stream(row, unseeded, n=1), ""),
    "one, augmented": Case(lambda: Stream(noisy_row, n=1), ""),
}


class Told(NamedTuple):
    """What a rank was told in two epochs in step with the others, and after how many steps."""

    found: str
    message: str
    steps: int


def in_step(train: Any) -> Told:
    steps = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            batches, error = iter(train), None
            for _ in range(56):
                try:
                    steps += error is None and next(batches, None) is not None
                except Exception as raised:  # what a worker raises too
                    error = raised
                dist.barrier()
            if error is not None:
                return Told(type(error).__name__, str(error), steps)
    told = [(one.category.__name__, str(one.message)) for one in caught if "worker process" not in str(one.message)]
    return Told(*(told[0] if told else ("", "")), len(told))


def watched(rank: int, world_size: int) -> dict[tuple[str, int], Told]:
    told = {}
    for name, case in CASES.items():
        for workers in (0, 2):
            seed_ambient(rank)
            given: DataLoader[Any] = DataLoader(case.make(), batch_size=4, collate_fn=as_it_is, num_workers=workers)
            told[name, workers] = in_step(patch_dataloader_to_ddp(given))
    return told


@pytest.mark.parametrize("world_size", [2, 3])
def test_only_orders_that_differ_are_found(world_size: int) -> None:
    ranks = run_ranks(watched, world_size, timeout=300)
    wrong = {
        (case, rank): told[case]
        for rank, told in enumerate(ranks)
        for case in told
        if told[case].found != CASES[case[0]].found
    }
    assert not wrong
