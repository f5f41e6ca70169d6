"""Programs of users that are stopped and go on, beside those of ``zoo``; and a state on its way through a file."""

import io
import json
import pickle
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from iterables import Goes, Standing
from repeaters import Infinite, MultiEpochs
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from zoo import Bare, Indices, Kind, N, Source, as_it_is, loader, seeded_generator

from ddp_patch.samplers import GroupedBatchSampler, WeightedClassSampler

__all__ = [
    "OF_ANY_SIZE",
    "RESUMED",
    "BeginsAnew",
    "ByClass",
    "Fetched",
    "Lazily",
    "Parts",
    "Shuffled",
    "as_saved",
    "of",
]


def as_saved(state: dict[str, Any]) -> Any:
    """The state by way of a file, in each of the three forms."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert json.loads(json.dumps(state)) == loaded == state
    return pickle.loads(pickle.dumps(loaded))  # noqa: S301 - our own


class Shuffled(Sampler[int]):
    """Drawn, not looked up; counts what is drawn."""

    def __init__(self, n: int = 40) -> None:
        self.n = n
        self.drawn: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        for index in torch.randperm(self.n).tolist():
            self.drawn.append(index)
            yield index


class Fetched(Dataset[int]):
    """Counts what is fetched."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        self.fetched.append(index)
        return index


class SavedCounter(Sampler[list[int]]):
    """Keeps its count where its own methods alone find it, and holds what has no attributes."""

    def __init__(self) -> None:
        self._passes, self.sampler, self.rate = [0], range(10), np.float64(0.5)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        self._passes[0] += 1
        self.rate += 1
        return iter([[2 * index, self._passes[0]] for index in range(5)])

    def state_dict(self) -> dict[Any, Any]:
        return {("passes", 1): self._passes}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self._passes = state["passes", 1]


class Lazily(Sampler[int]):
    """Draws with each item, from a generator of its own, and says that there are fewer."""

    def __init__(self, n: int) -> None:
        self.n, self.own = n, seeded_generator()

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[int]:
        return (1000 * index + int(torch.randint(1000, (), generator=self.own)) for index in range(self.n))


class BeginsAnew(Sampler[int]):
    """As each of lhotse's samplers: iter() goes back to the beginning of the epoch and returns the sampler itself."""

    def __init__(self, n: int = 300, shuffle: bool = True) -> None:
        self.n, self.shuffle, self.epoch = n, shuffle, 0
        self.left: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.left = list(range(self.n))
        if self.shuffle:
            random.Random(self.epoch).shuffle(self.left)
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()


class Reversing(Sampler[int]):
    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # it has one

    def __iter__(self) -> Iterator[int]:
        return reversed(list(self.sampler))


class Permuted(IterableDataset[int]):
    """Shuffles by a generator that it shares with its loader."""

    def __init__(self, own: torch.Generator) -> None:
        self.own = own

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(N, generator=self.own).tolist())


class Reseeded(IterableDataset[int]):
    """Has a generator of its own, which ``set_epoch`` seeds."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(50 + epoch)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(N, generator=self.generator).tolist()


class Parts(IterableDataset[int]):
    """Split over its workers, which read unequally much."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(number * 11, 11 if number + 1 < workers else N))


class OwnCountsEpochs(IterableDataset[Any]):
    """Its own iterator, of which each epoch has other items. With a state of its own, as those below."""

    def __init__(self) -> None:
        self.at = self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == N:
            self.at, self.epoch = 0, self.epoch + 1
            raise StopIteration
        self.at += 1
        return self.at, self.epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Draws(OwnCountsEpochs):
    """Its state has the global generator's, and more keys at each item."""

    def __next__(self) -> Any:
        return super().__next__(), int(torch.randint(1000, ()))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **{str(at): at for at in range(self.at)}, "generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        torch.set_rng_state(state["generator"])


