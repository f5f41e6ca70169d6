"""The order in which ranks read an iterable dataset, compared without waiting: what is found, and what is honest."""

import os
import random
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from messages import assert_tells
from quick import run_ranks, soaked
from told import FOUND, WARNED, Told, in_step
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from zoo import as_it_is, seed_ambient

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.compat.private_torch import default_store

N = 400
BATCHES = 12  # of 16 samples: 256 are noted within eight


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


class Parts(Stream):
    """As one that gives each worker a part of its own."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers, seed = (0, 1, 0) if info is None else (info.id, info.num_workers, info.seed)
        rng = random.Random(seed) if self.order is None else self.order(self.epoch)
        for index in shuffled(range(worker, N, workers), rng):
            yield self.item(index, random.Random())


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


def by_rank(epoch: int) -> random.Random:
    return random.Random(int(os.environ["RANK"]))


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


def cut(index: int, own: random.Random) -> Any:
    """Tells where it was cut."""
    return {"x": torch.full((3,), index + own.random()), "file": f"{index}.jpg", "cut at": own.randrange(32)}


def masked(index: int, own: random.Random) -> Any:
    return {"ids": [index if own.random() < 0.8 else 0 for _ in range(20)], "url": f"https://{index}"}


def by_reader(index: int, own: random.Random) -> Any:
    return {"text": f"line {index}", "rank": int(os.environ["RANK"]), "process": os.getpid(), "at": time.time_ns()}


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


CASES = {
    # Each rank draws an order of its own.
    "whole numbers, unseeded": Case(lambda: Stream(number, unseeded), FOUND),
    "whole numbers, by time": Case(lambda: Stream(number, by_time), FOUND),
    "whole numbers, by process": Case(lambda: Stream(number, by_pid), FOUND),
    "whole numbers, by rank": Case(lambda: Stream(number, by_rank), FOUND),
    "strings, unseeded": Case(lambda: Stream(text, unseeded), FOUND),
    "rows, unseeded": Case(lambda: Stream(row, unseeded), FOUND),
    "rows, unseeded, endless": Case(lambda: Stream(row, unseeded, n=None), FOUND),
    "parts, unseeded": Case(lambda: Parts(row, unseeded), FOUND),
    "few rows, unseeded": Case(lambda: Stream(row, unseeded, n=24), FOUND),
    "names kept, augmented, unseeded": Case(lambda: Stream(noisy_named, unseeded), FOUND),
    "keys kept, augmented, unseeded": Case(lambda: Stream(noisy_keyed, unseeded), FOUND),
    "eight rows, unseeded": Case(lambda: Stream(row, unseeded, n=8), FOUND),
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
    "parts, by epoch": Case(lambda: Parts(row, by_epoch), ""),
    "parts, by worker": Case(lambda: Parts(noisy_named), ""),
    "strings, by epoch": Case(lambda: Stream(text, by_epoch), ""),
    "endless": Case(lambda: Stream(row, by_epoch, n=None), ""),
    "labels kept, augmented": Case(lambda: Stream(noisy_row, by_epoch), ""),
    "names kept, augmented": Case(lambda: Stream(noisy_named, by_epoch), ""),
    "keys kept, augmented": Case(lambda: Stream(noisy_keyed), ""),
    "flipped": Case(lambda: Stream(flipped, by_epoch), ""),
    "flipped pairs": Case(lambda: Stream(flipped_pairs), ""),
    "cut": Case(lambda: Stream(cut, by_epoch), ""),
    "masked": Case(lambda: Stream(masked), ""),
    "by whom": Case(lambda: Stream(by_reader, by_epoch), ""),
    "timed": Case(lambda: Stream(timed), ""),
    "all alike": Case(lambda: Stream(alike, unseeded), ""),
    "two classes": Case(lambda: Stream(classes, by_epoch), ""),
    "objects": Case(lambda: Stream(opaque, unseeded), ""),
    "none": Case(lambda: Stream(row, unseeded, n=0), ""),
    "one": Case(lambda: Stream(row, unseeded, n=1), ""),
    "one, augmented": Case(lambda: Stream(noisy_row, n=1), ""),
}


# Of these there may be too few steps to compare in, so the next epoch's begin tells.
SHORT = {"few rows, unseeded", "eight rows, unseeded", "none", "one", "one, augmented"}


def watched(rank: int, world_size: int) -> dict[tuple[str, int], Told]:
    told = {}
    for name, case in CASES.items():
        # How workers' notes come together is one rank's affair: two ranks show it, and starting workers takes long.
        for workers in (0, 2) if world_size == 2 else (0,):
            seed_ambient(rank)
            given: DataLoader[Any] = DataLoader(case.make(), batch_size=16, collate_fn=as_it_is, num_workers=workers)
            epochs = (BATCHES, 1) if name in SHORT else (BATCHES,)
            told[name, workers] = in_step(patch_dataloader_to_ddp(given), *epochs)._replace(batches=[])
    return told


@pytest.mark.parametrize("world_size", [soaked(2), 3])
def test_only_orders_that_differ_are_found(world_size: int) -> None:
    ranks = run_ranks(watched, world_size, timeout=300)
    wrong = {}
    for case in ranks[0]:
        found = [told[case].found for told in ranks]
        expected = CASES[case[0]].found
        # Of the last comparison in an epoch, the first ranks that make it have nothing to compare with yet.
        is_right = (
            expected in found and set(found) <= {expected, ""} if expected == WARNED else set(found) == {expected}
        )
        if not is_right or any(told[case].warnings > 1 for told in ranks):
            wrong[case] = [told[case] for told in ranks]
    assert not wrong
    message = ranks[0]["whole numbers, by rank", 0].message
    assert_tells(message, ("number", "of part 0 of Stream", "rank 0", "lost"), REMEDY)
    assert "and rank 1" in message or "and rank 2" in message  # whose notes came first
    if world_size == 2:
        message = ranks[1]["rows, unseeded", 2].message
        assert_tells(message, ("of the stream of Stream", "worker 0", "worker 1", "rank 1", "lost"), REMEDY)
    message = next(told["augmented", 0].message for told in ranks if told["augmented", 0].found)
    assert_tells(message, ("of part 0 of Stream", "do not show", "augmentation"), (*REMEDY, WARNED))


REMEDY = ("seed", "same on every rank", "random.Random(epoch)", "set_epoch()")


def loader(dataset: IterableDataset[Any], workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=16, collate_fn=as_it_is, num_workers=workers, **options)


def looks_everywhere(rank: int, workers: int) -> Any:
    train = patch_dataloader_to_ddp(loader(Stream(row, by_epoch), workers))
    next(iter(train))
    return train


def rank_0_looks_and_the_epoch_is_set(rank: int, workers: int) -> Any:
    train: Any = patch_dataloader_to_ddp(loader(Stream(row, by_epoch), workers))
    if rank == 0:
        next(iter(train))
    train.set_epoch(3)
    return train


def resumes(rank: int, workers: int) -> Any:
    train = patch_dataloader_to_ddp(loader(Stream(row, by_epoch), workers))
    state = {}
    for done, _ in zip(range(1, 4), train, strict=False):
        state = loader_state(train, batches_done=done)
    resumed = patch_dataloader_to_ddp(loader(Stream(row, by_epoch), workers))
    restore_loader(resumed, state)
    return resumed


def goes_on(rank: int, workers: int) -> Any:
    """Its workers persist."""
    train = patch_dataloader_to_ddp(loader(Stream(row, by_epoch), workers, persistent_workers=workers > 0))
    for _ in range(2):
        for _ in train:
            pass
    return train


def iterated_twice_at_once(rank: int, workers: int) -> Any:
    train = patch_dataloader_to_ddp(loader(Stream(row, by_epoch), workers))
    for _, (_, _) in zip(range(5), zip(train, train, strict=False), strict=False):
        pass
    train.set_epoch(2)
    return train


def evaluates_more_often_on_rank_0(rank: int, workers: int) -> Any:
    unpatched = loader(Stream(row, by_epoch), workers)
    if rank == 0:
        next(iter(unpatched))
    return patch_dataloader_to_ddp(unpatched)


def splits_itself(rank: int, workers: int) -> Any:
    return patch_dataloader_to_ddp(loader(Parts(row, by_epoch), workers), share="by_worker")


def given_by_hand(rank: int, workers: int) -> Any:
    return patch_dataloader_to_ddp(loader(Stream(row, by_epoch), workers), rank=rank % 2, num_replicas=2)


def two_worlds(rank: int, workers: int) -> Any:
    """Each has an order of its own; that is for four ranks."""
    order = by_epoch if rank < 2 else by_pair
    return patch_dataloader_to_ddp(loader(Stream(row, order), workers), rank=rank % 2, num_replicas=2)


def by_pair(epoch: int) -> random.Random:
    return random.Random(epoch + 1000)


HONEST = (
    looks_everywhere,
    rank_0_looks_and_the_epoch_is_set,
    resumes,
    goes_on,
    iterated_twice_at_once,
    evaluates_more_often_on_rank_0,
    splits_itself,
    given_by_hand,
    two_worlds,
)


def honest(rank: int, world_size: int) -> dict[tuple[str, int], Told]:
    told = {}
    for act in HONEST if world_size == 4 else HONEST[:-1]:
        for workers in (0, 2) if world_size == 2 or act is two_worlds else (0,):
            seed_ambient(rank)
            told[act.__name__, workers] = in_step(act(rank, workers), BATCHES)._replace(batches=[])
    return told


@pytest.mark.parametrize("world_size", [2, soaked(4)])
def test_nobody_is_told_anything_who_reads_in_one_order(world_size: int) -> None:
    wrong = [{case: told for case, told in rank.items() if told.found} for rank in run_ranks(honest, world_size)]
    assert not any(wrong), wrong


def in_other_worlds(rank: int, world_size: int) -> list[str]:
    seed_ambient(rank)
    given = patch_dataloader_to_ddp(loader(Stream(row, by_rank), 0), rank=rank, num_replicas=world_size)
    ambient = patch_dataloader_to_ddp(loader(Stream(row, by_ambient), 0), order="ambient")
    looked_first = patch_dataloader_to_ddp(DataLoader(Stream(row, by_rank), batch_size=2))
    next(iter(looked_first))  # too few items to tell
    return [in_step(train, 8 * BATCHES).found for train in (given, ambient, looked_first)]


def test_orders_are_compared_in_worlds_that_are_given_by_hand_and_after_a_look_at_a_batch() -> None:
    assert run_ranks(in_other_worlds, 2) == [[FOUND] * 3] * 2


def counted(rank: int, world_size: int) -> tuple[int, int, int]:
    """How often and how much a rank leaves in the first pass, and how much is noted and asked for afterwards."""
    train: Any = patch_dataloader_to_ddp(loader(Stream(row, by_epoch, n=4096), 0))
    left: list[int] = []
    calls: list[str] = []

    class Counting:
        def set(self, key: str, value: str) -> None:
            left.append(len(value))
            default_store().set(key, value)

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(default_store(), name)

    guard = train.sampler.monitor._compare_order.__self__
    guard._first_mailbox._open_store = Counting
    in_step(train, 128)
    calls.clear()
    times, size = len(left), sum(left)
    in_step(train, 128)
    return times, size, len(left) - times + len(calls) + len(train.sampler.worker.first_items.marks_of(0, 2).items)


def test_notes_are_left_a_few_times_and_then_nobody_notes_or_asks_more() -> None:
    for times, size, later in run_ranks(counted, 2):
        assert 1 <= times <= 6
        assert size < 16_384  # of 256 items, with what was left before
        assert later == 0
