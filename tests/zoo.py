"""The kinds of loader that the contract, and real ranks, are tried on.

A kind's ``make`` builds the loader as a user would, from ambient randomness that the caller has seeded in any way.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import count, islice, zip_longest
from typing import Any

import iterables
import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from ddp_patch.positions_and_padding import Plan
from ddp_patch.samplers import (
    GroupedBatchSampler,
    IterationBatchSampler,
    LengthBucketBatchSampler,
    PKBatchSampler,
    ScalableRandomSampler,
    WeightedClassSampler,
    WindowSampler,
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


class ShufflesByEpoch:
    """Shuffles by a generator of its own, as samplers with ``set_epoch`` do."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(N).tolist())


class EpochSeeded(ShufflesByEpoch, Sampler[int]):
    def __init__(self) -> None:
        self.epoch = 0


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


# What only some versions of torch's loader take.
NEWER: dict[str, Any] = {"in_order": False} if "in_order" in signature(DataLoader).parameters else {}


def out_of_order(given: DataLoader[Any]) -> DataLoader[Any]:
    """Have a loader give its batches as its workers finish them. The option is torch 2.6's; all keep it so."""
    vars(given)["in_order"] = False
    return given


def as_it_is(batch: Any) -> Any:
    return batch


def drawn(draw: Callable[[], int], lazily: bool) -> Callable[[], DataLoader[Any]]:
    return lambda: loader(sampler=Drawn(draw, lazily))


class TokenBatches(Sampler[list[int]]):
    """Batches under a token budget: how many there are is known when they have been made."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        tokens = 0
        for index in torch.randperm(N).tolist():
            length = 1 + index % 7
            if tokens + length > 12:
                yield batch
                batch, tokens = [], 0
            batch.append(index)
            tokens += length
        yield batch


class Forever(Sampler[int]):
    """Shuffles again and again."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(N).tolist()


class Says(Sampler[int]):
    """Yields N indices and says that there are more or fewer."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N).tolist())


class Varying(Sampler[int]):
    """As long as it likes, anew each epoch."""

    length = N

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.length = 10 + random.randrange(20)
        yield from range(self.length)


class Rotating(Sampler[int]):
    """Begins each pass one later: its state is its own."""

    def __init__(self) -> None:
        self.start = 0

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        self.start += 1
        return (i % N for i in range(self.start, self.start + N))


class Own(Sampler[int]):
    """Shuffles by a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, permutation: Callable[[], Iterable[int]]) -> None:
        self.permutation = permutation

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter([int(i) for i in self.permutation()])


def shuffled_by(generator: random.Random) -> list[int]:
    items = list(range(N))
    generator.shuffle(items)
    return items


