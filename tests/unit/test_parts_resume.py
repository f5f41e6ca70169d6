"""Iterable datasets that are stopped and go on: parts, one stream, by their own state or read again."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, product
from typing import Any

import pytest
import torch
from iterables import OwnIteratorWithState
from messages import raises
from quick import in_turn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from zoo import as_it_is, seed_ambient

from ddp_patch import loader_state, patch_dataloader_to_ddp, restore_loader
from ddp_patch.errors import StateError
from ddp_patch.sharding.values_as_text import as_text, from_text

# This machine may have fewer cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZES = (9, 14, 0, 4, 1)
SHARDS = [[100 * shard + item for item in range(size)] for shard, size in enumerate(SIZES)]
ITEMS = Counter(chain.from_iterable(SHARDS))


class Shards(IterableDataset[int]):
    """Every worker takes its shards: parts of unequal lengths.

    Attributes:
        read: How many items were read, in memory that the workers share.
    """

    def __init__(self, splits: bool = True) -> None:
        self.splits = splits
        self.read = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # torch's

    def items(self) -> list[int]:
        info = get_worker_info() if self.splits else None
        return list(chain.from_iterable(SHARDS[info.id :: info.num_workers] if info else SHARDS))

    def __iter__(self) -> Iterator[int]:
        for item in self.items():
            self.read += 1
            yield item


class Stateful(Shards):
    """Goes on by its own state, and begins anew after its end."""

    place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[int]:
        items = self.items()
        while self.place < len(items):
            self.place += 1
            self.read += 1
            yield items[self.place - 1]
        self.place = 0


class Short(Stateful):
    """The first part ends within a round, though the batch is full by padding, long before the other one."""

    def items(self) -> list[int]:
        info = get_worker_info()
        return list(range(5)) if info is None or info.id == 0 else list(range(100, 120))


class Deaf(OwnIteratorWithState):
    """Takes no state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Job:
    """Ranks that all make a loader of their own, and step together."""

    make: Callable[[], IterableDataset[Any]]
    ranks: int = 2
    workers: int = 2
    batch_size: int | None = 3
    uneven: Any = "pad"

    def start(self, state: Any = None, datasets: Sequence[IterableDataset[Any]] | None = None) -> list[Any]:
        loaders = []
        for rank in range(self.ranks):
            seed_ambient(rank)
            loader: DataLoader[Any] = DataLoader(
                self.make() if datasets is None else datasets[rank],
                self.batch_size,
                num_workers=self.workers,
                collate_fn=as_it_is,
            )
            patched = patch_dataloader_to_ddp(loader, rank=rank, num_replicas=self.ranks, uneven=self.uneven, seed=5)
            if state is not None:
                restore_loader(patched, state)
            loaders.append(patched)
        return loaders

    def passes(self, loaders: list[Any], count: int) -> list[list[list[Any]]]:
        return [[list(loader) for loader in loaders] for _ in range(count)]


def step(loaders: list[Any], batches: int) -> tuple[list[list[Any]], Any]:
    """Take so many batches on every rank; return them and the state, which is the same on every rank."""
    taken, states = [], []
    for loader in loaders:
        iterator = iter(loader)
        taken.append(list(islice(iterator, batches)))
        states.append(json.loads(json.dumps(loader_state(loader, batches_done=batches))))
        del iterator
    assert all(state == states[0] for state in states)
    return taken, states[0]


MAKES: dict[str, Callable[[], IterableDataset[Any]]] = {
    "parts": Shards,
    "one stream": partial(Shards, splits=False),
    "stateful parts": Stateful,
    "stateful stream": partial(Stateful, splits=False),
}


@pytest.mark.parametrize(
    ("name", "workers", "uneven"),
    [
        *product(MAKES, (0,), ("pad", "drop")),
        *in_turn([("parts", 2), ("one stream", 2), ("stateful stream", 2), ("stateful parts", 2)], ("pad", "drop")),
        *product(("parts", "stateful stream"), (3,), ("pad",)),
    ],
)
def test_other_numbers_of_ranks_take_what_is_left(name: str, workers: int, uneven: Any) -> None:
    make: Any = MAKES[name]
    state, taken = None, []
    for ranks, count in [(2, 1), (3, 1), (1, 2), (2, 1)]:
        got, state = step(Job(make, ranks, workers, 2, uneven=uneven).start(state), count)
        taken.append(got)
    rest = Job(make, 2, workers, 2, uneven=uneven).passes(Job(make, 2, workers, 2, uneven=uneven).start(state), 1)
    found = Counter(item for each in (*taken, *rest) for batches in each for batch in batches for item in batch)
    if uneven == "pad":
        assert not ITEMS - found
        assert (found - ITEMS).total() <= max(1, workers)
    else:
        assert not found - ITEMS
        assert (ITEMS - found).total() <= max(1, workers)


def test_a_part_that_has_ended_is_not_begun_anew_where_the_dataset_would() -> None:
    job = Job(Short)
    whole = job.passes(job.start(), 1)[0]
    _, state = step(job.start(), 3)
    assert job.passes(job.start(state), 1)[0] == [rank[3:] for rank in whole]


def test_a_dataset_that_never_asks_goes_on_with_any_number_of_workers() -> None:
    for make in (MAKES["one stream"], MAKES["stateful stream"]):
        whole = Job(make, workers=0).passes(Job(make, workers=0).start(), 1)[0]
        state = None
        for done, workers in enumerate((0, 1, 2, 3, 0)):
            taken, state = step(Job(make, workers=workers).start(state), 1)
            assert taken == [rank[done : done + 1] for rank in whole]


