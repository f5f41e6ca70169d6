"""What users bring, for the programs of ``same_programs.py``: datasets, samplers, batch samplers and streams."""

import random
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import cycle, islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from ddp_patch import samplers

__all__ = ["BATCHES", "KINDS", "RNGS", "SAMPLERS", "STREAMS", "Rows", "as_it_is", "cost_of_index", "counts_of"]

RNGS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "torch.Generator": lambda: torch.Generator().manual_seed(11),
    "numpy Generator": lambda: np.random.default_rng(5),
    "RandomState": lambda: np.random.RandomState(5),
    "Random": lambda: random.Random(5),
    "torch": lambda: "torch",  # the global ones, by their names: modules can be neither copied nor pickled
    "numpy": lambda: "numpy",
    "random": lambda: "random",
}


def permuted(rng: Any, n: int) -> list[int]:
    """Return a permutation that a generator of any kind draws."""
    match rng:
        case None:
            return list(range(n))
        case "torch" | torch.Generator():
            return list(map(int, torch.randperm(n, generator=None if rng == "torch" else rng)))
        case "random" | random.Random():
            return list((random if rng == "random" else rng).sample(range(n), n))
    return list(map(int, (np.random if rng == "numpy" else rng).permutation(n)))


class Rows(Dataset[Any]):
    """Rows in memory, in a form; some draw what they are augmented with."""

    fails_at: int | None = None

    def __init__(self, n: int, form: str, rng: Any) -> None:
        self.rows, self.form, self.rng = list(range(n)), form, rng

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return [self[each] for each in index]
        if index == self.fails_at:
            raise KeyError(f"no row {index}")
        row = self.rows[index]
        match self.form:
            case "dicts":
                return {"row": row, "text": f"row {row}"}
            case "augmented":
                return row, *permuted(self.rng, 4)
            case "tensors":
                return torch.arange(row, row + 2)
        return row


class Own(Sampler[int]):
    """Shuffles by a generator, all at once or item by item, and has no length."""

    fails_at: int | None = None
    shift = 0

    def __init__(self, n: int, rng: Any, is_lazy: bool) -> None:
        self.n, self.rng, self.is_lazy = n, rng, is_lazy

    def __iter__(self) -> Iterator[int]:
        for at, index in enumerate(permuted(self.rng, self.n)):
            if at == self.fails_at:
                self.fails_at = None
                raise RuntimeError(f"no item {at}")
            yield ((permuted(self.rng, 3)[0] if self.is_lazy else index) + self.shift) % self.n


class Known(Own):
    """Has a length."""

    def __len__(self) -> int:
        return self.n


class Wrong(Own):
    """Says that there are two more."""

    def __len__(self) -> int:
        return self.n + 2


class Varying(Known):
    """Has another length in each pass."""

    def __iter__(self) -> Iterator[int]:
        self.n = self.n + 5 if self.n < 15 else self.n - 8
        return super().__iter__()


class Counts(Known):
    """Begins each pass one later."""

    def __iter__(self) -> Iterator[int]:
        self.shift += 1
        return super().__iter__()


class Epochs(Known):
    """Shuffles by its own set_epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order."""
        self.rng = random.Random(epoch)


class Stateful(Counts):
    """Has a state of its own."""

    def state_dict(self) -> dict[str, int]:
        """Return where the latest pass began."""
        return {"shift": self.shift}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin there."""
        self.shift = state["shift"]


class LookedUp(Known):
    """Computes the item at any position of any epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(self.items_at(np.arange(self.n), 0).tolist())

    def items_at(self, positions: np.ndarray[Any, Any], epoch: int) -> np.ndarray[Any, Any]:
        """Return the items."""
        return cast("np.ndarray[Any, Any]", (positions * 7 + epoch + self.shift) % max(1, self.n))


class Uneven(Sampler[list[int]]):
    """Batches of one, two, three, ... and again one sample; some come in one list that is used again."""

    drop_last = False

    def __init__(self, sampler: Iterable[int], batch_size: int, reuses: bool) -> None:
        self.sampler, self.batch_size, self.reuses = sampler, batch_size, reuses

    def __iter__(self) -> Iterator[list[int]]:
        order, batch = iter(self.sampler), list[int]()
        for size in cycle(range(1, self.batch_size + 1)):
            batch = batch if self.reuses else []
            batch[:] = islice(order, size)
            if not batch:
                return
            yield batch


class KnownUneven(Uneven):
    """Knows how many there are."""

    def __len__(self) -> int:
        return len([*Uneven(range(len(cast(Sized, self.sampler))), self.batch_size, reuses=False)])