class OwnFromIter(IterableDataset[Any]):
    """Its own iterator, which has a state only once ``iter()`` was called: that begins anew."""

    def __iter__(self) -> Iterator[Any]:
        self.place = Goes([*Parts()])
        return self

    def __next__(self) -> Any:
        return next(self.place)

    def state_dict(self) -> dict[str, Any]:
        return {"nest": self.place.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place.load_state_dict(state["nest"])


class BothHave(IterableDataset[Any]):
    """Its iterator has the place, and it has the epoch, which ``iter()`` begins."""

    epoch = -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return Goes([1000 * self.epoch + item for item in Parts()])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


class CountsEpochs(IterableDataset[Any]):
    """A generator that goes on from its state, and counts the epochs at their ends."""

    at = begins = epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begins = self.begins, 0
        for item in [*Parts()][self.at :]:
            self.at += 1
            yield item, self.epoch
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins, self.epoch = state["at"], state["epoch"]


class ShuffledShards(IterableDataset[Any]):
    """Shuffles its worker's part by the global states, goes on by its own state, and draws with each item."""

    place = 0

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[Any]:
        part = [*Parts()]
        order = torch.randperm(len(part)).tolist()
        while self.place < len(part):
            self.place += 1
            noise = torch.randint(1000, ()), torch.randint(1000, (), generator=self.generator)
            yield part[order[self.place - 1]], *map(int, noise)
        self.place = 0


class ByClass(BatchSampler):
    """A batch sampler of the user's own, which is shared in whole batches."""


def of(dataset: Any = None, batch_size: int | None = 2, **options: Any) -> Callable[[], DataLoader[Any]]:
    data: Any = Indices(N) if dataset is None else dataset
    return lambda: DataLoader(data, batch_size, collate_fn=as_it_is, **options)


def sharing_a_generator(whole_batches: bool = False, workers: int = 0) -> DataLoader[Any]:
    own = seeded_generator()
    sampler = RandomSampler(range(12), generator=own)
    options: Any = {"batch_sampler": BatchSampler(Reversing(sampler), 2, False)} if whole_batches else {}
    return loader(2, generator=own, num_workers=workers, **options or {"sampler": sampler})


def permuted(workers: int) -> DataLoader[Any]:
    own = seeded_generator()
    return DataLoader(Permuted(own), 2, generator=own, num_workers=workers, collate_fn=as_it_is)


def of_other_lengths(seed: int) -> DataLoader[Any]:
    drawn = WeightedClassSampler([0] * 100, [1], 40, seed=seed)
    return loader(batch_sampler=GroupedBatchSampler(drawn, [index % 40 for index in range(100)], 4))


def by_class() -> BatchSampler:
    return ByClass(RandomSampler(range(N)), 2, drop_last=False)


def stateful(kind: Callable[[], IterableDataset[Any]], **options: Any) -> DataLoader[Any]:
    return of(kind(), **options)()


ahead: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 3}
kept: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
RESUMED = [
    # How a loader is iterated: what workers fetch ahead does not count.
    Kind("last batch dropped", of(shuffle=True, drop_last=True)),
    Kind("workers", of(shuffle=True, **ahead)),
    Kind("workers, generator", of(shuffle=True, generator=seeded_generator(), **ahead)),
    Kind("pickled", of(num_workers=1, multiprocessing_context="forkserver")),
    Kind("single items", of(batch_size=None, shuffle=True)),
    Kind("whole batches", lambda: loader(batch_sampler=by_class(), **ahead), batches=True),
    Kind("stream, persistent", of(Source(), **kept), sized=False),
    Kind("parts", of(Parts(), num_workers=2), sized=False),
    Kind("single items of parts", of(Parts(), None, num_workers=2), sized=False),
    Kind("one iterator for all", lambda: MultiEpochs(Indices(N), 4, shuffle=True, collate_fn=as_it_is)),
    Kind("one iterator for all, workers", lambda: Infinite(Indices(N), 2, num_workers=2, collate_fn=as_it_is)),
    Kind("one iterator for all, batches", lambda: Infinite(Indices(N), batch_sampler=by_class(), collate_fn=as_it_is)),
    # What the order follows from.
    Kind("a generator shared with the sampler", sharing_a_generator),
    Kind("a generator shared with the sampler, workers", lambda: sharing_a_generator(workers=2)),
    Kind("a generator shared, whole batches", lambda: sharing_a_generator(True), batches=True),
    Kind("a generator shared, whole batches, workers", lambda: sharing_a_generator(True, 2), batches=True),
    Kind("a generator shared with the dataset", lambda: permuted(0)),
    Kind("a generator shared with the dataset, worker", lambda: permuted(1)),
    Kind("seeds its generator in set_epoch", of(Reseeded()), sized=False),
    Kind("seeds its generator in set_epoch, workers", of(Reseeded(), num_workers=2), sized=False),
    Kind("a state of the sampler's own", lambda: loader(batch_sampler=SavedCounter()), batches=True),
    Kind("its own iterator, which begins anew", lambda: loader(sampler=BeginsAnew(N)), sized=False),
    Kind("one by one, and a length that is too small", lambda: loader(1, sampler=Lazily(20)), sized=False),
    Kind("a length that is too small, endless", lambda: loader(sampler=Lazily(10**9)), sized=False, endless=True),
    # Streams with a state of their own, as torchdata's tests have them.
    *(
        Kind(f"{kind.__name__}, {how.get('num_workers', 0)} workers", partial(stateful, kind, **how), sized=False)
        for kind in (OwnCountsEpochs, Draws, OwnFromIter, BothHave, CountsEpochs, ShuffledShards)
        for how in ({}, {"num_workers": 2} if kind is ShuffledShards else kept)  # kept workers advance its generator
    ),
    Kind("other numbers of batches", lambda: of_other_lengths(1), batches=True),
]