class ByAspect(BatchSampler):
    """A BatchSampler with a constructor of its own: batches of wide or of high pictures."""

    def __init__(self, sampler: Sampler[int], wide: set[int], size: int) -> None:
        self.sampler, self.wide, self.batch_size, self.drop_last = sampler, wide, size, False

    def __len__(self) -> int:
        return -(-len(self.wide) // self.batch_size) + -(-(N - len(self.wide)) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        groups: dict[bool, list[int]] = {True: [], False: []}
        for index in self.sampler:
            group = groups[index in self.wide]
            group.append(index)
            if len(group) == self.batch_size:
                yield group[:]
                group.clear()
        yield from (group for group in groups.values() if group)


class Reused(Sampler[list[int]]):
    """Yields one list again and again, with other items in it, and empties it afterwards."""

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for start in torch.randperm(7).tolist():
            batch[:] = range(start * 3, start * 3 + 1 + start % 3)
            yield batch
        batch.clear()


class Unequal(Sampler[list[int]]):
    """Batches of 1 to 9 samples, drawn anew in each epoch, of which one process alone knows how many there are."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        indices = torch.randperm(self.n).tolist()
        while indices:
            size = int(torch.randint(1, 10, ()))
            yield indices[:size]
            indices = indices[size:]


class Bare:
    """An iterable that has nothing but ``__iter__``."""

    def __init__(self, items: Iterable[int]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return (item for item in self.items if item is not None)


class Broken(Indices):
    """Raises an error for one index."""

    def __init__(self, index: int, error: Exception | None = None) -> None:
        super().__init__(N)
        self.index, self.error = index, error or ValueError("this one is broken")

    def __getitem__(self, index: int) -> int:
        if index == self.index:
            raise self.error
        return index


class Source(IterableDataset[int]):
    """A stream of n items, which splits itself over workers or not, and shuffles with the global states or not."""

    def __init__(self, n: float = N, splits: bool = False, shuffles: bool = False) -> None:
        self.n, self.splits, self.shuffles = n, splits, shuffles

    def __iter__(self) -> Iterator[int]:
        items: Iterable[int] = count() if self.n == float("inf") else range(int(self.n))
        if self.shuffles:
            items = list(items)
            random.shuffle(items)
        info = get_worker_info()
        return islice(items, info.id, None, info.num_workers) if self.splits and info else iter(items)


class EpochSource(ShufflesByEpoch, IterableDataset[int]):
    """A stream that shuffles by its own set_epoch."""


class Logged(DataLoader[Any]):
    """A subclass with required arguments of its own, stored under other names, and a property."""

    def __init__(self, source: Dataset[Any], log: list[str]) -> None:
        super().__init__(source, batch_size=4, shuffle=True, collate_fn=as_it_is)
        self.journal = log

    @property
    def entries(self) -> int:
        return len(self.journal)


def stream(workers: int = 0, persistent: bool = False, **source: Any) -> Callable[[], DataLoader[Any]]:
    return read_by(partial(Source, **source), workers, persistent_workers=persistent)


def read_by(
    make: Callable[..., IterableDataset[int]], workers: int = 0, *given: Any, **options: Any
) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(make(*given), batch_size=3, num_workers=workers, collate_fn=as_it_is, **options)


# How many items each worker reads.
RUNS, SHARDS = (16, 7), (2, 14, 7)


@dataclass(frozen=True)
class Kind:
    """One kind of loader.

    Attributes:
        name: As in docs/compatibility.md.
        make: Builds the loader.
        shuffles: Epochs differ.
        batches: Whole batches are shared.
        sized: It has a length, which is right.
        stateful: What an epoch holds depends on what was drawn before, not on its number.
        endless: There is no end; the first ``STEPS`` steps of each epoch are looked at.
        epochs: How many epochs it lasts.
        warning: What a warning tells, if there is one.
        parts: How many items each of its workers reads, where each reads a part of its own.
    """

    name: str
    make: Callable[[], DataLoader[Any]]
    shuffles: bool = True
    batches: bool = False
    sized: bool = True
    stateful: bool = False
    endless: bool = False
    epochs: int = 3
    warning: tuple[str, ...] | None = None
    parts: tuple[int, ...] = ()

    @property
    def tried(self) -> int:
        """How many epochs are tried; with workers, two: another one that does as the epoch before shows nothing new."""
        return min(self.epochs, 2) if self.make().num_workers else self.epochs

    def of_rank(self, stream: list[Any], plan: Plan) -> list[Any]:
        """Return a rank's share of what one process gets: of the stream, or of each worker's part of it."""
        size = self.make().batch_size or 1
        parts = in_parts(stream, self.parts or [len(stream)], size)
        return in_turns([share_of(part, plan) for part in parts], size)


def share_of(stream: Sequence[Any], plan: Plan) -> list[Any]:
    return [stream[place % len(stream)] for place in plan.share(len(stream))]


def in_parts(stream: Iterable[Any], lengths: Sequence[int], size: int) -> list[list[Any]]:
    """Undo ``in_turns``: give each worker its batches back."""
    found: list[list[Any]] = [[] for _ in lengths]
    items = iter(stream)
    for _ in range(max(lengths)):
        for part, length in zip(found, lengths, strict=True):
            part += islice(items, min(size, length - len(part)))
    assert next(items, None) is None
    return found


def in_turns(parts: Sequence[list[Any]], size: int) -> list[Any]:
    """Return the items of workers that take turns at giving a batch of theirs."""
    batches = ([part[start : start + size] for start in range(0, len(part), size)] for part in parts)
    return [item for turn in zip_longest(*batches, fillvalue=()) for batch in turn for item in batch]


STEPS = 5  # of an endless loader

in_batches = partial(Kind, batches=True)
with_state = partial(Kind, stateful=True)
streamed = partial(Kind, sized=False, shuffles=False)

KINDS = [
    # Samplers of torch's.
    Kind("sequential", loader, shuffles=False),
    Kind("sequential, drop_last", lambda: loader(drop_last=True), shuffles=False),
    Kind("shuffle=True", lambda: loader(shuffle=True)),
    Kind("shuffle=True, generator", lambda: loader(shuffle=True, generator=seeded_generator()), stateful=True),
    Kind("random with replacement", lambda: loader(sampler=RandomSampler(Indices(), replacement=True, num_samples=70))),
    Kind("random, num_samples", lambda: loader(sampler=RandomSampler(Indices(), num_samples=N + 6))),
    Kind("subset", lambda: loader(sampler=SubsetRandomSampler(range(3, 20)))),
    Kind("weighted", lambda: loader(sampler=WeightedRandomSampler(range(1, N + 1), num_samples=31))),
    Kind(
        "weighted, generator",
        lambda: loader(sampler=WeightedRandomSampler(range(1, N + 1), 31, generator=seeded_generator())),
        stateful=True,
    ),
    # Samplers of the user's, by the randomness that they use.
    Kind("torch's global state, lazily", drawn(by_torch, lazily=True)),
    Kind("torch's global state, at once", drawn(by_torch, lazily=False)),
    Kind("numpy's global state, lazily", drawn(by_numpy, lazily=True)),
    Kind("numpy's global state, at once", drawn(by_numpy, lazily=False)),
    Kind("numpy's normals, lazily", drawn(by_numpy_normal, lazily=True)),
    Kind("random's global state, lazily", drawn(by_python, lazily=True)),
    Kind("random's global state, at once", drawn(by_python, lazily=False)),
    Kind("all three global states, lazily", drawn(by_all, lazily=True)),
    Kind("own set_epoch", lambda: loader(sampler=EpochSeeded())),
    Kind(
        "own torch.Generator",
        lambda: loader(sampler=Own(partial(torch.randperm, N, generator=seeded_generator()))),
        stateful=True,
    ),
    with_state("own numpy Generator", lambda: loader(sampler=Own(partial(np.random.default_rng(5).permutation, N)))),
    with_state("own numpy RandomState", lambda: loader(sampler=Own(partial(np.random.RandomState(5).permutation, N)))),
    Kind("own random.Random", lambda: loader(sampler=Own(partial(shuffled_by, random.Random(5)))), stateful=True),
    # Samplers of any shape.
    Kind("a list", lambda: loader(sampler=list(range(N))), shuffles=False),
    Kind("a range", lambda: loader(sampler=range(5, 40, 2)), shuffles=False),
    Kind("an iterator, once", lambda: loader(sampler=iter(range(N))), sized=False, shuffles=False, epochs=1),
    Kind("a sampler without len", lambda: loader(sampler=Bare(range(N))), sized=False, shuffles=False),
    Kind("endless: itertools.count", lambda: loader(sampler=count()), sized=False, endless=True),
    Kind("endless: shuffling for ever", lambda: loader(sampler=Forever()), sized=False, endless=True),
    Kind("len too long", lambda: loader(sampler=Says(N + 9)), sized=False, warning=("Says", "23", "32")),
    Kind("len too short", lambda: loader(sampler=Says(N - 9)), sized=False, warning=("Says", "23", "14")),
    Kind("a length that changes", lambda: loader(sampler=Varying()), sized=False),
    Kind("a state that __iter__ changes", lambda: loader(sampler=Rotating()), stateful=True),
    Kind("fewer items than ranks", lambda: loader(sampler=[0, 1]), shuffles=False),
    Kind("one item", lambda: loader(sampler=[7]), shuffles=False),
    Kind("no item", lambda: loader(sampler=[]), shuffles=False),
    # Keys of any type.
    Kind("tuple keys", lambda: loader(sampler=[(i, str(i)) for i in range(N)]), shuffles=False),
    Kind("string keys", lambda: loader(sampler=[f"{i}.jpg" for i in range(N)]), shuffles=False),
    Kind("dict keys", lambda: loader(sampler=[{"at": i} for i in range(N)]), shuffles=False),
    Kind("tensor keys", lambda: loader(sampler=torch.arange(N)), shuffles=False),
    Kind("numpy keys", lambda: loader(sampler=np.arange(N)), shuffles=False),
    Kind("None among the keys", lambda: loader(sampler=[None if i % 5 else [i] for i in range(N)]), shuffles=False),
    # Batch samplers.
    Kind("torch's batch sampler", lambda: loader(batch_sampler=BatchSampler(RandomSampler(Indices()), 4, False))),
    Kind("P x K batches", lambda: loader(batch_sampler=PKBatches()), batches=True),
    Kind(
        "nested batch samplers",
        lambda: loader(batch_sampler=Reversed(BatchSampler(EpochSeeded(), 4, drop_last=True))),
        batches=True,
    ),
    Kind(
        "aspect-ratio batches",
        lambda: loader(batch_sampler=ByAspect(RandomSampler(Indices()), set(range(9)), 4)),
        batches=True,
    ),
    Kind("token-budget batches without len", lambda: loader(batch_sampler=TokenBatches()), batches=True, sized=False),
    Kind("a list of lists", lambda: loader(batch_sampler=[[1, 2], [3], [4, 5, 6]]), batches=True, shuffles=False),
    Kind("a batch that is used again", lambda: loader(batch_sampler=Reused()), batches=True),
    Kind("batch_size=None", lambda: loader(batch_size=None, sampler=RandomSampler(Indices()))),
    Kind(
        "batch_size=None, batches",
        lambda: loader(batch_size=None, sampler=BatchSampler(SequentialSampler(Indices()), 4, False)),
        shuffles=False,
        batches=True,
    ),
    # Loaders.
    Kind("a loader subclass", lambda: Logged(Indices(), ["made"])),
    Kind("persistent workers", lambda: loader(shuffle=True, num_workers=2, persistent_workers=True)),
    Kind("pin_memory", lambda: loader(shuffle=True, pin_memory=True)),
    # Iterable datasets.
    Kind("iterable", stream(), shuffles=False, sized=False),
    Kind("iterable, 2 workers", stream(2), shuffles=False, sized=False),
    Kind("iterable, splits itself, 2 workers", stream(2, splits=True), shuffles=False, sized=False, parts=(12, 11)),
    Kind("iterable, splits itself, 4 workers", stream(4, splits=True), shuffles=False, sized=False, parts=(6, 6, 6, 5)),
    Kind("iterable, global random states, 2 workers", stream(2, shuffles=True), sized=False),
    Kind(
        "iterable, persistent workers",
        stream(2, persistent=True, splits=True, shuffles=True),
        sized=False,
        parts=(12, 11),
    ),
    Kind("iterable, shorter than ranks x workers x batch", stream(4, n=5), shuffles=False, sized=False),
    Kind("iterable, empty", stream(2, n=0), shuffles=False, sized=False),
    Kind("iterable, endless", stream(2, n=float("inf")), shuffles=False, sized=False, endless=True),
    Kind("iterable with len and set_epoch", lambda: DataLoader(EpochSource(), batch_size=3, collate_fn=as_it_is)),
    Kind(
        "iterable with set_epoch, persistent workers",
        lambda: DataLoader(EpochSource(), 3, collate_fn=as_it_is, num_workers=2, persistent_workers=True),
    ),
    Kind("iterable, batch_size=None", lambda: DataLoader(Source(), batch_size=None), shuffles=False, sized=False),
    # Iterable datasets, by what they make of the worker that reads them. Unequal shards have 2, 14, 0 and 7 items.
    streamed(
        "iterable, a shard for each worker, 3 workers", read_by(iterables.ShardPerWorker, 3, SHARDS), parts=SHARDS
    ),
    streamed("iterable, unequal shards, 2 workers", read_by(iterables.Shards, 2), parts=(2, 21)),
    streamed("iterable, unequal shards with len, 3 workers", read_by(iterables.SizedShards, 3), parts=(9, 14, 0)),
    Kind("iterable, unequal shards, no workers", read_by(iterables.SizedShards), shuffles=False),
    streamed("iterable, a run for each worker, 2 workers", read_by(iterables.RunPerWorker, 2, RUNS), parts=RUNS),
    streamed("iterable, the iterator has a state, 2 workers", read_by(iterables.RunWithState, 2, RUNS), parts=RUNS),
    streamed("iterable, the dataset has a state, 2 workers", read_by(iterables.HasState, 2, RUNS), parts=RUNS),
    Kind("iterable, its own iterator", read_by(iterables.OwnIterator), shuffles=False, sized=False),
    Kind("iterable, its own iterator, 2 workers", read_by(iterables.OwnIterator, 2), shuffles=False, sized=False),
    streamed("iterable, its own iterator with a state, 2 workers", read_by(iterables.OwnIteratorWithState, 2)),
    streamed("iterable, its own iterator, once", read_by(partial(iterables.OwnIterator, begins_anew=False)), epochs=1),
    Kind(
        "iterable, shuffled by worker seed, 2 workers", read_by(iterables.SeededByWorker, 2), sized=False, parts=(2, 21)
    ),
    Kind(
        "iterable, split by worker_init_fn, 2 workers",
        read_by(iterables.SplitByInit, 2, worker_init_fn=iterables.init_splits),
        shuffles=False,
        sized=False,
        parts=(2, 21),
    ),
]

LABELS = [0] * 12 + [1] * 7 + [2] * 4  # of N samples
LENGTHS = [1 + 7 * i % 11 for i in range(N)]
GROUPS = [length % 3 for length in LENGTHS]


def pk_batches(**options: Any) -> PKBatchSampler:
    return PKBatchSampler(["abcde"[i % 5] for i in range(N)], p=2, k=2, **options)


def grouped(sampler: Iterable[int]) -> DataLoader[Any]:
    return loader(batch_sampler=GroupedBatchSampler(sampler, GROUPS, 3))


def by_iterations(batch_sampler: Iterable[list[int]], start_iteration: int = 0) -> DataLoader[Any]:
    return loader(batch_sampler=IterationBatchSampler(batch_sampler, 11, start_iteration))


# Samplers of ddp_patch.samplers, which docs/compatibility.md does not compare with other libraries.
OUR_KINDS = [
    Kind("class-weighted", lambda: loader(sampler=WeightedClassSampler(LABELS, [1, 1, 2], 31))),
    Kind(
        "class-weighted, generator",
        lambda: loader(sampler=WeightedClassSampler(LABELS, [1, 1, 2], 31, generator=seeded_generator())),
        stateful=True,
    ),
    Kind("scalable", lambda: loader(sampler=ScalableRandomSampler(N))),
    with_state("scalable, generator", lambda: loader(sampler=ScalableRandomSampler(N, generator=seeded_generator()))),
    Kind("windows", lambda: loader(sampler=WindowSampler(N, 3))),
    Kind("windows in their order", lambda: loader(sampler=WindowSampler(N, 4, 2, shuffle=False, seed=5))),
    Kind("PKBatchSampler", lambda: loader(batch_sampler=pk_batches()), batches=True),
    Kind("PKBatchSampler, seed", lambda: loader(batch_sampler=pk_batches(seed=5)), batches=True),
    in_batches("length buckets", lambda: loader(batch_sampler=LengthBucketBatchSampler(LENGTHS, max_tokens=20))),
    Kind(
        "length buckets, seed",
        lambda: loader(batch_sampler=LengthBucketBatchSampler(LENGTHS, batch_size=3, seed=5)),
        batches=True,
    ),
    Kind("grouped, in order", lambda: grouped(range(N)), shuffles=False, batches=True),
    Kind("grouped, shuffled", lambda: grouped(RandomSampler(Indices())), batches=True),
    Kind("grouped, drawn with replacement", lambda: grouped(WeightedRandomSampler(range(1, N + 1), 31)), batches=True),
    Kind(
        "grouped, other samples each epoch, seed",
        lambda: grouped(WeightedClassSampler(LABELS, [1, 1, 2], 13, seed=5)),
        batches=True,
    ),
    Kind("iterations", lambda: by_iterations(BatchSampler(RandomSampler(Indices()), 4, False), 3), batches=True),
    Kind("iterations, set_epoch", lambda: by_iterations(BatchSampler(EpochSeeded(), 4, False)), batches=True),
]
ALL_KINDS = [*KINDS, *OUR_KINDS]
BY_NAME = {kind.name: kind for kind in ALL_KINDS}


def units(kind: Kind, loader: Any, steps: int = STEPS) -> list[Any]:
    """One epoch as what was shared: items, or whole batches; after checking that len() told the number of steps.

    For an endless loader, the first ``steps`` steps.
    """
    batches = list(islice(loader, steps) if kind.endless else loader)
    if kind.sized:
        assert len(loader) == len(batches)
    if kind.batches:
        return [tuple(map(comparable, batch)) for batch in batches]
    items = batches if loader.batch_sampler is None else [item for batch in batches for item in batch]
    return [comparable(item) for item in items]


def comparable(item: Any) -> Any:
    """The item with its type, where its value alone would compare equal to another type's or not at all."""
    return (type(item), item.tolist()) if isinstance(item, torch.Tensor | np.generic) else item


def assert_shared_exactly(shares: list[list[int]], n: int) -> None:
    """Every one of n items is somebody's, and only what fills up the last round is somebody else's too."""
    together = Counter(item for share in shares for item in share)
    assert set(together) == set(range(n))
    assert len({len(share) for share in shares}) == 1
    assert together.total() - n < len(shares)


def seed_ambient(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # torch.manual_seed does so too, and takes a hundred times as long
    np.random.seed(seed)
    random.seed(seed)


def draw_ambient(times: int = 1) -> list[tuple[float, float, float]]:
    """Draw as other code of a training script does."""
    return [(float(torch.rand(())), float(np.random.randn()), random.gauss(0, 1)) for _ in range(times)]