class Stream(IterableDataset[Any]):
    """A stream that is shuffled by a generator; with several workers, each reads a part if it splits itself."""

    def __init__(self, n: int, rng: Any, splits: bool) -> None:
        self.n, self.rng, self.splits = n, rng, splits

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info() if self.splits else None
        items = permuted(self.rng, self.n)
        return iter(items[info.id :: info.num_workers] if info else items)


class KnownStream(Stream):
    """Knows how long it is."""

    def __len__(self) -> int:
        return self.n


class EpochStream(KnownStream):
    """Shuffles by its own set_epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order."""
        self.rng = random.Random(epoch)


class StatefulStream(Stream):
    """Has a state: how far it is."""

    at = begins = 0

    def __iter__(self) -> Iterator[Any]:
        self.at, self.begins = self.begins, 0
        for item in islice(super().__iter__(), self.at, None):
            self.at += 1
            yield item

    def state_dict(self) -> dict[str, int]:
        """Return how far it is."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin there."""
        self.begins = state["at"]


SAMPLERS = {kind.__name__: kind for kind in (Own, Known, Wrong, Varying, Counts, Epochs, Stateful, LookedUp)}
STREAMS = {kind.__name__: kind for kind in (Stream, KnownStream, EpochStream, StatefulStream)}


def as_it_is(batch: Any) -> Any:
    """Return what is collated."""
    return batch


def cost_of_index(index: int) -> float:
    """Return what an index costs."""
    return 1.0 + 3 * index % 7


def counts_of(batch: Any) -> list[int]:
    """Return how much each sample counts, where each is a number."""
    return [1 + int(row) % 3 for row in batch]


def _labels(n: int) -> list[int]:
    return [row % 3 for row in range(n)]


# The arguments of DataLoader that make a loader of a program, whose own sampler is the second argument.
Makes = Callable[[Any, Any], dict[str, Any]]
INDICES: dict[str, Makes] = {
    "sequential": lambda p, own: {},
    "shuffle": lambda p, own: {"shuffle": True},
    "shuffle, generator": lambda p, own: {"shuffle": True, "generator": RNGS["torch.Generator"]()},
    "random": lambda p, own: {"sampler": RandomSampler(range(p.n), p.is_lazy, p.n + 5, p.generator)},
    "weighted": lambda p, own: {"sampler": WeightedRandomSampler([*range(1, p.n + 1)], p.n + 3, True, p.generator)},
    "subset": lambda p, own: {"sampler": SubsetRandomSampler(range(p.n // 3, p.n), p.generator)},
    "own": lambda p, own: {"sampler": own},
    "own, its generator": lambda p, own: {"sampler": own, "generator": own.rng if p.generator else None},
    "list": lambda p, own: {"sampler": [*range(p.n)][::-1]},
    "range": lambda p, own: {"sampler": range(0, p.n, 2)},
    "iterator": lambda p, own: {"sampler": iter(range(p.n))},
    "scalable": lambda p, own: {"sampler": samplers.ScalableRandomSampler(p.n, **p.seeded)},
    "classes": lambda p, own: {"sampler": samplers.WeightedClassSampler(_labels(p.n), [3, 2, 1], p.n, **p.seeded)},
    "windows": lambda p, own: {"sampler": samplers.WindowSampler(p.n, 3, 2, **p.seeded)},
}
BATCHES: dict[str, Makes] = {
    "torch's batches": lambda p, own: {"batch_sampler": BatchSampler(own, p.size, p.drop_last)},
    "uneven": lambda p, own: {"batch_sampler": Uneven(own, p.size, p.is_lazy)},
    "uneven, known": lambda p, own: {"batch_sampler": KnownUneven(own, p.size, p.is_lazy)},
    "list of batches": lambda p, own: {"batch_sampler": [[row, row // 2][: 1 + row % 2] for row in range(p.n)]},
    "iterator of batches": lambda p, own: {"batch_sampler": iter([[row] for row in range(p.n)])},
    "batches as items": lambda p, own: {"batch_size": None, "sampler": BatchSampler(own, p.size, p.drop_last)},
    "pk": lambda p, own: {"batch_sampler": samplers.PKBatchSampler(_labels(p.n), 2, 2, **p.seeded)},
    "lengths": lambda p, own: {
        "batch_sampler": samplers.LengthBucketBatchSampler([*range(1, p.n + 1)], max_tokens=p.n + 5, **p.seeded)
    },
    "grouped": lambda p, own: {"batch_sampler": samplers.GroupedBatchSampler(own, _labels(p.n), p.size)},
    "iterations": lambda p, own: {"batch_sampler": samplers.IterationBatchSampler(KnownUneven(own, p.size, False), 9)},
}
KINDS: dict[str, Makes] = {**INDICES, **BATCHES, "stream": lambda p, own: {}}