@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 2), (2, 0), (2, 1)])
def test_parts_of_other_workers_are_refused_and_both_numbers_named(before: int, now: int) -> None:
    _, state = step(Job(Shards, workers=before).start(), 1)
    (loader, *_) = Job(Shards, workers=now).start()
    with raises(StateError, ("Shards", f"{before} workers", f"num_workers={now}"), f"num_workers={before}"):
        restore_loader(loader, state)
    assert list(loader) == list(Job(Shards, workers=now).start()[0])  # it is as it was


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Stateful, partial(Stateful, splits=False)])
def test_what_says_where_it_stands_is_not_read_again(make: Any, workers: int) -> None:
    job = Job(make, workers=workers, batch_size=2)
    _, state = step(job.start(), 3)
    datasets = [make() for _ in range(2)]
    loaders = job.start(state, datasets)
    rest = job.passes(loaders, 1)[0]
    readers = max(1, workers)
    for dataset, batches in zip(datasets, rest, strict=True):
        given = 2 * sum(map(len, batches))  # by both ranks
        looked_at = 8 * readers  # at most: for padding, and to know the stream again
        copies = readers if not getattr(dataset, "splits", True) else 1
        assert int(dataset.read) <= (given + looked_at) * copies
    again = [make() for _ in range(2)]
    states = from_text(state["states"])
    states["streams"] = [[first, [], initial_state] for first, _, initial_state in states["streams"]]
    state["states"] = as_text(states)
    assert job.passes(job.start(state, again), 1)[0] == rest


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_does_not_take_its_state_is_refused(workers: int) -> None:
    job = Job(Deaf, workers=workers)
    _, state = step(job.start(), 2)
    with raises(StateError, ("Deaf", "state_dict()"), "methods"):
        list(job.start(state)[0])


class Other(Shards):
    def items(self) -> list[int]:
        return [item + 1 for item in super().items()]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_begins_with_other_items_is_refused(workers: int) -> None:
    _, state = step(Job(Shards, workers=workers).start(), 2)
    Other.__name__ = Other.__qualname__ = "Shards"
    with raises(StateError, ("Shards", "items differ"), "same samples"):
        list(Job(Other, workers=workers).start(state)[0])


class Pictures(IterableDataset[dict[str, Any]]):
    """Files of a folder, augmented: no seed."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[dict[str, Any]]:
        chance = random.Random()
        for number in range(20):
            yield {"file": f"{self.folder}/{number % 2}/{number}.png", "x": chance.random()}


@pytest.mark.parametrize("workers", [0, 2])
def test_files_may_lie_elsewhere_after_a_restart(workers: int) -> None:
    def made(folder: str) -> Any:
        given = DataLoader(Pictures(folder), 2, num_workers=workers, collate_fn=as_it_is)
        return patch_dataloader_to_ddp(given, rank=1, num_replicas=2)

    before, after = made("/scratch/job-1"), made("/scratch/job-2/data")
    begun = list(islice(before, 2))
    restore_loader(after, loader_state(before, batches_done=2))
    files = [item["file"].rpartition("/")[2] for batch in [*begun, *after] for item in batch]
    assert files == [f"{number}.png" for number in range(1, 20, 2)]


class Huge(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"ballast": "x" * 10**6}


class Unpicklable(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"function": lambda: None}


class Failing(Stateful):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError


@pytest.mark.parametrize("make", [Huge, Unpicklable, Failing])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_that_cannot_be_kept_leaves_the_stream_to_be_read_again(make: Any, workers: int) -> None:
    job = Job(make, workers=workers)
    whole = job.passes(job.start(), 1)[0]
    _, state = step(job.start(), 2)
    assert all(not own for _, own, _ in from_text(state["states"])["streams"])
    assert job.passes(job.start(state), 1)[0] == [rank[2:] for rank in whole]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_restored_comes_next_although_another_pass_ends_before(workers: int) -> None:
    (loader, _), (other, _) = Job(Shards, workers=workers).start(), Job(Shards, workers=workers).start()
    running = iter(loader)
    begun = [next(running) for _ in range(2)]
    restore_loader(loader, loader_state(loader))
    rest = list(running)
    assert list(loader) == rest
    assert begun + rest == list(other)


# What cannot be told from a stream that goes on.


class Running(IterableDataset[Any]):
    """``iter()`` returns one running reader, as of a socket: the dataset itself is no iterator."""

    def __init__(self) -> None:
        self.rows = iter([0] * 20 + [*range(1, 21)])  # it begins alike

    def __iter__(self) -> Iterator[Any]:
        return self.rows


def test_a_reader_that_goes_on_is_not_read_again() -> None:
    loader = patch_dataloader_to_ddp(DataLoader(Running(), 2, collate_fn=as_it_is), rank=0, num_replicas=2)
    list(islice(loader, 3))
    restore_loader(loader, loader_state(loader, batches_done=3))
    with raises(StateError, "its first 8 items differ", "rebuild a dataset"):
        list(loader)


class Masked(IterableDataset[Any]):
    """Masks words as an unseeded generator says: other numbers at each reading, with names that stay."""

    def __iter__(self) -> Iterator[Any]:
        chance = random.Random()
        for number in range(24):
            yield {"id": f"text {number}", "words": [chance.randrange(1000) for _ in range(9)]}


@pytest.mark.parametrize("workers", [0, 2])
def test_augmented_words_do_not_stop_a_resumed_run(workers: int) -> None:
    def made() -> Any:
        given = DataLoader(Masked(), 3, num_workers=workers, collate_fn=as_it_is)
        return patch_dataloader_to_ddp(given, rank=1, num_replicas=2)

    stopped, again = made(), made()
    begun = list(islice(stopped, 2))
    restore_loader(again, loader_state(stopped, batches_done=2))
    names = [item["id"] for batch in [*begun, *again] for item in batch]
    assert names == [f"text {number}" for number in range(1, 24, 2)]