class Unsized(Sampler[int]):
    """Draws its items one by one; an epoch has between n - 3 and n of them, and tells no length."""

    def __init__(self, n: int, own: torch.Generator | None = None) -> None:
        self.n, self.own = n, own

    def __iter__(self) -> Iterator[int]:
        for index in range(max(0, self.n - int(torch.randint(4, (), generator=self.own)))):
            yield index + 100 * int(torch.randint(9, (), generator=self.own))


class Batches(Sampler[list[int]]):
    """Shuffled batches of any size."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[list[int]]:
        for index in torch.randperm(self.n).tolist():
            yield [index] * int(torch.randint(1, 4, ()))


def drawn(n: int, size: int, sampler: Any, **options: Any) -> DataLoader[Any]:
    """A loader whose sampler may be one that torch makes for no empty data."""
    return DataLoader(Indices(n), size, sampler=sampler if n else [], collate_fn=as_it_is, **options)


def by_a_generator(n: int, size: int) -> DataLoader[Any]:
    own = seeded_generator()
    return drawn(n, size, n and RandomSampler(range(n), generator=own), generator=own)


# By the number of items, or of batches, and the size of a batch.
OF_ANY_SIZE: dict[str, Callable[[int, int], DataLoader[Any]]] = {
    "sequential": lambda n, size: drawn(n, size, range(n)),
    "shuffled": lambda n, size: drawn(n, size, n and RandomSampler(range(n))),
    "by a generator": lambda n, size: drawn(n, size, n and RandomSampler(range(n), generator=seeded_generator())),
    "by a generator of the loader, too": by_a_generator,
    "in several turns": lambda n, size: drawn(n, size, n and RandomSampler(range(n), num_samples=2 * n + 1)),
    "weighted": lambda n, size: drawn(n, size, n and WeightedRandomSampler([1.0] * (n + 1), n)),
    "without length": lambda n, size: drawn(n, size, Unsized(n)),
    "without length, by a generator": lambda n, size: drawn(n, size, Unsized(n, seeded_generator())),
    "bare": lambda n, size: drawn(n, size, Bare(range(n))),
    "stream": lambda n, size: of(Source(n, shuffles=True), size)(),
    "stream with a state": lambda n, size: of(Standing(n), size)(),
    "batches": lambda n, _: DataLoader(Indices(n), batch_sampler=Batches(n), collate_fn=as_it_is),
    "batches without collation": lambda n, _: DataLoader(Indices(n), batch_size=None, sampler=Batches(n)),
}
